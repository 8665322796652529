"""What all tests share: quiet threads, the repository's root, a results folder, and no GPU tests without a GPU."""

import os
import warnings
from pathlib import Path

import pytest

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
