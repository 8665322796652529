"""A planned race, run to its end or to an interrupt: each run in turn, the looks that were planned, the last word."""

import json
import sys
import time
from pathlib import Path

from bench import atomic, utc
from bench.compare import comparison
from bench.compare import selection as arms_of_runs
from bench.launch.progress import say
from bench.paths import REPO
from bench.race import arm_process, plan, worktrees
from bench.race import planning as race_plan
from bench.race import report as race_report
from bench.race import state as race_state
from bench.record import ledger

DECIDED = ("faster", "slower", "equivalent")


# ---- the race


def go(folder, results, args):
    """Race what is open of a plan, to its end or to an interrupt."""
    with race_state.locked(folder):
        for other in race_state.unfinished(results):
            if other != folder and race_state.is_raced_now(other):
                raise ValueError(
                    f"{other.name}: is being raced at this moment, and two races at once disturb each other: wait for its end, then ./run.sh race --resume {folder.name}"
                )
        state = race_state.read(folder, results)
        if state.is_over:
            raise ValueError(f"{folder.name}: the race is over: ./run.sh compare {folder.name} shows it")
        _introduce(state)
        if args.show:
            ledger.append(results, "look", race_id=state.race_id, started=state.started(), planned=False)
            say("race", "every run's numbers are shown: that is a look which was not planned, and it is written down")
        commits = {name: arm["commit"] for name, arm in state.plan["arms"].items() if arm["rev"] is not None}
        try:
            with worktrees.of(REPO, {f"{state.race_id}-{name}": commit for name, commit in commits.items()}) as paths:
                folders = {name: paths.get(f"{state.race_id}-{name}", REPO) for name in state.plan["arms"]}
                _same_as_planned(state, folders, results)
                status, why = _run_all(state, folders, results, args.show)
        except arm_process.Interrupted as error:
            say("race", f"interrupted ({error}): ./run.sh race --resume {folder.name} goes on where it stood")
            return 1
        return finish(folder, results, status, why, args)


def _introduce(state):
    known = state.plan
    for name, arm in known["arms"].items():
        rev = "" if arm["rev"] is None else f" at {arm['rev']} ({arm['commit'][:8]})"
        say("race", f"{name}: {' '.join(arm['overrides']) or 'the default'}{rev}, config {arm['config_id']}")
        for deviation in arm["deviations"]:
            say("track", f"{name} is in the open division, because {deviation}")
    looks = "" if len(known["looks"]) == 1 else f", looks at {', '.join(map(str, known['looks']))}"
    say(
        "plan",
        f"{state.race_id}: {known['n']} runs an arm after a warm-up each{looks}, alpha {known['alpha']:g}; results stay hidden until it is over",
    )


def _same_as_planned(state, folders, results):
    """A race is resumed with the code, the settings and the sitting it was begun with, or not at all."""
    for name, arm in state.plan["arms"].items():
        found = race_plan.facts(name, folders[name], arm["overrides"], results)
        for key in ("config_id", "source_sha256"):
            if found[key] != arm[key]:
                raise ValueError(
                    f"{name}: its {key} is {found[key][:12]} and was {arm[key][:12]} when the race was planned: "
                    "put the code back as it was, or begin a new race"
                )
        if found["session_id"] != state.plan["session_id"]:
            raise ValueError(
                f"{state.race_id}: it began in another session (a boot, a set of GPUs, installed packages), and times "
                "of two sessions are not comparable: begin a new race"
            )


