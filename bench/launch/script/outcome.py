"""What a script printed -> its rows of steps.csv, its half of the record, and every reason to doubt it.

Called by the launcher once the ranks have ended: the script's lines with their times (script_run.py), what it opened
and how it ended (training/script_worker.py).
"""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NotRequired, TypedDict

from bench.base import atomic, private, utc
from bench.base.paths import REPO
from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged
from bench.base.units import ms_from_ns, s_from_ms
from bench.launch.script import opened_data, trace_files, work_folder
from bench.launch.script.script import TIMING_PROTOCOL, WALL_PROTOCOL
from bench.record import failures, outside_clock, printed_times, run_folder, step_files, validity
from bench.record.importers import dialects
from bench.record.importers.modded_nanogpt import MEANINGS
from bench.record.importers.records import Run, rows_of

OWN_DATA = {"source": "script", "vocab_size": None, "floor_nats": None, "train": [], "val": []}  # nothing is known
LOWER = "lower the script's learning rate"
NO_LINES = "the script printed no line that {} reads"
NO_VALIDATION = "the script printed no validation loss in nats a token"
NO_STEPS = "the script printed no step after step 0"


class Facts(TypedDict):
    """What a rank's worker wrote of itself at its end; the script can write there too."""

    python: NotRequired[str]
    peak_rss_gib: NotRequired[float | None]
    peak_mem_gib: NotRequired[dict[str, float | None] | None]
    torch: NotRequired[dict]
    packages: NotRequired[dict[str, str | None]]


def write(folder: Path, job, run: dict, output, telemetry: dict, waits_ns: Iterable[tuple[int, int]]) -> dict | None:
    """steps.csv, events and .result.tmp; run gets its "script" and timing protocol.  Returns a failure, or None.

    output: script_run.Output, closed; telemetry: {"summary", "doubts", "warnings"} of the launcher's sampler;
    waits_ns: as in printed_times.clock().
    """
    name = _dialect(output, job.script.dialect)
    facts = _facts_of_ranks(folder, job.config.hardware.num_processes)
    run["script"] |= {"dialect": _shown(name), "num_unkept_lines": output.num_unkept_lines}
    run["script"] |= {"opened": opened_data.shown(folder, job, facts["opened"])}
    read = [one["real"] for one in facts["opened"] if not one["writes"]]
    run["script"] |= {"used": work_folder.keep_used(folder, job.script, read)}
    runs, of_file = dialects.read(name, [text for _, text in output.lines]) if name else ([], {})
    if not runs:
        _write_result(folder, facts, {}, [], telemetry)
        which = run["script"]["dialect"] or f"a dialect ({', '.join(dialects.NAMES)})"
        return failures.failure("no_metric_lines", NO_LINES.format(which))
    foreign = runs[-1]
    rows = stamped(rows_of(foreign), output.lines, dialects.of_name(name))
    telemetry["profiles"] = trace_files.conclude(
        folder, job.config.instruments, job.config.hardware.num_processes, rows
    )
    telemetry["doubts"] = [*telemetry["doubts"], *unmatched(of_file, run["script"]["dialect"])]
    is_wall = foreign.train_time_ms is None
    if is_wall:
        count_wall(rows)
    protocol = WALL_PROTOCOL if is_wall else TIMING_PROTOCOL
    if any(row.get("flags") == "validation" for row in rows):  # nanoGPT's clock runs on in them
        protocol = protocol | {"excluded": [one for one in protocol["excluded"] if one != "validation"]}
    run["timing_protocol"] = protocol | {"instruments": run["timing_protocol"]["instruments"]}
    measured = _measured(foreign, rows, is_wall)
    meaning = MEANINGS[1] if measured["num_untimed_steps"] and not is_wall else foreign.step_avg_meaning
    run["script"] |= {"step_avg_meaning": meaning, "printed_step_avg_ms": foreign.step_avg_ms}
    run["script"] |= {"declared_steps": foreign.declared_steps}
    at_start_s = opened_data.validation_at_start_s(folder, job, facts["opened"], rows)
    seen = output.late_ns, output.gaps_ns, at_start_s, is_wall, waits_ns
    outside = printed_times.clock(rows, measured["num_untimed_steps"], *seen)
    said = [] if is_wall else printed_times.doubts(rows, measured["num_untimed_steps"], outside)
    disturbances = [] if is_wall else printed_times.disturbances(rows, measured["num_untimed_steps"], outside)
    telemetry["doubts"] += [{"rank": 0, "instrument": outside_clock.MACHINE, "doubt": doubt} for doubt in disturbances]
    if opened_data.is_own(folder, job, facts["opened"]):
        run["data"] = dict(OWN_DATA)
    said += _of_lines(foreign, runs, rows, run["data"]["vocab_size"])
    said += opened_data.doubts(folder, job, facts["opened"])
    said += opened_data.opened_while_training(folder, job, facts["opened"], rows, outside["reader_late_s"])
    said += [f"{one} changed while it ran" for one in work_folder.changed(job.script, folder / work_folder.WORK)]
    _write_steps(folder, rows)
    _write_result(folder, facts, measured, said, telemetry, {"clock": outside})
    return _failure(foreign, rows)


