"""Flat buffers of gradients: where tensors lie in them, when they are reduced, how a compiled model is cut for it."""

import pytest
import torch
from test_reducer import SMALL, job_of, trainer_of
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.config import compose
from bench.training import buckets, distributed, reducer
from bench.training.reducer import cut_at


def parameters(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.full((size,), float(size), dtype=dtype)) for size in sizes]


def places(layout):
    return [(slot.parameter.numel(), slot.start) for slot in layout.slots]


def test_tensors_are_packed_from_the_last_on_each_at_a_multiple_of_64():
    (layout,) = buckets.packed(parameters(100, 1, 64), 2, most_bytes=10_000)
    assert places(layout) == [(64, 0), (1, 64), (100, 128)]
    assert layout.part_len == 128  # 64 + 64 + 128 = 256 elements, half of them a rank
    (layout,) = buckets.packed(parameters(64), 8, most_bytes=10_000)
    assert layout.part_len == 64  # 8 for each rank would be no multiple of 64: most ranks have zeros


def test_a_full_buffer_or_another_dtype_begins_a_new_one():
    tensors_in_order = [*parameters(64, dtype=torch.bfloat16), *parameters(64, 64, 64)]
    layouts = buckets.packed(tensors_in_order, 1, most_bytes=512)
    assert [len(layout.slots) for layout in layouts] == [2, 1, 1]


def test_a_gradient_in_a_buffer_has_its_tensors_strides_as_fused_adamw_needs(pretended):
    weight = nn.Parameter(torch.ones(3, 2).T)
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=True)
    bucket = buckets.Reduced(buckets.packed([weight], 2, 100)[0], pretended)
    weight.grad = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, -1.0]])
    bucket.launch(), bucket.wait()
    optimizer.step()
    assert weight.flatten().tolist() == pytest.approx([0.9, 1.1, 0.9, 0.9, 0.9, 1.1])
    with_gaps = nn.Parameter(torch.ones(3, 4)[:, :2])
    assert buckets.Slot(with_gaps, 1).of(torch.arange(8.0)).tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_owned_tensors_lie_in_their_ranks_part_one_of_each_rank_side_by_side():
    six = parameters(64, 128, 64, 64, 128, 64)
    (layout,) = buckets.owned(six, [[1, 0, 3], [4, 2]], most_bytes=10_000)
    # rows by their first tensor, the last first: 3 of rank 0; 1 and 4; 0 and 2
    assert layout.part_len == 64 + 128 + 64
    assert places(layout) == [(64, 0), (128, 64), (128, 256 + 64), (64, 192), (64, 256 + 192)]
    assert [len(bucket.slots) for bucket in buckets.owned(six, [[1, 0, 3], [4, 2]], most_bytes=1)] == [1, 2, 2]


# ---- when they are reduced


