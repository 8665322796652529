"""However a run ends, nothing of it is alive afterwards, and no file of it changes: real signals to real processes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import real_runs
import scripted
from cases import slow

from bench.record import run_folder

ENDS = {"SIGTERM": "interrupted", "timeout": "wall_timeout", "agent": "agent_killed", "launcher": "launcher_killed"}
slow = pytest.mark.slow


def files(folder):
    return {
        path.relative_to(folder): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def bring_to_an_end(running, ending):
    if ending == "SIGTERM":
        running.process.terminate()
    elif ending == "agent":
        (agent,) = running.pids("torch.distributed.run")
        os.kill(agent, signal.SIGKILL)
    elif ending == "launcher":
        running.process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "num_ranks"),
    [("SIGTERM", 1), ("launcher", 1), ("SIGTERM", 2), ("timeout", 2), ("agent", 2), ("launcher", 2)],
)
def test_a_stopped_rank_is_ended_and_no_file_changes_after_the_record(tmp_path, ending, num_ranks):
    with stopped(tmp_path, ending, num_ranks) as running:
        if ending != "launcher":
            assert scripted.pids(tmp_path) == []  # at once: the launcher has waited for it
        assert running.all_gone()
        run, before = real_runs.run_json(running.folder), files(running.folder)
        time.sleep(0.7)  # longer than a step or a sample of telemetry
        assert files(running.folder) == before
    assert run["failure"]["kind"] == ENDS[ending]
    assert run_folder.listed(running.folder) == run["artifacts"]
    assert not any(path.name.startswith(".") for path in before)


@contextlib.contextmanager
def stopped(base, ending, num_ranks):
    """A run whose ranks were stopped, and which then came to this end."""

    def stop(running):
        for rank in range(num_ranks):
            os.kill(running.rank_pid(rank), signal.SIGSTOP)

    overrides = [f"hardware.num_processes={num_ranks}"]
    if ending == "timeout":
        with real_runs.in_time(base, "hardware.wall_timeout_s", (5, 40), stop, *overrides) as (running, *_):
            yield running
        return
    with real_runs.Background(base, *overrides) as running:
        running.wait_for_step(3)
        stop(running)
        bring_to_an_end(running, ending)
        running.process.wait(90)
        yield running


@pytest.mark.parametrize("ending", ["agent", "launcher"])
@pytest.mark.slow
def test_what_is_hashed_is_what_was_left_when_ranks_were_writing(tmp_path, ending):
    with real_runs.Background(tmp_path, "instruments=[telemetry]", *real_runs.TWO) as running:
        running.wait_for_step(3)
        bring_to_an_end(running, ending)
        running.process.wait(90)
        assert running.all_gone() and scripted.pids(tmp_path) == []
        run, logs = real_runs.run_json(running.folder), real_runs.logs(tmp_path)
    assert run["failure"]["kind"] == ENDS[ending] and run["failure"]["step"] >= 3
    assert run_folder.listed(running.folder) == run["artifacts"] and str(real_runs.REPO) not in logs


@slow
def test_a_process_that_hangs_is_ended_by_its_silence(tmp_path):
    began_s = []

    def stop(running):
        began_s.append(time.monotonic())
        os.kill(running.rank_pid(0), signal.SIGSTOP)

    with real_runs.in_time(tmp_path, "hardware.stall_timeout_s", (2, 10), stop) as (running, code, out):
        took_s, timeout_s = time.monotonic() - began_s[-1], running.results.name
        run = real_runs.run_json(running.folder)
    assert code == 1 and took_s < 40
    assert (run["status"], run["failure"]["kind"]) == ("failed", "stalled"), out
    assert f"hardware.stall_timeout_s={timeout_s}" in run["failure"]["message"] and run["failure"]["step"] >= 3
    assert "File " in (running.folder / "logs" / "rank0.log").read_text()  # the stack, of the rank that was woken


@pytest.mark.slow
def test_a_removed_folder_is_reported_and_the_sweep_goes_on(tmp_path):
    arguments = ["run", "-m", *real_runs.SHORT, *real_runs.SLIGHT, "hardware.num_threads=1", "seed=0,1", "--anyway"]
    arguments += ["goal.num_steps=300", "goal.val_every_steps=50"]
    process = real_runs.started(tmp_path / "results", *arguments)
    progress_files = real_runs.wait_for(lambda: list(tmp_path.glob("results/*/*/.progress.tmp")))
    shutil.rmtree(progress_files[0].parent, ignore_errors=True)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in out and "folder_removed" in out, out
    (second,) = [folder for folder in real_runs.folders(tmp_path / "results") if "-s1-" in folder.name]
    assert real_runs.run_json(second)["status"] == "complete"


# ---- what cannot start


@pytest.mark.parametrize(
    ("shell", "kind", "message"),
    [
        ("exec unshare -rn {command}", "not_started", "127.0.0.1 cannot be reached"),
        pytest.param("ulimit -n 12; exec {command}", "not_started", "Too many open files", marks=slow),
    ],
)
def test_ranks_that_cannot_start_say_why_at_once(tmp_path, shell, kind, message):
    if "unshare" in shell and subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    command = " ".join([sys.executable, "-m", "bench", "run", *real_runs.SHORT, *real_runs.SLIGHT, *real_runs.TWO])
    env = real_runs.environment(tmp_path)
    began_s = time.monotonic()
    shell_command = ["bash", "-c", shell.format(command=command)]
    done = subprocess.run(shell_command, cwd=real_runs.REPO, env=env, capture_output=True, text=True)
    took_s = time.monotonic() - began_s
    run = real_runs.run_json(real_runs.folders(tmp_path)[0])
    assert (done.returncode, run["failure"]["kind"]) == (1, kind), done.stdout + real_runs.logs(tmp_path)
    assert message in run["failure"]["message"]
    assert took_s < 60, took_s  # it was minutes; most of this is the machine's load


def _block_all():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@pytest.mark.parametrize(
    ("number", "start"),
    [pytest.param(signal.SIGINT, None, marks=slow), (signal.SIGHUP, None), (signal.SIGTERM, _block_all)],
)
def test_a_signal_before_a_run_begins_is_a_line_and_its_exit_code(tmp_path, number, start):
    """Also where a starter has blocked all signals."""
    command = [sys.executable, "-m", "bench", "run", *real_runs.SHORT]
    pipes = {"stderr": subprocess.PIPE, "env": real_runs.environment(tmp_path), "text": True, "preexec_fn": start}
    with subprocess.Popen(command, cwd=real_runs.REPO, **pipes) as process:
        status = Path(f"/proc/{process.pid}/status")
        real_runs.wait_for(lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) & 1 << 14, every_s=0.001)
        process.send_signal(number)
        assert process.communicate()[1] == f"interrupted by {number.name}\n"
    assert process.returncode == 128 + number and not real_runs.folders(tmp_path)


def test_a_python_that_prints_as_it_starts_disturbs_no_run(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")  # as hooks of clusters and conda do
    done = real_runs.bench(tmp_path / "results", "run", *real_runs.SHORT, PYTHONPATH=str(tmp_path), code=0)
    (folder,) = real_runs.folders(tmp_path / "results")
    assert real_runs.run_json(folder)["status"] == "complete", done.stderr


AS_IT_LOADS = """
import os, runpy, sys
number = int(sys.argv.pop(1))
class Signalled:
    def find_spec(self, name, path, target=None):
        if name == "bench.cli.main":
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Signalled())
runpy.run_module("bench", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_program_loads_is_a_line_and_its_exit_code(number):
    command = [sys.executable, "-c", AS_IT_LOADS, str(int(number))]
    done = subprocess.run(command, cwd=real_runs.REPO, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + number, f"interrupted by {number.name}\n")


@pytest.mark.parametrize("wrapped", ["KeyboardInterrupt", "RuntimeError", "ValueError"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_that_a_library_raises_as_another_error_is_one_all_the_same(number, wrapped):
    program = f"""
import os, sys
from bench.cli import main
def verb(argv):
    try:
        os.kill(os.getpid(), {int(number)})
    except KeyboardInterrupt:
        raise {wrapped}("Error calling __set_name__")
main.module_of = lambda verb_name: type("Verb", (), {{"main": verb}})
sys.argv[1:] = ["table"]
main.run()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=real_runs.REPO, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + number, f"interrupted by {number.name}\n")


def test_a_program_that_was_started_to_ignore_hangups_ignores_them():
    command = ["nohup", sys.executable, "-c", AS_IT_LOADS, str(int(signal.SIGHUP)), "--version"]
    done = subprocess.run(command, cwd=real_runs.REPO, capture_output=True, text=True)
    assert done.returncode == 0 and "interrupted" not in done.stderr, done.stderr


DAEMONS = """
import subprocess
from models.gpt2 import GPT2
class Net(GPT2):
    def __init__(self, mark=0, **shape):
        super().__init__(**shape)
        subprocess.Popen(f"setsid env -i sleep {mark} & setsid env -i sh -c 'sleep {mark} & exit'", shell=True)
"""


def sleeping(mark):
    """The pids of programs that sleep for this many seconds, a number that only this test uses."""
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if _arguments(path)[1:2] == [str(mark)]]


def _arguments(path):
    with contextlib.suppress(OSError):
        return path.read_bytes().decode().split("\0")
    return []


def test_a_daemon_of_a_script_ends_with_its_run(tmp_path):
    mark = 4_000_000 + os.getpid()
    assert scripted.odd(tmp_path, f"daemon,'{mark}'")["status"] == "complete"
    assert sleeping(mark) == []


@slow
@pytest.mark.parametrize("ending", ["agent", "launcher"])
def test_a_daemon_ends_with_a_run_that_was_killed(tmp_path, monkeypatch, ending):
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    mark = 6_000_000 + os.getpid()
    (tmp_path / "net.py").write_text(DAEMONS)
    overrides = ["model.arch=net.py:Net", f"model.args={{mark: {mark}}}", *real_runs.TWO]
    with real_runs.Background(tmp_path / "results", *overrides) as running:
        running.wait_for_step(3)
        assert sleeping(mark)
        bring_to_an_end(running, ending)
        running.process.wait(90)
        assert running.all_gone() and sleeping(mark) == []
        assert real_runs.run_json(running.folder)["failure"]["kind"] == ENDS[ending]


@slow
def test_a_daemon_of_an_own_model_ends_with_its_run(tmp_path):
    mark = 5_000_000 + os.getpid()
    (tmp_path / "net.py").write_text(DAEMONS)
    overrides = ["track=free", "experiment=smoke", "model.arch=net.py:Net", f"model.args={{mark: {mark}}}"]
    real_runs.bench(tmp_path / "results", "run", *overrides, SPEEDRUN_CWD=str(tmp_path), code=0)
    assert sleeping(mark) == []


def test_a_process_that_is_asked_for_the_facts_of_an_arm_ends_with_its_race(tmp_path):
    module, pid = tmp_path / "bench/plans/race/arm_process.py", tmp_path / "pid"
    module.parent.mkdir(parents=True)
    module.write_text(f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(99)\n")
    code = f"from bench.plans.race import arm_process\narm_process.ask({str(tmp_path)!r}, [], {{}})"
    race = subprocess.Popen([sys.executable, "-c", code], cwd=real_runs.REPO)
    assert real_runs.wait_for(lambda: pid.exists() and pid.read_text(), 60)
    race.kill()
    assert race.wait() and real_runs.wait_for(lambda: not Path(f"/proc/{pid.read_text()}").exists(), 10)


GIT_THAT_WAITS = """#!/bin/sh
case "$*" in *read-tree*) : > "$0.waits"; exec sleep 60;; esac
PATH="${PATH#*:}" exec git "$@"
"""


ASKS = """
import os, signal
from bench.cli import main
from bench.plans.race import arm_process
signal.signal(signal.SIGTERM, main._end)
arm_process.ask(".", ["track=free", "experiment=smoke"], os.environ)
"""


def test_a_process_that_is_asked_for_facts_leaves_nothing_if_its_race_is_ended(tmp_path):
    program = tmp_path / "bin/git"
    program.parent.mkdir()
    program.write_text(GIT_THAT_WAITS)
    program.chmod(0o755)
    temp, path = real_runs.temp_in(tmp_path), f"{program.parent}:{os.environ['PATH']}"
    env = real_runs.environment(tmp_path, PATH=path, TMPDIR=str(temp))
    with subprocess.Popen([sys.executable, "-c", ASKS], cwd=real_runs.REPO, env=env, stderr=subprocess.DEVNULL) as race:
        assert real_runs.wait_for(lambda: (program.parent / "git.waits").exists(), 60)
        assert [name for name in real_runs.left_in_temp(tmp_path) if name.startswith("speedrun-git-")]
        race.terminate()
    assert real_runs.left_in_temp(tmp_path) == []
