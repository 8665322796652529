"""The Adam of records 50 to 53: compiled and uncompiled, in parts and whole, and by numbers worked out by hand."""

import pytest
import torch

from models.adam_update import CautiousAdam

SHAPES = [(40, 24), (8, 24)]


def moved(compiled, cut=None, still=True, num_steps=6):
    """The tensors after steps whose learning rate and beta1 change.  cut: only these elements of each, flattened."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    grads = [[1e-3 * torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(num_steps)]
    if cut is not None:
        tensors = [tensor.flatten()[cut].clone() for tensor in tensors]
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    row = {"params": parameters, "peak_lr": 0.1}
    optimizer = CautiousAdam([row], 0.1, (0.7, 0.95), 1e-8, 0.05, still, compiled)
    for step, step_grads in enumerate(grads):
        optimizer.param_groups[0].update(lr=0.1 / (1 + step), betas=(0.7 + 0.02 * step, 0.95))
        for parameter, grad in zip(parameters, step_grads, strict=True):
            grad[0] = 0  # a row that stays
            parameter.grad = grad if cut is None else grad.flatten()[cut].clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def test_the_first_step_is_the_one_worked_out_by_hand():
    """m / sqrt(v) is 1 at step 1: each weight goes 0.1 down, those above 0 decay by 0.1 * 0.1 * 0.5 of themselves."""
    weights = torch.nn.Parameter(torch.tensor([2.0, -2.0]))
    weights.grad = torch.tensor([3.0, 3.0])
    CautiousAdam([{"params": [weights]}], 0.1, (0.9, 0.95), 1e-12, 0.5, False).step()
    assert weights.tolist() == pytest.approx([2.0 - 0.1 - 0.01, -2.1], abs=1e-6)


@pytest.mark.parametrize("still", [True, False])
def test_a_part_of_the_elements_moves_as_in_the_whole(still):
    whole = moved(False, still=still)
    for cut in (slice(0, 100), slice(100, 192)):
        part = moved(False, cut=cut, still=still)
        assert all(torch.equal(piece, flat[cut]) for piece, flat in zip(part, map(torch.flatten, whole)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, as it imports its compiler
def test_compiled_it_is_the_same_up_to_rounding_and_is_compiled_once():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    for a, b in zip(moved(compiled=True), moved(compiled=False), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
