"""One check of a machine: its result and, where that is not good, what to do."""

from dataclasses import dataclass

from bench.base.terminal import text_table


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # ok, warn, fail
    found: str
    remedy: str = ""  # empty if ok


def report(checks: list[Check], min_width=0) -> str:
    """Lines for a terminal: one a check, with the remedy below where there is one."""
    cells = []
    for check in checks:
        cells.append((check.status.rjust(text_table.MARK_WIDTH), check.name.ljust(min_width), check.found))
        cells += [("", "", f"try: {check.remedy}")] * bool(check.remedy)
    return text_table.render((), cells)
