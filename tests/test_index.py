"""The index of run folders: as fast as it may be, and never believed when the folders say something else."""

import gzip
import itertools
import json
import os
import resource
import subprocess
import sys
import time

import pytest
from comparing import COMPLETE, a_run, write

from bench.machine import processes
from bench.record import configs, index, rows, run_folder

NUM_RUNS = 60
NUM_MANY = index.MIN_PARALLEL + 1000


@pytest.fixture
def results(tmp_path):
    """60 run folders, older than the index's caution."""
    for number in range(NUM_RUNS):
        settle(write(tmp_path, a_run("A", 10.0 + number, number)))
    return tmp_path


def settle(folder):
    """As if run.json had been written an hour ago; its status change (ctime) stays now, so the test waits for that."""
    hour_ago_s = time.time() - 3600
    os.utime(folder / "run.json", (hour_ago_s, hour_ago_s))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(index, "SETTLED_S", -1.0)  # tests of the waiting itself set it back


def read_by_name(results, on_error=None):
    return {os.path.basename(folder): row for folder, row in index.read_rows([results], on_error)}


def index_file(results):
    return results / "cpu_nano" / index.NAME


def reads(monkeypatch):
    """Names of the folders that are really read."""
    found = []
    original = index._read
    monkeypatch.setattr(index, "_read", lambda parent, name: found.append(name) or original(parent, name))
    return found


@pytest.mark.parametrize("whose", ["anybody's to write", "a group's to write", "another user's"])
def test_an_index_that_somebody_else_may_have_forged_is_not_believed_and_made_anew(results, whose):
    true = read_by_name(results)
    path = index_file(results)
    forged = json.loads(gzip.decompress(path.read_bytes()))
    for values in forged["rows"]:
        values[index.COLUMNS.index("val_loss")] = 0.001
    path.write_bytes(gzip.compress(json.dumps(forged).encode()))
    index._parsed.cache_clear()
    assert {row["val_loss"] for row in read_by_name(results).values()} == {0.001}  # it is well-formed, and believed
    if whose == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 12345, -1)
    else:
        path.chmod(0o666 if "anybody" in whose else 0o664)
    assert read_by_name(results) == true
    assert path.stat().st_uid == os.geteuid() and path.stat().st_mode & 0o022 == 0  # rebuilt
    index._parsed.cache_clear()
    assert read_by_name(results) == true


def test_a_list_where_one_value_belongs_excludes_its_record_alone(results):
    bad = write(results, a_run("A", 10.0, 70) | {"instrument_summaries": {"telemetry": {"energy_j": [None, {}]}}})
    said = []
    rows = read_by_name(results, said.append)
    assert bad.name not in rows and len(rows) == NUM_RUNS
    assert len(said) == 1 and said[0].startswith(f"{bad}: energy_j=[None, {{}}] is not one value")


def test_an_index_is_its_users_alone_whatever_the_umask(results):
    before = os.umask(0o002)
    try:
        read_by_name(results)
    finally:
        os.umask(before)
    assert index_file(results).stat().st_mode & 0o777 == 0o644


def test_rows_from_the_index_are_the_rows_of_the_records(results, monkeypatch):
    folder = sorted((results / "cpu_nano").glob("2026*"))[5]
    write(folder.parent.parent, a_run("A", 10.0, 70, val_loss=4))  # an int among floats, and equal to some
    write(folder.parent.parent, a_run("A", 10.0, 71, val_loss=4.0))
    cold = read_by_name(results)
    assert index_file(results).is_file()
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


def test_a_changed_run_is_read_again(results):
    before = read_by_name(results)
    folder = sorted((results / "cpu_nano").glob("2026*"))[7]
    run = json.loads((folder / "run.json").read_text())
    run["metrics"]["train_s"] = 99.0
    (folder / "run.json").write_text(json.dumps(run))
    after = read_by_name(results)
    assert after[folder.name]["train_s"] == 99.0
    assert {name: row for name, row in after.items() if name != folder.name} == {
        name: row for name, row in before.items() if name != folder.name
    }


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
    monkeypatch.setattr(index, "SETTLED_S", 2.0)  # all of these were written in the last second
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
    found = read_by_name(results)
    assert gone.name not in found
    assert found[new.name]["train_s"] == 5.0
    assert len(found) == NUM_RUNS


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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        # mtime: the processes of pytest -n are to name the cases alike, whenever each collects them
        *(gzip.compress(text, mtime=0) for text in (b"[]", b'{"code": 1}', b"\xff\xfe")),
        gzip.compress(b"{}", mtime=0)[:-3],
        b"\x1f\x8b\x08" * 9,
    ]
    + [None],
)
def test_a_damaged_or_deleted_index_costs_only_time(results, content, monkeypatch):
    expected = read_by_name(results)
    if content is None:
        index_file(results).unlink()
    else:
        index_file(results).write_bytes(content)
    assert read_by_name(results) == expected
    read_again = reads(monkeypatch)
    assert read_by_name(results) == expected
    assert read_again == []  # and it was made anew


