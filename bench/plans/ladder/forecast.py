"""What a ladder would run and about how long it would take (--dry-run), and what a size changes of the rungs.

The changes are a line a setting and not a list a rung: most of them share most of it.
"""

from collections.abc import Mapping, Sequence

from bench.base import text_table
from bench.base.units import format_about_s
from bench.config import schema
from bench.launch import prepare
from bench.launch.series import earlier_s
from bench.plans.ladder.sizes import START_S, Fitted, Size

COLUMNS = ("setting", "the record's", "here", "rungs")
EVERY = "every rung"
KEPT = "All else is the record's own: learning rates, and whatever is a fraction of the steps."
S_PER_MIN = 60.0


def of(size: Size, fitted: Sequence[Fitted], asked: dict) -> dict:
    """size, fitted, asked: of request.asked() -> what --dry-run prints, and as JSON."""
    words = {name: arm["overrides"] for name, arm in asked["arms"].items()}
    jobs = {name: prepare.prepare(some, say=lambda text: None, check_own=False) for name, some in words.items()}
    ids = {name: schema.config_id(job.config) for name, job in jobs.items()}
    known_s = earlier_s({job.config.track.name for job in jobs.values()}, ids.values())
    arms = {one.rung.arm: one for one in fitted if one.fault is None}
    runs_s = {name: known_s.get(ids[name], _guess_s(size, one, known_s)) for name, one in arms.items()}
    return {
        "size": size.name,
        "about": size.about,
        "n": asked["n"],
        "num_runs": (asked["n"] + 1) * len(arms),
        "all_s": (asked["n"] + 1) * sum(runs_s.values()),
        "num_known": sum(ids[name] in known_s for name in arms),
        "rungs": {
            one.rung.name: {"overrides": words[name], "run_s": runs_s[name], "changed": one.changed}
            for name, one in arms.items()
        },
        "excluded": {one.rung.name: one.fault for one in fitted if one.fault},
    }


def _guess_s(size, one, known_s):
    """Seconds of a run of a config that never ran here: as the others, else as its record, else the size's own."""
    if known_s:
        return sum(known_s.values()) / len(known_s)
    if size.guess_s is not None:
        return size.guess_s
    return START_S + S_PER_MIN * (one.rung.minutes or 0.0)


def text(result: dict) -> str:
    """For a terminal."""
    lines = [
        f"size {result['size']}: {result['about']}",
        f"{result['num_runs']} runs: {result['n']} of each of {len(result['rungs'])} rungs after a warm-up each",
        f"{format_about_s(result['all_s'])} in all, {_known(result)}",
        f"a run: {_each(result)}",
        *(f"{name} cannot run: {why}" for name, why in result["excluded"].items()),
        "",
        f"{KEPT}  Changed:",
        text_table.render(COLUMNS, rows({name: one["changed"] for name, one in result["rungs"].items()})),
    ]
    return "\n".join(lines)


def _each(result):
    """ "about 20 s (r01 to r11), about 30 s (r12)"."""
    names: dict[str, list[str]] = {}
    for name, one in result["rungs"].items():
        names.setdefault(format_about_s(one["run_s"]), []).append(name)
    return ", ".join(f"{about} ({spans(some, list(result['rungs']))})" for about, some in names.items())


def _known(result):
    num, num_all = result["num_known"], len(result["rungs"])
    if num == num_all:
        return "by earlier runs here"
    return f"by earlier runs of {num} of {num_all} rungs, the rest is a guess" if num else "a guess: none has run here"


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
