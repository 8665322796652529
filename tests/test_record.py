"""The run folder: written whole or not at all, read forever, honest about runs that died."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import real_runs

from bench.base import atomic, paths, private
from bench.base.paths import REPO
from bench.base.reading.damage import Damaged
from bench.data.sources import source
from bench.machine import processes
from bench.record import run_folder, step_files

RECORDS = Path(__file__).parent / "records"
COMPLETE = RECORDS / "20261121T031500Z-gpt2-adamw-48623a63-s0"
FAILED = RECORDS / "20261121T031501Z-gpt2-adamw-48623a63-s1"
HEARTBEAT_S = datetime(2026, 11, 21, 3, 15, 5, tzinfo=UTC).timestamp()  # of COMPLETE


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(COMPLETE, tmp_path / COMPLETE.name)


def edit(folder, **changes):
    run = json.loads((folder / "run.json").read_text()) | changes
    (folder / "run.json").write_text(json.dumps(run))
    return run


# ---- kept examples: must load forever


@pytest.mark.parametrize("kept", sorted(RECORDS.iterdir()), ids=lambda path: path.name)
def test_a_kept_record_of_any_version_loads_as_the_newest(kept):
    run = run_folder.read(kept)
    assert run["schema_version"] == run_folder.SCHEMA_VERSION
    assert run["run_id"] == kept.name
    assert step_files.read(kept, strict=True)[0]["step"] == 0
    assert step_files.read_events(kept)[0]["event"] == "init_start"


def test_the_kept_records_of_version_1_say_what_they_said():
    run = run_folder.read(COMPLETE)
    assert (run["status"], run["metrics"]["val_loss"]) == ("complete", 4.25)
    assert (run["metrics"]["train_s"], run["seed"]) == (0.22, 0)
    assert step_files.read(COMPLETE)[3] == {
        "step": 3,
        "flags": "profiled",
        "tokens": 3072,
        "lr": 0.003,
        "train_loss": 4.0,
        "val_loss": None,
        "step_ms": 60.0,
        "data_ms": 1.0,
        "forward_ms": 15.0,
        "backward_ms": 25.0,
        "optimizer_ms": 5.0,
    }
    assert run_folder.read(FAILED)["failure"]["kind"] == "non_finite_loss"


def test_an_old_record_passes_through_every_upgrade(folder, monkeypatch):
    monkeypatch.setattr(run_folder, "SCHEMA_VERSION", 3)
    upgraders = {
        1: lambda run: run | {"schema_version": 2, "path": ["1 to 2"]},
        2: lambda run: run | {"schema_version": 3, "path": run["path"] + ["2 to 3"]},
    }
    monkeypatch.setattr(run_folder, "UPGRADERS", upgraders)
    assert run_folder.read(folder)["path"] == ["1 to 2", "2 to 3"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "not valid JSON"),
        ('{"schema_version": 1, "run_id"', "not valid JSON"),
        ("[]", "expected object, got array"),
        ('{"run_id": "x"}', "not a run.s record"),
        ('{"schema_version": "1", "run_id": "x"}', "not a run.s record"),
        ('{"schema_version": 99, "run_id": "x"}', "is not 1 to 1: update"),
        ('{"schema_version": 0, "run_id": "x"}', "is not 1 to 1: update"),
        ('{"schema_version": 1, "run_id": "x"}', "lacks name"),
        ('{"schema_version": 1, "run_id": null}', "run_id: expected str, got null"),
        ('{"schema_version": 1, "run_id": "x", "started_at": 5}', "started_at: expected str . null, got int"),
        ('{"schema_version": 1, "run_id": "x", "measured": null}', "measured: expected object, got null"),
        ('{"schema_version": 1, "run_id": "x", "metrics": {"val_loss": "3.2"}}', "metrics.val_loss: expected"),
    ],
)
def test_what_is_no_record_is_refused_by_name(folder, content, sentence):
    (folder / "run.json").write_text(content)
    with pytest.raises(ValueError, match=sentence) as refusal:
        run_folder.read(folder)
    assert str(folder) in str(refusal.value)


def test_a_folder_without_a_record_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="run.json: cannot be read"):
        run_folder.read(tmp_path)


# ---- status of a run whose launcher is gone


@pytest.mark.parametrize(
    "boot, ticks, age_s, written_s, status",
    [
        ("ab12ab12ab12ab12", 99887766, 1e6, 1e6, "running"),  # however old its heartbeat: the process is there
        ("ab12ab12ab12ab12", None, 0.0, 0.0, "aborted"),  # no such process
        ("ab12ab12ab12ab12", 5, 0.0, 0.0, "aborted"),  # its pid now belongs to another
        ("another", 99887766, 59.0, 59.0, "running"),
        ("another", 99887766, 61.0, 61.0, "aborted"),
        ("another", 99887766, 600.0, 10.0, "running"),  # this machine's clock is ahead of the launcher's
        ("another", 99887766, 601.0, 10.0, "aborted"),  # a copy of an old record
        ("another", 99887766, -3600.0, 10.0, "running"),
        ("another", 99887766, -3600.0, 61.0, "aborted"),
    ],
)
def test_a_running_record_whose_launcher_is_gone_is_shown_as_aborted(
    folder, monkeypatch, boot, ticks, age_s, written_s, status
):
    """age_s: of the heartbeat by this machine's clock, written_s: of run.json by the file system's."""
    before = edit(folder, status="running", ended_at=None)
    now_s = time.time()
    os.utime(folder / "run.json", (now_s - written_s,) * 2)
    monkeypatch.setattr(processes, "boot_id_hash", lambda: boot)
    monkeypatch.setattr(processes, "start_ticks", lambda pid: ticks)
    monkeypatch.setattr(run_folder.time, "time", lambda: HEARTBEAT_S + age_s)
    run = run_folder.read(folder)
    assert run["status"] == status
    if status == "aborted":
        assert (run["failure"]["kind"], run["validity"]) == ("launcher_killed", "invalid")
        assert run["ended_at"] == "2026-11-21T03:15:05.000Z"  # its last sign of life
    assert json.loads((folder / "run.json").read_text()) == before  # shown, not written


def test_this_process_is_found_and_a_dead_one_is_not():
    assert processes.start_ticks(os.getpid()) == processes.start_ticks(os.getpid()) > 0
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    # It has ended, though its parent has not waited for it: a zombie.
    real_runs.wait_for(lambda: processes.start_ticks(child.pid) is None, 10, every_s=0.01)
    child.wait()
    assert processes.start_ticks(child.pid) is None


# ---- where records are


def test_launchers_at_the_same_time_never_share_a_folder(tmp_path):
    utc = datetime(2026, 11, 21, 3, 15, 0, tzinfo=UTC)
    folders, start = [], threading.Barrier(8)

    def launch():
        start.wait()
        folders.append(run_folder.new_folder(tmp_path, "cpu_nano", "x", "1a2b3c4d", 7, utc).name)

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = f"20261121T031500Z-x-1a2b3c4d-s7-m{private.mark_of(tmp_path)}"
    assert sorted(folders) == sorted([first, *(f"{first}-{number}" for number in range(2, 9))])


def test_runs_are_found_at_any_depth_and_hidden_folders_are_left_alone(tmp_path):
    for name in ("b/run2", "a/deep/run1", ".trash/run3"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "a/deep/run1/inside").mkdir()
    (tmp_path / "a/deep/run1/inside/run.json").write_text("{}")  # part of run1, no run of its own
    expected = ["a/deep/run1", "b/run2"]
    assert [path.relative_to(tmp_path).as_posix() for path in run_folder.find_runs([tmp_path])] == expected
    with pytest.raises(ValueError, match="is not a folder of runs"):
        list(run_folder.find_runs([tmp_path / "nowhere"]))


# ---- atomic writing


def test_json_is_written_whole_and_nothing_else_is_left(tmp_path):
    atomic.write_json(tmp_path / "run.json", {"b": 1, "a": [1.5, None]})
    assert list(json.loads((tmp_path / "run.json").read_text())) == ["b", "a"]  # order kept: schema_version stays first
    assert os.listdir(tmp_path) == ["run.json"]


def test_what_json_cannot_say_becomes_null(tmp_path):
    atomic.write_json(tmp_path / "x.json", {"losses": [1.0, float("nan")], "t": float("-inf")})
    assert json.loads((tmp_path / "x.json").read_text()) == {"losses": [1.0, None], "t": None}


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    code = (
        "import sys; from bench.base import atomic\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    atomic.write_json(sys.argv[1], {'n': n, 'ballast': ['x' * 50] * 200, 'last': n}, durable=False)\n"
    )
    for attempt in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run.json")], cwd=REPO)
        real_runs.wait_for((tmp_path / "run.json").exists, 20, every_s=0.01)
        time.sleep(0.013 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        record = json.loads((tmp_path / "run.json").read_text())
        assert record["n"] == record["last"] > 0
        (tmp_path / "run.json").unlink()


@pytest.mark.parametrize(
    "error, until_released, durable, is_written, reserve_left",
    [
        (errno.ENOSPC, True, True, True, False),  # the reserve takes the last space, and is given up for the record
        (errno.ENOSPC, False, True, False, False),
        (errno.ENOSPC, False, False, False, True),  # a file that only the living read does not cost the reserve
        (errno.EIO, False, True, False, True),
    ],
)
def test_a_write_that_fails_leaves_the_old_file_and_a_full_disk_costs_the_reserve(
    tmp_path, monkeypatch, error, until_released, durable, is_written, reserve_left
):
    path, reserve = tmp_path / "run.json", tmp_path / atomic.RESERVE
    atomic.write_json(path, {"old": True})
    atomic.reserve(tmp_path)
    assert reserve.stat().st_size == 65536
    replace = os.replace

    def fails(source, target):
        if until_released and not reserve.exists():
            return replace(source, target)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "replace", fails)
    with contextlib.nullcontext() if is_written else pytest.raises(OSError, match=os.strerror(error)):
        atomic.write_json(path, {"old": False}, durable)
    assert json.loads(path.read_text()) == {"old": not is_written}
    assert sorted(os.listdir(tmp_path)) == [atomic.RESERVE] * reserve_left + ["run.json"]


def test_the_record_of_a_run_that_filled_a_real_disk_can_still_be_finished(small_disk):
    atomic.reserve(small_disk)
    atomic.write_json(small_disk / "run.json", {"status": "running"})
    real_runs.fill(small_disk / "trace")
    finished = {"status": "failed", "ballast": "x" * 20_000}  # more than the pages that run.json has
    atomic.write_json(small_disk / "run.json", finished)
    assert json.loads((small_disk / "run.json").read_text()) == finished


# ---- artifacts


def test_artifacts_are_all_files_but_the_record_and_what_passes(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("abc")
    (tmp_path / "code" / "untracked").mkdir(parents=True)
    (tmp_path / "code" / "untracked" / ".hidden.py").write_text("")
    for name in ("run.json", ".run.json.12.tmp", "steps.csv", "odd.bin"):
        (tmp_path / name).write_text("")
    atomic.reserve(tmp_path)
    files = run_folder.listed(tmp_path)
    assert [(file["path"], file["role"], file["num_bytes"]) for file in files] == [
        ("code/untracked/.hidden.py", "code", 0),
        ("logs/rank0.log", "log", 3),
        ("odd.bin", "other", 0),
        ("steps.csv", "steps", 0),
    ]
    assert files[1]["sha256"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, "abc"
    run_folder.remove_temporary(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["code", "logs", "odd.bin", "run.json", "steps.csv"]
    run_folder.remove_temporary(tmp_path / "gone")  # no error, which would make a complete record a failed one


# ---- steps.csv and events.jsonl


def test_steps_come_back_as_they_were_written(tmp_path):
    names = (*step_files.CORE_COLUMNS, "data_ms")
    values = [
        (0, "", 0, None, None, 0.1 + 0.2, None, None),
        (1, "profiled;memory", 1024, 3e-4, float("inf"), None, 55.5, 0.25),
    ]
    rows = [dict(zip(names, row, strict=True)) for row in values]
    step_files.write(tmp_path, rows)
    assert (tmp_path / "steps.csv").read_text().splitlines() == [
        "step,flags,tokens,lr,train_loss,val_loss,step_ms,data_ms",
        "0,,0,,,0.30000000000000004,,",
        "1,profiled;memory,1024,0.0003,inf,,55.5,0.25",
    ]
    assert step_files.read(tmp_path, strict=True) == rows


def test_no_steps_file_means_no_steps(tmp_path):
    assert step_files.read(tmp_path) == []
    assert step_files.read_events(tmp_path) == []


def test_lines_of_one_step_become_one_row(tmp_path):
    """A run in progress writes a step's validation on a line of its own."""
    (tmp_path / "steps.csv").write_text("step,train_loss,val_loss,step_ms\n0,,5.5,\n1,5.0,,50.0\n1,,4.5,\n")
    assert step_files.read(tmp_path) == [
        {"step": 0, "train_loss": None, "val_loss": 5.5, "step_ms": None},
        {"step": 1, "train_loss": 5.0, "val_loss": 4.5, "step_ms": 50.0},
    ]
    with pytest.raises(ValueError, match="line 4 is damaged or repeated"):
        step_files.read(tmp_path, strict=True)


