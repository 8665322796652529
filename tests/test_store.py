"""The store of run folders: as fast as it may be, and never believed when the folders say something else."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import weakref
import zlib
from pathlib import Path

import pytest
from comparing import a_run, write

from bench.base import atomic
from bench.base.paths import REPO
from bench.machine import processes
from bench.record import configs, ledger, row_reader, rows, run_folder, store

NUM_RUNS = 60


@pytest.fixture
def results(tmp_path):
    """60 run folders, older than the store's caution."""
    for number in range(NUM_RUNS):
        settle(write(tmp_path, a_run("A", 10.0 + number, number)))
    return tmp_path


def settle(folder):
    """As if run.json had been written an hour ago; its status change (ctime) stays now, so the test waits for that."""
    hour_ago_s = time.time() - 3600
    os.utime(folder / "run.json", (hour_ago_s, hour_ago_s))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(row_reader, "SETTLED_S", -1.0)  # tests of the waiting itself set it back


def read_by_name(results, on_error=None):
    return {os.path.basename(folder): row for folder, row in store.read_rows([results], on_error)}


def store_file(results):
    return results / store.NAME


def reads(monkeypatch):
    """Names of the folders that are really read."""
    folders = []
    original = row_reader.read
    monkeypatch.setattr(row_reader, "read", lambda place: folders.append(place[1]) or original(place))
    return folders


def forge(path, statement):
    """Changes a store as somebody would who knows how it is made."""
    db = sqlite3.connect(path)
    db.execute(statement)
    db.commit()
    db.close()
    content = bytearray(path.read_bytes())
    content[68:72] = zlib.crc32(content[72:]).to_bytes(4, "big")
    path.write_bytes(content)


def test_a_folder_whose_name_is_not_utf_8_is_reported_and_hides_no_other(results):
    true, told = read_by_name(results), []
    (folder, *_) = (path for path in results.iterdir() if path.is_dir())
    os.mkdir(os.fsencode(folder) + b"/\xff")
    for _ in range(2):
        assert len(store.read_rows([results], told.append)) == len(true)
    (results / os.fsdecode(os.fsencode(folder) + b"/\xff/run.json")).touch()
    assert len(store.read_rows([*folder.iterdir()], told.append))  # named one by one, as export does
    assert len(told) == 3 and all(why.endswith("\\xff: its name is not UTF-8: give it another") for why in told)


def test_links_to_runs_and_to_folders_of_runs_are_named_each_time(results, tmp_path):
    (folder, *_) = (path for path in results.iterdir() if path.is_dir())
    (run, *_) = folder.iterdir()
    others, told = tmp_path / "others", []
    shutil.copytree(folder, others / "cpu_nano")
    targets = {results / "track": others / "cpu_nano", folder / "run": run, results / "no": REPO / "conf"}
    for link, target in targets.items():
        link.symlink_to(target)
    for _ in range(2):
        store.read_rows([results], told.append)
    expected = {f"{results / name}: is a link, which is not followed" for name in ("track", f"{folder.name}/run")}
    assert {why.rpartition(": name it")[0] for why in told} == expected and len(told) == 4


@pytest.mark.parametrize("whose", ["anybody's to write", "a group's to write", "another user's"])
def test_a_store_that_somebody_else_may_have_forged_is_not_believed_and_made_anew(results, whose):
    true = read_by_name(results)
    path = store_file(results)
    forge(path, "UPDATE _rows SET val_loss = 0.001")
    assert {row["val_loss"] for row in read_by_name(results).values()} == {0.001}  # it is well-formed, and believed
    if whose == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 12345, -1)
    else:
        path.chmod(0o666 if "anybody" in whose else 0o664)
    assert read_by_name(results) == true
    assert path.stat().st_uid == os.geteuid() and path.stat().st_mode & 0o022 == 0  # rebuilt
    assert read_by_name(results) == true