def _dialect(output, asked):
    return asked or dialects.detect(text for _, text in output.lines)


def rows_of_output(output, asked: str | None) -> list[dict]:
    """The stamped rows of what a script printed; asked: its script.dialect.  [] where no line is read."""
    name = _dialect(output, asked)
    runs = dialects.read(name, [text for _, text in output.lines])[0] if name else []
    return stamped(rows_of(runs[-1]), output.lines, dialects.of_name(name)) if runs else []


def stamped(rows: list[dict], lines: list[tuple[int, str]], reader) -> list[dict]:
    """rows with line_t_ns and val_line_t_ns, when the last line of a step's training and of its validation came.

    t_ns, as of our own runs, is when the step began: when the line before came.
    """
    came = {}
    for t_ns, text in lines:
        row = reader.row(text)
        if row is not None:
            came[row["step"], row.get("val_loss") is not None or "val_bpb" in row] = t_ns
    before_ns = None
    for row in rows:
        row["line_t_ns"], row["val_line_t_ns"] = came.get((row["step"], False)), came.get((row["step"], True))
        row["t_ns"] = before_ns
        if row["line_t_ns"] is not None and before_ns is not None:
            row["wall_ms"] = ms_from_ns(row["line_t_ns"] - before_ns)
        ends = [t_ns for t_ns in (row["line_t_ns"], row["val_line_t_ns"]) if t_ns is not None]
        before_ns = max(ends, default=before_ns)
    return rows


def count_wall(rows: list[dict]) -> None:
    """In place: where the script prints no total, the wall time of its lines stands for it, from the first one on."""
    ends_ns = [row["line_t_ns"] or row["val_line_t_ns"] for row in rows]
    first_ns = next((t_ns for t_ns in ends_ns if t_ns is not None), None)
    for row, t_ns in zip(rows, ends_ns, strict=True):
        if t_ns is not None:
            row["train_time_ms"] = ms_from_ns(t_ns - first_ns)
            row["step_ms"] = row.pop("wall_ms", None)


def _measured(foreign: Run, rows, is_wall):
    untimed = foreign.num_untimed_steps or printed_times.restarted_at(rows)
    if is_wall:
        untimed = next((row["step"] for row in rows if row.get("train_time_ms") is not None), 0)
    train_ms = rows[-1].get("train_time_ms") if is_wall else foreign.train_time_ms
    result = {} if train_ms is None else {"train_s_by_rank": [s_from_ms(train_ms)]}
    vals = [row for row in rows if row.get("val_loss") is not None]
    result |= {"num_untimed_steps": untimed, "num_validations": len(vals)}
    result |= printed_times.account(rows, untimed)
    return result | ({"batch_tokens": foreign.batch_tokens} if foreign.batch_tokens else {})


def unmatched(of_file, dialect):
    """A doubt of what was read, not of the script."""
    if of_file["unmatched"]:
        number, text = of_file["unmatched"][0]
        words = f"{len(of_file['unmatched'])} lines look like metric lines of {dialect} and are none; the first"
        yield {"rank": 0, "instrument": "import", "doubt": f"{words}: {text[:80]!r}"}


def _of_lines(foreign, runs, rows, vocab_size):
    """What the lines themselves give to doubt."""
    if len(runs) > 1:
        yield f"its lines are of {len(runs)} runs (steps or their number went back): the last one is recorded"
    last = foreign.declared_steps or foreign.num_steps
    if not foreign.complete and foreign.diverged_step is None:
        yield f"its last validation is of step {foreign.val_step}, and its last step is {max(last, foreign.num_steps)}"
    first_loss = rows[0].get("val_loss") if rows[0]["step"] == 0 else None
    if validity.is_trained(first_loss, vocab_size):
        yield validity.words_of_start(first_loss, vocab_size)


