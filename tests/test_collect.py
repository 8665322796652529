"""collect: results of several machines are one, whatever is repeated, interrupted, forged or cut off."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import unittest.mock
from types import SimpleNamespace

import claimed
import pytest
import real_runs
from claimed import failed

from bench.base import atomic, utc
from bench.claims import claim, collecting, leaderboard
from bench.cli import collect, judge
from bench.plans.audit import auditing
from bench.plans.referee import search
from bench.plans.replay import certificate
from bench.record import certificates, ledger, line_count, run_folder, store, sweep, verification


@pytest.fixture
def machines(tmp_path):
    """Results folders of two machines; and where they are collected."""
    a, b = claimed.Results(tmp_path / "a"), claimed.Results(tmp_path / "b")
    for seed in range(2):
        a.add(seed, train_s=10 + 0.01 * seed, val_loss=2.74 + 0.01 * seed)
    b.add(2, train_s=10.02, val_loss=2.76)
    return a, b, tmp_path / "all"


def collected(into, *places):
    """Collects while the machines' ledgers are written -> exit code."""
    with unittest.mock.patch.object(utc, "now", lambda: claimed.at(2)):
        return collect.main([*(str(getattr(place, "folder", place)) for place in places), "--into", str(into)])


def runs_in(folder):
    return sorted(f"{run.parent.name}/{run.name}" for run in run_folder.find_runs([folder]))


def content_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".collect.lock"
    }


def test_two_machines_runs_judge_as_one(machines, printed, capsys):
    a, b, into = machines
    assert collected(into, a, b) == 0
    out = capsys.readouterr().out
    assert ": 2 runs (2 new), 0 races, 4 ledger lines (4 new)" in out and ": 1 run (1 new)" in out
    assert runs_in(into) == sorted(runs_in(a.folder) + runs_in(b.folder))
    assert "3 runs: 17 rules passed" in printed(judge, into)
    for place in (a, b):
        for name in runs_in(place.folder):
            assert content_of(into / name) == content_of(place.folder / name)


def test_collecting_again_changes_nothing_and_then_brings_what_is_new(machines, tmp_path, capsys):
    a, b, into = machines
    collected(into, a, b)
    before = content_of(into)
    assert collected(into, a, b) == 0
    assert content_of(into) == before
    a.add(3, train_s=10.03, val_loss=2.75)
    assert collected(tmp_path / "lab", into, a) == 0  # also beside what another folder collected of it before
    capsys.readouterr()
    assert collected(into, b, a) == 0
    assert ": 3 runs (1 new), 0 races, 6 ledger lines (2 new)" in capsys.readouterr().out
    for folder in (into, tmp_path / "lab"):
        assert len(runs_in(folder)) == 4 and ledger.read(folder).faults == [] and failed(folder) == {}


def test_both_chains_stay_whole_and_their_ends_are_named(machines):
    a, b, into = machines
    ends = [ledger.read(place.folder).lines[-1]["sha256"] for place in (a, b)]
    collected(into, a, b)
    book = ledger.read(into)
    joins = [line for line in book.lines if line["event"] == "join"]
    assert [line["heads"] for line in joins] == [[end] for end in ends]
    own = [line for line in book.lines if line["event"] in ("opened", "join")]
    assert [line["prev"] for line in own] == [None, own[0]["sha256"], own[1]["sha256"]]
    assert [line["number"] for line in own] == [1, 2, 3]
    for place in (a, b):
        assert (place.folder / ledger.NAME).read_bytes() in (into / ledger.NAME).read_bytes()
    assert len(set(book.roots)) == 3


def test_this_machines_own_runs_and_those_collected_are_one_and_runs_go_on_afterwards(machines):
    a, b, _ = machines
    assert collected(a.folder, b) == 0
    assert failed(a.folder) == {}
    a.add(3, train_s=10.03, val_loss=2.75)
    assert ledger.read(a.folder).faults == [] and failed(a.folder) == {}
    assert collected(b.folder, a) == 0  # and back: each then has all
    assert runs_in(a.folder) == runs_in(b.folder) and failed(b.folder) == {}


