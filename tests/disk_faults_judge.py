"""Checks what a command leaves after a failed file operation or a killed process (disk_faults.py).

judged(shop, scenario, outcome, is_kill)  -> outcome, with a sentence in .wrong for everything that is lost or false
"""

import contextlib
import hashlib
import os
import re
import signal
import time
import unittest.mock

import real_runs
from disk_faults_scenarios import ABANDONED, IMPORT, IMPORT_LOG, LIMIT_S, OF_A_RACE, RESUMED

from bench.base import atomic
from bench.record import failures, ledger, run_folder, verification

GONE_S = 90.0
SAID_COMPLETE = re.compile(r"^\s+run  complete:", re.M)
FROM_OUTSIDE = ("launcher_killed", "agent_killed", "rank_killed", "interrupted")  # kinds of failure after a SIGKILL
NOT_BY_A_FAULT = ("bad_setting", "bad_data", "not_causal", "out_of_memory", "interrupted")


def judged(shop, scenario, outcome, is_kill):
    results = shop.project / "results"
    outcome.wrong += _of_the_command(shop, outcome, is_kill)
    before = _records(results, outcome.wrong)
    outcome.num_records = len(before)
    outcome.wrong += _of_records(before, shop.statuses_before, outcome, scenario, is_kill)
    outcome.wrong += [
        f"ledger: {fault}" for fault in ledger.read(results).faults if "the last, is damaged" not in fault
    ]
    outcome.wrong += _of_the_next(shop, scenario, results, before)
    return outcome


def _of_the_command(shop, outcome, is_kill):
    if outcome.code == -signal.SIGABRT:
        yield f"not back after {LIMIT_S:.0f} s"
    elif outcome.code not in ((0, 1, 2, -9) if is_kill else (0, 1, 2)):
        yield f"exit code {outcome.code}"
    if "Traceback (most recent call last)" in outcome.out:
        yield f"a traceback: {outcome.out[-600:]}"
    until_s = time.monotonic() + GONE_S
    while (alive := shop.alive()) and time.monotonic() < until_s:
        time.sleep(0.1)
    if alive:
        yield f"still alive after {GONE_S:.0f} s: {', '.join(map(shop.command_of, alive))}"
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _of_the_next(shop, scenario, results, before):
    """Checks that the user's next command works, changes no complete record, and repairs the ledger."""
    files = {folder: _hashes(folder) for folder, run in before.items() if run["status"] == "complete"}
    again = _next_words(shop, scenario, results)
    with unittest.mock.patch.object(atomic, "STALE_S", 0.5):  # no process is left that could hold the lock
        ledger.append(results, "opened")  # as the next run would, also where there is no ledger yet
    done = shop.command(shop.project, again)
    if done.returncode != (1 if again == ABANDONED else 0):
        yield f"then {' '.join(again[:3])}: exit code {done.returncode}: {done.stdout[-600:]}"
    unreadable = []
    after = _records(results, unreadable)
    yield from unreadable
    yield from (f"ledger afterwards: {fault}" for fault in ledger.read(results).faults)
    for folder, known in files.items():  # new pages are allowed
        now = _hashes(folder) if folder in after else {}
        if changed := [path.name for path, sha256 in known.items() if now.get(path) != sha256]:
            yield f"{folder.name}: was complete, and the next command changed {', '.join(changed)}"
    if again == RESUMED and not list(results.glob("races/*/race.json")):
        yield "the race was resumed to its end and left no race.json"
    table = shop.command(shop.project, ("table", str(results)))
    if table.returncode or "excluded" in table.stdout or "Traceback" in table.stdout:
        yield f"then table: exit code {table.returncode}: {table.stdout[-400:]}"


def _next_words(shop, scenario, results):
    """Returns the next command: an open race is resumed or abandoned; only every fourth fault is followed by a run."""
    shop.num_judged += 1
    again = scenario.quick if scenario.quick and shop.num_judged % 4 else scenario.again
    if scenario.name not in OF_A_RACE:
        return again
    plans = list(results.glob("races/*/plan.json"))
    is_open = plans and not any("race_end" in line["event"] for line in ledger.read(results).lines)
    return again if is_open else IMPORT_LOG


def _records(results, wrong):
    """Returns {folder: record as it is shown}, and appends records that cannot be read to wrong."""
    records = {}
    for folder in real_runs.folders(results) + real_runs.folders(results / "published" / "mine"):
        try:
            records[folder] = run_folder.read(folder)
        except ValueError as error:
            wrong.append(f"unreadable: {error}")
    return records


def _of_records(records, statuses_before, outcome, scenario, is_kill):
    """Checks that statuses are honest, and that runs reported as complete are complete."""
    run_names = {line.get("run") for line in ledger.read(next(iter(records)).parents[1]).lines} if records else set()
    for folder, run in records.items():
        name = f"{folder.name} ({run['status']})"
        if run.get("provenance") == "imported":
            continue
        if f"{folder.parent.name}/{folder.name}" not in run_names:
            yield f"{name}: the ledger does not know it"
        if run["status"] == "running":
            yield f"{name}: is shown as running, and nothing is alive"
        elif run["status"] == "complete":
            failed = [rule for rule in verification.report(folder)["rules"] if not rule["passed"]]
            yield from (f"{name}: {rule['rule']}: {rule['evidence']}" for rule in failed)
        elif folder.name not in statuses_before:
            yield from _of_a_failure(folder, run, name, is_kill)
    num_complete = sum(run["status"] == "complete" and run.get("provenance") != "imported" for run in records.values())
    reported = len(SAID_COMPLETE.findall(outcome.out)) if scenario.num_runs else 0
    is_promised = scenario.num_runs and outcome.code == 0 and scenario.name not in OF_A_RACE
    promised = (scenario.num_runs if is_promised else reported) + sum(
        status == "complete" for status in statuses_before.values()
    )
    if num_complete < promised:
        yield f"{promised} runs were reported as complete, {num_complete} are: a result was lost"
    if scenario is IMPORT and outcome.code == 0 and len(records) != 2:
        yield "import said that it wrote a record, which is not there"


def _of_a_failure(folder, run, name, is_kill):
    failure = run["failure"]
    if failure is None or failure["kind"] not in failures.HINTS or run["validity"] != "invalid":
        yield f"{name}: does not say what happened: {failure}"
    elif failure["kind"] in FROM_OUTSIDE and not is_kill:
        yield f"{name}: {failure['kind']}, and nobody killed anything: {failure['message']}"
    elif failure["kind"] in NOT_BY_A_FAULT:
        yield f"{name}: {failure['kind']} is not what happened: {failure['message']}"
    written = real_runs.run_json(folder)
    if written["status"] == "running":
        return  # no process was left to finish it
    pages = {"report.html"}  # written when a race ends
    if [artifact for artifact in run_folder.listed(folder) if artifact["path"] not in pages] != written["artifacts"]:
        yield f"{name}: its files are not those that it lists"
    if remaining := [path.name for path in folder.iterdir() if path.name.startswith(".")]:
        yield f"{name}: temporary files stayed: {remaining}"


def _hashes(folder):
    paths = [folder / "run.json", *(folder / name for name in run_folder.files(folder))]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