@pytest.mark.parametrize(
    "text", ["step,step_ms\n1,50.0\n2,5", "step,step_ms\n1,50.0\n2\n", "step,step_ms\n1,50.0\n2,5x\n"]
)
def test_a_cut_line_is_left_out_and_with_strict_refused(tmp_path, text):
    (tmp_path / "steps.csv").write_text(text)
    assert step_files.read(tmp_path) == [{"step": 1, "step_ms": 50.0}]
    with pytest.raises(ValueError, match=r"steps.csv: (the last )?line"):
        step_files.read(tmp_path, strict=True)


def test_a_damaged_byte_of_the_steps_names_its_file(tmp_path):
    (tmp_path / "steps.csv").write_bytes(b"step,train_loss\n1,\xad.5\n")
    with pytest.raises(ValueError, match=r"steps\.csv: byte 18 is damaged"):
        step_files.read(tmp_path)


def test_events_are_appended_line_by_line_and_a_cut_one_is_left_out(tmp_path):
    step_files.append_event(tmp_path, {"t_ns": 1, "event": "run_start"})
    step_files.append_event(tmp_path, {"t_ns": 2, "event": "eval_stop", "val_loss": float("nan")})
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"t_ns": 3, "ev')
    expected = [{"t_ns": 1, "event": "run_start"}, {"t_ns": 2, "event": "eval_stop", "val_loss": None}]
    assert step_files.read_events(tmp_path) == expected


