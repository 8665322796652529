"""A sweep in words, for the end of ./run.sh run -m: the best config, the mean over each axis, what failed."""

from bench.paths import shown
from bench.report import table_pivot, table_text
from bench.report.sweep_results import Results
from bench.report.table_text import number_words, value_words

MAX_CONFIGS = 20  # of the table; ./run.sh table --sweep has all
NUMBERS = ("val_loss_mean", "val_loss_sd", "train_s_mean", "train_s_sd", "step_avg_ms_mean", "step_avg_ms_sd")


def table(found: Results) -> list[str]:
    """Lines: the configs, best first, and the mean over each axis; none where one config alone completed."""
    groups = [group for group in found.groups if group["val_loss_mean"] is not None]
    if len(groups) < 2:
        return []
    lines = ["", table_text.fit(groups[:MAX_CONFIGS], [*found.keys, "n", *NUMBERS, "config_id"], found.keys)]
    if len(groups) > MAX_CONFIGS:
        lines.append(f"and {len(groups) - MAX_CONFIGS} more: ./run.sh table --group --sweep {found.facts['sweep_id']}")
    if len(found.keys) > 1:
        for pivot in found.means():
            lines += ["", table_pivot.text(pivot, "simple")]
    return [*lines, ""]


def best(found: Results) -> str:
    """The best config in a sentence, without a claim: it is the best of those tried.  "" for fewer than two."""
    groups = [group for group in found.groups if group["val_loss_mean"] is not None]
    if len(groups) < 2:
        return ""
    first = groups[0]
    words = values(found, first)
    mean = number_words("val_loss", first["val_loss_mean"])
    n = f"n={first['n']}" + ("; one run each shows no spread" if first["n"] == 1 else "")
    return f"best of {len(groups)}: {words}, val_loss {mean} ({n}); race it before you claim it: ./run.sh race"


def values(found: Results, row) -> str:
    """optim.lr=0.003 model.num_layers=1."""
    return " ".join(f"{key}={value_words(row[key])}" for key in found.keys)


def ended(found: Results, folder, all_complete: int, all_asked: int) -> str:
    """How many are complete, which failed or did not begin and why, and where to look: several lines."""
    lines = [f"{all_complete} of {all_asked} complete"]
    for row in found.lost:
        lines.append(f"          {row['status']}: {values(found, row)} seed={row['seed']}: {row['failure']}")
    if found.not_run:
        why = found.facts["why"] or "it was interrupted"
        lines.append(f"          {len(found.not_run)} not run, {why}: the same command goes on with them")
        lines += [f"          not begun: {' '.join(words)}" for words in found.not_run]
    page = shown(folder / "sweep.html")
    lines.append(f"          {page}; ./run.sh table --sweep {found.facts['sweep_id']}")
    return "\n".join(lines)
