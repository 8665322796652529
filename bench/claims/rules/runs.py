"""Rules about the claimed runs together: repeats of one thing, enough of them, none left out."""

from bench.compare import target


def the_runs_are_repeats_of_one_thing(claim):
    """One config and one code; the code is in git or in the run's own folder."""
    if len(claim.kinds) > 1:
        return False, "; ".join(f"config {config} with code {source[:12]}" for config, source in sorted(claim.kinds))
    code = claim.runs[0].record["code"]
    commit = f"commit {code['commit'][:8]}{' and the difference in code/' if code['dirty'] else ''}" if code["commit"] else "no commit"
    return code["commit"] is not None, f"config {claim.runs[0].record['config_id']}, {commit}"


def the_runs_are_of_one_setting(claim):
    """One comparability_id: hardware, driver, torch, timing protocol, data, world size."""
    found = {run.record["comparability_id"] for run in claim.all_runs if run.record["status"] == "complete"}
    return len(found) == 1 and None not in found, f"comparability_id {', '.join(sorted(map(str, found)))}"


def every_run_has_its_own_seed(claim):
    """Two runs of one seed are one run: their losses are the same, bit for bit."""
    by_seed = {}
    for run in claim.runs:
        by_seed.setdefault(run.record["seed"], []).append(run.name)
    twice = {seed: names for seed, names in by_seed.items() if len(names) > 1}
    return not twice, "; ".join(f"seed {seed}: {', '.join(names)}" for seed, names in twice.items()) or f"seeds {_numbers(by_seed)}"


def _numbers(values):
    return ", ".join(map(str, sorted(values)))


def there_are_enough_runs(claim):
    """As many runs whose times count as the track asks of a claim."""
    wanted, counted = claim.law.rules.num_runs, [run for run in claim.runs if run.record["validity"] == "valid"]
    evidence = f"{len(counted)} valid of {len(claim.runs)} runs" + ("" if wanted is None else f", the track asks {wanted}")
    doubts = sorted({reason for run in claim.runs if run.record["validity"] == "suspect" for reason in run.record["validity_reasons"]})
    return wanted is None or len(counted) >= wanted, evidence + (f"; suspect: {doubts[0]}" if doubts else "")


def the_claimed_runs_are_all_there(claim):
    """The number of runs that is claimed is the number of run folders, and none that the plan knows is missing."""
    if claim.missing:
        return False, f"missing: {', '.join(sorted(claim.missing)[:3])}"
    if claim.claimed_n is None:
        return True, f"{len(claim.runs)} runs"
    return claim.claimed_n == len(claim.runs), f"{claim.claimed_n} claimed, {len(claim.runs)} there"


def no_run_was_dropped(claim):
    """Every started run of this config and code is claimed, but for those that a plan made no part of the claim.

    Warm-up runs are discarded by plan; a run that was interrupted in its race was raced again; runs outside the claim's
    races were no part of their plans.  Runs of another race in which this was a candidate must be claimed too.
    """
    races, dropped, beside = {race.race_id for race in claim.races}, [], 0
    for name, told in claim.started.items():
        start, end = told["start"], told["end"]
        race = start["race"] or {}
        if name in claim.names or race.get("discarded") or (start["config_id"], start["source_sha256"]) not in claim.kinds:
            continue
        status = end["status"] if end else "no end"
        if race.get("race_id") in races:
            if _was_raced_again(claim, name, race) or race["arm"] not in {one.arm for one in claim.races}:
                continue
        elif race and _is_baseline(claim, race):
            continue
        elif not race and races:
            beside += 1
            continue
        dropped.append(f"{name} ({status}{', in race ' + race['race_id'] if race else ''})")
    evidence = f"started and not claimed: {', '.join(dropped[:3])}" + (f" and {len(dropped) - 3} more" if len(dropped) > 3 else "")
    return not dropped, evidence if dropped else f"the ledger knows no other of this config and code{f', but {beside} outside the plan' if beside else ''}"


def _was_raced_again(claim, name, race):
    states = [one.state for one in claim.races if one.race_id == race["race_id"] and one.state]
    return any(name in state.interrupted(race["arm"]) for state in states)


def _is_baseline(claim, race):
    """Whether the ledger's plan of another race has this arm as what others are compared with."""
    plans = [line for line in claim.lines if line["event"] == "plan" and line["race_id"] == race["race_id"]]
    return any(line.get("baseline") == race["arm"] for line in plans)


def the_target_is_reached(claim):
    """The mean val_loss is below the track's target, one-sided t test with the track's p; or every run reached it."""
    found = target.of_repeats([run.record for run in claim.runs], claim.law.p_value)
    return found["passed"], found["words"]
