"""A referee of searches: its stages, its journal over kills, and what it refuses."""

import asyncio
import contextlib
import copy
import itertools
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import browser
import claimed
import pytest
import real_runs
import traces
from cases import slow

from bench.base import atomic
from bench.cli import referee
from bench.compare import effects
from bench.machine.signals import Interrupted
from bench.plans.audit import short
from bench.plans.race import arm_process, runner
from bench.plans.referee import deciding, page, refereeing, serving
from bench.plans.referee import search as searches
from bench.plans.replay import certificate
from bench.record import certificates, ledger, outside_clock, race_folder, run_folder

# ---- whole searches, of runs that cost no time


class Tries(claimed.Racers):
    """Runs whose time follows from optim.beta2 of their arm: 0.9 is the champion's, 0.91 1 % faster, and so on."""

    def __init__(self, folder, noise=0.0005):
        chance = random.Random(11)
        super().__init__(folder, lambda arm, seed: 10 * (1 - self.gain()) * (1 + chance.gauss(0, noise)))
        self.loss_of = lambda arm, seed: 2.75 + 0.001 * (seed % 11)
        self.overrides = []
        self.slower_us = 0  # of the candidate's look

    def gain(self):
        settings = dict(setting.split("=") for setting in self.overrides if "=" in setting)
        return float(settings.get("optim.beta2", 0.9)) - 0.9

    def start(self, folder, overrides, *rest):
        self.overrides = overrides
        return super().start(folder, overrides, *rest)


@pytest.fixture
def tries(tmp_path, monkeypatch):
    racers = Tries(tmp_path / "results")
    racers.install(monkeypatch)
    monkeypatch.setattr("bench.report.race_page.write_run_pages", lambda folder: None)
    monkeypatch.setattr(refereeing, "_audit_run", lambda search, run, arm: None)
    monkeypatch.setattr(refereeing, "_short_run", lambda search, name, arm, *times: None)
    return racers


def begin(tries, **settings):
    defaults = {"on": "time", "alpha": 0.05, "effect": 0.5, "budget_s": 1e6, "price": None, "trust": True}
    champion = {"overrides": ["track=cpu_nano", "optim.beta2=0.9"], "rev": None}
    return refereeing.begin(tries.results.folder, champion, defaults | settings)


def begun(tries, **settings):
    return refereeing.calibrate(begin(tries, **settings))


def tried(search, *overrides):
    search, number = refereeing.submit(search, list(overrides), "a test", "")
    search = refereeing.work(search)
    return search, search.submissions[number].decided


def test_a_gain_is_kept_and_becomes_the_champion_and_no_gain_is_dropped(tries, monkeypatch):
    search = begun(tries)
    search, decided = tried(search, "optim.beta2=0.92")
    assert decided["decision"] == "keep" and decided["gain"] == pytest.approx(0.0202, abs=0.001)
    assert search.champion["overrides"] == ["track=cpu_nano", "optim.beta2=0.92"]
    asked, ask = [], arm_process.facts_of_arms
    monkeypatch.setattr(arm_process, "facts_of_arms", lambda *arms: asked.append(arms) or ask(*arms))
    search, decided = tried(search, "optim.beta2=0.91")  # 1 % slower than the new champion
    assert decided["decision"] == "drop" and len(asked) == 1  # by the checks, and not again by the plan
    search, decided = tried(search, "optim.beta2=0.92", "optim.weight_decay=0.2")
    assert decided["decision"] == "drop" and [submission.number for submission in search.kept] == [1]
    assert list(deciding.replay(search)) == []


def test_a_full_disk_decides_nothing_and_the_race_goes_on_when_there_is_room(tries, monkeypatch):
    search = begun(tries)

    def full(folder, overrides, results, tag, *rest):
        raise runner.DiskError("B: disk_full: no space: free or repair the disk")

    search, number = refereeing.submit(search, ["optim.beta2=0.92"], "a test", "")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="disk_full"):
        patch.setattr(arm_process, "start", full)
        patch.setattr("bench.machine.preflight.MIN_FREE_GIB", 1e9)
        refereeing.work(search)
    assert searches.read(search.folder).submissions[number].decided is None
    search = refereeing.work(search)
    assert search.submissions[number].decided["decision"] == "keep"
    monkeypatch.setattr(arm_process, "start", full)  # there is room: the contestant only says so
    assert tried(search, "optim.beta2=0.94")[1]["decision"] == "undecided"


