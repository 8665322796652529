"""Windows of steps that an instrument records: what all of them have, and the checks of their settings.

Steps are counted as the run prints them: step 1 is the first optimizer step, row 1 of steps.csv.
"""

import re
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
FLAGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


def _whole(least):
    return lambda value: type(value) is int and value >= least, f"use a whole number of {least} or more"


def _one_of(*choices):
    return choices.__contains__, f"choose from {', '.join(choices)}"


def _list_of(holds, words):
    return lambda value: value is None or isinstance(value, (list, tuple)) and value and all(map(holds, value)), words


def _is_mib(value):
    return value is None or type(value) in (int, float) and value > 0


_PATH = "it becomes part of a file's name inside the run: use letters, digits, '-', '_' and '.'"
# {setting: (whether a value can be, what to do about one that cannot)}: a name means the same in every instrument
RULES = {
    **dict.fromkeys(("step", "first_step", "active_steps", "end_step", "max_entries"), _whole(1)),
    **dict.fromkeys(("warmup_steps", "start_step"), _whole(0)),
    **dict.fromkeys(
        (*FLAGS, "gzip", "compilation", "enable"), (lambda value: type(value) is bool, "use true or false")
    ),
    "stacks": _one_of("python", "all"),
    "classifier": _one_of("fixed", "kempner_v0"),
    "name": (lambda value: isinstance(value, str) and NAME.fullmatch(value), _PATH),
    "trace_dir": (lambda value: not value or all(map(NAME.fullmatch, value.split("/"))), _PATH),
    "max_mib": (_is_mib, "use a number of MiB above 0, or null for no limit"),
    "ranks": _list_of(_whole(0)[0], "give a list of ranks, e.g. [0], or null for all"),
    "activities": _list_of(
        ("cpu", "cuda").__contains__, "give a list of cpu and cuda, or null for all of this machine"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Window:
    """Steps first_step to last_step."""

    name: str
    first_step: int
    active_steps: int
    ranks: tuple[int, ...] | None = None  # None: every rank

    @property
    def last_step(self) -> int:
        return self.first_step + self.active_steps - 1

    def has(self, rank: int) -> bool:
        """Whether that rank records it."""
        return self.ranks is None or rank in self.ranks


def each(where, settings, fields):
    """Settings of an instrument -> (dotted key, all settings) of its one window, or of each listed in windows."""
    listed = settings.get("windows") or [{}]
    example = "give a list, e.g. [{name:early,first_step:5},{name:late,first_step:90}]"
    if not isinstance(listed, (list, tuple)) or not all(isinstance(one, dict) for one in listed):
        raise ValueError(f"{where}.windows={listed!r}: {example}")
    for number, differences in enumerate(listed):
        here = f"{where}.windows[{number}]" if settings.get("windows") else where
        for key in differences:
            if key not in fields:
                has = ", ".join(fields)
                raise ValueError(f"unknown setting {here}.{key}={differences[key]!r}: a window has {has}")
        yield here, {key: differences.get(key, settings[key]) for key in fields}


def check(where: str, values: dict) -> None:
    """values: settings that RULES may know.  Raises ValueError for the first that cannot be."""
    for key, value in values.items():
        holds, remedy = RULES.get(key, (None, ""))
        if holds and not holds(value):
            is_word = isinstance(value, str) and "whole number" not in remedy
            raise ValueError(f"{where}.{key}={value if is_word else repr(value)}: {remedy}")


def check_whole(where: str, value: object, least: int) -> None:
    """where: the setting's dotted key.  Raises ValueError for what is not a whole number of at least least."""
    holds, remedy = _whole(least)
    if not holds(value):
        raise ValueError(f"{where}={value!r}: {remedy}")


def ranks_of(ranks: list[int] | None) -> tuple[int, ...] | None:
    """The setting ranks, checked -> a Window's."""
    return None if ranks is None else tuple(sorted(set(ranks)))


def check_ranks(instruments: dict[str, dict], num_processes: int) -> None:
    """Raises ValueError where ranks are chosen that the run does not have: nothing would be recorded."""
    for name, settings in instruments.items():
        where = f"instruments.{name}"
        chosen = [(f"{where}.ranks", settings.get("ranks"))]
        chosen += [(f"{where}.windows: ranks", window.get("ranks")) for window in settings.get("windows") or ()]
        for key, ranks in chosen:
            missing = [rank for rank in ranks or () if rank >= num_processes]
            if missing:
                processes = f"{num_processes} process{'es' * (num_processes > 1)}"
                remedy = f"the run has {processes}, ranks from 0: remove {missing[0]}"
                raise ValueError(f"{key}={list(ranks)}: {remedy}")
