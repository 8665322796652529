"""The columns of the results table, and the selection and order of its rows: --columns, --where and --sort.

A key is a column that every row has, or the dotted name of a setting in config.yaml.
"""

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

from bench.base.paths import user_path
from bench.base.units import number_from
from bench.record import configs, database
from bench.record.rows import SHOWN

CONDITION = re.compile(r"\s*([\w.]+)\s*(<=|>=|!=|=|<|>)\s*(.*)", re.S)
GLOB = re.compile(r"[*?\[]")
BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}
COLUMNS = (*SHOWN, "folder", "certificate")  # the columns that every row has
MAX_VARIED = 8  # most settings shown by default; runs that differ in more are no sweep

TableRow = MutableMapping[str, Any]  # a run (bench/record/rows.py), or a group of repeats with --group


class Condition(NamedTuple):
    """A condition on a row, such as val_loss<4."""

    typed: str  # what the user typed
    key: str
    sign: str
    wanted: str | None  # the value, or alternatives separated by commas; None for an empty cell


class Columns:
    """The columns and settings of some rows, by name.  fixed: columns that every row has."""

    def __init__(
        self, rows: Sequence[TableRow], fixed: Sequence[str] = COLUMNS, settings: Iterable[str] | None = None
    ) -> None:
        """settings: the names of the rows' settings; None to read them when they are needed."""
        self._rows, self._fixed = rows, list(fixed)
        if settings is not None:
            self.settings = list(settings)
        self.num_varied = 0  # set by varied(): number of differing settings, including those that it left out

    @functools.cached_property
    def settings(self) -> list[str]:
        """The names of all settings that any row has."""
        return configs.keys(self._rows)

    def named(self, patterns: Iterable[str], option: str) -> list[str]:
        """Returns the columns of names and globs, and adds them to the rows.  Raises ValueError for an unknown name."""
        names = list(dict.fromkeys(name for pattern in patterns for name in self._named(pattern, option)))
        configs.add(self._rows, [name for name in names if name not in self._fixed])
        return names

    def _named(self, text: str, option: str) -> list[str]:
        if text in self._fixed:
            return [text]
        if f"{text}_mean" in self._fixed:  # the rows are groups
            return [f"{text}_mean"]
        if text in self.settings or (not self._rows and "." in text):  # without a run its settings are unknown
            return [text]
        fields = [*self._fixed, *self.settings]
        if GLOB.search(text) and (names := fnmatch.filter(fields, text)):
            return names
        if user_path(text).is_dir():
            raise ValueError(f"{option}: there is no column {text}; put folders before {option.partition(' ')[0]}")
        near = [name for name in fields if name.endswith(f".{text}")] or difflib.get_close_matches(text, fields, 3, 0.7)
        guess = f"did you mean {' or '.join(near[:3])}? " if near else ""
        where = "./run.sh table --help lists them, and a setting such as optim.lr is one too"
        raise ValueError(f"{option}: there is no column {text}; {guess}{where}")

    def varied(self) -> list[str]:
        """Returns the settings in which the rows differ, at most MAX_VARIED, and adds them to every row."""
        names = configs.varied(self._rows)
        self.num_varied = len(names)
        configs.add(self._rows, names[:MAX_VARIED])
        return names[:MAX_VARIED]

    def condition(self, typed: str, option: str = "") -> Condition:
        """Parses what a user typed; an empty value and null become None.  Raises ValueError if it is no condition."""
        match = CONDITION.fullmatch(typed)
        if not match:
            form = "put folders before --where" if user_path(typed).is_dir() else "or != < <= > >= instead of ="
            raise ValueError(f"--where {typed}: use KEY=VALUE; {form}")
        key, sign, wanted = match[1], match[2], match[3].rstrip()
        if not wanted and sign not in ("=", "!="):
            raise ValueError(f"--where {typed}: a value must follow {sign}")
        key, *_ = self.named([key], option or f"--where {typed}")
        return Condition(typed, key, sign, None if wanted in ("", "null") else wanted)

    def orders(self, typed: str | None) -> list[tuple[str, bool]]:
        """Parses --sort "val_loss,-train_s" into (column, largest first) pairs."""
        keys = [part.strip() for part in (typed or "").split(",") if part.strip(" +-")]
        return [
            (column, key.startswith("-"))
            for key in keys
            for column in self.named([key.lstrip("-+")], f"--sort {typed}")
        ]


def in_sql(condition: Condition, kind: str) -> tuple[str, list[Any]]:
    """Returns a condition as SQL, and the values of its question marks.  kind: the column's SQL type.

    An empty cell equals only the empty value and is neither less nor greater than anything; numbers equal only numbers.
    Raises ValueError if a number or a boolean is compared with another word.
    """
    typed, key, sign, wanted = condition
    name = database.quoted(key)
    if key == "status" and wanted in ("valid", "suspect", "invalid"):  # the terminal shows validity in this column
        return f"(status = 'complete' AND validity {sign} ?)", [wanted]
    if wanted is None:
        return {"=": f"{name} IS NULL", "!=": f"{name} IS NOT NULL"}.get(sign, "0"), []
    alternatives = wanted.split(",") if sign in ("=", "!=") else [wanted]
    if kind in ("INTEGER", "REAL") and any(number_from(choice) is None for choice in alternatives):
        raise ValueError(f"--where {typed}: {key} is a number and {wanted!r} is not: give a number")
    if kind == "BOOLEAN":
        if any(choice.lower() not in BOOLEANS for choice in alternatives):
            raise ValueError(f"--where {typed}: {key} is yes or no")
        alternatives = [str(int(BOOLEANS[choice.lower()])) for choice in alternatives]
    if sign not in ("=", "!="):
        compared = f"CASE typeof({name}) WHEN 'text' THEN {name} {sign} ? ELSE {name} {sign} ? END"
        return compared, [alternatives[0], number_from(alternatives[0])]
    equal, values = list[str](), list[Any]()
    for choice in dict.fromkeys([*alternatives, wanted]):
        equal.append(f"{name} IN (?, ?)")
        values += [choice, number_from(choice)]
        if GLOB.search(choice):
            equal.append(f"(typeof({name}) = 'text' AND {name} GLOB ?)")
            values.append(choice.replace("[!", "[^"))
        if choice.startswith("["):  # a list in the form that a table shows
            equal.append(f"replace({name}, '\"', '') = ?")
            values.append(choice)
    any_of = " OR ".join(f"coalesce({text}, 0)" for text in equal)
    return (f"({any_of})" if sign == "=" else f"NOT ({any_of})"), values


def equals(value: object, wanted: str | None) -> bool:
    """Returns whether a cell equals what a user typed after KEY=; None stands for an empty cell."""
    if value is None or wanted is None:
        return value is wanted
    if isinstance(value, bool):
        return BOOLEANS.get(wanted.lower()) is value
    return number_from(wanted) == value if isinstance(value, (int, float)) else str(value) == wanted


def sort(rows: Sequence[TableRow], by: Sequence[tuple[str, bool]]) -> list[TableRow]:
    """Sorts rows by (column, largest first) pairs, the most significant first; empty cells always come last."""
    rows = list(rows)
    for key, is_reverse in reversed(by):
        filled = [row for row in rows if row[key] is not None]
        filled.sort(key=lambda row: rank(row[key]), reverse=is_reverse)
        rows = filled + [row for row in rows if row[key] is None]
    return rows


def rank(value: object) -> tuple[int, float, str]:
    """Returns the sort key of a value in a column: None before numbers before text."""
    if value is None:
        return -1, 0, ""
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))
