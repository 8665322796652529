"""A dry run: what a ladder would run, what of each rung it would change, and about how long it would take."""

from collections.abc import Sequence

from bench.base.terminal import text_table
from bench.base.units import format_about_s
from bench.config import schema
from bench.launch import prepare
from bench.launch.series import earlier_s
from bench.plans.ladder import changes
from bench.plans.ladder.sizes import START_S, Fitted, Size

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
        f"{changes.KEPT}  Changed:",
        text_table.render(
            changes.COLUMNS, changes.rows({name: one["changed"] for name, one in result["rungs"].items()})
        ),
    ]
    return "\n".join(lines)


def _each(result):
    """ "about 20 s (r01 to r11), about 30 s (r12)"."""
    names: dict[str, list[str]] = {}
    for name, one in result["rungs"].items():
        names.setdefault(format_about_s(one["run_s"]), []).append(name)
    return ", ".join(f"{about} ({changes.spans(some, list(result['rungs']))})" for about, some in names.items())


def _known(result):
    num, num_all = result["num_known"], len(result["rungs"])
    if num == num_all:
        return "by earlier runs here"
    return f"by earlier runs of {num} of {num_all} rungs, the rest is a guess" if num else "a guess: none has run here"
