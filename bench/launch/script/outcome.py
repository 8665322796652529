"""Turns what a script printed and opened into rows of steps.csv, its half of the record, and every reason to doubt it.

The launcher calls it once the ranks have ended.  It reads the script's lines with their times (output.py), what the
script opened and how it ended (training/script_worker.py).
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict, cast

import msgspec

from bench.base import atomic, private, utc
from bench.base.reading import json_file, patterns
from bench.base.reading.damage import Damaged
from bench.base.units import format_bytes, ms_from_ns, s_from_ms
from bench.config.schema import GoalConfig
from bench.launch.opened import noted
from bench.launch.prepare import Job
from bench.launch.script import trace_files, work_folder
from bench.launch.script.opened_files import OpenedFiles
from bench.launch.script.output import MAX_METRIC_BYTES, Output
from bench.launch.script.script import TIMING_PROTOCOL, WALL_PROTOCOL
from bench.record import failures, metrics, outside_clock, printed_times, run_folder, step_files, validity
from bench.record.importers import dialects
from bench.record.importers.consoles import MAX_LINE_CHARS, VALIDATED, Form, as_number
from bench.record.importers.modded_nanogpt import MEANINGS
from bench.record.importers.records import PRINTED_METRICS, Run, rows_of
from bench.record.shape import Section
from bench.record.step_files import StepRow

# of a script that brings its own data: nothing is known about it
OWN_DATA: Section = {"source": "script", "vocab_size": None, "floor_nats": None, "train": [], "val": []}
MAX_METRIC = 1e100  # a larger number, and what is none, is no metric: squares of it could not be summed
LOWER = "lower the script's learning rate"
NO_VALIDATION = "the script printed no {}, which the goal needs"
NO_TOKENS = "goal.token_budget={} needs the number of tokens in a step, which the script does not print"
TOO_SHORT = "{} is used up before the end of step {}, the first that the script prints: use a larger budget"
BY_TIME = "use goal.time_budget_s instead"
MATCHING_CPU_S, OF_A_LINE_CPU_S = 60.0, 0.5e-3  # for all lines, and more for each: a known dialect takes 0.05 ms
MORE_COLUMNS = ("train_time_at_val_ms", "grad_norm", *PRINTED_METRICS)


Text = Annotated[str, msgspec.Meta(max_length=200)]
Gib = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class TorchFacts(TypedDict, total=False):
    """The facts that script_worker.torch_facts() returns."""

    torch: Text | None
    cuda: Text | None
    cudnn: int | None
    nccl: Text | None
    cpu_capability: Text | None


class Facts(TypedDict):
    """What a rank's worker wrote about itself at its end; the script itself can write such facts too."""

    python: NotRequired[Text]
    peak_rss_gib: NotRequired[Gib | None]
    peak_mem_gib: NotRequired[dict[str, Gib | None] | None]
    torch: NotRequired[TorchFacts]
    compile_flags: NotRequired[dict[Text, bool | int | float | Text | None]]
    packages: NotRequired[dict[Text, Text | None]]


