"""What an evaluation leaves behind: a state that changes, a loss that does not come again; and what may change."""

import itertools
import sys

import pytest
import stand_in
import torch
import torch.nn.functional as F
from torch import nn

import models
from bench.record import validity
from bench.training import side_effects

NUM_BATCHES = 5
calls = []  # of a model that counts in a global


class Net(nn.Module):
    """A table of logits; evaluated() is what a test adds to its validation."""

    def __init__(self, evaluated=None):
        super().__init__()
        self.table, self.evaluated = nn.Embedding(64, 64), evaluated
        self.register_buffer("mean_nats", torch.zeros(()))

    def forward(self, tokens_BT, targets_BT):
        loss = F.cross_entropy(self.table(tokens_BT).flatten(0, 1), targets_BT.flatten())
        if self.evaluated is not None and not self.training:
            loss = self.evaluated(self, tokens_BT, targets_BT, loss)
        return loss


def checked(model):
    """After two validations, as at the end of a run."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(64, (2, 2, 16), generator=generator).unbind() for _ in range(NUM_BATCHES)]
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batches[0]).backward()
    optimizer.step()
    optimizer.zero_grad()

    def loss_of(tokens_BT, targets_BT):
        model.eval()
        with torch.no_grad():
            return model(tokens_BT, targets_BT).detach()

    losses = [[loss_of(*batch).clone() for batch in batches] for _ in range(2)][1]
    return side_effects.check(loss_of, iter(batches), losses, {"model": model, "optimizer": optimizer}, 3)


def ruled(evaluation):
    run = {
        "status": "complete",
        "metrics": {"val_loss": 3.0},
        "data": {"floor_nats": None},
        "hardware": {"device": "cuda"},
        "measured": {},
        "track": "cpu_nano",
        "referee": {"causality": {"end": {"found": "causal", "why": None}}, "evaluation": evaluation},
    }
    return validity.validity(run)


def as_before(model, tokens_BT, targets_BT, loss):
    return loss


def keeps_its_last_loss(model, tokens_BT, targets_BT, loss):
    model.last_loss, model.last_losses = loss, [loss.item()]
    return loss


def keeps_a_table_of_shapes(model, tokens_BT, targets_BT, loss):
    model.__dict__.setdefault("tables", {}).setdefault(tokens_BT.shape, torch.arange(tokens_BT.shape[1]))
    return loss


@pytest.mark.parametrize("evaluated", [None, as_before, keeps_its_last_loss, keeps_a_table_of_shapes])
def test_an_evaluation_that_leaves_nothing_behind_is_not_accused(evaluated):
    facts = checked(Net(evaluated))
    assert (facts["trained"], facts["changed"], facts["num_batches"]) == ([], [], 2)
    assert facts["first_nats"] == facts["repeated_nats"]
    assert ruled(facts) == ("valid", [])


@pytest.mark.parametrize("arch", ["gpt2", "modern", "windowed", "r21", "r53"])
def test_our_models_leave_nothing_behind(arch):
    model = models.load(arch)(vocab_size=64, seq_len=16, num_layers=4, num_heads=2, width=32)
    model.init_weights(torch.Generator().manual_seed(0))
    facts = checked(model)
    assert (facts["trained"], facts["changed"]) == ([], [])
    assert facts["first_nats"] == facts["repeated_nats"]


def test_a_model_that_trains_while_it_is_evaluated_makes_the_run_invalid():
    def trains(model, tokens_BT, targets_BT, loss):
        with torch.enable_grad():
            loss = F.cross_entropy(model.table(tokens_BT).flatten(0, 1), targets_BT.flatten())
            (grad,) = torch.autograd.grad(loss, [model.table.weight])
        model.table.weight.data -= 10 * grad
        return loss.detach()

    facts = checked(Net(trains))
    assert facts["trained"] == ["model.table.weight"] and facts["repeated_nats"] < facts["first_nats"] - 0.01
    judged, (reason, *_) = ruled(facts)
    assert judged == "invalid"
    assert f"was {facts['first_nats']:.7f} in the last validation and {facts['repeated_nats']:.7f} when" in reason
    hidden = facts | {"repeated_nats": facts["first_nats"]}  # by less than rounding
    assert ruled(hidden)[1] == ["evaluating the model changes its weights or its optimizer: model.table.weight"]


def means_in_a_list(model, tokens_BT, targets_BT, loss):
    model.__dict__.setdefault("means", [0.0])[0] += 0.1 * (loss.item() - model.means[0])
    return loss


def counts(model, tokens_BT, targets_BT, loss):
    model.table.num_calls = getattr(model.table, "num_calls", 0) + 1
    return loss


def counts_in_a_closure(model, tokens_BT, targets_BT, loss, counter=itertools.count(), number=[0]):  # noqa: B006, B008
    number[0] = next(counter)
    return loss


def counts_in_a_global(model, tokens_BT, targets_BT, loss):
    calls.append(1)
    return loss


def counts_in_its_class(model, tokens_BT, targets_BT, loss):
    Net.num_calls = getattr(Net, "num_calls", 0) + 1
    return loss


def means_in_a_buffer(model, tokens_BT, targets_BT, loss):
    model.mean_nats.lerp_(loss, 0.1)
    return loss


def remembers_batches(model, tokens_BT, targets_BT, loss):
    model.__dict__.setdefault("known", {})[hash(tuple(tokens_BT.flatten().tolist()))] = targets_BT
    return loss


KEPT = {
    means_in_a_list: "model.means[0]",
    counts: "model.table.num_calls",
    counts_in_a_closure: "model.evaluated (defaults)[1][0]",
    counts_in_a_global: "file test_side_effects.calls (number of its parts)",
    counts_in_its_class: "class Net.num_calls",
    means_in_a_buffer: "model.mean_nats",
    remembers_batches: "model.known (number of its parts)",
}


@pytest.mark.parametrize("evaluated", KEPT)
def test_what_is_kept_from_one_evaluation_to_the_next_is_a_doubt(evaluated):
    facts = checked(Net(evaluated))
    assert KEPT[evaluated] in facts["changed"] and not facts["trained"]
    judged, (reason,) = ruled(facts)
    assert judged == "suspect" and reason.startswith("evaluating the model changes state that outlives it: ")


def test_random_numbers_in_an_evaluation_are_seen():
    facts = checked(Net(lambda model, tokens_BT, targets_BT, loss: loss + 0.01 * torch.rand(())))
    assert facts["changed"] == ["torch's random state"] and ruled(facts)[0] == "invalid"


def test_what_could_not_be_asked_is_a_doubt_and_older_records_have_none():
    judged, (reason,) = ruled(side_effects.unknown("repeating the last validation fails with MemoryError: "))
    assert judged == "suspect" and "could not be checked: repeating the last validation fails" in reason
    assert ruled({}) == ("valid", [])


def test_a_loss_that_is_no_number_when_repeated_makes_the_run_invalid():
    facts = checked(Net(as_before)) | {"repeated_nats": None, "rounding_nats": None}  # nan, as JSON has it
    judged, (reason, *_) = ruled(facts)
    assert judged == "invalid" and "None when repeated" in reason


def test_a_checksum_of_a_part_of_a_tensor():
    whole = torch.arange(10, dtype=torch.float32)
    part = side_effects._checksum(whole[1:9], 5)  # no multiple of 8 bytes from the beginning
    whole[8] = 0
    assert side_effects._checksum(whole[1:9], 5) != part


def test_a_checksum_sees_one_bit_a_swap_and_any_type():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        zeros = torch.zeros(3 * side_effects.CHUNK // 2).to(dtype)
        at_0, at_end = zeros.clone(), zeros.clone()
        at_0[0], at_end[-1] = 1, 1
        checksums = [side_effects._checksum(tensor, 5) for tensor in (zeros, at_0, at_end, zeros.clone())]
        assert len(set(checksums)) == 3 and checksums[0] == checksums[3]


DRAWN_ON_A_GPU = """
import torch
from bench.training import side_effects
model = torch.nn.Embedding(64, 64, device="cuda:0")
draws = torch.cuda.default_generators[0]
def loss_of(tokens_BT, targets_BT):
    if draws_one:
        torch.rand(1, generator=draws)
    return torch.nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())
batches = [torch.arange(32, device="cuda:0").view(2, 2, 8).unbind() for _ in range(3)]
for draws_one in (False, True):
    losses, before = [loss_of(*batch).detach() for batch in batches], draws.get_state()
    facts = side_effects.check(loss_of, iter(batches), losses, {"model": model}, 3)
    print(facts["changed"], torch.equal(draws.get_state(), before))
"""


@pytest.mark.slow
def test_numbers_that_an_evaluation_draws_on_a_gpu_are_seen_and_given_back(tmp_path):
    done = stand_in.Gpus(tmp_path, 1).command(sys.executable, "-c", DRAWN_ON_A_GPU)
    assert done.stdout.splitlines() == ["[] True", '["torch\'s random state"] True'], done.stderr