@pytest.mark.parametrize(
    ("first", "end"),
    [(4, 5), (2, 3), (5, 6), (1, 5)],
    ids=["their last line", "a line between", "the join", "all of theirs"],
)
def test_lines_that_are_removed_from_what_was_collected_show(machines, first, end):
    a, b, into = machines
    collected(into, a, b)
    lines = (into / ledger.NAME).read_bytes().splitlines()
    assert " ".join(json.loads(line)["event"] for line in lines) == "opened start end start end join start end join"
    cut(into, first, end)
    assert "the ledger is whole" in failed(into)


# ---- what is refused


def test_a_run_that_fails_verify_stays_where_it_is_and_the_others_come(machines, capsys):
    a, b, into = machines
    (bad, good) = runs_in(a.folder)
    wrong = a.add(3, change=lambda run: run.update(config_id="0" * 8)).name
    steps = a.folder / bad / "steps.csv"
    steps.write_text(steps.read_text().replace("3.0,", "3.1,", 1))
    assert collected(into, a) == 1
    out = capsys.readouterr().out
    assert f"{bad}: its steps.csv is not the one that its run.json lists: it was changed" in out
    assert re.search(rf"{wrong}: fails verify: .*config id is that of the config: ", out)
    assert runs_in(into) == [good]
    assert list(failed(into)) != []  # the ledger says that there was one more


def edit(folder):
    """Changes run.json in a way that verify does not notice."""
    run = run_folder.read_raw(folder)
    run["measured"]["launcher_peak_mem_gib"] = 0.01
    atomic.write_json(folder / "run.json", run)
    assert verification.report(folder)["passed"]


def test_a_record_that_is_edited_consistently_is_not_the_one_of_its_ledger(machines, capsys):
    a, _, into = machines
    edit(a.folder / runs_in(a.folder)[0])
    assert collected(into, a) == 1
    assert "its run.json is not the one in the ledger: restore it" in capsys.readouterr().out


def cut(folder, first, end=None):
    """Removes lines of the ledger."""
    lines = (folder / ledger.NAME).read_bytes().splitlines(keepends=True)
    del lines[first:end]
    (folder / ledger.NAME).write_bytes(b"".join(lines))


def cut_the_end(folder):
    cut(folder, -2)


def change_a_line(folder):
    content = (folder / ledger.NAME).read_bytes()
    (folder / ledger.NAME).write_bytes(content.replace(b'"seed":1', b'"seed":7'))


@pytest.mark.parametrize(
    "harm, why",
    [
        (cut_the_end, "its ledger has counted 4 lines, but the last one is number 2: its end was removed"),
        (change_a_line, "its ledger is not whole: line 3 was changed"),
        (lambda folder: cut(folder, 1, 2), "its ledger is not whole: line 2 names a line before it that is not there"),
        (lambda folder: (folder / ledger.NAME).unlink(), "has no ledger.jsonl, so no record there can be checked"),
    ],
)
def test_a_forged_or_truncated_ledger_is_refused_and_nothing_is_changed(machines, harm, why, capsys):
    a, b, into = machines
    collected(into, b)
    before = content_of(into)
    harm(a.folder)
    assert collected(into, a) == 1
    assert why in capsys.readouterr().err
    assert content_of(into) == before


def test_a_run_that_begins_while_its_folder_is_collected_is_not_from_elsewhere(machines, monkeypatch, capsys):
    a, _, into = machines
    read, whole = collecting.Place.read, (a.folder / ledger.NAME).read_bytes()
    first = []

    def early(place, name, *args):
        if name == ledger.NAME and not first:
            first.append(name)
            return whole[: whole.index(runs_in(a.folder)[-1].encode())].rpartition(b"\n")[0] + b"\n"
        return read(place, name, *args)

    monkeypatch.setattr(collecting.Place, "read", early)
    (a.folder / line_count.NAME).unlink()
    collected(into, a)
    assert "is not in the ledger there" not in capsys.readouterr().out


