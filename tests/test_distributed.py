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


@pytest.mark.parametrize(("timeout_s", "in_warm_up_s"), [(120.0, 600), (900.0, 900)])
def test_collectives_wait_ten_minutes_until_warm_up_ends(alone, timeout_s, in_warm_up_s):
    distributed.start("cpu", timeout_s)
    assert alone["timeout"] == timeout_of_group() == datetime.timedelta(seconds=in_warm_up_s)
    distributed.set_timeout(timeout_s)
    assert timeout_of_group() == datetime.timedelta(seconds=timeout_s)
