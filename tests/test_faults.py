"""Faults that once got through, each injected for real: docs/reference/faults.md names the test of every one."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import claimed
import disk_faults
import pytest
import real_runs
from cases import slow
from comparing import raced, write

from bench.base import atomic, private
from bench.cli import race
from bench.data import shards
from bench.launch import finish, initial_record
from bench.plans.race import state as race_state
from bench.record import ledger


@pytest.mark.slow
def test_a_pipe_in_its_logs_and_damaged_progress_disturb_no_end_of_a_run(tmp_path):
    with real_runs.Background(tmp_path, changed={"bench.launch.launcher.TICK_S": 0.1}) as running:
        running.wait_for_step(3)
        os.mkfifo(running.folder / "logs" / "pipe.log")
        os.kill(running.rank_pid(0), signal.SIGSTOP)
        (running.folder / ".progress.tmp").write_text("[1, 2]")
        time.sleep(0.5)  # the launcher looks ten times a second
        running.process.terminate()
        code, out = running.end(120)
        assert running.all_gone()
        run = real_runs.run_json(running.folder)
    assert (code, run["status"], run["failure"]["kind"]) == (1, "aborted", "interrupted"), out
    assert "Traceback" not in out


def _overwritten(folder):
    with open(folder / "train.bin", "r+b") as file:  # tokens as good as those, at the same place
        file.seek(-100_000, os.SEEK_END)
        file.write(bytes(100_000))


def _too_large(folder):
    with open(folder / "train.bin", "r+b") as file:
        file.seek(1024)
        file.write(b"\xff\xf0" * 190_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hurt", "message"),
    [
        (_overwritten, r"train.bin: was changed during the run: sha256 \w+, and was \w+ when it began$"),
        (lambda folder: os.truncate(folder / "train.bin", 2048), "train.bin: was changed.*; then: rank 0 .*SIGBUS"),
        (lambda folder: os.truncate(folder / "train.bin", 2**42), "train.bin: was changed.*it has 4,398,046,511,104 b"),
        (lambda folder: os.truncate(folder / "val.bin", 2048), "val.bin: was changed.*; then: .*"),
        (_too_large, "train.bin: was changed.*; then: IndexError"),
    ],
    ids=["overwritten", "cut", "holes", "val cut", "tokens too large"],
)
def test_a_shard_that_is_written_over_while_it_is_trained_on_makes_no_complete_run(tmp_path, hurt, message):
    code, out, run = _disturbed(tmp_path, hurt)
    assert (code, run["status"], run["failure"]["kind"]) == (1, "failed", "bad_data"), out
    assert re.match(message, run["failure"]["message"]), run["failure"]


@pytest.mark.slow
def test_a_validation_shard_that_is_removed_stays_open_until_the_run_has_ended(tmp_path):
    code, out, run = _disturbed(tmp_path, lambda folder: (folder / "val.bin").unlink())
    assert (code, run["status"]) == (0, "complete"), out


def _disturbed(tmp_path, hurt):
    """Runs for twice the tokens that there are; hurt(its folder of shards) disturbs step 3 -> (code, ...)."""
    for first, name in enumerate(("train", "val")):
        shards.write(tmp_path / f"{name}.bin", [token % 256 for token in range(first, first + 200_000)])
    overrides = [f"data.train_glob={tmp_path}/train.bin", f"data.val_glob={tmp_path}/val.bin", "data.vocab_size=257"]
    overrides += ["goal.num_steps=400", "goal.val_every_steps=100"]
    with real_runs.Background(tmp_path / "results", "data=shards", *overrides) as running:
        running.wait_for_step(3)
        hurt(tmp_path)
        code, out = running.end(120)
        return code, out, real_runs.run_json(running.folder)


def test_logs_lose_their_private_paths_a_block_at_a_time_and_what_is_no_text_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(private, "BLOCK_BYTES", 64)
    logs = tmp_path / "logs"
    logs.mkdir()
    line = f"read {real_runs.REPO}/bench/x.py\n"
    (logs / "rank0.log").write_text(line * 50)
    (logs / "rank1.log").write_bytes(b"\0\n\xff" + line.encode() * 50)  # as a progress bar prints, or an allocator
    (logs / "flight.bin").write_bytes(line.encode() * 50 + b"\0")
    (logs / "other.log").write_bytes(b"\xff\r\n" * 50)
    repo = str(real_runs.REPO)
    (logs / "coloured.log").write_text(f"read {repo[:3]}\x1b[1m{repo[3:]}\x1b[0m/bench/x.py\n")
    (logs / "red.log").write_text("\x1b[31mread\x1b[0m " + line)
    os.mkfifo(logs / "pipe.log")
    private.redact_logs(tmp_path, real_runs.REPO)
    assert (logs / "rank0.log").read_text() == "read ./bench/x.py\n" * 50
    assert (logs / "rank1.log").read_bytes() == b"\0\n\xff" + b"read ./bench/x.py\n" * 50
    assert (logs / "flight.bin").read_bytes() == line.encode() * 50 + b"\0"
    assert (logs / "other.log").read_bytes() == b"\xff\r\n" * 50
    assert (logs / "coloured.log").read_text() == "read ./bench/x.py\n"
    assert (logs / "red.log").read_text() == "\x1b[31mread\x1b[0m read ./bench/x.py\n"
    assert len(list(logs.iterdir())) == 7


def held(path):
    """Constants that make a launcher's ranks begin only when this file is gone."""
    wait = f'while [ -e "{path}" ]; do sleep 0.05; done; exec "$0" "$@"'
    path.touch()
    return {"bench.launch.ranks.WORKER": ["sh", "-c", wait, sys.executable, "-m", "bench.training.worker"]}


