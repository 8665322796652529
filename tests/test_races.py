"""A race: planned, interleaved, hidden, resumed, ended in a verdict.  Arms cost no time but in the last tests."""

import argparse
import contextlib
import errno
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import stat
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace

import claimed
import pytest
import real_runs
from claimed import results  # noqa: F401  a fixture

from bench.base import utc
from bench.base.paths import REPO
from bench.base.reading import plain_file
from bench.cli import compare, race
from bench.cli.main import main as bench
from bench.compare import calibration, comparison, effects, selection
from bench.launch import ready
from bench.machine import code_state, leases, preflight, processes
from bench.machine.preflight import Check
from bench.machine.signals import Interrupted
from bench.plans import locks
from bench.plans.race import arm_process, plan, planning, runner, spoiled, state
from bench.record import ledger, race_folder, run_folder
from bench.training.open_watch import OTHERS

NOISE = 0.002  # sd of log run time, of one machine in one session; public logs have 0.0008


def noisy(seed, **change_pct):
    """Returns time_of(arm, seed): 10 s with noise, in an arm of change_pct so many per cent more."""
    chance = random.Random(seed)
    return lambda arm, _: 10.0 * (1 + change_pct.get(arm, 0) / 100) * (1 + chance.gauss(0, NOISE))


@pytest.fixture
def go(results, monkeypatch):
    """go(*ARGUMENTS) races arms that cost no time, by ./run.sh race ARGUMENTS --anyway -> (exit code, Racers)."""

    def run(*arguments, time_of=None, **options):
        arms = claimed.Racers(results, time_of or noisy(1), **options)
        arms.install(monkeypatch)
        return race.main([*arguments, "--anyway"]), arms

    return run


def race_json(results):
    (path,) = (results.folder / "races").glob("*/race.json")
    return json.loads(path.read_text())


def test_a_planted_slowdown_of_5_pct_is_found_and_its_region_named(results, go, capsys):
    slow = {"data_ms": 0.25 / 1.05, "forward_ms": 0.25 / 1.05, "backward_ms": 0.25 / 1.05, "optimizer_ms": 0.30 / 1.05}
    code, _ = go(
        "A=", "B=optim.beta2=0.99", "n=5", time_of=noisy(2, B=5), shares_of=lambda arm: slow if arm == "B" else None
    )
    compared = race_json(results)["result"]["against"]["B"]
    assert (code, compared["verdict"]) == (0, "slower")
    assert compared["time"]["change_pct"] == pytest.approx(5, abs=0.5)
    *lines, place = capsys.readouterr().out.splitlines()
    (cause,) = [line for line in lines if line.startswith("why: ")]
    assert re.match("why: optimizer makes [0-9]+ % of the change of a step", cause)
    assert f"./run.sh compare {place.split('/')[-1]} --why shows where the time went" in lines
    (verdict,) = [line for line in lines if line.startswith("verdict: ")]
    assert verdict.startswith("verdict: SLOWER  B is ")
    assert "the largest part of the change is in optimizer" in next(results.folder.glob("races/*/race.md")).read_text()
    assert {"kind": "config", "what": "optim.beta2", "a": [0.95], "b": [0.99]} in compared["differences"]


def test_the_plan_is_in_the_ledger_before_the_first_run_and_every_run_after_it(results, go):
    go("A=", "B=", "n=2")
    lines = ledger.read(results.folder).lines
    assert [line["event"] for line in lines] == ["plan", *["start", "end"] * 6, "race_end"]
    (path,) = (results.folder / "races").glob("*/plan.json")
    race_plan = json.loads(path.read_text())
    assert lines[0]["plan_sha256"] == plan.sha256(race_plan)
    started = [line["race"]["arm"] for line in lines if line["event"] == "start"]
    assert started == [place["arm"] for place in race_plan["order"]]
    assert ledger.read(results.folder).faults == []


def test_a_warm_up_run_is_kept_and_counts_nowhere(results, go):
    """Its time would be seen: it took ten times as long."""
    first = set()
    code, _ = go(
        "A=", "B=", "n=2", time_of=lambda arm, seed: 10 + 0.01 * seed if arm in first else first.add(arm) or 100.0
    )
    outcome = race_json(results)
    assert [len(outcome["arms"][arm]["warm_up_runs"]) for arm in "AB"] == [1, 1]
    assert max(outcome["result"]["against"]["B"]["time"]["mean_s"]) < 11


def test_what_is_measured_stays_hidden_until_the_race_has_ended(results, go, capsys):
    go("A=", "B=", "n=2", hurt={4: "interrupt"})
    out = capsys.readouterr().out
    assert "run 4 of 6 complete" in out
    assert not re.search(r"train_s|val_loss|step_avg|10\.\d|: [AB]\b", out.split("stay hidden until the race ends")[1])
    assert not list((results.folder / "races").glob("*/race.json"))


def test_a_race_whose_run_could_not_start_says_how_it_goes_on(results, go, monkeypatch):
    monkeypatch.setattr(claimed.Racers, "start", lambda *args: "no record can be written there")
    with pytest.raises(ValueError, match="not start; ./run.sh race --resume .* continues:\nno record can be written"):
        go("A=", "B=optim.beta2=0.99", "n=2")


def test_the_code_of_a_race_that_is_removed_between_two_runs_is_a_sentence_and_put_back(results, go, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(results.folder.parent / "cache"))
    start, removed = claimed.Racers.start, []

    def removes(self, folder, *args):
        removed.append(folder)
        if len(removed) == 2:
            shutil.rmtree(folder, ignore_errors=True)
        assert (folder / "bench").is_dir() or len(removed) == 2
        return start(self, folder, *args)

    monkeypatch.setattr(claimed.Racers, "start", removes)
    with pytest.raises(ValueError, match="its code is gone: ./run.sh race --resume .* puts it back"):
        go("A=", "B=optim.beta2=0.99", "n=2")
    assert race.main(["--resume"]) == 0 and race_json(results)["status"] == "complete"


def test_an_older_copy_of_the_results_put_back_during_a_race_is_a_sentence(results, go, monkeypatch):
    start, kept = claimed.Racers.start, {}

    def restored(*args):
        tail, book = start(*args), results.folder / ledger.NAME
        kept.setdefault("old", book.read_bytes())  # with the first run of the race
        if len(ledger.read(results.folder).lines) == 9:
            book.write_bytes(kept["old"])
        return tail

    monkeypatch.setattr(claimed.Racers, "start", restored)
    with pytest.raises(ValueError, match="it no longer has 2 runs of this race, as an older copy put back would"):
        go("A=", "B=optim.beta2=0.99", "n=2")


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_an_interrupted_race_goes_on_with_the_same_plan_and_a_full_ledger(results, go, capsys, how):
    code, arms = go("A=", "B=", "n=2", hurt={3: how})
    assert code == 1
    (path,) = (results.folder / "races").glob("*/plan.json")
    before = path.read_bytes()
    assert f"./run.sh race --resume {path.parent.name}" in capsys.readouterr().out
    assert race.main(["--resume"]) == 0
    assert path.read_bytes() == before
    outcome = race_json(results)
    assert [len(outcome["arms"][arm]["runs"]) for arm in "AB"] == [2, 2]
    assert sum(len(outcome["arms"][arm]["interrupted_runs"]) for arm in "AB") == 1
    starts = [line["race"] for line in ledger.read(results.folder).lines if line["event"] == "start"]
    assert [start["position"] for start in starts] == [0, 1, 2, 3, 3, 4, 5]
    assert [start["attempt"] for start in starts] == [1, 1, 1, 1, 2, 1, 1]
    assert arms.num_started == 7
    with pytest.raises(ValueError, match="there is no unfinished race"):
        race.main(["--resume"])


def test_private_paths_of_a_race_stay_on_this_machine_until_it_ends(results, go, monkeypatch, tmp_path):
    """Not the user's name in another folder either, /scratch/NAME: what is typed is kept apart for --resume."""
    home, scratch = tmp_path / "home" / "janedoe", tmp_path / "scratch" / "janedoe"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(spoiled, "by", lambda *args: None)  # as of data that exist
    arms = {"A": f"data.train_glob={home}/a.bin", "B": f"data.train_glob={scratch}/b.bin"}
    words = ["data=shards", "data.vocab_size=257", f"data.val_glob={home}/v.bin"]
    assert go(*(f"{name}={word}" for name, word in arms.items()), *words, "n=2", hurt={3: "kill"})[0] == 1
    (folder,) = (results.folder / "races").iterdir()
    began = state.read(folder, results.folder)
    assert [arm["overrides"][-1] for arm in began.arms.values()] == [*arms.values()]
    assert stat.S_IMODE((folder / race_folder.LOCAL).stat().st_mode) == 0o600
    assert race.main(["--resume"]) == 0
    assert not (folder / race_folder.LOCAL).exists()
    outcome = race_json(results)  # these runs' own config.yaml, which it compares, has the paths
    assert "janedoe" not in json.dumps([outcome["plan"], outcome["arms"]]) + (folder / "plan.json").read_text()
    assert f"data.train_glob={tmp_path}/scratch/USER/b.bin" in (folder / "race.md").read_text()


