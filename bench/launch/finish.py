"""Finishes the record of a run, however its workers ended: status, failure, metrics, validity, artifacts and ledger."""

import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from bench.analysis.diagnosis import stalls as diagnosis_stalls
from bench.analysis.diagnosis.stalls import UNEXPLAINED
from bench.base import atomic, private, text_table, utc
from bench.base.paths import REPO
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.launch import after_race
from bench.launch.progress import EdgePipe
from bench.machine import environment, meters
from bench.machine.meters import RunClock
from bench.record import failures, ledger, outside_clock, run_folder, step_files, validity
from bench.record.metrics import metrics
from bench.record.shape import Record, Section

Run = Section  # run.json, which becomes a shape.Record
GONE = (FileNotFoundError, NotADirectoryError)  # errors of a folder that was removed; a failing disk raises others
MIN_STOOD_S, MAX_STOOD_FRAC = 1.0, 0.1  # limits of unexplained stalls, in s and of train_s (assumed)
MAX_MESSAGE_CHARS = 4000
SPACE_S, LOOK_S = 300.0, 1.0  # how long the record of a complete run waits for space on a full disk

# {kind of a failure that is not the run's fault: status of the run}
ENDED_BY = {"interrupted": "aborted", "node_lost": "aborted", "stopped": "stopped", "preempted": "preempted"}


def finish(
    folder: Path,
    run: Run,
    failure: Section | None,
    clock: RunClock,
    edges: EdgePipe | None = None,
    ended_by: Callable[[], str | None] = lambda: None,
    place: os.stat_result | None = None,
) -> None:
    """Completes and writes the record of a run.

    failure: why the run failed (failures.failure), None if its ranks ended well; clock: started with the run; edges:
    the EdgePipe of one of our own runs; ended_by(): returns the signal that stops the reading of the run's files, or
    None; place: os.lstat() of the folder when it was created, None if unknown.
    """
    lost = gone = removed(folder, place)
    rows, stalls = list[step_files.StepRow](), list[Section]()
    if not gone:
        with contextlib.suppress(OSError):  # a disk without a free inode has this one for run.json
            (folder / run_folder.LAUNCH).unlink(missing_ok=True)
        try:
            rows, stalls = _read(folder, run, failure, clock, edges)
            _keep(folder, run, ended_by)
        except OSError as error:
            lost, rows, stalls = _unfinished(error, "the record could not be finished"), [], []
    if lost:
        _merge(folder, run, {}, lost, clock, None)
    run["metrics"] = metrics(run, rows)
    run["doubts"] += _stood_still(run, stalls)
    run["validity"], run["validity_reasons"] = validity.validity(run)
    _write(folder, run, ended_by, is_there=not gone)
    if not lost:
        run_folder.remove_temporary(folder)


def removed(folder: Path, place: os.stat_result | None) -> Section | None:
    """Returns a failure if the folder is no longer the one that was created, in which case nothing is written there."""
    try:
        status = os.lstat(folder)
    except GONE:
        status = None
    except OSError:
        return None
    if place is None or (status and os.path.samestat(status, place)):
        return None
    is_link = status and stat.S_ISLNK(status.st_mode)
    change = "a link was put in the place of the run's folder" if is_link else "the run's folder was removed or moved"
    return failures.failure("folder_removed", f"{change} while it ran")


def _unfinished(error: OSError, message: str) -> Section:
    """Returns the failure of a run whose last files cannot be written."""
    if isinstance(error, GONE):
        return failures.failure("folder_removed", f"the run's folder was removed or moved while it ran ({error})")
    return failures.failure(failures.kind_of(error), f"{message} ({error})")


