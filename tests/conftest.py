"""What all tests share: quiet threads, the repository's root, a results folder, and no GPU tests without a GPU."""

import fcntl
import os
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import fork_server
import pytest
import real_runs

from bench.machine import environment

# Before torch is imported, and for every process that a test starts: threads that spin while they wait make steps 10 to
# 90 times slower as soon as something else wants the core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if (capability := os.environ.get("ATEN_CPU_CAPABILITY")) is not None:  # why: bench/launch/ranks.py
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # containers set it; each process would compile bench anew: 0.7 s,
sys.dont_write_bytecode = False  # and each process of pytest all tests with their rewritten assertions: 10 s
os.environ.pop("PYTHONUNBUFFERED", None)  # them too; a script's ranks do not get it, and only what is alike is forked
os.environ.pop("COLUMNS", None)  # of the terminal that the tests are started from: tables would fold
os.fsync = lambda file: None  # in this process: no test cuts the power, and thousands of small files wait 2 ms and more
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # nohup and a script's "&" ignore it, and runs would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


fork_server.install()

OTHER_PROFILERS = {"window", "stages", "nsys"}  # than trace; the last needs a GPU too

# Files of many runs, the longest first.
LONGEST = "stand_in wheel scripts slurm nodes ends rainy_days bisect races sweep_runs replay ladder_race "
LONGEST = [
    f"test_{name}"
    for name in (LONGEST + "profiling_runs run own adopted stages worker_by_hand telemetry cli fuzz_records").split()
]

# Files whose outcome depends on rounding: goldens, replays, the same losses another way.  CI runs them on lesser
# instruction sets too (.ci/run).
NUMERIC = "buckets causality distributed fp8 ladder masked_attention models normuon optimizers reducer replay run "
NUMERIC = [f"test_{name}" for name in (NUMERIC + "staged_training stages trainer weights").split()]


num_slow_left = pytest.StashKey()  # of a process: slow tests that it did not run, and nobody asked for them by name


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the slow tests too, which are otherwise only run by name")


BROWSED = "site"  # pages of this file are opened in a browser without --all too


def pytest_itemcollected(item):
    if item.get_closest_marker("browser") and item.path.stem != f"test_{BROWSED}":
        item.add_marker(pytest.mark.slow)
    if item.path.stem in NUMERIC:
        item.add_marker(pytest.mark.numeric)


def pytest_xdist_auto_num_workers(config):
    """Processes of ./run.sh test: two, as more disturb each other's clocks; with a GPU one, which has it all."""
    return 0 if shutil.which("nvidia-smi") else min(2, environment.usable_cpus())


@pytest.fixture(scope="session")
def repo():
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory):
    """Where this machine counts the lines of ledgers: a folder of the tests' own, also for what they start."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture
def results_dir(tmp_path):
    """An empty results folder of the test's own."""
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The results folder, and where the user stands: both a folder of the test's own."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path))
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    return tmp_path


# ---- finished runs that tests share.  To be read only: a test that changes one copies it first (real_runs.copy_of).


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory):
    """shared_run(name, *overrides) -> the folder of that short run, made once, also for processes of pytest -n."""
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
    """The same without instruments."""
    return shared_run("bare", "seed=5", "instruments=[]")


@pytest.fixture(scope="session")
def ranks_run(shared_run):
    """ranks_run(N): the same on N ranks of a thread each."""
    one_each = [word for word in real_runs.TWO if "num_threads" in word]
    return lambda number: shared_run(f"{number}_rank", "seed=5", f"hardware.num_processes={number}", *one_each)


@pytest.fixture(scope="session")
def two_rank_run(ranks_run):
    """The same on two ranks."""
    return ranks_run(2)


@pytest.fixture(scope="session")
def every_instrument_run(shared_run):
    """The same with all instruments but OTHER_PROFILERS: two at once crash a process."""
    every = sorted(path.stem for path in (real_runs.REPO / "conf" / "instruments").glob("*.yaml"))
    chosen = [name for name in every if name not in OTHER_PROFILERS]
    trace = ["instruments.trace.first_step=3", "instruments.trace.warmup_steps=1", "instruments.trace.active_steps=2"]
    words = [f"instruments=[{','.join(chosen)}]", *trace, "instruments.memory_history.first_step=3"]
    return shared_run("every_instrument", "seed=5", *words)


@pytest.fixture(scope="session")
def diverged_run(shared_run):
    """A run that failed because its loss became nan."""
    return shared_run("diverged", "optim.lr=1e30", "optim.grad_clip_norm=null", "goal.num_steps=50")


def pytest_configure(config):
    """pytest -n --dist loadfile hands out files in our order, not by how many tests they have."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen: torch is asked only if a GPU test is left
def pytest_collection_modifyitems(config, items):
    """Slow tests wait for --all; files that take longest come first, so that none is left at the end; GPU tests without
    a GPU are skipped.
    """
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
    """With --all, or where files, tests, -m, -k or --lf say which tests are meant."""
    option = config.option
    by_name = any(not Path(argument.partition("::")[0]).is_dir() for argument in config.args)
    return option.all or by_name or bool(option.markexpr or option.keyword or getattr(option, "lf", False))


def pytest_sessionfinish(session):
    """A process of pytest -n hands its count over."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_slow_left"] = session.config.stash.get(num_slow_left, 0)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node):
    """The controller's count is that of any of its processes: each has collected all tests."""
    node.config.stash[num_slow_left] = getattr(node, "workeroutput", {}).get("num_slow_left", 0)


def pytest_terminal_summary(terminalreporter, config):
    if number := config.stash.get(num_slow_left, 0):
        terminalreporter.write_line(f"{number} tests run only with --all: ./run.sh test --all")


def _torch_sees_gpu():
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver too old for this torch is a reason to skip, not to stop
        return torch.cuda.is_available()
