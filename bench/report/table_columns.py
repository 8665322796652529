"""The columns of the results table: those of every row, and each setting of config.yaml by its dotted name."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from bench.record import configs
from bench.record.rows import SHOWN
from bench.report.table_filters import GLOB

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