def write(
    folder: Path,
    job: Job,
    run: dict[str, Any],
    output: Output,
    telemetry_of: Callable[[list[StepRow]], Section],
    waits_ns: Iterable[tuple[int, int]],
    work_shards: Mapping[str, Sequence[str]],
) -> Section | None:
    """Writes steps.csv, events and .result.tmp; adds "script" and the timing protocol to run.  Returns any failure.

    output: closed; telemetry_of(rows): {"summary", "doubts", "warnings"} of the launcher's sampler; waits_ns: as in
    PrintedTimes.clock(); work_shards: as in OpenedFiles.
    """
    assert job.script is not None
    goal, script, num_ranks = job.config.goal, job.script, job.config.hardware.num_processes or 1
    dialect = script.dialect or dialects.detect(text for _, text in output.lines)
    shown = dialect if dialect is None or isinstance(dialect, str) else script.dialect_file or "script.lines"
    facts = [_facts(folder / f".rank{rank}.facts.tmp") for rank in range(num_ranks)]
    opened = OpenedFiles(folder, job, noted(folder, num_ranks), work_shards)
    used = work_folder.keep_used(folder, script, opened.read)
    run["script"] |= {"dialect": shown, "num_unkept_lines": output.num_unkept_lines, "opened": opened.names()}
    run["script"] |= {"used": used, "data_states": opened.states()}
    run["script"] |= {"elsewhere": opened.elsewhere(), "written": opened.written()}
    printed = read(dialect, output.lines, goal)
    if printed is None:
        _write_result(folder, facts, {}, [], telemetry_of([]), {})
        which = shown or f"a dialect ({', '.join(dialects.NAMES)})"
        return failures.failure("no_metric_lines", f"the script printed no line that {which} reads")
    foreign, rows, is_wall = printed.runs[-1], printed.rows, printed.is_wall
    telemetry = telemetry_of(rows)
    telemetry["profiles"] = trace_files.conclude(folder, job.config.instruments, num_ranks, rows)
    telemetry["doubts"] = [*telemetry["doubts"], *unmatched(printed.file_facts, shown, output.num_unread_lines)]
    protocol = WALL_PROTOCOL if is_wall else TIMING_PROTOCOL
    if any(row.get("flags") == "validation" for row in rows):  # nanoGPT's clock runs on during validations
        protocol = protocol | {"excluded": [part for part in protocol["excluded"] if part != "validation"]}
    run["timing_protocol"] = protocol | {"instruments": run["timing_protocol"]["instruments"]}
    measured = printed.measured()
    num_untimed = measured["num_untimed_steps"]
    meaning = MEANINGS[1] if num_untimed and not is_wall else foreign.step_avg_meaning
    run["script"] |= {"step_avg_meaning": meaning, "printed_step_avg_ms": foreign.step_avg_ms}
    run["script"] |= {"declared_steps": foreign.declared_steps}
    at_start_s = opened.validation_at_start_s(rows)
    times = printed_times.PrintedTimes(rows, num_untimed)
    outside = times.clock(output.late_ns, output.gaps_ns, at_start_s, is_wall, waits_ns)
    doubts: list[str] = []
    if not is_wall:
        doubts, disturbances = times.doubts(outside)
        machine = {"rank": 0, "instrument": outside_clock.MACHINE}
        telemetry["doubts"] += [machine | {"doubt": disturbance} for disturbance in disturbances]
    if opened.are_own_data:
        run["data"] = dict(OWN_DATA)
    ended_at_step = printed.ended_at_step(goal)
    run["script"] |= {} if ended_at_step is None else {"ended_at_step": ended_at_step}
    doubts += _doubts_of_lines(printed, goal.of.name, run["data"]["vocab_size"], ended_at_step is not None)
    if opened.are_fixed and goal.of.name == "val_loss" and (rows[0]["step"] or rows[0].get("val_loss") is None):
        doubts.append("it prints no val_loss of step 0, which would show whether it was trained before its clock began")
    doubts += opened.doubts()
    doubts += opened.while_training(rows, outside["reader_late_s"])
    doubts += work_folder.doubts(script, folder / work_folder.WORK, opened.read)
    _write_steps(folder, rows, goal.of.name)
    _write_result(folder, facts, measured, doubts, telemetry, {"clock": outside})
    if foreign.diverged_step is not None:
        why = f"the script printed a loss that is not a number at step {foreign.diverged_step}"
        return failures.failure("non_finite_loss", why, None, foreign.diverged_step) | {"hint": LOWER}
    if not rows[-1]["step"]:
        return failures.failure("no_metric_lines", "the script printed no step after step 0")
    if printed.step_past_budget(goal) == (first := next(row["step"] for row in rows if row["step"])):
        budget = f"token_budget={goal.token_budget}" if goal.token_budget else f"time_budget_s={goal.time_budget_s:g}"
        return failures.failure("bad_setting", TOO_SHORT.format(f"goal.{budget}", first))
    if goal.token_budget is not None and foreign.batch_tokens is None:
        return failures.failure("no_metric_lines", NO_TOKENS.format(goal.token_budget)) | {"hint": BY_TIME}
    values = [(row["step"], row[goal.of.name]) for row in rows if row.get(goal.of.name) is not None]
    if values and not abs(values[-1][1]) < MAX_METRIC:
        why = f"the last {goal.of.name} that the script printed is {values[-1][1]}, at step {values[-1][0]}"
        return failures.failure("non_finite_loss", why, None, values[-1][0]) | {"hint": LOWER}
    if values:
        return None
    names = [name for name in VALIDATED if any(row.get(name) is not None for row in rows)]
    remedy = f"; it printed {' and '.join(names)}: give goal.metric={names[0]}" if names else ""
    if not names and any(row.get("train_loss") is not None for row in rows):
        remedy = f"; it printed train_loss: print {goal.of.name} after the last step, or give goal.metric=train_loss"
    return failures.failure("no_metric_lines", NO_VALIDATION.format(goal.of.name) + remedy)


