"""A lab's queue: each command taken by one agent, given back by one that ends, and users in turn."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import real_runs
from cases import slow

from bench.cli import agent, submit
from bench.machine.signals import Interrupted
from bench.plans import agent as agents
from bench.plans import queue as queues
from bench.plans import shares
from bench.plans.agent import Agent
from bench.plans.queue import Entry, Queue
from bench.plans.race import plan, planning, runner
from bench.plans.race import state as races
from bench.plans.shares import fair, over_budget
from bench.record import run_folder

SMOKE = ["run", "track=free", "experiment=smoke"]
RACE = ["race", "A=", "B=optim=muon", "n=2", "track=free", "experiment=smoke"]
AGENT = """
import sys
from bench.cli import main
from bench.plans import agent, queue
queue.LEASE_S, agent.BEAT_S, agent.LOOK_EVERY_S = 3.0, 0.3, 0.2
sys.exit(main.main(["agent", *sys.argv[1:]]))
"""
TAKER = """
import sys
from pathlib import Path
from bench.plans import shares
from bench.plans.queue import Queue
queue, seen = Queue(Path(sys.argv[1])), 0
while queue.waiting() or seen < 3:
    seen += not queue.waiting()
    for entry in shares.order(queue):
        if (mine := queue.take(entry)) is not None:
            print(mine.name, flush=True)
            queue.end(mine, 0, "it ended", 0.0, None)
"""


@pytest.fixture
def queue(results):
    """The queue of an empty results folder."""
    return Queue(results / "queue")


@contextlib.contextmanager
def started(results, code, *arguments):
    """A Python process in the repository, killed at the end of the block."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": real_runs.REPO}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=real_runs.environment(results), **how)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process, within_s=300):
    """Returns (exit code, what it printed) of a process that ends by itself."""
    out, _ = process.communicate(timeout=within_s)
    return process.returncode, out


def taken_entry(queue):
    """An entry that an agent has taken."""
    queue.submit(SMOKE, 0)
    return queue.take(queue.waiting()[0])


def entry(number, user, num_gpus=1):
    return Entry(f"2026112{number}T000000Z-{number:08x}", user, num_gpus, ["run"], {})


def outcome(user, num_gpus=1, hours=1.0, usd=None):
    facts = {"id": "x", "user": user, "exit_code": 0, "why": "it ended", "num_gpus": num_gpus}
    return queues.Outcome(**facts, hours=hours, usd=usd, ended_s=time.time())


# ---- whose turn it is


def test_users_take_turns_whoever_submitted_more_and_earlier():
    waiting = [entry(number, user) for number, user in enumerate(["ann", "ann", "ann", "bob", "cy"])]
    users = lambda *known: [turn.user for turn in fair(waiting, *known)]  # noqa: E731
    assert [turn.id for turn in fair(waiting, [], [])] == [turn.id for turn in waiting]  # nobody has had anything
    assert users([entry(9, "ann", num_gpus=8)], []) == ["bob", "cy", "ann", "ann", "ann"]
    assert users([], [outcome("ann"), outcome("bob", num_gpus=8)]) == ["cy", "ann", "ann", "ann", "bob"]
    at_work = [entry(9, "cy", num_gpus=2), entry(8, "bob", num_gpus=0)]  # what needs no GPU counts as one
    assert users(at_work, [outcome("ann", hours=99.0)]) == ["ann", "ann", "ann", "bob", "cy"]


def test_a_budget_in_gpu_hours_or_money_is_used_up(queue):
    recent = [outcome("ann", num_gpus=8, hours=2.0, usd=40.0), outcome("ann", usd=None), outcome("bob", usd=5.0)]
    budgets = shares.Budgets(gpu_hours=18, users={"bob": shares.Limits(usd=5), "cy": shares.Limits(gpu_hours=0)})
    assert over_budget(recent, budgets, "ann") is None  # 17 of 18
    assert over_budget(recent, shares.Budgets(gpu_hours=17), "ann") == "ann has used 17 of 17 gpu_hours in 30 days"
    assert over_budget(recent, budgets, "bob") == "bob has used 5 of 5 usd in 30 days"
    assert over_budget(recent, budgets, "cy") is not None  # none at all
    queue.submit(SMOKE, 0)
    me = queue.waiting()[0].user
    (queue.folder / "budgets.yaml").write_text(f"users: {{{me}: {{usd: 3}}}}\n")
    assert len(shares.order(queue)) == 1
    mine = queue.take(shares.order(queue)[0])
    queue.end(mine, 0, "it ended", 1.0, 3.0)
    queue.submit(SMOKE, 0)
    assert shares.order(queue) == [] and len(queue.waiting()) == 1
    (queue.folder / "budgets.yaml").write_text("usd: lots\n")
    with pytest.raises(ValueError, match="budgets.yaml: usd=lots: use a number of 0 or more, or null"):
        shares.order(queue)


