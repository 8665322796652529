"""Rules about the races that the claimed runs took part in."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from bench.claims.claim import Claim, ClaimedRace, Judged, standard
from bench.compare import clocks, comparison, effects, selection, target, wording
from bench.compare.effects import MAX_ONE_SIDED
from bench.compare.verdict import DEPENDS, Comparison
from bench.plans.race import plan
from bench.plans.race.state import State
from bench.record import ledger, race_folder
from bench.record.rows import metric_of


def _with_state(claim: Claim) -> list[tuple[ClaimedRace, State]]:
    """Returns the races whose plan is known; the first rule fails for the others."""
    return [(race, race.state) for race in claim.races if race.state is not None]


def _if_raced(rule: Callable[[Claim], Judged]) -> Callable[[Claim], Judged]:
    """Makes a rule not applicable to runs outside any race."""
    return functools.wraps(rule)(lambda claim: rule(claim) if claim.races else (None, "the runs were not raced"))


@_if_raced
def the_plan_was_made_first(claim: Claim) -> Judged:
    """The plan of each race is the one whose hash went into the ledger before its first run."""
    if faults := [race.fault for race in claim.races if race.fault is not None]:
        return False, faults[0]
    for race, state in _with_state(claim):
        if state.lines[0]["event"] != "plan":
            return False, f"{race.race_id}: a run was started before the plan"
    return True, ", ".join(f"{race.race_id}: plan {plan.sha256(state.plan)[:12]}" for race, state in _with_state(claim))


@_if_raced
def the_runs_follow_the_plan(claim: Claim) -> Judged:
    """Runs were started in the planned order, one at a time, and all of them, or up to a planned look that decided."""
    evidence = []
    for race, state in _with_state(claim):
        if both := _overlapping(state.lines):
            return False, f"{race.race_id}: {both[1]} was started before {both[0]} had ended"
        starts = [line["race"]["position"] for line in state.lines if line["event"] == "start"]
        if starts != sorted(starts) or sorted(set(starts)) != list(range(len(set(starts)))):
            return False, f"{race.race_id}: the runs were not started in the planned order"
        started = state.started()
        fewest, most = min(started.values()), max(started.values())
        if not state.has_ended or fewest != most or fewest not in state.plan["looks"]:
            ended = "has ended" if state.has_ended else "has not ended"
            return False, f"{race.race_id}: {started} runs, planned {state.plan['n']} an arm; it {ended}"
        if (run := _not_fresh(claim, state)) is not None:
            remedy = "leave the compilers' caches to the race"
            return False, f"{race.race_id}: {run} was to compile afresh and found compiled code: {remedy}"
        evidence.append(f"{race.race_id}: {fewest} runs of each arm")
    return True, ", ".join(evidence)


def _not_fresh(claim: Claim, state: State) -> str | None:
    """Returns a run that should have compiled afresh and found a warm cache, though it was not repeated, or None."""
    caches = {run.name: run.record["measured"].get("compile_cache") for run in claim.all_runs}
    firsts = {(slot.arm, slot.compilation, slot.discarded): slot for slot in reversed(state.slots)}
    runs = [slot.attempts[0][0] for slot in firsts.values() if len(slot.attempts) == 1]
    return next((run for run in runs if state.plan["compilations"] > 1 and caches.get(run) == "warm"), None)


def _overlapping(lines: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Returns two runs of which the second began before the first ended, by the race's ledger lines, or None."""
    ends = {line["run"]: number for number, line in enumerate(lines) if line["event"] == "end" and "run" in line}
    starts = [(number, line["run"]) for number, line in enumerate(lines) if line["event"] == "start"]
    pairs = itertools.pairwise(starts)
    return next(((first, second) for (_, first), (number, second) in pairs if ends.get(first, 0) > number), None)


