"""Identifies configs: repeats of a run share their config_id whatever their seeds; near configs try the same thing."""

import contextlib
import copy
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from bench.config import schema

CONFIG_ID_CHARS = 8
# {instrument: {setting: the value that is hashed instead}}, for settings that touch nothing in the timed region and so
# change no config_id. The value is that of the first published runs; None is not hashed. All other settings of
# instruments are hashed. The list is not read from the instruments' classes, because a record's id must be known where
# an instrument that it names is not installed. Telemetry samples in a separate process.
UNTIMED = {"telemetry": {"interval_ms": 100, "host_interval_ms": None}}
# settings that change no step of a run
UNHASHED = ("name", "seed", "exporters", "profile", "look", "checkpoint", "resume")
REPEATS = 3  # hashed instead of track.repeats, which changes no run: every track had 3 when ids were introduced
# the settings that reach a script; all others could change without an effect on it
OF_SCRIPTS = {
    "goal": ("metric", "metric_pattern", "time_budget_s", "token_budget"),
    "hardware": ("device", "num_processes", "nodes", "num_threads"),
    "script": ("path", "module", "command", "torchrun", "args", "python", "env", "data", "raw_data"),
}
NOT_OF_SCRIPTS = ("seq_len", "batch_tokens", "bos_aligned")  # of the data
TARGETS = ("target_val_loss", "target_gap_nats", "target")  # change no run that goes on beyond them
NEAR_FRAC = 0.01  # configs whose settings differ by no more than this part try the same thing (assumed)
FLOAT = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?(?![\w.])")  # a float within text


def config_id(config: schema.Config) -> str:
    """Returns the first 8 hex digits of a sha256 over all that changes a run except its seed: repeats share it.

    None values are not hashed, UNTIMED settings are hashed as one value, and optim is hashed flat, as version 1 wrote
    it. Therefore a setting that a later version adds or moves changes no id.
    """
    return config_ids(config)[0]


def config_ids(config: schema.Config) -> list[str]:
    """Returns config_id() and the ids that earlier versions gave the same config, the newest first."""
    return list(dict.fromkeys(hash_of(_hashed(copy.deepcopy(settings))) for settings in _settings(config)))


def hashed(config: schema.Config) -> dict[str, Any]:
    """Returns a copy of the settings that config_id() hashes."""
    return _hashed(copy.deepcopy(_settings(config)[0]))


def _settings(config: schema.Config) -> tuple[dict[str, Any], ...]:
    """Returns all settings as they are hashed today, then as earlier versions hashed them."""
    whole = schema.to_dict(config)
    as_asked = whole if whole["script"] is None else whole | {"script": whole["script"] | {"lines": None}}
    untimed = as_asked | {
        "instruments": {name: chosen | UNTIMED.get(name, {}) for name, chosen in config.instruments.items()}
    }
    any_repeats = untimed | {"track": as_asked["track"] | {"repeats": REPEATS}}
    newest, before = (any_repeats | {"script": _in_any_folder(asked["script"])} for asked in (whole, as_asked))
    return newest, before, any_repeats, untimed, as_asked


def _in_any_folder(script: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a script's settings with the last part of the paths of script.root and what lies there, as in any clone.

    The code below the root is hashed by source_sha256.
    """
    if script is None or script["root"] is None:
        return script
    return script | {key: script[key] and PurePath(script[key]).name for key in ("root", "dialect")}


def _hashed(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that config_id() hashes; changes values in place."""
    for name in UNHASHED:
        del values[name]
    del values["track"]["rules"]  # rules judge runs and change none
    # timeouts, prices and a sandbox change no run
    for name in ("rendezvous", "rendezvous_timeout_s", "stall_timeout_s", "price_usd_per_hour", "sandbox"):
        del values["hardware"][name]
    if values.get("stages"):
        values["stages"] = [schema.without_none(stage) for stage in values["stages"]]
    if values["optim"] is not None:
        schedule = values["optim"].pop("schedule")
        shared = schedule.keys() & values["optim"].keys() - {"name"}
        if shared:  # possible in classes of the user's own
            raise ValueError(f"optim.{shared.pop()}: the optimizer and its schedule both have it: rename one")
        values["optim"] = {**schedule, **values["optim"], "schedule": schedule["name"]}
    return {key: schema.without_none(value) for key, value in values.items() if value is not None}


def hash_of(values: dict[str, Any]) -> str:
    """Returns the config_id of these hashed() settings."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:CONFIG_ID_CHARS]


def shape(config: schema.Config) -> dict[str, Any]:
    """Returns {"shape_id", "floats", "effective"}: a hash of the config without its floats, the floats in their
    settings' order, and both of the settings that have an effect on training.

    Configs of one shape differ only in floats. Numbers within a script's arguments count as floats; timeouts do not.
    """
    return _shape(hashed(config)) | {"effective": _shape(_effective(hashed(config)))}


def _shape(values: dict[str, Any]) -> dict[str, Any]:
    floats: dict[str, float] = {}
    kept = _without_floats(values, "", floats)
    return {"shape_id": hash_of(kept), "floats": [floats[key] for key in sorted(floats)]}


def effective_shape(start: Mapping[str, Any], results: Path) -> dict[str, Any] | None:
    """Returns the effective shape of a run by its line in the ledger, or, if an earlier version wrote that, by its
    config.yaml; None if that cannot be read."""
    known: dict[str, Any] | None = start.get("effective") or _effective_of(results / start["run"])
    return known


@functools.cache
def _effective_of(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        known: dict[str, Any] = shape(schema.recorded(folder))["effective"]
        return known
    return None


def _effective(values: dict[str, Any]) -> dict[str, Any]:
    """Returns hashed() settings without those that change only validations; of a script only those that reach it, and
    of its path the last part: the code is known by source_sha256."""
    if "script" not in values:
        if values["goal"]["stop_at_target"]:  # validations end the run
            return values
        is_kept = {key: not key.startswith("val_") and key not in TARGETS for key in values["goal"]}
        return values | {"goal": {key: value for key, value in values["goal"].items() if is_kept[key]}}
    values |= {group: {key: values[group].get(key) for key in keys} for group, keys in OF_SCRIPTS.items()}
    values["script"]["path"] = PurePath(values["script"]["path"] or "").name
    return values | {"data": {key: value for key, value in values["data"].items() if key not in NOT_OF_SCRIPTS}}


def are_near(shape: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two shape()s differ only in floats, each by at most NEAR_FRAC of the larger one."""
    if shape["shape_id"] != other["shape_id"] or len(shape["floats"]) != len(other["floats"]):
        return False
    return all(abs(a - b) <= NEAR_FRAC * max(abs(a), abs(b)) for a, b in zip(shape["floats"], other["floats"]))


def _without_floats(value: Any, path: str, floats: dict[str, float]) -> Any:
    """Returns the value with None in place of every float, and stores the floats in `floats`, each under its path."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if not key.endswith("_timeout_s")}
        return {key: _without_floats(inner, f"{path}.{key}", floats) for key, inner in kept.items()}
    if isinstance(value, list):
        return [_without_floats(inner, f"{path}.{number:04}", floats) for number, inner in enumerate(value)]
    if isinstance(value, str):
        for number, digits in enumerate(FLOAT.findall(value)):
            floats[f"{path}.{number:04}"] = float(digits)
        return FLOAT.sub("", value)
    if isinstance(value, float):
        floats[path] = value
        return None
    return value