def test_records_whose_lines_were_cut_off_with_their_count_are_named(machines, capsys):
    a, _, into = machines
    cut_the_end(a.folder)
    (a.folder / line_count.NAME).unlink()
    assert collected(into, a) == 1
    assert f"{runs_in(a.folder)[1]}: is not in the ledger there" in capsys.readouterr().out


def hash_again(folder, name):
    """Hashes the ledger again from its start on, as a forger of this run would."""
    lines, prev = [json.loads(line) for line in (folder / ledger.NAME).read_bytes().splitlines()], None
    for line in lines:
        line["prev"] = prev
        if line["event"] == "end" and line["run"] == name:
            line["run_json_sha256"] = ledger.sha256_of(folder / name / "run.json")
        line["sha256"] = prev = ledger.digest(line)
    (folder / ledger.NAME).write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def test_a_ledger_rewritten_after_it_was_collected_clashes_with_both_sides_named(machines, capsys, tmp_path):
    a, _, into = machines
    collected(into, a)
    before = content_of(into)
    forger = claimed.Results(tmp_path / "forged")
    shutil.copytree(a.folder, forger.folder)
    name = runs_in(forger.folder)[0]
    edit(forger.folder / name)
    hash_again(forger.folder, name)
    assert ledger.read(forger.folder).faults == []
    assert collected(into, forger) == 1
    assert f"forged/{name} and " in (err := capsys.readouterr().err) and f"all/{name} have the same name" in err
    assert content_of(into) == before


def test_a_machine_that_has_collected_from_another_cannot_rewrite_its_runs(machines, capsys):
    a, b, into = machines
    collected(into, a)
    before = content_of(into)
    collected(b.folder, a)
    name = runs_in(a.folder)[0]
    edit(b.folder / name)
    head = ledger.read(a.folder).lines[-1]
    forged = head | {"prev": head["sha256"], "number": head["number"] + 1, "run": name}
    forged["run_json_sha256"] = ledger.sha256_of(b.folder / name / "run.json")
    forged["sha256"] = ledger.digest(forged)
    path = b.folder / ledger.NAME  # as if the other one had gone on
    path.write_bytes(path.read_bytes() + json.dumps(forged, sort_keys=True).encode() + b"\n")
    assert ledger.read(b.folder).faults == []
    assert collected(into, b) == 1 and collected(a.folder, b) == 1
    assert f"b/{name} and " in (err := capsys.readouterr().err) and f"a/{name} have the same name" in err
    assert content_of(into) == before


def test_a_folder_within_the_place_is_no_folder_to_collect_into(machines, capsys):
    """Its runs would be there twice."""
    a, _, _ = machines
    assert collected(a.folder / "sub", a) == 1
    assert "the folder to collect into is this one, or in it" in capsys.readouterr().err
    assert not list((a.folder / "sub").glob("*/*/run.json"))


def test_points_of_a_sweep_are_written_through_no_link(tmp_path):
    folder, ours = tmp_path / "sweeps" / "sweep-1", tmp_path / "bashrc"
    folder.mkdir(parents=True)
    ours.write_text("mine")
    (folder / sweep.POINTS).symlink_to(ours)
    with pytest.raises(OSError, match="points.jsonl: is a link, which is not written through"):
        sweep.keep(folder, 0, ["seed=0"], {"folder": tmp_path / "track" / "run"})
    assert ours.read_text() == "mine"


def test_a_link_in_a_run_of_somebody_elses_brings_no_file_of_ours(machines, tmp_path, capsys):
    a, _, into = machines
    name = runs_in(a.folder)[0]
    (tmp_path / "key").write_text("PRIVATE")
    (a.folder / name / "notes.txt").symlink_to(tmp_path / "key")
    run = run_folder.read_raw(a.folder / name)
    artifact = next(artifact for artifact in run["artifacts"] if artifact["path"] == "steps.csv")
    bound = artifact | {"path": "logs.txt", "num_bytes": 7, "sha256": ledger.sha256_of(tmp_path / "key")}
    run["artifacts"].append(artifact | {"path": "notes.txt", "num_bytes": 7, "sha256": None})
    atomic.write_json(a.folder / name / "run.json", run)
    hash_again(a.folder, name)
    (a.folder / line_count.NAME).unlink()
    assert collected(into, a) == 1
    assert f"{name}: its notes.txt is a link that leads out of its folder" in capsys.readouterr().out
    assert not any(b"PRIVATE" in content for content in content_of(into).values())
    (a.folder / name / "logs.txt").symlink_to(tmp_path / "key")  # as of logs that were moved to a larger disk
    run["artifacts"][-1] = bound
    atomic.write_json(a.folder / name / "run.json", run)
    hash_again(a.folder, name)
    (a.folder / line_count.NAME).unlink(missing_ok=True)
    again = tmp_path / "again"
    collected(again, a)
    assert (again / name / "logs.txt").read_text() == "PRIVATE"


