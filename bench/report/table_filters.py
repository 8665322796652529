"""Which rows of the results table, and in which order: what --where and --sort say."""

import operator
import re
from collections.abc import Mapping, Sequence

from bench.record.rows import METRICS, SHOWN

COLUMNS = (*SHOWN, "folder")  # of the results table
CONDITION = re.compile(r"(\w+)(<=|>=|!=|=|<|>)(.*)", re.S)
YES_OR_NO = ("target_reached", "discarded")
NUMBERS = (*(name for name in METRICS if name != "target_reached"), "num_deviations", "seed", "world_size", "wall_s")
BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}
OPERATORS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def condition(words: str) -> tuple[str, str, str | float | bool | None]:
    """E.g. val_loss<4 -> ("val_loss", "<", 4.0); the empty value is None.  ValueError for other words."""
    match = CONDITION.fullmatch(words)
    if not match:
        raise ValueError(f"--where {words}: use KEY=VALUE, or one of != < <= > >= instead of =")
    key, sign, wanted = match.groups()
    if key not in COLUMNS:
        raise ValueError(f"--where {words}: there is no column {key}; choose from {', '.join(COLUMNS)}")
    if wanted == "":
        return key, sign, None
    try:
        if key in NUMBERS:
            return key, sign, float(wanted)
        return key, sign, BOOLEANS[wanted.lower()] if key in YES_OR_NO else wanted
    except ValueError:
        raise ValueError(f"--where {words}: {key} is a number and {wanted!r} is not: give a number") from None
    except KeyError:
        raise ValueError(f"--where {words}: {key} is yes or no") from None


def holds(row: Mapping, key: str, sign: str, wanted: str | float | bool | None) -> bool:
    """Is the condition true of the row?  An empty cell equals only the empty value, and compares with nothing else."""
    if key == "status" and wanted in ("valid", "suspect", "invalid"):  # what the terminal's status column may show
        return row["status"] == "complete" and OPERATORS[sign](row["validity"], wanted)
    if row[key] is None or wanted is None:
        return {"=": row[key] is wanted, "!=": row[key] is not wanted}.get(sign, False)
    return OPERATORS[sign](row[key], wanted)


def sort(rows: Sequence[Mapping], order: str | None, columns: Sequence[str]) -> Sequence[Mapping]:
    """order: "val_loss,-train_s", or None: as they are.  Empty cells come last.  ValueError for an unknown column."""
    for column, is_reverse in reversed(_order(order, columns)):
        filled = [row for row in rows if row[column] is not None]
        filled.sort(key=lambda row: row[column], reverse=is_reverse)
        rows = filled + [row for row in rows if row[column] is None]
    return rows


def asked_for(order: str | None, conditions: Sequence[tuple], columns: Sequence[str]) -> list[str]:
    """Those of the columns that --sort and --where name: what a user asks about must be seen."""
    of_runs = [name for key, *_ in conditions for name in (key, f"{key}_mean") if name in columns]
    return list(dict.fromkeys([*(column for column, _ in _order(order, columns)), *of_runs]))


def _order(order, columns):
    """[(column, whether the largest come first)]"""
    found = []
    for word in (order or "").split(","):
        name = word.strip().lstrip("-+")
        column = name if name in columns else f"{name}_mean"  # of a group
        if name and column not in columns:
            raise ValueError(f"--sort {order}: there is no column {name}; choose from {', '.join(columns)}")
        found += [(column, word.strip().startswith("-"))] * bool(name)
    return found
