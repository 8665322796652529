"""Each row against one of them: the change of train time and of val_loss, with its interval where repeats allow one.

The numbers are those of ./run.sh compare (bench/compare/verdict.py): the run is the unit, Welch's t on logarithms.
"""

from collections.abc import Mapping, MutableMapping, Sequence

from bench.base.terminal.text_table import counted
from bench.compare import verdict
from bench.report import table_filters
from bench.report.table_columns import Columns

COLUMNS = ("train_s_change_pct", "train_s_ci95_pct", "val_loss_change_nats", "val_loss_ci95_nats")
NAMES = ("run_id", "config_id", "name")  # by which a baseline may be called, part of the first two


def find(rows: Sequence[Mapping], words: Sequence[str], columns: Columns) -> Mapping:
    """The row that a user means: part of its run id or config_id, its name, or conditions such as optim.lr=0.001.

    ValueError where it is none or several.
    """
    result, option = rows, f"--baseline {' '.join(words)}"
    for word in words:
        if table_filters.CONDITION.fullmatch(word):
            one = table_filters.condition(word)
            (key,) = columns.named([one.key], option)
            result = table_filters.chosen(result, [one._replace(key=key)])
        else:
            result = [row for row in result if word in _ids(row)] or [row for row in result if _is_part(word, row)]
    if len(result) != 1:
        what = f"{len(result)} of {counted(len(rows), 'row')}" if result else "no row"
        raise ValueError(
            f"{option}: it names {what}: give part of a run id, a config_id, or KEY=VALUE ... that one row has"
        )
    return result[0]


def _ids(row):
    return [row[name] for name in NAMES if row.get(name)] + list(row.get("run_ids") or ())


def _is_part(word, row):
    return any(word in one for one in _ids(row))


def add(rows: Sequence[MutableMapping], baseline: Mapping) -> list[str]:
    """Gives each row COLUMNS, None for the baseline itself and where times or losses may not be compared.

    Returns why not, a sentence each.
    """
    others = {number: row for number, row in enumerate(rows) if row is not baseline}
    mine = _members(baseline)
    against = {number: verdict.of_rows(mine, _members(row)) for number, row in others.items()}
    reasons = {}
    for number, row in enumerate(rows):
        row |= _changes(against[number]) if number in against else dict.fromkeys(COLUMNS)
        if number in against and not against[number]["comparable"]:
            why = against[number]["reasons"][0]
            reasons[why] = reasons.get(why, 0) + 1
    return [f"{counted(num, 'row')} without a change of time: {why}" for why, num in reasons.items()]


def _members(row):
    return row.get("members") or [row]


def _changes(result):
    time, loss = result["time"], result["val_loss"]
    values = time["change_pct"], time["ci95_pct"], loss["change_nats"], loss["ci95_nats"]
    return dict(zip(COLUMNS, values, strict=True))
