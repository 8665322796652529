"""Runs a planned race to its end or to an interrupt: its runs in order, the planned looks, the result."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.base import atomic, text_table, utc
from bench.base.paths import REPO, user_path
from bench.compare import comparison, questions, searching, selection, target
from bench.launch.console import Bars, say
from bench.launch.nodes import joining
from bench.launch.progress import Progress
from bench.launch.series import Series, earlier_s
from bench.machine import code_copy, git, leases, processes, surroundings
from bench.machine.signals import Interrupted
from bench.plans.race import arm_process, condition, plan, planning, spoiled, state, worktrees
from bench.plans.race.state import Slot, State
from bench.record import ledger, race_folder
from bench.record.rows import DISTRUSTING

MAX_CHARS = 120  # of an arm's description on the terminal; the plan has it all


class DiskError(ValueError):
    """A run failed because of its disk. The race can be resumed."""


def go(
    folder: Path, results: Path, show: bool = False, anyway: bool = False, is_new: bool = False, machine: str = "auto"
) -> race_folder.Race:
    """Runs what is left of a plan, to its end or to an interrupt. Returns race.json; of an interrupted race it is what
    it would be now, with status interrupted.

    show: show every run's numbers, an unplanned look; anyway: also on a busy machine; is_new: the race has just been
    planned, so its arms are not checked again; machine: one of condition.MODES. A race that has ended is not run again.
    Raises ValueError if the race is not as planned, or another one runs.
    """
    with state.locked(folder):
        for other in state.unfinished(results):
            if other != folder and state.is_running(other):
                advice = "is running at this moment, and two races at once disturb each other: wait for its end"
                raise leases.Busy(f"{other.name}: {advice}, then ./run.sh race --resume {folder.name}")
        race = state.read(folder, results)
        if race.has_ended:
            say("race", f"{race.race_id} has ended: no runs are left", always=True)
            return race_folder.vouched(folder)
        if race.race_id not in {line.get("race_id") for line in ledger.read(results).own_lines}:
            raise ValueError(f"{race.race_id}: it was collected from another machine, which alone can go on with it")
        introduce(race.plan, results)
        commits = {name: arm["commit"] for name, arm in race.plan["arms"].items() if arm["rev"] is not None}
        try:
            with (
                worktrees.checked_out(REPO, commits, f"{race.race_id}-") as paths,
                code_copy.held(REPO) as code,  # so that the checkout may be edited while it races
                joining.leased(*planning.gpus_and_nodes(race.plan["arms"])),
            ):
                folders = {name: paths.get(name, code) for name in race.plan["arms"]}
                if not is_new:
                    planning.agree_on_machine(_refuse_changes(race, folders), anyway, race.plan.get("on"))
                if show:
                    ledger.append(results, "look", race_id=race.race_id, started=race.started(), planned=False)
                    warning = "every run's numbers are shown: an unplanned interim look, and the ledger keeps it"
                    say("race", warning, always=True)
                condition.measure(folder, results, race.plan["arms"], machine, "before")
                status, why = _run_all(race, folders, show)
                condition.measure(folder, results, race.plan["arms"], machine, "after")
        except Interrupted as error:
            why = f"interrupted ({error}): ./run.sh race --resume {folder.name} continues it"
            say("race", why, always=True)
            return state.as_json(state.read(folder, results), "interrupted", why, utc.now(), None)
        return finish(folder, results, status, why)


def introduce(design: Mapping[str, Any], results: Path) -> None:
    """Prints what a plan is going to race, how often, and what would keep its result from being claimed."""
    if common := race_folder.shared(design["arms"]):
        say("race", f"every arm: {' '.join(common)}")
    abouts = race_folder.about(design["arms"])
    for name, arm in design["arms"].items():
        about = text_table.middle(race_folder.WHOLE_HASH.sub(r"\1", abouts[name]), MAX_CHARS)
        say("race", f"{name}: {about}{_commit(arm)}, config {arm['config_id']}")
    for name, deviations in plan.by_arms({name: arm["deviations"] for name, arm in design["arms"].items()}).items():
        say("track", f"{name} in the open division: {'; '.join(deviations)}")
    say("plan", f"{design['race_id']}: {_about_plan(design)}; results stay hidden until the race ends")
    if "on" in design:
        say("plan", f"compares {plan.question_sentence(design)}")
    for name in [name for name in design["arms"] if name != design["baseline"]]:
        earlier = comparison.earlier_than(design, (design["baseline"], name), results)
        if earlier and earlier.weight < 1:
            num = text_table.counted(sum(earlier.verdicts.values()), "earlier race")
            left = f"alpha is {text_table.two_digits(design['alpha'] * earlier.weight)}"
            say("plan", f"{name}: {left}, since {num} of these arms left {100 * earlier.weight:.0f} % of it")
    for why in _in_the_way_of_a_claim(design):
        say("plan", f"the race will have a verdict, but ./run.sh judge would refuse a claim: {why}")


def _commit(arm: Mapping[str, Any]) -> str:
    """Returns " (03d3a59 Average the weights)", the commit of an arm that is a revision; "" for another arm."""
    settings = dict(word.partition("=")[::2] for word in arm["overrides"])
    root, commit = settings.get("script.root"), settings.get("script.rev") or (arm["rev"] and arm["commit"])
    shown = commit and git.ask(user_path(root) if root else REPO, "log", "-1", "--format=%h %s", commit, "--")
    return f" ({shown.strip()})" if shown else f" ({commit[:8]})" if commit else ""


def _about_plan(design: Mapping[str, Any]) -> str:
    """Describes the number of runs, compilations and looks."""
    looks, compilations, alpha = design["looks"], design.get("compilations", 1), f"alpha {design['alpha']:g}"
    groups = f", {compilations} fresh compilations per arm" * (compilations > 1)
    if design.get("sequential"):
        runs = f"{looks[0]} to {looks[-1]} runs per arm after a warm-up{groups}"
        return f"{runs}: the race ends after the first round that decides, {alpha} over all looks"
    at = f", looks at {', '.join(map(str, looks))}" * (len(looks) > 1)
    return f"{design['n']} runs per arm after a warm-up{at}{groups}, {alpha}"


def _in_the_way_of_a_claim(design: Mapping[str, Any]) -> Iterator[str]:
    """Yields why the track will accept no claim from this plan, with the settings that it would accept."""
    settings, rules, track = target.track_settings(design["track"]), target.rules_of(design["track"]), design["track"]
    if not settings.get("fixed"):
        return
    if design["name"] == "study":  # which asks for the loss, and is no claim
        return
    for name, arm in design["arms"].items():
        if arm["deviations"] and name != design["baseline"]:
            yield f"{name} is in the open division"
    repeats, first = settings["repeats"], design["looks"][0]
    if first < repeats:
        after = f"it may end after {text_table.counted(first, 'run')} of each arm"
        when = f"n={design['n']} is too few" if design["n"] < repeats else after
        yield f"{when}: track {track} requires {repeats} (n={repeats})"
    if "on" in design and design["on"] not in plan.QUESTIONS_OF_TRACK[rules.judged]:
        on = plan.QUESTIONS_OF_TRACK[rules.judged][0]
        yield f"the race compares {design['on']}, and track {track} judges {rules.judged} (on={on})"
    if design.get("seed_given"):
        yield "its first seed was chosen (leave seed= out)"
    if design.get("compilations", 1) < rules.compilations:
        yield f"track {track} requires compilations={rules.compilations} or more"


def _refuse_changes(race: State, folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Raises ValueError unless the code, the settings and the session are those that the race was begun with.

    Returns {arm: arm_process.facts()}.
    """
    arms = race.arms
    code_and_overrides = {name: (folders[name], arms[name]["overrides"]) for name in arms}
    all_facts = arm_process.facts_of_arms(code_and_overrides, race.results)
    for name, facts in all_facts.items():
        for key in ("config_id", "source_sha256"):
            if facts[key] != arms[name][key]:
                both = f"its {key} is {facts[key][:12]} and was {arms[name][key][:12]} when the race was planned"
                raise ValueError(f"{name}: {both}: put the code back as it was, or begin a new race")
        if facts["session_id"] != race.plan["session_id"]:
            raise ValueError(f"{race.race_id}: it began in another session (boot, GPUs or packages): begin a new race")
    return all_facts