@pytest.mark.slow
def test_a_keep_needs_an_audit_that_takes_about_as_long_as_its_runs(tries, monkeypatch):
    audits, seconds = claimed.Results(tries.results.folder / certificates.AUDITS_FOLDER), iter([10.0, 10.0, 40.0])

    def audit(search, run, arm):
        audited = audits.add(train_s=next(seconds), change=lambda run: run["measured"].update(foreign_cpu_cores=1.9))
        record = run_folder.read(run)
        kind = {"kind": "held_out", "outcome": "passed", "why": "", "run": f"cpu_nano/{audited.name}"}
        about = {"run": certificates.name_of(record), "at": "", "claimed_nats": 2.75, "outcome": "passed"}
        about |= {"config_id": record["config_id"], "source_sha256": record["code"]["source_sha256"], "audits": [kind]}
        atomic.write_json(run / certificates.AUDIT_FILE, about)

    monkeypatch.setattr(refereeing, "_audit_run", audit)
    monkeypatch.setattr(deciding.auditing, "passed_here", lambda *facts: True)
    search, decided = tried(begun(tries), "optim.beta2=0.92")
    assert decided["decision"] == "keep"
    search, decided = tried(search, "optim.beta2=0.94")
    assert decided["decision"] == "undecided"
    assert "but it trains longer on other data: 40 s in its audit held_out, 9.6" in decided["why"]
    assert decided["why"].endswith("other programs were busy then: submit it again")
    assert list(deciding.replay(search)) == []


@pytest.mark.parametrize(
    ("claimed_s", "foreign_cores", "why"),
    [(9.8, 1.9, None), (9.8, 0.0, "less than passed"), (5.0, 1.9, "less than passed")],
)
def test_an_edge_that_waited_for_a_core_is_not_held_against_a_contestant(
    tmp_path, monkeypatch, claimed_s, foreign_cores, why
):
    def change(run):
        run["measured"]["foreign_cpu_cores"] = foreign_cores
        run["doubts"] = [{"instrument": outside_clock.CLOCK, "doubt": "less than passed"}]

    run = run_folder.read(claimed.Results(tmp_path).add(change=change))
    run |= {"folder": None, "referee": {"clock": {"claimed_train_s": claimed_s, "outside_train_s": 10.0}}}
    monkeypatch.setattr(short.auditing, "run_on_other_data", lambda *job: ({}, run))
    monkeypatch.setattr(short.step_files, "validations", lambda folder: {})
    assert short.refusal(None) == why
    run |= {"status": "failed", "failure": {"kind": "no_gpu", "message": "it asks for a GPU"}}
    assert short.refusal(None) == "it fails: it asks for a GPU"


@pytest.mark.slow
def test_an_answer_says_what_changed_in_a_step_where_the_races_have_looks(tries):
    """The look of an arm is that of its first run: of a race B's is a warm-up, which is no run of the verdict."""
    write = tries.results._write

    def write_with_look(folder, conf, run, *facts):
        if run["race"]["looks"]:
            (folder / "traces").mkdir()
            kernel_us = 500 - round(1000 * tries.gain()) + tries.slower_us * (run["race"]["arm"] == "B")
            events = traces.steps_of_a_kernel(kernel_us, step_us=kernel_us + 50)
            traces.write(folder / "traces" / "look_rank0.pt.trace.json.gz", events)
        write(folder, conf, run, *facts)

    tries.results._write = write_with_look
    search, decided = tried(begun(tries), "optim.beta2=0.92")
    cause = "the largest change of a profiled step: my_kernel (no bound known) takes 0.020 ms less"
    assert decided["stage"] == "confirmation" and decided["cause"] == cause
    search, decided = tried(search, "optim.beta2=0.9")  # drops in its race
    assert decided["stage"] == "race" and decided["cause"] == cause.replace("less", "more")
    assert deciding.answer(search, search.submissions[1])["cause"] == cause
    assert f"where 40 is needed; {cause}; not replayed (" in deciding.sentence(search, search.submissions[1])
    assert cause in page.document(search).terminal()
    tries.slower_us = 100
    search, decided = tried(search, "optim.beta2=0.94")  # faster, and its look is of a busy moment
    assert decided["decision"] == "keep" and decided["cause"] is None
    assert list(deciding.replay(search)) == []


