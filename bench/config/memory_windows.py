"""Which steps the memory history shows: windows out of settings, and what is refused before a race starts.  No torch.

Steps are counted as the race prints them: step 1 is the first optimizer step.
"""

import re
from dataclasses import dataclass

STACKS = ("python", "all")
FIELDS = ("name", "first_step", "active_steps", "ranks", "max_entries", "stacks")
TAKEN = "oom"  # what snapshots of an out-of-memory are called


@dataclass(frozen=True)
class Window:
    name: str
    first_step: int
    active_steps: int
    ranks: tuple[int, ...] | None  # None: every rank
    max_entries: int
    stacks: str

    @property
    def last_step(self):
        return self.first_step + self.active_steps - 1

    def has(self, rank):
        return self.ranks is None or rank in self.ranks


def check(instruments):
    """instruments: {name: settings}.  Raises ValueError for windows that cannot be."""
    if "memory_history" in instruments:
        windows_of(instruments["memory_history"])


def windows_of(settings):
    """Settings of the instrument memory_history -> its windows in order: one, or those listed, each with its differences."""
    where = "instruments.memory_history"
    listed = settings.get("windows") or [{}]
    if not isinstance(listed, (list, tuple)) or not all(isinstance(one, dict) for one in listed):
        raise ValueError(
            f"{where}.windows={listed!r}: give a list, e.g. [{{name:early,first_step:2}},{{name:late,first_step:90}}]"
        )
    windows = sorted(
        (_window(where, settings, differences) for differences in listed), key=lambda window: window.first_step
    )
    for window, later in zip(windows, windows[1:]):
        if later.first_step <= window.last_step:
            raise ValueError(
                f"{where}.windows: {later.name} begins at step {later.first_step} and {window.name} ends at step {window.last_step}: "
                f"there is one memory history only, let it begin after step {window.last_step}"
            )
    names = [window.name for window in windows]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}.windows: two are called {name}, and their files would be one: rename one")
    return windows


def _window(where, settings, differences):
    for key in differences:
        if key not in FIELDS:
            raise ValueError(
                f"unknown setting {where}.windows: {key}={differences[key]!r}: a window has {', '.join(FIELDS)}"
            )
    values = {key: differences.get(key, settings[key]) for key in FIELDS}
    name, ranks = values["name"], values["ranks"]
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name.startswith(TAKEN):
        raise ValueError(
            f"{where}.name={name!r}: it begins the names of files: use letters, digits, '-' and '_', and no {TAKEN} in front"
        )
    for key in ("first_step", "active_steps", "max_entries"):
        if not isinstance(values[key], int) or isinstance(values[key], bool) or values[key] < 1:
            raise ValueError(f"{where}.{key}={values[key]!r}: use a whole number of 1 or more")
    if values["stacks"] not in STACKS:
        raise ValueError(f"{where}.stacks={values['stacks']!r}: use {' or '.join(STACKS)}")
    if ranks is not None and (
        not isinstance(ranks, (list, tuple)) or not all(type(rank) is int and rank >= 0 for rank in ranks) or not ranks
    ):
        raise ValueError(f"{where}.ranks={ranks!r}: give a list of ranks, e.g. [0], or null for all")
    return Window(**values | {"ranks": None if ranks is None else tuple(ranks)})
