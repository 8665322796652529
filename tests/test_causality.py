"""The guard at the end of the warm-up: a model that sees what it must predict ends the run; others are untouched."""

import contextlib
import copy
import functools
from pathlib import Path

import gpu_path
import pytest
import real_runs
import test_ladder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import models
from bench.record import validity
from bench.training import causality
from bench.training import model as run_model

SHAPE = {"vocab_size": 64, "seq_len": 16, "num_layers": 2, "num_heads": 2, "width": 32}
CPU = torch.device("cpu")


def ways_of(model, num_rows=2, seq_len=16, autocast=contextlib.nullcontext, call=None):
    """The ways of evaluation and training, as the trainer passes them."""

    @contextlib.contextmanager
    def entered(mode):
        model.train(mode == "training")
        with torch.set_grad_enabled(mode == "training"), autocast():
            yield

    modes = ("evaluation", "training")
    return [
        causality.Way(mode, (num_rows, seq_len), model if call is None else call, functools.partial(entered, mode))
        for mode in modes
    ]


def checked(model, autocast=contextlib.nullcontext, vocab_size=64, num_rows=2, seq_len=16, seed=0, **options):
    is_compiled, has_noise = options.pop("is_compiled", False), options.pop("has_noise", True)
    ways = ways_of(model, num_rows, seq_len, autocast, **options)
    return causality.check(model, ways, vocab_size, CPU, seed, is_compiled, has_noise)


