"""The columns of the results table, and which rows in which order: what --columns, --where and --sort say.

A key is a column of every row, or a setting of config.yaml by its dotted name.
"""

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

from bench.record import configs, database
from bench.record.rows import SHOWN

CONDITION = re.compile(r"([\w.]+)(<=|>=|!=|=|<|>)(.*)", re.S)
GLOB = re.compile(r"[*?\[]")
BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}
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
    """The columns and settings of some rows, by name.  fixed: columns that every row has."""

    def __init__(
        self, rows: Sequence[TableRow], fixed: Sequence[str] = COLUMNS, settings: Iterable[str] | None = None
    ) -> None:
        """settings: those that the rows have; None: they are looked for when one is named."""
        self._rows, self._fixed = rows, list(fixed)
        if settings is not None:
            self.settings = list(settings)
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


def in_sql(condition: Condition, kind: str) -> tuple[str, list[Any]]:
    """A condition -> what it says in SQL, and the values of its question marks.  kind: the column's type.

    An empty cell equals only the empty value, and compares with nothing else; a number equals only numbers.
    ValueError: a number, or yes and no, is compared with another word.
    """
    words, key, sign, wanted = condition
    name = database.quoted(key)
    if key == "status" and wanted in ("valid", "suspect", "invalid"):  # what the terminal's column may show
        return f"(status = 'complete' AND validity {sign} ?)", [wanted]
    if wanted is None:
        return {"=": f"{name} IS NULL", "!=": f"{name} IS NOT NULL"}.get(sign, "0"), []
    alternatives = wanted.split(",") if sign in ("=", "!=") else [wanted]
    if kind in ("INTEGER", "REAL") and any(_number(word) is None for word in alternatives):
        raise ValueError(f"--where {words}: {key} is a number and {wanted!r} is not: give a number")
    if kind == "BOOLEAN":
        if any(word.lower() not in BOOLEANS for word in alternatives):
            raise ValueError(f"--where {words}: {key} is yes or no")
        alternatives = [str(int(BOOLEANS[word.lower()])) for word in alternatives]
    if sign not in ("=", "!="):
        compared = f"CASE typeof({name}) WHEN 'text' THEN {name} {sign} ? ELSE {name} {sign} ? END"
        return compared, [alternatives[0], _number(alternatives[0])]
    equal, values = list[str](), list[Any]()
    for word in dict.fromkeys([*alternatives, wanted]):
        equal.append(f"{name} IN (?, ?)")
        values += [word, _number(word)]
        if GLOB.search(word):
            equal.append(f"(typeof({name}) = 'text' AND {name} GLOB ?)")
            values.append(word.replace("[!", "[^"))
        if word.startswith("["):  # a list, as a table shows it
            equal.append(f"replace({name}, '\"', '') = ?")
            values.append(word)
    any_of = " OR ".join(f"coalesce({text}, 0)" for text in equal)
    return (f"({any_of})" if sign == "=" else f"NOT ({any_of})"), values


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def equals(value: object, wanted: str | None) -> bool:
    """Whether a cell is what a user typed behind KEY=; None: an empty cell."""
    if value is None or wanted is None:
        return value is wanted
    if isinstance(value, bool):
        return BOOLEANS.get(wanted.lower()) is value
    return _number(wanted) == value if isinstance(value, (int, float)) else str(value) == wanted


def sort(rows: Sequence[TableRow], by: Sequence[tuple[str, bool]]) -> list[TableRow]:
    """by: (column, largest first) each, the first counts most; empty cells come last whatever the order."""
    rows = list(rows)
    for key, is_reverse in reversed(by):
        filled = [row for row in rows if row[key] is not None]
        filled.sort(key=lambda row: rank(row[key]), reverse=is_reverse)
        rows = filled + [row for row in rows if row[key] is None]
    return rows


def rank(value: object) -> tuple[int, float, str]:
    """The sort key of a value in a column: numbers before words, None before both."""
    if value is None:
        return -1, 0, ""
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))
