"""config.yaml of every version -> as the newest version has it.  Imports nothing: tables read thousands of them.

1  optim flat: its schedule a name, and the settings of all optimizers and schedules, None where unused
2  optim has the settings of its own optimizer, optim.schedule those of its schedule; exporters are not instruments
"""

from typing import Any

GONE_RULES = ("forbidden_instruments", "num_runs")  # of track.rules in older records; num_runs is track.repeats now


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """config.yaml's values, of any version -> as the newest version has them, in a new dict."""
    optim, track = values.get("optim"), values.get("track")
    if isinstance(optim, dict) and isinstance(optim.get("schedule"), str):
        optim = without_none(optim)
        schedule = {"name": optim.pop("schedule")}
        names = ("warmup_frac", "cooldown_frac", "final_lr_frac")
        schedule |= {name: optim.pop(name) for name in names if name in optim}
        values = values | {"optim": optim | {"schedule": schedule}}
    if isinstance(track, dict) and isinstance(track.get("rules"), dict):
        rules = {name: rule for name, rule in track["rules"].items() if name not in GONE_RULES}
        values = values | {"track": track | {"rules": rules}}
    return values


def without_none(values: Any) -> Any:
    """A nested dict without the keys that are None; any other value as it is."""
    if not isinstance(values, dict):
        return values
    return {key: without_none(value) for key, value in values.items() if value is not None}
