"""A run as MLPerf's ":::MLLOG {json}" lines."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.base import utc
from bench.base.units import ms_from_s
from bench.record import run_folder, step_files
from bench.record.shape import Record
from bench.record.step_files import StepRow


def of_folder(folder: Path | str) -> Iterator[str]:
    """A run folder -> the lines of its run."""
    return lines(run_folder.read(folder), step_files.read(folder), step_files.read_events(folder))


def lines(run: Record, rows: Iterable[StepRow], events: Iterable[Mapping[str, Any]] = ()) -> Iterator[str]:
    """Lines of one run: https://github.com/mlcommons/logging, keys of MLPerf training.  events: of its events.jsonl.

    A line is ":::MLLOG " and a JSON object: namespace, time_ms (Unix), event_type, key, value, metadata.  Times are
    those of the events, which bear MLPerf's names; a log that has none is timed by its train time from its start, and
    what is unknown has no line, or no time_ms.  train_s in the metadata is the run's clock, which stands still during
    a validation.
    """
    at_ms: dict[tuple[str, int | None], int | None] = {}
    for event in events:
        step = event.get("step") if event["event"] == "eval_stop" else None
        at_ms[event["event"], step] = _unix_ms(event.get("utc"))
    begun_ms = _unix_ms(run["started_at"])
    start_ms = at_ms.get(("run_start", None), begun_ms)
    yield _line("POINT_IN_TIME", "submission_benchmark", run["track"], begun_ms, run_id=run["run_id"])
    for key, value in _facts(run).items():
        if value not in (None, "unknown"):
            yield _line("POINT_IN_TIME", key, value, begun_ms)
    if ("init_start", None) in at_ms and ("run_start", None) in at_ms:
        yield _line("INTERVAL_START", "init_start", None, at_ms["init_start", None])
        yield _line("INTERVAL_END", "init_stop", None, start_ms)
    yield _line("INTERVAL_START", "run_start", None, start_ms)
    train_ms = 0.0
    for row in rows:
        train_ms = train_ms + (row.get("step_ms") or 0.0) if row.get("train_time_ms") is None else row["train_time_ms"]
        if row.get("val_loss") is not None:
            known_ms = round(start_ms + train_ms) if start_ms is not None and (train_ms or not row["step"]) else None
            time_ms = at_ms.get(("eval_stop", row["step"]), known_ms)
            facts = {"samples_count": row.get("tokens"), "samples": "tokens", "loss": "nats per token"}
            yield _line("POINT_IN_TIME", "eval_accuracy", row["val_loss"], time_ms, step_num=row["step"], **facts)
    has_reached = run["status"] == "complete" and run["metrics"].get("target_reached") is not False
    train_s = run["metrics"].get("train_s")
    total_ms = train_ms if train_s is None else ms_from_s(train_s)
    known_ms = round(start_ms + total_ms) if start_ms is not None and total_ms else None
    facts = {"status": "success" if has_reached else "aborted", "train_s": train_s}
    yield _line("INTERVAL_END", "run_stop", None, at_ms.get(("run_stop", None), known_ms), **facts)


def _line(kind: str, key: str, value: Any, time_ms: int | None, **metadata: Any) -> str:
    event = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}
    return ":::MLLOG " + json.dumps(event)


def _facts(run: Record) -> dict[str, Any]:
    gpus = run["environment"].get("gpus") or []
    return {
        "submission_platform": f"{len(gpus)}x{gpus[0]['name']}" if gpus else run["environment"].get("cpu_model"),
        "seed": run["seed"],
        "global_batch_size": run["measured"].get("batch_tokens"),
        "gradient_accumulation_steps": run["measured"].get("num_micro_steps"),
        "opt_name": run["optim"],
    }


def _unix_ms(text: str | None) -> int | None:
    return None if text is None else round(ms_from_s(utc.seconds(text)))
