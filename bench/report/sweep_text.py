"""A sweep in words, for the end of ./run.sh run -m: what won and by how much, which setting mattered, what failed."""

from pathlib import Path

from bench.base.paths import shown
from bench.base.terminal import text_table
from bench.record import run_folder
from bench.report import table_baseline, table_text
from bench.report.sweep_results import Results
from bench.report.table_text import number_words, value_words

MAX_CONFIGS = 20  # of the table; ./run.sh table --sweep has all
MAX_LOST = 10  # runs that failed or did not begin, by name
LOSSES = ("val_loss_mean", "val_loss_sd", "val_loss_change_nats", "val_loss_ci95_nats")
TIMES = ("train_s_mean", "train_s_sd", "step_avg_ms_mean")


def table(result: Results) -> list[str]:
    """Lines: the configs, best first, and the mean over each value of each setting; none for fewer than two configs."""
    groups = result.ranked[:MAX_CONFIGS]
    if len(groups) < 2:
        return []
    table_baseline.add(groups, groups[0])
    all_suspect = all(group["num_suspect"] == group["n"] for group in groups)
    shown = [group | {"num_suspect": 0} for group in groups] if all_suspect else groups  # said once, below
    about = f"{len(result.ranked)} configs, least mean val_loss first; val_loss_change_nats: above the first one's"
    times = () if all_suspect and _all_beside(result) else TIMES  # such times count for nothing
    lines = [
        "",
        about,
        *_common(result),
        "",
        table_text.fit(shown, [*result.keys, "n", *LOSSES, *times, "config_id"], result.keys),
    ]
    if len(result.ranked) > MAX_CONFIGS:
        left = len(result.ranked) - MAX_CONFIGS
        lines.append(f"and {left} more: ./run.sh table --group --sweep {result.facts['sweep_id']}")
    return [*lines, *_suspect(result), *_effects(result), ""]


def _all_beside(result):
    return all(run_folder.read(result.folders[row["run_id"]]).get("beside") for row in _complete(result))


def _common(result):
    """What was typed for all runs, for a reader who did not type it."""
    of_each = [set(words) for words in result.facts["points"]]
    common = set.intersection(*of_each) if of_each else set()
    words = [word for word in result.facts["points"][0] if word in common] if of_each else []
    return [f"in all of them: {' '.join(words)}"] if words else []


def _complete(result):
    return [row for row in result.rows if row["status"] == "complete"]


def _suspect(result):
    suspect = [row for row in _complete(result) if row["validity"] == "suspect"]
    if not suspect:
        return []
    why = run_folder.read(result.folders[suspect[0]["run_id"]])["validity_reasons"][0]
    of_all = f"{len(suspect)} of {len(_complete(result))} complete runs are suspect"
    return ["", f"{of_all} ({why}): trust their losses, not their times"]


def _effects(result):
    effects = result.effects() if len(result.keys) > 1 else []
    if not effects:
        return []
    lines = []
    for pivot in effects:
        for (value,), cell in pivot.cells.items():
            mean = "" if cell.mean is None else number_words("val_loss", cell.mean)
            lost = f", {cell.num_lost} lost" if cell.num_lost else ""
            name = pivot.keys[0] if value == pivot.values[0][0] else ""
            lines.append([name, value_words(value), mean, f"{cell.n}{lost}", "best" if cell.is_best else ""])
    head = ["setting", "value", "val_loss_mean", "n", ""]
    about = "mean over all runs with a value, whatever their other settings; what matters most first"
    return ["", about, "", text_table.render(head, lines, [False, False, True, True, False], "simple")]


def best(result: Results) -> str:
    """The best config in a sentence, without a claim: it is the best of those tried.  "" for fewer than two."""
    groups = result.ranked
    if len(groups) < 2:
        return ""
    first, second = groups[:2]
    mean, sd = number_words("val_loss", first["val_loss_mean"]), first["val_loss_sd"]
    spread = f"mean of {first['n']} runs, sd {number_words('val_loss', sd)}" if sd is not None else "one run"
    return (
        f"best of {len(groups)}: {values(result, first)}, val_loss {mean} ({spread}); {_ahead(result, first, second)}"
    )


