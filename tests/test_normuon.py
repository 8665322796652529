"""NorMuon and its parts against the sources of records 38, 42 and 43, and the cautious Adam of records 50 to 53.

The golden moves were made as tests/test_ladder.py says, from the optimizer class in each record's log: four matrices of
hashed(), each a group of its own (so that none is the records' wide attention matrix), four steps of gradients of which
the last rows are 15 times the first ones.
"""

import pytest
import torch
from test_ladder import assert_near, hashed, summary

from bench.config import compose
from models.adam_update import CautiousAdam
from models.muon_update import NorMuon, newton_schulz, polar_coefficients
from models.updates import normuon

SHAPES = [(32, 32), (64, 16), (16, 64), (32, 32)]
STEPS = [(0.85, 1.0), (0.87, 1.0), (0.95, 0.7), (0.9, 0.1)]  # momentum, part of the learning rate
GOLDEN = {
    "r38": {
        "0": (0.7456267, -0.04483734),
        "1": (1.114141, 0.001774328),
        "2": (0.5604943, -0.01265561),
        "3": (0.7766039, -0.03652911),
    },
    "r42": {
        "0": (0.3723967, -0.02233306),
        "1": (0.5548856, -0.008257664),
        "2": (0.2793125, -0.005643188),
        "3": (0.3884328, -0.01837629),
    },
    "r43": {
        "0": (0.3765145, -0.0225621),
        "1": (0.562417, -0.009281792),
        "2": (0.2838461, -0.006086597),
        "3": (0.3925922, -0.01897729),
    },
}
SETTINGS = {
    "r38": {"lr": 0.06, "weight_decay": 0.0, "beta2": None, "cautious": False},
    "r42": {"lr": 0.03, "weight_decay": 0.0, "beta2": 0.95, "cautious": False},
    "r43": {"lr": 0.03, "weight_decay": 1.2, "beta2": 0.95, "cautious": True},
}


POLAR = {"ns_steps": 5, "coefficients": polar_coefficients()}


def optimizer_of(matrix, lr=1.0, weight_decay=0.0, beta2=None, cautious=False):
    return NorMuon([matrix], beta2, cautious, lr=lr, momentum=0.0, weight_decay=weight_decay, **POLAR)


def moves(lr, **settings):
    matrices = [torch.nn.Parameter(0.6 * hashed(shape, k)) for k, shape in enumerate(SHAPES)]
    before = [matrix.detach().clone() for matrix in matrices]
    optimizer = NorMuon(matrices, lr=lr, momentum=0.95, **POLAR, **settings)
    for i, (momentum, lr_frac) in enumerate(STEPS):
        for k, matrix in enumerate(matrices):
            rows = torch.linspace(0.2, 3, SHAPES[k][0])[:, None]
            matrix.grad = hashed(SHAPES[k], k + 100 * (i + 1)) * rows
        optimizer.param_groups[0].update(momentum=momentum, lr=lr * lr_frac)
        optimizer.step()
    return [matrix.detach() - start for matrix, start in zip(matrices, before, strict=True)]


@pytest.mark.parametrize("record", GOLDEN)
def test_four_steps_are_the_records(record):
    sums = summary({str(k): move for k, move in enumerate(moves(**SETTINGS[record]))})
    assert_near(sums, GOLDEN[record], lambda kind: 0.01)  # bfloat16


def test_matrices_stacked_together_move_as_one_by_one():
    for alone, stacked in zip(moves(**SETTINGS["r43"]), moves(**SETTINGS["r43"], batched="eager"), strict=True):
        assert (stacked - alone).norm() < 0.02 * alone.norm()  # bfloat16


@pytest.mark.parametrize("record", SETTINGS)
def test_a_step_of_many_matrices_has_the_bits_of_a_step_of_each_alone(record):
    """Weights of one shape are moved together: a launch for all of them, and the same numbers."""
    matrices = [hashed(shape, k) for k, shape in enumerate(SHAPES * 2)]
    together, alone = ([torch.nn.Parameter(matrix.clone()) for matrix in matrices] for _ in range(2))
    settings = {"momentum": 0.95, **POLAR, **SETTINGS[record]}
    optimizers = [NorMuon(group, **settings) for group in (together, *([matrix] for matrix in alone))]
    for step in range(2):
        for k, pair in enumerate(zip(together, alone, strict=True)):
            for matrix in pair:
                matrix.grad = hashed(matrix.shape, k + 100 * step)
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, together, alone))
    assert not any(map(torch.equal, together, matrices))


def test_polar_express_comes_nearer_to_orthogonal_than_newton_schulz():
    update = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    polar = torch.linalg.svdvals(newton_schulz(update, 5, coefficients=polar_coefficients()).float())
    muon = torch.linalg.svdvals(newton_schulz(update, 5).float())
    assert (polar - 1).abs().max() < 0.15 < 0.3 < (muon - 1).abs().max()


def test_cautious_weight_decay_leaves_weights_that_the_step_makes_larger():
    matrix = torch.nn.Parameter(torch.tensor([[2.0, -2.0], [2.0, -2.0]]))
    optimizer = optimizer_of(matrix, lr=0.1, weight_decay=3.0, cautious=True)
    with torch.no_grad():
        optimizer._move([matrix], [torch.tensor([[0.5, 0.5], [-0.5, -0.5]])], optimizer.param_groups[0])
    # a weight of 2 with an update of 0.5: 2 - 0.1 * (0.5 + 0.1 * 3 * 2) = 1.89; with one of -0.5 it grows to 2.05
    assert matrix.flatten().tolist() == pytest.approx([1.89, -2.05, 2.05, -1.89])


def test_the_momentum_rises_and_falls():
    rule = normuon.Config(
        name="normuon", tensors=["matrices"], lr=0.03, momentum_warmup_frac=0.3, momentum_cooldown_frac=0.1
    )
    optimizer = rule.build([torch.nn.Parameter(torch.zeros(2, 2))], 0.03, 0, 1, "cpu")
    for step, momentum in ((0, 0.85), (150, 0.9), (300, 0.95), (900, 0.95), (950, 0.9), (1000, 0.85)):
        rule.set_step(optimizer, step, 1000)
        assert optimizer.param_groups[0]["momentum"] == pytest.approx(momentum)


def test_muon_of_a_record_can_be_replaced_by_it():
    row = "optim.groups.matrices={name:normuon,lr:0.03,weight_decay:1.2,beta2:0.9}"
    rule = compose.compose(["experiment=r20", row]).optim.groups["matrices"]
    assert isinstance(rule, normuon.Config)
    assert (rule.lr, rule.beta2, rule.cautious, rule.momentum_warmup_frac) == (0.03, 0.9, True, 0.2153625)
    optimizer = rule.build([torch.nn.Parameter(torch.zeros(2, 2))], 0.03, 0, 1, "cpu")
    assert optimizer.coefficients == polar_coefficients()
    rule.polar_express = False
    expected = (3.4445, -4.775, 2.0315)
    assert rule.build([torch.nn.Parameter(torch.zeros(2, 2))], 0.03, 0, 1, "cpu").coefficients == expected


OF_ADAM = [(40, 24), (8, 24)]


def moved(compiled, cut=None, still=True, num_steps=6):
    """The tensors after steps whose learning rate and beta1 change.  cut: only these elements of each, flattened."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in OF_ADAM]
    grads = [[1e-3 * torch.randn(shape, generator=generator) for shape in OF_ADAM] for _ in range(num_steps)]
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
