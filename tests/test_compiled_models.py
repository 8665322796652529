"""Every rung, model and update of models/, compiled by the path of a GPU on a CPU, gives the plain way's numbers.

Dynamo's graph is the one that a GPU's has; what inductor makes of it is not seen here.
"""

import functools

import pytest
import test_ladder
import torch
from cases import slow
from gpu_path import Backend, plant_lost_masks, take

import models
from bench.config import compose
from models.ladder import SAME_MODEL
from models.masked_attention import NO_LIMIT, Visible

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own modules, when dynamo imports them
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]
EOS = 7


@pytest.fixture(autouse=True)
def on_the_path_of_a_gpu(monkeypatch):
    take(monkeypatch)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(rung, **args):
    """Of a rung with windows: 160 tokens in 6 documents, windows of 24 or 32 tokens or of 6, blocks of 16 or of 2."""
    few_layers = {"num_layers": 4} if rung in test_ladder.WITH_WINDOWS else {}
    return test_ladder.made(rung, **few_layers, **test_ladder.FLOAT32[rung], **args)[0]


def gradients(model, loss):
    """-> {name: gradient}, without parameters that are in no loss."""
    names, tensors = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, tensors, allow_unused=True)
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def assert_near(grads, expected):
    """Within 1e-4 of each gradient, or 1e-6 of the largest one: a scalar's is a sum that all but cancels out."""
    assert grads.keys() == expected.keys()
    largest = max(grad.norm() for grad in expected.values())
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-6 * largest, name


def assert_same_compiled(model, tokens_BT):
    """Compares logits, and their gradients where those are on.  Returns the backend."""
    backend = Backend()
    plain_BTV = model.logits(tokens_BT)
    compiled_BTV = torch.compile(model.logits, dynamic=False, backend=backend)(tokens_BT)
    assert torch.allclose(compiled_BTV, plain_BTV, rtol=0, atol=2e-5 * plain_BTV.abs().max().item())
    if not torch.is_grad_enabled():
        return backend
    weights_BTV = test_ladder.hashed(plain_BTV.shape, 0)
    assert_near(gradients(model, (compiled_BTV * weights_BTV).sum()), gradients(model, (plain_BTV * weights_BTV).sum()))
    return backend


MASKS = ("r53",)  # with the last way to make them; the others only with --all


def differs(rung):
    """Whether the rung's model differs from the one below, and not only its optimizer."""
    own = [name for name in vars(models.load(rung)) if name == "__init__" or not name.startswith("__")]
    return rung not in SAME_MODEL and bool(own)


@pytest.mark.parametrize("rung", test_ladder.some(test_ladder.GOLDEN, MASKS))
def test_a_compiled_rung_is_the_plain_one(rung):
    model = made(rung)
    with torch.set_grad_enabled(differs(rung)):
        backend = assert_same_compiled(model, test_ladder.batch(rung)[0])
    assert len(backend.graphs) == 1
    if rung in test_ladder.WITH_WINDOWS:
        num_windows = 1 if rung < "r20" else 2 if rung < "r33" else 3  # the last of which is of the last layer
        assert backend.count("flex_attention") == sum(block.attention is not None for block in model.blocks)
        assert backend.count("argsort") == 4 * num_windows  # four lists of blocks a mask; a mask a window, not a layer


# the first rung of each way to make masks, and the last rung
@pytest.mark.parametrize("rung", ["r53", *(slow(rung) for rung in ("r20", "r31"))])
def test_the_mask_that_was_lost_once_would_be_seen(rung, monkeypatch):
    plant_lost_masks(monkeypatch)
    model, tokens_BT = made(rung), test_ladder.batch(rung)[0]
    with torch.no_grad():
        compiled_BTV = torch.compile(model.logits, dynamic=False, backend="eager")(tokens_BT)
        assert (compiled_BTV - model.logits(tokens_BT)).abs().max() > 0.01


@pytest.mark.parametrize("arch", ["gpt2", slow("modern"), "windowed"])
def test_a_compiled_model_is_the_plain_one(arch):
    shape = {"vocab_size": 64, "seq_len": 256, "num_layers": 2, "num_heads": 2, "width": 32}
    model = models.load(arch)(**shape, **({"window_tokens": 48} if arch == "windowed" else {}))
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter += 0.2 * test_ladder.hashed(tuple(parameter.shape), k)
    model.eos_token = EOS
    tokens_BT = torch.randint(64, (2, 256), generator=torch.Generator().manual_seed(1))
    backend = assert_same_compiled(model, tokens_BT)
    assert backend.count("flex_attention") == (2 if arch == "windowed" else 0)