def _run_all(state, folders, results, show):
    """Returns (status, why): complete, stopped_early or abandoned."""
    total, begun_s, num_run = len(state.places), time.monotonic(), 0
    while (place := state.next_place()) is not None:
        arm = state.plan["arms"][place.arm]
        if len(place.attempts) >= plan.MAX_ATTEMPTS:
            return "abandoned", f"run {place.position + 1} was interrupted {len(place.attempts)} times"
        if arm["rev"] is None and arm_process.source_sha256(folders[place.arm]) != arm["source_sha256"]:
            raise ValueError(
                f"{place.arm}: what is raced (models/, training, data, config, instruments) changed while the race was running: put it back and "
                f"./run.sh race --resume {state.race_id}, or race revisions ({place.arm}.rev=HEAD)"
            )
        tag = {
            "race_id": state.race_id,
            "arm": place.arm,
            "position": place.position,
            "attempt": len(place.attempts) + 1,
            "discarded": place.discarded,
        }
        tail = arm_process.start(folders[place.arm], [*arm["overrides"], f"seed={place.seed}"], results, tag, show)
        state = race_state.read(state.folder, results)
        done = state.places[place.position]
        if len(done.attempts) < tag["attempt"]:
            raise ValueError(f"{place.arm}: the run did not start:\n{tail}")
        num_run += 1
        left_s = (time.monotonic() - begun_s) / num_run * (total - place.position - 1)
        say(
            "race",
            f"run {place.position + 1} of {total} {done.status}{', warm-up' if done.discarded else ''}, about {_duration(left_s)} to go",
        )
        why = _spoilt(state, done, arm, results)
        if why:
            return "abandoned", why
        if _decided_at_look(state, done, results):
            return "stopped_early", f"decided at the planned look at {state.started()[place.arm]} runs an arm"
    return "complete", None


def _duration(seconds):
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _spoilt(state, done, arm, results):
    """Why the race cannot end well after this run, or None."""
    run = arm_process.record_of(results, done.attempts[-1][0])
    if run is None or done.status == "aborted":
        return None
    if (run["config_id"], run["code"]["source_sha256"]) != (arm["config_id"], arm["source_sha256"]):
        return f"the code or conf/ changed while the race was running: {run['run_id']} is not what arm {done.arm} was planned to be"
    if done.status == "failed" and done.discarded:
        return f"the warm-up of {done.arm} failed: {run['failure']['kind']}: {run['failure']['message']}"
    if state.num_failed(done.arm) > state.plan["n"] - 2:
        return f"{state.num_failed(done.arm)} runs of {done.arm} failed: fewer than two times would be left"
    return None


def _decided_at_look(state, done, results):
    """At a planned look before the last: whether every verdict is in.  The look is written down."""
    due = plan.look_after(state.plan, done.position)
    if due is None or due == state.plan["n"]:
        return False
    ledger.append(results, "look", race_id=state.race_id, started=state.started(), planned=True)
    against = result_of(state, results)["against"]
    decided = all(one["verdict"] in DECIDED for one in against.values())
    say("look", f"planned, at {due} runs an arm: {'decided' if decided else 'not decided, the race goes on'}")
    return decided


def result_of(state, results):
    """{"baseline", "against": {name: comparison}} of the runs so far."""
    arms = []
    for name in state.plan["arms"]:
        arm = arms_of_runs.of_folders(name, [Path(results) / run for run in state.runs(name)])
        arm.plan, arm.race, arm.peeked = state.plan, state.race_id, any(not look["planned"] for look in state.looks)
        arms.append(arm)
    return {"baseline": state.plan["baseline"], "against": dict(comparison.of_arms(arms))}


def finish(folder, results, status, why, args):
    """Write the race's last word and say it."""
    state = race_state.read(folder, results)
    result = result_of(state, results) if status != "abandoned" else None
    found = race_state.as_json(state, status, why, utc.now(), result)
    atomic.write_json(folder / "race.json", found)
    ledger.append(
        results, "race_end", race_id=folder.name, status=status, race_json_sha256=ledger.sha256_of(folder / "race.json")
    )
    race_report.write(folder, found)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n" + race_report.text(found, "md" if args.md else "terminal"))
        say("race", str(folder))
    if status == "abandoned":
        return 1
    return 0 if all(one["comparable"] for one in result["against"].values()) else 2


def look(folder, results):
    """Show the interim state.  The look is written into the ledger: before the end only a planned one does no harm."""
    state = race_state.read(folder, results)
    if not all(state.started().values()):
        raise ValueError(f"{state.race_id}: not every arm has a run yet, so there is nothing to see")
    if not state.is_over:
        started = state.started()
        planned = len(set(started.values())) == 1 and next(iter(started.values())) in state.plan["looks"]
        ledger.append(results, "look", race_id=state.race_id, started=started, planned=planned)
        print(
            f"look written down, {'planned' if planned else 'NOT planned: the race counts as peeked'}; started: {started}",
            file=sys.stderr,
        )
    print(race_report.verdicts(result_of(state, results)))
    return 0
