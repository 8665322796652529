"""Makes records, with provenance "imported", of runs in other programs' logs; what a log does not say is null."""

import functools
import hashlib
import itertools
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench.base import atomic, metric
from bench.base.text_table import counted
from bench.base.units import MIB, gib_from_bytes, s_from_ms
from bench.config import groups
from bench.record import printed_times, run_folder, step_files, validity
from bench.record.importers.lines import Columns
from bench.record.metrics import metrics
from bench.record.shape import Record, Section
from bench.record.step_files import StepRow

CLOCK = "as printed by the log's own program; its lines are not synchronised with the device"
# This many validation losses, printed with four digits, identify a run.  All but 21 of the 1,700 runs in
# modded-nanogpt's public logs have 7 or more, and those that agree in all are the same 35 copies that the time shows.
MIN_VALIDATIONS = 5
# Metrics of validations beside val_loss; artifact_bytes: the size of the model and its code as submitted
RESTARTED_FRAC = 0.02  # by which a step_avg that leaves untimed steps out may differ from the times (assumed)
RESTARTED = "unknown, as its clock leaves untimed steps out"
PRINTED_METRICS = (metric.VAL_BPB.name, metric.CORE.name, metric.ARTIFACT_BYTES.name)
MAX_TIME_MS = 1e12  # 32 years
UNKNOWN_TIME = "00000000T000000Z"


@dataclass
class Run:
    """A run in another program's log.  What the log does not say is None."""

    number: int  # of the run in its file, from 0
    columns: Columns  # see lines.COLUMNS
    num_steps: int
    declared_steps: int | None
    complete: bool  # whether it was validated at the last declared step
    val_loss: float | None  # of the last validation
    val_step: int | None
    train_time_ms: float | None
    step_avg_ms: float | None  # the last one printed
    step_avg_meaning: str | None
    # torch cuda python driver gpu_name num_gpus world_size power_limit_w peak_mib seed started_at started_zone
    facts: dict[str, Any]
    extras: dict[str, dict[str, str]] = field(default_factory=dict)  # {step: {key: text} of further fields in its line}
    tail_averages: list[dict[str, str]] = field(default_factory=list)  # {key: text} of the file's "tailavg" lines
    # the file's lines of a step without a loss or a time, unchanged
    other_lines: list[str] = field(default_factory=list)
    # the number that the log's author uses, if it is not val_loss
    headline: dict[str, str] = field(default_factory=dict)
    source_sha256: str | None = None
    code_id: str | None = None  # the same for code that differs only in a literal seed or the run's name
    diverged_step: int | None = None  # the first step whose loss is printed as nan or inf
    flags: dict[int, str] = field(default_factory=dict)  # {step: why its time includes something else}
    model: str = "unknown"
    batch_tokens: int | None = None
    metric: str = metric.VAL_LOSS.name  # the metric that the program's authors use, if the log has it
    num_untimed_steps: int = 0  # the first steps, which train_time_ms excludes
    impossible: list[str] = field(default_factory=list)  # sentences about impossible times, which are excluded
    ends_untimed: bool = False  # whether its last time is impossible, so that train_time_ms is an earlier one

    def __post_init__(self) -> None:
        for name in ("train_time_ms", "step_ms"):
            times_ms = self.columns.get(name, np.empty(0))
            wrong = ~np.isnan(times_ms) & ~((times_ms >= 0) & (times_ms <= MAX_TIME_MS))
            if wrong.any():
                first, count = np.flatnonzero(wrong)[0], int(np.count_nonzero(wrong))
                value = f"{times_ms[first]:g} ms" if np.isfinite(times_ms[first]) else "no number"
                where = f"at step {self.columns['step'][first]:g} it prints {value} as a time"
                lines = f"{where} ({counted(count, 'such line')})"
                self.impossible.append(f"{lines}: no clock shows that, and it counts nowhere")
                self.columns = self.columns | {name: np.where(wrong, np.nan, times_ms)}
        if self.train_time_ms is not None and not 0 <= self.train_time_ms <= MAX_TIME_MS:
            times_ms = self.columns["train_time_ms"]
            self.train_time_ms = next(iter(times_ms[~np.isnan(times_ms)][::-1].tolist()), None)
            self.ends_untimed = True