@pytest.mark.slow
def test_a_keep_says_who_replayed_its_runs(tries, answer_of, printed, capsys):
    search, decided = tried(begun(tries), "optim.beta2=0.92")
    assert deciding.answer(search, search.submissions[1])["replayed"] == "not replayed"
    raced = race_folder.read(tries.results.folder / "races" / decided["races"][1])
    run = tries.results.folder / raced["arms"]["B"]["runs"][0]
    record = SimpleNamespace(name=certificates.name_of(run_folder.read(run)), run=run_folder.read(run))
    replayed = {"outcome": "identical", "machine": "same session", "made_at": "2026-11-28T", "replays": ["cpu_nano/it"]}
    certificate.write(certificate.impossible(record, "") | replayed, [run])
    replayed = "replayed: 1 of 6 identical (same session), 2026-11-28"
    shown = printed(referee, "log")
    assert f"champion: track=cpu_nano optim.beta2=0.92 ({replayed})" in shown and shown.count(replayed) == 2
    assert deciding.answer(search, search.submissions[1])["replayed"] == replayed
    assert answer_of(referee, "status")["champion_replayed"] == replayed
    assert replayed in page.document(search).terminal()
    shutil.rmtree(tries.results.folder / "replays")  # what is left is the bearer's claim
    assert replayed.replace("identical", "claimed: identical") in deciding.sentence(search, search.submissions[1])
    search, decided = tried(search, "optim.beta2=0.9")
    assert decided["decision"] == "drop" and deciding.answer(search, search.submissions[2])["replayed"] is None
    search, decided = tried(search, "optim.beta2=0.94")
    capsys.readouterr()
    assert decided["decision"] == "keep" and referee.main(["log", "--json"]) == 0
    log = json.loads(capsys.readouterr().out)
    assert log["champion_replayed"] == "not replayed"  # that of the new champion
    assert [entry["submitted"][-2:] for entry in log["submissions"]] == ["92", ".9", "94"]
    race = tries.results.folder / "races" / search.submissions[1].decided["races"][1]
    (race / "race.json").write_text("{")
    assert deciding.replayed(search, search.submissions[1]) == "not replayed"


def test_a_search_for_a_lower_loss_keeps_it_and_no_seed_that_is_repeated(tries):
    tries.loss_of = lambda arm, seed: 2.75 + 0.001 * (seed % 11) - 0.5 * tries.gain()
    search, decided = tried(begun(tries, on="loss", effect=None), "optim.beta2=0.92")
    assert decided["decision"] == "keep" and decided["gain"] == pytest.approx(0.01)
    assert decided["ci95"][0] <= decided["gain"] <= decided["ci95"][1] and "0.0100 nats better in" in decided["why"]
    orders = [race_folder.read(race_folder.of(search.results, name))["order"] for name in decided["races"]]
    assert not any(place["discarded"] for order in orders for place in order)  # a loss needs no warm-up
    tries.losses_of = lambda arm, seed: {0: 5.6, 60: 3.2, 120: 2.5} if tries.gain() > 0.025 else None
    add = tries.results.add
    tries.results.add = lambda *args, **facts: add(*args, train_loss=3.0 if "losses" in facts else None, **facts)
    search, decided = tried(search, "optim.beta2=0.93")  # the same lucky losses, whatever the seed
    assert decided["decision"] == "drop" and "it ignores its seed" in decided["why"]
    assert list(deciding.replay(search)) == []


