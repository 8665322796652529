"""Architectures: golden losses, causality, parameters, FLOPs, initialisation, precision, and their conf files."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import models
from bench.config import compose
from bench.training.model import build_model
from models import gpt2, modern
from models.base import causal_attention, merge_heads, split_heads
from models.ladder import SAME_MODEL
from models.modern import LOGIT_CAP, Rotary, rms_norm, softcap
from models.optimizers import adamw

ARCHS = ["gpt2", "modern"]
NUMBERS = (2, 4, 5, 6, *range(8, 22), 26, *range(28, 36), 37, 38, 39, 40, 42, 43, 45, 46, *range(48, 54))
RUNGS = [*(f"r{number:02}" for number in NUMBERS), "simple"]  # of models/ladder/: tests/test_ladder.py
MODELS = [*ARCHS, *(rung for rung in RUNGS if rung not in SAME_MODEL)]
VOCAB, SEQ_LEN = 96, 32
TINY = {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "num_layers": 2, "num_heads": 2, "width": 32}
ADAMW = adamw.Config(name="adamw", lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, schedule=None)


def tiny(arch):
    """From record 35 on the first layer is gone and the eighth of twelve sees no other token: two layers were none."""
    return TINY | ({"num_layers": 4} if "r35" <= arch < "s" else {})


def made(arch, seed=0, **changes):
    model = models.load(arch)(**{**tiny(arch), **changes})
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def awakened(arch, seed=0, **changes):
    """A model whose projections and head that begin at or near zero are random too: at the start modern's logits are 0,
    and those of r51 too close for bfloat16."""
    model = made(arch, seed, **changes)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any() or (parameter.ndim == 2 and parameter.std() < 0.01):
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def batch(num_seqs=2, seed=5):
    tokens_BT = torch.randint(VOCAB, (num_seqs, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def train_losses(arch, num_steps):
    model = made(arch)
    optimizer = ADAMW.build(model, rank=0, world_size=1, device_type="cpu")
    losses = []
    for _ in range(num_steps):
        loss = model(*batch())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


# Torch 2.13, CPU, float32; written by this test's own train_losses.  AVX-512, AVX2, SSE4.1 and MKL's compatible kernels
# come within 3.3e-6 of them (AMD CPU, November 23 2026).
GOLDEN = {
    "gpt2": [4.560488, 4.282642, 4.018337, 3.830525, 3.581135],
    "modern": [4.564348, 4.324461, 3.976865, 3.649662, 3.350391],
}


@pytest.mark.parametrize("arch", ARCHS)
def test_the_first_losses_are_the_golden_ones(arch):
    assert train_losses(arch, 5) == pytest.approx(GOLDEN[arch], abs=2e-5)


def test_modern_starts_at_exactly_the_uniform_loss():
    assert made("modern")(*batch()).item() == pytest.approx(math.log(VOCAB), abs=1e-6)


def test_gpt2_starts_near_the_uniform_loss():
    # at width 32 the logits' standard deviation is about 0.02 * sqrt(32) = 0.11, which adds about 0.11**2 / 2 = 0.006
    assert made("gpt2")(*batch(num_seqs=32)).item() == pytest.approx(math.log(VOCAB), abs=0.02)


@pytest.mark.parametrize("arch", MODELS)
def test_the_loss_is_the_mean_of_nats_per_token(arch):
    model, (tokens_BT, targets_BT) = awakened(arch), batch()
    log_p_BTV = model.logits(tokens_BT).log_softmax(-1)
    by_hand = [-log_p_BTV[b, t, targets_BT[b, t]].item() for b in range(2) for t in range(SEQ_LEN)]
    assert model(tokens_BT, targets_BT).item() == pytest.approx(sum(by_hand) / 64, abs=1e-5)


@pytest.mark.parametrize("arch", MODELS)
def test_a_future_token_changes_no_earlier_logits(arch):
    model, (tokens_BT, _) = awakened(arch), batch()
    changed_BT = tokens_BT.clone()
    changed_BT[:, 20] = (changed_BT[:, 20] + 1) % VOCAB
    with torch.no_grad():
        difference_T = (model.logits(tokens_BT) - model.logits(changed_BT)).abs().amax(dim=(0, 2))
    assert difference_T[:20].max() == 0
    assert (difference_T[20:] > 1e-4).all()  # and every later one sees it


@pytest.mark.parametrize("arch", MODELS)
def test_positions_matter(arch):
    model = awakened(arch)
    tokens_BT = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])  # as a set the same before the last
    with torch.no_grad():
        last_BV = model.logits(tokens_BT)[:, -1]
    assert (last_BV[0] - last_BV[1]).abs().max() > 1e-4


def test_attention_is_a_softmax_over_earlier_tokens():
    generator = torch.Generator().manual_seed(0)
    q_BHTK, k_BHTK, v_BHTK = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(3))
    scores_BHTT = q_BHTK @ k_BHTK.mT / 2  # sqrt(4)
    scores_BHTT = scores_BHTT.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    assert torch.allclose(causal_attention(q_BHTK, k_BHTK, v_BHTK), scores_BHTT.softmax(-1) @ v_BHTK, atol=1e-6)


def test_a_head_is_a_run_of_columns():
    x_BTD = torch.arange(12).view(1, 2, 6)
    assert split_heads(x_BTD, 3)[0, 1].tolist() == [[2, 3], [8, 9]]
    assert torch.equal(merge_heads(split_heads(x_BTD, 3)), x_BTD)


def mlp_of_one(mlp, x):
    """The activation of x: one number in, four times up, their mean out."""
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.zero_()
        mlp.up.weight.fill_(1.0)
        mlp.proj.weight.fill_(0.25)
        return mlp(torch.tensor([x])).item()


def test_gpt2s_activation_is_the_tanh_gelu():
    # x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) at 2; the exact GELU is 1.954500
    assert mlp_of_one(gpt2.MLP(width=1), 2.0) == pytest.approx(1.954598, abs=2e-6)
    assert mlp_of_one(gpt2.MLP(width=1, gelu="none"), 2.0) == pytest.approx(1.954500, abs=2e-6)  # nanoGPT's


def test_moderns_activation_is_the_square_of_relu():
    assert mlp_of_one(modern.MLP(width=1), 3.0) == 9.0
    assert mlp_of_one(modern.MLP(width=1), -3.0) == 0.0


def test_gpt2_ties_its_head_to_the_embedding():
    model = made("gpt2")
    assert model.head_weight() is model.token_embedding.weight
    with torch.no_grad():
        before = model.logits(torch.tensor([[1]]))[0, 0]
        model.token_embedding.weight[7] *= 2  # a row that the input does not use
        after = model.logits(torch.tensor([[1]]))[0, 0]
    assert after[7].item() == pytest.approx(2 * before[7].item(), rel=1e-5)
    assert torch.equal(after[8:], before[8:])


def test_modern_has_a_head_of_its_own():
    model = made("modern")
    model.init_weights(torch.Generator().manual_seed(0))
    assert model.head.weight.data_ptr() != model.embedding.weight.data_ptr()
    assert not model.head.weight.any() and model.embedding.weight.any()


def num_parameters(arch, **shape):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in models.load(arch)(**shape).parameters())


SMALL = {"seq_len": 1024, "num_layers": 12, "num_heads": 12, "width": 768}


def test_gpt2_small_has_the_published_number_of_parameters():
    # 50257*768 + 1024*768 + 12 * (12*768*768 + 13*768) + 2*768; a block's 13 * 768: 4 of norms, 3+1+4+1 of biases
    assert num_parameters("gpt2", vocab_size=50257, **SMALL) == 124_439_808


def test_modern_small_has_two_vocabulary_matrices_and_no_vectors():
    # 2 * 50304*768 + 12 * 12*768*768
    assert num_parameters("modern", vocab_size=50304, **SMALL) == 162_201_600


@pytest.mark.parametrize("arch", ARCHS)
def test_hidden_matrices_are_all_matrices_of_the_blocks(arch):
    matrices = made(arch).hidden_matrices()
    assert sum(matrix.numel() for matrix in matrices) == 2 * 12 * 32 * 32
    assert len(matrices) == 2 * {"gpt2": 4, "modern": 6}[arch]


@pytest.mark.parametrize("arch", MODELS)
def test_flops_per_token_is_what_torch_counts(arch):
    shape, num_seqs = {"vocab_size": 320, "seq_len": 64, "num_layers": 12, "num_heads": 6, "width": 96}, 2
    yarn = {"yarn_blocks": (16,)} if "r33" <= arch < "s" else {}  # beyond the last one only long windows grow
    model = models.load(arch)(**shape, **yarn)
    if hasattr(model, "set_window"):
        model.set_window(2048)  # the short ones 1,024: torch's counter sees no masks
    tokens_BT = torch.zeros(num_seqs, shape["seq_len"], dtype=torch.int64)
    # the CPU's own attention kernel is not in torch's counter
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens_BT, tokens_BT).backward()
    num_tokens = num_seqs * shape["seq_len"]
    # smear's gate of 12 numbers is no hidden matrix, and none is before the first token of a sequence
    smear = 6 * 12 * (num_tokens - num_seqs) if "r34" <= arch < "s" else 0
    assert counter.get_total_flops() == model.flops_per_token(shape["seq_len"]) * num_tokens + smear


def test_flops_per_token_worked_out_by_hand():
    with torch.device("meta"):
        model = models.load("gpt2")(vocab_size=50257, **SMALL)
    # 6 * (12 * 12*768*768 + 50257*768) = 6 * 123_532_032; attention 12 layers * 12 * 768 * 1024 = 113_246_208
    assert model.flops_per_token(1024) == 741_192_192 + 113_246_208
    assert model.flops_per_token_causal(1024) == 741_192_192 + 56_623_104
    assert model.flops_per_token(512) == 741_192_192 + 56_623_104


def test_softcap_is_bounded_and_gentle():
    assert softcap(torch.tensor([-1e6, 0.0, 1e6])).tolist() == [-15.0, 0.0, 15.0]
    assert softcap(torch.tensor(1.5)).item() == pytest.approx(15 * math.tanh(0.1), abs=1e-6)


def test_moderns_logits_stay_within_the_cap():
    model = awakened("modern")
    with torch.no_grad():
        model.head.weight.normal_(std=100.0, generator=torch.Generator().manual_seed(0))
        logits_BTV = model.logits(batch()[0])
    assert 14.9 < logits_BTV.abs().max() <= LOGIT_CAP


def test_rotary_turns_without_stretching():
    x_BHTK = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    turned_BHTK = Rotary(head_dim=32, seq_len=64)(x_BHTK)
    assert torch.allclose(turned_BHTK.norm(dim=-1), x_BHTK.norm(dim=-1), rtol=1e-5)
    assert torch.equal(turned_BHTK[:, :, 0], x_BHTK[:, :, 0])  # position 0 is not turned
    assert not torch.allclose(turned_BHTK[:, :, 1], x_BHTK[:, :, 1], atol=0.1)


def test_rotary_turns_a_pair_by_its_position():
    # head width 2: one pair, turned by its position in radians; (1, 0) -> (cos 3, sin 3)
    x_BHTK = torch.tensor([1.0, 0.0]).expand(1, 1, 4, 2)
    assert Rotary(head_dim=2, seq_len=4)(x_BHTK)[0, 0, 3].tolist() == pytest.approx([math.cos(3), math.sin(3)])


def test_rotary_dot_products_see_only_distances():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(32, generator=generator).expand(1, 1, 40, 32) for _ in range(2))
    rotary = Rotary(head_dim=32, seq_len=40)
    scores_TT = (rotary(q) @ rotary(k).mT)[0, 0]
    for distance in (1, 5, 20):
        along = scores_TT.diagonal(-distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-4)
    assert (scores_TT[39, 0] - scores_TT[39, 38]).abs() > 1e-2


def test_rms_norm_has_no_weights_and_unit_mean_square():
    # mean square of (3, 4) is 12.5
    assert rms_norm(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5])
    assert [name for name, parameter in made("modern").named_parameters() if parameter.ndim != 2] == []


@pytest.mark.parametrize("arch", MODELS)
def test_init_depends_on_the_generator_alone(arch):
    one, other = made(arch, seed=3), models.load(arch)(**tiny(arch))
    for parameter in other.parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # whatever was there before, all of it is replaced
    torch.manual_seed(123)
    other.init_weights(torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(made(arch, seed=4).hidden_matrices()[0], one.hidden_matrices()[0])


def test_init_refills_the_rotary_table_of_a_model_built_without_memory():
    with torch.device("meta"):
        model = models.load("modern")(**TINY)
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    assert torch.equal(model.rotary.cos_TK, made("modern").rotary.cos_TK)
    assert torch.equal(model.rotary.sin_TK, made("modern").rotary.sin_TK)


def test_gpt2_init_has_the_stated_spreads():
    model = made("gpt2", width=128, num_layers=8, vocab_size=512)
    block = model.blocks[3]
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for proj in (block.attention.proj, block.mlp.proj):
        assert proj.weight.std().item() == pytest.approx(0.005, rel=0.03)  # 0.02 / sqrt(2 * 8) = 0.02 / 4
    assert not block.mlp.up.bias.any() and (block.mlp_norm.weight == 1).all()


def test_modern_init_has_the_stated_spreads():
    model = made("modern", width=192, vocab_size=512)
    block = model.blocks[1]
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.up.weight.std().item() == pytest.approx(1 / 24, rel=0.02)  # 1 / sqrt(3 * 192) = 1 / sqrt(576)
    assert not block.mlp.proj.weight.any() and not block.attention.proj.weight.any()


@pytest.mark.parametrize("arch", ARCHS)
def test_bf16_autocast_is_close_and_its_loss_is_float32(arch):
    model = awakened(arch)
    exact = model(*batch())
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(*batch())
        assert model.logits(batch()[0]).dtype == torch.float32
    rounded.backward()
    assert rounded.dtype == torch.float32 and rounded.item() != exact.item()
    assert rounded.item() == pytest.approx(exact.item(), abs=0.03)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("arch", ARCHS)
def test_a_bf16_stream_is_bf16_in_every_block_and_close_to_the_float32_one(arch):
    wide, narrow = awakened(arch), awakened(arch, residual_dtype="bfloat16")
    dtypes = {id(wide): set(), id(narrow): set()}
    for model in (wide, narrow):
        for block in model.blocks:
            block.register_forward_hook(lambda block, inputs, x_BTD, model=model: dtypes[id(model)].add(x_BTD.dtype))
    exact = wide(*batch())
    dtypes[id(wide)].clear()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(*batch()) for model in (wide, narrow)]
        assert narrow.logits(batch()[0]).dtype == torch.float32
    assert dtypes == {id(wide): {torch.float32}, id(narrow): {torch.bfloat16}}
    assert losses[0] != losses[1] and losses[1].dtype == torch.float32
    assert losses[1].item() == pytest.approx(exact.item(), abs=0.03)  # as test_bf16_autocast has it
    grads = []
    for model, loss in zip((wide, narrow), losses):
        loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for wide_grad, narrow_grad in zip(*grads, strict=True):
        assert narrow_grad.dtype == torch.float32
        assert torch.cosine_similarity(wide_grad.flatten(), narrow_grad.flatten(), dim=0) > 0.99


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch's own modules, when inductor imports them
@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_is_the_same_model(arch):
    model = awakened(arch)
    compiled = torch.compile(model, fullgraph=True)
    loss = compiled(*batch())
    loss.backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    eager = model(*batch())
    eager.backward()
    assert loss.item() == pytest.approx(eager.item(), abs=1e-4)
    for compiled_grad, parameter in zip(grads, model.parameters(), strict=True):
        assert torch.allclose(compiled_grad, parameter.grad, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size, shape", [(None, (4, 4, 128)), ("small", (12, 12, 768)), ("medium", (24, 16, 1024))])
def test_conf_model_composes_with_a_size(arch, size, shape):
    model = compose.compose([f"model={arch}"] + ([f"model/size={size}"] if size else [])).model
    assert (model.num_layers, model.num_heads, model.width) == shape
    assert (model.arch, model.vocab_size) == (arch, None)


def test_every_model_of_conf_has_its_file():
    assert compose.choices("model") == [*ARCHS, *RUNGS, "windowed"]
    assert [models.load(arch) for arch in ARCHS] == [gpt2.GPT2, modern.Modern]
    for rung in RUNGS:
        model_class = models.load(rung)
        assert models.find(rung) == model_class.__module__ and model_class.__module__.startswith("models.ladder.")
        assert model_class.__name__ == SAME_MODEL.get(rung, rung).upper() or rung == "simple"
    assert models.find("gpt5") is None


# ---- activations computed again


def trained(arch, recomputes_blocks, num_steps=3):
    """(losses, weights, bytes that the last forward pass kept for its backward pass)."""
    model = awakened(arch, num_layers=4)
    model.recomputes_blocks = recomputes_blocks
    optimizer = ADAMW.build(model, rank=0, world_size=1, device_type="cpu")
    losses, kept = [], {}
    for step in range(num_steps):
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(*batch(num_seqs=8, seed=step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    num_bytes = sum(size for place, size in kept.items() if place not in weights)
    return losses, list(model.parameters()), num_bytes


@pytest.mark.parametrize("arch", ["gpt2", "modern", "windowed"])
def test_activation_checkpointing_changes_no_bit_and_keeps_less(arch):
    losses, weights, kept_bytes = trained(arch, recomputes_blocks=False)
    same_losses, same_weights, fewer_bytes = trained(arch, recomputes_blocks=True)
    assert losses == same_losses
    assert all(torch.equal(one, other) for one, other in zip(weights, same_weights, strict=True))
    # per block at most its input and what all blocks share; outside of blocks as before
    assert 0 < fewer_bytes < kept_bytes / 3


def test_the_trainer_builds_what_the_setting_says():
    words = ["track=cpu_nano", "hardware=cpu", "model=modern"]
    config = compose.compose([*words, "model.activation_checkpointing=true", "model.vocab_size=256"])
    assert build_model(config, torch.device("cpu"), None).recomputes_blocks is True
    assert not modern.Modern.recomputes_blocks