def _facts(path: Path) -> Facts:
    try:
        return cast(Facts, json_file.read(path, Facts))
    except Damaged:
        return {}


# ---- what the script printed


class Printed(NamedTuple):
    """Everything that a script has printed so far: its last run, with the rows for steps.csv."""

    runs: list[Run]
    file_facts: dict[str, Any]  # as dialects.read() returns them
    rows: list[StepRow]
    is_wall: bool  # the script prints no total time, so that its rows are timed by their lines

    def measured(self) -> dict[str, Any]:
        """Returns the part of run.json["measured"] that the lines give."""
        foreign, rows = self.runs[-1], self.rows
        num_untimed = foreign.num_untimed_steps or printed_times.restarted_at(rows)
        if self.is_wall:
            num_untimed = next((row["step"] for row in rows if row.get("train_time_ms") is not None), 0)
        train_ms = rows[-1].get("train_time_ms") if self.is_wall else foreign.train_time_ms
        num_validations = sum(row.get("val_loss") is not None for row in rows)
        measured: dict[str, Any] = {} if train_ms is None else {"train_s_by_rank": [s_from_ms(train_ms)]}
        measured |= {"num_untimed_steps": num_untimed, "num_validations": num_validations}
        measured |= printed_times.PrintedTimes(rows, num_untimed).account()
        return measured | ({"batch_tokens": foreign.batch_tokens} if foreign.batch_tokens else {})

    def ended_at_step(self, goal: GoalConfig) -> int | None:
        """Returns the last step if the script trained on past the goal's budget and is ended there, else None.

        One line past the budget may be its last step, whose validation is still to come; a later step is not.
        """
        past, last = self.step_past_budget(goal), self.rows[-1]["step"]
        return last if past is not None and last > past else None

    def step_past_budget(self, goal: GoalConfig) -> int | None:
        """Returns the first step that is known to lie past the goal's budget; None if there is none, or no budget."""
        facts: dict[str, Any] = {"measured": self.measured(), "goal": {"budget": goal.budget}, "model": {}}
        return metrics.step_past_budget(facts, self.rows)


def read(dialect: dialects.Dialect | None, lines: Sequence[tuple[int, str]], goal: GoalConfig) -> Printed | None:
    """Reads what a script has printed; None if no line reports a step.  lines: as Output.lines.  Raises TooLong."""
    with patterns.limited(MATCHING_CPU_S + OF_A_LINE_CPU_S * len(lines)):
        runs, file_facts = dialects.read(dialect, [text for _, text in lines]) if dialect else ([], {})
        if not runs or dialect is None:
            return None
        reader, run = dialects.reader_of(dialect), runs[-1]
        rows = stamped(rows_of(run), lines, reader)
        if goal.metric_pattern is not None:
            _add_own_metric(rows, lines, dialects.reader_of(dialect), goal.of.name, goal.metric_pattern)
    is_wall = run.train_time_ms is None
    if is_wall:
        count_wall(rows)
    elif backward := printed_times.drop_backward(rows, run.num_untimed_steps or printed_times.restarted_at(rows)):
        run.impossible += backward
        run.train_time_ms = printed_times.events(rows)[-1].time_ms
    return Printed(runs, file_facts, rows, is_wall)


