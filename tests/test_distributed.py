"""Collectives: their timeout, and what differs between backends and versions of torch."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from bench.training import distributed


@pytest.fixture
def alone(monkeypatch):
    """What start() asked of torch, whose process group then has this process alone."""
    requested, real = {}, dist.init_process_group

    def init(backend, **options):
        requested.update(options, backend=backend)
        real("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=options["timeout"])

    monkeypatch.setattr(distributed.dist, "init_process_group", init)
    monkeypatch.setenv("WORLD_SIZE", "2")
    yield requested
    dist.destroy_process_group()


def timeout_of_group():
    return _get_default_group()._get_backend(torch.device("cpu")).options._timeout


def test_collectives_wait_as_long_as_they_were_last_given(alone):
    """A run sets at least WARMUP_TIMEOUT_S until its warm-up ends; doctor sets its own timeout."""
    distributed.start("cpu", distributed.WARMUP_TIMEOUT_S)
    assert alone["timeout"] == timeout_of_group() == datetime.timedelta(seconds=600)
    distributed.set_timeout(120.0)
    assert timeout_of_group() == datetime.timedelta(seconds=120)


@pytest.mark.parametrize(
    ("name", "older"),
    [("reduce_scatter_single", "reduce_scatter_tensor"), ("all_gather_single", "all_gather_into_tensor")],
)
def test_a_torch_without_the_new_names_is_asked_by_the_old_ones(alone, monkeypatch, name, older):
    distributed.start("cpu", 60)
    monkeypatch.delattr(dist, name, raising=False)
    calls = []
    monkeypatch.setattr(dist, older, lambda *tensors, **options: calls.append((tensors, options)))
    flat = torch.arange(4.0)
    call = distributed.scatter_mean if "scatter" in name else distributed.gather_in_place
    call(*((flat[:2], flat) if "scatter" in name else (flat, flat[:2])))
    ((tensors, options),) = calls
    assert options["async_op"] is True
    assert [len(tensor) for tensor in tensors] == ([2, 4] if "scatter" in name else [4, 2])


def test_nccl_divides_itself_and_gloo_is_divided_for(alone, monkeypatch):
    distributed.start("cpu", 60)
    two, ops = distributed.Ranks(0, 2, torch.device("cpu")), []
    monkeypatch.setattr(dist, "all_reduce", lambda flat, op, async_op: ops.append(op))
    for backend, mean in (("gloo", 3.0), ("nccl", 6.0)):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        distributed.all_mean(torch.ones(2))
        assert distributed.as_mean(torch.full((2,), 6.0), two).tolist() == [mean, mean]
    assert ops == [dist.ReduceOp.SUM, dist.ReduceOp.AVG]