def _failure(foreign, rows):
    if foreign.diverged_step is not None:
        words = f"the script printed a loss that is not a number at step {foreign.diverged_step}"
        return failures.failure("non_finite_loss", words, None, foreign.diverged_step) | {"hint": LOWER}
    if not rows[-1]["step"]:
        return failures.failure("no_metric_lines", NO_STEPS)
    return None if foreign.val_loss is not None else failures.failure("no_metric_lines", NO_VALIDATION)


def _facts_of_ranks(folder, num_ranks):
    result = {"by_rank": [], "opened": []}
    for rank in range(num_ranks):
        result["by_rank"].append(_facts(folder / f".rank{rank}.facts.tmp"))
        path = folder / f".rank{rank}.opened.tmp"
        with contextlib.suppress(Damaged), plain_file.lines(path) as lines:
            for line in lines:
                with contextlib.suppress(Damaged):  # a line that a killed rank left unfinished
                    result["opened"].append(json_file.parsed(line, path, opened_data.Opened))
    return result


def _facts(path):
    try:
        return json_file.read(path, Facts)
    except Damaged:
        return {}


def _write_steps(folder, rows):
    columns = [*step_files.CORE_COLUMNS, "t_ns", "train_time_ms", "line_t_ns", "val_line_t_ns", "wall_ms"]
    columns += ["train_time_at_val_ms"] * any("train_time_at_val_ms" in row for row in rows)
    columns += ["grad_norm"] * any("grad_norm" in row for row in rows)
    rows = [{name: row.get(name) for name in columns} | {"flags": row.get("flags") or ""} for row in rows]
    step_files.write(folder, rows, columns)
    timed = printed_times.events(rows)
    now = (time.perf_counter_ns(), time.time())
    for t_ns, name, facts in [
        *((timed[0][0], "run_start", {}) for _ in timed[:1]),
        *(
            (row["val_line_t_ns"], "eval_stop", {"step": row["step"], "val_loss": row["val_loss"]})
            for row in rows
            if row["val_line_t_ns"] is not None and row["val_loss"] is not None
        ),
        *((timed[-1][0], "run_stop", {"step": timed[-1][1]}) for _ in timed[:1]),
    ]:
        event = {"t_ns": t_ns, "utc": utc.now((now[0] - t_ns) / 1e9), "event": name, **facts}
        step_files.append_event(folder, event)


def _write_result(folder, facts, measured, said, telemetry, referee=None):
    first, by_rank = (facts["by_rank"] or [{}])[0], facts["by_rank"]
    peaks = {"rss": [one.get("peak_rss_gib") for one in by_rank]}
    for kind in ("allocated", "reserved"):
        if any(kind in (one.get("peak_mem_gib") or {}) for one in by_rank):
            peaks[kind] = [(one.get("peak_mem_gib") or {}).get(kind) for one in by_rank]
    if any(peak is not None for peak in telemetry.get("device_peak_mem_gib", ())):
        peaks["device"] = telemetry["device_peak_mem_gib"]
    result = {
        "measured": measured | {"peak_mem_gib_by_rank": peaks},
        "torch_facts": _torch_facts(first) | ({"python": first["python"]} if "python" in first else {}),
        "instrument_summaries": telemetry.get("profiles", {})
        | ({"telemetry": telemetry["summary"]} if telemetry["summary"] else {}),
        "doubts": [{"rank": 0, "instrument": "script", "doubt": private.redact(one, REPO)} for one in said]
        + telemetry["doubts"],
        "referee": referee or {},
        "warnings": telemetry["warnings"],
    }
    if telemetry.get("foreign_cpu_cores") is not None:
        result["measured"]["foreign_cpu_cores"] = telemetry["foreign_cpu_cores"]
    atomic.write_json(folder / run_folder.RESULT, result)
    if first.get("packages"):  # of the script's own interpreter
        env = atomic.read_json(folder / "environment.json", {})
        packages = dict(sorted((name, version) for name, version in first["packages"].items() if name))
        atomic.write_json(folder / "environment.json", env | {"packages": packages, "python": first["python"]})


def _torch_facts(first):
    """The script's own torch; None of all where it ended well and imported none; {} where nothing is known."""
    if not first.get("torch") and "python" in first:
        return dict.fromkeys(("torch", "cuda", "cudnn", "nccl", "cpu_capability"))
    return first.get("torch") or {}


def _shown(name):
    return None if name is None else name if name in dialects.NAMES else private.redact(name, REPO)