def test_a_refusal_says_what_to_mend_and_is_free(tries, monkeypatch):
    search = begun(tries)
    assert "nothing has been submitted yet" in page.document(search).terminal()
    search, decided = tried(search, "optim.beta2=0.9")
    assert decided["decision"] == "refused" and "same config" in decided["why"]
    with pytest.raises(ValueError, match="goal.num_steps=5: a submission can change only model, optim"):
        refereeing.submit(search, ["goal.num_steps=5"], "", "")
    assert search.confirmations == [] and tries.num_started == 14  # the calibration's alone
    monkeypatch.undo()  # what stands for arms and runs
    search, decided = tried(search, "optim.lr=nonsense")
    assert decided["why"] == "optim.lr=nonsense: use a number above 0"  # and nothing of an arm B


@pytest.mark.parametrize("setting", ["model.arch=mine:Net", "optim={name: 'mine.py:Config'}", "model.arch=${oc.env:X}"])
def test_a_setting_that_names_code_is_refused_before_the_code_is_imported(tries, setting):
    with pytest.raises(ValueError, match="only the code of model.arch=FILE.py:CLASS can be confined to a sandbox"):
        refereeing.submit(begun(tries, trust=False), [setting], "", "")


def test_what_a_short_run_finds_refuses_a_submission_and_costs_no_level(tries, monkeypatch):
    search, calls = begun(tries), []
    monkeypatch.setattr(
        refereeing, "_short_run", lambda search, name, arm, *times: calls.append((name, *times)) or "its clock is slow"
    )
    search, decided = tried(search, "optim.beta2=0.92")
    assert decided["decision"] == "refused" and decided["why"] == "its clock is slow"
    assert search.confirmations == [] and tries.num_started == 14
    ((name, seconds, run_s),) = calls
    assert name == "1" and seconds == pytest.approx(10 * 20 / 120, rel=0.01) and run_s == pytest.approx(30, rel=0.01)


@pytest.mark.slow
def test_a_submission_before_the_calibration_has_ended_is_decided_once_start_has_continued_it(tries):
    search, number = refereeing.submit(begin(tries), ["optim.beta2=0.92"], "a test", "")
    with pytest.raises(ValueError, match="its calibration has not succeeded: ./run.sh referee start repeats it"):
        refereeing.work(search)
    search = refereeing.work(refereeing.calibrate(search))
    assert search.submissions[number].decided["decision"] == "keep"


def test_a_lower_loss_of_who_spends_more_outside_its_own_clock_is_not_kept(monkeypatch):
    raced = deciding.Raced(SimpleNamespace(settings={"on": "loss"}, calibration=None), Path("race"))
    outside = {"extra_s": 0.6, "extra_ci95_s": [0.5, 0.7], "extra_p": 1e-9}
    against = {"flags": [], "arms": ["A", "B"], "time": {"outside": outside}, "val_loss": {"reasons": []}}
    monkeypatch.setattr(deciding.Raced, "against", against)
    monkeypatch.setattr(deciding.Raced, "held_out_gain", lambda self: None)
    assert raced.doubt() is None
    against["flags"].append(effects.NOT_COUNTED)
    assert raced.doubt().startswith("B spends 0.600 s more outside its own clock than A (95 % interval 0.500 to 0.700")


def test_a_search_that_could_see_nothing_has_ended_and_decides_nothing_that_waited_for_it(tries, printed, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tries.results.folder))
    search = begin(tries, effect=0.0001)
    assert "nothing has been submitted yet, 1000000 s" in printed(referee, "status")
    search, _ = refereeing.submit(search, ["optim.beta2=0.92"], "", f"see {os.path.expanduser('~')}/notes/x")
    assert search.submissions[1].note == "see ~/notes/x"
    with pytest.raises(ValueError, match="this search has ended: to show .* takes .* s, but .* s are left"):
        refereeing.calibrate(search)
    num_started = tries.num_started
    with pytest.raises(ValueError, match="this search ended before submission 1 was decided"):
        refereeing.work(search, 1)
    assert tries.num_started == num_started and "(ended): 0 kept of 1, 1 open" in printed(referee, "status")