@pytest.mark.parametrize(
    "path", ["steps.csv", "run.json/x", "steps.csv/x", "../x", "/tmp/x", "x" * 300, "\x1b[2J", 5, None]
)
def test_a_list_of_files_that_makes_no_sense_is_refused_in_a_line(machines, path, capsys):
    a, _, into = machines
    name = runs_in(a.folder)[0]
    run = run_folder.read_raw(a.folder / name)
    artifact = next(artifact for artifact in run["artifacts"] if artifact["path"] == "steps.csv")
    run["artifacts"].append(artifact | {"path": path})
    atomic.write_json(a.folder / name / "run.json", run)
    hash_again(a.folder, name)
    (a.folder / line_count.NAME).unlink()
    assert collected(into, a) == 1
    out = capsys.readouterr().out
    assert out.count("refused  ") >= 1 and f"{name}: " in out and "\x1b" not in out
    assert not (into / name).exists()


def test_two_runs_of_one_name_are_refused_with_both_sides_named(machines, monkeypatch, capsys):
    a, b, into = machines
    monkeypatch.setattr("bench.base.private.mark_of", lambda results: "000000")  # as of ids without a mark
    for results, loss in ((a, 2.7), (b, 2.8)):
        results.clock = iter([30])
        results.add(9, val_loss=loss)
    collected(into, a)
    before = content_of(into)
    assert collected(into, b) == 1
    err = capsys.readouterr().err
    name = next(name for name in runs_in(b.folder) if "-s9-" in name)
    assert f"b/{name} and " in err and f"all/{name} have the same name but differ" in err
    assert content_of(into) == before


def test_marks_tell_folders_apart_and_hold_for_a_folder(tmp_path):
    from bench.base import private

    marks = {private.mark_of(tmp_path / name) for name in "abc"}
    assert len(marks) == 3 and private.mark_of(tmp_path / "a") in marks


def test_names_that_lead_elsewhere_are_refused(machines, capsys):
    a, _, into = machines
    names = ("../../evil", "searches/20260101T000000Z-referee", "passports/x", "calibrations/x", "site/runs")
    for name in names:
        ledger.append(a.folder, "start", run=name, race=None)
        ledger.append(a.folder, "end", run=name, status="complete", run_json_sha256="0" * 64)
    assert collected(into, a) == 1
    out = capsys.readouterr().out
    assert all(f"{name}: is not <track>/<run_id>" in out for name in names)
    assert not (into / "searches").exists() and search.FOLDER == "searches"


@pytest.mark.parametrize("content", [b"[]", b"[" * 100_000, b"1", b'{"provenance": []}'])
def test_what_is_no_record_is_passed_over(machines, content):
    a, _, into = machines
    (a.folder / "cpu_nano/other").mkdir()
    (a.folder / "cpu_nano/other/run.json").write_bytes(content)
    (a.folder / line_count.NAME).write_bytes(content)
    assert collected(into, a) == 0


def test_a_failed_run_comes_with_its_race_and_an_interrupted_one_stays(machines, capsys):
    a, _, into = machines
    names = [f"cpu_nano/{a.add(seed, status=status).name}" for seed, status in ((5, "failed"), (6, "aborted"))]
    assert collected(into, a) == 1
    assert f"{names[1]}: fails verify: is complete: status aborted" in capsys.readouterr().out
    assert names[0] in runs_in(into) and names[1] not in runs_in(into)


