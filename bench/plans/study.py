"""Compares optimizers, or other choices, each tuned equally: the same search for every arm, then a race of the best.

All arms have the same number of trials, each of the same tokens and one seed. The search of an arm begins at its own
value of the setting, goes beyond the edge while the best value lies at one, then halves the wider gap beside the best,
on a logarithmic scale. The race has fresh seeds. The folder is a sweep's (bench/record/sweep.py), with study.json.
"""

import contextlib
import hashlib
import itertools
import json
import math
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from bench.base import stats
from bench.base.metric import VAL_LOSS, Metric
from bench.base.paths import REPO, shown
from bench.base.text_table import counted
from bench.base.units import seconds_of
from bench.config import groups, meanings, multirun, overrides, schema, typed
from bench.config.typed import leaves
from bench.launch.console import say
from bench.launch.prepare import requested_config, this_machine
from bench.launch.series import Series, earlier_s
from bench.plans import locks
from bench.plans.race import arm_process, plan, planning, runner, state
from bench.plans.sweep.points import Points, Run, made_before
from bench.record import race_folder, run_folder, sweep
from bench.record.race_folder import Race
from bench.record.rows import metric_of, row_of
from models.settings import Positive

STEP = math.sqrt(10)  # factor between the first values
DIGITS = 3  # significant digits of a value
MIN_TRIALS = 3  # of an arm, unless budget= gives their number: its own value and one on either side
FEW_VALIDATIONS = 5
MAX_TRIALS = 10  # default limit of an arm: further values would differ by less than seeds do
RESERVE = 1.05  # of a duration: runs take unequal times, and the race's plan and page some seconds
PARSED = ("arms", "common", "tune", "starts", "seed", "n", "alpha", "tokens")  # of a study, by its command alone
OURS = ("tune", "budget", "n", "alpha", "seed")
Tried = Mapping[str, Mapping[float, float]]  # sweep.trials()
EXAMPLE = "./run.sh study optim=adamw,mine tune=optim.lr budget=2h"
BUDGET = re.compile(r"([1-9]\d{0,3})trials?|(\d+(?:\.\d+)?)([kMG]?)tokens")
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}


class Failed(Exception):
    """A trial failed.  The same command makes it again."""


def next_values(start: float, tried: Mapping[float, float], metric: Metric = VAL_LOSS) -> list[float]:
    """Returns values to try next, the most promising first. tried: {value: metric} of an arm, from sweep.trials()."""
    values = sorted(tried)
    if not values:
        return [start]
    best = sweep.best_of(tried, metric)
    beyond = [values[-1] * STEP] * (best == values[-1]) + [values[0] / STEP] * (best == values[0])
    gaps = sorted(itertools.pairwise(values), key=lambda gap: (best not in gap, -gap[1] / gap[0]))
    wanted = [*beyond, *(math.sqrt(low * high) for low, high in gaps), values[-1] * STEP, values[0] / STEP]
    rounded = [float(f"{value:.{DIGITS}g}") for value in wanted]
    return [value for value in dict.fromkeys(rounded) if value not in tried]


# ---- the request


def begin(arguments: Sequence[str], command: list[str], results: Path, anyway: bool) -> tuple[Path, float | None]:
    """Makes the study's folder. Returns it and the budget's seconds, if it has any. Raises ValueError before a run."""
    study, sweep_id, budget_s, _ = planned(arguments, results, anyway)
    is_begun = (results / sweep.FOLDER / sweep_id / sweep.STUDY).exists()
    _say_few_validations(study)
    folder = sweep.begin(results, sweep_id, command, [], budget_s)
    if not is_begun:  # what another process that runs it writes there stays
        sweep.write_study(folder, study)
    return folder, budget_s