@pytest.mark.parametrize("text", ["users: [ann]", "users: {ann: 5}", "days: .nan", "usd: -1", "days:", "usd: [", "7"])
def test_a_budget_that_makes_no_sense_is_said_once_and_agents_wait(queue, monkeypatch, printed, text):
    queue.submit(SMOKE, 0)
    (queue.folder / "budgets.yaml").write_text(text)
    looks = []

    def looked(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise Interrupted("SIGINT")

    monkeypatch.setattr(agents.time, "sleep", looked)
    bad = queue.folder / "waiting" / "20261127T000000Z-deadbeef.json"
    bad.write_text("{")
    out = printed(agent, code=1)
    assert out.count("budgets.yaml") == out.count(str(bad)) == 1 and len(queue.waiting()) == 1


def test_a_user_without_a_name_has_a_budget(queue):
    queue.check_trust()
    (queue.folder / "budgets.yaml").write_text("users: {1000: {usd: 3}}\n")
    assert over_budget([outcome("1000", usd=4.0)], shares.budgets(queue), "1000") is not None


# ---- what is submitted


def test_what_makes_no_run_is_refused_before_it_is_submitted(queue):
    for arguments, why in [
        (["run", "optim.lr=fast"], "optim.lr=fast"),
        (["race", "A="], "needs two arms"),
        (["rnu"], "did you mean run"),
        (["table"], "choose from run, speedrun, race"),
        (["--gpus", "-1", *SMOKE], "--gpus=-1: use a whole number from 0 to 64"),
        (["--gpus", "1" + 20 * "0", *SMOKE], "use a whole number from 0 to 64"),
        ([*SMOKE, "name=hf_" + "aB3x" * 9], "looks like a credential"),
        (["race", "--resume"], "--resume: the latest race"),
        (["race", "--resume", "--anyway"], "--resume: the latest race"),
        (["--cancel", "x"], "x: no such entry is waiting or running"),
    ]:
        with pytest.raises(ValueError, match=why):
            submit.main(arguments)
    assert queue.waiting() == []


def test_the_list_says_what_runs_waits_and_was_had(queue, answer_of, capsys):
    for _ in range(3):
        assert submit.main(["--gpus", "2", *SMOKE]) == 0
    assert "it waits for an agent on a machine with 2 GPUs: this one has 0" in capsys.readouterr().out
    first, second, _ = queue.waiting()
    queue.end(queue.take(first), 0, "it ended", 0.5, 7.0)
    mine = queue.take(second)
    assert submit.main(["--cancel", queue.waiting()[0].id]) == 0
    os.utime(queue._lease(mine), (0, 0))
    assert [entry["state"] for entry in answer_of(submit, "--list")["entries"]] == ["agent silent"]
    queue.keep(mine)
    for state in ("runs", "being cancelled"):  # until its agent has ended the command
        capsys.readouterr()
        listed = answer_of(submit, "--list")
        assert listed["entries"] == [{"id": second.id, "user": first.user, "gpus": 2, "state": state, "command": SMOKE}]
        used = listed["spent"][first.user]  # the second is at work
        assert used == pytest.approx({"gpu_hours": 1.0, "usd": 7.0, "at_least": True}, abs=1e-3)
        if state == "runs":
            assert submit.main(["--cancel", second.id]) == 0
    assert submit.main(["--list"]) == 0 and "at least 1 " in capsys.readouterr().out


@pytest.mark.parametrize("state", queues.STATES)
def test_a_queue_into_which_anybody_can_write_is_not_worked_on(queue, state):
    queue.submit(SMOKE, 0)
    (queue.folder / state).chmod(0o777)
    with pytest.raises(ValueError, match=f"{state}: everybody can write there: chmod"):
        agent.main(["--once"])


def test_nothing_but_an_entry_is_cancelled_and_one_that_runs_is_ended(results, queue):
    record = results / "free" / "RUN" / "run.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    mine = taken_entry(queue)
    for entry_id in ("../../free/RUN/run", mine.name, f"../taken/{mine.name}"):
        with pytest.raises(ValueError, match="no such entry is waiting or running"):
            submit.main(["--cancel", entry_id])
    assert record.exists() and queue.keep(mine)
    assert submit.main(["--cancel", mine.id]) == 0
    assert not queue.keep(mine)  # at which its agent ends the command
    assert Agent(results, None, ("run",))._end(mine, "it ended") == 1
    assert [(ending["why"], ending["exit_code"]) for ending in queue.outcomes()] == [(f"cancelled by {mine.user}", 1)]
    assert queue.waiting() == queue.taken() == [] and list((queue.folder / "taken").iterdir()) == []


def test_an_entry_that_another_user_has_cancelled_already_can_be_cancelled_again(queue, monkeypatch):
    mine = taken_entry(queue)
    assert submit.main(["--cancel", mine.id]) == 0

    def refused(path, mode=0o666, exist_ok=True):  # as another user's file is
        raise PermissionError(13, "Permission denied", str(path)) if exist_ok else FileExistsError(str(path))

    monkeypatch.setattr("pathlib.Path.touch", refused)
    assert submit.main(["--cancel", mine.id]) == 0 and not queue.keep(mine)


def test_an_entry_that_is_given_back_while_it_is_cancelled_waits_for_no_agent(queue, monkeypatch):
    id, look = queue.submit(SMOKE, 0), Queue.taken
    mine = queue.take(queue.waiting()[0])
    given_back_then = lambda queue: (look(queue), queue.give_back(mine))[0]  # noqa: E731
    monkeypatch.setattr(Queue, "taken", given_back_then)
    queue.cancel(id)
    monkeypatch.undo()
    assert queue.waiting() == queue.taken() == [] and [ending["exit_code"] for ending in queue.outcomes()] == [1]


STATES = ["waits", "lost its agent after its outcome"]
STATES += [slow(state) for state in ("lost its agent", "is given back", "its canceller was killed")]


@pytest.mark.parametrize("state", STATES)
def test_a_race_whose_entry_is_cancelled_is_abandoned_and_never_resumed(results, queue, monkeypatch, state):
    id = queue.submit(RACE, 0)
    (waiting,) = queue.waiting()
    here = Agent(results, None, ("race",))
    folder = planning.begin(plan.parse_request(here._command(waiting)[1:]), results, anyway=True)
    if state == "is given back":
        mine, leave = queue.take(waiting), Queue._leave
        cancelled_first = lambda *known: (submit.main(["--cancel", id]), leave(*known))[1]  # noqa: E731
        monkeypatch.setattr(Queue, "_leave", cancelled_first)
        assert here._end(mine, "it was given back") == 1
    elif state.startswith("lost its agent"):
        mine = queue.take(waiting)
        if state.endswith("after its outcome"):
            with monkeypatch.context() as killed:
                killed.setattr(Queue, "_leave", lambda *known: None)
                queue.end(mine, None, "it was given back", 0.1, None)
        assert submit.main(["--cancel", id]) == 0
        assert not (folder / "race.json").exists()  # its agent's command may still run the race on another host
        monkeypatch.setattr(queues, "LEASE_S", -1.0)
        here._put_back_lost()
    elif state == "its canceller was killed":
        (queue.folder / "cancelled" / id).touch()
        with here._next() as entry:
            assert entry is None
    else:
        assert submit.main(["--cancel", id]) == 0
    endings = [(ending["why"], ending["exit_code"]) for ending in queue.outcomes()]
    assert (f"cancelled by {waiting.user}", 1) in endings
    assert set(endings) <= {(f"cancelled by {waiting.user}", 1), ("it was given back", None)}
    race = json.loads((folder / "race.json").read_text())
    assert (race["status"], race["why"]) == ("abandoned", f"cancelled by {waiting.user}")
    assert queue.waiting() == queue.taken() == races.unfinished(results) == []
    assert list((queue.folder / "taken").iterdir()) == []


def test_a_race_that_had_ended_when_its_entry_was_cancelled_stays_as_it_was(results, queue):
    id = queue.submit(RACE, 0)
    command = Agent(results, None, ("race",))._command(queue.waiting()[0])
    folder = planning.begin(plan.parse_request(command[1:]), results, anyway=True)
    runner.finish(folder, results, "abandoned", "its owner had seen enough")
    assert submit.main(["--cancel", id]) == 0
    assert json.loads((folder / "race.json").read_text())["why"] == "its owner had seen enough"


def test_a_group_reads_what_was_submitted_with_any_umask_and_what_is_no_entry_is_said(queue, capsys):
    queue.check_trust()
    for state in queues.STATES:
        (queue.folder / state).chmod(0o2770)
    before = os.umask(0o077)
    try:
        queue.submit(SMOKE, 0)
        mine = queue.take(queue.waiting()[0])
        queue.opened_log(mine).close()
        queue.end(mine, None, "it was given back", 0.0, None)
    finally:
        os.umask(before)
    modes = {path.parent.name: path.stat().st_mode & 0o777 for path in queue.folder.glob("*/*") if path.is_file()}
    assert modes == {"waiting": 0o640, "ended": 0o640, "logs": 0o660}
    bad = queue.folder / "waiting" / "20261127T000000Z-deadbeef.json"
    bad.write_text(json.dumps({"num_gpus": -1, "command": ["run"], "env": {}}))
    assert [entry.id for entry in shares.order(queue)] == [mine.id]
    assert submit.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert f"{bad}: num_gpus: expected int >= 0" in out, out


# ---- agents


def test_an_entry_of_other_code_waits_and_its_log_says_why(results, queue, monkeypatch, capsys):
    monkeypatch.setattr(queues, "code", lambda: "of another checkout")
    monkeypatch.setattr(queues.secrets, "token_hex", lambda num_bytes: "00000000")  # first of those of its second
    other = queue.submit(["run", "--help"], 0)
    monkeypatch.undo()
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(results))
    own = queue.submit(["run", "--help"], 0)
    assert agent.main(["--once"]) == 0
    assert [ending["id"] for ending in queue.outcomes()] == [own] and [entry.id for entry in queue.waiting()] == [other]
    why = f"{other}: waits, because it was submitted from other code than this agent's"
    assert why in capsys.readouterr().out and queue.log(queue.waiting()[0]).read_text().startswith(why)


