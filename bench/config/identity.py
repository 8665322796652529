"""config_id, which repeats of a run share whatever their seeds, and which configs are near: tries of the same thing."""

import copy
import hashlib
import json
import re
from typing import Any

from bench.config import schema

CONFIG_ID_CHARS = 8
# Settings of instruments that touch nothing between the edges of the clock: {instrument: {setting: what is hashed in
# its place}}, so that they change no config_id.  What is hashed is what the first published runs had; None is nothing.
# All other settings of instruments are hashed.  Not read from the instruments' classes, because a record's id must be
# found where one that it names is not installed.  Telemetry's are paces of a separate process.
UNTIMED = {"telemetry": {"interval_ms": 100, "host_interval_ms": None}}
# they change no step that a run makes
UNHASHED = ("name", "seed", "exporters", "profile", "look", "checkpoint", "resume")
REPEATS = 3  # hashed instead of track.repeats, which changes no run: what every track had when ids began
NEAR_FRAC = 0.01  # of a setting: configs that differ by no more are tries of the same thing (assumed)
FLOAT = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?(?![\w.])")  # within a word


def config_id(config: schema.Config) -> str:
    """First 8 hex digits of a sha256 over all that changes a run but its seed: runs that share it are repeats.

    What is None is not hashed, what is UNTIMED is hashed as one value, and optim is hashed flat, as version 1 wrote it:
    a setting that a later version adds or moves changes no id.
    """
    return config_ids(config)[0]


def config_ids(config: schema.Config) -> list[str]:
    """config_id() of today and those that earlier versions gave the same config, the newest first."""
    return list(dict.fromkeys(hash_of(_hashed(copy.deepcopy(settings))) for settings in _settings(config)))


def hashed(config: schema.Config) -> dict[str, Any]:
    """The settings that config_id() hashes, a copy."""
    return _hashed(copy.deepcopy(_settings(config)[0]))


def _settings(config: schema.Config) -> tuple[dict[str, Any], ...]:
    """All settings as they are hashed today, and as earlier versions hashed them."""
    as_asked = schema.to_dict(config)
    untimed = as_asked | {
        "instruments": {name: chosen | UNTIMED.get(name, {}) for name, chosen in config.instruments.items()}
    }
    return untimed | {"track": as_asked["track"] | {"repeats": REPEATS}}, untimed, as_asked


def _hashed(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that config_id hashes; changes values in place."""
    for name in UNHASHED:
        del values[name]
    del values["track"]["rules"]  # they judge runs and change none
    # how long is waited, and what it costs, changes no run
    for name in ("rendezvous", "rendezvous_timeout_s", "stall_timeout_s", "price_usd_per_hour"):
        del values["hardware"][name]
    if values.get("stages"):
        values["stages"] = [schema.without_none(stage) for stage in values["stages"]]
    if values["optim"] is not None:
        schedule = values["optim"].pop("schedule")
        shared = schedule.keys() & values["optim"].keys() - {"name"}
        if shared:  # of the user's own classes
            raise ValueError(f"optim.{shared.pop()}: the optimizer and its schedule both have it: rename one")
        values["optim"] = {**schedule, **values["optim"], "schedule": schedule["name"]}
    return {key: schema.without_none(value) for key, value in values.items() if value is not None}


def hash_of(values: dict[str, Any]) -> str:
    """The config_id that these hashed() settings have."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:CONFIG_ID_CHARS]


def shape(config: schema.Config) -> dict[str, Any]:
    """{"shape_id", "floats"}: config_id without the floats, and these in the order of their settings' names.

    Configs of one shape differ only in floats.  Numbers within a script's arguments are among them; timeouts are not.
    """
    floats: dict[str, float] = {}
    values = _without_floats(hashed(config), "", floats)
    return {"shape_id": hash_of(values), "floats": [floats[key] for key in sorted(floats)]}


def are_near(shape: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two shape()s differ only in floats, each by at most NEAR_FRAC of the larger one."""
    if shape["shape_id"] != other["shape_id"] or len(shape["floats"]) != len(other["floats"]):
        return False
    return all(abs(a - b) <= NEAR_FRAC * max(abs(a), abs(b)) for a, b in zip(shape["floats"], other["floats"]))


def _without_floats(value: Any, path: str, floats: dict[str, float]) -> Any:
    """The value with None for every float in it, which goes to floats under its path."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if not key.endswith("_timeout_s")}
        return {key: _without_floats(inner, f"{path}.{key}", floats) for key, inner in kept.items()}
    if isinstance(value, list):
        return [_without_floats(inner, f"{path}.{number:04}", floats) for number, inner in enumerate(value)]
    if isinstance(value, str):
        for number, found in enumerate(FLOAT.findall(value)):
            floats[f"{path}.{number:04}"] = float(found)
        return FLOAT.sub("", value)
    if isinstance(value, float):
        floats[path] = value
        return None
    return value