def test_a_damaged_stall_names_its_line_and_field(tmp_path):
    step_files.append_event(tmp_path, {"event": "stall", "ms": 1.0, "causes": [{"what": "gc", "ms": "1"}], "where": {}})
    with pytest.raises(ValueError, match=r"events\.jsonl, line 1: causes\[0\]\.ms: expected float \| null, got str"):
        step_files.read_events(tmp_path)


# ---- privacy


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("at /home/ada/race/bench/loop.py:3", "at ./bench/loop.py:3"),
        ("/home/ada/race", "."),
        ("/home/ada/racetrack/x", "~/racetrack/x"),  # no part of the repository
        ("/home/ada/race-2/x and /home/ada.", "~/race-2/x and ~."),
        ("data.train_glob=/home/ada/data/*.bin", "data.train_glob=~/data/*.bin"),
        ("file:///home/ada/x", "file://~/x"),
        ("uri=postgresql://ada:p%2F1@db:5432/x", "uri=postgresql://USER:PASSWORD@db:5432/x"),
        ("ssh://git@host:22/x", "ssh://git@host:22/x"),
        (
            "  time      : 1\n  host      : ip-10-0-3-7.internal\n",
            "  time      : 1\n  host      : HOST\n",
        ),  # torchrun's
        ('["file://a","b:c@d"]', '["file://a","b:c@d"]'),
        ("/scratch/ada/x:/scratch/adam/x", "/scratch/USER/x:/scratch/adam/x"),
        ("ada is a name, adapter a word", "ada is a name, adapter a word"),  # only in paths
        ("rank 0 on gpu-box7.example.org", "rank 0 on HOST"),
        ("at=%2Fhome%2Fada%2Fx", "at=~%2Fx"),
        ("at=%2fhome%2fada%2fx", "at=~%2fx"),
        ("/tmp/torchinductor_ada/x, ada@db", "/tmp/torchinductor_USER/x, USER@db"),
    ],
)
def test_private_paths_and_names_are_taken_out(text, clean):
    assert private.redact(text, "/home/ada/race", home="/home/ada", user="ada", host="gpu-box7") == clean


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("USER=zelda of uid=1000(zelda)", "USER=USER of uid=1000(USER)"),
        ("/scratch/lab-zelda/x and /data/zelda_2/y.log", "/scratch/lab-USER/x and /data/USER_2/y.log"),
        ("script=/data/zelda_train.py and zelda.py", "script=/data/zelda_train.py and zelda.py"),  # its record keeps it
        ("zeldas and azelda/x, data.repo=zelda/tokens", "zeldas and azelda/x, data.repo=zelda/tokens"),
    ],
)
def test_the_users_name_is_taken_out_as_a_word_and_within_the_names_of_folders(text, clean):
    who = {"home": "/home/zelda", "user": "zelda", "host": "gpu-box7"}
    assert private.redact(text, "/repo", **who, is_prose=True) == clean
    assert private.redact("--optimizer zelda", "/repo", **who) == "--optimizer zelda"  # a setting
    master = {"home": "/home/master", "user": "master", "host": "gpu-box7"}
    assert private.redact("master x", "/repo", **master, is_prose=True) == "master x"