def test_a_submitter_waits_for_no_later_submission_and_a_mistake_takes_no_number(tries):
    search = begun(tries)
    with pytest.raises(ValueError, match="there is no such file or folder"):
        refereeing.submit(search, ["missing.patch"], "", "")
    for change in ("optim.beta2=0.92", "optim.beta2=0.91"):
        search, number = refereeing.submit(search, [change], "", "")
    search = refereeing.work(search, 1)
    assert number == 2 and [submission.number for submission in search.open] == [2]
    refereeing.work(search, 1)
    assert [submission.number for submission in searches.read(search.folder).open] == [2]


def test_an_effect_in_per_cent_is_no_difference_of_losses(tries):
    with pytest.raises(ValueError, match="effect=2%: a search for a lower loss looks for a difference"):
        begin(tries, on="loss", effect=2.0, is_effect_pct=True)
    assert begin(tries, effect=2.0, is_effect_pct=True).settings["effect"] == 2.0


def edited(search, name="race.json"):
    """Adds a byte to the result of the first race, or to the record of the candidate's first run in it."""
    folder = search.results / "races" / search.submissions[1].decided["races"][0]
    path = folder / name
    if name == "run.json":
        path = search.results / race_folder.read(folder)["arms"]["B"]["runs"][0] / name
    path.chmod(0o644)
    path.write_text(path.read_text() + " ")


def cut(search, folder):
    """Takes the third line out of the ledger or the journal in a folder."""
    path = folder / ledger.NAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))
    search.faults.extend(ledger.read(search.folder).faults)


def raced_again(search):
    ledger.append(search.results, "plan", race_id=f"20261128T000000Z-{search.name}-3-race-0000", plan_sha256="")


CHANGES = [
    (lambda search: search.submissions[2].decided.update(decision="keep"), "2: keep in the journal, drop by"),
    (lambda search: search.submissions[1].decided.update(gain=0.02), "1: keep in the journal, keep by its records"),
    (lambda search: search.submissions[1].decided.update(arm=None), "1: keep in the journal, keep by its records"),
    (lambda search: setattr(search.submissions[1], "level", 0.04), "its level is 0.04, and was to be 0.025"),
    (lambda search: search.calibration.update(sd=0.1), "stopped by other rules than the search's"),
    (raced_again, "a race of this search that the journal does not have"),
    (edited, "race.json is not the one that the ledger has"),
    (lambda search: edited(search, "run.json"), "is not the record that the ledger has"),
    (lambda search: cut(search, search.folder), "journal: "),
    (lambda search: cut(search, search.results), "ledger: "),
]


def test_a_replay_finds_whatever_was_changed_afterwards(tries, tmp_path):
    search, _ = tried(begun(tries), "optim.beta2=0.92")
    search, _ = tried(search, "optim.beta2=0.9")
    shutil.copytree(search.results, tmp_path / "unchanged")
    for change, fault in CHANGES:
        changed = copy.deepcopy(search)
        assert list(deciding.replay(changed)) == []
        change(changed)
        assert any(fault in sentence for sentence in deciding.replay(changed)), list(deciding.replay(changed))
        shutil.rmtree(search.results)
        shutil.copytree(tmp_path / "unchanged", search.results)


def killed_after(tries, num_lines, work):
    """work() in a process that is killed as it has written so many lines of a ledger, or before the next -> whether
    it came to its end."""
    tries.results.clock = itertools.count(num_runs := len(list(tries.results.folder.glob("cpu_nano/*"))) * 3 + 100)
    tries.results.now = claimed.at(num_runs)
    append, left = ledger.append, [num_lines]

    def append_and_die(*args, **facts):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        line = append(*args, **facts)
        if left[0] == 0 and num_lines % 2:  # with an odd number after its last line, else before the next
            os.kill(os.getpid(), signal.SIGKILL)
        return line

    pid = os.fork()
    if pid == 0:
        try:
            ledger.append = append_and_die
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