@pytest.mark.parametrize("lost_by", ["its lease was removed", "its file was put back", "it was cancelled"])
def test_an_agent_keeps_only_an_entry_that_nobody_has_taken_from_it_or_cancelled(queue, lost_by):
    mine = taken_entry(queue)
    os.utime(queue._lease(mine), (0, 0))
    assert queue.keep(mine) and queue._lease(mine).stat().st_mtime > 0
    if lost_by == "its lease was removed":
        queue._lease(mine).unlink()
    elif lost_by == "its file was put back":
        os.rename(queue._path("taken", mine.name), queue._path("waiting", mine.id))
    else:
        queue.cancel(mine.id)
    assert not queue.keep(mine)


def test_a_folder_that_does_not_answer_for_a_moment_ends_no_command(results, queue, monkeypatch):
    keep, errors = Queue.keep, [OSError(errno.ESTALE, "Stale file handle")] * 2

    def keep_later(self, entry):
        if errors:
            raise errors.pop()
        return keep(self, entry)

    monkeypatch.setattr(Queue, "keep", keep_later)
    for name in ("BEAT_S", "TICK_S", "LOOK_EVERY_S"):
        monkeypatch.setattr(agents, name, 0.01)
    queue.submit(["run", "--help"], 0)
    assert agent.main(["--once"]) == 0 and not errors
    assert [(ending["exit_code"], ending["why"]) for ending in queue.outcomes()] == [(0, "it ended")]