def test_arms_that_were_changed_beside_the_plan_are_not_raced(results, go, monkeypatch):
    """A cheat: another path that reads the same without names."""
    monkeypatch.setenv("HOME", "/home/janedoe")
    monkeypatch.setattr(spoiled, "by", lambda *args: None)  # as of data that exist
    go("A=", "B=data.train_glob=/scratch/janedoe/b.bin", "data=shards", "n=2", hurt={3: "kill"})
    (folder,) = (results.folder / "races").iterdir()
    local = folder / race_folder.LOCAL
    local.write_text(local.read_text().replace("/scratch/janedoe/", "/scratch/USER/"))
    with pytest.raises(ValueError, match="was changed while the race was running, and it alone has the arms' paths"):
        race.main(["--resume"])
    local.write_text('{"A": 3}')
    with pytest.raises(ValueError, match="was changed while the race was running"):
        race.main(["--resume"])
    local.unlink()
    with pytest.raises(ValueError, match="is gone, or cannot be read, and it alone has the arms' paths"):
        race.main(["--resume"])


def test_an_interrupt_hides_neither_a_change_of_the_installed_python_nor_a_failed_warm_up(results, go, monkeypatch):
    """A cheat: what ends a race is done by a run that interrupts it at its end."""
    go("A=", "B=", "n=2", hurt={3: "kill"})
    with monkeypatch.context() as patch:
        patch.setattr("bench.machine.surroundings._state_of_code", lambda folder: (1, 1))
        with pytest.raises(ValueError, match="the installed Python code changed since it was planned"):
            race.main(["--resume"])
    assert race.main(["--resume"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(spoiled, "by", lambda *args: (_ for _ in ()).throw(Interrupted("SIGHUP")))
        go("A=", "B=", "n=2", hurt={0: "fail"})
    assert race.main(["--resume"]) == 1
    outcomes = [json.loads(path.read_text()) for path in sorted((results.folder / "races").glob("*/race.json"))]
    assert [outcome["status"] for outcome in outcomes] == ["complete", "abandoned"]
    assert "the warm-up of" in outcomes[1]["why"]


def test_a_slot_that_has_its_run_is_filled_by_no_other(results, go):
    """A cheat: ./run.sh run --race TAG in an interrupted race, until the run of a slot pleases."""
    _, arms = go("A=", "B=", "n=2", hurt={4: "kill"})
    (folder,) = (results.folder / "races").iterdir()
    slot = state.read(folder, results.folder).slots[3]
    tag = {"race_id": folder.name, "arm": slot.arm, "position": 3, "discarded": False, "attempt": 2}
    arms.start(None, [f"seed={slot.seed}"], results.folder, tag)
    with pytest.raises(ValueError, match="run 4 is .*, complete, and the ledger has .* in its place"):
        race.main(["--resume"])


def test_a_folder_in_place_of_race_json_is_a_sentence_and_the_race_ends_without_it(results, go, capsys):
    go("A=", "B=", "n=2", hurt={3: "interrupt"})
    (folder,) = (results.folder / "races").glob("*")
    (folder / "race.json").mkdir()
    assert bench(["race", "--resume"]) == 2
    assert f"race: {folder}/race.json: Is a directory" in capsys.readouterr().err
    (folder / "race.json").rmdir()
    assert bench(["race", "--resume"]) == 0 and race_json(results)["status"] == "complete"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SystemExit("killed")])
def test_a_plan_that_the_ledger_did_not_get_leaves_nothing_or_is_entered_before_its_first_run(
    results, go, monkeypatch, error
):
    def fails(*args, **facts):
        raise error

    with monkeypatch.context() as patched, pytest.raises((ValueError, SystemExit)):
        patched.setattr("bench.plans.race.planning.ledger.append", fails)
        go("A=", "B=", "n=2")
    folders = list((results.folder / "races").glob("*"))
    if isinstance(error, OSError):
        assert folders == []
        return
    assert race.main(["--resume"]) == 0
    events = [line["event"] for line in ledger.read(results.folder).lines]
    assert (events[0], events.count("plan"), events[-1]) == ("plan", 1, "race_end")


def test_a_race_is_not_resumed_with_other_code_in_another_session_or_with_a_changed_plan(results, go, monkeypatch):
    _, arms = go("A=", "B=optim=muon", "n=2", hurt={1: "interrupt"})
    facts = arms.facts
    for change, message in (
        ({"source_sha256": "42" * 32}, "source_sha256"),
        ({"config_id": "12345678"}, "config_id"),
        ({"session_id": "0" * 16}, "another session"),
    ):
        monkeypatch.setattr(arm_process, "facts", lambda *args, change=change: facts(*args) | change)
        with pytest.raises(ValueError, match=message):
            race.main(["--resume"])
    monkeypatch.setattr(arm_process, "facts", facts)
    (path,) = (results.folder / "races").glob("*/plan.json")
    race_plan = json.loads(path.read_text())
    path.write_text(json.dumps(race_plan | {"alpha": 0.2}))
    with pytest.raises(ValueError, match="not the plan in the ledger"):
        race.main(["--resume"])


def test_a_race_ends_once_the_folder_of_one_of_its_runs_is_gone(results, go, monkeypatch):
    add, numbers = results.add, iter(range(9))

    def add_and_remove(*args, **facts):
        folder = add(*args, **facts)
        if next(numbers) == 4:
            shutil.rmtree(min(path for path in folder.parent.iterdir() if path != folder))
        return folder

    monkeypatch.setattr(results, "add", add_and_remove)
    code, arms = go("A=", "B=optim.beta2=0.99", "n=3")
    outcome = race_json(results)
    assert (code, arms.num_started, outcome["status"]) == (1, 5, "abandoned")
    assert re.match("the folder of cpu_nano/.* was removed while the race was running: begin a new", outcome["why"])


def test_arms_that_end_at_their_target_validate_at_the_same_steps(results, real_facts, monkeypatch):
    """Else the coarser grid ends later, which looks slower."""
    words = ["track=free", "hardware=cpu", "goal=target", "goal.num_steps=60", "goal.val_tokens=1024"]
    arms = ["A=goal.val_every_steps=20", "B=goal.val_every_steps=16"]
    with pytest.raises(
        ValueError, match="the arms validate every 20 steps in A, every 16 steps in B: give all the same"
    ):
        planning.planned(plan.parse_request([*arms, *words, "goal.target_val_loss=3.7"]), results.folder)
    facts = {"A": {"row": {"stop_at_target": False}}, "B": {"row": {}}}
    plan.refuse_unequal_ends(facts)


def test_a_failed_run_holds_its_place_and_is_not_repeated(results, go):
    code, arms = go("A=", "B=", "n=3", hurt={4: "fail"})
    outcome = race_json(results)
    assert (code, arms.num_started, outcome["status"]) == (0, 8, "complete")
    assert [len(outcome["arms"][arm]["runs"]) for arm in "AB"] == [3, 3]
    assert sorted(outcome["result"]["against"]["B"]["time"]["n"]) == [2, 3]
    assert "runs-without-a-time" in outcome["result"]["against"]["B"]["flags"]


def test_an_arm_whose_warm_up_fails_ends_the_race_and_it_says_why_it_has_no_verdict(results, go, capsys):
    code, arms = go("A=", "B=", "n=3", hurt={0: "fail"})
    outcome = race_json(results)
    assert (code, arms.num_started, outcome["status"], outcome["result"]) == (1, 1, "abandoned", None)
    assert "the warm-up of" in outcome["why"] and "no verdict" in capsys.readouterr().out
    for arguments in ([outcome["race_id"]], [f"{outcome['race_id']}:A", f"{outcome['race_id']}:B"]):
        with pytest.raises(ValueError, match="no verdict: the warm-up of .*; try: "):
            compare.main(arguments)


def test_a_run_that_verify_refuses_ends_the_race_without_a_verdict(results, go, monkeypatch):
    """Its record says another loss than its steps; nothing is lost, and no number of it is shown."""
    add, numbers = results.add, iter(range(9))

    def false(*args, **facts):
        folder = add(*args, **facts)
        if next(numbers) == 3:
            run = json.loads((folder / "run.json").read_text())
            run["metrics"]["val_loss"] -= 0.01
            (folder / "run.json").write_text(json.dumps(run))
        return folder

    monkeypatch.setattr(results, "add", false)
    code, arms = go("A=", "B=optim.beta2=0.99", "n=3")
    outcome = race_json(results)
    assert (code, arms.num_started, outcome["status"], outcome["result"]) == (1, 4, "abandoned", None)
    assert "fails ./run.sh verify, so no verdict can include it: metrics follow from the facts: " in outcome["why"]


