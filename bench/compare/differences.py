"""What differs between two groups of runs: config, code, data, environment.  Facts in, a list of differences out.

One difference is {"kind", "what", "a", "b"}; a and b are lists of the values found in that arm, None for unknown.  An
arm whose own runs differ shows several values.
"""

import json

from bench.config import schema
from bench.config.typed import leaves

KINDS = ("config", "code", "data", "environment")
CONFIG_OF_RECORD = ("optim", "goal", "hardware", "instruments", "world_size")
OF_ONE_RUN = ("SPEEDRUN_LAUNCHED_S", "SPEEDRUN_LAUNCHER_PID")  # variables of older records, new for each run


def facts(run: dict, config: dict | None = None, environment: dict | None = None) -> dict[str, dict]:
    """A record, its config.yaml and environment.json (None: unknown) as dicts -> {kind: {dotted name: value}}."""
    if config is None:
        config = {"model": {"arch": run["model"]["arch"]}} | {name: run.get(name) for name in CONFIG_OF_RECORD}
    config = {name: value for name, value in config.items() if name not in schema.UNHASHED}
    config |= {f"instruments.{name}": "on" for name in config.get("instruments") or ()}  # also those without settings
    if isinstance(config.get("track"), dict):  # its rules judge runs and change none
        config["track"] = {name: value for name, value in config["track"].items() if name != "rules"}
    code, data = run["code"], run["data"]
    used = {name: value for name, value in run["environment"].items() if name != "gpus"}
    gpus = {"gpus": _alike(run["environment"].get("gpus") or ())}
    machine = {name: dict((environment or {}).get(name) or {}) for name in ("packages", "env")}
    for name in OF_ONE_RUN:
        machine["env"].pop(name, None)
    protocol = {"timing_protocol": (run.get("timing_protocol") or {}).get("id")}
    known_as = {name: code.get(name) for name in ("source_sha256", "commit", "dirty", "diff_sha256")}
    return {
        "config": _flat(config),
        "code": {"identity_version": code.get("identity_version", 1)} | known_as,
        "data": {"source": data.get("source")}
        | {split: [file["sha256"] for file in data.get(split) or ()] or None for split in ("train", "val")},
        "environment": _flat(used | gpus | protocol | machine),
    }


def of_facts(a_facts: list[dict], b_facts: list[dict]) -> list[dict]:
    """facts() of some runs of A and of B -> [difference], by kind, then by name."""
    result = []
    for kind in KINDS:
        names = sorted({name for one in a_facts + b_facts for name in one[kind]})
        for name in names:
            a, b = _values(a_facts, kind, name), _values(b_facts, kind, name)
            if a != b or len(a) > 1:
                result.append({"kind": kind, "what": name, "a": a, "b": b})
    return result


def _values(all_facts, kind, name):
    """Different values in this arm, in a fixed order."""
    texts = {json.dumps(one[kind].get(name), sort_keys=True, default=str) for one in all_facts}
    return [json.loads(text) for text in sorted(texts)]


def _alike(gpus):
    """GPUs as one: how many, and of each fact the value, or the values of all where they differ."""
    result = {"count": len(gpus)}
    for name in dict.fromkeys(name for gpu in gpus for name in gpu):
        values = [gpu.get(name) for gpu in gpus]
        result[name] = values[0] if values.count(values[0]) == len(values) else values
    return result


def _flat(values):
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    return {name: value for name, value in leaves(values) if value != {}}