def test_an_entry_that_cannot_be_started_ends_and_the_next_is_run(results, queue):
    for word in ("name=a\0b", "name=\ud800"):
        queue.submit(["run", word], 0)
        assert agent.main(["--once"]) == 2
    assert [ending["exit_code"] for ending in queue.outcomes()] == [2, 2] and queue.waiting() == queue.taken() == []


@pytest.mark.parametrize("make", [lambda log, private: log.symlink_to(private), lambda log, _: os.mkfifo(log)])
def test_a_log_that_is_a_link_or_a_pipe_is_refused_and_nothing_is_written_through_it(results, queue, tmp_path, make):
    private = tmp_path / "private"
    private.write_text("mine")
    id = queue.submit(["run", "--help"], 0)
    make(queue.folder / "logs" / f"{id}.log", private)
    assert agent.main(["--once"]) == 2
    assert [ending["exit_code"] for ending in queue.outcomes()] == [2] and private.read_text() == "mine"


def test_an_entry_that_this_user_may_not_take_is_said_and_the_next_is_run(results, queue, monkeypatch, capsys):
    first, second = sorted(queue.submit(["run", "--help"], 0) for _ in range(2))
    rename = os.rename

    def sticky(source, target):
        if source.stem == first:
            raise PermissionError(1, "Operation not permitted", str(source))
        rename(source, target)

    monkeypatch.setattr(queues.os, "rename", sticky)
    assert agent.main(["--once"]) == 0
    assert [ending["id"] for ending in queue.outcomes()] == [second] and list((queue.folder / "taken").iterdir()) == []
    assert f"{first}: cannot be taken" in capsys.readouterr().out