@pytest.mark.parametrize("first", [2, slow(3)])
def test_kills_at_any_moment_lose_no_submission_and_count_none_twice(tries, first):
    search, _ = refereeing.submit(begun(tries), ["optim.beta2=0.92"], "", "")
    search, _ = refereeing.submit(search, ["optim.beta2=0.89"], "", "")
    steps = itertools.cycle([first, 5, 4, 7, 2, 9])
    num_kills = 0
    while not killed_after(tries, next(steps), lambda: refereeing.work(searches.read(search.folder))):
        num_kills += 1
    assert num_kills > 10
    search = searches.read(search.folder)
    assert [confirmation.decided["decision"] for confirmation in search.submissions.values()] == ["keep", "drop"]
    assert [confirmation.number for confirmation in search.confirmations] == [1]
    assert len([*(tries.results.folder / "races").glob("*/plan.json")]) == 4  # calibration, two, confirmation
    assert list(deciding.replay(search)) == []


@pytest.mark.parametrize("stage", ["_audit_run", slow("_short_run")])
@pytest.mark.slow
def test_a_check_and_an_audit_that_a_kill_cut_off_are_made_again_when_the_search_goes_on(tries, monkeypatch, stage):
    def killed(*args):
        raise Interrupted("SIGTERM")

    search, number = refereeing.submit(begun(tries), ["optim.beta2=0.92"], "", "")
    with monkeypatch.context() as patch:
        patch.setattr(refereeing, stage, killed)
        with pytest.raises(Interrupted):
            refereeing.work(search)
    calls = []
    monkeypatch.setattr(refereeing, stage, lambda *args: calls.append(args))
    search = refereeing.work(searches.read(search.folder))
    assert len(calls) == 1 and search.submissions[number].decided["decision"] == "keep"


@pytest.mark.slow
def test_a_machine_that_started_again_leaves_a_race_undecided_and_the_search_goes_on(tries, monkeypatch):
    """Times of two boots are not comparable; the race that was cut off keeps its place in the count."""
    search, number = refereeing.submit(begun(tries), ["optim.beta2=0.92"], "", "")
    tries.hurt[tries.num_started + 3] = "kill"
    with pytest.raises(Interrupted):
        refereeing.work(search)
    facts = tries.facts
    monkeypatch.setattr(arm_process, "facts", lambda *args: facts(*args) | {"session_id": "another boot"})
    search = refereeing.work(searches.read(search.folder))
    decided = search.submissions[number].decided
    assert decided["decision"] == "undecided" and "began in another session" in decided["why"]
    search, decided = tried(search, "optim.beta2=0.921")
    assert decided["decision"] == "keep" and list(deciding.replay(search)) == []


def test_a_candidate_that_ends_its_launcher_gets_no_other_draw_of_its_time(tries, monkeypatch):
    def start(folder, overrides, results, place, *rest):
        tries.hurt |= {tries.num_started: "kill"} if place["arm"] == "B" and not place["discarded"] else {}
        with contextlib.suppress(Interrupted):
            Tries.start(tries, folder, overrides, results, place, *rest)
        return ""

    search = begun(tries)
    monkeypatch.setattr(arm_process, "start", start)
    search, decided = tried(search, "optim.beta2=0.92")
    assert decided["decision"] == "drop" and "of B has no record of how it ended" in decided["why"]


def test_of_two_searches_that_begin_at_once_one_is_refused(tries):
    def begins(number):
        with contextlib.suppress(ValueError):
            return begin(tries)

    with ThreadPoolExecutor(2) as threads:
        (one,) = filter(None, threads.map(begins, range(2)))
    with pytest.raises(ValueError, match=f"{one.name}: is still open"):
        begin(tries)


def test_a_goal_that_differs_from_the_champions_is_refused(tries, monkeypatch):
    """A yaml of conf/model/ can set the goal: its first line says in which package it is."""
    search, planned = begun(tries), refereeing.planning.planned

    def with_fewer_steps(*args, **settings):
        race_plan, facts = planned(*args, **settings)
        for name, num_steps in (("A", 120), ("B", 12)):
            facts[name]["row"] = {"num_steps": num_steps}
        return race_plan, facts

    monkeypatch.setattr(refereeing.planning, "planned", with_fewer_steps)
    _, decided = tried(search, "optim.beta2=0.92")
    assert decided["decision"] == "refused"
    assert decided["why"] == "num_steps is 12, and 120 of the champion: a submission does not change the goal"


