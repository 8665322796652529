"""A record -> one flat row of facts: all that the table shows and a comparison counts with.

Rows are what the index keeps (bench/record/index.py), so they hold plain JSON values only and depend on the record alone.
"""

import json

# fmt: off
METRICS = (
    "num_steps", "val_loss", "gap_nats", "target_reached", "train_s", "step_avg_ms", "step_ms_p50", "step_ms_p95",
    "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "mfu_causal", "peak_mem_gib", "compile_s", "goodput_frac",
)
SHOWN = (  # the table's, without the folder, which depends on where one stands
    "run_id", "track", "num_deviations", "status", "failure", "validity", "name", "seed", "model", "optim", "data",
    "world_size", "device", "dtype", "torch", *METRICS, "wall_s", "started_at", "config_id", "commit",
    "source_sha256", "comparability_id", "session_id", "race_id", "arm", "discarded",
)
COUNTED = (  # a comparison's, beyond those
    "provenance", "num_flagged_steps", "batch_tokens", "energy_j", "target_val_loss", "stop_at_target", "val_tokens", "setting",
    "machine_doubts", "headline", "log_id", "identity_version",
)
# fmt: on
COLUMNS = (*SHOWN, *COUNTED)
ENCODE = json.JSONEncoder(sort_keys=True).encode
# Instruments that watch the machine, not the code: what they doubt may leave a run out of a comparison, for both arms.
# A recompile or a stall of the code's own making may not: that is part of how fast the code is.
MACHINE_INSTRUMENTS = ("telemetry", "host")


def row_of(run):
    """A record -> its row, a dict by COLUMNS.  Numbers only of complete runs: a failed one's last loss is no result."""
    complete = run["status"] == "complete"
    env, measured, code = run["environment"], run["measured"], run["code"]
    gpus, race = env.get("gpus") or (), run.get("race") or {}
    facts = {
        "race_id": race.get("race_id"),
        "arm": race.get("arm"),
        "discarded": race.get("discarded"),  # the warm-up run of an arm: in the ledger, in no mean and no verdict
        "failure": (run["failure"] or {}).get("kind"),
        "num_deviations": len(run["deviations"]),
        "model": run["model"]["arch"],
        "data": run["data"]["source"],
        "device": f"{len(gpus)} x {gpus[0]['name']}" if gpus else env.get("cpu_model"),
        "dtype": measured.get("dtype"),
        "torch": env.get("torch"),
        "wall_s": measured.get("wall_s") if complete else None,
        "commit": code.get("commit"),
        "source_sha256": code.get("source_sha256"),
    }
    metrics = {name: run["metrics"].get(name) if complete else None for name in METRICS}
    row = {column: run.get(column) for column in SHOWN} | facts | metrics | _counted(run, complete)
    assert tuple(row) == COLUMNS  # the index keeps the values in this order
    return row


def _counted(run, complete):
    goal, metrics, imported = run.get("goal") or {}, run["metrics"], run.get("imported") or {}
    return {
        "provenance": run.get("provenance"),
        "num_flagged_steps": metrics.get("num_flagged_steps") if complete else None,
        "batch_tokens": run["measured"].get("batch_tokens") if complete else None,
        "energy_j": _energy_j(run) if complete else None,
        "target_val_loss": _target(goal, run["data"].get("floor_nats")),
        "stop_at_target": goal.get("stop_at_target"),
        "val_tokens": goal.get("val_tokens"),
        "setting": ENCODE(setting(run)),
        "machine_doubts": _machine_doubts(run) if complete and run["validity"] == "suspect" else [],
        "headline": ", ".join(imported.get("headline") or ()) or None,
        "log_id": imported.get("same_run_id")
        or (f"{imported['sha256']}-{imported['run_of_file']}" if "sha256" in imported else None),
        "identity_version": None if imported else run["code"].get("identity_version", 1),
    }


def setting(run):
    """What must be alike for times to be comparable, by name: what comparability_id hashes; None is unknown."""
    env, protocol, data = run["environment"], run.get("timing_protocol") or {}, run["data"]
    gpus = env.get("gpus") or ()
    is_log = run.get("provenance") == "imported"
    cpu = {} if gpus else {name: env.get(name) for name in ("cpu_model", "num_cpus", "num_threads")}
    return {
        "gpus": sorted(str(gpu.get("name")) for gpu in gpus) if gpus or not is_log else None,  # [] is a CPU
        "power_limits_w": sorted(gpu["power_limit_w"] for gpu in gpus if gpu.get("power_limit_w") is not None) or None,
        **cpu,
        **{name: env.get(name) for name in ("driver", "cuda", "nccl", "torch")},
        "timing_protocol": protocol.get("id"),
        "timed_steps": _timed_steps(run.get("imported") or {}),
        "instruments": protocol.get("instruments"),
        "train_data": [file["sha256"] for file in data.get("train") or ()] or None,
        "val_data": [file["sha256"] for file in data.get("val") or ()] or None,
        "world_size": run.get("world_size"),
    }


def _timed_steps(imported):
    """Which steps a log's train time counts: what its own step_avg divides by says so."""
    meaning = imported.get("step_avg_meaning")
    return meaning and ("not the first ones" if "untimed" in meaning else "all")


def _energy_j(run):
    """Of the timed region, all devices together: from the record's metrics, or from the telemetry's summary."""
    telemetry = (run.get("instrument_summaries") or {}).get("telemetry") or {}
    found = run["metrics"].get("energy_j")
    return telemetry.get("energy_j") if found is None else found


def _target(goal, floor_nats):
    """The val_loss to be below: the goal's, or its gap above the data's known floor; None without a target."""
    gap_nats = goal.get("target_gap_nats")
    return floor_nats + gap_nats if gap_nats is not None and floor_nats is not None else goal.get("target_val_loss")


def _machine_doubts(run):
    """Why the run is suspect, without what an instrument that watches the code itself had to say."""
    of_code = {
        doubt["doubt"] for doubt in run.get("doubts") or () if doubt.get("instrument") not in MACHINE_INSTRUMENTS
    }
    return [reason for reason in run["validity_reasons"] if reason not in of_code]