def test_a_home_that_is_not_ascii_is_taken_out_in_each_of_pythons_spellings():
    home = "/home/jürgen"
    damaged = os.fsencode(home).decode("ascii", "surrogateescape").encode("ascii", "backslashreplace").decode()
    for text in (
        home,
        ascii(home)[1:-1],
        repr(home.encode())[2:-1],
        damaged,
        "/home/j%C3%BCrgen",
        r"/home/j\u00fcrgen",
    ):
        assert private.redact(f"at {text}/x", "/repo", home=home, user="j", host="gpu-box7") == "at ~/x", text


def test_tables_and_pages_name_no_folder_of_the_user_and_their_paths_are_read(tmp_path, monkeypatch):
    """The folder of a table is read by this program again; a page links through no folder that its reader lacks."""
    home, scratch = tmp_path / "home/janedoe", tmp_path / "scratch/janedoe/results/free/run"
    scratch.mkdir(parents=True)
    (home / "results").mkdir(parents=True)
    for name in ("USER", "LOGNAME", "SUDO_USER"):
        monkeypatch.setenv(name, "janedoe")
    monkeypatch.setenv("HOME", str(home))
    for path, shared in ((home / "results", "~/results"), (scratch, f"{tmp_path}/scratch/$USER/results/free/run")):
        assert paths.shared(path) == shared and paths.user_path(shared) == path
    assert private.way(home / "results", home / "pages") == "../results"
    assert private.way(scratch / "run.json", scratch / "pages") == "../run.json"
    assert private.way(home / "results", tmp_path / "pages") is None
    assert private.way(scratch, tmp_path / "pages") is None
    private._logins.cache_clear()
    assert "janedoe" in private._logins()
    private._logins.cache_clear()