def test_data_that_an_arm_reads_and_that_change_meanwhile_end_the_race_without_a_verdict(results, go, monkeypatch):
    """A cheat: one arm's script overwrites the data beside the other's, which no identity covers."""
    add, numbers = results.add, iter(range(9))

    def reading(*args, **facts):
        changed_ns = next(numbers) if args[5]["arm"] == "A" else 0
        states = {"work/data.bin": [5, changed_ns]}
        return add(*args, **facts | {"change": lambda run: run.update(script={"data_states": states})})

    monkeypatch.setattr(results, "add", reading)
    monkeypatch.setattr(spoiled.verification, "report", lambda folder: {"rules": ()})
    code, arms = go("A=", "B=optim.beta2=0.99", "n=3")
    outcome = race_json(results)
    assert (code, outcome["status"], outcome["result"]) == (1, "abandoned", None)
    what = "work/data.bin, which A reads, changed while the race was running (chmod and hard links count too)"
    assert outcome["why"].startswith(f"{what}: begin a new race")


def test_data_elsewhere_that_an_arm_itself_replaces_in_each_run_ends_no_race(results, go, monkeypatch):
    """As of a checkpoint, or a cache that is written anew."""
    add, numbers = results.add, itertools.count()

    def replacing(*args, **facts):
        script = {"data_states": {}, "written": []}
        if args[5]["arm"] == "A":
            script = {"data_states": {"~/m.bin": [5, next(numbers)]}, "written": ["~/m.bin"]}
        return add(*args, **facts | {"change": lambda run: run.update(script=script)})

    monkeypatch.setattr(results, "add", replacing)
    monkeypatch.setattr(spoiled.verification, "report", lambda folder: {"rules": ()})
    code, _ = go("A=", "B=optim.beta2=0.99", "n=2")
    assert (code, race_json(results)["why"]) == (0, None)