def series_of(design: Mapping[str, Any], num_done: int = 0, live: bool = True) -> Series:
    """Returns the series of a plan's runs. They are all of one kind, so that no arm's own time can be seen."""
    ids = [arm["config_id"] for arm in design["arms"].values()]
    known_s = list(earlier_s([design["track"]], ids).values())
    mean_s = {"run": sum(known_s) / len(known_s)} if known_s else {}
    fewest = len(ids) * (design["looks"][0] + 1)
    return Series(["run"] * len(design["order"]), mean_s, num_done, live=live, fewest=fewest)


def _run_all(race: State, folders: Mapping[str, Path], show: bool) -> tuple[str, str | None]:
    """Returns (status, why): complete, stopped_early or abandoned."""
    pythons, arms = arm_process.pythons_of(race.arms), race.arms
    planned = race.plan.get("python_sha256") or ""  # compared after an interrupt
    if planned.startswith(surroundings.VERSION) and planned != surroundings.python_sha256(pythons):
        raise ValueError(f"{race.race_id}: the installed Python code changed since it was planned: begin a new race")
    before, bytecode = surroundings.facts(pythons), set[surroundings.Bytecode]()
    ended = [slot for slot in race.slots if slot.is_done]
    # an interrupt may have come before these were asked
    if ended and (why := spoiled.forged(race, bytecode) or spoiled.by(race, ended[-1], arms[ended[-1].arm], ())):
        return "abandoned", why
    with series_of(race.plan, len(ended), live=not show) as series:
        while (slot := race.next_slot()) is not None:
            _draw(race, series.bars)
            arm, num_attempts = arms[slot.arm], len(slot.attempts)
            if num_attempts >= plan.MAX_ATTEMPTS:
                return "abandoned", f"run {slot.position + 1} was interrupted {num_attempts} times"
            own = arm.get("own", ())
            if not (folders[slot.arm] / "bench").is_dir():
                raise ValueError(f"{slot.arm}: its code is gone: ./run.sh race --resume {race.race_id} puts it back")
            if arm["rev"] is None and arm_process.source_sha256(folders[slot.arm], own) != arm["source_sha256"]:
                earlier = next(iter(race.runs(slot.arm, discarded=True)), "")
                changed = arm_process.changed_files(
                    folders[slot.arm], own, arm_process.record_of(race.results, earlier)
                )
                change = f"{text_table.some(changed or list(own))} of its own code changed while the race was running"
                remedy = f"put it back and ./run.sh race --resume {race.race_id}, or race revisions"
                raise ValueError(f"{slot.arm}: {change}: {remedy} ({slot.arm}.rev=HEAD)")
            with processes.strays() as end_strays:  # processes of a launcher that its run killed
                race = _run_one(race, slot, folders[slot.arm], show, series)
                strays = end_strays()
            done = race.slots[slot.position]
            if changed := [name for name, value in surroundings.facts(pythons).items() if value != before.get(name)]:
                run_name, _ = done.attempts[-1]
                meanwhile = f"while {run_name} of {done.arm} ran"
                return "abandoned", f"{meanwhile}, {changed[0]} changed, which all runs of this race share"
            if why := spoiled.forged(race, bytecode) or spoiled.by(race, done, arm, strays):
                return "abandoned", why
            if _decided_at_look(race, done):
                return "stopped_early", f"decided at a planned look, after {race.started()[slot.arm]} runs of each arm"
    return "complete", None


