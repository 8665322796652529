"""Rules about the races that the claimed runs were raced in."""

import functools

from bench.compare import comparison, selection, sentences
from bench.race import plan
from bench.record import ledger


def _known(claim):
    """The races whose plan is there; the first rule fails for the others."""
    return [race for race in claim.races if race.state is not None]


def _of_raced(rule):
    """The rule, which does not apply to runs of no race."""
    return functools.wraps(rule)(lambda claim: rule(claim) if claim.races else (None, "the runs were not raced"))


@_of_raced
def the_plan_was_made_first(claim):
    """The plan of each race is the one whose hash went into the ledger before its first run."""
    for race in claim.races:
        if race.state is None:
            return False, race.fault
        if race.state.lines[0]["event"] != "plan":
            return False, f"{race.race_id}: a run was started before the plan"
    return True, ", ".join(f"{race.race_id}: plan {plan.sha256(race.state.plan)[:12]}" for race in claim.races)


@_of_raced
def the_runs_follow_the_plan(claim):
    """Runs were started in the planned order, and all of them, or up to a planned look that decided."""
    words = []
    for race in _known(claim):
        starts = [line["race"]["position"] for line in race.state.lines if line["event"] == "start"]
        if starts != sorted(starts) or sorted(set(starts)) != list(range(len(set(starts)))):
            return False, f"{race.race_id}: the runs were not started in the planned order"
        started = race.state.started()
        fewest, most = min(started.values()), max(started.values())
        if not race.state.has_ended or fewest != most or fewest not in race.state.plan["looks"]:
            ended = "has ended" if race.state.has_ended else "has not ended"
            return False, f"{race.race_id}: {started} runs, planned {race.state.plan['n']} an arm; it {ended}"
        words.append(f"{race.race_id}: {fewest} runs an arm")
    return True, ", ".join(words)


@_of_raced
def there_was_no_unplanned_look(claim):
    """The interim state of a race was shown only when its plan had a look."""
    looks = [(race.race_id, look) for race in _known(claim) for look in race.state.looks if not look["planned"]]
    words = [f"{race_id}: looked at {look['at']} after {look['started']} runs" for race_id, look in looks]
    return not words, "; ".join(words[:3]) or "only planned looks"


@_of_raced
def interrupts_were_few(claim):
    """No more runs were interrupted and run again than the track allows."""
    num = sum(len(race.state.interrupted(arm)) for race in _known(claim) for arm in race.state.plan["arms"])
    limit = claim.track_rules.rules.max_interrupted
    return limit is None or num <= limit, f"{num} interrupted{'' if limit is None else f', {limit} allowed'}"


def it_is_faster_than_its_baseline(claim):
    """Each race's verdict, computed again from its runs, is the one in race.json, and says faster.

    Where the track judges steps, it has fewer of them instead.
    """
    words = []
    for race in _known(claim):
        if race.arm == race.state.plan["baseline"]:
            continue
        reported = ((race.result or {}).get("result") or {}).get("against", {}).get(race.arm)
        if reported is None:
            return False, f"{race.race_id}: race.json has no verdict for {race.arm}"
        ends = [line for line in race.state.lines if line["event"] == "race_end"]
        if not ends or ends[-1].get("race_json_sha256") != ledger.sha256_of(race.state.folder / "race.json"):
            return False, f"{race.race_id}: race.json is not the one in the ledger: it was changed"
        result = _verdict_again(claim, race, reported["time"]["floor_pct"])
        said = sentences.alone(result)
        if result["verdict"] != reported["verdict"] or result["time"]["change_pct"] != reported["time"]["change_pct"]:
            return False, f"{race.race_id}: race.json says {sentences.alone(reported)}; the runs say {said}"
        is_better = result["verdict"] == "faster"
        if claim.track_rules.rules.judged == "steps":
            theirs, ours = result["steps"]
            said = f"{ours} steps, its baseline {theirs}"
            is_better = None not in (theirs, ours) and ours < theirs
        if not is_better:
            return False, f"{race.race_id}: {said}"
        words.append(f"{race.race_id}: {said}")
    return (True, "; ".join(words)) if words else (None, "it was not raced against another arm")


def _verdict_again(claim, race, floor_pct):
    folders = {run.name: run.folder for run in claim.all_runs}
    arms = [
        selection.of_folders(
            name,
            [folders[run] for run in race.state.runs(name) if run in folders],
            plan=race.state.plan,
            race=race.race_id,
            in_race=(name, ""),
        )
        for name in race.state.plan["arms"]
    ]
    return dict(comparison.of_arms(arms, diagnose=False, floor_pct=floor_pct))[race.arm]


def the_table_says_what_the_runs_say(claim):
    """The generated table of a claim's README says what the runs say."""
    if not claim.is_folder:
        return None, "no claim folder"
    return claim.table_fault is None, claim.table_fault or "README.md is up to date"