@_if_raced
def the_plan_is_as_strict_as_the_track(claim: Claim) -> Judged:
    """Alpha and margins are at most the track's, the race asks what the track judges, enough runs are planned, and no
    seed was chosen, whose loss may have been known."""
    track = claim.track_rules
    if not track.fixed:
        return None, f"track {claim.track} fixes nothing"
    faults = []
    for race, state in _with_state(claim):
        beyond = target.laxer_than_track(claim.track, state.plan)
        laxer = [f"{key} {value:g}, the track's is {limit:g}" for key, value, limit in beyond]
        if state.plan["n"] < track.repeats:
            laxer.append(f"n {state.plan['n']}, the track's is {track.repeats}")
        if state.plan["compilations"] < track.rules.compilations:
            laxer.append(f"{state.plan['compilations']} compilations, the track's are {track.rules.compilations}")
        if (on := state.plan["on"]) not in plan.QUESTIONS_OF_TRACK[track.rules.judged]:
            laxer.append(f"it asks for {on}, the track judges {track.rules.judged}")
        if state.plan.get("seed_given"):
            laxer.append(f"its first seed was chosen ({state.plan['first_seed']}): leave seed= out")
        faults += [f"{race.race_id}: {', '.join(laxer)}"] if laxer else []
    metric = metric_of(claim.rows)
    margin, source = target.margin_of(claim.track, metric)
    margins = f"margins of {track.rules.equivalence_margin_pct:g} % of time and {margin:g} {metric.unit}".rstrip()
    margins += f" of {metric.name} ({source})"
    evidence = f"at most alpha {track.rules.alpha:g}, {margins}, at least {track.repeats} runs per arm"
    return not faults, "; ".join(faults) or evidence


@_if_raced
def there_was_no_unplanned_look(claim: Claim) -> Judged:
    """The interim state of a race was shown only when its plan had a look."""
    looks = [(race.race_id, look) for race, state in _with_state(claim) for look in state.looks if not look["planned"]]
    faults = [f"{race_id}: looked at {look['at']} after {look['started']} runs" for race_id, look in looks]
    return not faults, "; ".join(faults[:3]) or "only planned looks"


@_if_raced
def few_runs_were_interrupted(claim: Claim) -> Judged:
    """No more runs were interrupted and run again than the track allows, and not those of one arm alone.

    Who watches a race can interrupt what goes badly.  One more of an arm than of another is forgiven, warm-ups too.
    """
    limit = claim.track_rules.rules.max_interrupted
    num, one_sided = 0, []
    for race, state in _with_state(claim):
        arms = state.plan["arms"]
        num += sum(len(state.interrupted(arm)) for arm in arms)
        counts = {arm: len(state.interrupted(arm, warm_ups=False)) for arm in arms}
        if max(counts.values()) - min(counts.values()) > MAX_ONE_SIDED:
            one_sided.append(f"{race.race_id}: {', '.join(f'{count} of {arm}' for arm, count in counts.items())}")
    evidence = f"{num} interrupted, {'any number' if limit is None else limit} allowed"
    if one_sided:
        allowed = f"at most {MAX_ONE_SIDED} more of one arm than of another"
        return False, f"{evidence}; one-sided, {'; '.join(one_sided)} ({allowed}): race again"
    return limit is None or num <= limit, evidence


def it_is_faster_than_its_baseline(claim: Claim) -> Judged:
    """Each race's verdict, computed again from its runs, is the one in race.json, and says faster.

    Where the track judges steps, it has fewer of them instead; where it judges its metric, a better one.  An earlier
    race of the same two arms may have been inconclusive, or not comparable: it lowered the alpha of the later ones.
    """
    evidence, by_steps = [], claim.track_rules.rules.judged == "steps"  # which no alpha judges
    last = set() if by_steps else _last_races(claim)
    for race, state in _with_state(claim):
        if race.arm == state.plan["baseline"]:
            continue
        reported = race_folder.verdicts_of(race.race_json or {}).get(race.arm)
        if reported is None:
            return False, f"{race.race_id}: race.json has no verdict for {race.arm}"
        ends = [line for line in state.lines if line["event"] == "race_end"]
        if not ends or ends[-1].get("race_json_sha256") != ledger.sha256_of(state.folder / "race.json"):
            return False, f"{race.race_id}: race.json is not the one in the ledger: it was changed"
        again = _verdict_again(claim, race, state, reported)
        sentence = wording.standalone_verdict(again)
        if again["verdict"] != reported["verdict"] or again["time"]["change_pct"] != reported["time"]["change_pct"]:
            in_race_json = wording.standalone_verdict(reported)
            return False, f"{race.race_id}: race.json says {in_race_json}; the runs say {sentence}"
        is_better = again["verdict"] == ("better" if claim.track_rules.rules.judged == "metric" else "faster")
        doubts = [] if claim.track_rules.rules.judged != "time" else [DEPENDS, effects.ONE_SIDED]
        doubts = [wording.FLAGS[flag] for flag in doubts if flag in again["flags"]]
        if is_doubted := is_better and bool(doubts):
            is_better, sentence = False, f"{sentence}; {doubts[-1]}: race again on a quiet machine"
        if by_steps:
            theirs, ours = again["steps"]
            is_better = theirs is not None and ours is not None and ours < theirs
            sentence = f"{ours} steps, its baseline {theirs}"
            if claim.track_rules.rules.statistic == "z":
                theirs, ours = _last_failing(claim, state), claim.decision["step"]
                is_better = theirs is not None and ours is not None and ours <= theirs
                sentence = f"it reaches the target at step {ours}; its baseline had not at step {theirs}"
            if again["more_outside"]:
                is_better, sentence = False, f"{sentence}, which are not counted: {wording.extra_sentence(again)}"
        if race.race_id in last and (doubt := _forgotten_races(claim, race, state, reported, last)):
            return False, f"{race.race_id}: {doubt}"
        if not is_better:
            is_open = is_doubted or again["verdict"] in ("inconclusive", "not_comparable")
            if by_steps or not is_open or race.race_id in last:
                return False, f"{race.race_id}: {sentence}"
            sentence = f"{sentence} (it lowers the alpha of later races)"
        if clocks.MORE_BESIDE in again["flags"]:
            sentence = f"{sentence}; look at its code: {wording.FLAGS[clocks.MORE_BESIDE]}"
        baseline = state.plan["baseline"]
        evidence.append(f"{race.race_id}: {sentence}; {baseline} is {race_folder.about(state.plan['arms'])[baseline]}")
    return (True, "; ".join(evidence)) if evidence else (None, "it was not raced against another arm")