def introduce(
    study: sweep.Study, sweep_id: str, budget_s: float | None, known_s: dict[str, float], results: Path
) -> None:
    """Prints what planned() returned, what of it is left to run, and how long that would take."""
    _say_few_validations(study)
    number, is_about = study["num_trials"], False
    if budget_s is not None and known_s.keys() == study["arms"].keys():
        number, is_about = num_trials(study, f"{budget_s:.0f}s", budget_s / RESERVE / sum(known_s.values())), True
    per_arm = f"{'about ' * is_about}{counted(number or 0, 'trial')} per arm"
    trials = per_arm if number else f"trials of every arm for {budget_s or 0:.0f} s in all"
    starts = ", ".join(f"{start:g} ({name})" for name, start in study["starts"].items())
    race = f"then a race of the best configs with {study['n']} fresh seeds"
    say("study", f"{sweep_id}: {trials}{sweep.tokens_text(study)}, {study['tune']} starting at {starts}; {race}")
    folder = results / sweep.FOLDER / sweep_id
    tried = sweep.trials(folder, study) if folder.exists() else {name: {} for name in study["arms"]}
    of_search, of_race = _left(folder, study, tried, number or MIN_TRIALS)
    num_before = len(of_search)
    for name, _, _ in _made_before(study, tried, number or MIN_TRIALS):
        of_search.remove(name)
    if not of_search and not of_race:
        return say("plan", "nothing is left to run: without --dry-run the command shows the verdict")
    forecast = Series([*of_search, *of_race], known_s, live=False).forecast()
    parts = f"{counted(len(of_search), 'trial')}{' left' * folder.exists()}"
    if num_reused := num_before - len(of_search):
        parts += f" ({num_reused} of {num_before} complete already)"
    parts += f", then a race of {len(of_race)} runs"
    is_whole = len(of_race) == (1 + study["n"]) * len(study["arms"])
    parts += f" (a warm-up and {study['n']} of each arm)" * is_whole
    say("plan", f"{'' if number else 'at least '}{forecast}: {parts}; a dry run: nothing was trained or recorded")


def _say_few_validations(study: sweep.Study) -> None:
    """Prints that the time to the same loss will be coarse if runs seldom validate."""
    arm = next(iter(study["arms"].values()))
    settings = dict(leaves(schema.to_dict(requested_config([*study["common"], *arm]))))
    num_steps, every = settings["goal.num_steps"], settings["goal.val_every_steps"]
    if every and num_steps and num_steps < FEW_VALIDATIONS * every:
        why = f"runs validate every {every} of {num_steps} steps, and the time to the same loss is interpolated between"
        say("study", f"{why}: goal.val_every_steps={max(1, num_steps // (2 * FEW_VALIDATIONS))} makes it finer")


def _left(folder: Path, study: sweep.Study, tried: Tried, number: int) -> tuple[list[str], list[str]]:
    """Returns the arms of the trials, `number` of each arm in all, and of the race's runs that are left."""
    of_search = [name for name in study["arms"] for _ in range(number - len(tried.get(name, ())))]
    results = folder.parent.parent
    race = race_folder.of(results, study["race_id"]) if study["race_id"] else None
    if race is None or ((race / "race.json").exists() and race_folder.read(race)["status"] == "abandoned"):
        return of_search, [*study["arms"]] * (1 + study["n"])
    now = state.read(race, results)
    return of_search, [] if now.has_ended else [slot.arm for slot in now.slots if not slot.is_done]


def _made_before(study: sweep.Study, tried: Tried, number: int) -> Iterator[tuple[str, list[str], Run]]:
    """Yields (arm, overrides, record) of the search's next trials, as far as earlier runs are those trials."""
    metrics, metric = {name: dict(losses) for name, losses in tried.items()}, sweep.metric_of(study)
    while (fewest := min(map(len, metrics.values()))) < number:
        names = [name for name, losses in metrics.items() if len(losses) == fewest]
        points = [_point(study, name, metrics[name]) for name in names]
        made = made_before(points)
        for place, run in made.items():
            if (loss := sweep.trial_metric(run, metric)) is not None:
                metrics[names[place]][float(sweep.values(points[place])[study["tune"]])] = loss
            yield names[place], points[place], run
        if min(map(len, metrics.values())) == fewest:
            return


