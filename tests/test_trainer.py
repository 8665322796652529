"""One rank's trainer: the warm-up leaves no trace, and micro-steps are the whole batch."""

import copy
import functools
import itertools

import pytest
import real_runs
import staged
import torch

from bench.launch.prepare import prepare
from bench.training import distributed


@pytest.fixture(params=["adamw", "muon", "groups"])
def trainer(request):
    overrides = [*real_runs.SHORT, "hardware.num_threads=1", f"optim={request.param}", "model=modern"]
    trainer, _, _ = staged.trainer_of_job(prepare(overrides))
    yield trainer
    trainer.close()


def test_a_compiled_model_of_several_ranks_is_cut_where_ddp_reduces_so_that_it_overlaps_backward(monkeypatch):
    """Dynamo cuts the graph at DDP's buckets, whose backward passes end one after the other.

    One graph would hand over all gradients at its end, with nothing left to reduce them beside.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    graphs = []
    backend = functools.partial(torch.compile, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    monkeypatch.setattr(torch, "compile", backend)
    overrides = [
        "model.num_layers=4",
        "model.width=128",
        "hardware.num_threads=1",
        "hardware.num_processes=2",
        "hardware.compile=true",
    ]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # its collectives do nothing
    try:
        two = distributed.Ranks(0, 2, torch.device("cpu"))
        trainer, _, _ = staged.trainer_of_job(prepare([*real_runs.SHORT, *overrides]), two)
        trainer.evaluate(max_batches=1)
        assert len(graphs) == 1  # validation has nothing to reduce
        trainer.reducer.forward(*trainer.loader.next())
        assert len(graphs) >= 3  # 0.8M parameters are more than DDP's first bucket of 1 MiB
        trainer.close()
    finally:
        torch.distributed.destroy_process_group()
        torch._dynamo.reset()


def test_flops_that_are_no_whole_numbers_are_rounded_or_refused(trainer, monkeypatch):
    """A record holds whole numbers: a user's model may count in floats."""
    monkeypatch.setattr(trainer.model, "flops_per_token", lambda seq_len: 1234.6)
    ((flops, _),) = trainer.flops_per_token()
    assert (flops, type(flops)) == (1235, int)
    for odd in (None, "many", float("nan"), -1):
        monkeypatch.setattr(trainer.model, "flops_per_token", lambda seq_len, odd=odd: odd)
        with pytest.raises(ValueError, match=rf"model.arch=.*: flops_per_token\(\d+\) gave {odd!r}: return the FLOPs"):
            trainer.flops_per_token()


def test_the_warm_up_is_undone_bit_for_bit(trainer):
    weights = copy.deepcopy(trainer.model.state_dict())
    rng, place = torch.get_rng_state(), trainer.loader.state_dict()
    times = trainer.warm_up()
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert trainer.loader.state_dict() == place == {"step": 0, "micro_step": 0}
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert times["warmup_s"] > 0 and times["compile_s"] is None


def test_what_is_asked_at_the_end_leaves_everything_as_it_was(trainer):
    trainer.warm_up()
    trainer._instruments.on_step_start(0)
    trainer.step(0)
    val_loss = trainer.evaluate()
    before = copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.loader.state_dict()))
    rng = torch.get_rng_state()
    facts = trainer.check_at_end()
    assert facts["causality"]["found"] == "causal" and facts["evaluation"]["trained"] == []
    assert facts["evaluation"]["first_nats"] == facts["evaluation"]["repeated_nats"]
    assert torch.equal(torch.get_rng_state(), rng)
    after = trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.loader.state_dict()
    for old, new in zip(before[:2], after[:2], strict=True):
        assert all(torch.equal(*pair) for pair in zip(staged.tensors(old), staged.tensors(new), strict=True))
    assert before[2] == after[2] and trainer.model.training
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert trainer.evaluate() == val_loss


def test_a_buffer_that_a_model_makes_for_each_shape_is_no_fault_of_the_check_at_the_end(trainer):
    lengths = itertools.count(1)

    def makes_buffers(model, args):
        model.register_buffer("cache", torch.zeros(next(lengths)), persistent=False)
        model.register_buffer(f"of_{next(lengths)}", torch.zeros(1), persistent=False)

    trainer.warm_up()
    trainer.evaluate()
    trainer.model.register_forward_pre_hook(makes_buffers)
    assert trainer.check_at_end()["causality"]["found"] == "causal"


def test_the_optimizer_is_reset_with_its_memory_kept(trainer):
    trainer.warm_up()
    remembered = list(staged.tensors(trainer.optimizer.state_dict()))
    assert len(remembered) >= 10  # allocated, so that no timed step has to
    assert all(not value.any() for value in remembered)
    before = [value.data_ptr() for value in remembered]
    trainer._instruments.on_step_start(0)
    trainer.step(0)
    after = list(staged.tensors(trainer.optimizer.state_dict()))
    assert [value.data_ptr() for value in after] == before
    assert any(value.any() for value in after)
