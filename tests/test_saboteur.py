"""A contestant that burns the other arm's cores between its own runs: found, named, and the race is refused."""

import contextlib
import marshal
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import claimed
import pytest
import real_runs
import scripted
from test_sandbox import needs_one

from bench.api import comparing
from bench.base import private
from bench.base.paths import REPO
from bench.cli import race
from bench.cli.main import main as bench
from bench.machine import environment, processes, surroundings
from bench.plans.race import arm_process
from bench.record import validity

STEPS = """
import os, signal, subprocess, sys, time

print("step:0/2 val_loss:5.5000 train_time:0ms step_avg:nanms", flush=True)
for step in (1, 2):
    time.sleep(0.1)
    print(f"step:{step}/2 val_loss:{5.5 - step / 4:.4f} train_time:{100 * step}ms step_avg:100.00ms", flush=True)
"""
BURNS = "import time; until_s = time.monotonic() + 90\nwhile time.monotonic() < until_s: pass"
# In a session of its own, without environment, its parent gone; then it ends those that would have ended it.
DAEMON = f"""
subprocess.run(["sh", "-c", 'setsid env -i "$@" &', "sh", sys.executable, "-c", {BURNS!r}, "a-saboteur"])
time.sleep(0.5)
pid = os.getpid()
parent_of = lambda pid: int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])
chain = [parent_of(pid), parent_of(parent_of(pid))][:NUM_KILLED]
for pid in chain[::-1]:
    os.kill(pid, signal.SIGKILL)
time.sleep(99 * (NUM_KILLED > 0))
"""


@pytest.fixture
def raced(tmp_path):
    """raced() races a script against one with more code.  Returns (exit code, what was printed, its records)."""

    def go(code_of_b, *overrides):
        for arm, code in (("a", ""), ("b", code_of_b)):
            (tmp_path / arm).mkdir()
            (tmp_path / arm / "train.py").write_text(STEPS + code)
        arms = [f"{arm.upper()}=script={tmp_path / arm / 'train.py'}" for arm in "ab"]
        done = real_runs.bench(tmp_path / "results", "race", *arms, "n=2", *scripted.TRACK, "--anyway", *overrides)
        runs = [real_runs.run_json(folder) for folder in real_runs.folders(tmp_path / "results")]
        return done.returncode, done.stdout + done.stderr, runs

    yield go
    for pid in saboteurs():
        os.kill(pid, signal.SIGKILL)


def saboteurs():
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"a-saboteur" in (path / "cmdline").read_bytes().split(b"\0"):
                pids.append(int(path.name))
    return pids


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), pytest.param(("script.sandbox=true",), marks=needs_one)])
def test_a_daemon_is_gone_before_the_other_arm_runs(raced, overrides):
    _, out, runs = raced(DAEMON.replace("NUM_KILLED", "0"), *overrides)
    assert (len(runs), {run["status"] for run in runs}) == (6, {"complete"}), out
    assert saboteurs() == []


@pytest.mark.slow
@pytest.mark.parametrize("num_killed", [1, 2])
def test_what_kills_its_guard_and_its_launcher_leaves_nothing_and_ends_its_race(raced, num_killed):
    """Its guard alone, which is its parent, or the launcher too, the guard's."""
    code, out, runs = raced(DAEMON.replace("NUM_KILLED", str(num_killed)))
    assert code == 1 and saboteurs() == [], out
    assert "which has been ended" in out or "it has been ended" in out
    assert "of B" in out and "(process " in out
    if num_killed == 1:
        assert [run["failure"]["kind"] for run in runs if run["failure"]] == ["processes_left"]


SLOWS = """
pid = os.getpid()
while b"race" not in open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0"):
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
os.setpriority(os.PRIO_PROCESS, pid, 3)  # which every later run of A gets from it
"""


@pytest.mark.slow
def test_what_changes_the_race_that_starts_the_other_arm_ends_it(raced):
    code, out, runs = raced(SLOWS)
    assert code == 1 and len(runs) < 3, out
    assert re.search("verdict: while .* of B ran, the priority changed, which all runs", out), out


PLANTS = """
with open(os.environ["PLANT"], "w") as file:  # in a package's folder, where the other arm's Python runs it
    file.write("import time")
"""


