"""What all tests share: quiet threads, the repository's root, a results folder, and no GPU tests without a GPU."""

import os
import warnings
from pathlib import Path

import pytest
import racing

# Before torch is imported, and for every process that a test starts: threads that spin while they wait make steps 10 to
# 90 times slower as soon as something else wants the core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def repo():
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def results_dir(tmp_path):
    """An empty results folder of the test's own."""
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


SHARED_RUNS = {"finished_run", "bare_run", "two_rank_run", "every_instrument_run", "diverged_run"}

# ---- finished runs that tests share.  To be read only: a test that changes one copies it first (racing.copy_of).


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The folder of a short complete run: one rank, the default instruments."""
    return racing.finished(tmp_path_factory.mktemp("finished"), "seed=5")


@pytest.fixture(scope="session")
def bare_run(tmp_path_factory):
    """The same without instruments."""
    return racing.finished(tmp_path_factory.mktemp("bare"), "seed=5", "instruments=[]")


@pytest.fixture(scope="session")
def two_rank_run(tmp_path_factory):
    """The same on two ranks."""
    return racing.finished(tmp_path_factory.mktemp("two_ranks"), "seed=5", *racing.TWO)


@pytest.fixture(scope="session")
def every_instrument_run(tmp_path_factory):
    """The same with all instruments but window and stages: each is a profiler, and two at once crash a process."""
    every = sorted(path.stem for path in (racing.REPO / "conf" / "instruments").glob("*.yaml"))
    chosen = [name for name in every if name not in ("window", "stages")]
    return racing.finished(
        tmp_path_factory.mktemp("every_instrument"),
        "seed=5",
        f"instruments=[{','.join(chosen)}]",
        "instruments.trace.first_step=3",
        "instruments.trace.warmup_steps=1",
        "instruments.trace.active_steps=2",
        "instruments.memory_history.first_step=3",
    )


@pytest.fixture(scope="session")
def diverged_run(tmp_path_factory):
    """A run whose loss becomes nan -> (its folder, what the command said)."""
    base = tmp_path_factory.mktemp("diverged")
    words = ["optim.lr=1e30", "optim.grad_clip_norm=null", "goal.num_steps=50"]
    done = racing.bench(base / "results", "run", *racing.SHORT, *words, TMPDIR=str(racing.temp_in(base)))
    (folder,) = racing.folders(base / "results")
    return folder, done


def pytest_itemcollected(item):
    """For --dist loadgroup: the tests of a file go to one process, and so do those that share finished runs."""
    if item.config.pluginmanager.hasplugin("xdist"):
        shared = SHARED_RUNS & set(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.xdist_group("finished runs" if shared else item.path.name))


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen: torch is asked only if a GPU test is left
def pytest_collection_modifyitems(items):
    """Skip GPU tests where torch sees no GPU."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _torch_sees_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="torch sees no NVIDIA GPU"))


def _torch_sees_gpu():
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver too old for this torch is a reason to skip, not to stop
        return torch.cuda.is_available()