def test_what_runs_has_no_end_yet_and_comes_when_it_has(machines, capsys):
    a, _, into = machines
    a.add(5, status="killed")
    assert collected(into, a) == 0
    assert "1 run without an end" in capsys.readouterr().out and len(runs_in(into)) == 2


# ---- races


def test_a_race_is_judged_and_published_where_it_was_collected(tmp_path, monkeypatch, capsys):
    racer, other = claimed.Results(tmp_path / "a"), claimed.Results(tmp_path / "b")
    race = racer.kept_race(monkeypatch)
    other.add(7)
    assert collected(tmp_path / "all", racer, other) == 0
    copied = tmp_path / "all" / "races" / race.name
    assert (copied / "race.json").read_bytes() == (race / "race.json").read_bytes() and (copied / "race.md").is_file()
    assert failed(copied) == failed(race)
    (race / "race.json").write_text("{}")
    assert collected(tmp_path / "more", racer) == 1
    assert f"races/{race.name}: race.json is not the one in the ledger" in capsys.readouterr().out


# ---- what belongs to runs


def replayed(results, folder, replays, monkeypatch):
    """Leaves what ./run.sh replay leaves: a run in results/replays, its line in the ledger, two certificate.json."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(results.folder))
    run = run_folder.read(folder)
    replay = replays.add(run["seed"], train_s=11.0)
    record = SimpleNamespace(name=certificates.name_of(run), run=run)
    issued = certificate.impossible(record, "") | {"outcome": "identical"}
    issued["replays"] = [certificates.name_of(run_folder.read(replay))]
    with unittest.mock.patch.object(utc, "now", lambda: replays.now):
        certificate.write(issued, [folder, replay])
    assert certificates.outcome(folder) == "identical"


def audited(results, folder):
    """Leaves what ./run.sh audit leaves: a run in results/.audits, audit.json beside the record."""
    run = run_folder.read(folder)
    facts = {"run": folder.name, "kind": "random_tokens", "seed": 1, "vocab_size": 257, "val_tokens": 32768}
    facts |= {"num_alphabet": 8, "eos_frac": 0.0}
    audits = claimed.Results(results.folder / certificates.AUDITS_FOLDER)
    why = [f"it is an audit run of {folder.name} on substituted data, not a measurement"]
    changes = {"audit": facts, "validity": "invalid", "validity_reasons": why}
    audit_run = audits.add(run["seed"], train_s=12.0, change=lambda record: record.update(changes))
    kind = {"kind": "random_tokens", "outcome": "passed", "why": "", "run": f"cpu_nano/{audit_run.name}"}
    about = {"run": folder.name, "config_id": run["config_id"], "source_sha256": run["code"]["source_sha256"]}
    audit = about | {"at": "", "claimed_nats": 2.75, "outcome": "passed", "audits": [kind]}
    atomic.write_json(folder / certificates.AUDIT_FILE, audit)
    assert auditing.passed_here(results.folder, run, ["random_tokens"])


def test_certificates_and_audits_come_with_their_runs_and_stay_claims(machines, monkeypatch, capsys):
    a, b, into = machines
    first, second = (a.folder / name for name in runs_in(a.folder))
    replays = claimed.Results(a.folder / "replays")
    replayed(a, first, replays, monkeypatch)
    audited(a, first)
    assert collected(into, a, b) == 0
    assert ", 2 reruns" in capsys.readouterr().out
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(into))
    copied = into / "cpu_nano" / first.name
    assert content_of(copied) == content_of(first)
    assert certificates.outcome(copied) == "claimed: identical"  # by another machine
    run = run_folder.read(copied)  # judge --replayed reads the entries
    assert certificates.entries(certificates.name_of(run), certificates.losses_sha256(run)) == []
    assert certificates.read_audit(copied) and not auditing.passed_here(into, run, ["random_tokens"])
    for part in ("replays", certificates.AUDITS_FOLDER):
        (name,) = runs_in(a.folder / part)
        assert verification.report(into / part / name)["passed"] and ledger.read(into / part).faults == []
    before = content_of(into)
    assert collected(into, a, b) == 0 and content_of(into) == before
    replayed(a, second, replays, monkeypatch)  # of a run that was collected before
    assert collected(into, a) == 0
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(into))
    assert certificates.outcome(into / "cpu_nano" / second.name) == "claimed: identical"
    assert failed(into) == {}


def test_a_file_beside_a_run_that_is_no_certificate_stays_there(machines):
    a, _, into = machines
    folder = a.folder / runs_in(a.folder)[0]
    (folder / certificates.FILE).write_text('{"outcome": "identical"}')
    (folder / certificates.AUDIT_FILE).write_text("[" * 1000)
    assert collected(into, a) == 0
    assert not {certificates.FILE, certificates.AUDIT_FILE} & set(os.listdir(into / "cpu_nano" / folder.name))


def test_a_sweep_that_two_machines_shared_is_one(machines):
    a, b, into = machines
    points = [[f"seed={number}"] for number in range(3)]
    for place, numbers in ((a, (0, 1)), (b, (2,))):
        folder = sweep.begin(place.folder, "sweep-1a2b3c4d", ["run", "-m", "seed=0,1,2"], points, None)
        for number, name in zip(numbers, runs_in(place.folder), strict=True):
            sweep.keep(folder, number, points[number], {"folder": place.folder / name}, apart=number == 1)
        with open(folder / sweep.POINTS, "a") as file:  # of a run that is not there, and of one that lies elsewhere
            for name in ("cpu_nano/20261121T000000Z-lost", "../../a", str(place.folder / "x" / "y")):
                file.write(json.dumps({"number": 9, "overrides": ["seed=9"], "folder": name}) + "\n")
    for _ in range(2):
        assert collected(into, a, b) == 0
        (folder,) = sweep.folders(into)
        assert [(point.overrides, point.folder) for point in sweep.points(folder)] == [
            ([f"seed={number}"], into / name) for number, name in enumerate(runs_in(a.folder) + runs_in(b.folder))
        ]
        assert (folder / "sweep.html").is_file() and len(list(folder.iterdir())) == 4
    (a.folder / sweep.FOLDER / folder.name / sweep.NAME).write_text("{}")
    assert collected(into.with_name("more"), a) == 1  # the runs came, the sweep did not
    assert len(runs_in(into.with_name("more"))) == 2 and sweep.folders(into.with_name("more")) == []


def test_a_sweep_and_a_study_that_were_collected_while_they_ran_are_brought_up_to_date(machines, monkeypatch):
    a, _, into = machines
    monkeypatch.setenv("SPEEDRUN_CWD", str(a.folder.parent))
    (name, _), overrides = runs_in(a.folder), ["seed=0"]
    folder = sweep.begin(a.folder, "sweep-1a2b3c4d", ["study"], [overrides], None)
    sweep.keep(folder, 0, overrides, {"folder": a.folder / name})
    study = {"schema_version": 1, "arms": {"A": [], "B": []}, "common": [], "tune": "optim.lr", "starts": {}, "seed": 0}
    study |= {"n": 4, "alpha": 0.05, "tokens": 10, "num_trials": None, "race_id": None}
    atomic.write_json(folder / sweep.STUDY, study)
    copied = into / sweep.FOLDER / folder.name
    assert collected(into, a) == 0
    page = (copied / "sweep.html").read_bytes()
    sweep.begin(a.folder, folder.name, ["study"], [overrides, ["seed=9"]], None)
    sweep.end(folder, "1 of 2 points has no run")
    atomic.write_json(folder / sweep.STUDY, study | {"num_trials": 3, "race_id": "race-1"})
    assert collected(into, "a") == 0  # the same place, named relatively
    for file in (sweep.NAME, sweep.STUDY):
        assert (copied / file).read_bytes() == (folder / file).read_bytes()
    assert (copied / "sweep.html").read_bytes() != page and len(list(copied.glob("points*.jsonl"))) == 1
    ended = (folder / sweep.NAME).read_bytes()
    atomic.write_json(folder / sweep.NAME, {**sweep.read(folder), "started_at": "2020", "ended_at": None})
    atomic.write_json(folder / sweep.STUDY, study)
    assert collected(into, a) == 0  # an older state of it takes nothing back
    assert (copied / sweep.NAME).read_bytes() == ended and sweep.read_study(copied)["race_id"] == "race-1"


def test_records_that_were_published_without_logs_say_how_to_collect_them(tmp_path, printed):
    place = real_runs.REPO / "results/published/cpu_nano-gpt2-adamw"
    refused = [line for line in printed(collect, place, "--into", tmp_path, code=1).splitlines() if "refused" in line]
    assert len(refused) == 3 and runs_in(tmp_path) == []
    for name, line in zip(runs_in(place), refused, strict=True):
        why = "its logs/agent.log is not there (published records lack such files: use --without log)"
        assert line.endswith(f": {name}: {why}")
    assert collect.main([str(place), "--into", str(tmp_path), "--without", "log"]) == 0
    assert runs_in(tmp_path) == runs_in(place)


def test_what_no_machine_shows_alone_is_a_record_of_their_union(machines):
    """Three repeats make a record of cpu_nano; one machine made two of them, the other machine one."""
    a, b, into = machines

    def statuses(folder):
        entries = leaderboard.by_track(store.read_rows([folder]))["cpu_nano"]
        leaderboard.progression(entries, claim.track_rules("cpu_nano"), (), lambda entry: None)
        return [entry.status for entry in entries]

    assert collected(into, a, b) == 0
    assert statuses(a.folder) == ["too few runs, 2 of 3"] and statuses(b.folder) == ["too few runs, 1 of 3"]
    assert statuses(into) == ["record"]


# ---- interrupted


def killed_at(number, into, *places):
    """Collects in a fork that is killed before step `number` on the disk.  Returns whether it was killed."""
    if (pid := os.fork()) == 0:
        numbers = itertools.count(1)

        def mortal(step):
            def counted(*args, **options):
                if next(numbers) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step(*args, **options)

            return counted

        for name in ("fsync", "rename", "replace", "mkdir"):
            setattr(os, name, mortal(getattr(os, name)))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(collected(into, *places))
    return os.waitpid(pid, 0)[1] != 0


@pytest.mark.slow
def test_killed_at_any_step_and_repeated_it_is_as_if_it_had_not_been(machines, tmp_path, monkeypatch):
    a, b, into = machines
    replays = claimed.Results(a.folder / "replays")
    for number, name in enumerate(runs_in(a.folder)):
        replayed(a, a.folder / name, replays, monkeypatch)
        folder = sweep.begin(a.folder, "sweep-1a2b3c4d", ["run"], [["seed=0"], ["seed=1"]], None)
        sweep.keep(folder, number, [f"seed={number}"], {"folder": a.folder / name})
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(into))
    collected(tmp_path / "whole", a, b)  # imports, too, what the forks need
    number = num_partial = 0
    while killed_at(number := number + 17, into, a, b):  # each time it comes further
        runs = [name for name in runs_in(into) if "replays" not in name] if into.is_dir() else []
        assert ledger.read(into).faults == []
        for name in runs:
            original = content_of((a.folder if (a.folder / name).is_dir() else b.folder) / name)
            assert content_of(into / name).items() <= original.items()
            assert original.keys() - content_of(into / name).keys() <= {certificates.FILE}
        num_partial += 0 < len(runs) < 3
    assert number > 34 and num_partial > 0
    assert collected(into, a, b) == 0
    assert failed(into) == {}
    made_alike = ("ledger.jsonl", ".ledger.count", "sweep.html")  # their times differ, and which join came first
    for leftover in into.rglob(".*.tmp"):  # of a write that was cut off
        leftover.unlink()
    once, whole = (content_of(folder) for folder in (into, tmp_path / "whole"))
    assert once.keys() == whole.keys() and not (into / ".collecting").exists()
    assert [name for name in whole if once[name] != whole[name] and not name.endswith(made_alike)] == []


def test_two_processes_do_not_collect_into_one_folder_at_once(machines, capsys):
    a, _, into = machines
    with collecting._alone(into):
        assert collected(into, a) == 1
    assert f"process {os.getpid()} is collecting into it" in capsys.readouterr().err


# ---- places


@pytest.mark.parametrize(
    "place, why",
    [
        ("nowhere", "nowhere: is not a folder: name a results folder"),
        ("gopher://somewhere/results", "gopher://somewhere/results: cannot be reached"),
    ],
)
def test_a_place_that_is_none_is_refused_in_a_line(tmp_path, place, why, capsys):
    assert collected(tmp_path / "all", place) == 1
    assert why in capsys.readouterr().err


def test_a_scheme_whose_package_is_missing_says_which(tmp_path, monkeypatch, capsys):
    import fsspec

    def absent(*args, **options):
        raise ImportError

    monkeypatch.setattr(fsspec, "filesystem", absent)
    monkeypatch.setattr(fsspec.core, "url_to_fs", absent)
    assert collected(tmp_path / "all", "me@node:results") == 1
    assert collected(tmp_path / "all", "s3://bucket/results") == 1
    err = capsys.readouterr().err
    assert "me@node:results: needs the package sshfs: pip install sshfs" in err and "pip install s3fs" in err


def test_runs_come_from_an_s3_compatible_store(machines, monkeypatch, capsys):
    pytest.importorskip("s3fs", reason="pip install s3fs 'moto[server,s3]'")
    server = pytest.importorskip("moto.server", reason="pip install s3fs 'moto[server,s3]'")
    a, b, into = machines
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    store = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    try:
        host, port = store.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import s3fs

        bucket = s3fs.S3FileSystem()
        bucket.mkdir("lab")
        folder = sweep.begin(a.folder, "sweep-1a2b3c4d", ["run"], [["seed=0"]], None)
        sweep.keep(folder, 0, ["seed=0"], {"folder": a.folder / runs_in(a.folder)[0]})
        bucket.put(str(a.folder), "lab/a", recursive=True)
        assert collected(into, "s3://lab/a", b) == 0
        assert failed(into) == {} and len(runs_in(into)) == 3
        assert sweep.points(into / sweep.FOLDER / folder.name)[0].folder == into / runs_in(a.folder)[0]
        bucket.rm(f"lab/a/{runs_in(a.folder)[0]}/steps.csv")
        again = into.with_name("again")
        assert collected(again, "s3://lab/a", b) == 1
        assert "its steps.csv is not there" in capsys.readouterr().out and len(runs_in(again)) == 2
        assert collected(again, "s3://lab/nothing") == 1
        assert "s3://lab/nothing: has no ledger.jsonl" in capsys.readouterr().err
    finally:
        store.stop()


SSH_SERVER = """
import asyncio, asyncssh
class Anyone(asyncssh.SSHServer):
    def begin_auth(self, username):
        return False
