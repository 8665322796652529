"""A run as MLPerf's ":::MLLOG {json}" lines."""

import json

from bench import utc


def lines(run, rows, events=()):
    """Lines of one run: https://github.com/mlcommons/logging, keys of MLPerf training.  events: of its events.jsonl.

    A line is ":::MLLOG " and a JSON object: namespace, time_ms (Unix), event_type, key, value, metadata.  Times are those of the
    events, which bear MLPerf's names; a log that has none is timed by its train time from its start, and what is unknown has no
    line, or no time_ms.  train_s in the metadata is the race's clock, which stands still while a validation runs.
    """
    at_ms = {
        (event["event"], event.get("step") if event["event"] == "eval_stop" else None): _unix_ms(event.get("utc"))
        for event in events
    }
    begun_ms = _unix_ms(run["started_at"])
    start_ms = at_ms.get(("run_start", None), begun_ms)

    def line(kind, key, value, time_ms, **metadata):
        event = {
            "namespace": "",
            "time_ms": time_ms,
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        return ":::MLLOG " + json.dumps(event)

    gpus = run["environment"].get("gpus") or []
    yield line("POINT_IN_TIME", "submission_benchmark", run["track"], begun_ms, run_id=run["run_id"])
    platform = f"{len(gpus)}x{gpus[0]['name']}" if gpus else run["environment"].get("cpu_model")
    measured = run["measured"]
    facts = {
        "submission_platform": platform,
        "seed": run["seed"],
        "global_batch_size": measured.get("batch_tokens"),
        "gradient_accumulation_steps": measured.get("num_micro_steps"),
        "opt_name": run["optim"],
    }
    for key, value in facts.items():
        if value not in (None, "unknown"):
            yield line("POINT_IN_TIME", key, value, begun_ms)
    if ("init_start", None) in at_ms and ("run_start", None) in at_ms:
        yield line("INTERVAL_START", "init_start", None, at_ms["init_start", None])
        yield line("INTERVAL_END", "init_stop", None, start_ms)
    yield line("INTERVAL_START", "run_start", None, start_ms)
    train_ms = 0.0
    for row in rows:
        train_ms = (
            row["train_time_ms"] if row.get("train_time_ms") is not None else train_ms + (row.get("step_ms") or 0.0)
        )
        if row.get("val_loss") is not None:
            known = round(start_ms + train_ms) if start_ms is not None and (train_ms or not row["step"]) else None
            told = {
                "step_num": row["step"],
                "samples_count": row.get("tokens"),
                "samples": "tokens",
                "loss": "nats per token",
            }
            yield line(
                "POINT_IN_TIME", "eval_accuracy", row["val_loss"], at_ms.get(("eval_stop", row["step"]), known), **told
            )
    status = (
        "success" if run["status"] == "complete" and run["metrics"].get("target_reached") is not False else "aborted"
    )
    train_s = run["metrics"].get("train_s")
    total_ms = 1e3 * train_s if train_s is not None else train_ms
    known = round(start_ms + total_ms) if start_ms is not None and total_ms else None
    yield line("INTERVAL_END", "run_stop", None, at_ms.get(("run_stop", None), known), status=status, train_s=train_s)


def _unix_ms(text):
    return None if text is None else round(1e3 * utc.seconds(text))