READ = "/scratch/USER/a.txt"  # a file outside of the scripts' folders
FILES = {  # {what happens: (states of A's first run, of its others, whether the race ends); a, b: when each began}
    "no run of B changed it": (lambda a, b: {READ: [5, a + 50]},) * 2 + (False,),
    "its own first run made it": (lambda a, b: {}, lambda a, b: {READ: [5, a + 1]}, False),
    "a run of B made it": (lambda a, b: {}, lambda a, b: {READ: [5, b + 1]}, True),
    "a run of B filled it": (lambda a, b: {READ: [0, 5]}, lambda a, b: {READ: [5, b + 1]}, True),
    "its own runs write it again": (lambda a, b: {READ: [0, 5]}, lambda a, b: {READ: [0, a + 1]}, False),
    "a run of B made it, and it is empty": (lambda a, b: {}, lambda a, b: {READ: [0, b + 1]}, True),
    "the first run of B moved its folder": (lambda a, b: {}, lambda a, b: {READ: [5, 7]}, True),
    "a run of B moved its folder": (lambda a, b: {READ: [5, 7]},) * 2 + (True,),
    "a run of B removed it": (lambda a, b: {"/scratch/a.txt": [5, 7]},) * 2 + (True,),
    "missing throughout": (lambda a, b: {"/scratch/a.txt": [0, 0]},) * 2 + (False,),
    "missing, as the first run of B moved its folder": (lambda a, b: {READ: [0, 0]},) * 2 + (True,),
    "another file, which is older, has its name": (lambda a, b: {READ: [5, 7]}, lambda a, b: {READ: [5, 8]}, True),
    "its own first run changed it unseen": (lambda a, b: {READ: [5, 7]}, lambda a, b: {READ: [5, a + 1]}, False),
    "many, of which a run of B changed one": (lambda a, b: {OTHERS: [9, 7]}, lambda a, b: {OTHERS: [9, b + 1]}, True),
    "many, and fewer later": (lambda a, b: {OTHERS: [9, 7]}, lambda a, b: {OTHERS: [8, 6]}, False),
    "a run of B changed /proc/sys/vm/swappiness": (lambda a, b: {},) * 2 + (True,),  # for all programs
    "a run of B changed /etc/environment": (lambda a, b: {},) * 2 + (True,),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_elsewhere_that_another_arm_changes_ends_the_race(results, go, monkeypatch, what):
    """A cheat: a run of one arm makes, rewrites or removes a file that the other arm reads."""
    add, began_s = results.add, {}
    first, other, is_fault = FILES[what]
    setting = (re.findall("/(?:proc|etc)/.*", what) or [""])[0]

    def reading(*args, **facts):
        arm = args[5]["arm"]

        def change(run):
            is_first = arm not in began_s
            states = first if is_first else other
            began_s.setdefault(arm, utc.seconds(run["started_at"]))
            found = states(began_s["A"], began_s.get("B", 0)) if arm == "A" else {}
            states_of = {name: [size, round(changed_s * 1e9)] for name, (size, changed_s) in found.items()}
            moves = arm == "B" and what.endswith("moved its folder") and (is_first or "first" not in what)
            written = ["/scratch/USER"] if moves else [setting] if setting and arm == "B" else []
            run["script"] = {"elsewhere": states_of, "written": ["/scratch/USER/b.txt", *written]}

        return add(*args, **facts | {"change": change})

    monkeypatch.setattr(spoiled.work_folder, "state_of", lambda path: None if "B" in began_s else [5, 7 * 10**9])
    monkeypatch.setattr(results, "add", reading)
    monkeypatch.setattr(spoiled.verification, "report", lambda folder: {"rules": ()})
    code, _ = go("A=", "B=optim.beta2=0.99", "n=2")
    others = {"a run of B removed it": "/scratch/a.txt", "many, of which a run of B changed one": OTHERS}
    name = others.get(what, READ)
    read = f"{setting}, which B wrote" if setting else f"{name}, which A reads"
    why = f"{read}, changed while the race was running (chmod and hard links count too): begin a new race"
    assert (code, (race_json(results)["why"] or "").startswith(why)) == ((1, True) if is_fault else (0, False))


@pytest.mark.parametrize(
    ("free_gib", "script"), [(1.0, "script={}/train.py"), (1.0, "script.root={}"), (1e-9, "script={}/train.py")]
)
def test_what_an_arms_last_run_read_is_read_again_before_its_next(tmp_path, monkeypatch, free_gib, script):
    """A cheat: an arm that drops the other's data from memory, without a write."""
    beside, elsewhere = tmp_path / "data.bin", tmp_path / "elsewhere" / "more.bin"
    elsewhere.parent.mkdir()
    for path in (beside, elsewhere):
        path.write_bytes(b"x" * 9)
    read, opened = [], plain_file.opened
    monkeypatch.setattr(plain_file, "opened", lambda path: read.append(path) or opened(path))
    monkeypatch.setattr(spoiled.environment, "meminfo_gib", lambda name: free_gib)
    files = spoiled._Files(
        (0.0, 1.0), {"work/data.bin": [9, 1]}, {str(elsewhere): [9, 1], f"{tmp_path}/gone": [0, 1]}, ()
    )
    monkeypatch.setattr(spoiled, "_runs", lambda race, arm: iter([files]))
    race = SimpleNamespace(arms={"A": {"overrides": ["optim=null", script.format(tmp_path)]}})
    spoiled.read_again(race, "A")
    assert read == ([beside, elsewhere, tmp_path / "gone"] if free_gib == 1.0 else [])


def test_each_run_of_a_race_begins_with_what_its_arm_read(results, go, monkeypatch):
    read = []
    monkeypatch.setattr(spoiled, "read_again", lambda race, arm: read.append(arm))
    go("A=", "B=optim.beta2=0.99", "n=2")
    assert sorted(read) == ["A"] * 3 + ["B"] * 3  # with a warm-up each


def test_failures_that_leave_fewer_than_two_times_end_the_race(results, go):
    code, arms = go("A=", "B=", "n=3", hurt=dict.fromkeys(range(2, 8), "fail"))
    assert (code, race_json(results)["status"]) == (1, "abandoned")
    assert arms.num_started < 8


def test_a_look_that_decides_ends_the_race_early_as_planned(results, go):
    code, arms = go("A=", "B=", "n=8", "looks=4", time_of=noisy(3, B=5))
    outcome = race_json(results)
    assert (code, outcome["status"], arms.num_started) == (0, "stopped_early", 10)
    assert [(look["started"], look["planned"]) for look in outcome["looks"]] == [({"A": 4, "B": 4}, True)]
    against = outcome["result"]["against"]["B"]
    assert (against["verdict"], against["time"]["alpha"], outcome["unplanned_look"]) == ("slower", 0.025, False)


def test_a_look_that_does_not_decide_shows_nothing(results, go, capsys):
    chance = random.Random(5)
    go("A=", "B=", "n=3", "looks=2", time_of=lambda arm, seed: 10 * (1 + chance.gauss(0, 0.05)))
    assert "after 2 runs per arm: not yet, the race continues" in capsys.readouterr().out
    assert race_json(results)["status"] == "complete"


def test_a_race_whose_job_slurm_requeues_goes_on_with_itself(results, go, monkeypatch, capsys):
    def in_job(run):
        run["launched_by"] = {"by": "slurm", "job_id": "7", "num_restarts": 0}

    add = results.add
    monkeypatch.setattr(results, "add", lambda *args, **facts: add(*args, **facts | {"change": in_job}))
    arguments = ("A=", "B=", "n=2")
    assert go(*arguments, hurt={3: "interrupt"})[0] == 1
    damaged = results.folder / "races" / "00000000T000000Z-damaged" / "plan.json"  # of another race, and read first
    damaged.parent.mkdir()
    damaged.write_text("{")
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, arms = go(*arguments)
    out, err = capsys.readouterr()
    assert code == 0 and "job requeued: " in out
    assert err.count("race: excluded: ") == 1 and str(damaged) in err
    assert arms.num_started == 3  # not six: those before stand
    assert race_json(results)["status"] == "complete"
    assert race._requeued(results.folder) is None  # it has ended


def test_looking_is_written_down_and_an_unplanned_look_spoils_the_verdict(results, go, answer_of, capsys):
    go("A=", "B=", "n=3", hurt={5: "interrupt"})
    assert race.main(["--look"]) == 0
    captured = capsys.readouterr()
    assert (
        "NOT planned: from now on the race's verdict is not evidence" in captured.err
        and "not-at-a-planned-look" in captured.out
    )
    race.main(["--resume"])
    outcome = race_json(results)
    assert outcome["unplanned_look"] and [look["planned"] for look in outcome["looks"]] == [False]
    assert "Interim looks that were not planned: 1. The verdict is not evidence." in capsys.readouterr().out
    assert "unplanned-look" in answer_of(compare, outcome["race_id"])["flags"]


def test_a_look_at_nothing_is_none(results, go):
    go("A=", "B=", "n=3", hurt={1: "interrupt"})
    with pytest.raises(ValueError, match="nothing to compare yet"):
        race.main(["--look"])
    race.main(["--resume"])
    assert not race_json(results)["unplanned_look"]


def test_a_race_of_unknown_length_ends_with_the_first_round_that_decides(results, go, capsys):
    code, arms = go("A=", "B=optim.beta2=0.99", "n=auto:3-12", time_of=noisy(2, B=-20))
    outcome, out = race_json(results), capsys.readouterr().out
    num = len(outcome["arms"]["B"]["runs"])
    assert (code, outcome["status"]) == (0, "stopped_early") and 3 <= num < 12
    assert outcome["result"]["against"]["B"]["verdict"] == "faster"
    assert "3 to 12 runs per arm after a warm-up: the race ends after the first round that decides" in out
    assert "plan  8 to 26 runs," in out and out.count("    look") == 1 and "--anyway" not in out
    assert [look["planned"] for look in outcome["looks"]] == [True] * (num - 2)
    assert "looks at 3, and after every round" in out
    assert arms.num_started == 2 * num + 2


def test_fail_on_makes_the_exit_code_of_a_race_its_answer(results, go, capsys):
    slow, arguments = {"time_of": noisy(2, B=5)}, ("A=", "B=optim.beta2=0.99", "n=5")
    assert go(*arguments, "--fail-on", "slower:1%", **slow)[0] == 1
    assert "--fail-on slower fails: a slowdown of B by more than 1 % is shown" in capsys.readouterr().err
    assert go(*arguments, "--fail-on", "slower:9%", "--fail-on", "faster,equivalent", **slow)[0] == 0
    started = len(ledger.read(results.folder).lines)
    with pytest.raises(ValueError, match="--fail-on sloow: use slower:0.5%"):
        go(*arguments, "--fail-on", "sloow")
    assert len(ledger.read(results.folder).lines) == started


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--n", "5"], "--n: settings are key=value, not flags: write n=VALUE"),
        (["reps=5"], "reps=5: write n=5 for a number of runs"),
        (["N=5"], "N=5: write n=5 for a number of runs"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(results, real_facts, arguments, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        race.main(["A=", "B=model=modern", *arguments])


def test_a_race_whose_runs_were_all_disturbed_says_to_run_it_again_on_a_quiet_machine(results, go, monkeypatch, capsys):
    def disturbed(run):
        run["validity"], run["validity_reasons"] = "suspect", ["other programs used 2.0 of 2 cores"]
        run["doubts"] = [{"rank": 0, "instrument": "host", "doubt": run["validity_reasons"][0]}]

    add = results.add
    monkeypatch.setattr(results, "add", lambda *args, **facts: add(*args, **facts, change=disturbed))
    chance = random.Random(5)
    go("A=", "B=optim.beta2=0.99", "n=4", time_of=lambda arm, seed: chance.uniform(8, 16))
    (verdict,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("verdict: ")]
    assert verdict.endswith("disturbed runs cannot tell: repeat on a quiet machine")
    for options, expected in ((("--fail-on", "slower:1%", "--fail-if", "shown"), os.EX_TEMPFAIL), ((), 0)):
        chance = random.Random(5)
        values = ["A=", f"B=optim.beta2={0.9 + 0.01 * len(options)}", "n=4", *options]
        assert go(*values, time_of=lambda arm, seed, chance=chance: chance.uniform(8, 16))[0] == expected


def test_a_race_of_unknown_length_that_nothing_decides_takes_all_its_rounds(results, go):
    go("A=", "B=optim.beta2=0.99", "n=auto:2-4", time_of=lambda arm, seed: 10 + seed % 3)
    outcome = race_json(results)
    assert (outcome["status"], len(outcome["arms"]["B"]["runs"])) == ("complete", 4)


def test_each_compilation_has_caches_of_its_own_that_its_runs_share_until_the_race_ends(results, monkeypatch):
    """A cheat: runs that were told apart only in the plan would share what the machine had compiled before."""
    variables = []

    def run_to_end(folder, command, env, *args, **options):
        variables.append((json.loads(command[1]), {name: env.get(name) for name in race_folder.COMPILED}))
        return racers.start(folder, command[2:], results.folder, json.loads(command[1]))

    racers, start = claimed.Racers(results, noisy(1)), arm_process.start
    racers.install(monkeypatch)
    monkeypatch.setattr(arm_process, "start", start)
    monkeypatch.setattr(arm_process, "run_to_end", run_to_end)
    race.main(["A=", "B=optim.beta2=0.99", "n=4", "compilations=2", "--anyway"])
    groups = {}
    for tag, caches in variables:
        groups.setdefault((tag["arm"], tag["discarded"], tag["compilation"]), set()).add(tuple(caches.values()))
    assert {key: len(caches) for key, caches in groups.items()} == {
        (arm, *group): 1 for arm in "AB" for group in ((True, 0), (False, 0), (False, 1))
    }
    assert len(set.union(*groups.values())) == 6  # none is another's, a warm-up's neither
    folder = next(results.folder.glob("races/*"))
    assert all(path.startswith(str(folder)) for caches in groups.values() for folders in caches for path in folders)
    assert not arm_process.caches(folder).exists()
    run = run_folder.read_raw(results.folder / race_json(results)["arms"]["B"]["runs"][-1])
    assert run["race"]["compilation"] == 1
    assert [slot["compilation"] for slot in race_json(results)["order"]] == [0] * 6 + [1] * 4


def test_the_runs_of_a_race_that_has_not_ended_are_compared_by_looking_only(results, go):
    go("A=", "B=optim.lr=0.001", "n=2", hurt={4: "interrupt"})
    configs = sorted({path.parent.name.split("-")[-3] for path in results.folder.glob("cpu_nano/*/run.json")})
    globs = [str(results.folder / "cpu_nano" / f"*-{config}-*") for config in configs]
    (open_race,) = (results.folder / "races").iterdir()
    with pytest.raises(ValueError, match="it has not ended: race --resume .*, or --look"):
        compare.main([open_race.name])
    with pytest.raises(ValueError, match="holds runs of the race .*, which has not ended: ./run.sh race --look"):
        compare.main(globs)
    race.main(["--resume"])
    assert compare.main(globs) == 0


def test_a_race_that_runs_is_not_resumed_and_no_second_one_is_begun(results, go):
    go("A=", "B=", "n=2", "name=first", hurt={3: "interrupt"})
    (first,) = state.unfinished(results.folder)
    with state.locked(first), pytest.raises(leases.Busy, match="is running at this moment"):
        go("A=", "B=", "n=2", "name=second")
    with state.locked(first), pytest.raises(leases.Busy, match=f"process {os.getpid()} runs this race"):
        race.main(["--resume", first.name])
    assert race.main(["--resume", first.name]) == 0


def test_a_race_is_known_to_run_where_the_file_system_has_no_flock(tmp_path, monkeypatch):
    monkeypatch.setattr(locks.fcntl, "flock", lambda *_: os.close(-1))  # an OSError
    monkeypatch.setattr(locks, "BEAT_S", 0.05)
    lock, elsewhere = tmp_path / state.LOCK, {"pid": 7, "start_ticks": 1, "boot_id_hash": "of another machine"}
    with state.locked(tmp_path):
        os.utime(lock, (0, 0))
        assert state.is_running(tmp_path)  # its process is looked for, however old its sign of life
        real_runs.wait_for(lambda: lock.stat().st_mtime > 0)  # whatever this process does meanwhile
        with pytest.raises(leases.Busy, match=f"process {os.getpid()} runs this race"), state.locked(tmp_path):
            pass
    assert not state.is_running(tmp_path)
    lock.write_text(json.dumps(processes.identity(os.getpid()) | {"start_ticks": 1}))  # it was killed
    assert not state.is_running(tmp_path)
    lock.write_text(json.dumps(elsewhere))
    with pytest.raises(leases.Busy, match=r"another machine.*sign of life is \d+ s old"), state.locked(tmp_path):
        pass
    os.utime(lock, (0, 0))
    assert not state.is_running(tmp_path)


def test_a_lock_that_is_a_link_or_a_pipe_changes_no_other_file_and_keeps_nobody_waiting(tmp_path):
    lock, victim = tmp_path / state.LOCK, tmp_path / "victim"
    victim.write_text("precious")
    lock.symlink_to(victim)
    with pytest.raises(OSError, match="is a link, which is not written through"), state.locked(tmp_path):
        pass
    assert victim.read_text() == "precious"
    lock.unlink()
    os.mkfifo(lock)
    assert not state.is_running(tmp_path)
    with pytest.raises(OSError, match="No such device or address"), state.locked(tmp_path):
        pass


ELSEWHERE = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from bench.machine import processes
from bench.plans import locks
from bench.plans.race import state
processes.boot_id_hash = lambda: "of another machine"
locks.fcntl.flock, locks.BEAT_S = lambda *_: os.close(-1), 0.05
with state.locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()  # works on something else
"""


@pytest.mark.slow
def test_a_holder_on_another_machine_that_was_suspended_loses_its_lock_and_takes_none_back(tmp_path, monkeypatch):
    monkeypatch.setattr(locks.fcntl, "flock", lambda *_: os.close(-1))
    monkeypatch.setattr(locks, "STALE_S", 1.0)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": real_runs.REPO}
    with subprocess.Popen([sys.executable, "-c", ELSEWHERE, str(tmp_path)], **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        time.sleep(2 * locks.STALE_S)
        assert state.is_running(tmp_path)
        holder.send_signal(signal.SIGSTOP)
        real_runs.wait_for(lambda: not state.is_running(tmp_path))
        with state.locked(tmp_path):
            holder.send_signal(signal.SIGCONT)
            holder.communicate("")
            assert holder.returncode == 0 and state.is_running(tmp_path)


def test_the_lock_of_a_race_is_released_on_a_full_disk(small_disk):
    (small_disk / state.LOCK).touch()
    real_runs.fill(small_disk / "other_program.bin")
    with state.locked(small_disk):
        assert state.is_running(small_disk)


def test_an_arm_that_profiles_is_refused_before_anything_runs(capsys):
    assert arm_process.print_facts(["track=cpu_nano", "profile=window"]) == 2
    assert "instruments.window: it disturbs the times of steps: race without it" in capsys.readouterr().err


# ---- what is known before the first run


@pytest.fixture(scope="module")
def code():
    return code_state.state()


@pytest.fixture
def real_facts(results, monkeypatch, capsys, code):
    """Arms that know what a run's code knows before it, in this process; their runs cost no time."""

    def facts(folder, overrides, results):
        assert arm_process.print_facts(overrides) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    claimed.Racers(results, noisy(1)).install(monkeypatch)
    monkeypatch.setattr(arm_process, "facts", facts)
    monkeypatch.setattr(code_state, "state", lambda *args: code)
    monkeypatch.setattr(ready, "checks", lambda *args: [])
    monkeypatch.setattr(preflight, "sample_foreign_cores", lambda seconds: None)  # which waits a second an arm
    monkeypatch.setenv("SPEEDRUN_DATA", os.environ.get("SPEEDRUN_DATA", str(REPO / ".data")))


def test_commits_of_the_harness_that_train_alike_are_not_mistaken_for_those_of_the_users_repository():
    arms = {name: {"config_id": "x", "source_sha256": "y", "commit": name} for name in "AB"}
    with pytest.raises(planning.Identical, match="without script=FILE, revisions are the harness's own"):
        planning.refuse_identical(arms)


def test_arms_of_other_code_are_not_identical_though_only_timeouts_differ():
    arms = {"A": {"overrides": [], "config_id": "x", "source_sha256": "1"}}
    for source in "21":
        arms["B"] = {"overrides": ["hardware.wall_timeout_s=9"], "config_id": "y", "source_sha256": source}
        with contextlib.nullcontext() if source == "2" else pytest.raises(planning.Identical, match="only by noise"):
            planning.refuse_identical(arms)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["A=", "B="], "A and B have the same config .* ./run.sh calibrate measures it"),
        (["A=optim=muon", "B=", "C=optim=adamw"], "B and C have the same config"),
        (["A=", "B=track.repeats=2"], "; track.repeats=2: the default anyway, or changes no training"),
        (["A=", "B=hardware.wall_timeout_s=3000"], "; hardware.wall_timeout_s=3000: .* changes no training"),
        (["A=", "B=instruments=[regions]"], "times of A and B could not be compared: instruments differ: .* in B"),
        (["A=", "B=hardware.num_processes=2"], "world size differs: 1 in A, 2 in B"),
        (["A=", "B=goal.num_steps=30"], "A takes 20 steps and B 30, and they have no shared target loss"),
        (["A=", "B=data.batch_tokens=2048"], "A takes 1,?024 tokens per step and B 2,?048, and they have no shared"),
        (["A=", "B=data=markov"], "training data differ"),
        # questions that the arms cannot answer
        (["A=", "B=optim=muon", "on=time_to_target"], "A has no target loss: give goal.target_val_loss=LOSS"),
        (["A=", "B=optim=muon", "on=speed"], "it must be one of time, loss, time_to_target, steps_to_target"),
        (
            ["A=", "B=optim=muon", "on=loss", "goal.target_val_loss=3.5", "goal.stop_at_target=true"],
            "on=loss: runs of A end at their target, whatever they could reach: give goal.stop_at_target=false",
        ),
        (
            ["A=", "B=goal.num_steps=30", "on=loss", "goal.target_val_loss=3.5"],
            r"on=loss: .* steps \(20, 30\), and losses",
        ),
    ],
)
def test_what_could_not_be_compared_is_refused_before_the_first_run(results, real_facts, arguments, why):
    anyway = "" if arguments[-1].startswith(("on=", "goal.")) and len(arguments) > 2 else ".*--anyway"
    with pytest.raises(ValueError, match=why + anyway):
        race.main([*arguments, "track=free", "goal.num_steps=20", "hardware=cpu"])
    assert ledger.read(results.folder).lines == []


