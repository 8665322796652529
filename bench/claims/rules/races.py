"""Rules about the races that the claimed runs were raced in."""

from bench.compare import comparison
from bench.compare import selection as arms
from bench.race import plan
from bench.record import ledger


def _known(claim):
    """The races whose plan is there; that of the others is the first rule's to tell."""
    return [race for race in claim.races if race.state is not None]


def the_plan_was_made_first(claim):
    """The plan of each race is the one whose hash went into the ledger before its first run."""
    if not claim.races:
        return None, "the runs were no race"
    for race in claim.races:
        if race.state is None:
            return False, race.fault
        events = [line["event"] for line in race.state.lines]
        if events[0] != "plan":
            return False, f"{race.race_id}: a run was started before the plan"
    return True, ", ".join(f"{race.race_id}: plan {plan.sha256(race.state.plan)[:12]}" for race in claim.races)


def it_was_raced_as_planned(claim):
    """Runs were started in the planned order, and all of them, or up to a planned look that decided."""
    if not claim.races:
        return None, "the runs were no race"
    words = []
    for race in _known(claim):
        starts = [line["race"]["position"] for line in race.state.lines if line["event"] == "start"]
        if starts != sorted(starts) or sorted(set(starts)) != list(range(len(set(starts)))):
            return False, f"{race.race_id}: the runs were not started in the planned order"
        started = race.state.started()
        fewest, most = min(started.values()), max(started.values())
        if not race.state.is_over or fewest != most or fewest not in race.state.plan["looks"]:
            return (
                False,
                f"{race.race_id}: {started} runs, planned {race.state.plan['n']} an arm; it is {'over' if race.state.is_over else 'not over'}",
            )
        words.append(f"{race.race_id}: {fewest} runs an arm")
    return True, ", ".join(words)


def nobody_peeked(claim):
    """Nobody asked for the interim state of a race when its plan had no look."""
    if not claim.races:
        return None, "the runs were no race"
    looks = [(race.race_id, look) for race in _known(claim) for look in race.state.looks if not look["planned"]]
    words = [f"{race_id}: looked at {look['at']} after {look['started']} runs" for race_id, look in looks]
    return not words, "; ".join(words[:3]) or "no look but the planned ones"


def interrupts_were_few(claim):
    """No more runs were interrupted and raced again than the track allows."""
    if not claim.races:
        return None, "the runs were no race"
    again = [run for race in _known(claim) for arm in race.state.plan["arms"] for run in race.state.interrupted(arm)]
    limit = claim.law.rules.max_interrupted
    return limit is None or len(
        again
    ) <= limit, f"{len(again)} interrupted{'' if limit is None else f', {limit} allowed'}"


def it_is_faster_than_its_baseline(claim):
    """Each race's verdict, computed again from its runs, is the one in race.json, and says faster."""
    words = []
    for race in _known(claim):
        if race.arm == race.state.plan["baseline"]:
            continue
        told = ((race.result or {}).get("result") or {}).get("against", {}).get(race.arm)
        if told is None:
            return False, f"{race.race_id}: race.json has no verdict for {race.arm}"
        ends = [line for line in race.state.lines if line["event"] == "race_end"]
        if not ends or ends[-1].get("race_json_sha256") != ledger.sha256_of(race.state.folder / "race.json"):
            return False, f"{race.race_id}: race.json is not the one that the ledger knows: it was changed"
        found = _verdict_again(claim, race, told["time"]["floor_pct"])
        if found["verdict"] != told["verdict"] or found["time"]["change_pct"] != told["time"]["change_pct"]:
            return False, f"{race.race_id}: race.json says {told['words']}; the runs say {found['words']}"
        if found["verdict"] != "faster":
            return False, f"{race.race_id}: {found['words']}"
        words.append(f"{race.race_id}: {found['words']}")
    return (True, "; ".join(words)) if words else (None, "nothing it was raced against")


def _verdict_again(claim, race, floor_pct):
    folders = {run.name: run.folder for run in claim.all_runs}
    found = []
    for name in race.state.plan["arms"]:
        arm = arms.of_folders(name, [folders[run] for run in race.state.runs(name) if run in folders])
        arm.plan, arm.race = race.state.plan, race.race_id
        found.append(arm)
    return dict(comparison.of_arms(found, diagnose=False, floor_pct=floor_pct))[race.arm]


def the_table_says_what_the_runs_say(claim):
    """The generated table of a claim's README says what the runs say."""
    if not claim.is_folder:
        return None, "no claim folder"
    return claim.table_fault is None, claim.table_fault or "README.md is up to date"