def _read(
    folder: Path, run: Run, failure: Section | None, clock: RunClock, edges: EdgePipe | None
) -> tuple[list[step_files.StepRow], list[Section]]:
    """Adds to the record what the ranks left in the folder, which is not changed after that.

    Returns (rows of steps.csv, stalls).  Raises OSError.
    """
    os.stat(folder)  # raises FileNotFoundError if it was removed
    measured = atomic.read_json(folder / run_folder.RESULT, {})
    failure = after_race.spared(measured, failure)
    if failure is None and not measured:
        failure = failures.failure("exception", "the workers ended well but left no result")
    if failure is None and measured.get("stopped_at"):
        failure = failures.failure("stopped", failures.WINDOW_ENDED, step=measured["stopped_at"])
    _merge(folder, run, measured, failure, clock, edges)
    if failure is None and run.get("look"):
        after_race.explain(folder, run)
    rows = step_files.read(folder)
    if failure is None and run.get("segments"):
        run["segments"][-1]["to_step"] = rows[-1]["step"]
    stalls = _diagnose(folder, run, rows)
    for key, found in ("error", run["warnings"]), ("doubt", run["doubts"]):  # may quote what a script printed
        for fact in found:
            fact[key] = private.redact(fact[key], REPO, is_prose=True)
    with contextlib.suppress(OSError):  # on a full disk only run.json has space set aside
        for event in stalls:
            step_files.append_event(folder, event)
        event = {"t_ns": time.perf_counter_ns(), "utc": utc.now(), "event": "run_end", "status": run["status"]}
        step_files.append_event(folder, event)
    with contextlib.suppress(OSError, ValueError):  # instruments of the user's own write events, too
        events = step_files.read_events(folder)
        if (clean := private.redact_all(events, REPO, is_prose=True)) != events:
            step_files.write_events(folder, clean)
    private.redact_logs(folder, REPO)
    atomic.release(folder)
    if failure is None:
        run_folder.remove_checkpoints(folder)
    return rows, stalls


def _keep(folder: Path, run: Run, ended_by: Callable[[], str | None]) -> None:
    """Lists the run's files and those that the record cannot keep.  A signal that stops the reading aborts the run."""
    run["artifacts"], not_kept = run_folder.kept(folder, ended_by)
    for name, why in not_kept.items():
        run["warnings"].append({"rank": None, "instrument": "launcher", "edge": "run end", "error": f"{name}: {why}"})
    if not_kept:
        run["not_kept"] = not_kept
    if run["failure"] is None and (signal_name := ended_by()):
        why = f"the launcher got {signal_name} while it read the run's files for its record"
        run["status"], run["failure"] = "aborted", failures.failure("interrupted", why, signal_name=signal_name)


def _merge(
    folder: Path, run: Run, measured: Run, failure: Section | None, clock: RunClock, edges: EdgePipe | None
) -> None:
    """Adds the results of the workers, and how the run ended, to the record."""
    if failure:
        message = private.redact(failure["message"], REPO, is_prose=True)
        failure["message"] = text_table.middle(message, MAX_MESSAGE_CHARS)
    run["status"] = "complete" if failure is None else ENDED_BY.get(failure["kind"], "failed")
    run["failure"] = failure
    run["ended_at"] = run["heartbeat_at"] = utc.now()
    run["model"] = measured.get("model", run["model"])
    run["environment"] |= measured.get("torch_facts", {})
    own = {"wall_s": clock.lasted_s(), "launcher_peak_mem_gib": meters.peak_rss_gib()}
    if look := measured.pop("look", None):
        own["wall_s"] -= time.monotonic() - look.pop("began_s")
        run["look"] = look
    earlier = (run.get("segments") or [])[:-1]
    own["wall_s"] += sum(segment["wall_s"] for segment in earlier)
    run["measured"] = private.redact_all(measured.get("measured", {}), REPO) | own
    run["instrument_summaries"] = measured.get("instrument_summaries", {})
    run["referee"] = run.get("referee", {}) | private.redact_all(measured.get("referee", {}), REPO)
    if earlier and failure is None:
        _close(run, earlier)
    state = run_folder.newest_checkpoint_state(folder) if failure and failure["kind"] == "preempted" else {}
    by_rank = run["measured"].get("train_s_by_rank")
    if edges and (failure is None or state):
        before_s = sum(segment["train_s"] for segment in earlier)
        clock_s = (by_rank[0] if by_rank else state.get("train_s", before_s)) - before_s
        run["referee"]["clock"] = edges.clock(clock_s)
    if earlier and failure is None:
        run["segments"][-1] |= {"clock": run["referee"].get("clock"), "reason": None}
        run["referee"]["clock"] = outside_clock.joined([part.get("clock") for part in run["segments"]], by_rank[0])
    clock_doubts = [("clock", doubt) for doubt in clock.doubts()]
    if failure is None and "clock" in run["referee"]:
        clock_doubts += outside_clock.doubts(run["referee"]["clock"], validity.is_busy(run))
    of_files = [doubt for doubt in run.get("doubts", ()) if doubt["instrument"] == validity.FILES]
    run["doubts"] = of_files + measured.get("doubts", [])
    run["doubts"] += [{"rank": None, "instrument": name, "doubt": doubt} for name, doubt in clock_doubts]
    run["warnings"] += measured.get("warnings", [])
    run["comparability_id"] = environment.comparability_id(run)