def test_arms_of_the_same_code_meet_every_condition_of_a_job_and_nothing_is_raced(results, real_facts, capsys):
    assert race.main(["A=", "B=", "--fail-on", "slower:1%", "track=free", "goal.num_steps=20", "hardware=cpu"]) == 0
    assert "differ only by noise: nothing was raced, and no condition of --fail-on holds" in capsys.readouterr().out
    assert ledger.read(results.folder).lines == []


@pytest.mark.parametrize(
    ("arguments", "anyway"),
    [
        (["B=optim=muon"], False),
        (
            ["B=goal.num_steps=30", "goal.target_val_loss=3.5", "goal.stop_at_target=true"],
            False,
        ),  # two ways to a target
        (["B=goal.num_steps=30", "goal.target_val_loss=3.5"], False),  # whether both reach it is known afterwards
        (["B=instruments=[regions]"], True),
    ],
)
def test_what_may_be_compared_and_what_is_wanted_anyway_is_planned(results, real_facts, arguments, anyway):
    request = plan.parse_request(["A=", *arguments, "track=free", "goal.num_steps=20", "hardware=cpu"])
    assert (planning.begin(request, results.folder, anyway) / "plan.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "on", "why"),
    [
        (["B=optim=muon"], "loss", "the arms differ in optim"),
        (["B=model.num_layers=2 data.seq_len=64"], "loss", "the arms differ in model and data"),
        (["B=optim=muon", "on=time"], "time", None),
        (
            ["B=optim=muon", "goal.target_val_loss=3.5", "goal.stop_at_target=true"],
            "time_to_target",
            "the arms differ in optim, and every run ends at the target",
        ),
        (
            ["B=goal.num_steps=30", "goal.target_val_loss=3.5"],
            "time_to_target",
            "the arms take different numbers of steps (20, 30)",
        ),
        (["B=goal.num_steps=30", "goal.target_val_loss=3.5", "on=steps_to_target"], "steps_to_target", None),
        (["B=hardware.dtype=bfloat16"], "time", "no setting that differs changes losses"),
        (["B=model.activation_checkpointing=true"], "time", "no setting that differs changes losses"),
        (["B=goal.val_every_steps=10"], "time", "no setting that differs changes losses"),
    ],
)
def test_what_a_race_asks_follows_from_its_arms_or_is_chosen(results, real_facts, arguments, on, why):
    request = plan.parse_request(["A=", *arguments, "track=free", "hardware=cpu", "goal.num_steps=20"])
    race_plan = json.loads((planning.begin(request, results.folder) / "plan.json").read_text())
    assert (race_plan["on"], race_plan["why_on"]) == (on, why)