def _draw(race: State, bars: Bars) -> None:
    """Draws a bar of runs for each arm, and one of the looks, which says when something may be seen."""
    started, n = race.started(), race.plan["n"]
    for name, num_runs in started.items():
        doing = "" if race.runs(name, discarded=True) else ", warm-up first"
        bars.draw(name, num_runs, n, f"{num_runs} of {n} runs{doing}")
    looks, fewest = race.plan["looks"], min(started.values())
    at = next((look for look in looks if look > fewest), n)
    when = f"until a look decides: the next is after {at} runs each" if looks[1:] else "until the race has ended"
    bars.draw("looks", sum(look <= fewest for look in looks), len(looks), f"times and losses stay hidden {when}")


def _run_one(race: State, slot: Slot, folder: Path, show: bool, series: Series) -> State:
    """Runs one slot of the plan. Returns the race's state after it."""
    series.begin()
    arm, num_attempts = race.arms[slot.arm], len(slot.attempts)
    tag = {key: getattr(slot, key) for key in ("arm", "position", "discarded")}
    tag |= {"race_id": race.race_id, "attempt": num_attempts + 1}
    tag |= {"compilation": slot.compilation} if race.plan.get("compilations", 1) > 1 else {}
    tag |= {"looks": slot.position == min(other.position for other in race.slots if other.arm == slot.arm)}
    tick = BlindBar(race.results / race.plan["track"], arm["config_id"], slot.seed, series).tick
    scripts = [path for other in race.arms.values() for path in other.get("own", ())]
    words = [*arm["overrides"], f"seed={slot.seed}"]
    spoiled.read_again(race, slot.arm)
    tail = arm_process.start(folder, words, race.results, tag, scripts, show, tick)
    made = {run for other in race.slots for run, _ in other.attempts}
    race = state.read(race.folder, race.results)
    done = race.slots[slot.position]
    if lost := made - {run for other in race.slots for run, _ in other.attempts}:
        why = f"it no longer has {text_table.counted(len(lost), 'run')} of this race, as an older copy put back would"
        raise ValueError(f"{race.results / ledger.NAME}: {why}: put the newest copy of the results back, then --resume")
    if len(done.attempts) <= num_attempts:
        raise ValueError(f"{slot.arm}: the run did not start; ./run.sh race --resume {race.race_id} continues:\n{tail}")
    message = f"run {series.position} {done.status}{', warm-up' * done.discarded}"
    say("race", f"{message}{series.end(done.is_done)}", always=done.status != "complete")
    failure = (arm_process.record_of(race.results, done.attempts[-1][0]) or {}).get("failure")
    if failure and failure["kind"] in state.OF_THE_DISK:  # an immediate repeat would use up the slot's attempts
        why = f"{done.arm}: {failure['kind']}: {failure['message']}"
        raise DiskError(f"{why}: free or repair the disk, then ./run.sh race --resume {race.race_id}")
    if done.discarded:
        _warn_of_doubts(done, race.results)
    return race