def made(arch, **changes):
    model = models.load(arch)(**SHAPE | changes)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_our_models_are_causal_and_the_backend_of_their_attention_is_known(arch, dtype):
    autocast = (lambda: torch.autocast("cpu", dtype)) if dtype else contextlib.nullcontext
    outcome = checked(made(arch), autocast)
    assert (outcome["found"], outcome["why"]) == ("causal", None)
    questions = {(ask["mode"], by) for ask in outcome["asks"] for by in ask["by"]}
    assert questions == {(mode, by) for mode in ("evaluation", "training") for by in ("logits", "losses")}
    assert all(ask["moved"] < 1e-5 and len(ask["cuts"]) >= causality.MIN_CUTS for ask in outcome["asks"])
    assert outcome["sdpa_backends"] == ["flash_attention"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert checked(made(arch), autocast)["sdpa_backends"] == ["math"]


def test_attention_without_a_mask_is_found_behind_projections_of_zero(monkeypatch):
    model = made("modern")  # its projections and head are zero: as it stands every logit is 0 whatever it sees
    monkeypatch.setattr("models.modern.causal_attention", F.scaled_dot_product_attention)
    with pytest.raises(causality.NotCausal, match="in evaluation, the logits of token 1 of 16 moved"):
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


def in_blocks(num_tokens, logits_BTV):
    B, T, V = logits_BTV.shape
    whole = T // num_tokens * num_tokens
    mean_BNV = logits_BTV[:, :whole].view(B, -1, num_tokens, V).mean(2)
    return torch.cat((logits_BTV[:, :whole] + mean_BNV.repeat_interleave(num_tokens, 1), logits_BTV[:, whole:]), 1)


def first_half(logits_BTV):
    return logits_BTV + logits_BTV[:, : logits_BTV.shape[1] // 2].mean(1, keepdim=True)


def all_but_the_last_two(logits_BTV):
    return torch.cat((logits_BTV[:, :-2] + logits_BTV[:, 1:-1], logits_BTV[:, -2:]), 1)


def where_there_are_several_rows(logits_BTV):
    return logits_BTV + (logits_BTV.mean(1, keepdim=True) if len(logits_BTV) > 1 else 0)


def another_row(logits_BTV):
    return logits_BTV + logits_BTV[:, :1].roll(1, 0)


ROWS = (where_there_are_several_rows, another_row)
LEAKS = [functools.partial(in_blocks, 24), functools.partial(in_blocks, 48), first_half, all_but_the_last_two, *ROWS]


@pytest.mark.parametrize("leak", LEAKS)
def test_leaks_that_one_cut_does_not_see_are_found(leak):
    """A block of 24 or 48 does not divide 128 tokens: the last token is in no whole block."""
    assert checked(Own(), num_rows=4, seq_len=128)["found"] == "causal"
    for num_rows in (2, 4) if leak in ROWS else (1, 4):
        with pytest.raises(causality.NotCausal, match="of 128 moved by"):
            checked(Own(leak=lambda logits_BTV, targets_BT: leak(logits_BTV)), num_rows=num_rows, seq_len=128)


@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_a_leak_in_one_mode_alone_is_found(mode):
    model = Own()
    model.leak = lambda logits_BTV, targets_BT: (
        logits_BTV.roll(-1, 1) if model.training == (mode == "training") else logits_BTV
    )
    with pytest.raises(causality.NotCausal, match=f"in {mode}, the logits"):
        checked(model)


def test_a_leak_in_batches_that_the_model_recognises_is_found_on_one_of_them():
    model = Own(leak=lambda logits_BTV, targets_BT: logits_BTV.roll(-1 if targets_BT.max() < 8 else 0, 1))
    way, _ = ways_of(model)
    assert causality.check(model, [way], 64, CPU, 0)["found"] == "causal"
    way.batch = torch.arange(32).view(2, 16) % 8, torch.arange(1, 33).view(2, 16) % 8
    with pytest.raises(causality.NotCausal, match="in evaluation, the logits of token"):
        causality.check(model, [way], 64, CPU, 0)


def test_a_leak_from_some_call_on_is_found_when_it_is_asked_again():
    calls = []
    model = Own(leak=lambda logits_BTV, targets_BT: logits_BTV.roll(-1 if len(calls) > 100 else 0, 1))
    model.register_forward_hook(lambda *call: calls.append(1))
    weights = model.table.weight.detach().clone()
    assert checked(model, has_noise=False)["found"] == "causal" and len(calls) < 100
    calls += [1] * 100
    with pytest.raises(causality.NotCausal):
        checked(model, has_noise=False)
    assert model.table.weight.equal(weights)


def honest_beside(logits_NV, targets_N):
    """Shows its logits to a loss other than the one it returns."""
    F.cross_entropy(torch.zeros_like(logits_NV), targets_N)
    return (logits_NV.logsumexp(-1) - logits_NV.gather(1, targets_N[:, None])[:, 0]).mean()


def test_a_loss_of_other_logits_than_those_that_are_shown_is_found():
    with pytest.raises(causality.NotCausal, match="the share of the loss from targets before a cut moved by .* nats"):
        checked(Own(honest_beside, shifted), num_rows=4, seq_len=32)


def test_an_honest_loss_of_another_kind_is_not_accused():
    def in_bfloat16(logits_NV, targets_N):
        return (logits_NV.bfloat16().logsumexp(-1) - logits_NV.gather(1, targets_N[:, None])[:, 0]).bfloat16().mean()

    def transposed(logits_NV, targets_N):
        logits_TBV, targets_TB = logits_NV.view(4, 32, 64).transpose(0, 1), targets_N.view(4, 32).T
        return F.cross_entropy(logits_TBV.flatten(0, 1), targets_TB.flatten())

    def squared(logits_NV, targets_N):  # no sum over targets, so that nothing can be said
        return (logits_NV.logsumexp(-1) - logits_NV.gather(1, targets_N[:, None])[:, 0]).mean() ** 2

    for seed in range(10):
        assert checked(Own(transposed), num_rows=4, seq_len=32, seed=seed)["found"] == "causal"
        outcome = checked(Own(in_bfloat16), num_rows=4, seq_len=32, seed=seed)
        assert outcome["found"] == "causal" or "within the rounding of its loss" in outcome["why"]
    assert "its loss is not a sum over its targets" in checked(Own(squared), num_rows=4, seq_len=32)["why"]


@pytest.mark.parametrize("rung", test_ladder.some(test_ladder.GOLDEN))
@pytest.mark.parametrize("seed", [1, 2])
def test_no_rung_is_accused(rung, seed):
    """The first seed is in float32; the second keeps the rung's own activations, which are bfloat16 in some."""
    few_layers = {"num_layers": 4} if rung in test_ladder.WITH_WINDOWS else {}
    model = test_ladder.made(rung, **few_layers, **(test_ladder.FLOAT32[rung] if seed == 1 else {}))[0]
    outcome = checked(model, num_rows=4, seq_len=48 if few_layers else 12, vocab_size=40, seed=seed)
    assert outcome["found"] == "causal"
    assert all(ask["moved"] == 0 for ask in outcome["asks"] if "logits" in ask["by"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_masks_lost_in_a_compiled_graph_alone_are_found(monkeypatch):
    gpu_path.take(monkeypatch)
    torch._dynamo.reset()
    model = test_ladder.made("r21", num_layers=4, block=8, window=16)[0]
    model.init_weights(torch.Generator().manual_seed(0))

    def ask():
        call = torch.compile(model, backend="aot_eager", dynamic=False)
        return checked(model, vocab_size=40, num_rows=4, seq_len=64, call=call, is_compiled=True)

    assert ask()["found"] == "causal"
    torch._dynamo.reset()
    gpu_path.plant_lost_masks(monkeypatch)
    sentence = "in evaluation, compiled, the share of the loss from targets before a cut"
    with pytest.raises(causality.NotCausal, match=sentence):
        ask()
    torch._dynamo.reset()


def test_other_tokens_are_others_and_documents_stay():
    asking = causality._Asking(
        causality.Ask("evaluation", ["logits"], False, 4, 400), None, None, 5, CPU, 0, Own(), None
    )
    asking._eos_token = 3
    tokens_BT = asking._drawn()
    others_BT = asking._others(tokens_BT, 0)
    is_eos_BT = tokens_BT == 3
    assert is_eos_BT.any(1).all() and torch.equal(others_BT == 3, is_eos_BT)
    assert (others_BT != tokens_BT)[~is_eos_BT].all() and others_BT.max() < 5
    is_usual_BT = others_BT == others_BT.mode(1, keepdim=True).values
    assert [(row.float().mean() > 0.5).item() for row in is_usual_BT] == [True, False, True, False]


def test_a_pass_whose_logits_are_seen_is_of_some_thousand_tokens_and_copies_a_part_of_them():
    shapes = [(8, 128), (64, 1024), (1, 65536), (4, 65536)]
    assert [causality.asked_shape(*shape) for shape in shapes] == [(8, 128), (4, 1024), (1, 4096), (2, 2048)]

    class Largest(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor) and output.dtype == torch.float64:
                self.num_bytes = max(self.num_bytes, output.nbytes)
            return output

    scores_NV = torch.zeros(300, 50304)
    watch = causality._Watch((1, 300), CPU, 0)
    with Largest() as largest:
        watch._prints_of(scores_NV)
    assert scores_NV.nbytes * 2 > causality.MAX_CHUNK_BYTES >= largest.num_bytes > 0


def by_hand(logits_NV, targets_N):
    return -logits_NV.log_softmax(-1).gather(1, targets_N[:, None]).mean()


def in_two_parts(logits_NV, targets_N):
    parts = zip(logits_NV.chunk(2), targets_N.chunk(2))
    return sum(F.cross_entropy(*part) for part in parts) / 2


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), by_hand, in_two_parts])
def test_any_usual_way_to_the_loss_is_watched(loss):
    assert checked(Own(loss))["found"] == "causal"
    with pytest.raises(causality.NotCausal):
        checked(Own(loss, shifted))


def test_what_cannot_be_watched_is_said():
    hidden = Own(lambda logits_NV, targets_N: (logits_NV.logsumexp(-1) - logits_NV[:, 0]).mean())
    assert checked(hidden)["found"] == "not checked" and "within the rounding of its loss" in checked(hidden)["why"]
    strict = Own(lambda logits_NV, targets_N: logits_NV.view(4, -1).no_such_thing())
    assert "a pass over 2 x 16 tokens fails with AttributeError" in checked(strict)["why"]


def test_dropout_and_random_state_are_left_as_they_were():
    model = nn.Sequential(nn.Dropout(0.5))
    model.forward = lambda tokens_BT, targets_BT: F.cross_entropy(
        model[0](F.one_hot(tokens_BT, 64).float()).flatten(0, 1), targets_BT.flatten()
    )
    rng = torch.get_rng_state()
    assert checked(model)["found"] == "causal" and model.training
    assert torch.equal(torch.get_rng_state(), rng)


# torch 2.13 hides it, but not from an error filter
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_part_that_the_model_compiles_itself_is_watched_and_not_compiled_again():
    graphs = []
    table = nn.Embedding(64, 64)
    part = torch.compile(lambda x_BTV: x_BTV.cumsum(1), backend=lambda graph, inputs: graphs.append(1) or graph.forward)
    model = nn.Sequential(table)
    model.forward = lambda tokens_BT, targets_BT: F.cross_entropy(part(table(tokens_BT)).mT, targets_BT)
    for has_grad in (False, True):  # as the warm-up does
        with torch.set_grad_enabled(has_grad):
            model(torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int64))
    assert len(graphs) == 2
    assert checked(model)["found"] == "causal" and len(graphs) == 2
    torch._dynamo.reset()