@pytest.mark.parametrize("scale", [0.12, torch.tensor(0.12)])
@pytest.mark.slow
def test_each_layer_of_one_graph_has_its_own_window(scale):
    """Windows long, short, short, long over 4 blocks; documents of 25 tokens and windows each hide other keys."""
    tokens_BT = torch.randint(EOS + 1, 100, (2, 64), generator=torch.Generator().manual_seed(0))
    tokens_BT[:, ::25] = EOS
    generator = torch.Generator().manual_seed(1)
    qkv = [torch.randn(2, 2, 64, 8, generator=generator, requires_grad=True) for _ in range(3)]
    no_limit, four, two = (torch.tensor(limit, dtype=torch.int32) for limit in (NO_LIMIT, 4, 2))

    def layers(q_BHTK, k_BHTK, v_BHTK):
        long, short = (Visible(tokens_BT, EOS, no_limit, near, None, 16, scale) for near in (four, two))
        return [mix(q_BHTK, k_BHTK, v_BHTK) for mix in (long, short, short, long)]

    backend = Backend()
    compiled, expected = torch.compile(layers, dynamic=False, backend=backend)(*qkv), layers(*qkv)
    assert (backend.count("flex_attention"), backend.count("argsort"), len(backend.graphs)) == (4, 8, 1)
    assert (expected[0] - expected[1]).abs().max() > 0.1
    for fast, plain in zip(compiled, expected, strict=True):
        assert torch.allclose(fast, plain, atol=2e-6)
        grads = [torch.autograd.grad(mixed.square().sum(), qkv, retain_graph=True) for mixed in (fast, plain)]
        assert all(torch.allclose(*pair, atol=2e-5) for pair in zip(*grads, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rung, how", [("r53", "ahead"), ("r53", "untied"), *((rung, "fp8") for rung in ("r19", "r21", "r28", "r53"))]
)
def test_what_a_rung_does_only_while_training_is_the_same_compiled(rung, how):
    model = made(rung, **({"fp8_head": True} if how == "fp8" else {}))
    if how == "ahead":
        model.set_ahead_weights([1.0, 0.5, 0.2])
    if how == "untied":
        model.set_untied(True)
    batch, backend = test_ladder.batch(rung), Backend()
    compiled, expected = torch.compile(model, dynamic=False, backend=backend)(*batch), model(*batch)
    assert compiled.item() == pytest.approx(expected.item(), abs=1e-5)
    # 8 bits round what differs in the last bit of float32 now and then to another number
    tolerance = 0.02 if how == "fp8" else 1e-4
    compiled, expected = gradients(model, compiled), gradients(model, expected)
    assert compiled.keys() == expected.keys() and ("embedding.weight" in compiled) == (rung < "r51" or how == "untied")
    for name, grad in expected.items():
        assert (compiled[name] - grad).norm() <= tolerance * grad.norm() + 1e-7, name


@pytest.mark.parametrize("rung", ["r20", slow("r38"), "r42"])  # Muon, of Polar Express, NorMuon
def test_compiled_stacks_of_muon_are_the_plain_ones(rung, monkeypatch):
    whole = functools.partial(torch.compile, backend=Backend(), fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)
    moves = {}
    for batched in ("eager", "compiled"):
        config = compose.compose([f"experiment={rung}", f"optim.groups.matrices.batched={batched}"])
        model, tensors = test_ladder.made(rung, num_layers=4, **test_ladder.FLOAT32[rung])
        before = [parameter.detach().clone() for parameter in tensors.values()]
        optimizer = config.optim.build(model, rank=0, world_size=1, device_type="cpu")
        for k, parameter in enumerate(tensors.values()):
            parameter.grad = test_ladder.hashed(tuple(parameter.shape), k)
        optimizer.step()
        moves[batched] = [parameter - old for parameter, old in zip(tensors.values(), before, strict=True)]
    assert any(move.any() for move in moves["eager"])
    for compiled, expected in zip(moves["compiled"], moves["eager"], strict=True):
        assert torch.equal(compiled, expected)