def _warn_of_doubts(warm_up: Slot, results: Path) -> None:
    """Warns before the other runs if the warm-up of a script shows that its times will not be compared."""
    run = arm_process.record_of(results, warm_up.attempts[-1][0]) or {}
    doubts = [doubt["doubt"] for doubt in run.get("doubts", ()) if doubt["instrument"] in DISTRUSTING]
    if doubts:
        warning = f"the times of {warm_up.arm} will not be compared if all its runs are like its warm-up: {doubts[0]}"
        say("warn", warning, always=True)


class BlindBar:
    """The progress bar of a run: its step, and no number that decides. tick() draws it.

    The run belongs to another process, perhaps of another revision, so its folder is found by its name in folder, that
    of the track's runs.
    """

    def __init__(self, folder: Path, config_id: str, seed: int, series: Series) -> None:
        self._folder, self._pattern, self._series = folder, f"*-{config_id}-s{seed}*", series
        self._before = set(folder.glob(self._pattern))
        self._progress: Progress | None = None

    def tick(self) -> None:
        if not self._series.bars.are_live:
            return
        self._series.tick()
        if self._progress is None and (new := set(self._folder.glob(self._pattern)) - self._before):
            self._progress = Progress(min(new), None, self._series.bars, blind=True)
        if self._progress:
            self._progress.show()


