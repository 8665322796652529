"""What a user types after ./run.sh race -> arms and settings.  Pure: nothing is looked up, nothing is run."""

import shlex
from collections.abc import Iterable

from bench.plans.race import plan

SETTINGS = {  # word: (what the plan calls it, how it is read, what it must be)
    "n": ("n", int, "a number of runs"),
    "looks": ("looks", lambda text: [int(part) for part in text.split(",")], "numbers of runs, 3,5"),
    "alpha": ("alpha", float, "a number"),
    "margin": ("loss_margin_nats", float, "a number of nats"),
    "seed": ("first_seed", int, "a number"),
    "name": ("name", str, "a name"),
}


def parse(words: Iterable[str]) -> dict:
    """Words -> {"arms": {name: {"overrides", "rev"}}, and the settings that were given}.  ValueError: what is wrong."""
    arms, pythons, common, settings = {}, {}, [], {}
    for word in words:
        key, equals, value = word.partition("=")
        name, dot, what = key.partition(".")
        if not equals:
            raise ValueError(f"{word!r}: write key=value, or A=... for an arm of the race")
        if key in SETTINGS:
            settings[SETTINGS[key][0]] = _setting(key, value)
        elif plan.ARM.fullmatch(name) and what == "python":
            pythons[name] = [f"script.python={value}"]
        elif plan.ARM.fullmatch(name) and (not dot or what == "rev"):
            arm = arms.setdefault(name, {"overrides": [], "rev": None})
            arm.update({"rev": value} if dot else {"overrides": _split(word, value)})
        else:
            _refuse_half_an_arm(word, name, what, value)
            common.append(word)
    if unknown := pythons.keys() - arms.keys():
        name = min(unknown)
        raise ValueError(f"{name}.python: the race has no arm {name}: write {name}='script=...' too")
    for name, arm in arms.items():
        arm["overrides"] = [*common, *arm["overrides"], *pythons.get(name, [])]
        seeds = [word for word in arm["overrides"] if word.startswith("seed=")]
        if seeds:
            words = "the race sets the seeds, the same for every arm: write seed=N beside the arms to begin at N"
            raise ValueError(f"{name}={seeds[0]}: {words}")
    return {"arms": arms, **settings}


def _refuse_half_an_arm(word, name, what, value):
    """What is meant for one arm and would be taken for a setting of all: B.goal.num_steps=40, b=optim=muon."""
    if plan.ARM.fullmatch(name):
        raise ValueError(f"{word}: all settings of an arm stand in its one word: write {name}='{what}={value}'")
    if len(name) == 1 and not what:
        raise ValueError(f"{word}: an arm's name begins with a capital letter: write {name.upper()}='{value}'")


def _setting(key, value):
    _, read, what = SETTINGS[key]
    try:
        result = read(value)
    except ValueError:
        raise ValueError(f"{key}={value}: it must be {what}") from None
    if key == "name" and (not value or not all(char.isalnum() or char in "._-" for char in value) or value[0] == "."):
        raise ValueError(f"name={value}: it becomes part of a folder's name: use letters, digits, '-', '_' and '.'")
    return result


def _split(word, value):
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{word}: {error}") from None