LOOKS_AHEAD = """
from models.gpt2 import GPT2
class Net(GPT2):
    num_calls = 0
    def logits(self, tokens_BT):
        self.num_calls += 1
        return super().logits(tokens_BT).roll(-1 if self.num_calls > {num_calls} else 0, 1)
"""
TRAINS = """
import torch
from models.gpt2 import GPT2
class Net(GPT2):
    def forward(self, tokens_BT, targets_BT):
        loss = super().forward(tokens_BT, targets_BT)
        if not self.training:
            with torch.enable_grad():
                head = self.token_embedding.weight
                (grad,) = torch.autograd.grad(super().forward(tokens_BT, targets_BT), [head])
            head.data -= 0.1 * grad
        return loss
"""


@pytest.mark.parametrize(
    "source, status, reason",
    [
        (LOOKS_AHEAD.format(num_calls=0), "failed", "the model sees what it must predict"),
        (LOOKS_AHEAD.format(num_calls=18), "complete", "after the last step, the model sees what it must predict"),
        (TRAINS, "complete", "the loss of the same tokens was"),
    ],
    ids=["looks ahead", "looks ahead from its 19th call on", "trains on what it is evaluated on"],
)
def test_a_run_of_a_model_that_cheats_is_invalid_and_says_why(tmp_path, source, status, reason):
    (tmp_path / "net.py").write_text(source)
    overrides = [*real_runs.SHORT, "model.arch=net.py:Net", "checkpoint.save=true"]
    done = real_runs.bench(tmp_path / "results", "run", *overrides, SPEEDRUN_CWD=str(tmp_path))
    (folder,) = real_runs.folders(tmp_path / "results")
    run, text = real_runs.run_json(folder), done.stdout + done.stderr
    assert (run["status"], run["validity"]) == (status, "invalid"), text
    assert reason in text
    if status == "failed":
        assert (done.returncode, run["failure"]["kind"]) == (1, "not_causal") and run["failure"]["hint"] in text
    else:
        assert reason in run["validity_reasons"][0]
        assert source is TRAINS or run["measured"]["causality"] == "checked"  # as the warm-up saw it