def test_a_track_that_judges_steps_asks_for_steps_and_another_code_for_time():
    facts = {name: {"source_sha256": name, "changes_losses": {"optim": 1}} for name in "AB"}
    assert plan.question_of(facts, "steps") == ("steps_to_target", "the track judges steps")
    assert plan.question_of(facts, "time") == ("time", "the arms differ in code")
    facts["B"].pop("changes_losses")  # an older revision does not know it
    assert plan.question_of(facts, "time") == ("time", "the arms differ in code")


def test_an_arm_of_a_commit_is_shown_with_its_subject(results, real_facts, tmp_path, capsys):
    real_runs.git(tmp_path, "init", "-q")
    real_runs.git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Average the weights")
    commit = real_runs.git(tmp_path, "rev-parse", "HEAD").strip()
    planned, _ = planning.planned(plan.parse_request(["A=", "B=goal.num_steps=100"]), results.folder)
    planned["arms"]["B"]["overrides"] = [f"script.root={tmp_path}", f"script.rev={commit}"]
    runner.introduce(planned, results.folder)
    out = capsys.readouterr().out
    assert f"script.rev={commit[:12]} ({commit[:7]} Average the weights), config" in out and commit not in out


def test_a_race_says_what_it_asks_why_and_what_a_claim_would_need(results, real_facts, capsys):
    folder = planning.begin(plan.parse_request(["A=", "B=optim=muon"]), results.folder)
    runner.introduce(state.read(folder, results.folder).plan, results.folder)
    out = capsys.readouterr().out
    assert "compares loss, at equal steps, because the arms differ in optim; on=time compares time instead" in out
    assert "judge would refuse a claim: the race compares loss, and track cpu_nano judges time (on=time)" in out
    assert "earlier race" not in out
    runner.introduce(state.read(folder, results.folder).plan | {"race_id": "later"}, results.folder)
    assert "B: alpha is 0.025, since 1 earlier race of these arms left 50 % of it" in capsys.readouterr().out
    design = state.read(folder, results.folder).plan | {"race_id": "later"}
    runner.introduce(design | {"arms": dict(zip("AB", [*design["arms"].values()][::-1]))}, results.folder)
    assert "B: alpha is 0.025, since 1 earlier race of these arms left 50 % of it" in capsys.readouterr().out
    race.main(["--abandon"])  # before its candidate ran
    capsys.readouterr()
    runner.introduce(state.read(folder, results.folder).plan | {"race_id": "later"}, results.folder)
    assert "earlier race" not in capsys.readouterr().out
    planned, _ = planning.planned(plan.parse_request(["A=", "B=goal.num_steps=100"]), results.folder)
    planned["arms"]["A"]["rev"] = "HEAD"
    planned["arms"]["B"] |= {"overrides": [], "dirty": True}
    runner.introduce(planned, results.folder)
    out = capsys.readouterr().out
    assert "judge would refuse a claim: B is in the open division\n" in out
    assert "track  B is in the open division: goal.num_steps: 100 instead of 120\n" in out
    assert "B: this checkout, with uncommitted changes, config" in out and "A: the default at HEAD" in out


def test_a_race_that_was_collected_is_not_resumed_here(results, go, monkeypatch):
    """Its arms may be a stranger's scripts, and a study.json of others may name it."""
    go("A=", "B=optim.beta2=0.99", "n=2", hurt={3: "interrupt"})
    monkeypatch.setattr(ledger.Ledger, "own_lines", property(lambda book: []))
    with pytest.raises(ValueError, match="it was collected from another machine, which alone can go on with it"):
        race.main(["--resume"])


def test_what_several_arms_deviate_in_is_said_once():
    deviations = {"A": ["x"], "B": ["x", "y", "z"], "C": ["x", "y"]}
    assert plan.by_arms(deviations) == {"all arms are": ["x"], "B and C are": ["y"], "B is": ["z"]}


def test_a_race_of_a_range_names_history_with_the_folder_of_its_results(results, monkeypatch, capsys, tmp_path):
    """SPEEDRUN_RESULTS may have been set for the race alone."""
    arms = {name: {"overrides": [f"script.rev={name.lower() * 40}"], "runs": []} for name in "ABC"}
    race_json = {"race_id": "R", "arms": arms, "baseline": "A", "plan": None, "status": "complete", "track": "free"}
    args = argparse.Namespace(quiet=False, md=False)
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    for variable, shown in ((str(tmp_path / "own"), "history own shows"), (None, "history shows")):
        if variable is None:
            monkeypatch.delenv("SPEEDRUN_RESULTS")
        else:
            monkeypatch.setenv("SPEEDRUN_RESULTS", variable)
        race._say(tmp_path / "own" / "races" / "R", race_json, args)
        assert f"next  ./run.sh {shown} the commits in their order" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verdicts", "found"),
    [
        (
            "inconclusive slower slower",
            "C is the first commit that is slower than A: ./run.sh race bbbbbbbbbb cccccccccc",
        ),
        ("faster faster faster", "B is the first commit that is faster than A: ./run.sh race aaaaaaaaaa bbbbbbbbbb"),
        ("slower inconclusive slower", None),
        ("inconclusive equivalent not_comparable", None),
    ],
)
def test_a_race_of_a_range_says_which_commit_is_the_first_that_differs(verdicts, found):
    arms = {name: {"overrides": [f"script.rev={name.lower() * 40}"]} for name in "ABCD"}
    against = {name: {"verdict": verdict} for name, verdict in zip("BCD", verdicts.split(), strict=True)}
    said = race._first_changed({"arms": arms, "baseline": "A", "result": {"against": against}})
    assert said is None if found is None else said.startswith(f"{found} confirms it against the one before")


def test_rungs_whose_steps_are_of_different_sizes_are_planned_and_others_still_refused(results, real_facts):
    """A ladder measures its target in the race, so that its rungs have one in common."""
    request = plan.parse_request(["A=", "B=data.batch_tokens=2048", "track=free", "goal.num_steps=20", "hardware=cpu"])
    assert (planning.begin(request | {"ladder": {}}, results.folder) / "plan.json").is_file()
    request = plan.parse_request(["A=", "B=data=markov", "track=free", "goal.num_steps=20", "hardware=cpu"])
    with pytest.raises(ValueError, match="training data differ"):
        planning.begin(request | {"ladder": {}}, results.folder)


@pytest.mark.parametrize("load", ["other programs use 1.95 of 2 cores (limit 0.1)", None])
def test_a_busy_machine_is_said_before_the_first_run_and_no_plan_is_made(results, monkeypatch, capsys, load):
    """None: the code of an older revision, which says nothing of the machine."""
    arms = claimed.Racers(results, noisy(1))
    arms.install(monkeypatch)
    busy = {"preflight": [asdict(Check("cpu load", "warn", load, "end them"))]} if load else {}
    monkeypatch.setattr(arm_process, "facts", lambda *args: arms.facts(*args) | busy)
    arguments = ["A=", "B=optim.beta2=0.99", "n=2"]
    if load:
        with pytest.raises(ValueError, match="use 1.95 of 2 cores .*, and the verdict would be unreliable.*--anyway"):
            race.main(arguments)
        assert capsys.readouterr().out.count("warn  cpu load") == 1  # once, not once an arm
        assert ledger.read(results.folder).lines == []
        arguments.append("on=loss")  # which load does not change: it is only said
    assert race.main(arguments) == 0
    assert capsys.readouterr().out.count("warn  cpu load") == bool(load)


def test_json_of_a_race_is_all_there_is_on_standard_output(results, go, answer_of, capsys):
    code, _ = go("A=", "B=", "n=2", "--json", hurt={5: "interrupt"})
    printed = capsys.readouterr()
    outcome = json.loads(printed.out)
    assert (code, outcome["status"], outcome["result"]) == (1, "interrupted", None)
    assert f"./run.sh race --resume {outcome['race_id']}" in outcome["why"] and "run 3 of 6 complete" in printed.err
    assert answer_of(race, "--look")["baseline"] == "A"
    assert answer_of(race, "--resume") == race_json(results)