async def serve():
    key = asyncssh.generate_private_key("ssh-ed25519")
    options = {"server_host_keys": [key], "server_factory": Anyone, "sftp_factory": True}
    server = await asyncssh.listen("127.0.0.1", 0, **options)
    print(server.get_port(), key.export_public_key().decode(), flush=True)
    await server.wait_closed()
asyncio.run(serve())
"""


def test_runs_come_over_ssh(machines, monkeypatch, tmp_path):
    pytest.importorskip("sshfs", reason="pip install sshfs")
    a, b, into = machines
    with subprocess.Popen([sys.executable, "-c", SSH_SERVER], stdout=subprocess.PIPE, text=True) as server:
        port, key = server.stdout.readline().split(maxsplit=1)
        (tmp_path / ".ssh").mkdir()
        (tmp_path / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}")
        (tmp_path / ".ssh" / "config").write_text(f"Host node\n  HostName 127.0.0.1\n  Port {port}\n")
        monkeypatch.setenv("HOME", str(tmp_path))
        try:
            assert collected(into, f"me@node:{a.folder}", b) == 0
            assert collected(into.with_name("again"), f"ssh://me@127.0.0.1:{port}{a.folder}") == 0
            assert failed(into) == {} and len(runs_in(into)) == 3
        finally:
            server.terminate()
