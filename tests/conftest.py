"""Fixtures and settings of all tests: threads that do not spin, results folders, shared runs, which tests run."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import fork_server
import pytest
import real_runs

from bench.machine import environment

# Set before torch is imported, and for every process that a test starts: threads that spin while they wait make steps
# 10 to 90 times slower as soon as something else needs the core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if (capability := os.environ.get("ATEN_CPU_CAPABILITY")) is not None:  # why: bench/launch/ranks.py
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # set by containers; each process would compile bench again (0.7 s)
sys.dont_write_bytecode = False  # and each process of pytest all tests with their rewritten assertions (10 s)
os.environ.pop("PYTHONUNBUFFERED", None)  # set by containers; a script's ranks lack it, so they could not be forks
os.environ.pop("COLUMNS", None)  # set by terminals; tables would be folded
os.fsync = lambda file: None  # for this process: no test cuts the power, and each of thousands of files would take 2 ms
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # ignored under nohup and "&", which runs would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)


fork_server.install()

OTHER_PROFILERS = {"window", "stages", "nsys"}  # profilers other than trace; nsys also needs a GPU

# test files that start many runs, the longest first
LONGEST = "stand_in wheel scripts slurm nodes ends rainy_days bisect races sweep_runs replay ladder_race "
LONGEST = [
    f"test_{name}"
    for name in (LONGEST + "profiling_runs run own adopted stages worker_by_hand telemetry cli fuzz_records").split()
]

# test files whose outcome depends on rounding: goldens, replays, the same losses computed another way; CI also runs
# them on older instruction sets (.ci/run)
NUMERIC = "buckets causality distributed fp8 ladder masked_attention models normuon optimizers reducer replay run "
NUMERIC = [f"test_{name}" for name in (NUMERIC + "staged_training stages trainer weights").split()]


num_slow_left = pytest.StashKey()  # number of slow tests that a process deselected


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the slow tests too, which are otherwise only run by name")


BROWSED = "site"  # the test file whose pages are opened in a browser even without --all


def pytest_itemcollected(item):
    if item.get_closest_marker("browser") and item.path.stem != f"test_{BROWSED}":
        item.add_marker(pytest.mark.slow)
    if item.path.stem in NUMERIC:
        item.add_marker(pytest.mark.numeric)


def pytest_xdist_auto_num_workers(config):
    """Returns the processes of ./run.sh test: two, as more disturb each other's clocks; with a GPU, only this one."""
    return 0 if shutil.which("nvidia-smi") else min(2, environment.usable_cpus())


@pytest.fixture(scope="session")
def repo():
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory):
    """Moves this machine's line counts of ledgers to a temporary folder, for the tests and what they start."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def one_torch_thread():
    """Lets torch compute with one thread during the tests of a module."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def results_dir(tmp_path):
    """An empty results folder of this test."""
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A temporary folder that is both the results folder and the user's working folder."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path))
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    return tmp_path


@pytest.fixture
def printed(capsys):
    """printed(verb, *arguments, code=0): what that verb of bench/cli prints; code: its exit code."""

    def printed(verb, *arguments, code=0):
        assert verb.main([*map(str, arguments)]) == code
        return capsys.readouterr().out

    return printed


@pytest.fixture
def answer_of(printed):
    """answer_of(verb, *arguments, code=0): the answer of that verb to a program, with --json."""
    return lambda verb, *arguments, code=0: json.loads(printed(verb, *arguments, "--json", code=code))


# ---- finished runs that tests share; a test that changes one must copy it first (real_runs.copy_of)


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory):
    """A function (name, *overrides) that returns the folder of a short run, which all test processes share."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def folder_of(name, *overrides):
        base = root / f"{name}_run"
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not base.exists():
                base.mkdir()
                real_runs.finish(base, *overrides)
        (folder,) = real_runs.folders(base / "results")
        return folder

    return folder_of


@pytest.fixture(scope="session")
def finished_run(shared_run):
    """The folder of a complete run: one rank, the default instruments."""
    return shared_run("finished", "seed=5")


@pytest.fixture(scope="session")
def bare_run(shared_run):
    """The finished run without instruments."""
    return shared_run("bare", "seed=5", "instruments=[]")


@pytest.fixture(scope="session")
def ranks_run(shared_run):
    """A function that returns the finished run on N ranks of one thread each."""
    one_each = [override for override in real_runs.TWO if "num_threads" in override]
    return lambda number: shared_run(f"{number}_rank", "seed=5", f"hardware.num_processes={number}", *one_each)


@pytest.fixture(scope="session")
def two_rank_run(ranks_run):
    """The finished run on two ranks."""
    return ranks_run(2)


@pytest.fixture(scope="session")
def every_instrument_run(shared_run):
    """The finished run with all instruments but OTHER_PROFILERS: two profilers at once crash a process."""
    every = sorted(path.stem for path in (real_runs.REPO / "conf" / "instruments").glob("*.yaml"))
    chosen = [name for name in every if name not in OTHER_PROFILERS]
    trace = ["instruments.trace.first_step=3", "instruments.trace.warmup_steps=1", "instruments.trace.active_steps=2"]
    overrides = [f"instruments=[{','.join(chosen)}]", *trace, "instruments.memory_history.first_step=3"]
    return shared_run("every_instrument", "seed=5", *overrides)


@pytest.fixture(scope="session")
def diverged_run(shared_run):
    """A run that failed because its loss became nan."""
    return shared_run("diverged", "optim.lr=1e30", "optim.grad_clip_norm=null", "goal.num_steps=50")


def pytest_configure(config):
    """Makes pytest -n --dist loadfile distribute files in our order, not by their numbers of tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)  # after -m and -k, so that torch is imported only if a GPU test is left
def pytest_collection_modifyitems(config, items):
    """Deselects slow tests without --all, sorts the longest files first, and skips GPU tests without a GPU."""
    if not _runs_slow(config):
        slow_items = [item for item in items if item.get_closest_marker("slow")]
        config.stash[num_slow_left] = len(slow_items)
        config.hook.pytest_deselected(items=slow_items)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _torch_sees_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="torch sees no NVIDIA GPU"))


def _runs_slow(config):
    """Returns whether slow tests run: with --all, or if files, tests, -m, -k or --lf select tests."""
    option = config.option
    by_name = any(not Path(argument.partition("::")[0]).is_dir() for argument in config.args)
    return option.all or by_name or bool(option.markexpr or option.keyword or getattr(option, "lf", False))


def pytest_sessionfinish(session):
    """Sends the count of slow tests from a process of pytest -n to the controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_slow_left"] = session.config.stash.get(num_slow_left, 0)


@pytest.hookimpl(optionalhook=True)  # defined by pytest-xdist
def pytest_testnodedown(node):
    """Takes the count of slow tests from any process, since each of them has collected all tests."""
    node.config.stash[num_slow_left] = getattr(node, "workeroutput", {}).get("num_slow_left", 0)


def pytest_terminal_summary(terminalreporter, config):
    if number := config.stash.get(num_slow_left, 0):
        terminalreporter.write_line(f"{number} tests run only with --all: ./run.sh test --all")


def _torch_sees_gpu():
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with a driver too old for this torch, skip instead of failing
        return torch.cuda.is_available()
