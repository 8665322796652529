"""The columns of the results table, and which rows in which order: what --columns, --where and --sort say.

A key is a column of every row, or a setting of config.yaml by its dotted name.
"""

import difflib
import fnmatch
import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

from bench.record import configs
from bench.record.rows import METRICS, SHOWN

CONDITION = re.compile(r"([\w.]+)(<=|>=|!=|=|<|>)(.*)", re.S)
GLOB = re.compile(r"[*?\[]")
YES_OR_NO = ("target_reached", "discarded")
NUMBERS = (
    *(name for name in METRICS if name != "target_reached"),
    *("num_deviations", "seed", "world_size", "wall_s", "num_params", "num_shards", "epochs"),
    *("energy_j", "mean_power_w", "throttled_frac"),
)
BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}
OPERATORS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
COLUMNS = (*SHOWN, "folder", "certificate")  # of every row
MAX_VARIED = 8  # settings that are shown unasked: runs that differ in more are no sweep

TableRow = MutableMapping[str, Any]  # a run (bench/record/rows.py), or with --group its repeats


class Condition(NamedTuple):
    """E.g. val_loss<4.  wanted: the words behind the sign, alternatives between commas; None: no value."""

    words: str
    key: str
    sign: str
    wanted: str | None


class Columns:
    """What the rows at hand may be asked for, by name.  fixed: columns of each of them."""

    def __init__(self, rows: Sequence[TableRow], fixed: Sequence[str] = COLUMNS):
        self._rows, self._fixed = rows, list(fixed)
        self.num_varied = 0  # after varied(): also of those that it did not give

    @functools.cached_property
    def settings(self) -> list[str]:
        """Every setting that one of the rows has."""
        return configs.keys(self._rows)

    def named(self, words: Iterable[str], option: str) -> list[str]:
        """Names and globs of a user's -> columns, which are in every row afterwards.  ValueError for another word."""
        names = list(dict.fromkeys(name for word in words for name in self._named(word, option)))
        configs.add(self._rows, [name for name in names if name not in self._fixed])
        return names

    def _named(self, word: str, option: str) -> list[str]:
        if word in self._fixed:
            return [word]
        if f"{word}_mean" in self._fixed:  # of a group
            return [f"{word}_mean"]
        if word in self.settings or (not self._rows and "." in word):  # without a run its settings are unknown
            return [word]
        known = [*self._fixed, *self.settings]
        if GLOB.search(word) and (names := fnmatch.filter(known, word)):
            return names
        near = [name for name in known if name.endswith(f".{word}")] or difflib.get_close_matches(word, known, n=1)
        guess = f"did you mean {' or '.join(near[:3])}? " if near else ""
        every = f"{', '.join(self._fixed)}, or a setting such as optim.lr"
        raise ValueError(f"{option}: there is no column {word}; {guess}choose from {every}")

    def varied(self) -> list[str]:
        """The settings in which the rows differ, at most MAX_VARIED; they are in every row afterwards."""
        names = configs.varied(self._rows)
        self.num_varied = len(names)
        configs.add(self._rows, names[:MAX_VARIED])
        return names[:MAX_VARIED]

    def all(self) -> list[str]:
        """Every column and every setting; they are in every row afterwards."""
        configs.add(self._rows, self.settings)
        return [*self._fixed, *self.settings]

    def condition(self, words: str, option: str = "") -> Condition:
        """What a user typed -> Condition; an empty value and null are None.  ValueError for other words."""
        match = CONDITION.fullmatch(words)
        if not match:
            raise ValueError(f"--where {words}: use KEY=VALUE, or one of != < <= > >= instead of =")
        key, sign, wanted = match.groups()
        if not wanted and sign not in ("=", "!="):
            raise ValueError(f"--where {words}: a value must follow {sign}")
        key, *_ = self.named([key], option or f"--where {words}")
        return Condition(words, key, sign, None if wanted in ("", "null") else wanted)

    def orders(self, words: str | None, is_reverse: bool) -> list[tuple[str, bool]]:
        """--sort "val_loss,-train_s" -> (column, largest first) each; is_reverse: each the other way round."""
        keys = [word.strip() for word in (words or "").split(",") if word.strip(" +-")]
        return [
            (column, key.startswith("-") != is_reverse)
            for key in keys
            for column in self.named([key.lstrip("-+")], f"--sort {words}")
        ]


def chosen(rows: Sequence[TableRow], conditions: Iterable[Condition]) -> list[TableRow]:
    """The rows of which all conditions hold.  ValueError: a number, or yes and no, is compared with another word."""
    for condition in conditions:
        holds = _test(condition, rows)
        rows = [row for row in rows if holds(row)]
    return list(rows)


def _test(condition: Condition, rows: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], bool]:
    """A condition -> holds(row).  An empty cell equals only the empty value, and compares with nothing else."""
    words, key, sign, wanted = condition
    if key == "status" and wanted in ("valid", "suspect", "invalid"):  # what the terminal's column may show
        return lambda row: row["status"] == "complete" and OPERATORS[sign](row["validity"], wanted)
    if wanted is None:
        return lambda row: {"=": row[key] is None, "!=": row[key] is not None}.get(sign, False)
    alternatives = wanted.split(",") if sign in ("=", "!=") else [wanted]
    kinds = {type(row[key]) for row in rows} - {NoneType}
    is_numeric = key in NUMBERS or (kinds and kinds <= {int, float})
    if is_numeric and any(_of_kind(0.0, word) is None for word in alternatives):
        raise ValueError(f"--where {words}: {key} is a number and {wanted!r} is not: give a number")
    if (key in YES_OR_NO or kinds == {bool}) and any(_of_kind(True, word) is None for word in alternatives):
        raise ValueError(f"--where {words}: {key} is yes or no")

    def holds(row: Mapping[str, Any]) -> bool:
        value = row[key]
        if value is None:
            return sign == "!="
        if isinstance(value, list):
            value = f"[{','.join(map(str, value))}]"
        if sign in ("=", "!="):
            return (value == wanted or any(_equals(value, word) for word in alternatives)) == (sign == "=")
        limit = _of_kind(value, wanted)
        return limit is not None and OPERATORS[sign](value, limit)

    return holds


def _of_kind(value: object, word: str) -> Any:
    """A user's word as what the value is: yes or no, a number, text; None where it cannot be."""
    if isinstance(value, bool):
        return BOOLEANS.get(word.lower())
    if isinstance(value, (int, float)):
        try:
            return float(word)
        except ValueError:
            return None
    return word


def _equals(value: object, word: str) -> bool:
    is_glob = isinstance(value, str) and GLOB.search(word)
    return fnmatch.fnmatchcase(str(value), word) if is_glob else _of_kind(value, word) == value


def sort(rows: Sequence[TableRow], by: Sequence[tuple[str, bool]]) -> list[TableRow]:
    """by: (column, largest first) each, the first counts most; empty cells come last whatever the order."""
    rows = list(rows)
    for key, is_reverse in reversed(by):
        filled = [row for row in rows if row[key] is not None]
        filled.sort(key=lambda row: rank(row[key]), reverse=is_reverse)
        rows = filled + [row for row in rows if row[key] is None]
    return rows


def rank(value: object) -> tuple[int, float, str]:
    """By what values of one column are sorted: numbers before words, None before both."""
    if value is None:
        return -1, 0, ""
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))