def _forgotten_races(
    claim: Claim, race: ClaimedRace, state: State, reported: Mapping[str, Any], last: set[str]
) -> str | None:
    """Returns how race.json keeps more of alpha than the claimed races before this one left, or None."""
    before = {other.race_id for other in claim.races} - last
    if not before:
        return None
    earlier = comparison.earlier_than(state.plan, (state.plan["baseline"], race.arm), claim.ledger.results, before)
    kept, left = reported.get("earlier_weight", 1.0), earlier.weight if earlier else 1.0
    if kept <= left * (1 + 1e-9):
        return None
    return f"race.json keeps {100 * kept:.0f} % of alpha, of which the races before it left {100 * left:.0f} %"


def _last_races(claim: Claim) -> set[str]:
    """Returns the ids of the races whose alpha the earlier ones of the same two arms in their ledger have lowered."""
    ids = {race.race_id for race in claim.races}
    plans = [(root, line) for root, line in zip(claim.ledger.roots, claim.ledger.lines) if line.get("event") == "plan"]
    order = {line["race_id"]: (number, root) for number, (root, line) in enumerate(plans) if line["race_id"] in ids}
    last: dict[tuple[Any, ...], tuple[int, str]] = {}
    for race, state in _with_state(claim):
        baseline = state.plan["arms"][state.plan["baseline"]]
        number, root = order[race.race_id]
        pair = root, baseline.get("config_id"), baseline.get("source_sha256")
        last[pair] = max(last.get(pair, (-1, "")), (number, race.race_id))
    return {race_id for _, race_id in last.values()}


def _last_failing(claim: Claim, state: State) -> int | None:
    """Returns the last step at which the baseline was validated and had not yet passed the z rule, or None.

    Its passing step would favour a candidate that is validated more often, by the steps in between.
    """
    curves = [run.validations for run in claim.others if run.name in state.runs(state.plan["baseline"])]
    goal = standard(claim.track).goal.target_value
    passing = None if goal is None else target.first_passing(curves, goal, claim.track_rules.rules.z_margin_nats)
    steps = [at.step for at in target.step_means(curves) if passing is None or at.step < passing.step]
    return max(steps, default=None) if goal is not None else None


def _verdict_again(claim: Claim, race: ClaimedRace, state: State, reported: Mapping[str, Any]) -> Comparison:
    folders = {run.name: run.folder for run in claim.all_runs}
    runs = {name: [folders[run] for run in state.runs(name) if run in folders] for name in state.plan["arms"]}
    raced: Any = {"plan": state.plan, "race": race.race_id}
    arms = [selection.arm_from_folders(name, paths, in_race=(name, ""), **raced) for name, paths in runs.items()]
    kept = {"floor_pct": reported["time"]["floor_pct"], "earlier_weight": reported.get("earlier_weight", 1.0)}
    kept["not_as_recorded"] = ()  # every_record_matches_the_ledger() reports it
    return dict(comparison.compare_arms(arms, diagnose=False, **kept))[race.arm]


def the_table_matches_the_runs(claim: Claim) -> Judged:
    """The generated table of a claim's README says what the runs say."""
    if not claim.is_folder:
        return None, "no claim folder"
    return claim.table_fault is None, claim.table_fault or "README.md is up to date"