def test_an_index_with_a_row_cut_short_is_damaged(results):
    expected = read_by_name(results)
    damaged = json.loads(gzip.decompress(index_file(results).read_bytes()))
    damaged["rows"][0].pop()
    index_file(results).write_bytes(gzip.compress(json.dumps(damaged).encode()))
    assert read_by_name(results) == expected


def test_an_index_made_by_other_code_counts_for_nothing(results, monkeypatch):
    read_by_name(results)
    monkeypatch.setattr(index, "_code", lambda: "other")
    index._parsed.cache_clear()
    read_again = reads(monkeypatch)
    read_by_name(results)
    assert len(read_again) == NUM_RUNS


def test_an_index_of_another_place_counts_for_nothing(results, tmp_path_factory, monkeypatch):
    """Copied together with the runs: other inodes, other times."""
    import shutil

    read_by_name(results)
    copy = tmp_path_factory.mktemp("copy") / "results"
    shutil.copytree(results, copy)
    read_again = reads(monkeypatch)
    read_by_name(copy)
    assert len(read_again) == NUM_RUNS


def test_asking_for_some_runs_keeps_what_is_known_of_the_others(results, monkeypatch):
    read_by_name(results)
    folders = sorted((results / "cpu_nano").glob("2026*"))
    for folder in folders[:50]:
        (folder / "run.json").write_text((folder / "run.json").read_text() + "\n")
    assert len(index.read_rows(folders[:55])) == 55
    read_again = reads(monkeypatch)
    assert len(read_by_name(results)) == NUM_RUNS
    assert read_again == []


def test_a_folder_that_cannot_be_written_to_is_read_all_the_same(results, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError

    monkeypatch.setattr(index.atomic, "write_text", refuse)
    assert len(read_by_name(results)) == NUM_RUNS


def test_few_runs_leave_no_index_behind(tmp_path):
    for number in range(index.MIN_RUNS - 1):
        write(tmp_path, a_run("A", 10.0, number))
    index.read_rows([tmp_path])
    assert not index_file(tmp_path).exists()


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
    with pytest.raises(ValueError, match="is not a folder"):
        index.read_rows([tmp_path / "nothing"])


def test_thousands_of_runs_are_read_by_two_processes_and_answered_from_the_index_in_a_fraction_of_a_second(
    tmp_path, repo
):
    """Whole commands.  Bounds are wide: a test machine is busy; tests/benchmarks has the true ones."""
    text = (COMPLETE / "run.json").read_text()
    for number in range(NUM_MANY):
        arm = "AB"[number % 2]
        name = f"20261121T031500Z-x-{arm * 8}-s{number}"
        folder = tmp_path / "cpu_nano" / name
        folder.mkdir(parents=True)
        times = text.replace('"train_s": 0.22,', f'"train_s": {10 + number % 97 / 1000},').replace(
            '"num_flagged_steps": 1,', '"num_flagged_steps": 0,'
        )
        times = (
            times.replace(COMPLETE.name, name)
            .replace('"48623a63"', f'"{arm.lower() * 8}"')
            .replace('"seed": 0', f'"seed": {number}')
        )
        (folder / "run.json").write_text(times)
    time.sleep(index.SETTLED_S + 2.5)
    env = os.environ | {"SPEEDRUN_RESULTS": str(tmp_path)}
    for verb in (["table"], ["compare", "AAAAAAAA", "BBBBBBBB"]):
        index_file(tmp_path).unlink(missing_ok=True)
        cpu_s = [_children_cpu_s()]  # a busy machine takes a little more of it, and as much as it likes of the clock
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, "-m", "bench", *verb], cwd=repo, env=env, capture_output=True, text=True, timeout=240
            )
            cpu_s.append(_children_cpu_s())
            assert done.returncode == 0, done.stderr[-2000:]
        took_s = [later - before for before, later in itertools.pairwise(cpu_s)]
        assert took_s[0] < 10.0
        assert min(took_s[1:]) < 3.0


def _children_cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