def record_of(
    run: Run, path: Path, form: str, facts: dict[str, Any], part_of: Path | None = None
) -> tuple[Record, list[StepRow]]:
    """Returns the record of a run and its rows of steps.csv.  path, part_of: from files_of(); facts: of read_file()."""
    track, name, shown = _named(Path(path), part_of)
    rows = rows_of(run)
    backward = printed_times.drop_backward(rows, printed_times.MAX_UNTIMED_STEPS)
    run.ends_untimed |= bool(backward)
    doubts = [*_doubts(facts["unmatched"]), *run.impossible, *backward]
    times_ms = [(row["step"], row["train_time_ms"]) for row in rows if row.get("train_time_ms") is not None]
    restarts = [step for (_, before_ms), (step, time_ms) in itertools.pairwise(times_ms) if time_ms < before_ms]
    if restarts and not run.num_untimed_steps:
        run.num_untimed_steps, run.step_avg_meaning = restarts[0] - 1, RESTARTED
        num_timed, time_ms = run.num_steps - run.num_untimed_steps, run.train_time_ms or 0.0
        if run.step_avg_ms and abs(run.step_avg_ms * num_timed - time_ms) > RESTARTED_FRAC * time_ms:
            doubts.append(f"its clock starts again at step {restarts[0]}, and its step_avg does not say so")
    wrong = [] if run.complete else ["the run did not complete"]
    wrong += [validity.BELOW_ZERO.format(run.val_loss)] if run.val_loss is not None and run.val_loss < 0 else []
    digits = re.sub(r"\D", "", run.facts.get("started_at") or "")
    stamp = f"{digits[:8]}T{digits[8:14]}Z" if len(digits) >= 14 else UNKNOWN_TIME
    # no log has these
    unknown = dict.fromkeys(("config_id", "comparability_id", "session_id", "heartbeat_at", "ended_at", "launcher"))
    code = dict.fromkeys(("identity_version", "commit", "dirty", "diff_sha256"))
    peak_mib = run.facts.get("peak_mib")
    goal: Section = {"target_val_loss": _target_of(track), "target_gap_nats": None, "stop_at_target": False}
    goal |= {"val_tokens": None} | metric.goal_facts(metric.named(run.metric), None)
    record: Section = unknown | {
        "deviations": [],
        "command": [],
        "instruments": {},
        "warnings": [],
        "artifacts": [],
        "optim": "unknown",
        "data": {"source": "unknown", "vocab_size": None, "floor_nats": None, "train": [], "val": []},
        "schema_version": run_folder.SCHEMA_VERSION,
        "run_id": f"{stamp}-{name[:80]}-{facts['sha256'][:8]}-r{run.number}",
        "provenance": "imported",
        "imported": _imported(run, form, facts, shown),
        "name": name,
        "track": track,
        "status": "complete" if run.complete else "failed",
        "validity": "invalid" if wrong else "suspect" if doubts else "valid",
        "validity_reasons": wrong or doubts,
        "failure": None if run.complete else _failure(run),
        "started_at": run.facts.get("started_at"),
        "seed": run.facts.get("seed"),
        "world_size": run.facts.get("world_size"),
        "model": {"arch": run.model},
        "goal": goal,
        "hardware": {"device": "cuda" if run.facts.get("gpu_name") else None},
        "timing_protocol": {"id": f"{form}-log", "clock": CLOCK, "excluded": [], "in_timed_region": []},
        "code": code | {"source_sha256": run.source_sha256},
        "environment": _environment(run.facts),
        "measured": {
            "train_s_by_rank": [] if run.train_time_ms is None or run.ends_untimed else [s_from_ms(run.train_time_ms)],
            "batch_tokens": run.batch_tokens,
            "num_untimed_steps": run.num_untimed_steps,
            "peak_mem_gib_by_rank": {} if peak_mib is None else {"allocated": [gib_from_bytes(peak_mib * MIB)]},
        },
        "doubts": [{"instrument": "import", "doubt": doubt} for doubt in doubts],
    }
    record["metrics"] = metrics(record, rows)
    return cast(Record, record), rows