def as_user(uid, work):
    """Calls work() in a process of that user's and returns its value."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setuid(uid)
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as reply:
        content = reply.read()
    os.waitpid(pid, 0)
    return json.loads(content)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_second_users_first_call_takes_the_owners_store_and_leaves_it_alone(results, monkeypatch):
    with tempfile.TemporaryDirectory() as base:  # pytest's own folders are closed to others
        folder = Path(base, "results")
        shutil.copytree(results, folder)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 12345, 12345)
        os.chmod(base, 0o777)
        folder.chmod(0o755)
        _read_by_several_users(folder, monkeypatch, base)


def _read_by_several_users(folder, monkeypatch, base):
    def losses():
        monkeypatch.setenv("XDG_CACHE_HOME", f"{base}/cache-{os.geteuid()}")
        read_again = reads(monkeypatch)
        rows = read_by_name(folder)
        return [len(read_again), sorted(row["val_loss"] for row in rows.values())]

    num_read, owner_reads = as_user(12345, losses)
    assert num_read == NUM_RUNS and store_file(folder).stat().st_uid == 12345
    content = store_file(folder).read_bytes()
    assert as_user(23456, losses) == [0, owner_reads]
    for number in range(30):  # what the second user reads is kept in a cache of theirs
        settle(write(folder, a_run("B", 5.0, 100 + number)))
    assert as_user(23456, losses)[0] == 30
    assert as_user(23456, losses)[0] == 0
    assert store_file(folder).read_bytes() == content
    os.chown(store_file(folder), 23456, 23456)  # put there by somebody who does not own the folder
    assert as_user(34567, losses)[0] == NUM_RUNS + 30


@pytest.mark.parametrize(
    "record, config, why",
    [
        ({"instrument_summaries": {"telemetry": {"energy_j": [None, {}]}}}, "", "energy_j=[None, {}] is not one value"),
        ({}, '"a\\0b": 3\n', "config.yaml: the name of a setting has the character 0"),
        ({}, 'value: "a\\0b"\n', None),  # a value may have it
    ],
)
def test_what_no_column_can_hold_excludes_its_record_alone(results, record, config, why):
    folder, messages = write(results, a_run("A", 10.0, 70) | record), []
    with open(folder / "config.yaml", "a") as file:
        file.write(config)
    rows = read_by_name(results, messages.append)
    assert (folder.name in rows, len(rows)) == (why is None, NUM_RUNS + (why is None))
    assert [line.startswith(f"{folder}: {why}") for line in messages] == [True] * (why is not None)


def test_a_store_is_its_owners_alone_to_write_whatever_the_umask(results):
    before = os.umask(0o002)
    try:
        read_by_name(results)
    finally:
        os.umask(before)
    assert store_file(results).stat().st_mode & 0o777 == 0o644


def test_rows_from_the_store_are_the_rows_of_the_records(results, monkeypatch):
    folder = sorted((results / "cpu_nano").glob("2026*"))[5]
    write(folder.parent.parent, a_run("A", 10.0, 70, val_loss=4))  # an int among floats, and equal to some
    write(folder.parent.parent, a_run("A", 10.0, 71, val_loss=4.0))
    cold = read_by_name(results)
    assert store_file(results).is_file()
    read_again = reads(monkeypatch)
    warm = read_by_name(results)
    assert read_again == []
    assert (
        warm
        == cold
        == {
            folder.name: rows.row_of(run_folder.read(folder), configs.read(str(folder)))
            for folder in (results / "cpu_nano").iterdir()
            if folder.is_dir()
        }
    )
    types = [{name: type(value) for name, value in row.items()} for row in (*warm.values(), *cold.values())]
    assert types[: len(warm)] == types[len(warm) :]  # 1 is not 1.0 is not True


def test_a_change_that_keeps_size_and_time_of_the_file_is_seen(results):
    """An edited byte, its time stamp put back: the time of the status change cannot be put back."""
    read_by_name(results)
    folder = sorted((results / "cpu_nano").glob("2026*"))[3]
    path = folder / "run.json"
    stat = path.stat()
    text = path.read_text()
    assert '"train_s": 13.0' in text
    time.sleep(0.02)  # a tick of the file system's clock
    path.write_text(text.replace('"train_s": 13.0', '"train_s": 73.0'))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert read_by_name(results)[folder.name]["train_s"] == 73.0


def test_a_run_written_just_now_is_not_trusted_yet(results, monkeypatch):
    monkeypatch.setattr(row_reader, "SETTLED_S", 2.0)  # all of these were written in the last second
    read_by_name(results)
    read_again = reads(monkeypatch)
    read_by_name(results)
    assert len(read_again) == NUM_RUNS


def test_new_and_removed_runs_are_seen(results):
    read_by_name(results)
    gone = sorted((results / "cpu_nano").glob("2026*"))[0]
    for path in sorted(gone.rglob("*"), reverse=True):
        path.unlink()
    gone.rmdir()
    new = write(results, a_run("B", 5.0, 100))
    rows = read_by_name(results)
    assert gone.name not in rows
    assert rows[new.name]["train_s"] == 5.0
    assert len(rows) == NUM_RUNS


def test_a_running_run_is_read_every_time(results, monkeypatch):
    launcher = {
        "pid": os.getpid(),
        "start_ticks": processes.start_ticks(os.getpid()),
        "boot_id_hash": processes.boot_id_hash(),
    }
    folder = write(results, a_run("B", 5.0, 100, status="running", launcher=launcher))
    assert read_by_name(results)[folder.name]["status"] == "running"
    read_again = reads(monkeypatch)
    read_by_name(results)
    assert read_again == [folder.name]


def without_its_end(content):
    return content[:-5000]


def with_another_byte(content):
    at = content.index(b"cpu_nano")
    return content[:at] + b"X" + content[at + 1 :]


def other(content):
    return b"SQLite format 3\0" + bytes(4080)


@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE TRIGGER harm BEFORE INSERT ON _rows BEGIN SELECT RAISE(FAIL, 'x'); END"],
        ["DROP INDEX _pending"],
        ["ALTER TABLE _rows ADD COLUMN more"],
        [
            "ALTER TABLE _facts RENAME TO _kept",
            "CREATE VIEW _facts AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
            " SELECT * FROM _kept UNION ALL SELECT i, i FROM n",
        ],
    ],
)
def test_a_store_with_other_tables_triggers_or_views_is_not_believed(results, statements):
    expected = read_by_name(results)
    for statement in ["UPDATE _rows SET val_loss = 0.001", *statements]:
        forge(store_file(results), statement)
    assert read_by_name(results) == expected


def test_a_store_of_a_terabyte_is_not_read(results):
    expected = read_by_name(results)
    os.truncate(store_file(results), 2**40)
    assert read_by_name(results) == expected and store_file(results).stat().st_size < 2**24


@pytest.mark.parametrize("damage", [bytes.upper, without_its_end, with_another_byte, other, lambda _: b"", None])
def test_a_damaged_or_deleted_store_costs_only_time(results, damage, monkeypatch):
    expected = read_by_name(results)
    if damage is None:
        store_file(results).unlink()
    else:
        store_file(results).write_bytes(damage(store_file(results).read_bytes()))
    assert read_by_name(results) == expected
    read_again = reads(monkeypatch)
    assert read_by_name(results) == expected
    assert read_again == []  # and it was made anew


@pytest.mark.parametrize("how", ["made by other code", "copied with its runs"])
def test_a_store_of_other_code_or_of_another_place_counts_for_nothing(results, how, tmp_path_factory, monkeypatch):
    read_by_name(results)
    folder = results
    if how == "made by other code":
        monkeypatch.setattr(row_reader, "code", lambda: "other")
    else:  # other inodes, other times
        folder = tmp_path_factory.mktemp("copy") / "results"
        shutil.copytree(results, folder)
    read_again = reads(monkeypatch)
    read_by_name(folder)
    assert len(read_again) == NUM_RUNS


def test_asking_for_some_runs_keeps_what_is_known_of_the_others(results, monkeypatch):
    read_by_name(results)
    folders = sorted((results / "cpu_nano").glob("2026*"))
    for folder in folders[:50]:
        (folder / "run.json").write_text((folder / "run.json").read_text() + "\n")
    assert len(store.read_rows(folders[:55])) == 55
    read_again = reads(monkeypatch)
    assert len(read_by_name(results)) == NUM_RUNS
    assert read_again == []


def test_a_folder_that_cannot_be_written_to_is_read_all_the_same(results, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError

    monkeypatch.setattr(store.atomic, "write_text", refuse)
    assert len(read_by_name(results)) == NUM_RUNS


def test_what_a_killed_writer_left_is_removed_by_a_later_one(results):
    old, new = (results / f".{store.NAME}.{number}.abc.tmp" for number in (1, 2))
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    read_by_name(results)
    assert store_file(results).is_file() and new.exists() and not old.exists()


def test_few_runs_leave_no_store_behind(tmp_path):
    for number in range(store.MIN_RUNS - 1):
        write(tmp_path, a_run("A", 10.0, number))
    store.read_rows([tmp_path])
    assert not store_file(tmp_path).exists()


def test_a_broken_run_is_reported_and_skipped_cold_and_warm(results):
    broken = results / "cpu_nano" / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    for _ in range(2):
        messages = []
        assert len(read_by_name(results, messages.append)) == NUM_RUNS
        assert len(messages) == 1
        assert "broken" in messages[0]


def test_a_path_that_is_no_folder_is_the_users_mistake(tmp_path):
    with pytest.raises(ValueError, match="is not a folder of runs"):
        store.read_rows([tmp_path / "nothing"])


def change(folder, **changes):
    """Another final run.json, as a run that was resumed leaves it: renamed into its place."""
    run = json.loads((folder / "run.json").read_text())
    atomic.write_json(folder / "run.json", run | changes, durable=False)


def matching(results, condition):
    return {os.path.basename(folder) for folder in store.opened([results]).rows(condition)}


def test_a_run_that_was_resumed_is_found_by_a_condition_that_its_kept_row_does_not_meet(results):
    folder = sorted((results / "cpu_nano").glob("2026*"))[4]
    ledger.append(results, "start", run=ledger.name_of(results, folder))
    change(folder, status="failed")
    read_by_name(results)
    assert matching(results, "status = 'failed'") == {folder.name}
    change(folder, status="complete")
    ledger.append(results, "end", run=ledger.name_of(results, folder))
    assert len(matching(results, "status = 'complete'")) == NUM_RUNS


def test_a_changed_ledger_makes_every_row_be_compared(results):
    folder = sorted((results / "cpu_nano").glob("2026*"))[4]
    ledger.append(results, "plan")
    read_by_name(results)
    change(folder, status="failed")
    assert matching(results, "status = 'failed'") == set()  # nobody said so
    assert len(matching(results, "status = 'complete'")) == NUM_RUNS - 1  # and yet no row is shown that is not true
    (results / ledger.NAME).write_text((results / ledger.NAME).read_text().replace("plan", "look"))
    assert matching(results, "status = 'failed'") == {folder.name}


@pytest.mark.parametrize("copied", ["", "cpu_nano"])
def test_a_copy_in_the_place_of_the_folder_makes_every_row_be_compared(results, tmp_path_factory, copied):
    """Restored from elsewhere, store and all: what it holds is of other files."""
    read_by_name(results)
    other = tmp_path_factory.mktemp("other") / "copy"
    shutil.copytree(results / copied, other, symlinks=True)
    (folder,) = other.rglob("20261121T030400Z-*")
    change(folder, status="failed")
    (results / copied).rename(other.parent / "old")
    other.rename(results / copied)
    assert matching(results, "status = 'failed'") == {folder.name}


def test_settings_are_columns_with_types(results):
    """An int and a float make a number, a number and a word both, and what no run has is no column."""
    for number, (lr, betas, compiled) in enumerate([("1", "[0.9, 0.95]", "true"), ("auto", "[0.8, 0.95]", "max")]):
        folder = write(results, a_run("B", 5.0, 100 + number))
        text = (folder / "config.yaml").read_text().replace("lr: 0.003", f"lr: {lr}\n  mine: {betas}")
        (folder / "config.yaml").write_text(text.replace("model:\n", f"model:\n  mine: {compiled}\n"))
    both = store.opened([results])
    kinds = {name: both.settings[name] for name in ("optim.lr", "optim.mine", "model.mine", "optim.weight_decay")}
    assert kinds == {"optim.lr": "ANY", "optim.mine": "JSON", "model.mine": "ANY", "optim.weight_decay": "REAL"}
    query = 'SELECT "optim.lr", "optim.mine", "model.mine" FROM runs GROUP BY 1, 2, 3 ORDER BY 1'
    assert both.db.execute(query).fetchall() == [
        (0.003, None, None),
        (1, "[0.9,0.95]", "true"),
        ("auto", "[0.8,0.95]", "max"),
    ]


def test_any_sqlite_program_reads_the_file(results):
    read_by_name(results)
    db = sqlite3.connect(f"file:{store_file(results)}?mode=ro", uri=True)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    query = "SELECT count(*), max(train_s), min(\"optim.lr\") FROM runs WHERE model = 'gpt2'"
    assert db.execute(query).fetchone() == (NUM_RUNS, 10.0 + NUM_RUNS - 1, 0.003)
    assert db.execute("SELECT folder FROM runs ORDER BY 1").fetchone()[0].startswith("cpu_nano/20261121T030000Z-x-aaa")
    db.close()


def test_runs_of_two_results_folders_are_one_database(results, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write(other, a_run("B", 5.0, 100))
    ledger.append(other, "plan")
    both = store.opened([results, other])
    assert both.db.execute("SELECT count(*), min(train_s) FROM runs").fetchone() == (NUM_RUNS + 1, 5.0)
    assert [row["config_id"] for row in both.rows("train_s < 10").values()] == ["bbbbbbbb"]


def test_a_store_that_nobody_holds_closes_its_connection_at_once(tmp_path):
    """It does not wait for the garbage collector, from which row_reader keeps all that exists once rows are read."""
    write(tmp_path, a_run("A", 10.0, 0))
    opened = store.opened([tmp_path])
    connection, gone = opened.db, weakref.ref(opened)
    del opened
    assert gone() is None
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        connection.execute("SELECT 1")


def test_a_number_that_is_none_is_an_empty_cell_of_a_listing(tmp_path):
    run = a_run("A", 10.0, 0)
    run["instrument_summaries"] = {"telemetry": {"by_device": {"cpu": {"slowed_frac": "x"}}}}
    write(tmp_path, run)
    write(tmp_path, a_run("A", 11.0, 1))
    listed = store.opened([tmp_path]).listing()
    assert [(row["throttled_frac"], row["train_s"]) for row in listed] == [(None, 10.0), (None, 11.0)]


WRITER = """
import itertools, json, os, sys, time
from pathlib import Path
from comparing import a_run
from bench.base import atomic
from bench.record import ledger, row_reader, store
results, number = Path(sys.argv[1]), int(sys.argv[2])
store.NUM_STALE_KEPT, store.MIN_RUNS, row_reader.SETTLED_S = 0, 1, 0.05
for count in itertools.count():
    seed = number * 1000 + count
    run = a_run("A", 10.0, 0, seed)
    folder = results / "cpu_nano" / run["run_id"]
    folder.mkdir(parents=True)
    name = ledger.name_of(results, folder)
    ledger.append(results, "start", run=name)
    atomic.write_json(folder / "run.json", run | {"status": "failed", "failure": None}, durable=False)
    ledger.append(results, "end", run=name, status="failed")
    time.sleep(0.1)
    run["metrics"]["val_loss"] = 4.0 + seed / 1e6
    ledger.append(results, "resume", run=name)
    atomic.write_json(folder / "run.json", run, durable=False)
    ledger.append(results, "end", run=name, status="complete")
    if store.opened([results]).rows("run_id = ? AND status = 'complete'", [run["run_id"]]).keys() != {str(folder)}:
        sys.exit("its own run was not found")
    for _, row in store.read_rows([results]):
        if row["status"] == "complete" and row["val_loss"] != 4.0 + row["seed"] / 1e6:
            sys.exit(f"a wrong row: {row['run_id']} {row['val_loss']}")