def stamped(rows: list[StepRow], lines: Sequence[tuple[int, str]], reader: Form) -> list[StepRow]:
    """Returns rows with line_t_ns and val_line_t_ns, when the last lines of a step's training and validation arrived.

    As in our own runs, t_ns is when the step began: when the previous line arrived.
    """
    came = {}
    for t_ns, text in lines:
        row = reader.row(text)
        if row is not None:
            came[row["step"], any(row.get(name) is not None for name in VALIDATED)] = t_ns
    before_ns = None
    for row in rows:
        row["line_t_ns"], row["val_line_t_ns"] = came.get((row["step"], False)), came.get((row["step"], True))
        row["t_ns"] = before_ns
        if row["line_t_ns"] is not None and before_ns is not None:
            row["wall_ms"] = ms_from_ns(row["line_t_ns"] - before_ns)
        ends = [t_ns for t_ns in (row["line_t_ns"], row["val_line_t_ns"]) if t_ns is not None]
        before_ns = max(ends, default=before_ns)
    return rows


def _add_own_metric(
    rows: list[StepRow], lines: Sequence[tuple[int, str]], reader: Form, name: str, pattern: str
) -> None:
    """Adds what goal.metric_pattern finds to the rows: at the step of its group, or at the last step printed."""
    by_step, latest = {row["step"]: row for row in rows}, 0
    for _, text in lines:
        if (row := reader.row(text)) is not None:
            latest = row["step"]
        if len(text) <= MAX_LINE_CHARS and (match := re.search(pattern, text)):
            number = match.groupdict().get("step")
            step, value = as_number(number) if number else latest, as_number(match["value"])
            if step in by_step:
                by_step[step][name] = math.nan if value is None else value  # "n/a" is a value that is none


def count_wall(rows: list[StepRow]) -> None:
    """Fills in the wall time of the lines, from the first one on, if the script prints no total time."""
    ends_ns = [row["line_t_ns"] or row["val_line_t_ns"] for row in rows]
    first_ns = next((t_ns for t_ns in ends_ns if t_ns is not None), None)
    for row, t_ns in zip(rows, ends_ns, strict=True):
        if t_ns is not None and first_ns is not None:
            row["train_time_ms"] = ms_from_ns(t_ns - first_ns)
            row["step_ms"] = row.pop("wall_ms", None)


def unmatched(file_facts: Mapping[str, Any], dialect: str | None, num_unread: int = 0) -> Iterator[Section]:
    """Yields a doubt about how the lines were read, not about the script.  num_unread: lines beyond the limit."""
    if num_unread:
        doubt = f"{num_unread:,} metric lines after the first {format_bytes(MAX_METRIC_BYTES)} of them were not read"
        yield {"rank": 0, "instrument": "import", "doubt": f"{doubt}: print fewer"}
    if file_facts["unmatched"]:
        number, text = file_facts["unmatched"][0]
        problem = f"{len(file_facts['unmatched'])} lines look like metric lines of {dialect} but are not; the first"
        yield {"rank": 0, "instrument": "import", "doubt": f"{problem}: {private.excerpt(text, 80)!r}"}


def _doubts_of_lines(printed: Printed, metric: str, vocab_size: int | None, was_ended: bool) -> Iterator[str]:
    """Yields doubts from the lines themselves.

    metric: the goal's; was_ended: the script was ended at its budget, so that it could not validate at its end.
    """
    runs, rows, foreign = printed.runs, printed.rows, printed.runs[-1]
    yield from foreign.impossible
    if len(runs) > 1:
        yield f"its lines are of {len(runs)} runs (steps or their number went back): the last one is recorded"
    last, val_step = max(foreign.declared_steps or 0, foreign.num_steps), foreign.val_step
    is_complete = foreign.complete
    if metric not in VALIDATED:
        val_step = max((row["step"] for row in rows if row.get(metric) is not None), default=None)
        is_complete = val_step is not None
    is_early = val_step is not None and val_step < last - 1  # nanoGPT validates before its last iteration
    if (not is_complete or is_early) and foreign.diverged_step is None and not was_ended:
        name = "validation" if metric in VALIDATED else metric
        seen = f"it prints no {name}" if val_step is None else f"its last {name} is of step {val_step}"
        beyond = f" of {foreign.declared_steps}" * (0 < (foreign.declared_steps or 0) < last)
        yield f"{seen}, and its last step is {last}{beyond}"
    first_loss = rows[0].get("val_loss") if rows[0]["step"] == 0 else None
    if first_loss is not None and vocab_size is not None and validity.is_trained(first_loss, vocab_size):
        yield validity.start_doubt(first_loss, vocab_size)


