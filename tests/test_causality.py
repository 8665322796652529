"""The guard at the end of the warm-up: a model that sees what it must predict ends the run; others are untouched."""

import contextlib
import copy
from pathlib import Path

import pytest
import real_runs
import torch
import torch.nn.functional as F
from torch import nn

import models
from bench.record import validity
from bench.training import causality

SHAPE = {"vocab_size": 64, "seq_len": 16, "num_layers": 2, "num_heads": 2, "width": 32}


def checked(model, autocast=contextlib.nullcontext, vocab_size=64, seq_len=16):
    return causality.check(model, vocab_size, seq_len, torch.device("cpu"), autocast)


def made(arch, **changes):
    model = models.load(arch)(**SHAPE | changes)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_our_models_are_causal_and_the_backend_of_their_attention_is_known(arch, dtype):
    autocast = (lambda: torch.autocast("cpu", dtype)) if dtype else contextlib.nullcontext
    found = checked(made(arch), autocast)
    assert found["causality"] == "checked"
    assert found["sdpa_backends"] == ["flash_attention"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert checked(made(arch), autocast)["sdpa_backends"] == ["math"]


def test_attention_without_a_mask_is_found_behind_projections_of_zero(monkeypatch):
    model = made("modern")  # its projections and head are zero: as it stands every logit is 0 whatever it sees
    monkeypatch.setattr("models.modern.causal_attention", F.scaled_dot_product_attention)
    with pytest.raises(causality.NotCausal, match="token 1 of 16 moved"):
        checked(model)


class Own(nn.Module):
    """A model without logits(): a bag of words, whose loss() and leak() a test chooses."""

    def __init__(self, loss=F.cross_entropy, leak=lambda logits_BTV, targets_BT: logits_BTV):
        super().__init__()
        self.table, self.loss, self.leak = nn.Embedding(64, 64), loss, leak

    def forward(self, tokens_BT, targets_BT):
        logits_BTV = self.leak(self.table(tokens_BT).cumsum(1), targets_BT)
        return self.loss(logits_BTV.flatten(0, 1), targets_BT.flatten())


def shifted(logits_BTV, targets_BT):
    return logits_BTV.roll(-1, 1)


def with_targets(logits_BTV, targets_BT):
    return logits_BTV + 1e-4 * F.one_hot(targets_BT, 64)


@pytest.mark.parametrize("leak", [shifted, with_targets])
def test_an_own_model_that_looks_ahead_is_found_by_what_it_hands_to_its_loss(leak):
    with pytest.raises(causality.NotCausal, match="sees what it must predict"):
        checked(Own(leak=leak))


def by_hand(logits_NV, targets_N):
    return -logits_NV.log_softmax(-1).gather(1, targets_N[:, None]).mean()


def in_two_parts(logits_NV, targets_N):
    parts = zip(logits_NV.chunk(2), targets_N.chunk(2))
    return sum(F.cross_entropy(*part) for part in parts) / 2


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), by_hand, in_two_parts])
def test_any_usual_way_to_the_loss_is_watched(loss):
    assert checked(Own(loss))["causality"] == "checked"
    with pytest.raises(causality.NotCausal):
        checked(Own(loss, shifted))


def test_what_cannot_be_watched_is_said():
    hidden = Own(lambda logits_NV, targets_N: (logits_NV.logsumexp(-1) - logits_NV[:, 0]).mean())
    assert checked(hidden)["causality"].startswith("not checked: forward() hands no logits")
    strict = Own(lambda logits_NV, targets_N: logits_NV.view(4, -1).no_such_thing())
    assert "fails with AttributeError" in checked(strict)["causality"]


def test_dropout_and_random_state_are_left_as_they_were():
    model = nn.Sequential(nn.Dropout(0.5))
    model.forward = lambda tokens_BT, targets_BT: F.cross_entropy(
        model[0](F.one_hot(tokens_BT, 64).float()).flatten(0, 1), targets_BT.flatten()
    )
    rng = torch.get_rng_state()
    assert checked(model)["causality"] == "checked" and model.training
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_part_that_the_model_compiles_itself_is_watched_and_not_compiled_again():
    graphs = []
    table = nn.Embedding(64, 64)
    part = torch.compile(lambda x_BTV: x_BTV.cumsum(1), backend=lambda graph, inputs: graphs.append(1) or graph.forward)
    model = nn.Sequential(table)
    model.forward = lambda tokens_BT, targets_BT: F.cross_entropy(part(table(tokens_BT)).mT, targets_BT)
    with torch.no_grad():
        model(torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int64))
    assert len(graphs) == 1
    assert checked(model)["causality"] == "checked" and len(graphs) == 1
    torch._dynamo.reset()


LOOKS_AHEAD = """
import torch
from models.gpt2 import GPT2
class Net(GPT2):
    def logits(self, tokens_BT):
        return super().logits(tokens_BT).roll(-1, 1)
"""


def test_a_run_of_a_model_that_looks_ahead_is_invalid_and_says_why(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(LOOKS_AHEAD)
    overrides = [*real_runs.SHORT, "model.arch=net.py:Net"]
    done = real_runs.bench(tmp_path / "results", "run", *overrides, SPEEDRUN_CWD=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    (folder,) = real_runs.folders(tmp_path / "results")
    run = real_runs.run_json(folder)
    assert (run["status"], run["validity"], run["failure"]["kind"]) == ("failed", "invalid", "not_causal")
    assert "the model sees what it must predict" in done.stdout + done.stderr
    assert run["failure"]["hint"] in done.stdout + done.stderr


def finished(val_loss, implausible=None):
    goal = {"val_tokens": 4096} | ({} if implausible is None else {"implausible_val_loss": implausible})
    hardware, measured = {"device": "cuda"}, {"foreign_cpu_cores": None}
    return {
        "status": "complete",
        "metrics": {"val_loss": val_loss},
        "data": {"floor_nats": None},
        "goal": goal,
        "hardware": hardware,
        "measured": measured,
    }


def test_a_loss_that_nothing_can_reach_makes_a_run_invalid():
    ruled, (reason,) = validity.validity(finished(2.4999, 2.5))
    assert ruled == "invalid" and "val_loss 2.499900 is below 2.5" in reason
    assert validity.validity(finished(2.5, 2.5)) == ("valid", [])
    assert validity.validity(finished(0.1)) == ("valid", [])  # an older record has no bound
    assert validity.validity(copy.deepcopy(finished(0.1)) | {"goal": None}) == ("valid", [])


def test_every_track_of_fineweb_has_a_bound_below_its_target():
    from bench.config import compose

    for path in sorted((Path(real_runs.REPO) / "conf/track").glob("*.yaml")):
        config = compose.compose([f"track={path.stem}"])
        if config.data.source == "hub":
            assert config.track.rules.implausible_val_loss < (config.goal.target_val_loss or 3.28)


def test_kernels_are_as_asked_and_the_record_says_which(tmp_path):
    run = real_runs.run_json(real_runs.run(tmp_path, "hardware.sdpa=math"))
    assert run["measured"]["sdpa_enabled"] == run["measured"]["sdpa_backends"] == ["math"]
    assert run["measured"]["float32_matmul_precision"] == "highest"
    assert run["measured"]["causality"] == "checked" and run["warnings"] == []
