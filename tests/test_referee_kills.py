"""A referee that is killed for real, with kill -9 to all of its process group: the search goes on where it was."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import hacks
import pytest
import real_runs
import scripted

from bench.plans.referee import agent, refereeing
from bench.plans.referee import search as searches
from bench.record import ledger

pytestmark = pytest.mark.slow
BEGIN = "start_s = time.perf_counter()\n"  # of the example's step
CHAMPION, FASTER, SLOWER = (f"script.args=['--seed={{seed}}',{step_s}]" for step_s in (0.02, 0.002, 0.05))


@pytest.fixture
def search(tmp_path, monkeypatch):
    """One whose script sleeps in every step for as long as its arguments say; its calibration is made up."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    source = agent.EXAMPLE.read_text().replace("PASSES = 3", "PASSES = 1").replace("BATCH = 2048", "BATCH = 64")
    assert BEGIN in source
    (tmp_path / "train.py").write_text(source.replace(BEGIN, f"{BEGIN}        time.sleep(float(sys.argv[2]))\n"))
    (tmp_path / "champion").mkdir()
    overrides = [*scripted.TRACK, "goal.target_val_loss=9", CHAMPION]
    facts = {"run_s": 3.0, "check_s": 0.1, "is_audited": False}
    return hacks.search_in(tmp_path / "results", tmp_path / "champion", tmp_path / "train.py", overrides, True, **facts)


def killed(search, has_come, *arguments):
    """Kills the process group of python -m bench referee ARGUMENTS once has_come().  Returns whether it still ran."""
    command = [sys.executable, "-m", "bench", "referee", *arguments]
    env = real_runs.environment(search.results)
    with open(search.folder / "output.txt", "a") as log:
        streams = {"stdout": log, "stderr": log, "start_new_session": True}
        with subprocess.Popen(command, cwd=real_runs.REPO, env=env, **streams) as process:
            while process.poll() is None and not has_come():
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode == -signal.SIGKILL


def moments(search):
    """Each has come from some moment of a search on: while it prepares, races, confirms, and writes an answer."""
    races = search.results / "races"

    def number(of=1):
        """The second, if a kill came after the first one's files were copied and before it was entered."""
        return next(iter(searches.read(search.folder).submissions), 1) + of - 1

    def num_runs(stage, of=1):
        begun = (line["race"]["race_id"] for line in ledger.read(search.results).lines if line["event"] == "start")
        return sum(f"-{number(of)}-{stage}-" in race_id for race_id in begun)

    return {
        "its files are copied": lambda: (search.folder / "submissions" / "1").exists(),
        "its short run is under way": lambda: [*search.folder.glob(f"checks/{number()}/*/*/run.json")],
        "its race is planned": lambda: [*races.glob(f"*-{number()}-race-*/plan.json")],
        "a run of its race is under way": lambda: num_runs("race") > 1,
        "its race has ended": lambda: [*races.glob(f"*-{number()}-race-*/race.json")],
        "its confirmation is under way": lambda: num_runs("confirmation") > 3,
        "its confirmation has ended": lambda: [*races.glob(f"*-{number()}-confirmation-*/race.json")],
        "the race of the second is under way": lambda: num_runs("race", of=2) > 1,
    }


def test_a_referee_that_is_killed_at_any_moment_loses_no_submission_and_counts_none_twice(search):
    num_kills = 0
    for has_come in moments(search).values():
        num_submissions = len(searches.read(search.folder).submissions)
        if num_submissions == 1:  # another process submits while the first one is not decided
            refereeing.submit(searches.read(search.folder), [SLOWER], "", "")
        if not has_come():  # else it came between the last one and the kill
            num_kills += killed(search, has_come, *(["start"] if num_submissions else ["submit", FASTER]))
    done = real_runs.bench(search.results, "referee", "start")
    output = (search.folder / "output.txt").read_text() + done.stdout + done.stderr
    assert done.returncode == 0, output
    search = searches.read(search.folder)
    assert [submission.decided["decision"] for submission in search.submissions.values()] == ["keep", "drop"], output
    assert [confirmation.number for confirmation in search.confirmations] == [min(search.submissions)]
    assert not search.faults
    assert len([*search.results.glob("races/*/plan.json")]) == 3  # each was raced once, and one confirmed
    assert num_kills > 5, output  # on a busy machine a moment may have passed before it is seen
    done = real_runs.bench(search.results, "referee", "replay")
    assert done.returncode == 0 and "2 decisions, 0 faults" in done.stdout, done.stdout + done.stderr
    assert scripted.pids(search.results) == []
