"""What a size changes of the rungs, a line a setting and not a list a rung: most of them share most of it."""

from collections.abc import Mapping, Sequence

COLUMNS = ("setting", "the record's", "here", "rungs")
EVERY = "every rung"
KEPT = "All else is the record's own: learning rates, and whatever is a fraction of the steps."


def rows(changed: Mapping[str, Sequence[Sequence[str]]]) -> list[tuple[str, str, str, str]]:
    """{rung: [(setting, the record's value, this size's)]}, the lowest first -> rows of COLUMNS.

    Rungs that come to the same value are in one row, also from several of their own: "1390 to 19560", "r12 to r20".
    """
    befores: dict[tuple[str, str], dict[str, str]] = {}
    for rung, some in changed.items():
        for setting, before, after in some:
            befores.setdefault((setting, after), {})[rung] = before
    order = sorted(befores, key=lambda pair: pair[0])  # stable: the values of a setting in the order of the rungs
    return [(key[0], _values(befores[key].values()), key[1], spans(list(befores[key]), list(changed))) for key in order]


def spans(some: Sequence[str], names: Sequence[str]) -> str:
    """Some of the names, in their order -> "r01, r04 to r08", "every rung" where it is all of them."""
    if len(some) == len(names):
        return EVERY
    runs: list[list[str]] = []
    for name in names:
        if name in some:
            if not runs or names.index(runs[-1][-1]) != names.index(name) - 1:
                runs.append([])
            runs[-1].append(name)
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    return ", ".join(words)


def _values(values):
    """ "6 or 12"; of more than two numbers the least and the largest: "1390 to 19560"."""
    result = list(dict.fromkeys(values))
    if len(result) > 2 and all(value.replace(".", "", 1).isdigit() for value in result):
        result.sort(key=float)
        return f"{result[0]} to {result[-1]}"
    return " or ".join(result)