def planned(
    arguments: Sequence[str], results: Path, anyway: bool
) -> tuple[sweep.Study, str, float | None, dict[str, float]]:
    """Returns (study.json, the study's id, the budget's seconds if it has any, {arm: seconds of a run, where known}).

    It writes nothing. Raises ValueError for what cannot be studied.
    """
    study, budget = _parsed(arguments)
    arms = {name: [*study["common"], *arm] for name, arm in study["arms"].items()}
    equal = f"{study['tune']}={next(iter(study['starts'].values()))}"  # arms that differ only in this are the same
    both = arms | {f"{name} with {equal}": [*arm, equal] for name, arm in arms.items()}
    all_facts = arm_process.facts_of_arms({name: (REPO, arm) for name, arm in both.items()}, results)
    facts = {name: all_facts[name] for name in arms}
    track = planning.check_tracks(facts)
    planning.refuse_laxer(track, {"alpha": study["alpha"] / 2})
    if not anyway:
        planning.refuse_identical({name: own for name, own in all_facts.items() if name not in arms})
        planning.refuse_incomparable(facts, {})
    plan.refuse_unanswerable("loss", facts)
    row = next(iter(facts.values()))["row"]
    if (metric := metric_of([row])) != VAL_LOSS:
        study["metric"] = [metric.name, metric.unit, metric.direction]
    has_script = any(word.lstrip("+").startswith("script") for words in arms.values() for word in words)
    study["tokens"] = 0 if has_script else (row["num_steps"] or 0) * row["batch_tokens"]
    trained = [json.loads(own["row"].get("setting") or "{}") for own in facts.values()]
    data = [[setting.get(key) for key in ("train_data", "val_data")] for setting in trained]
    identity = [sorted(arguments), [[own["config_id"], own["source_sha256"]] for own in facts.values()], data]
    sweep_id = f"study-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]}"
    if (results / sweep.FOLDER / sweep_id / sweep.STUDY).exists():
        begun = sweep.read_study(results / sweep.FOLDER / sweep_id)
        arms = {name: sweep.public(arm) for name, arm in study["arms"].items()}
        asked = study | {"arms": arms, "common": sweep.public(study["common"])}
        if other := [key for key in PARSED if begun.get(key) != asked.get(key)]:
            why = f"its {', '.join(other)} are not those of this command, as of a study from elsewhere"
            raise ValueError(f"{sweep_id}: {why}: remove {shown(results / sweep.FOLDER / sweep_id)} to begin it anew")
        study = begun | {"arms": study["arms"], "common": study["common"]}
    budget_s = _budget_s(study, budget) if study["num_trials"] is None else None
    by_id_s = earlier_s([track], [own["config_id"] for own in facts.values()])
    known_s = {name: by_id_s[own["config_id"]] for name, own in facts.items() if own["config_id"] in by_id_s}
    if budget_s is not None and known_s.keys() == facts.keys():
        num_trials(study, budget, budget_s / sum(known_s.values()))
    return study, sweep_id, budget_s, known_s