def test_a_quiet_race_says_how_it_ended_and_no_more(go, capsys):
    go("A=", "B=", "C=", "n=2", "-q")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["verdict:", "verdict:"]
    assert [phrase in line for phrase, line in zip(("B against A", "C against A"), lines, strict=True)] == [True, True]
    go("A=", "B=", "n=2", "-q", hurt={0: "fail"})
    assert capsys.readouterr().out.splitlines()[-1].startswith("no verdict: the warm-up of")


def test_a_calibration_made_later_does_not_change_what_a_race_said(results, go, monkeypatch):
    go("A=", "B=", "n=3")
    answered = race_json(results)["result"]["against"]["B"]
    monkeypatch.setattr(
        calibration,
        "find_for_rows",
        lambda rows: {"file": "x", "floor_pct": 25.0, "floor_n": 4, "cv_pct": 9.0, "exact": True},
    )
    monkeypatch.setattr(calibration, "floor_for", lambda *_: 25.0)
    race_id = race_json(results)["race_id"]
    for arguments in ([race_id], [f"{race_id}:B", f"{race_id}:A"]):
        ((_, compared),) = comparison.compare_arms(selection.arms_from_words(arguments))
        assert (compared["time"]["floor_pct"], compared["verdict"], compared["calibration"]) == (
            answered["time"]["floor_pct"],
            answered["verdict"],
            None,
        )


def test_a_race_that_cannot_go_on_is_given_up_and_its_runs_are_marked(results, go):
    go("A=", "B=optim.lr=0.001", "n=2", hurt={4: "interrupt"})
    assert race.main(["--abandon"]) == 1
    outcome = race_json(results)
    assert (outcome["status"], outcome["result"]) == ("abandoned", None) and "--abandon" in outcome["why"]
    configs = sorted({path.parent.name.split("-")[-3] for path in results.folder.glob("cpu_nano/*/run.json")})
    ((_, compared),) = comparison.compare_arms(
        selection.arms_from_words([str(results.folder / "cpu_nano" / f"*-{config}-*") for config in configs])
    )
    assert "without-its-plan" in compared["flags"]
    with pytest.raises(ValueError, match="there is no unfinished race"):
        race.main(["--abandon"])
    go("A=", "B=optim.lr=0.001", "n=2")
    ended = max((results.folder / "races").iterdir(), key=_made_at)
    with pytest.raises(ValueError, match=f"{ended.name}: has ended: only an unfinished race"):
        race.main(["--abandon", ended.name])
    assert _result(ended)["verdict"]


def test_showing_every_run_is_a_look(results, go):
    go("A=", "B=", "n=2", "--show")
    assert race_json(results)["unplanned_look"]


def test_a_race_says_how_many_races_of_its_arms_there_were_before_it(results, go, printed, capsys):
    arguments = ("A=", "B=optim.beta2=0.99", "n=2")
    go(*arguments, time_of=noisy(1))
    assert "earlier race" not in capsys.readouterr().out
    go("A=", "B=optim.beta2=0.9", "n=2", time_of=noisy(1))  # another candidate
    go(*arguments, time_of=noisy(2, B=50))
    go(*arguments, time_of=noisy(3))
    first, _, second, last = sorted((results.folder / "races").iterdir(), key=lambda folder: _made_at(folder))
    verdicts = [_result(folder)["verdict"] for folder in (first, second)]
    assert verdicts[1] == "slower"
    counts = {name: verdicts.count(name) for name in verdicts}
    assert _result(last)["earlier_races"] == counts and "raced-before" in _result(last)["flags"]
    capsys.readouterr()
    assert "2 earlier races of these arms in this ledger: " in printed(compare, last.name)
    assert _result(first)["earlier_races"] is None and "raced-before" not in _result(first)["flags"]


def test_of_several_near_arms_of_an_earlier_race_the_very_same_is_named_and_the_costliest_counts(results, go):
    go("A=", "B=optim.beta2=0.99", "C=optim.beta2=0.985", "n=4", time_of=noisy(1, C=50))
    earlier = max((results.folder / "races").iterdir(), key=_made_at)
    go("A=", "B=optim.beta2=0.985", "n=4", time_of=noisy(2))
    newest = max((results.folder / "races").iterdir(), key=_made_at)
    assert _result(newest)["earlier_races"] == {_result(earlier, "C")["verdict"]: 1}
    arms = selection.arms_from_words([f"{newest}:A", f"{newest}:B"])
    found = comparison.earlier_races(*arms)
    weights = [math.exp(effects.log_left(_result(earlier, name)["time"], "time")) for name in "BC"]
    assert found.arms == [f"{earlier.name}:C"] and found.weight == pytest.approx(min(weights)) != max(weights)


def test_near_arms_in_a_ledger_of_an_earlier_version_are_found_by_their_configs(results, go):
    go("A=", "B=optim.beta2=0.99", "n=4", time_of=noisy(1))
    book = results.folder / ledger.NAME
    assert '"effective":' in book.read_text()
    book.write_text(book.read_text().replace('"effective":', '"unknown":'))
    go("A=", "B=optim.beta2=0.985", "n=4", time_of=noisy(2))
    newest = max((results.folder / "races").iterdir(), key=_made_at)
    assert sum(_result(newest)["earlier_races"].values()) == 1


def test_candidates_that_are_compared_with_each_other_have_the_earlier_races_of_both(results, go):
    """A cheat: the same two arms beside another baseline each time, of which only the luckiest race is shown."""
    for beta2 in (0.8, 0.7):
        go(f"Z=optim.beta2={beta2}", "A=", "B=optim.lr=0.001", "n=2", time_of=noisy(1))
    first, second = sorted((results.folder / "races").iterdir(), key=_made_at)
    found = [
        comparison.earlier_races(*selection.arms_from_words([f"{race}:A", f"{race}:B"])) for race in (first, second)
    ]
    assert found[0] is None and (found[1].verdicts, found[1].weight) == ({"none": 1}, 0.5)
    ((_, compared),) = comparison.compare_arms(selection.arms_from_words([f"{second}:A", f"{second}:B"]))
    assert compared["earlier_weight"] == 0.5 and "raced-before" in compared["flags"]
    assert _result(second, "A")["earlier_races"] is None  # against another baseline


def test_a_seed_that_was_chosen_is_named_and_supports_no_claim(results, go, capsys):
    """A cheat: of three hundred seeds those with which an equally good arm is better, found in another folder."""
    for words_typed, is_flagged in ((["seed=1234"], True), ([], False)):
        go("A=", "B=optim.beta2=0.99", "n=2", "on=loss", *words_typed, time_of=noisy(1))
        assert ("its first seed was chosen (leave seed= out)" in capsys.readouterr().out) == is_flagged
        newest = max((results.folder / "races").iterdir(), key=_made_at)
        assert ("seed-given" in _result(newest)["flags"]) == is_flagged
        assert json.loads((newest / "plan.json").read_text())["seed_given"] == is_flagged


def test_a_change_without_an_effect_makes_no_other_arm_of_a_race(results, go, capsys):
    """Else each try of a race that is repeated until it is won would have the whole alpha."""
    go("A=", "B=optim.beta2=0.99", "n=2", "on=loss", time_of=noisy(1))
    go("A=", "B=optim.beta2=0.985", "n=2", "on=loss", time_of=noisy(2))
    go("A=", "B=optim.beta2=0.982 hardware.wall_timeout_s=9000", "n=2", "on=loss", time_of=noisy(3))
    assert "B: alpha is 0.013, since 2 earlier races of these arms left 25 % of it" in capsys.readouterr().out
    go("A=", "B=optim.beta2=0.95", "n=2", "on=loss", time_of=noisy(4))  # another idea
    *_, third, other = sorted((results.folder / "races").iterdir(), key=lambda folder: _made_at(folder))
    assert (_result(third)["earlier_weight"], _result(other)["earlier_weight"]) == (0.25, 1.0)


def _made_at(folder):
    return json.loads((folder / "plan.json").read_text())["made_at"]


def _result(folder, arm="B"):
    return json.loads((folder / "race.json").read_text())["result"]["against"][arm]


