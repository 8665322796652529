"""One check of a machine: its result and, where that is not good, what to do."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # ok, warn, fail
    found: str
    remedy: str = ""  # empty if ok


def report(checks: list[Check], min_width=0) -> str:
    """Lines for a terminal: one a check, with the remedy below where there is one."""
    width = max(min_width, *(len(check.name) for check in checks))
    lines = []
    for check in checks:
        lines.append(f"{check.status:>8}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':>8}  {'':<{width}}  try: {check.remedy}")
    return "\n".join(lines)
