"""A foreign Run -> a record with provenance "imported": the same keys as ours, null where the log does not say."""

import hashlib
import re
from pathlib import Path

import numpy as np

from bench.record.metrics import metrics
from bench.record.run_folder import SCHEMA_VERSION
from bench.units import MIB, gib_from_bytes, s_from_ms

TARGETS = {"track_1_short": 3.28, "track_2_medium": 2.92, "track_3_optimization": 3.28}  # modded-nanogpt README
UNKNOWN_TIME = "00000000T000000Z"


def of_run(run, path, data_sha256, form, num_runs, told, part_of=None):
    """Run -> (record, rows of steps.csv).  path: of the log; told: the facts of the file; part_of: the folder that it was found under."""
    track, name = _track_and_name(Path(path), part_of)
    facts, rows, doubts = run.facts, _rows(run), _doubts(told)
    num_gpus = facts.get("world_size") or facts.get("num_gpus")
    gpu = {
        "name": facts.get("gpu_name"),
        "memory_gib": None,
        "power_limit_w": facts.get("power_limit_w"),
        "max_sm_clock_mhz": None,
        "uuid_hash": None,
    }
    record = {
        "schema_version": SCHEMA_VERSION,
        "run_id": _run_id(facts.get("started_at"), name, data_sha256, run.number),
        "provenance": "imported",
        "imported": {
            "same_run_id": _same_run_id(run) if form == "modded-nanogpt" else None,
            "format": form,
            "format_id": told["format_id"],
            "file": _shown(Path(path), part_of),
            "sha256": data_sha256,
            "run_of_file": run.number,
            "num_runs_of_file": num_runs,
            "declared_steps": run.declared_steps,
            "printed_step_avg_ms": run.step_avg_ms,
            "step_avg_meaning": run.step_avg_meaning,
            "headline": run.headline,
            "num_gpus_of_machine": facts.get("num_gpus"),
            "started_zone": facts.get("started_zone"),
            "line_tails": run.extras,
            "tail_averages": run.tail_averages,
            "other_lines": run.other_lines,
        },
        "name": name,
        "track": track,
        "deviations": [],
        "status": "complete" if run.complete else "failed",
        "validity": "invalid" if not run.complete else "suspect" if doubts else "valid",
        "validity_reasons": doubts if run.complete else ["the run did not complete"],
        "failure": None if run.complete else _failure(run),
        "started_at": facts.get("started_at"),
        "heartbeat_at": None,
        "ended_at": None,
        "launcher": None,
        "command": [],
        "seed": facts.get("seed"),
        "config_id": None,
        "comparability_id": None,
        "session_id": None,
        "world_size": facts.get("world_size"),
        "model": {"arch": run.model},
        "optim": "unknown",
        "goal": {
            "target_val_loss": TARGETS.get(track),
            "target_gap_nats": None,
            "stop_at_target": False,
            "val_tokens": None,
        },
        "hardware": {"device": "cuda" if gpu["name"] else None},
        "instruments": {},
        "timing_protocol": {
            "id": f"{form}-log",
            "clock": "as printed by the log's own program; its lines are not synchronised with the device",
            "excluded": [],
            "in_timed_region": [],
        },
        "code": {
            "identity_version": None,
            "source_sha256": run.source_sha256,
            "commit": None,
            "dirty": None,
            "diff_sha256": None,
        },
        "data": {"source": "unknown", "vocab_size": None, "floor_nats": None, "train": [], "val": []},
        "environment": {
            "python": facts.get("python"),
            "os": None,
            "torch": facts.get("torch"),
            "cuda": facts.get("cuda"),
            "nccl": None,
            "driver": facts.get("driver"),
            "cpu_model": None,
            "num_cpus": None,
            "gpus": [gpu] * (num_gpus or 1) if gpu["name"] else [],
        },
        "measured": _measured(run),
        "doubts": [{"instrument": "import", "doubt": doubt} for doubt in doubts],
        "warnings": [],
        "artifacts": [],
    }
    record["metrics"] = metrics(record, rows)
    return record, rows


def _same_run_id(run):
    """What two files of one run agree on (its console, its log, a driver's summary), and two runs hardly ever.

    The first and the last validation and the time to the millisecond; None where there are no two, or no time.
    """
    losses = run.columns["val_loss"][~np.isnan(run.columns["val_loss"])]
    if not run.complete or len(losses) < 2 or not run.train_time_ms:
        return None
    return f"val_loss {losses[0]:g} to {run.val_loss!r} at step {run.val_step} after {round(run.train_time_ms)} ms"