def locked(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Keeps other processes from running this study within the block, which raises leases.Busy if one runs it."""
    return locks.held(folder / state.LOCK, "runs this study")


def _parsed(arguments: Sequence[str]) -> tuple[sweep.Study, str]:
    """Returns (study.json without its tokens and trials, the budget as typed)."""
    typed = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    for key in ("tune", "budget"):
        if not typed.get(key):
            raise ValueError(f"{key} is missing: {EXAMPLE}")
    plan.refuse_choice(arguments, "study")
    rest = [argument for argument in arguments if argument.partition("=")[0] not in OURS]
    axes = [argument for argument in rest if not overrides.plain(argument)]
    if len(axes) != 1:
        raise ValueError(f"{' '.join(axes) or 'no arms'}: give the arms as one setting with several values: {EXAMPLE}")
    race = plan.parse_request(["A=", "B=", *(f"{key}={typed[key]}" for key in ("n", "alpha", "seed") if key in typed)])
    planning.check(race)
    common = [argument for argument in rest if argument != axes[0]]
    points = multirun.points([axes[0]], this_machine()) or []
    arms = {_name(arm[0]): arm for arm in points}
    if len(arms) < max(2, len(points)):
        raise ValueError(f"{axes[0]}: it names {' and '.join(arms)}: give two arms or more, under different names")
    study: sweep.Study = {
        "schema_version": 1,
        "arms": arms,
        "common": common,
        "tune": typed["tune"],
        "starts": {name: _start([*common, *arm], arm[0], typed["tune"]) for name, arm in arms.items()},
        "seed": race.get("first_seed", 0),
        "n": race.get("n", plan.N),
        "alpha": race.get("alpha", stats.ALPHA),
        "tokens": 0,
        "num_trials": None,
        "race_id": None,
    }
    return study, typed["budget"]


def _name(override: str) -> str:
    """Returns the name of an arm in a race: optim=adamw -> AdamW, as the first comment of its yaml spells it."""
    key, _, value = override.partition("=")
    if key in groups.GROUPS and value in groups.choices(key):
        first = re.sub(r"\W+", "_", meanings.about(key, value).partition(" ")[0].rstrip(".,:;"))
        if _plain(first) == _plain(value) and race_folder.ARM.fullmatch(first):
            return first
    text = re.sub(r"\W+", "_", value, flags=re.ASCII).strip("_")
    text = text if text[:1].isalpha() else f"{key.rpartition('.')[2]}_{text}"
    return text[:1].upper() + text[1:]


def _plain(name: str) -> str:
    return re.sub(r"\W|_", "", name).lower()


def _start(arguments: list[str], arm: str, tune: str) -> float:
    """Returns the value of the tuned setting at which an arm's search begins."""
    settings = dict(leaves(schema.to_dict(requested_config(arguments))))
    if tune not in settings:
        near = groups.did_you_mean(tune, settings)
        raise ValueError(f"tune={tune}: {arm} has no such setting; {near}choose one that every arm has")
    return float(typed.checked(f"tune={tune}: {arm} has {tune}", settings[tune], Positive))


def _budget_s(study: sweep.Study, budget: str) -> float | None:
    """Returns the budget in seconds; None for trials or tokens, which set study["num_trials"]. Raises ValueError."""
    match = BUDGET.fullmatch(budget)
    if match is None:
        try:
            return seconds_of(budget)
        except ValueError:
            raise ValueError(f"budget={budget}: write 2h or 45m, 8trials (each arm, to 9999) or 500Mtokens") from None
    if match[2] and not study["tokens"]:
        raise ValueError(f"budget={budget}: how many tokens a run takes is not known before: write 2h or 8trials")
    num_rounds = float(match[2] or 0) * UNITS[match[3] or ""] / (len(study["arms"]) * (study["tokens"] or 1))
    study["num_trials"] = int(match[1]) if match[1] else num_trials(study, budget, num_rounds)
    return None


def num_trials(study: sweep.Study, budget: str, num_rounds: float) -> int:
    """Returns the number of trials of each arm that the budget allows beside the race.

    num_rounds: how often a run of each arm fits in the budget. Raises ValueError for fewer trials than MIN_TRIALS.
    """
    number = min(MAX_TRIALS, int(num_rounds) - study["n"] - 1)
    if number < MIN_TRIALS:
        num_rounds_needed = study["n"] + 1 + MIN_TRIALS
        num_runs = len(study["arms"]) * num_rounds_needed
        least = f"{num_rounds_needed / num_rounds:.2g} times as much" if num_rounds else "more"
        why = f"{MIN_TRIALS} trials of each arm, without which nothing is tuned, and the race with its warm-ups are"
        remedy = f"give {least}, fewer steps or validations, or a smaller n than {study['n']}"
        raise ValueError(f"budget={budget}: {why} {num_runs} runs: {remedy}, or budget=2trials for fewer")
    return number


# ---- the runs


def go(folder: Path, budget_s: float | None, runs: Points, results: Path) -> Race:
    """Finishes the search, then runs the race. Returns race.json. Raises Interrupted and ValueError."""
    study = sweep.read_study(folder)
    study["common"] = sweep.typed(folder, study["common"])
    study["arms"] = {name: sweep.typed(folder, arm) for name, arm in study["arms"].items()}
    if study["num_trials"] is None:
        assert budget_s is not None
        _search(folder, study, runs, 1)
        mean_s, train_s = stats.mean(_walls_s(folder)), stats.mean(_walls_s(folder, "train_s"))
        say("study", f"a run takes {mean_s:.0f} s, of which it trains {train_s:.0f} s")
        number = num_trials(study, f"{budget_s:.0f}s", budget_s / RESERVE / mean_s / len(study["arms"]))
        study["num_trials"] = min(map(len, _search(folder, study, runs, number, budget_s).values()))
        sweep.write_study(folder, study)
    tried, metric = _search(folder, study, runs, study["num_trials"] or 0), sweep.metric_of(study)
    best_of = {name: sweep.best_of(losses, metric) for name, losses in tried.items()}
    for name, losses in tried.items():
        best = best_of[name]
        if math.isinf(losses[best]):
            raise ValueError(f"{name}: every trial diverged: give {study['tune']}=NUMBER to begin at a smaller value")
        among = f"of {counted(len(losses), 'trial')} from {min(losses):g} to {max(losses):g}"
        say("study", f"{name}: best at {study['tune']}={best:g}, {metric.name} {losses[best]:.4f}, {among}")
    race = race_folder.of(results, study["race_id"]) if study["race_id"] else None
    if race:
        planning.enter(race, results)
    if race and not state.read(race, results).has_ended:
        return runner.go(race, results, anyway=True)
    if race and (recorded := race_folder.read(race))["status"] != "abandoned":
        return recorded
    best_words = {name: f"{study['tune']}={best!r}" for name, best in best_of.items()}
    arms = [f"{name}={shlex.join([*arm, best_words[name]])}" for name, arm in study["arms"].items()]
    settings = [f"n={study['n']}", "on=loss", f"alpha={study['alpha'] / 2!r}", "name=study"]
    race = planning.begin(plan.parse_request([*arms, *study["common"], *settings]), results, anyway=True)
    sweep.write_study(folder, study | {"race_id": race.name})
    return runner.go(race, results, anyway=True, is_new=True)


def _search(
    folder: Path, study: sweep.Study, runs: Points, number: int, budget_s: float | None = None
) -> dict[str, dict[float, float]]:
    """Runs trials until each arm has `number`, or no more fit in the budget with the race. Returns sweep.trials()."""
    tried, num_arms = sweep.trials(folder, study), len(study["arms"])
    reused = list(_made_before(study, tried, number))
    for _, settings, run in reused:
        sweep.keep(folder, len(sweep.points(folder)), settings, run)
    if reused:
        tried = sweep.trials(folder, study)
        say("study", f"uses {counted(len(reused), 'trial')} of earlier runs again")
    if not (num_left := sum(max(0, number - len(losses)) for losses in tried.values())):
        return tried
    amount = f"{'at most ' * (budget_s is not None)}{counted(number, 'trial')} per arm"
    amount += f"{sweep.tokens_text(study)}, tuning {study['tune']}"
    race = f"then a race of the best configs with {study['n']} fresh seeds"
    is_first = study["num_trials"] is None and number == 1
    say("study", f"{amount}; {'they show how many the budget allows' if is_first else race}")
    before_s, began_s = sum(_walls_s(folder)), time.monotonic()
    with runs.searching(num_left, len(_left(folder, study, tried, number)[1])):
        while (fewest := min(map(len, tried.values()))) < number:
            todo = [name for name, losses in tried.items() if len(losses) == fewest]
            if budget_s is not None and len(todo) == num_arms:
                spent_s = max(before_s + time.monotonic() - began_s, sum(_walls_s(folder)))  # includes launches
                all_s = RESERVE * spent_s * (1 + (study["n"] + 2) / fewest)  # with one more trial of each and the race
                if all_s > budget_s:
                    why = f"a run takes {spent_s / fewest / num_arms:.0f} s, and with one more of each arm the race"
                    why += f" would end after the budget of {budget_s:.0f} s"
                    say("study", f"{counted(fewest, 'trial')} per arm instead of {number}: {why}")
                    break
            points = [_point(study, name, tried[name]) for name in todo]
            runs.all(points, len(sweep.points(folder)), {"parallel": None})
            tried = sweep.trials(folder, study)
            for name, overrides in zip(todo, points, strict=True):
                if len(tried[name]) == fewest:
                    own = sweep.public(overrides)
                    place = next(point.folder for point in sweep.points(folder) if point.overrides == own)
                    failure = (place and run_folder.read(place)["failure"]) or {}
                    raise Failed(f"{name}: trial {place and place.name} failed: {failure.get('message')}")
    return tried


def _walls_s(folder: Path, key: Literal["wall_s", "train_s"] = "wall_s") -> list[float]:
    """Returns the seconds of each trial from its start to its end, or those in which it trained."""
    return [row_of(run_folder.read(point.folder))[key] or 0.0 for point in sweep.points(folder) if point.folder]


def _point(study: sweep.Study, name: str, tried: Mapping[float, float]) -> list[str]:
    """Returns the overrides of an arm's next trial: the first of next_values() that the setting may have."""
    why = ValueError(f"{name}: no other value of {study['tune']} is allowed")
    for value in next_values(study["starts"][name], tried, sweep.metric_of(study)):
        overrides = [*study["common"], *study["arms"][name], f"{study['tune']}={value!r}", f"seed={study['seed']}"]
        try:
            requested_config(overrides)
            return overrides
        except ValueError as error:
            why = error
    raise why