def test_a_launcher_that_is_killed_before_its_ranks_are_up_leaves_no_private_path(tmp_path):
    with real_runs.Background(tmp_path, changed=held(tmp_path / "held")) as running:
        running.wait_for_record()
        running.process.kill()
        running.process.wait()
        assert running.all_gone()
        remaining = [path.name for path in running.folder.iterdir() if path.name.startswith(".")]
        run = real_runs.run_json(running.folder)
    assert (run["status"], run["failure"]["kind"], remaining) == ("aborted", "launcher_killed", [])


@pytest.mark.parametrize("damage", ["removed", slow("cut")])
def test_a_run_json_that_goes_before_the_ranks_read_it_is_no_bad_setting(tmp_path, damage):
    changed = held(tmp_path / "held") | {"bench.launch.launcher.HEARTBEAT_S": 1e9}
    with real_runs.Background(tmp_path / "results", changed=changed) as running:
        running.wait_for_record()
        path = running.folder / "run.json"
        path.unlink() if damage == "removed" else os.truncate(path, 100)
        (tmp_path / "held").unlink()
        code, out = running.end(120)
        run = real_runs.run_json(running.folder)
    assert (code, run["status"]) == (1, "failed"), out
    assert run["failure"]["kind"] == "folder_removed", run["failure"]


OF_A_DISK, OF_NO_FOLDER = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT), (errno.ENOENT, errno.ENOTDIR)


@pytest.mark.parametrize("number", [*OF_A_DISK, *OF_NO_FOLDER])
def test_a_disk_that_fails_for_a_moment_has_not_removed_the_folder_of_a_run(tmp_path, monkeypatch, number):
    place = os.lstat(tmp_path)

    def lstat(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "lstat", lstat)
    assert (finish.removed(tmp_path, place) is None) == (number in OF_A_DISK)


@pytest.mark.slow
def test_a_guard_that_hangs_is_ended_by_its_silence(tmp_path):
    def stop(running):
        (guard,) = running.pids("bench.launch.guard")
        os.kill(guard, signal.SIGSTOP)

    arguments = ("hardware.stall_timeout_s", (2, 10), stop, "goal.num_steps=300")
    with real_runs.in_time(tmp_path, *arguments) as (running, code, out):
        assert running.all_gone()
        run = real_runs.run_json(running.folder)
    assert (code, run["failure"]["kind"]) == (1, "stalled"), out


@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_a_killed_guard_is_no_failure_of_a_rank(tmp_path, num_ranks):
    with real_runs.Background(tmp_path, f"hardware.num_processes={num_ranks}") as running:
        running.wait_for_step(1)
        (guard,) = running.pids("bench.launch.guard")
        os.kill(guard, signal.SIGKILL)
        assert running.process.wait(60) == 1
        assert running.all_gone()
        assert real_runs.run_json(running.folder)["failure"]["kind"] == "agent_killed"


@pytest.mark.slow
def test_a_race_that_is_ended_as_its_run_begins_leaves_an_interrupted_run_with_its_end(tmp_path):
    arguments = ["race", "A=", "B=optim.beta2=0.9", "n=2", *real_runs.SHORT, *real_runs.SLIGHT, "--anyway"]
    with real_runs.started(tmp_path, *arguments) as process:
        real_runs.wait_for(lambda: real_runs.folders(tmp_path), 120, every_s=0.005)
        process.terminate()
        process.communicate(timeout=90)
    assert process.returncode == 1
    (folder,) = real_runs.folders(tmp_path)
    run = real_runs.run_json(folder)
    assert (run["status"], run["failure"]["kind"]) == ("aborted", "interrupted")
    assert [line["event"] for line in ledger.read(tmp_path).lines] == ["plan", "start", "end"]


def test_a_disk_that_takes_no_run_gets_no_half_of_one(small_disk):
    real_runs.fill(small_disk / "other_program.bin")
    os.truncate(small_disk / "other_program.bin", os.path.getsize(small_disk / "other_program.bin") - 20_480)
    done = real_runs.bench(small_disk, "run", *real_runs.SHORT, *real_runs.SLIGHT)
    assert done.returncode == 2 and "no record can be written there (No space left on device)" in done.stderr
    assert real_runs.folders(small_disk) == [] and not list(small_disk.glob("free/*"))
    (small_disk / "other_program.bin").unlink()
    assert ledger.read(small_disk).faults == []