@pytest.mark.slow
def test_a_file_that_a_run_puts_into_the_installed_python_ends_the_race(raced, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    shown = subprocess.run([sys.executable, "-m", "site", "--user-site"], capture_output=True, text=True).stdout
    folder = Path(shown.strip())  # a virtual environment does not use it, and exits with 1
    folder.mkdir(parents=True)
    code, out, runs = raced(PLANTS, f"script.env={{PLANT: {folder / 'fast.pth'}}}")
    assert code == 1 and len(runs) < 3, out
    assert re.search(f"verdict: while .* of B ran, the Python code in {folder} changed, which all", out), out


def test_an_interpreter_that_only_a_sandbox_may_start_is_not_asked(tmp_path):
    """A stranger's folder may bring its own."""
    program = tmp_path / "program"
    environment_in(program / ".venv")
    (program / "train.py").write_text("print(1)")
    other = tmp_path / "other"
    environment_in(other)
    words = ["track=free", f"script.root={program}", "script=train.py"]
    asked = [words, [*words, f"script.python={other}/bin/python"], [*words, "script.sandbox=true"]]
    facts = arm_process.facts_of_own(REPO, asked, tmp_path / "results")
    arms = dict(enumerate({"python": own.get("python")} for own in facts))
    assert arm_process.pythons_of(arms) == [f"{program}/.venv/bin/python", f"{other}/bin/python"]


def environment_in(folder):
    """Makes a virtual environment without packages, and returns the folder in which they would be."""
    venv.create(folder)
    return folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def test_what_a_race_hands_on_to_its_runs_is_named_when_it_changes(tmp_path, monkeypatch):
    packages = environment_in(tmp_path)
    (packages / "torch/__pycache__").mkdir(parents=True)
    (packages / "torch/a.py").write_text("")
    (tmp_path / "group").mkdir()
    (tmp_path / "group/cpu.shares").write_text("1024")
    monkeypatch.setattr(environment, "cgroups", lambda controller: [tmp_path / "group"])
    pythons = [f"{tmp_path}/bin/python"]
    before = surroundings.facts(pythons)

    def changed():
        after = surroundings.facts(pythons)
        return [name for name in after if after[name] != before[name]]

    (packages / "torch/__pycache__/a.pyc").write_text("compiled")
    assert changed() == []
    for name in ("cpu.shares", "cpu.cfs_period_us", "cpu.max", "memory.high"):  # of cgroup v1 and v2
        (tmp_path / "group" / name).write_text("2")
        assert changed() == ["the limits of the control groups"]
        before = surroundings.facts(pythons)
    (tmp_path / "group/cpu.max").write_text("1")
    (packages / "torch/a.py").write_text("import time")
    assert changed() == ["the limits of the control groups", f"the Python code in {packages}"]
    (tmp_path / "bin/python").unlink()
    (tmp_path / "bin/python").write_text("#!/bin/sh\nexec python3")
    assert changed()[-1] == f"the interpreter {tmp_path}/bin/python"


def test_a_package_that_is_a_link_is_watched_too(tmp_path):
    """As uv, conda and stow install them."""
    packages, store = environment_in(tmp_path), tmp_path / "store/net"
    store.mkdir(parents=True)
    (store / "a.py").write_text("")
    (packages / "net").symlink_to(store)
    (store / "loop").symlink_to(packages)
    before = surroundings.python_code([f"{tmp_path}/bin/python"])
    (store / "a.py").write_text("import time")
    after = surroundings.python_code([f"{tmp_path}/bin/python"])
    assert [name for name in after if after[name] != before[name]] == [f"the Python code in {packages}"]


@pytest.mark.parametrize("what", ["a folder that a .pth names", "a folder that is moved", "tests of a package"])
def test_packages_are_watched_wherever_an_interpreter_finds_them(tmp_path, what):
    packages, library = environment_in(tmp_path / "env"), tmp_path / "other/site-packages"
    for folder in (tmp_path / "prepared", packages / "net", library / "net"):  # the one that is moved is the oldest
        (folder / "test").mkdir(parents=True)
        (folder / "a.py").write_text("")
        (folder / "test/b.py").write_text("")
    (library / "newest.py").write_text("")
    (packages / "other.pth").write_text(f"{library}\n")
    python = str(tmp_path / "env/bin/python")
    assert any(path.endswith(".zip") for path in surroundings._installation(python).folders)  # before the library
    (tmp_path / "python.zip").write_bytes(b"")
    assert surroundings._state_of_code(str(tmp_path / "python.zip"))[0] == 1
    before = surroundings.python_code([python])
    expected = library
    if what == "tests of a package":
        (library / "net/test/b.py").write_text("import time")
    elif what == "a folder that a .pth names":
        (library / "net/a.py").write_text("import time")
    elif what == "a folder that is moved":
        (library / "net").rename(tmp_path / "away")
        (tmp_path / "prepared").rename(library / "net")
    after = surroundings.python_code([python])
    shown = private.redact(str(expected), REPO)
    assert [name for name in after if after[name] != before[name]] == [f"the Python code in {shown}"]


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_bytecode_of_another_version_is_compared_by_that_version(tmp_path, version):
    if not (python := shutil.which(f"python{version}")):
        pytest.skip(f"this machine has no Python {version}")
    done = subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "env"], capture_output=True)
    if done.returncode:
        pytest.skip(f"this machine's Python {version} makes no virtual environments")
    source = tmp_path / f"env/lib/python{version}/site-packages/helper.py"
    source.write_text("def f(x):\n    return [x for x in range(3)]\n")
    own, since_s, known = str(tmp_path / "env/bin/python"), time.time(), set()
    subprocess.run([own, "-c", "import helper"], check=True)
    assert surroundings.forged_bytecode([own], since_s, known) is None and len(known) >= 1
    (compiled,) = source.parent.glob("__pycache__/helper.*.pyc")
    forge = "import marshal, sys; file = open(sys.argv[1], 'r+b'); file.seek(16); code = compile('0', '', 'exec')"
    subprocess.run([own, "-c", f"{forge}; file.write(marshal.dumps(code))", compiled], check=True)
    assert surroundings.forged_bytecode([own], since_s, known) == str(compiled)


