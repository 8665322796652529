"""The ledger: every started run is in it, and what was changed or removed shows."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import kept_records
import pytest

from bench.base import atomic
from bench.cli import main as program
from bench.record import ledger, line_count


def fill(folder, count=4):
    return [ledger.append(folder, "start", run=f"track/{number}", race=None) for number in range(count)]


def lines_of(folder):
    return (folder / ledger.NAME).read_bytes().split(b"\n")[:-1]


def rewritten(line):
    """A line of another run, with the hash that it then has."""
    entry = json.loads(line) | {"run": "track/9"}
    return json.dumps(entry | {"sha256": ledger.digest(entry)}).encode()


def test_each_line_names_the_one_before_it(tmp_path):
    assert (ledger.read(tmp_path).lines, ledger.read(tmp_path).faults, ledger.find(tmp_path)) == ([], [], None)
    lines = fill(tmp_path)
    assert [line["prev"] for line in lines] == [None, *(line["sha256"] for line in lines[:-1])]
    assert (ledger.read(tmp_path).lines, ledger.read(tmp_path).faults) == (lines, [])


@pytest.mark.parametrize("event, facts", [("look", {}), ("end", {}), ("start", {"race": {"race_id": "r"}})])
def test_what_runs_in_a_folder_that_was_moved_away_begins_no_other_ledger_there(tmp_path, event, facts):
    with pytest.raises(FileNotFoundError, match="is gone, and this line follows others of it"):
        ledger.append(tmp_path / "results", event, **facts)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path, kind):
    """A results folder that came from somewhere else may have either in the ledger's place."""
    (tmp_path / "victim").write_text("mine")
    path = tmp_path / "ledger.jsonl"
    path.symlink_to("victim") if kind == "link" else os.mkfifo(path)
    with pytest.raises(OSError, match="ledger.jsonl: (is a link|it is not a regular file)"):
        ledger.append(tmp_path, "look")
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda lines: lines[:1] + lines[2:], "line 2 names a line before it that is not there"),
        (lambda lines: [lines[0], lines[1].replace(b"track/1", b"track/9"), *lines[2:]], "line 2 was changed"),
        (lambda lines: [*lines[:3], lines[2], lines[3]], "line 4 is there twice"),
        (lambda lines: [lines[0], b"{}", *lines[2:]], "line 3 names a line before it that is not there"),
        (lambda lines: [*lines[:3], lines[3][:40]], "line 4, the last, is damaged"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line 1 names a line before it that is not there"),
        (lambda lines: [lines[0], rewritten(lines[1]), *lines[2:]], "line 3 names a line before it that is not there"),
    ],
)
def test_a_line_that_was_removed_changed_doubled_or_moved_shows(tmp_path, harm, message):
    fill(tmp_path)
    (tmp_path / ledger.NAME).write_bytes(b"\n".join(harm(lines_of(tmp_path))) + b"\n")
    assert message in " ".join(ledger.read(tmp_path).faults)


def test_a_ledger_that_is_moved_or_removed_as_a_whole_is_counted_rightly(tmp_path):
    fill(tmp_path / "a", 2)
    (tmp_path / "a").rename(tmp_path / "b")
    fill(tmp_path / "b", 1)
    fill(tmp_path / "a", 1)  # a new one where another was
    assert [line["number"] for line in ledger.read(tmp_path / "b").lines] == [1, 2, 3]
    assert [line["number"] for line in ledger.read(tmp_path / "a").lines] == [1]


@pytest.mark.parametrize("how", ["is empty", "is gone"])
def test_a_destroyed_ledger_is_said_by_who_shows_its_runs_and_before_the_next(results, how, capsys):
    path = results / ledger.NAME
    kept_records.add(results, 0)
    fill(results, 3)
    commands = (["table"], ["report", str(results)], ["run", "--dry-run", "track=free", "experiment=smoke"])
    for command in commands:
        assert program.main(command) == 0 and "ledger" not in capsys.readouterr().err
    path.unlink() if how == "is gone" else path.write_bytes(b"")
    for command in commands:
        assert program.main(command) == 0
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "ledger" in line]
        assert f"ledger.jsonl: {how}, and had 3 lines: restore it" in line
    fill(results, 1)
    assert line_count.lost(path) is None