def _ahead(result, first, second):
    """By how much the best is ahead of the next, and whether repeats tell the two apart."""
    pair = [dict(first), dict(second)]
    table_baseline.add(pair, pair[0])
    nats, interval = pair[1]["val_loss_change_nats"], pair[1]["val_loss_ci95_nats"]
    if nats is None:
        nats = second["val_loss_mean"] - first["val_loss_mean"]
    by = f"{nats:.4f} nats ahead of {values(result, second)}"
    if interval is None:
        return f"{by}, and without repeats it is unknown whether by chance: sweep seed=0,1,2 too"
    words = f"95 % interval {interval[0]:+.4f} to {interval[1]:+.4f}"
    return f"{by} ({words})" if interval[0] > 0 else f"{by}, which these runs do not tell apart ({words})"


def why(result: Results) -> str:
    """Which setting mattered how much, beside the spread of repeats; "" for fewer than two settings."""
    effects = result.effects() if len(result.keys) > 1 else []
    if not effects:
        return ""
    parts = [
        f"{pivot.keys[0]} {number_words('val_loss', result.range_nats(pivot))} (best {_best_value(pivot)})"
        for pivot in effects
    ]
    sd, noise = result.sd_of_repeats, ""
    if sd is not None:
        less = [pivot.keys[0] for pivot in effects if result.range_nats(pivot) < sd]
        noise = f"; repeats of one config differ by sd {number_words('val_loss', sd)}"
        noise += f", more than {' and '.join(less)} made" * bool(less)
    uneven = any(len({cell.n for cell in pivot.cells.values()}) > 1 for pivot in effects)
    doubt = "; not every combination ran: the means are of unlike runs" if uneven else ""
    return f"nats between the best and the worst mean of each setting: {', '.join(parts)}{noise}{doubt}"


def _best_value(pivot):
    """With what lies beyond it, of three numbers or more: a best at the edge is seldom the best there is."""
    best, values = pivot.best[0], pivot.values[0]
    is_edge = best in (values[0], values[-1]) and len(values) > 2
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    edge = "least" if best == values[0] else "greatest"
    return value_words(best) + f", the {edge} that was tried: try beyond it" * (is_edge and numbers)


def confirm(result: Results) -> str:
    """What to type to make a result of it; "" for fewer than two configs."""
    if len(result.ranked) < 2:
        return ""
    words = f"./run.sh race --from-sweep {result.facts['sweep_id']} --top 2 n=5"
    return f"the best of many is the luckiest too; with fresh seeds, alone on the machine: {words}"


def values(result: Results, row) -> str:
    """optim.lr=0.003 model.num_layers=1."""
    return " ".join(f"{key}={value_words(row[key])}" for key in result.keys)


def ended(result: Results, folder: Path, all_complete: int, all_asked: int) -> str:
    """How many are complete, which failed or did not begin and why, and where to look: several lines."""
    lines = [f"{all_complete} of {all_asked} complete"]
    lines += _first([f"          {_lost(result, row)}" for row in result.lost])
    if result.not_run:
        why = result.facts["why"] or "it was interrupted"
        lines.append(f"          {len(result.not_run)} not run, {why}: the same command goes on with them")
        lines += _first([f"          not begun: {' '.join(words)}" for words in result.not_run])
    elif result.lost:
        why = f"{result.facts['why']}: " if result.facts["why"] else ""
        lines.append(f"          {why}the same command runs again what did not complete")
    page = folder / "sweep.html"
    lines.append(f"          {shown(page)}; ./run.sh table --sweep {result.facts['sweep_id']}")
    return "\n".join(lines)


def _first(lines):
    more = len(lines) - MAX_LOST
    return lines[:MAX_LOST] + ([f"          and {more} more"] if more > 0 else [])


def _lost(result, row):
    failure = run_folder.read(result.folders[row["run_id"]]).get("failure") or {}
    message = (failure.get("message") or "").partition("\n")[0]
    kind = "" if row["failure"] in (None, row["status"]) else f" {row['failure']}:"
    return f"{row['status']}: {values(result, row)} seed={row['seed']}:{kind} {message}".rstrip(": ")
