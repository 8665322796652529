"""Parses what a user types after ./run.sh ladder: a race's request, its forecast (--dry-run), or an earlier ladder.

What a size changes is listed by setting, not by rung, because most rungs share most of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.base import atomic, text_table
from bench.base.units import format_about_s
from bench.config import identity
from bench.launch import prepare
from bench.launch.series import earlier_s
from bench.plans.ladder import sizes
from bench.plans.ladder.sizes import START_S, Fitted, Size
from bench.plans.race import plan, state
from bench.record import named, race_folder

N = 3  # runs a rung
NAME = "ladder"
ON = "time_to_target"
SIZE = "size"  # the only argument that a race does not have
TARGET = (
    "goal.target_val_loss of the runs; without one the highest val_loss of the lowest rung's runs at their last step"
)
CHANGE_COLUMNS = ("setting", "the record's", "here", "rungs")
EVERY = "every rung"
KEPT = "All else is the record's own: learning rates, and whatever is a fraction of the steps."
S_PER_MIN = 60.0


def parse(arguments: Sequence[str]) -> tuple[Size, list[Fitted], dict[str, Any]]:
    """Returns the size, each rung at it, and the request: plan.parse_request()'s, with "ladder" for the plan.

    A rung that was not named and cannot run here has its fault, and is not an arm. Raises ValueError.
    """
    names, size, settings = _parsed(arguments)
    if size is None:
        size = sizes.for_machine(prepare.this_machine().num_gpus)
    overrides = [text for text in arguments if "=" in text and text.partition("=")[0] not in (SIZE, *plan.SETTINGS)]
    if experiment := [text for text in overrides if text.startswith(f"{sizes.GROUP}=")]:
        raise ValueError(f"{experiment[0]}: each rung is an experiment: name it alone, {experiment[0].split('=')[1]}")
    rungs = [sizes.rung_named(name) for name in names] or sizes.known_rungs()
    if len({rung.name for rung in rungs}) < max(2, len(rungs)):
        raise ValueError(f"{' '.join(names)}: a ladder needs two rungs, each once: name r04 r08, or none for all")
    fitted = sizes.fitted(rungs, size, overrides)
    runnable = [fit for fit in fitted if fit.fault is None]
    excluded = {fit.rung.name: fit.fault for fit in fitted if fit.fault}
    if excluded and (names or len(runnable) < 2):
        (name, fault), *further = excluded.items()
        others = f"; {len(further)} others cannot either" if further else ""
        problem = f"{name} cannot run at size={size.name}: {fault}{others}"
        raise ValueError(f"{problem}; name other rungs, or another size: {', '.join(sizes.SIZES)}")
    kept = {  # kept in the plan, so that the page does not depend on today's yamls
        "size": size.name,
        "about": size.about,
        "target": TARGET,
        "rungs": {fit.rung.arm: asdict(fit.rung) | {"changed": [*map(list, fit.changed)]} for fit in runnable},
        "excluded": excluded,
    }
    arms = {
        fit.rung.arm: {"overrides": [*size.all_overrides, *fit.overrides, *overrides], "rev": None} for fit in runnable
    }
    return size, fitted, {"n": N, "name": NAME, "on": ON} | settings | {"arms": arms, "ladder": kept}


def check(arguments: Sequence[str]) -> None:
    """Raises ValueError for arguments that make no ladder, as far as that shows without composing the rungs."""
    names, _, _ = _parsed(arguments)
    for name in names:
        sizes.rung_named(name)


def _parsed(arguments: Sequence[str]) -> tuple[list[str], Size | None, dict[str, Any]]:
    """Returns (names of rungs, the size if one is given, the race's settings). Raises ValueError."""
    size_words = [text for text in arguments if text.startswith(f"{SIZE}=")]
    named_sizes = [sizes.named(text.partition("=")[2]) for text in size_words]
    settings = plan.parse_request([text for text in arguments if "=" in text and text not in size_words])
    plan.refuse_choice(arguments, "ladder")
    if settings.pop("arms"):
        raise ValueError("a ladder makes its own arms, the rungs: name rungs, or race others by ./run.sh race")
    return [text for text in arguments if "=" not in text], named_sizes[-1] if named_sizes else None, settings


# ---- the forecast


def forecast(size: Size, fitted: Sequence[Fitted], request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what --dry-run prints, as JSON types. The arguments are what parse() returns."""
    overrides = {name: arm["overrides"] for name, arm in request["arms"].items()}
    jobs = {name: prepare.prepare(given, say=lambda text: None, check_own=False) for name, given in overrides.items()}
    ids = {name: identity.config_id(job.config) for name, job in jobs.items()}
    known_s = earlier_s({job.config.track.name for job in jobs.values()}, ids.values())

    def run_s(fit: Fitted) -> float:
        """Returns the seconds of a run: as measured, or estimated from other rungs, the size's guess or the record."""
        if known_s:
            return known_s.get(ids[fit.rung.arm], sum(known_s.values()) / len(known_s))
        return START_S + S_PER_MIN * (fit.rung.minutes or 0.0) if size.guess_s is None else size.guess_s

    rungs = {
        fit.rung.name: {"overrides": overrides[fit.rung.arm], "run_s": run_s(fit), "changed": fit.changed}
        for fit in fitted
        if fit.fault is None
    }
    return {
        "size": size.name,
        "about": size.about,
        "n": request["n"],
        "num_runs": (request["n"] + 1) * len(rungs),
        "all_s": (request["n"] + 1) * sum(rung["run_s"] for rung in rungs.values()),
        "num_known": sum(config_id in known_s for config_id in ids.values()),
        "rungs": rungs,
        "excluded": request["ladder"]["excluded"],
    }


def forecast_text(forecast: Mapping[str, Any]) -> str:
    """Returns the text of a forecast() for a terminal."""
    rungs, num_known = forecast["rungs"], forecast["num_known"]
    names_by_time: dict[str, list[str]] = {}
    for name, rung in rungs.items():
        names_by_time.setdefault(format_about_s(rung["run_s"]), []).append(name)
    times = ", ".join(f"{about} ({spans(names, list(rungs))})" for about, names in names_by_time.items())
    source = f"by earlier runs of {num_known} of {len(rungs)} rungs, the rest is a guess"
    if num_known in (0, len(rungs)):
        source = "by earlier runs here" if num_known else "a guess: none has run here"
    lines = [
        f"size {forecast['size']}: {forecast['about']}",
        f"{forecast['num_runs']} runs: {forecast['n']} of each of {len(rungs)} rungs, after a warm-up of each",
        f"{format_about_s(forecast['all_s'])} in all, {source}",
        f"a run: {times}",
        *(f"{name} cannot run: {why}" for name, why in forecast["excluded"].items()),
        "",
        f"{KEPT}  Changed:",
        text_table.render(CHANGE_COLUMNS, change_rows({name: rung["changed"] for name, rung in rungs.items()})),
    ]
    return "\n".join(lines)


def change_rows(changed: Mapping[str, Sequence[Sequence[str]]]) -> list[tuple[str, str, str, str]]:
    """Returns rows of CHANGE_COLUMNS from {rung: [(setting, the record's value, this size's)]}, the lowest rung first.

    Rungs with the same value here share a row, even if their records' values differ: "1390 to 19560", "r12 to r20".
    """
    befores: dict[tuple[str, str], dict[str, str]] = {}
    for rung, changes in changed.items():
        for setting, before, after in changes:
            befores.setdefault((setting, after), {})[rung] = before
    order = sorted(befores, key=lambda pair: pair[0])  # stable: the values of a setting in the order of the rungs
    return [(key[0], _values(befores[key].values()), key[1], spans(list(befores[key]), list(changed))) for key in order]


def spans(chosen: Sequence[str], names: Sequence[str]) -> str:
    """Shortens the chosen names, in their order: "r01, r04 to r08", or "every rung" if all are given."""
    if len(chosen) == len(names):
        return EVERY
    runs: list[list[str]] = []
    for number, name in enumerate(names):
        if name in chosen:
            if not runs or runs[-1][-1] != names[number - 1]:
                runs.append([])
            runs[-1].append(name)
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _values(values: Iterable[str]) -> str:
    """Joins values: "6 or 12"; of more than two numbers the smallest and largest: "1390 to 19560"."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 2 and all(value.replace(".", "", 1).isdigit() for value in distinct):
        return f"{min(distinct, key=float)} to {max(distinct, key=float)}"
    return " or ".join(distinct)


# ---- earlier ladders


def ended(results: Path, name: str) -> Path:
    """Returns the named ladder, or the latest of these results that has ended. Raises ValueError if none has."""
    folders = sorted(path.parent for path in (results / race_folder.FOLDER).glob("*/race.json"))
    return _ladder(name, folders, "has ended")


def unfinished(results: Path, name: str) -> Path:
    """Returns the named ladder, or the latest of these results that has not ended. Raises ValueError if all have."""
    return _ladder(name, state.unfinished(results), "is unfinished")


def _ladder(name: str, folders: Iterable[Path], condition: str) -> Path:
    """Returns the ladder of this name, or the latest of these folders if it is empty."""
    if name:
        folder = named.Lookup().find(name).race
        if folder is None or not _is_ladder(folder):
            raise ValueError(f"{name}: is not a ladder: ./run.sh ladder begins one, and prints its id")
        return folder
    ladders = [folder for folder in folders if _is_ladder(folder)]
    if not ladders:
        raise ValueError(f"no ladder {condition}: ./run.sh ladder begins one")
    return ladders[-1]


def _is_ladder(folder: Path) -> bool:
    return "ladder" in atomic.read_json(folder / "plan.json", {})
