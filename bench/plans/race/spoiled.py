"""Why a race cannot end well: what its runs have changed, left behind or failed at."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.base import utc
from bench.base.paths import REPO, user_path
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.base.units import GIB
from bench.launch.script import work_folder
from bench.machine import environment, surroundings
from bench.plans.race import arm_process
from bench.plans.race.state import Slot, State
from bench.record import failures, verification
from bench.training.open_watch import OTHERS, SETTINGS

READ_BYTES, MOST_GIB = 2**24, 16.0  # at once; before a run, some seconds if it is in memory (assumed)


def forged(race: State, known: set[surroundings.Bytecode]) -> str | None:
    """Returns why bytecode that was put there since the plan ends the race, or None. known: as of forged_bytecode()."""
    since_s = utc.seconds(race.plan["made_at"])
    path = surroundings.forged_bytecode(arm_process.pythons_of(race.arms), since_s, known)
    return path and f"{path} was put there during this race, and is not what its source compiles to"


def by(race: State, done: Slot, arm: Mapping[str, Any], strays: Sequence[str]) -> str | None:
    """Returns why the race cannot end well after this run, or None. strays: processes that outlived its launcher."""
    run_name, _ = done.attempts[-1]
    run = arm_process.record_of(race.results, run_name)
    names = [name for slot in race.slots for name, _ in slot.attempts]
    if gone := next((name for name in names if not (race.results / name).is_dir()), None):
        return f"the folder of {gone} was removed while the race was running: begin a new race"
    if strays:
        return f"{run_name} of {done.arm} left {', '.join(strays)}, which has been ended and may have slowed other runs"
    if run and run["failure"] and run["failure"]["kind"] == failures.ESCAPED:
        return f"{run_name} of {done.arm}: {run['failure']['message']}"
    if not done.is_done and "stop" in (race.plan.get("sequential") or {}):
        # nobody interrupted the race: a candidate that kills its launcher gets no second try
        return f"{run_name} of {done.arm} has no record of how it ended, and nobody interrupted the race"
    if run is None or done.status == "aborted":
        return None
    if (run["config_id"], run["code"]["source_sha256"]) != (arm["config_id"], arm["source_sha256"]):
        changed = f"{run['run_id']} is not what arm {done.arm} was planned to be"
        return f"the code or conf/ changed while the race was running: {changed}"
    if which := _changed_file(race, done.arm):
        begin = "begin a new race: a cache that a first run fills is there then; each arm needs its own outputs"
        return f"{which}, changed while the race was running (chmod and hard links count too): {begin}"
    rules = verification.report(race.results / run_name)["rules"] if done.status == "complete" else ()
    if faults := [f"{rule['rule']}: {rule['evidence']}" for rule in rules if not rule["passed"]]:
        return f"{run['run_id']} of {done.arm} fails ./run.sh verify, so no verdict can include it: {faults[0]}"
    if done.status == "failed" and done.discarded:
        failure = run["failure"]
        return f"the warm-up of {done.arm} failed: {failure['kind']}: {failure['message']}; try: {failure['hint']}"
    if race.num_failed(done.arm) > race.plan["n"] - 2:
        return f"{race.num_failed(done.arm)} runs of {done.arm} failed: fewer than two times would be left"
    return None


def read_again(race: State, arm: str) -> None:
    """Reads the data that an arm's last run read, up to half of the free memory and MOST_GIB.

    Another arm can drop it from memory without any write (posix_fadvise), and this one's time would be the disk's.
    """
    settings = dict(override.partition("=")[::2] for override in race.arms[arm]["overrides"])
    script, root = settings.get("script.path") or settings.get("script") or ".", settings.get("script.root")
    folder = user_path(root) if root else user_path(script).parent
    left_bytes = min(MOST_GIB, (environment.meminfo_gib("MemAvailable") or 0.0) / 2) * GIB
    for run in list(_runs(race, arm))[-1:]:
        for name, (num_bytes, *_) in (run.data | run.elsewhere).items():
            beside = name.removeprefix("work/")
            path = Path(REPO, os.path.expanduser(name)) if beside == name else folder / beside
            left_bytes -= num_bytes
            if left_bytes > 0:
                with contextlib.suppress(OSError, Damaged), plain_file.opened(path) as file:
                    while file.read(READ_BYTES):
                        pass


class _Files(NamedTuple):
    """The files that a run of a script read, and those elsewhere that it wrote."""

    window_s: tuple[float, float]  # when it started and ended, or was last seen, as time.time() gives it
    data: dict[str, list[int]]  # {name: state} of its data, and of what lies beside it
    elsewhere: dict[str, list[int]]  # of all files that lie elsewhere and that it did not write itself
    written: tuple[str, ...]  # each with a slash at its end


def _changed_file(race: State, arm: str) -> str | None:
    """Returns "FILE, which ARM reads" for a file that a run of another arm changed, or data that anything changed.

    arm: that of the last run; earlier runs have been looked at.
    """
    runs_of = {name: list(_runs(race, name)) for name in race.plan["arms"]}
    if not runs_of[arm]:
        return None
    last, states = runs_of[arm][-1], dict[str, list[int]]()
    own_windows_s = [run.window_s for run in runs_of[arm]]
    for run in runs_of[arm]:
        for name, found in (run.data | run.elsewhere).items():
            is_known = name == OTHERS or _is_within(own_windows_s, found[1])  # its own program did it
            is_its_own = _is_below(name, run.written) if name in run.data else is_known
            if states.setdefault(name, found) != found and not is_its_own:
                return f"{name}, which {arm} reads"
    if of_system := next((path for path in last.written if path.startswith(SETTINGS)), None):
        return f"{of_system[:-1]}, which {arm} wrote"
    for other in runs_of.keys() - {arm}:
        windows_s = [run.window_s for run in runs_of[other]]
        written = tuple({path for run in runs_of[other] for path in run.written})
        for name, (_, changed_ns) in last.elsewhere.items():
            if _is_below(name, written) or _is_within(windows_s, changed_ns):
                return f"{name}, which {arm} reads"
        for name in sorted({name for run in runs_of[other] for name in run.elsewhere}):
            if _is_below(name, last.written):
                return f"{name}, which {other} reads"
        for name in runs_of[other][-1].elsewhere if runs_of[other] else ():
            if name != OTHERS and not work_folder.REDACTED.search(name):
                now = work_folder.state_of(Path(REPO, os.path.expanduser(name)))
                was_there = bool(runs_of[other][-1].elsewhere[name][1])
                if _is_within([last.window_s], now[1]) if now else was_there:
                    return f"{name}, which {other} reads"
    return None


def _is_below(name: str, paths: tuple[str, ...]) -> bool:
    return f"{name}/".startswith(paths)


def _is_within(windows_s: list[tuple[float, float]], time_ns: int) -> bool:
    return any(start_s <= time_ns / 1e9 <= end_s for start_s, end_s in windows_s)


def _runs(race: State, arm: str) -> Iterator[_Files]:
    """Yields the files of each attempt of an arm that has a record, the oldest first."""
    for name in (name for slot in race.slots if slot.arm == arm for name, _ in slot.attempts):
        known = _known.get((race.results, name))
        if known is None and (run := arm_process.record_of(race.results, name)):
            script, start_s = run.get("script") or {}, utc.seconds(run["started_at"]) - surroundings.FILE_TIME_S
            end_s = utc.seconds(run["ended_at"] or run["heartbeat_at"] or run["started_at"])
            written = tuple(os.path.join(path, "") for path in script.get("written") or ())
            files = script.get("data_states") or {}, script.get("elsewhere") or {}
            known = _Files((start_s, end_s), *files, written)
            if run["ended_at"]:
                _known[race.results, name] = known
        if known is not None:
            yield known


_known: dict[tuple[Path, str], _Files] = {}  # of runs that have ended, as a race of many looks at all after each