# ---- what the record gets


def _write_steps(folder: Path, rows: list[StepRow], metric: str) -> None:
    columns = [*step_files.CORE_COLUMNS, "t_ns", "train_time_ms", "line_t_ns", "val_line_t_ns", "wall_ms"]
    columns += [name for name in (*MORE_COLUMNS, metric) if any(name in row for row in rows) and name not in columns]
    rows = [{name: row.get(name) for name in columns} | {"flags": row.get("flags") or ""} for row in rows]
    step_files.write(folder, rows, columns)
    timed = printed_times.events(rows)
    edges: list[tuple[int, str, Section]] = [(timed[0][0], "run_start", {})] if timed else []
    edges += [
        (row["val_line_t_ns"], "eval_stop", {"step": row["step"], "val_loss": row["val_loss"]})
        for row in rows
        if row["val_line_t_ns"] is not None and row["val_loss"] is not None
    ]
    edges += [(timed[-1][0], "run_stop", {"step": timed[-1][1]})] if timed else []
    now_ns = time.perf_counter_ns()
    for t_ns, name, facts in edges:
        ago_s = (now_ns - t_ns) / 1e9
        step_files.append_event(folder, {"t_ns": t_ns, "utc": utc.now(ago_s), "event": name, **facts})


def _write_result(
    folder: Path,
    by_rank: Sequence[Facts],
    measured: dict[str, Any],
    doubts: Sequence[str],
    telemetry: Mapping[str, Any],
    referee: Mapping[str, Any],
) -> None:
    first = by_rank[0]
    rss_gib = [facts.get("peak_rss_gib") for facts in by_rank]
    seen_gib, reported_gib = telemetry.get("peak_rss_gib") or 0.0, max(peak or 0.0 for peak in rss_gib)
    if seen_gib > reported_gib:  # of a process that it did not wait for, or a peak that was reset
        rss_gib[[peak or 0.0 for peak in rss_gib].index(reported_gib)] = seen_gib
    peaks: dict[str, Sequence[float | None]] = {"rss": rss_gib}
    for kind in ("allocated", "reserved"):
        if any(kind in (facts.get("peak_mem_gib") or {}) for facts in by_rank):
            peaks[kind] = [(facts.get("peak_mem_gib") or {}).get(kind) for facts in by_rank]
    if any(peak is not None for peak in telemetry.get("device_peak_mem_gib", ())):
        peaks["device"] = telemetry["device_peak_mem_gib"]
    measured = measured | {"peak_mem_gib_by_rank": peaks}
    flags_by_rank = [facts["compile_flags"] for facts in by_rank if "compile_flags" in facts]
    if flags_by_rank:
        measured["compile_flags"] = {name: value for flags in flags_by_rank for name, value in flags.items()}
    if telemetry.get("foreign_cpu_cores") is not None:
        measured["foreign_cpu_cores"] = telemetry["foreign_cpu_cores"]
    # the script's torch; each None if it ended well without importing torch; {} if nothing is known
    reported = cast(Mapping[str, Any], first.get("torch") or {})
    torch_facts: dict[str, Any] = {name: reported[name] for name in TorchFacts.__annotations__ if name in reported}
    if not torch_facts and "python" in first:
        torch_facts = dict.fromkeys(TorchFacts.__annotations__)
    summaries = {"telemetry": telemetry["summary"]} if telemetry["summary"] else {}
    script_doubts = [{"rank": 0, "instrument": "script", "doubt": doubt} for doubt in doubts]
    content = {
        "measured": measured,
        "torch_facts": torch_facts | ({"python": first["python"]} if "python" in first else {}),
        "instrument_summaries": telemetry.get("profiles", {}) | summaries,
        "doubts": script_doubts + telemetry["doubts"],
        "referee": referee,
        "warnings": telemetry["warnings"],
    }
    atomic.write_json(folder / run_folder.RESULT, content)
    if "python" in first:  # the script's interpreter, which may have no packages
        env = atomic.read_json(folder / "environment.json", {})
        packages = dict(sorted((name, version) for name, version in first.get("packages", {}).items() if name))
        atomic.write_json(folder / "environment.json", env | {"packages": packages, "python": first["python"]})