def test_three_arms_are_judged_together(results, go):
    go("A=", "B=optim.lr=0.004", "C=optim.lr=0.005", "n=4", time_of=noisy(4, C=3))
    against = race_json(results)["result"]["against"]
    assert (against["B"]["verdict"] in ("equivalent", "inconclusive"), against["C"]["verdict"]) == (True, "slower")
    assert against["C"]["time"]["p_holm"] == pytest.approx(2 * against["C"]["time"]["p"])
    race_id = race_json(results)["race_id"]
    for arguments in ([race_id], [f"{race_id}:C"], [f"{race_id}:A", f"{race_id}:C"]):  # alone it is judged no milder
        again = dict(comparison.compare_arms(selection.arms_from_words(arguments)))
        again = list(again.values())[-1]
        assert {key: again["time"][key] for key in ("p_holm", "p_equivalent_holm")} == {
            key: against["C"]["time"][key] for key in ("p_holm", "p_equivalent_holm")
        }
        assert again["words"] == against["C"]["words"]
    assert (against["C"]["arms"], against["C"]["about"]) == (["A", "C"], ["the default", "optim.lr=0.005"])
    (folder,) = (results.folder / "races").iterdir()
    text = (folder / "race.md").read_text()
    _, b_text, c_text = text.partition("\n## ")[0].split("verdict: ")
    assert text.startswith("# Race: B and C against A\n") and re.search("C is [0-9.]+ % slower than A", c_text)
    assert "C is" not in b_text and not re.findall("B('s| is)", c_text) and "optim.lr=0.005" in text


def test_a_coarse_floor_ends_no_race_early_and_the_margin_at_a_looks_alpha_does(results, go, monkeypatch):
    """Identical arms with 0.01 % of noise: equivalent at the first look, but not on a machine with a floor of 77 %."""
    chance = random.Random(3)
    kept = {"file": "x", "floor_pct": 77.0, "floor_n": 4, "cv_pct": 9.0, "exact": True}
    monkeypatch.setattr(calibration, "find_for_rows", lambda rows: kept)
    alike = {"time_of": lambda arm, seed: 10 * (1 + chance.gauss(0, 0.0001))}
    go("A=", "B=optim.lr=0.004", "n=5", "looks=3,5", **alike)
    outcome = race_json(results)
    assert (outcome["status"], outcome["result"]["against"]["B"]["verdict"]) == ("complete", "inconclusive")
    assert outcome["plan"]["equivalence_margin_pct"] == outcome["result"]["against"]["B"]["time"]["margin_pct"] == 0.5
    shutil.rmtree(results.folder / "races")
    monkeypatch.setattr(calibration, "find_for_rows", lambda rows: None)
    go("A=", "B=optim.lr=0.005", "n=5", "looks=3,5", **alike)
    outcome = race_json(results)
    time = outcome["result"]["against"]["B"]["time"]
    assert (outcome["status"], outcome["result"]["against"]["B"]["verdict"]) == ("stopped_early", "equivalent")
    assert time["p_equivalent"] < time["alpha"] == 0.025


def test_seeds_are_fresh_unless_they_are_given(results, go):
    results.add(seed=4)
    go("A=", "B=", "n=2")
    assert [slot["seed"] for slot in race_json(results)["order"] if slot["arm"] == "A"] == [5, 5, 6]
    shutil.rmtree(results.folder / "races")
    go("A=", "B=", "n=2", "seed=40")
    assert [slot["seed"] for slot in race_json(results)["order"] if slot["arm"] == "A"] == [40, 40, 41]


def test_the_race_leaves_a_page_and_a_text_that_say_the_verdict(results, go):
    go("A=", "B=", "n=3", time_of=noisy(6, B=5))
    (folder,) = (results.folder / "races").iterdir()
    assert {path.name for path in folder.iterdir()} - {state.LOCK} == {"plan.json", "race.json", "race.md", "race.html"}
    assert "**SLOWER**" in (folder / "race.md").read_text() and "slower" in (folder / "race.html").read_text()


@pytest.mark.parametrize("change", [{"order": [{}]}, {"arms": []}, {"looks": []}, {"baseline": "Z"}, {"n": 9}])
def test_a_plan_that_is_none_is_refused_even_if_the_ledger_has_its_hash(results, go, change):
    go("A=", "B=", "n=2")
    (path,) = (results.folder / "races").glob("*/plan.json")
    race_plan = json.loads(path.read_text()) | change
    path.write_text(json.dumps(race_plan))
    ledger.append(results.folder, "plan", race_id=race_plan["race_id"], plan_sha256=plan.sha256(race_plan))
    with pytest.raises(ValueError, match="plan"):
        state.read(path.parent)


@pytest.mark.parametrize("race_id", ["../../etc", "/etc", ".git", ""])
def test_a_name_that_leads_out_of_the_folder_is_no_race(results, race_id):
    with pytest.raises(ValueError, match="cannot be a race's id"):
        race_folder.of(results.folder, race_id)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no arms are given"),
        (["A=", "B=optim.lrr=1", "track=cpu_nano"], "B: unknown setting"),
        (["--resume", "never"], "never: is not a path"),
    ],
)
def test_what_cannot_be_raced_is_refused_before_anything_runs(results, monkeypatch, arguments, message):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(results.folder))
    monkeypatch.setenv("SPEEDRUN_DATA", os.environ.get("SPEEDRUN_DATA", str(REPO / ".data")))
    with pytest.raises(ValueError, match=message):
        race.main(arguments)
    assert ledger.read(results.folder).lines == []


# ---- whole races, as a user starts them


SHORT = [*real_runs.SHORT, "goal.num_steps=4", "goal.val_every_steps=4"]
SLEEP_S = 0.2  # of the slower optimizer, in every step
SLOW_OPTIMIZER = """
        class Slowed(torch.optim.AdamW):
            def step(self, closure=None):
                time.sleep({seconds})
                return super().step(closure)

        return Slowed(groups, lr"""


@pytest.fixture
def checkout(tmp_path, repo):
    """A repository of its own with two commits; the second one's optimizer sleeps in every step."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("bench", "models", "conf"):
        shutil.copytree(repo / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repo / ".gitignore", copy)

    real_runs.git(copy, "init", "-q")
    real_runs.git(copy, "add", ".")
    real_runs.git(copy, "commit", "-qm", "the baseline")
    slow_down(copy, SLEEP_S)
    real_runs.git(copy, "commit", "-qam", "a slower optimizer")
    return copy


def slow_down(copy, seconds):
    path = copy / "models" / "optimizers" / "adamw.py"
    text = path.read_text().replace("import torch\n", "import time\n\n        import torch\n", 1)
    assert text.count("\n        return torch.optim.AdamW(groups, lr") == 1
    slow = SLOW_OPTIMIZER.format(seconds=seconds)
    path.write_text(text.replace("\n        return torch.optim.AdamW(groups, lr", slow))


def start(checkout, *arguments, **options):
    env = real_runs.environment(
        checkout / "results", SPEEDRUN_DATA=os.environ.get("SPEEDRUN_DATA", str(real_runs.REPO / ".data"))
    )
    return subprocess.Popen(
        [sys.executable, "-m", "bench", "race", *arguments],
        cwd=checkout,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )


@pytest.mark.slow
def test_two_revisions_race_through_a_kill_and_the_slow_one_is_called_slower_by_its_region(checkout):
    arguments = ["A.rev=HEAD~1", "B.rev=HEAD", "n=2", *SHORT]
    killed = start(checkout, *arguments, "--anyway")
    real_runs.wait_for(
        lambda: (
            len([line for line in ledger.read(checkout / "results").lines if line["event"] == "start"]) == 3
            or killed.poll() is not None
        )
    )
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (path,) = (checkout / "results" / "races").glob("*/plan.json")
    before = path.read_bytes()
    resumed = start(checkout, "--resume", "--anyway")
    out, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, out
    assert path.read_bytes() == before
    outcome = json.loads((path.parent / "race.json").read_text())
    runs = {
        arm: [json.loads((checkout / "results" / run / "run.json").read_text()) for run in outcome["arms"][arm]["runs"]]
        for arm in "AB"
    }
    assert [{run["code"]["commit"] for run in runs[arm]} for arm in "AB"] == [
        {outcome["arms"][arm]["commit"]} for arm in "AB"
    ]
    assert [len(arm) for arm in runs.values()] == [2, 2]
    assert sum(len(arm["interrupted_runs"]) for arm in outcome["arms"].values()) == 1
    assert ledger.read(checkout / "results").faults == []
    median_s = {arm: statistics.median(run["metrics"]["train_s"] for run in runs[arm]) for arm in "AB"}
    assert median_s["B"] > median_s["A"] + 0.5 * 4 * SLEEP_S  # half of what 4 steps sleep
    assert "in optimizer" in " ".join(outcome["result"]["against"]["B"]["diagnosis"]["words"])
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=checkout, capture_output=True, text=True).stdout
    assert len(worktrees.splitlines()) == 1


@pytest.mark.parametrize("name", ["bench/plans/race/arm_process.py", "bench/race/arm_process.py", "bench/racers.py"])
def test_a_revision_from_before_a_move_of_this_file_is_asked_too(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    assert arm_process.ask(tmp_path, ["--facts"], dict(os.environ)) == ["--facts"]
    path.unlink()
    assert arm_process.ask(tmp_path, ["--facts"], dict(os.environ)) is None