def test_a_journal_that_was_changed_or_cut_is_named_and_nothing_more_is_decided_by_it(tries, printed):
    search, _ = tried(begun(tries), "optim.beta2=0.92")
    path = search.folder / ledger.NAME
    whole = path.read_bytes()
    changes = {
        "its end was removed": whole[: whole.rstrip().rindex(b"\n") + 1],
        "line 5 was changed": whole.replace(b'"decision":"keep"', b'"decision":"drop"'),
    }
    (search.folder / page.NAME).mkdir()  # in its place no page can be written
    for fault, content in changes.items():
        path.write_bytes(content)
        assert fault in printed(referee, "status", search.name)
        with pytest.raises(ValueError, match=f"its journal was changed .*{fault}.: restore it"):
            refereeing.submit(searches.read(search.folder), ["optim.beta2=0.93"], "", "")
        assert any(fault in sentence for sentence in deciding.replay(searches.read(search.folder)))
    path.write_bytes(whole + b'{"unfinished')  # by a power failure
    (search.folder / "submissions" / "²").mkdir()
    search, decided = tried(searches.read(search.folder), "optim.beta2=0.92")
    assert decided["decision"] == "refused" and search.doubt is None


# ---- for other programs


@pytest.fixture
def served(tries):
    """A search that was calibrated, and one submission that was decided, for commands that run by themselves."""
    search, _ = tried(begun(tries), "optim.beta2=0.92")
    return search


def accepts(path):
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_a_client_of_the_socket_gets_an_answer_a_line_and_no_file_is_replaced_by_a_socket(served, tmp_path):
    path = tmp_path / "socket"
    server = real_runs.started(served.results, "referee", "serve", "--socket", str(path))
    try:
        assert "answers on" in server.stdout.readline()
        real_runs.wait_for(lambda: path.exists() and accepts(path))
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as client, client.makefile("rw") as lines:
            client.connect(str(path))
            submitted = {"id": 2, "tool": "submit", "words": ["seed=3"]}
            for request in ({"id": 1, "tool": "status"}, submitted, {"id": 3, "tool": "rm"}, []):
                lines.write(json.dumps(request) + "\n")
            lines.flush()
            replies = [json.loads(lines.readline()) for _ in range(4)]
            lines.write("x" * (2**23 + 1) + "\n")
            lines.flush()
            too_long = json.loads(lines.readline())
        second = real_runs.bench(served.results, "referee", "serve", "--socket", str(path))
        with searches.locked(served.folder), socket.socket(socket.AF_UNIX) as client:  # so that its submission waits
            client.connect(str(path))
            client.sendall(b'{"id": 4, "tool": "submit", "words": ["optim.beta2=0.93"]}\n')
            real_runs.wait_for(lambda: len(searches.read(served.folder).submissions) == 2)
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
            searches.append(served, "search_end", why=None)  # which ends the command that waits
    finally:
        server.kill()
        output, _ = server.communicate()
    assert "Traceback" not in output
    assert replies[0].get("answer", {}).get("kept") == [1] and replies[0]["id"] == 1, replies
    assert "seed=3: a submission can change only model" in replies[1]["error"]
    assert "a request has at most 8,388,608 bytes" in too_long["error"]
    assert second.returncode == 2 and "another server answers there" in second.stderr
    assert "there is no such tool" in replies[2]["error"] and "JSON object a line" in replies[3]["error"]
    with pytest.raises(ValueError, match="notes: is a file: give --socket a path"):
        (tmp_path / "notes").write_text("mine")
        serving.serve(served, tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"
    with pytest.raises(ValueError, match="missing/socket: cannot be made .No such file or directory.: give another"):
        serving.serve(served, tmp_path / "missing" / "socket")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"words": "optim.lr=1"}, "got `str` - at `$.words`"),
        ({"words": [3]}, "got `int` - at `$.words[0]`"),
        ({"diff": "\ud800"}, "surrogates not allowed"),
        ({"note": "\udcff"}, "surrogates not allowed"),  # a byte of a name that is no UTF-8, as Python writes it
        ({"id": [math.inf]}, "not JSON compliant"),  # as 1e999 is read
    ],
)
def test_a_field_that_no_command_can_be_given_is_answered_in_words(tmp_path, fields, why):
    search = SimpleNamespace(name="search", results=tmp_path)
    line = json.dumps({"id": 4, "tool": "submit"} | fields).encode()
    reply = asyncio.run(serving._answered(search, line))
    assert why in reply["error"] and reply["id"] == ([None] if "id" in fields else 4)