def test_bytecode_that_is_not_its_sources_is_found(tmp_path, monkeypatch):
    """A cheat: a .pyc that Python takes for that of an unchanged source."""
    packages = tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    tag = sys.implementation.cache_tag
    monkeypatch.setattr(surroundings, "_installation", lambda python: surroundings.Installation(tag, (str(packages),)))
    source, since_s, known = packages / "helper.py", time.time(), set()
    source.write_text("def f(x):\n    return [x for x in range(3)]\n")

    def forged():
        return surroundings.forged_bytecode([], since_s, known)

    honest = Path(py_compile.compile(str(source)))
    assert forged() is None and known == {(str(honest), honest.stat().st_ino, honest.stat().st_ctime_ns)}
    assert py_compile.compile(str(source), optimize=2) and forged() is None
    content = honest.read_bytes()
    other = compile("import time\ntime.sleep(1)", str(source), "exec")
    honest.write_bytes(content[:16] + marshal.dumps(other))
    assert forged() == str(honest)
    honest.write_bytes(content[:8] + bytes(8) + marshal.dumps(other))  # of another state of the source: it is not used
    assert forged() is None
    honest.write_bytes(content[:4] + b"\x01" + bytes(11) + marshal.dumps(other))  # unchecked: used always
    assert forged() == str(honest)
    honest.write_bytes(b"damaged")
    assert forged() == str(honest)
    assert surroundings.forged_bytecode([], time.time() + 9, set()) is None
    since_s = time.time() + 0.05
    time.sleep(0.1)
    prepared = honest.parent.rename(tmp_path / "prepared")  # and moved there during the race
    assert forged() is None
    prepared.rename(honest.parent)
    assert forged() == str(honest)


STARVED = """
import os, time
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # the least share of a core
print(flush=True)
time.sleep(99)
"""
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=[99]).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize(("code", "is_killed", "num_named"), [(STARVED, True, 0), (HEADLESS, False, 5)])
def test_what_goes_on_is_named_and_not_what_dies_slowly(monkeypatch, code, is_killed, num_named):
    """Five processes share a core with one that keeps it busy."""
    monkeypatch.setattr(processes, "DIES_WITHIN_S", 0.0)
    on_a_core = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-I", "-S", "-c"]
    with subprocess.Popen([*on_a_core, BURNS]) as busy, processes.strays() as end_strays:
        started = [subprocess.Popen([*on_a_core, code], stdout=subprocess.PIPE) for _ in range(5)]
        for process in started:
            with process.stdout:
                assert process.stdout.readline()
        if is_killed:
            processes.signal_all([process.pid for process in started], signal.SIGKILL)
        names = end_strays()
        assert not processes.children() & {process.pid for process in started}
        busy.kill()
        for process in started:
            process.wait()  # it knows that another has reaped it
    assert len(names) == num_named


def test_what_burns_in_one_arms_runs_alone_is_named_and_times_are_not_compared(tmp_path, capsys, monkeypatch):
    """A program burns there that no run has started and none can end: systemd-run, at, ssh localhost.

    A race that ends like this may be run again: exit code 75.
    """
    results = claimed.Results(tmp_path / "results")

    def burdened(run):
        run["measured"]["foreign_cpu_cores"] = 0.9
        run["foreign_programs"] = [{"name": "burner", "cpu_cores": 0.9}]
        run["validity"], run["validity_reasons"] = validity.validity(run | {"metrics": {"val_loss": 2.75}})

    arms = {"A": [], "B": []}
    for seed in range(3):
        for name, change in (("A", burdened), ("B", None)):
            folder = results.add(
                seed, 10 - 0.5 * (name == "B"), overrides=["optim.beta2=0.99"] * (name == "B"), change=change
            )
            arms[name].append(str(folder))
    assert bench(["compare", *arms["A"], "vs", *arms["B"]]) == 2
    out = capsys.readouterr().out
    assert "other programs kept the machine busy in 3 of 3 runs" in out and "burner 0.90" in out, out
    assert "race again when they have ended, with n=5 or more" in " ".join(out.split()), out
    against = comparing.compare(arms["A"], arms["B"]).against
    monkeypatch.setattr(race, "_raced", lambda *args: (tmp_path, {"result": {"against": against}}))
    assert race.main(["A=", "B=optim.beta2=0.99", "--json"]) == os.EX_TEMPFAIL
