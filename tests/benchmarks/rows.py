"""What a benchmark measured, as a table or JSON beside its targets."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bench.base import atomic, text_table


class Row(NamedTuple):
    """sign: "<=" or ">=", how the measured value is to compare with the target; target None: there is none."""

    what: str
    measured: float
    sign: str | None = None
    target: float | None = None
    ci95: tuple[float, float] | None = None

    @property
    def verdict(self) -> str:
        """met, MISSED, or unclear where the interval holds the target: too busy a machine to decide."""
        if self.target is None:
            return ""
        edges = self.ci95 or (self.measured, self.measured)
        is_met = [edge <= self.target if self.sign == "<=" else edge >= self.target for edge in edges]
        return "met" if all(is_met) else "unclear" if any(is_met) else "MISSED"


def show(measured: Iterable[tuple], path: Path | str | None = None) -> int:
    """Prints Rows, or tuples of their fields; to path as JSON.  Returns the exit code, 1 if a target is missed."""
    rows = [Row(*fields) for fields in measured]
    if path:
        atomic.write_json(path, [row._asdict() for row in rows], durable=False)
    else:
        cells = []
        for row in rows:
            interval = "{:.4g} to {:.4g}".format(*row.ci95) if row.ci95 else ""
            target = "" if row.target is None else f"{row.sign} {row.target}"
            cells.append([row.what, f"{row.measured:.4g}", interval, target, row.verdict])
        print(text_table.render(["what", "measured", "95 %", "target", ""], cells, [False, True, False, False, False]))
    return 1 if any(row.verdict == "MISSED" for row in rows) else 0