def test_a_host_with_an_ordinary_or_short_name_and_the_user_root_hide_no_text():
    for host in ("node", "vm-1"):
        text = f"{host} /data/root/x"
        assert private.redact(text, "/srv/race", home="/root", user="root", host=host) == text
    text = "train_loss of train.py on root@train, https://train:80/x"  # where the text says that it is a host
    clean = "train_loss of train.py on root@HOST, https://HOST:80/x"
    assert private.redact(text, "/srv/race", home="/root", user="root", host="train") == clean


@pytest.mark.parametrize(
    ("host", "text", "clean"),
    [
        ("thinkpad", "ValueError: at thinkpad, Thinkpad.local", "ValueError: at HOST, HOST"),
        ("thinkpad", "thinkpads, my-thinkpad-2", "thinkpads, my-thinkpad-2"),
        ("gpu-node-17", "on gpu-node-17.corp.example.", "on HOST."),
        ("gpu-node-17.corp.example", "gpu-node-17 asks db.corp.example", "HOST asks HOST"),
        ("zeppelin9", "no route to zeppelin9-ib0:29500, zeppelin9_eth", "no route to HOST:29500, HOST"),
        ("thinkpad", "events.out.tfevents.1.thinkpad.5.0", "events.out.tfevents.1.HOST.5.0"),
    ],
)
def test_a_host_is_taken_out_with_its_domain_whatever_it_is_called(host, text, clean):
    assert private.redact(text, "/srv/race", home="/root", user="root", host=host) == clean