def test_a_ledger_that_never_had_the_runs_beside_its_place_is_not_missed(results):
    kept_records.add(results, 0)
    (run_json,) = results.glob("*/*/run.json")
    fill(results, 3)
    (results / ledger.NAME).unlink()
    (results / ledger.NAME).symlink_to(results / "nothing")
    assert "is gone, and had 3 lines" in line_count.lost(results / ledger.NAME)
    run_json.write_text(json.dumps(json.loads(run_json.read_text()) | {"provenance": "imported"}))
    assert line_count.lost(results / ledger.NAME) is None


def test_lines_of_an_older_program_and_a_kill_before_the_count_was_kept_leave_no_gap(tmp_path, monkeypatch):
    fill(tmp_path, 2)
    with monkeypatch.context() as older:
        older.setattr(line_count, "following", lambda *_: {})
        older.setattr(line_count, "keep", lambda *_: None)
        older.setattr(ledger.atomic, "write_json", lambda *_, **__: None)
        fill(tmp_path, 2)
    with monkeypatch.context() as killed:
        killed.setattr(ledger.atomic, "write_json", lambda *_, **__: None)
        fill(tmp_path, 1)
    fill(tmp_path, 1)
    assert (ledger.read(tmp_path).faults, ledger.read(tmp_path).recounted) == ([], [])


def test_a_count_that_cannot_be_kept_stops_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    (tmp_path / line_count.NAME).mkdir()
    fill(tmp_path, 3)
    assert (len(ledger.read(tmp_path).lines), ledger.read(tmp_path).faults) == (3, [])


def test_times_that_go_back_along_the_chain_show_and_clocks_of_nodes_may_differ_a_little(tmp_path, monkeypatch):
    times = ["2026-11-21T08:00:00.000Z", "2026-11-21T07:51:00.000Z", "2026-11-21T07:49:00.000Z", "2030-01-01T00:00:00Z"]
    for at in [*times, "2020-01-01T00:00:00.000Z"]:
        monkeypatch.setattr(ledger.utc, "now", lambda at=at: at)
        fill(tmp_path, 1)
    made_up = "a clock was set back, or lines were made up"
    assert ledger.read(tmp_path).faults == [
        f"line 3 is of {times[2]}, but follows line 1 of {times[0]}: {made_up}",
        "line 5 is of 2020-01-01T00:00:00.000Z, but follows line 4 of 2030-01-01T00:00:00.000Z: " + made_up,
    ]


def test_a_line_that_a_power_cut_left_half_is_ended_and_the_chain_goes_on(tmp_path):
    fill(tmp_path, 2)
    path = tmp_path / ledger.NAME
    path.write_bytes(path.read_bytes() + b'{"at":"2026-')
    assert ledger.read(tmp_path).faults == ["line 3, the last, is damaged or unfinished"]
    ledger.append(tmp_path, "start", run="track/2", race=None)
    ledger.append(tmp_path, "start", run="track/3", race=None)
    assert ledger.read(tmp_path).faults == []
    assert [line["event"] for line in ledger.read(tmp_path).lines] == ["start", "start", "damaged", "start", "start"]


def test_a_last_line_longer_than_a_block_is_read_whole(tmp_path):
    first = ledger.append(tmp_path, "plan", arms="x" * 10_000)
    assert ledger.append(tmp_path, "start", run="track/0", race=None)["prev"] == first["sha256"]
    assert ledger.read(tmp_path).faults == []


def test_a_ledger_that_is_one_hole_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger.plain_file, "MAX_LINES_BYTES", 2**20)
    fill(tmp_path, 1)
    os.truncate(tmp_path / ledger.NAME, 2**42)
    with pytest.raises(OSError, match=r"its last line has over 1,048,576 bytes: restore it from a copy"):
        ledger.append(tmp_path, "start", run="track/0", race=None)
    assert (tmp_path / ledger.NAME).stat().st_size == 2**42


