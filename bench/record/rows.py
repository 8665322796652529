"""Flattens a record into a row, with everything that tables show and comparisons compute with.

The store keeps rows (bench/record/store.py), so they consist of plain JSON values and depend on nothing but the record
and its config.  None means off, unknown or not measured.
"""

import json
from collections.abc import Iterable
from typing import Any, TypedDict, cast

from bench.base.metric import Metric, from_goal, named
from bench.record import configs, outside_clock, validity
from bench.record.metrics import flagged_steps, target_of
from bench.record.shape import Record, Section, world_sizes


class Asked(TypedDict):
    run_id: str
    track: str | None
    num_deviations: int  # from the settings that the track fixes
    status: str  # running, complete, failed, aborted, stopped
    failure: str | None  # the kind of failure
    validity: str | None  # valid, suspect, invalid
    name: str | None
    seed: int | None
    model: str
    optim: str | None
    metric: str  # the name of the metric of score and target; see bench/base/metric.py
    data: str | None
    world_size: int | None
    device: str | None
    dtype: str | None
    torch: str | None


class Metrics(TypedDict):
    """run.json["metrics"]; all None unless the run is complete, because a failed run's last loss is not a result."""

    num_steps: int | None
    val_loss: float | None  # nats per token, like gap_nats
    score: float | None  # the value of the goal's metric, which is val_loss unless the goal names another
    gap_nats: float | None
    target_reached: bool | None
    train_s: float | None
    step_avg_ms: float | None
    step_ms_p50: float | None
    step_ms_p95: float | None
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    mfu_causal: float | None
    peak_mem_gib: float | None
    compile_s: float | None
    goodput_frac: float | None


class Size(TypedDict):
    """The size of the model and the data, and the energy that the run took."""

    size: str | None  # layers x width, 4x128
    num_params: int | None
    num_shards: int | None  # of training data
    epochs: float | None  # above 1, tokens are repeated
    energy_j: float | None  # in the timed region, all devices together; this and the next two: only of complete runs
    mean_power_w: float | None
    throttled_frac: float | None  # samples of the worst device in which heat or hardware limited its clock


class Provenance(TypedDict):
    wall_s: float | None
    cost_usd: float | None  # wall_s at hardware.price_usd_per_hour; None: no price, or the run is not complete
    cost_usd_to_target: float | None  # train_s at that price, for a run that ended when it reached its target
    energy_kj_to_target: float | None  # energy_j / 1000 of such a run
    started_at: str | None  # UTC, ISO 8601
    config_id: str | None
    commit: str | None
    source_sha256: str | None
    comparability_id: str | None
    session_id: str | None
    race_id: str | None
    arm: str | None
    discarded: bool | None  # whether it is the warm-up run of an arm, which is excluded from means and verdicts
    sweep_id: str | None


class Counted(TypedDict):
    """What a comparison needs beyond the table's columns."""

    provenance: str | None  # imported: a log of another harness
    num_disturbed_steps: int | None  # steps that an instrument disturbed
    num_validating_steps: int | None  # steps whose time includes a validation
    batch_tokens: float | None  # for a run with stages the mean
    metric_unit: str
    metric_direction: str
    target: float | None  # the value of the metric to be reached
    budget: str | None  # JSON, {"time_s": 300.0}: the best score within it counts; None: the last score counts
    num_scores: int | None  # validations within the budget; None without a budget
    stop_at_target: bool | None
    val_tokens: int | None
    setting: str  # JSON of setting()
    outside_s: float | None  # by the launcher's clock, including validations
    outside_validations_s: float | None  # the part of outside_s in validations
    outside_validation_at_start_s: float | None  # the duration of the validation at step 0
    outside_unknown: str | None  # why a record that should have these times has none
    machine_doubts: list[str]
    script_doubt: str | None  # the first reason not to trust what a run, a model or a script reports about itself
    headline: str | None
    log_id: str | None
    identity_version: int | None
    config: configs.Config


class Shown(Asked, Metrics, Size, Provenance):
    """The columns of tables, without the folder, which depends on the user's working folder."""


class Row(Shown, Counted):
    """A run as a flat row."""


class ListedRow(Row):
    """A run in a folder that the user named (bench/record/named.py)."""

    folder: str
    certificate: str | None  # the outcome of its replay; None: it was not replayed


METRICS, SHOWN, COLUMNS = (tuple(kind.__annotations__) for kind in (Metrics, Shown, Row))
# Instruments that watch the machine and not the code: their doubts may exclude a run from a comparison, in either arm.
# A recompilation or a stall that the code causes may not: it is part of how fast the code is.
MACHINE_INSTRUMENTS = ("telemetry", "host", "clock", outside_clock.MACHINE)
DISTRUSTING = ("script", validity.FILES, outside_clock.CLOCK)  # if these doubt a run, its own times cannot be trusted
PLAIN = frozenset((str, int, float, bool, type(None)))  # the types of values in columns, except in
OF_SEVERAL = ("config", "machine_doubts")