def test_this_machines_names_are_those_of_the_kernel_and_of_etc(monkeypatch):
    texts = {"/etc/hostname": "gpu7\n", "/etc/hosts": "127.0.0.1 localhost\n10.0.0.7 gpu7.corp.example gpu7 # x\n"}
    monkeypatch.setattr(private.socket, "gethostname", lambda: "gpu7")
    monkeypatch.setattr(private.plain_file, "text_or_empty", texts.__getitem__)
    private._hosts.cache_clear()
    try:
        assert private._hosts() == ("gpu7", "gpu7.corp.example")
    finally:
        private._hosts.cache_clear()


def test_what_redact_takes_out_by_default_is_this_machine():
    home = os.path.expanduser("~")
    assert private.redact(f"{REPO}/bench", REPO) == "./bench"
    if len(home) > 1:
        assert private.redact(f"{home}/.cache", "/nowhere/at/all") == "~/.cache"


def test_an_empty_variable_names_no_folder(monkeypatch):
    monkeypatch.setenv("SPEEDRUN_RESULTS", "")
    assert paths.results_root() == paths.project_folder() / "results"
    monkeypatch.setenv("SPEEDRUN_DATA", "")
    assert source.data_root() == paths.project_folder() / ".data"


def test_a_line_that_lacks_a_cell_is_not_made_whole_by_the_next_that_has_one_too_many(tmp_path):
    (tmp_path / "steps.csv").write_text("step,tokens,train_loss\n1,10,5.0\n2,20\n3,30,4.0,9\n")
    assert step_files.read_columns(tmp_path, ["step"]) == {"step": [1]}
    assert [row["step"] for row in step_files.read(tmp_path)] == [1]


@pytest.mark.parametrize(
    "referee",
    [
        {"evaluation": {"why": None}},
        {"loss": {"vocab_size": 257}},
        {"causality": {"end": None, "start": "x"}},
        {"code": {"copies": []}},
        {"clock": {"source": "edges"}},
    ],
)
def test_a_record_whose_referee_found_what_no_rule_can_read_is_damaged(folder, referee):
    edit(folder, referee=referee)
    with pytest.raises(Damaged, match="referee cannot be read"):
        run_folder.read(folder)


@pytest.mark.parametrize("hash_of", [private.salted_hash, private.secret_hash])
def test_a_path_that_is_not_utf8_has_a_hash_of_its_own(hash_of):
    assert len({hash_of(text) for text in ("/data/M\udcfcller", "/data/M\udcf6ller", "/data/Mller")}) == 3