@pytest.mark.parametrize("refused, exit_code", [((Queue, "opened_log"), 1), ((queues, "_write"), 0)])
def test_on_a_full_disk_an_entry_waits_again(results, queue, monkeypatch, refused, exit_code):
    queue.submit(SMOKE, 0)
    monkeypatch.setattr(agents, "LOOK_EVERY_S", 0.0)

    def full(*args):
        raise OSError(28, "No space left on device", str(queue.folder))

    monkeypatch.setattr(*refused, full)
    assert agent.main(["--once"]) == exit_code
    assert len(queue.waiting()) == 1 and queue.outcomes() == queue.taken() == []


def test_a_race_that_was_killed_before_its_ledger_line_goes_on_and_a_damaged_one_ends(results, queue, monkeypatch):
    queue.submit([*RACE, "--anyway"], 0)
    (waiting,) = queue.waiting()
    worker = Agent(results, None, ("race",))
    arguments = [argument for argument in worker._command(waiting)[1:] if argument != "--anyway"]
    with monkeypatch.context() as killed:
        killed.setattr(planning.ledger, "append", lambda *args, **facts: sys.exit("killed"))
        with pytest.raises(SystemExit):
            planning.begin(plan.parse_request(arguments), results, anyway=True)
    race = agents.race_of(queue, waiting)
    with races.locked(race):  # an agent that only slept has it
        assert not worker._may_begin(waiting)
    assert worker._may_begin(waiting) and worker._command(waiting)[:3] == ["race", "--resume", race.name]
    (race / "plan.json").write_text("{")
    assert worker.go(once=True) == 2
    assert [ending["exit_code"] for ending in queue.outcomes()] == [2] and queue.waiting() == []


def test_a_race_that_a_busy_machine_refuses_waits_and_is_not_tried_again_at_once(results, queue, monkeypatch):
    queue.submit(["run", "--help"], 0)
    worker = Agent(results, None, ("run",))
    (waiting,) = queue.waiting()
    refusal = "import sys; from bench.cli import main, run; from bench.machine import leases\n"
    refusal += "def busy(words): raise leases.Busy('GPU 0: process 1 has it')\n"
    refusal += "run.main = busy; sys.exit(main.main(['run']))"
    program = results / "refuses"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{refusal}"\n')
    program.chmod(0o700)
    with monkeypatch.context() as busy:
        busy.setattr(agents.sys, "executable", str(program))
        assert worker.go(once=True) == 1
    assert [(ending["why"], ending["exit_code"]) for ending in queue.outcomes()] == [("the machine was busy", None)]
    assert [entry.id for entry in queue.waiting()] == [waiting.id]
    assert not worker._may_begin(waiting) and Agent(results, None, ("run",))._may_begin(waiting)
    now_s = time.monotonic()
    monkeypatch.setattr(agents.time, "monotonic", lambda: now_s + agents.BUSY_WAITS_S)
    assert worker._may_begin(waiting)


def test_nothing_costs_is_no_price_of_a_run_and_what_is_no_number_is_refused(results, queue):
    for price in ("nan", "inf", "-1"):
        with pytest.raises(ValueError, match="use a number of 0 or more"):
            agent.main(["--usd-per-hour", price])
    queue.submit(["run", "--help"], 0)
    assert Agent(results, 0.0, ("run",))._command(queue.waiting()[0]) == ["run", "--help"]
    assert agent.main(["--once", "--usd-per-hour", "0"]) == 0
    assert [ending["usd"] for ending in queue.outcomes()] == [0.0]