def _doubts(told):
    """Of every run of the file: whose the lines are that were not understood is not known."""
    if not told["unmatched"]:
        return []
    number, text = told["unmatched"][0]
    return [
        f"{len(told['unmatched'])} lines of the log look like metric lines and were not understood; the first is line {number}: {text[:80]!r}"
    ]


def _measured(run):
    peak_mib = run.facts.get("peak_mib")
    return {
        "train_s_by_rank": [] if run.train_time_ms is None else [s_from_ms(run.train_time_ms)],
        "batch_tokens": run.batch_tokens,
        "num_untimed_steps": run.num_untimed_steps,
        "peak_mem_gib_by_rank": {} if peak_mib is None else {"allocated": [gib_from_bytes(peak_mib * MIB)]},
    }


def _failure(run):
    if run.diverged_step is not None:
        return {
            "kind": "non_finite_loss",
            "rank": None,
            "step": run.diverged_step,
            "signal": None,
            "exit_code": None,
            "message": f"the log prints a loss that is no number at step {run.diverged_step}",
            "hint": "nothing can be imported of it",
        }
    is_last = run.num_steps == (run.declared_steps or run.num_steps)
    words = f"the log ends at step {run.num_steps}" + (
        ", without a validation of it" if is_last else f" of {run.declared_steps}"
    )
    return {
        "kind": "incomplete_log",
        "rank": None,
        "step": run.num_steps,
        "signal": None,
        "exit_code": None,
        "message": words,
        "hint": "import the whole log, if there is one",
    }


def _rows(run):
    """Rows by step; step_ms as printed, or the difference of printed train times of neighbouring steps, which nothing synchronised.

    The first steps of some programs are in no clock: flagged, with a step_ms only where one was printed.
    """
    columns, rows, tokens = run.columns, {}, run.batch_tokens
    steps = columns["step"].astype(int).tolist()
    for step in steps:
        if step not in rows:
            flag = "untimed" if 0 < step <= run.num_untimed_steps else ""
            rows[step] = {
                "step": step,
                "flags": run.flags.get(step, flag),
                "tokens": None if tokens is None else step * tokens,
            }
    for name in ("train_loss", "val_loss", "lr", "grad_norm", "train_time_ms", "step_ms"):
        values = columns.get(name, np.empty(0))
        for place in np.flatnonzero(~np.isnan(values)).tolist():
            rows[steps[place]].setdefault(name, float(values[place]))
    for place in np.flatnonzero(~np.isnan(columns["val_loss"]) & ~np.isnan(columns["train_time_ms"])).tolist():
        time_ms = float(columns["train_time_ms"][place])
        if (
            rows[steps[place]]["train_time_ms"] != time_ms
        ):  # the clock had waited for the device, at the step's own line it had not
            rows[steps[place]]["train_time_at_val_ms"] = time_ms
    ordered = [rows[step] for step in sorted(rows)]
    for before, row in zip(ordered, ordered[1:]):
        if (
            "step_ms" not in row
            and row["flags"] != "untimed"
            and row["step"] == before["step"] + 1
            and "train_time_ms" in row
            and "train_time_ms" in before
        ):
            step_ms = row["train_time_ms"] - before["train_time_ms"]
            if step_ms >= 0:  # where the clock was set back after untimed steps there is none
                row["step_ms"] = step_ms
    if ordered and ordered[-1]["step"] < run.num_steps:
        ordered.append({"step": run.num_steps, "flags": ""})
    return ordered


def _track_and_name(path, part_of):
    parts = list(path.resolve().parts)
    for track in TARGETS:
        if track in parts:
            rest = parts[parts.index(track) + 1 : -1]
            rest = rest[1:] if rest[:1] == ["results"] else rest
            return track, _word("-".join(rest) or path.stem)
    return "imported", _word(path.parent.name if part_of and path.parent != Path(part_of) else path.stem)


def _word(text):
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "log"


def _shown(path, part_of):
    """The file as the record names it: below the folder that was given, never the home of anybody."""
    parts = path.resolve().parts
    for track in TARGETS:
        if track in parts:
            return "/".join(parts[parts.index(track) :])
    return str(path.relative_to(part_of)) if part_of and path.is_relative_to(part_of) else path.name


def _run_id(started_at, name, data_sha256, number):
    digits = re.sub(r"\D", "", started_at or "")
    stamp = f"{digits[:8]}T{digits[8:14]}Z" if len(digits) >= 14 else UNKNOWN_TIME
    return f"{stamp}-{name[:80]}-{data_sha256[:8]}-r{number}"


def sha256(data):
    return hashlib.sha256(data).hexdigest()
