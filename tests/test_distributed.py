"""The timeout of collectives: long while ranks compile, the config's own while they train."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from bench.training import distributed


@pytest.fixture
def alone(monkeypatch):
    """What start() asked of torch, whose process group then has this process alone."""
    asked, real = {}, dist.init_process_group

    def init(backend, **words):
        asked.update(words, backend=backend)
        real("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=words["timeout"])

    monkeypatch.setattr(distributed.dist, "init_process_group", init)
    monkeypatch.setenv("WORLD_SIZE", "2")
    yield asked
    dist.destroy_process_group()


def timeout_of_group():
    return _get_default_group()._get_backend(torch.device("cpu")).options._timeout


def test_collectives_wait_as_long_as_they_were_last_given(alone):
    """A run gives them WARMUP_TIMEOUT_S at least until its warm-up ends, doctor its own seconds."""
    distributed.start("cpu", distributed.WARMUP_TIMEOUT_S)
    assert alone["timeout"] == timeout_of_group() == datetime.timedelta(seconds=600)
    distributed.set_timeout(120.0)
    assert timeout_of_group() == datetime.timedelta(seconds=120)