def row_of(run: Record, config: configs.Config = ()) -> Row:
    """Returns the row of a record.  config: its settings, from configs.read().

    Raises ValueError if a column would have several values, or if the name of a setting cannot be that of a column.
    """
    complete = run["status"] == "complete"
    ends_at_target = complete and (run.get("goal") or {}).get("stop_at_target") and run["metrics"].get("target_reached")
    env, measured, code = run["environment"], run["measured"], run["code"]
    gpus, race = env.get("gpus") or (), run.get("race") or {}
    facts: dict[str, Any] = {
        "race_id": race.get("race_id"),
        "arm": race.get("arm"),
        "discarded": race.get("discarded"),
        "failure": (run["failure"] or {}).get("kind"),
        "num_deviations": len(run["deviations"]),
        "model": run["model"]["arch"],
        "metric": from_goal(run.get("goal")).name,
        "data": run["data"]["source"],
        "device": f"{len(gpus)} x {gpus[0]['name']}" if gpus else env.get("cpu_model"),
        "dtype": measured.get("dtype"),
        "torch": env.get("torch"),
        "wall_s": measured.get("wall_s") if complete else None,
        "cost_usd": _cost_usd(run, measured.get("wall_s")) if complete else None,
        "cost_usd_to_target": _cost_usd(run, run["metrics"].get("train_s")) if ends_at_target else None,
        "commit": code.get("commit"),
        "source_sha256": code.get("source_sha256"),
        "sweep_id": (run.get("sweep") or {}).get("sweep_id"),
    }
    metrics = {name: run["metrics"].get(name) if complete else None for name in METRICS}
    if "score" not in run["metrics"]:  # the goal names no other metric
        metrics["score"] = metrics["val_loss"]
    row = {column: run.get(column) for column in SHOWN} | facts | metrics
    size = _size(run, config, complete)
    if ends_at_target and size["energy_j"] is not None:
        row["energy_kj_to_target"] = size["energy_j"] / 1e3
    row |= {**size, **_counted(run, config, complete)}
    assert tuple(row) == COLUMNS  # the store keeps the values in this order
    if any(r"\u0000" in text and any("\0" in name for name in configs.settings([text])) for text in config):
        raise ValueError("config.yaml: the name of a setting has the character 0: the file was damaged, restore it")
    for column, value in row.items():
        if type(value) not in PLAIN and column not in OF_SEVERAL:
            raise ValueError(f"{column}={value!r:.40} is not one value: the file was damaged, restore it")
    return cast(Row, row)


def _cost_usd(run: Record, time_s: float | None) -> float | None:
    price_usd_per_hour = (run.get("hardware") or {}).get("price_usd_per_hour")
    return None if price_usd_per_hour is None or time_s is None else price_usd_per_hour * time_s / 3600


def _size(run: Record, config: configs.Config, complete: bool) -> Size:
    data, settings = run["data"], configs.group(config, "model")
    layers, width = settings.get("model.num_layers"), settings.get("model.width")
    shards, summaries = data.get("train") or (), run.get("instrument_summaries") if complete else None
    telemetry = (summaries or {}).get("telemetry") or {}
    devices = (telemetry.get("by_device") or {}).values()
    slowed = [device["slowed_frac"] for device in devices if device.get("slowed_frac") is not None]
    metrics = run["metrics"] if complete else {}
    epochs, num_tokens = data.get("epochs"), sum(shard.get("num_tokens") or 0 for shard in shards)
    num_seen = (metrics.get("num_steps") or 0) * (run["measured"].get("batch_tokens") or 0)
    if epochs is None and num_tokens and num_seen:  # older records do not have it
        epochs = num_seen / num_tokens
    # Older records have power and energy only in the summary, which covers only the last segment of a resumed run
    energy = {} if run.get("segments") else telemetry
    power_w, energy_j = metrics.get("mean_power_w"), metrics.get("energy_j")
    return {
        "size": None if layers is None or width is None else f"{layers}x{width}",
        "num_params": run["model"].get("num_params"),
        "num_shards": len(shards) or None,
        "epochs": epochs,
        "energy_j": energy.get("energy_j") if energy_j is None else energy_j,
        "mean_power_w": energy.get("mean_power_w") if power_w is None else power_w,
        "throttled_frac": max(slowed, default=None),
    }