def _imported(run: Run, form: str, facts: dict[str, Any], file: str) -> Section:
    """Returns the section "imported", which only imported records have."""
    return {
        "same_run_id": _same_run_id(run) if form == "modded-nanogpt" else None,
        "format": form,
        "code_id": run.code_id,
        "file": file,
        "sha256": facts["sha256"],
        "run_of_file": run.number,
        "num_runs_of_file": facts["num_runs"],
        "declared_steps": run.declared_steps,
        "printed_step_avg_ms": run.step_avg_ms,
        "step_avg_meaning": run.step_avg_meaning,
        "headline": run.headline,
        "num_gpus_of_machine": run.facts.get("num_gpus"),
        "started_zone": run.facts.get("started_zone"),
        "line_tails": run.extras,
        "tail_averages": run.tail_averages,
        "other_lines": run.other_lines,
    }


def _environment(facts: dict[str, Any]) -> Section:
    software = {name: facts.get(name) for name in ("python", "torch", "cuda", "driver")}
    gpu = dict.fromkeys(("memory_gib", "max_sm_clock_mhz", "uuid_hash"))
    gpu |= {"name": facts.get("gpu_name"), "power_limit_w": facts.get("power_limit_w")}
    num_gpus = facts.get("world_size") or facts.get("num_gpus") or 1
    unknown = dict.fromkeys(("os", "nccl", "cpu_model", "num_cpus"))
    return software | unknown | {"gpus": [gpu] * num_gpus if gpu["name"] else []}


def _same_run_id(run: Run) -> str | None:
    """Returns an id that files of one run share (console, log, a driver's summary), and different runs hardly ever.

    It is made of all validations or, with fewer than MIN_VALIDATIONS, of the first, the last and the time;
    None with fewer than two validations, or without a time.
    """
    is_validated = ~np.isnan(run.columns["val_loss"])
    losses, steps = run.columns["val_loss"][is_validated].tolist(), run.columns["step"][is_validated].tolist()
    if not run.complete or len(losses) < 2 or not run.train_time_ms:
        return None
    ends = f"val_loss {losses[0]:g} to {run.val_loss!r} at step {run.val_step}"
    if len(losses) < MIN_VALIDATIONS:
        return f"{ends} after {run.train_time_ms:.12g} ms"
    digest = hashlib.sha256(repr(list(zip(steps, losses))).encode()).hexdigest()
    return f"{ends}, {len(losses)} validations {digest[:12]}"


def _doubts(unmatched: list[tuple[int, str]]) -> list[str]:
    """Returns a doubt for all runs of a file if lines were not understood, as these may belong to any of them."""
    if not unmatched:
        return []
    number, text = unmatched[0]
    doubt = f"{len(unmatched)} lines of the log look like metric lines and were not understood"
    return [f"{doubt}; the first is line {number}: {text[:80]!r}"]


def _failure(run: Run) -> Section:
    if run.diverged_step is not None:
        kind, step, hint = "non_finite_loss", run.diverged_step, "nothing can be imported of it"
        message = f"the log prints a loss that is not a number at step {step}"
    else:
        kind, step, hint = "incomplete_log", run.num_steps, "import the whole log, if there is one"
        is_last = run.num_steps == (run.declared_steps or run.num_steps)
        missing = ", without a validation of it" if is_last else f" of {run.declared_steps}"
        message = f"the log ends at step {step}{missing}"
    unknown = dict.fromkeys(("rank", "signal", "exit_code"))
    return unknown | {"kind": kind, "step": step, "message": message, "hint": hint}