def _close(run: Run, earlier: Sequence[Section]) -> None:
    """Closes the last segment of a complete run, but for its clock."""
    train_s = max(run["measured"]["train_s_by_rank"]) - sum(segment["train_s"] for segment in earlier)
    last = run["segments"][-1] | {"train_s": train_s, "ended_at": run["ended_at"], "status": "complete"}
    last["wall_s"] = run["measured"]["wall_s"] - sum(segment["wall_s"] for segment in earlier)
    last |= {"session_id": run["session_id"], "launched_by": run.get("launched_by")}
    run["segments"] = [*earlier, last]


def _diagnose(folder: Path, run: Run, rows: list[step_files.StepRow]) -> list[Section]:
    """Adds the costs of events to run and returns the events found by this diagnosis; an error becomes a warning."""
    try:
        costs = diagnosis_stalls.event_costs(folder, run, rows)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        run["warnings"].append({"rank": None, "instrument": "costs", "edge": "after the run", "error": why})
        return []
    run["costs"], run["skew"] = costs["costs"], costs["skew"]
    events: list[Section] = costs["events"]
    return events


def _stood_still(run: Run, stalls: Sequence[Section]) -> Iterator[Section]:
    """Yields a doubt if steps took far longer than usual for no known reason.

    It is not a doubt about the machine, which would exclude the run from a race: a program may stall by its own fault.
    A frozen machine is noticed by its launcher, too (bench/record/outside_clock.py).
    """
    unexplained = [event for event in stalls if event.get("what") in UNEXPLAINED]
    stood_s, train_s = sum(event["ms"] for event in unexplained) / 1e3, run["metrics"].get("train_s")
    if run["status"] == "complete" and train_s and stood_s > max(MIN_STOOD_S, MAX_STOOD_FRAC * train_s):
        steps = ", ".join(str(event["step"]) for event in unexplained[:3])
        stall = f"it stood still for {stood_s:.2f} of its {train_s:.2f} s for an unknown reason, at steps {steps}"
        yield {"rank": None, "instrument": "stalls", "doubt": f"{stall} (limit {100 * MAX_STOOD_FRAC:.0f} %)"}


def _write(folder: Path, run: Run, ended_by: Callable[[], str | None] = lambda: None, is_there: bool = True) -> None:
    """Writes run.json, if the folder is there, then the ledger entry.  Errors go to standard error; without its
    run.json a run is failed."""
    results = folder.parent.parent
    try:
        if is_there:
            _persist(lambda: atomic.write_json(folder / "run.json", run), run, ended_by)
    except OSError as error:
        run["status"], run["failure"] = "failed", _unfinished(error, "run.json could not be finished")
        run["validity"], run["validity_reasons"] = "invalid", [validity.NOT_COMPLETE]
        print(f"{folder}: run.json could not be finished ({error.strerror}): it still says running", file=sys.stderr)
    try:
        # if the results folder is gone too, no new ledger is begun
        if is_there or any(ledger.lines_with(results, re.compile(run["ledger_sha256"].encode()))):
            _persist(lambda: ledger.ended(results, folder, cast(Record, run), is_there), run, ended_by)
    except (OSError, Damaged) as error:
        print(f"{results}: the ledger lacks the end of {folder.name} ({error})", file=sys.stderr)


def _persist(write: Callable[[], object], run: Run, ended_by: Callable[[], str | None]) -> None:
    """Calls write(), again if it fails once: a transient disk error must not lose a run.

    The record of a complete run waits for space on a full disk, until a signal: nobody else could vouch for it later.
    """
    until_s = 0.0
    while True:
        try:
            write()
            return
        except OSError as error:
            waits = run["status"] == "complete" and error.errno in plain_file.FULL
            if until_s and not (waits and time.monotonic() < until_s and not ended_by()):
                raise
            if waits and not until_s:
                wait = f"the disk is full, and the record of {run['run_id']} waits for space"
                print(f"{wait}, {SPACE_S / 60:g} minutes at most; Ctrl-C stops waiting", file=sys.stderr)
            time.sleep(LOOK_S if until_s else 0)
            until_s = until_s or time.monotonic() + SPACE_S
