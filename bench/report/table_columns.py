"""The columns of the results table, and which rows in which order: what --columns, --where and --sort say.

A key is a column of every row, or a setting of config.yaml by its dotted name.
"""

import difflib
import fnmatch
import operator
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

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


class Columns:
    """What the rows at hand may be asked for.  rows: of runs, or with --group of repeats; fixed: columns of each."""

    def __init__(self, rows: Sequence[MutableMapping], fixed: Sequence[str] = COLUMNS):
        self._rows, self._fixed, self._settings = rows, list(fixed), None

    @property
    def settings(self) -> list[str]:
        """Every setting that one of the rows has."""
        if self._settings is None:
            self._settings = configs.keys(self._rows)
        return self._settings

    def named(self, words: Iterable[str], option: str) -> list[str]:
        """Names and globs of a user's -> columns, which are in every row afterwards.  ValueError for another word."""
        result = dict.fromkeys(name for word in words for name in self._named(word, option))
        configs.add(self._rows, [name for name in result if name not in self._fixed])
        return list(result)

    def _named(self, word, option):
        if word in self._fixed:
            return [word]
        if f"{word}_mean" in self._fixed:  # of a group
            return [f"{word}_mean"]
        if word in self.settings or (not self._rows and "." in word):  # without a run its settings are unknown
            return [word]
        result = fnmatch.filter([*self._fixed, *self.settings], word) if GLOB.search(word) else []
        if not result:
            raise ValueError(f"{option}: there is no column {word}; choose from {self._all}{self._guess(word)}")
        return result

    @property
    def _all(self):
        return f"{', '.join(self._fixed)}, or a setting such as optim.lr"

    def _guess(self, word):
        names = [*self._fixed, *self.settings]
        near = [name for name in names if name.endswith(f".{word}")] or difflib.get_close_matches(word, names, n=1)
        return f"; did you mean {' or '.join(near[:3])}?" if near else ""

    def varied(self) -> list[str]:
        """The settings in which the rows differ, at most MAX_VARIED; they are in every row afterwards."""
        result = configs.varied(self._rows)[:MAX_VARIED]
        configs.add(self._rows, result)
        return result

    def all(self) -> list[str]:
        """Every column and every setting; they are in every row afterwards."""
        configs.add(self._rows, self.settings)
        return [*self._fixed, *self.settings]


def between(shown: Sequence[str], varied: Sequence[str], after: str) -> list[str]:
    """Columns with these after that one, each once."""
    index = shown.index(after) + 1
    return list(dict.fromkeys([*shown[:index], *varied, *shown[index:]]))


def more_varied(rows: Iterable[Mapping]) -> str:
    """What is said where the rows differ in more settings than are shown; "" where they do not."""
    num = len(configs.varied(rows)) - MAX_VARIED
    return f"{num} more settings differ: --columns run_id,'optim.*' or --all-columns shows them" if num > 0 else ""


class Condition(NamedTuple):
    """E.g. val_loss<4.  wanted: the words behind the sign, alternatives between commas; None: no value."""

    words: str
    key: str
    sign: str
    wanted: str | None

    @property
    def alternatives(self) -> list[str]:
        """What = and != compare with."""
        return self.wanted.split(",") if self.sign in ("=", "!=") else [self.wanted]


def condition(words: str) -> Condition:
    """What a user typed -> Condition; an empty value and null are None.  ValueError for other words."""
    match = CONDITION.fullmatch(words)
    if not match:
        raise ValueError(f"--where {words}: use KEY=VALUE, or one of != < <= > >= instead of =")
    key, sign, wanted = match.groups()
    return Condition(words, key, sign, None if wanted in ("", "null") else wanted)


def chosen(rows: Sequence[Mapping], conditions: Iterable[Condition]) -> list[Mapping]:
    """The rows of which all conditions hold.  ValueError: a number, or yes and no, is compared with another word."""
    for one in conditions:
        holds = _test(one, rows)
        rows = [row for row in rows if holds(row)]
    return list(rows)


def _test(one, rows):
    """A condition -> holds(row).  An empty cell equals only the empty value, and compares with nothing else."""
    if one.key == "status" and one.wanted in ("valid", "suspect", "invalid"):  # what the terminal's column may show
        return lambda row: row["status"] == "complete" and OPERATORS[one.sign](row["validity"], one.wanted)
    if one.wanted is None:
        return lambda row: {"=": row[one.key] is None, "!=": row[one.key] is not None}.get(one.sign, False)
    kinds = {type(row[one.key]) for row in rows} - {type(None)}
    numbers, booleans = _numbers(one, kinds), _booleans(one, kinds)

    def holds(row):
        value = row[one.key]
        if value is None:
            return one.sign == "!="
        if isinstance(value, bool):
            return _any(one.sign, value, booleans)
        return _any(one.sign, value, numbers) if isinstance(value, (int, float)) else _has_words(one, value)

    return holds


def _any(sign, value, wanted):
    """= is true of one of them, != of none, another sign of the only one."""
    if sign in ("=", "!="):
        return (value in wanted) == (sign == "=")
    return any(OPERATORS[sign](value, one) for one in wanted)


def _has_words(one, value):
    text = "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
    if one.sign not in ("=", "!="):
        return OPERATORS[one.sign](text, one.wanted)
    result = text == one.wanted or any(
        fnmatch.fnmatchcase(text, word) if GLOB.search(word) else text == word for word in one.alternatives
    )
    return result == (one.sign == "=")


def _numbers(one, kinds):
    try:
        return [float(word) for word in one.alternatives]
    except ValueError:
        if one.key in NUMBERS or (kinds and kinds <= {int, float}):
            words = f"{one.key} is a number and {one.wanted!r} is not"
            raise ValueError(f"--where {one.words}: {words}: give a number") from None
        return []


def _booleans(one, kinds):
    result = [BOOLEANS[word.lower()] for word in one.alternatives if word.lower() in BOOLEANS]
    if not result and (one.key in YES_OR_NO or kinds == {bool}):
        raise ValueError(f"--where {one.words}: {one.key} is yes or no")
    return result


class Order(NamedTuple):
    """A column to sort by, or words of a user's that name one."""

    key: str
    is_reverse: bool


def orders(words: str | None, is_reverse: bool = False) -> list[Order]:
    """--sort "val_loss,-train_s" -> [Order]; is_reverse: --reverse, each the other way round."""
    result = [word.strip() for word in (words or "").split(",") if word.strip(" +-")]
    return [Order(word.lstrip("-+"), word.startswith("-") != is_reverse) for word in result]


def sort(rows: Sequence[Mapping], by: Sequence[Order]) -> list[Mapping]:
    """In these orders, the first counts most; empty cells come last whatever the order."""
    rows = list(rows)
    for key, is_reverse in reversed(by):
        filled = [row for row in rows if row[key] is not None]
        filled.sort(key=lambda row: rank(row[key]), reverse=is_reverse)
        rows = filled + [row for row in rows if row[key] is None]
    return rows


def rank(value: object) -> tuple:
    """By what values of one column are sorted: numbers before words, None before both."""
    if value is None:
        return -1, 0, ""
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))