def rows_of(run: Run) -> list[StepRow]:
    """Returns the rows of steps.csv.  step_ms is the printed one, or else the difference of two consecutive times.

    The times are not synchronised with the device.  Untimed first steps are flagged and have only a printed step_ms.
    """
    columns, rows, tokens = run.columns, {}, run.batch_tokens
    steps = columns["step"].astype(int).tolist()
    for step in dict.fromkeys(steps):
        flags = run.flags.get(step, "untimed" if 0 < step <= run.num_untimed_steps else "")
        rows[step] = {"step": step, "flags": flags, "tokens": None if tokens is None else step * tokens}
    for name in ("train_loss", "val_loss", *PRINTED_METRICS, "lr", "grad_norm", "train_time_ms", "step_ms"):
        values = columns.get(name, np.empty(0))
        for line in np.flatnonzero(~np.isnan(values)).tolist():
            rows[steps[line]].setdefault(name, float(values[line]))
    time_ms = columns["train_time_ms"]
    for line in np.flatnonzero(~np.isnan(columns["val_loss"]) & ~np.isnan(time_ms)).tolist():
        row = rows[steps[line]]  # unlike at the step's own line, the clock had waited for the device
        if row["train_time_ms"] != time_ms[line]:
            row["train_time_at_val_ms"] = float(time_ms[line])
    ordered = [rows[step] for step in sorted(rows)]
    for before, row in zip(ordered, ordered[1:]):
        has_times = "train_time_ms" in row and "train_time_ms" in before
        if has_times and "step_ms" not in row and row["flags"] != "untimed" and row["step"] == before["step"] + 1:
            step_ms = row["train_time_ms"] - before["train_time_ms"]
            if step_ms >= 0:  # negative if the clock was restarted after untimed steps
                row["step_ms"] = step_ms
    if ordered and ordered[-1]["step"] < run.num_steps:
        ordered.append({"step": run.num_steps, "flags": ""})
    return ordered


def _named(path: Path, part_of: Path | None) -> tuple[str, str, str]:
    """Returns (track, name, the file's path for the record: relative to the named folder, never with a home folder)."""
    parts = path.resolve().parts
    if track := next((track for track in groups.UPSTREAM_TRACKS if track in parts), None):
        inside = parts[parts.index(track) :]
        rest = inside[2:-1] if inside[1:2] == ("results",) else inside[1:-1]
        return groups.UPSTREAM_TRACKS[track], _slug("-".join(rest) or path.stem), "/".join(inside)
    name = path.parent.name if part_of and path.parent != part_of else path.stem
    below = part_of is not None and path.is_relative_to(part_of)
    return "imported", _slug(name), str(path.relative_to(part_of)) if part_of and below else path.name


@functools.cache
def _target_of(track: str) -> float | None:
    """Returns the target of a track in conf/; None for "imported", which is not a track."""
    if track not in groups.choices("track"):
        return None
    target: float | None = groups.values_of("track", track)["goal"].get("target_val_loss")
    return target


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "log"


def write(run: Record, rows: list[StepRow], results: Path | str) -> bool:
    """Writes a record to results/<track>/<run_id>/, run.json last, so that a killed import can be repeated.

    Returns False if it exists.  Raises ValueError if it cannot be written.
    """
    folder = Path(results) / run["track"] / run["run_id"]
    if (folder / "run.json").exists():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        step_files.write(folder, rows)
        atomic.write_json(folder / "run.json", run | {"artifacts": run_folder.listed(folder)}, durable=False)
    except OSError as error:
        hint = "free space, or name another folder with SPEEDRUN_RESULTS"
        raise ValueError(f"{folder}: cannot be written ({error.strerror}); {hint}") from None
    return True