"""


@pytest.mark.slow
def test_eight_writers_some_of_them_killed_leave_no_wrong_row(tmp_path, repo, monkeypatch):
    """Each writes runs, resumes them past the ledger, saves a store after each of them, and looks at all rows."""
    env = os.environ | {"PYTHONPATH": f"{repo}:{repo / 'tests'}"}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number)], env=env, stderr=subprocess.PIPE) for number in range(8)]
    lines, deadline_s = tmp_path / ledger.NAME, time.monotonic() + 200
    for number in range(8, 17):
        wanted = 12 * (number - 7)  # lines, four a run
        while not lines.exists() or lines.read_bytes().count(b"\n") < wanted:
            assert time.monotonic() < deadline_s, "the writers are too slow"
            for writer in writers:
                assert writer.poll() is None, writer.stderr.read()
            time.sleep(0.02)
        victim = writers.pop(0)
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        if number < 16:
            writers.append(subprocess.Popen([*command, str(number)], env=env, stderr=subprocess.PIPE))
    for writer in writers:
        assert writer.poll() is None, writer.stderr.read()
        writer.kill()
        writer.communicate()
    folders = [folder for folder in (tmp_path / "cpu_nano").iterdir() if (folder / "run.json").is_file()]
    true = {folder.name: rows.row_of(run_folder.read(folder), configs.read(str(folder))) for folder in folders}
    read_again = reads(monkeypatch)
    assert read_by_name(tmp_path) == true
    assert len(read_again) < len(true)  # the rest is of a store that some writer left whole
    done = [name for name, row in true.items() if row["status"] == "complete"]
    assert {*store.opened([tmp_path]).rows("status = 'complete'")} == {
        str(tmp_path / "cpu_nano" / name) for name in done
    }
    assert done