@pytest.mark.parametrize("at", ["the end of its command", "its outcome"])
def test_an_entry_that_has_ended_is_not_given_back_when_a_signal_comes(queue, monkeypatch, at):
    queue.submit(["run", "--help"], 0)
    interrupt = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    if at == "its outcome":
        end = Queue.end
        monkeypatch.setattr(Queue, "end", lambda self, *known: (interrupt(), end(self, *known)))
    else:
        monkeypatch.setattr(Agent, "_watch", lambda self, entry, child, signals: (child.wait(), interrupt()))
    assert agent.main([]) == 1
    assert [ending["exit_code"] for ending in queue.outcomes()] == [0] and queue.waiting() == queue.taken() == []


def test_a_lease_is_lost_by_the_time_that_another_agent_watched_and_not_by_a_pause_of_both(queue, monkeypatch):
    mine = taken_entry(queue)
    os.utime(queue._lease(mine), (0, 0))
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(queues, "time", SimpleNamespace(monotonic=lambda: now.s))
    for step_s in (0, 50, 50, 1e6, 50, 50):
        now.s += step_s
        assert queue.put_back_lost() == []
    now.s += 50
    assert [entry.name for entry in queue.put_back_lost()] == [mine.name]


# ---- agents, as processes


def test_of_five_agents_no_two_take_one_entry(results, queue):
    ids = {queue.submit(SMOKE, 0) for _ in range(60)}
    with contextlib.ExitStack() as stack:
        takers = [stack.enter_context(started(results, TAKER, str(queue.folder))) for _ in range(5)]
        names = [name for taker in takers for name in ended(taker)[1].split()]
    assert Counter(name.partition("@")[0] for name in names) == Counter(ids)
    assert queue.waiting() == queue.taken() == [] and len(queue.outcomes()) == 60


@pytest.mark.slow
def test_an_agent_that_is_killed_loses_its_entry_to_the_next_and_its_run_ends(results, queue):
    queue.submit([*SMOKE, "goal.num_steps=100000", "goal.val_every_steps=100000"], 0)
    with started(results, AGENT, "--usd-per-hour", "36") as first:
        real_runs.wait_for(lambda: any("eval_stop" in path.read_text() for path in results.glob("*/*/events.jsonl")))
        assert len(queue.taken()) == 1
        first.kill()
    (folder,) = real_runs.folders(results)
    real_runs.wait_for(lambda: run_folder.read(folder)["status"] == "aborted")
    (lost,) = queue.taken()
    with started(results, AGENT) as second:
        real_runs.wait_for(lambda: [entry for entry in queue.taken() if entry.token != lost.token])
        (outcome,) = queue.outcomes()
        assert (outcome["id"], outcome["exit_code"], outcome["why"]) == (lost.id, None, "its agent was lost")
        assert outcome["usd"] == pytest.approx(36 * outcome["hours"]) and outcome["hours"] > 0 and outcome["at_least"]
        assert not queue.keep(lost)  # should it still live, it learns so
        second.send_signal(signal.SIGINT)
        assert ended(second)[0] == 1
    assert [entry.id for entry in queue.waiting()] == [lost.id] and queue.taken() == []


def test_an_entry_whose_agents_are_lost_again_and_again_ends(queue, monkeypatch):
    monkeypatch.setattr(queues, "LEASE_S", -1.0)
    queue.submit(SMOKE, 2)
    slow, lost_entries = Queue(queue.folder), []  # in the middle of what it does another agent does the same
    slow.outcomes = lambda: (lost_entries.extend(queue.put_back_lost()), queue.outcomes())[1]
    for num_lost in range(1, queues.MAX_LOST + 1):
        mine = queue.take(queue.waiting()[0], usd_per_hour=5.0)
        began_s = json.loads(queue._lease(mine).read_text())["began_s"]
        os.utime(queue._lease(mine), (0, began_s + 1800))  # its last sign of life
        before = shares.spent(shares.recent(queue), mine.user)  # nobody has found it lost yet
        lost_entries += slow.put_back_lost()
        assert len(lost_entries) == num_lost
        assert shares.spent(shares.recent(queue), mine.user) == pytest.approx(before)
    assert queue.waiting() == queue.taken() == []
    assert [ending["exit_code"] for ending in queue.outcomes()].count(1) == 1
    assert before == pytest.approx({"gpu_hours": 3 * 2 * 0.5, "usd": 3 * 2.5})
    (queue.folder / "budgets.yaml").write_text("usd: 7\n")
    why = over_budget(shares.recent(queue), shares.budgets(queue), mine.user)
    assert why == f"{mine.user} has used at least 7.5 of 7 usd in 30 days"