def _decided_at_look(race: State, done: Slot) -> bool:
    """Returns whether every verdict is decided at a planned look before the last. Enters the look into the ledger."""
    due = plan.look_after(race.plan, done.position)
    if due is None or due == race.plan["n"]:
        return False
    ledger.append(race.results, "look", race_id=race.race_id, started=race.started(), planned=True)
    if "stop" in (race.plan.get("sequential") or {}):
        return searched(race)["outcome"] is not None
    against = result_of(race, diagnose=False)["against"] or {}
    decided = all(verdict["verdict"] in questions.FIRM for verdict in against.values())
    if decided or not race.plan.get("sequential"):
        say("look", f"planned, after {due} runs per arm: {'decided' if decided else 'not yet, the race continues'}")
    return decided


def searched(race: State) -> searching.Finding:
    """Returns the finding so far on the second arm of a search's race, by the stopping rule of its plan."""
    champion, candidate = ([race.results / run for run in race.runs(arm)] for arm in race.plan["arms"])
    return searching.judge(race.plan["sequential"]["stop"], race.plan["on"], champion, candidate)


def result_of(race: State, diagnose: bool = True) -> race_folder.Result:
    """Returns the verdicts by the runs so far. diagnose: include where the time went."""
    race_facts: dict[str, Any] = {"plan": race.plan, "race": race.race_id, "unplanned_look": race.has_unplanned_look}
    about = race_folder.about(race.plan["arms"])
    arms = [
        selection.arm_from_folders(
            name,
            [race.results / run for run in race.runs(name)],
            in_race=(name, overrides),
            warm_ups=[race.results / run for run in race.runs(name, discarded=True)],
            num_run_again=len(race.interrupted(name)),
            **race_facts,
        )
        for name, overrides in about.items()
    ]
    against: Any = dict(comparison.compare_arms(arms, diagnose))
    return {"baseline": race.plan["baseline"], "against": against}


def finish(folder: Path, results: Path, status: str, why: str | None) -> race_folder.Race:
    """Writes race.json, its ledger entry and its pages. Returns race.json. status, why: as in race_folder.Race."""
    race = state.read(folder, results)
    verdicts = result_of(race) if status != "abandoned" else None
    recorded = state.as_json(race, status, why, utc.now(), verdicts)
    if condition.of(folder):
        recorded["machine"] = condition.faults_of(folder)
    atomic.write_json(folder / "race.json", recorded)
    sha256 = ledger.sha256_of(folder / "race.json")
    ledger.append(results, "race_end", race_id=folder.name, status=status, race_json_sha256=sha256)
    shutil.rmtree(arm_process.caches(folder), ignore_errors=True)
    (folder / race_folder.LOCAL).unlink(missing_ok=True)
    from bench.report import race_page

    try:
        race_page.write(folder)
    except OSError as error:  # the record is complete without its pages
        say("pages", f"could not be written ({error.strerror}): ./run.sh report {folder.name} writes them")
    return recorded


def look(folder: Path, results: Path) -> race_folder.Result:
    """Returns the interim result_of(), and enters the look into the ledger.

    Before the end only a planned look leaves a verdict valid. Raises ValueError if an arm has no run yet.
    """
    race = state.read(folder, results)
    started = race.started()
    if not all(started.values()):
        raise ValueError(f"{race.race_id}: there is nothing to compare yet: wait until every arm has a run")
    if not race.has_ended:
        planned = len(set(started.values())) == 1 and min(started.values()) in race.plan["looks"]
        ledger.append(results, "look", race_id=race.race_id, started=started, planned=planned)
        kind = "planned" if planned else "NOT planned: from now on the race's verdict is not evidence"
        print(f"the ledger keeps this interim look, {kind}; started: {started}", file=sys.stderr)
    return result_of(race)