def test_the_space_that_is_reserved_for_the_record_of_a_run_is_not_used_for_its_inputs(small_disk):
    atomic.reserve(small_disk)
    real_runs.fill(small_disk / "other_program.bin")
    with pytest.raises(OSError, match="No space left"):
        initial_record.write_inputs(small_disk, None, {"packages": "x" * 9000}, 0.0, {}, goes_on=True)
    assert atomic.release(small_disk)


def test_a_report_on_a_full_disk_names_the_file_that_it_could_not_write(small_disk, tmp_path):
    write(tmp_path, raced([10.0], [10.5])[0][0])
    real_runs.fill(small_disk / "other_program.bin")
    done = real_runs.bench(tmp_path, "report", str(tmp_path), "--out", str(small_disk / "site"))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.match(rf"report: {small_disk}/site\S*: cannot be written \(No space left on device\)", done.stderr)


def test_an_error_of_the_disk_at_the_end_of_a_race_is_a_sentence_that_names_the_file(tmp_path, monkeypatch):
    if disk_faults.compiler() is None:
        pytest.skip("no C compiler, which makes the library that fails operations")
    base, home, state = tmp_path / "base", tmp_path / "results", tmp_path / "state"
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(base))
    claimed.Racers(claimed.Results(base), lambda arm, seed: 10.0 + seed, hurt={4: "interrupt"}).install(monkeypatch)
    race.main(["A=", "B=", "n=3", "--anyway"])
    shim = {"LD_PRELOAD": str(disk_faults.library(tmp_path)), "DISK_FAULT_BELOW": str(home)}
    shim |= {"DISK_FAULT_STATE": str(state), "DISK_FAULT_KIND": "eio"}

    def abandon(number):
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(base, home)
        state.write_bytes(bytes(16))
        return real_runs.bench(home, "race", "--abandon", DISK_FAULT_AT=str(number), **shim)

    assert abandon(0).returncode == 1
    operations = {(call, where.rpartition("/")[2]): number for number, _, call, where in disk_faults.operations(state)}
    for call, name in (("rename", "race.json"), ("write", ledger.NAME)):
        done = abandon(operations[call, name])
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert re.search(rf"race: {home}/\S*{name}: Input/output error", done.stderr), done.stderr
        assert ledger.read(home).faults == []
        assert real_runs.bench(home, "race", "--abandon").returncode == 1  # it works when it is typed again


LETTERS = str.maketrans("0123456789", "abcdefabcd")
NO_TORCH = "import sys\nif 'bench.training.worker' in sys.orig_argv: sys.modules['torch'] = None\n"


@pytest.mark.parametrize(
    ("hook", "shell", "kind", "message"),
    [
        (NO_TORCH, "exec {command}", "exception", "torch"),
        slow("", "ulimit -v 400000; exec {command}", "out_of_memory", ""),
    ],
)
def test_an_agent_without_torch_or_memory_says_so(tmp_path, hook, shell, kind, message):
    (tmp_path / "sitecustomize.py").write_text(hook)
    secret = "e3bee" + os.urandom(5).hex().translate(LETTERS) + "f"  # few digits, as one in a hundred has
    command = " ".join([sys.executable, "-m", "bench", "run", *real_runs.SHORT, *real_runs.SLIGHT])
    env = real_runs.environment(tmp_path / "results", PYTHONPATH=str(tmp_path), NCCL_DEBUG_FILE=secret)
    shell_command = ["bash", "-c", shell.format(command=command)]
    done = subprocess.run(shell_command, cwd=real_runs.REPO, env=env, capture_output=True, text=True)
    (folder,) = real_runs.folders(tmp_path / "results")
    failure = real_runs.run_json(folder)["failure"]
    assert (done.returncode, failure["kind"]) == (1, kind), failure
    assert message in failure["message"] and failure["hint"]
    recorded = json.loads((folder / "environment.json").read_text())["env"]["NCCL_DEBUG_FILE"]
    assert re.fullmatch("#[0-9a-f]{16}", recorded)  # no setting that anybody knows: it may be a secret
    assert not any(secret.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_what_its_machine_ended_is_raced_again_and_a_failed_run_is_not(results, monkeypatch):
    def hurt(kind):
        def change(run):
            if run["race"]["position"] == 3 and run["race"]["attempt"] == 1:
                run |= {"status": "failed", "validity": "invalid", "validity_reasons": ["the run did not complete"]}
                run["failure"] = {"kind": kind, "rank": None, "step": 3, "signal": None, "exit_code": None}
                run["failure"] |= {"message": "x", "hint": "y"}

        return change

    for number, (kind, attempts) in enumerate([("agent_killed", 2), ("rank_crashed", 1)]):
        own_results = claimed.Results(results / str(number))
        monkeypatch.setenv("SPEEDRUN_RESULTS", str(own_results.folder))
        add = own_results.add
        own_results.add = lambda *args, add=add, kind=kind, **options: add(*args, change=hurt(kind), **options)
        claimed.Racers(own_results, lambda arm, seed: 10.0 + 0.01 * seed).install(monkeypatch)
        race.main(["A=", "B=optim.beta2=0.99", "n=3"])
        (folder,) = (own_results.folder / "races").glob("*")
        assert len(race_state.read(folder, own_results.folder).slots[3].attempts) == attempts