def test_two_clones_that_both_appended_may_be_joined_line_by_line(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    fill(here, 2)
    common = (here / ledger.NAME).read_bytes()
    shutil.copytree(here, there)
    for clone in (here, there):
        ledger.append(clone, "start", run=f"track/{clone.name}", race=None)
    (here / ledger.NAME).write_bytes(
        (here / ledger.NAME).read_bytes() + (there / ledger.NAME).read_bytes()[len(common) :]
    )
    assert ledger.read(here).faults == []
    assert len(ledger.read(here).runs) == 4


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    fill(tmp_path, 2)
    before = (tmp_path / ledger.NAME).read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ledger.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        ledger.append(tmp_path, "start", run="track/2", race=None)
    assert (tmp_path / ledger.NAME).read_bytes() == before


def test_a_ledger_that_is_replaced_while_a_writer_waits_gets_its_line(tmp_path):
    """A join that took so long that its turn was taken away would replace it."""
    first = ledger.append(tmp_path, "start", run="t/1", race=None)
    path = tmp_path / ledger.NAME
    with open(path, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        writer = threading.Thread(target=ledger.append, args=(tmp_path, "start"), kwargs={"run": "t/2", "race": None})
        writer.start()
        deadline_s = time.monotonic() + 10
        while not (tmp_path / ledger.TURN).exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.1)  # it has opened the file, and waits for the lock
        atomic.write_bytes(path, path.read_bytes())
    writer.join()
    book = ledger.read(tmp_path)
    assert book.faults == [] and list(book.runs) == ["t/1", "t/2"] and book.lines[1]["prev"] == first["sha256"]


def test_the_lines_of_a_race_are_its_plan_its_runs_its_looks_and_its_end(tmp_path):
    ledger.append(tmp_path, "plan", race_id="r")
    ledger.append(tmp_path, "start", run="t/1", race={"race_id": "r"})
    ledger.append(tmp_path, "start", run="t/2", race=None)
    ledger.append(tmp_path, "end", run="t/1", status="complete")
    ledger.append(tmp_path, "end", run="t/2", status="failed")
    ledger.append(tmp_path, "look", race_id="other")
    ledger.append(tmp_path, "race_end", race_id="r")
    lines = ledger.read(tmp_path).race_lines("r")
    assert [line["event"] for line in lines] == ["plan", "start", "end", "race_end"]
    assert ledger.read(tmp_path).runs["t/2"]["end"]["status"] == "failed"


APPENDING = """
import sys, fcntl
def none(*_): raise OSError(38, "no locks here")
if sys.argv[3] == "without locks": fcntl.flock = none
from bench.cli import main as program
from bench.record import ledger, line_count
for number in range(25):
    ledger.append(sys.argv[1], "start", run=f"track/{sys.argv[2]}-{number}", race=None)
"""


@pytest.mark.parametrize("file_system", ["with locks", "without locks"])
def test_launchers_at_once_take_turns_and_lose_no_line(tmp_path, repo, file_system):
    command = [sys.executable, "-c", APPENDING, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number), file_system], cwd=repo) for number in range(4)]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    lines = ledger.read(tmp_path)
    assert lines.faults == [] and len(lines.runs) == 100
    assert [line["prev"] for line in lines.lines[1:]] == [line["sha256"] for line in lines.lines[:-1]]  # no fork
    assert {path.name for path in tmp_path.iterdir()} == {ledger.NAME, line_count.NAME}


@pytest.mark.parametrize("when_s", [None, 4e9], ids=["before", "before the clock was set back"])
def test_the_turn_of_a_writer_that_was_killed_is_taken_away(tmp_path, monkeypatch, when_s):
    monkeypatch.setattr(atomic, "STALE_S", 0.2)
    (tmp_path / ledger.TURN).touch()
    os.utime(tmp_path / ledger.TURN, (when_s, when_s) if when_s else None)
    (line,) = fill(tmp_path, 1)
    assert ledger.read(tmp_path).lines == [line]
    assert {path.name for path in tmp_path.iterdir()} == {ledger.NAME, line_count.NAME}
