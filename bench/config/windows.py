"""Windows of steps that an instrument records: what all of them have, and the checks of their settings.

Steps are counted as the run prints them: step 1 is the first optimizer step, row 1 of steps.csv.
"""

import re
from dataclasses import dataclass

STACKS = ("python", "all")


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


def check_name(where: str, name: object, shown: str | None = None) -> None:
    """Raises ValueError for what cannot be part of a file's name.  shown: what the user typed, None: name."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        remedy = "it becomes part of a file's name inside the run: use letters, digits, '-', '_' and '.'"
        raise ValueError(f"{where}={name if shown is None else shown}: {remedy}")


def check_whole(where: str, value: object, least: int) -> None:
    """where: the setting's dotted key.  Raises ValueError for what is no whole number of least or more."""
    if type(value) is not int or value < least:
        raise ValueError(f"{where}={value!r}: use a whole number of {least} or more")


def check_switches(where, values, *keys):
    for key in keys:
        if not isinstance(values[key], bool):
            raise ValueError(f"{where}.{key}={values[key]!r}: use true or false")


def check_choice(where, value, choices):
    if value not in choices:
        raise ValueError(f"{where}={value}: choose from {', '.join(choices)}")


def check_max_mib(where, value):
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
        raise ValueError(f"{where}.max_mib={value!r}: use a number of MiB above 0, or null for no limit")


def ranks_of(where: str, ranks: object) -> tuple[int, ...] | None:
    """The setting ranks -> a Window's.  Raises ValueError for what is no list of ranks."""
    if ranks is None:
        return None
    whole = isinstance(ranks, (list, tuple)) and all(type(rank) is int for rank in ranks)
    if not whole or not ranks or min(ranks) < 0:
        raise ValueError(f"{where}.ranks={ranks!r}: give a list of ranks, e.g. [0], or null for all")
    return tuple(sorted(set(ranks)))


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