def test_a_model_that_cannot_be_asked_is_a_doubt_but_on_the_free_track():
    unknown = {"found": "not checked", "why": "forward() hides its logits"}
    run = finished(3.0) | {"referee": {"causality": {"start": unknown, "end": unknown}}, "track": "gpt2_small"}
    doubt = "whether the model sees what it must predict could not be checked at the end of the warm-up"
    doubt += ": forward() hides its logits"
    assert validity.validity(run) == ("suspect", [doubt])
    assert validity.validity(run | {"track": "free"}) == ("valid", [])


def finished(val_loss, implausible=None):
    goal = {"val_tokens": 4096} | ({} if implausible is None else {"implausible_val_loss": implausible})
    run = {"status": "complete", "metrics": {"val_loss": val_loss}, "data": {"floor_nats": None}, "goal": goal}
    return run | {"hardware": {"device": "cuda"}, "measured": {"foreign_cpu_cores": None}}


def test_a_loss_that_nothing_can_reach_makes_a_run_invalid():
    ruled, (reason,) = validity.validity(finished(2.4999, 2.5))
    assert ruled == "invalid" and "val_loss 2.499900 is below 2.5" in reason
    assert validity.validity(finished(2.5, 2.5)) == ("valid", [])
    assert validity.validity(finished(0.1)) == ("valid", [])  # an older record has no bound
    assert validity.validity(copy.deepcopy(finished(0.1)) | {"goal": None}) == ("valid", [])
    ruled, (reason,) = validity.validity(finished(-0.1))
    assert ruled == "invalid" and "val_loss -0.100000 is below 0" in reason


def test_every_track_of_fineweb_has_a_bound_below_its_target():
    from bench.config import compose

    for path in sorted((Path(real_runs.REPO) / "conf/track").glob("*.yaml")):
        config = compose.compose([f"track={path.stem}"])
        if config.data.source == "hub":
            assert config.track.rules.implausible_val_loss < (config.goal.target_val_loss or 3.28)


def test_a_model_that_chooses_tf32_itself_is_recorded_and_ends_no_run():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert run_model.kernel_facts()["float32_matmul_precision"] == "high"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert run_model.kernel_facts()["float32_matmul_precision"] == "highest"


def test_kernels_are_as_asked_and_the_record_says_which(tmp_path):
    run = real_runs.run_json(real_runs.run(tmp_path, "hardware.sdpa=math"))
    assert run["measured"]["sdpa_enabled"] == run["measured"]["sdpa_backends"] == ["math"]
    assert run["measured"]["float32_matmul_precision"] == "highest"
    assert run["measured"]["causality"] == "checked" and run["warnings"] == []
    causal, evaluation = run["referee"]["causality"], run["referee"]["evaluation"]
    assert causal["start"]["found"] == causal["end"]["found"] == "causal"
    expected = [("evaluation", 8, 64), ("training", 8, 64)]
    assert [(ask["mode"], ask["num_rows"], ask["seq_len"]) for ask in causal["end"]["asks"]] == expected
    assert causal["start"]["asks"][0]["cuts"] != causal["end"]["asks"][0]["cuts"]
    assert evaluation["first_nats"] == evaluation["repeated_nats"] and evaluation["num_batches"] == 2
    assert evaluation["trained"] == evaluation["changed"] == []