@pytest.mark.parametrize(("note", "why"), [("a\0b", "null byte: words, diff"), ("a" * 2**18, "too long")])
def test_what_no_command_can_be_given_is_answered_in_words_to_mcp_too(tmp_path, monkeypatch, note, why):
    monkeypatch.setattr(serving, "sys", SimpleNamespace(executable="/bin/true"))  # a process of its own
    search = SimpleNamespace(name="search", results=tmp_path)
    assert why in asyncio.run(serving.call(search, "submit", {"note": note}))["error"]


def test_lists_in_lists_without_end_and_a_disk_without_room_are_answered_and_end_no_server(tmp_path, monkeypatch):
    reply = asyncio.run(serving._answered(None, b'{"id": ' + b"[" * 100_000))
    assert reply["id"] is None and "recursion" in reply["error"]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    reply = asyncio.run(serving._answered(None, b'{"id": 5, "tool": "status"}'))
    assert reply == {"id": 5, "error": "the command cannot be run (No such file or directory)"}


def test_an_interrupt_ends_an_mcp_server_at_once_as_python_would_wait_for_its_standard_input(monkeypatch):
    sdk, codes = mock.MagicMock(), []
    sdk.MCPServer.return_value.run.side_effect = KeyboardInterrupt
    monkeypatch.setitem(sys.modules, "mcp", sdk)
    monkeypatch.setitem(sys.modules, "mcp.server", sdk)
    monkeypatch.setattr(os, "_exit", codes.append)
    serving.serve_mcp(None)
    assert codes == [128 + signal.SIGINT]


def test_an_mcp_client_is_told_what_there_is_and_gets_answers(served):
    mcp = pytest.importorskip("mcp")
    arguments = ["-m", "bench", "referee", "mcp"]
    env = real_runs.environment(served.results)
    server = mcp.StdioServerParameters(command=sys.executable, args=arguments, env=env, cwd=str(real_runs.REPO))

    async def talk():
        async with mcp.Client(mcp.stdio_client(server)) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            log = await client.call_tool("log", {})
            refused = await client.call_tool("submit", {"words": ["goal.num_steps=3"]})
            return names, json.loads(log.content[0].text), json.loads(refused.content[0].text)

    names, log, refused = asyncio.run(talk())
    assert names == ["submit", "status", "log"]
    assert [submission["decision"] for submission in log["submissions"]] == ["keep"]
    assert "goal.num_steps=3: a submission can change only" in refused["error"]


def test_the_page_has_the_staircase_and_the_luck(tries):
    search, _ = tried(begun(tries), "optim.beta2=0.92")
    home, token = os.path.expanduser("~/notes"), "hf_" + "aB3" * 12
    search, number = refereeing.submit(search, ["optim.beta2=0.93"], "ann", f"<b>luck</b> {home} {token}")
    luck = {"submission": number, "decision": "drop", "why": f"by {home}", "stage": "confirmation", "gain": 0.001}
    search = searches.append(search, "decided", **luck, spent_s=30.0)
    document = page.document(search)
    assert "1 of 2 submissions were kept: 2.0" in document.terminal() and "1 more looked good" in document.terminal()
    text = document.html()
    assert "1 keep" in text and "2 drop, luck" in text and "<b>luck</b>" not in text
    assert home not in text and token not in text
    assert "optim.beta2=0.93</b>: &lt;b&gt;luck" in text
    page.write(search)
    browser.look_at(search.folder / page.NAME)