def _counted(run: Record, config: configs.Config, complete: bool) -> Counted:
    goal, imported, doubts = run.get("goal") or {}, run.get("imported") or {}, run.get("doubts") or ()
    floor_nats, gap_nats = run["data"].get("floor_nats"), goal.get("target_gap_nats")
    goal_metric, target = from_goal(goal), target_of(goal)
    if gap_nats is not None and floor_nats is not None:
        target = floor_nats + gap_nats
    distrusted = [doubt["doubt"] for doubt in doubts if doubt.get("instrument") in DISTRUSTING]
    contestant_doubts = validity.contestant_doubts(run) if complete else []
    distrusted += contestant_doubts
    # reasons for being suspect that come neither from the referee nor from an instrument that watches the code
    code_doubts = {doubt["doubt"] for doubt in doubts if doubt.get("instrument") not in MACHINE_INSTRUMENTS}
    machine_doubts = [why for why in run["validity_reasons"] if why not in code_doubts and why not in contestant_doubts]
    num_disturbed, num_validating = flagged_steps(run) if complete else (None, None)
    outside = ((run.get("referee") or {}).get("clock") or {}) if complete else {}
    file_id = f"{imported['sha256']}-{imported['run_of_file']}" if "sha256" in imported else None
    return {
        "provenance": run.get("provenance"),
        "num_disturbed_steps": num_disturbed,
        "num_validating_steps": num_validating,
        "batch_tokens": run["measured"].get("batch_tokens") if complete else None,
        "metric_unit": goal_metric.unit,
        "metric_direction": goal_metric.direction,
        "target": target,
        "budget": encoded(goal["budget"]) if goal.get("budget") else None,
        "num_scores": run["metrics"].get("num_scores") if complete else None,
        "stop_at_target": goal.get("stop_at_target"),
        "val_tokens": goal.get("val_tokens"),
        "setting": encoded(setting(run)),
        "outside_s": outside.get("outside_s"),
        "outside_validations_s": outside.get("outside_validations_s"),
        "outside_validation_at_start_s": outside.get("validation_at_start_s"),
        "outside_unknown": outside.get("unknown"),
        "machine_doubts": machine_doubts if complete and run["validity"] == "suspect" else [],
        "script_doubt": next(iter(distrusted), None),
        "headline": ", ".join(imported.get("headline") or ()) or None,
        "log_id": imported.get("same_run_id") or file_id,
        "identity_version": None if imported else run["code"].get("identity_version", 1),
        "config": config,
    }


def metric_of(rows: Iterable[Row]) -> Metric:
    """Returns the metric of these runs' goals: that of the first run, or val_loss without runs."""
    row = next(iter(rows), None)  # rows that an older revision made may lack the metric
    return named(row.get("metric"), row.get("metric_unit"), row.get("metric_direction")) if row else named()


def encoded(value: object) -> str:
    """Encodes a value as JSON text with sorted keys."""
    import msgspec

    try:
        return msgspec.json.encode(value, order="sorted").decode()
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, a number of more than 64 bits
        return json.dumps(value, sort_keys=True)


def setting(run: Record) -> Section:
    """Returns what must be equal for times to be comparable, which comparability_id hashes; None means unknown."""
    env, protocol, data = run["environment"], run.get("timing_protocol") or {}, run["data"]
    gpus = env.get("gpus") or ()
    is_log = run.get("provenance") == "imported"
    # how a log computes its step_avg tells which steps its time covers
    meaning = (run.get("imported") or run.get("script") or {}).get("step_avg_meaning")
    timed_steps = meaning and ("not the first ones" if "untimed" in meaning else "all")
    if protocol.get("id") == "script-wall-1":  # from the first line on, whichever step that is of
        timed_steps = f"those after step {run['measured'].get('num_untimed_steps')}"
    cpu = {} if gpus else {name: env.get(name) for name in ("cpu_model", "num_cpus", "num_threads")}
    return {
        "gpus": sorted(str(gpu.get("name")) for gpu in gpus) if gpus or not is_log else None,  # [] means a CPU
        "power_limits_w": sorted(gpu["power_limit_w"] for gpu in gpus if gpu.get("power_limit_w") is not None) or None,
        **cpu,
        **{name: env.get(name) for name in ("driver", "cuda", "nccl", "torch")},
        "timing_protocol": protocol.get("id"),
        "timed_steps": timed_steps,
        "instruments": protocol.get("instruments"),
        "train_data": [file["sha256"] for file in data.get("train") or ()] or None,
        "val_data": [file["sha256"] for file in data.get("val") or ()] or None,
        "world_size": sizes if len(set(sizes := world_sizes(run))) > 1 else run.get("world_size"),
        **({"compile_flags": flags} if (flags := run["measured"].get("compile_flags")) is not None else {}),
        **({"beside": beside["num_slots"]} if (beside := run.get("beside")) else {}),
        **({"broken_time": True} if validity.broken_time(run) else {}),
    }