@pytest.mark.slow
def test_a_race_that_is_given_back_goes_on_as_one_race_at_its_price(results, queue):
    assert submit.main([*RACE, "name=mine", "--anyway"]) == 0
    with started(results, AGENT, "--usd-per-hour", "36") as first:
        real_runs.wait_for(lambda: len(real_runs.folders(results)) > 1)
        first.send_signal(signal.SIGINT)
        code, out = ended(first)
        assert code == 1 and "it was given back" in out, out
    (waiting,) = queue.waiting()
    as_submitted = (queue.folder / "waiting" / f"{waiting.id}.json").read_text()
    (race,) = (results / "races").iterdir()
    assert race.name.rpartition("-")[0].endswith(f"-mine{waiting.short}")
    with started(results, AGENT, "--once", "--usd-per-hour", "36") as second:
        code, out = ended(second)
    assert code == 0 and f"race --resume {race.name}" in out, out + queue.log(waiting).read_text()
    assert [path.name for path in (results / "races").iterdir()] == [race.name]
    assert json.loads((race / "race.json").read_text())["status"] == "complete"
    runs = [real_runs.run_json(folder) for folder in real_runs.folders(results)]
    assert {run["hardware"]["price_usd_per_hour"] for run in runs} == {36.0}
    assert [ending["exit_code"] for ending in queue.outcomes()].count(0) == 1
    assert all(ending["usd"] == pytest.approx(36 * ending["hours"]) for ending in queue.outcomes())
    # as an agent leaves it that is stopped while its race ends
    (queue.folder / "waiting" / f"{waiting.id}.json").write_text(as_submitted)
    elsewhere = Agent(results, None, ("race",))
    elsewhere._session_id = "another"  # has nothing to run either, and only shows the answer
    assert elsewhere._may_begin(waiting) and elsewhere._command(waiting)[1:3] == ["--resume", race.name]
    assert agent.main(["--once"]) == 0 and len(real_runs.folders(results)) == len(runs)
    assert [path.name for path in (results / "races").iterdir()] == [race.name]
    assert "no runs are left" in queue.log(waiting).read_text()


@pytest.mark.slow
def test_a_race_that_is_cancelled_while_it_runs_ends_within_seconds_as_abandoned(results, queue):
    assert submit.main([*RACE, "n=9", "--anyway"]) == 0
    with started(results, AGENT) as working:
        real_runs.wait_for(lambda: len(real_runs.folders(results)) > 1)
        (mine,) = queue.taken()
        assert submit.main(["--cancel", mine.id]) == 0
        (outcome,) = real_runs.wait_for(queue.outcomes, timeout_s=30)
        working.send_signal(signal.SIGINT)
        ended(working)
    assert (outcome["why"], outcome["exit_code"]) == (f"cancelled by {mine.user}", 1)
    (folder,) = (results / "races").iterdir()
    race = json.loads((folder / "race.json").read_text())
    assert (race["status"], race["why"], race["result"]) == ("abandoned", f"cancelled by {mine.user}", None)
    assert real_runs.run_json(real_runs.folders(results)[-1])["status"] == "aborted"
    again = real_runs.bench(results, "race", "--resume", folder.name)
    assert again.returncode == 1 and "no runs are left" in again.stdout + again.stderr


@pytest.mark.slow
def test_a_race_of_another_session_waits_for_its_machine_then_begins_again(results, queue, monkeypatch):
    """The first agent's race, as another machine sees it."""
    queue.submit([*RACE, "--anyway"], 0)
    (waiting,) = queue.waiting()
    worker = Agent(results, None, ("race",))
    command = worker._command(waiting)
    assert command[-1] == f"name=race{waiting.short}"
    folder = planning.begin(
        plan.parse_request([argument for argument in command[1:] if argument != "--anyway"]), results, anyway=True
    )
    assert agents.race_of(queue, waiting) == folder and worker._may_begin(waiting)
    assert worker._command(waiting) == ["race", "--resume", folder.name, *waiting.command[1:]]
    elsewhere = Agent(results, None, ("race",))
    elsewhere._session_id = "another"
    assert not elsewhere._may_begin(waiting)
    monkeypatch.setattr(Queue, "idle_s", lambda self, entry: 3601.0)
    assert elsewhere._may_begin(waiting)
    assert elsewhere._command(waiting) == command
    assert races.unfinished(results) == [] and agents.race_of(queue, waiting) is None  # the first was abandoned