@pytest.fixture
def pretended():
    """Rank 0 of two, whose collectives do nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield distributed.Ranks(0, 2, torch.device("cpu"))
    torch.distributed.destroy_process_group()


@pytest.fixture
def sharded(pretended):
    trainer = trainer_of(pretended, job_of(2, "optim=muon", "hardware.reducer=shard"))
    yield trainer
    trainer.close()


def one_pass(trainer, is_last):
    with trainer.reducer.micro_step(is_last):
        loss = trainer.reducer.forward(*trainer.loader.next())
        loss.backward()
    return loss


def test_buckets_are_reduced_while_backward_runs_and_in_the_last_micro_step_alone(sharded, monkeypatch):
    launched, arrived = [], []
    real = buckets.Reduced.launch
    monkeypatch.setattr(buckets.Reduced, "launch", lambda self: launched.append(len(arrived)) or real(self))
    embedding = sharded.model.embedding.weight  # its gradient is the last
    for parameter in sharded.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda tensor: arrived.append(tensor))
    sharded.reducer.micro_step(False)
    one_pass(sharded, is_last=False)
    assert launched == [] and all(parameter.grad is not None for parameter in sharded.model.parameters())
    arrived.clear()
    one_pass(sharded, is_last=True)
    num_tensors = len(list(sharded.model.parameters()))
    assert len(launched) == len(sharded.reducer._order) >= 4 and arrived[-1] is embedding
    sharded.update(0)
    launched.clear(), arrived.clear()
    sharded.reducer.expect(None)
    one_pass(sharded, is_last=True)  # now in the order in which they filled
    assert sum(num < num_tensors - 1 for num in launched) >= len(launched) - 1, (launched, num_tensors)
    assert all(parameter.grad is None for parameter in sharded.model.parameters())


@pytest.mark.parametrize("kind", ["plain", "shard"])
def test_a_tensor_without_a_gradient_is_named(pretended, kind):
    trainer = trainer_of(pretended, job_of(2, "optim=muon", f"hardware.reducer={kind}"))
    one_pass(trainer, is_last=True)
    trainer.update(0)
    with trainer.reducer.micro_step(is_last=True):
        trainer.model.blocks[0].mlp.up.weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="no gradient of .*embedding.weight.*: every tensor must take part"):
        trainer.update(1)
    trainer.close()


def test_gradients_that_are_kept_over_a_step_are_refused(sharded):
    """Sharding would count only this rank's part of them."""
    one_pass(sharded, is_last=True)
    sharded.reducer.clip(None)
    sharded.reducer.step()
    with pytest.raises(RuntimeError, match="hardware.reducer=shard: gradients are left from the step before"):
        sharded.reducer.expect(None)


R53 = ["model.arch=r53", "model.num_layers=4", "model.args={activations:float32,block:16}", "optim=groups"]


def test_an_embedding_that_rests_is_not_sent_to_the_other_ranks(pretended, monkeypatch):
    trainer = trainer_of(pretended, job_of(2, *R53, "hardware.reducer=shard"))
    sent, publish = [], buckets.Sliced.publish
    monkeypatch.setattr(buckets.Sliced, "publish", lambda bucket: sent.append(bucket) or publish(bucket))
    trainer.step(0)
    assert sent and trainer.reducer._bucket_of[trainer.model.embedding.weight] not in sent
    trainer.close()


def test_an_untied_embedding_needs_the_heads_update_rule(pretended):
    overrides = ["optim.groups.head.name=cautious_adam", "stages=[{untied:true}]", "hardware.reducer=shard"]
    with pytest.raises(ValueError, match=r"an untied embedding \(AdamW\) takes over the head's state \(CautiousAdam\)"):
        trainer_of(pretended, job_of(2, *R53, *overrides))


def test_an_optimizer_of_which_nothing_is_known_gets_every_gradient(pretended):
    config = compose.compose([*SMALL, "hardware=cpu", "hardware.reducer=shard"])
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    chosen = reducer.reducer_for(config, model, optimizer, pretended)
    with chosen.micro_step(is_last=True):
        model(torch.ones(3, 8)).sum().backward()
    chosen.clip(None)
    chosen.step()
    assert {type(bucket) for bucket in chosen._order} == {buckets.Reduced}
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    chosen.close()


def test_a_compiled_model_is_cut_by_the_size_of_its_tensors_not_of_the_buffers_they_lie_in():
    """Eight layers of 16 KiB in one buffer: two graphs of 64 KiB, not one a layer."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    (layout,) = buckets.packed(list(model.parameters()), 1, most_bytes=2**30)
    flat = torch.zeros(layout.part_len)
    for slot in layout.slots:
        slot.parameter.data = slot.of(flat).copy_(slot.parameter.data)
    x = torch.randn(2, 64)
    expected = model(x).sum()
    expected.backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    graphs = []

    @torch._dynamo.register_backend(name="counted")
    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    try:
        compiled = torch.compile(model, dynamic=False, backend=cut_at(2**16, "counted"))
        compiled(x).sum().backward()
        assert len(graphs) == 2
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads))
        with torch.no_grad():
            assert compiled(x).sum() == expected
        assert len(graphs) == 3  # the validation's, whole
    finally:
        torch._dynamo.reset()
