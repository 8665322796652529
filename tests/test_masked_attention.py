"""Documents and windows: the plain way by hand, FlexAttention's against the plain one, the rungs that use them."""

import pytest
import torch
import torch.nn.functional as F

import models
from bench.config import compose, resolve, schema
from bench.data.sources import datasets
from bench.training.model import build_model
from models import masked_attention
from models.masked_attention import NO_LIMIT, Visible

EOS = 9
# documents of 3, 7 and 30 tokens, and of 25 (its row begins in the middle of one) and 15
TOKENS_BT = torch.ones(2, 40, dtype=torch.int64)
TOKENS_BT[0, 3] = TOKENS_BT[0, 10] = TOKENS_BT[1, 25] = EOS
LIMITS = [(NO_LIMIT, NO_LIMIT), (6, NO_LIMIT), (8, NO_LIMIT), (13, NO_LIMIT), (13, 2), (NO_LIMIT, 1), (NO_LIMIT, 3)]


def visible(near_tokens=NO_LIMIT, near_blocks=NO_LIMIT, tokens_BT=TOKENS_BT, eos_token=EOS, block=8, scale=None):
    limits = [torch.tensor(limit, dtype=torch.int32) for limit in (near_tokens, near_blocks)]
    reach_tokens = min(near_tokens, near_blocks * block)
    return Visible(tokens_BT, eos_token, *limits, reach_tokens, block, scale)


def by_the_rules(near_tokens, near_blocks, tokens_BT=TOKENS_BT, block=8):
    """Returns the mask [B, T, T], worked out pair by pair in Python."""
    B, T = tokens_BT.shape
    seen_BTT = torch.zeros(B, T, T, dtype=torch.bool)
    for b in range(B):
        for i in range(T):
            for j in range(i + 1):
                in_one_document = not (tokens_BT[b, j + 1 : i + 1] == EOS).any()
                near = i - j < near_tokens and i // block - j // block < near_blocks
                seen_BTT[b, i, j] = in_one_document and near
    return seen_BTT


def qkv(T=40, K=16, num_seqs=2, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(num_seqs, 2, T, K, generator=generator).to(device) for _ in range(3)]


@pytest.mark.parametrize("limits", LIMITS)
def test_a_token_sees_its_document_within_the_window(limits):
    q_BHTK, k_BHTK, v_BHTK = qkv()
    seen_B1TT = by_the_rules(*limits)[:, None]
    scores_BHTT = (q_BHTK @ k_BHTK.mT / 4).masked_fill(~seen_B1TT, float("-inf"))  # sqrt(16)
    expected = scores_BHTT.softmax(-1) @ v_BHTK
    assert torch.allclose(visible(*limits)(q_BHTK, k_BHTK, v_BHTK), expected, atol=1e-6)


def test_without_an_end_of_text_token_a_sequence_is_one_document():
    q_BHTK, k_BHTK, v_BHTK = qkv()
    expected = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, scale=0.12)
    assert torch.allclose(visible(eos_token=None, scale=0.12)(q_BHTK, k_BHTK, v_BHTK), expected, atol=1e-6)


@pytest.mark.parametrize("limits", LIMITS)
def test_chunks_of_queries_change_nothing(limits, monkeypatch):
    whole = visible(*limits).plain(*qkv())
    monkeypatch.setattr(masked_attention, "CHUNK_TOKENS", 7)
    assert torch.allclose(visible(*limits).plain(*qkv()), whole, atol=1e-6)


def as_pairs(counts_B1N, order_B1NN, block):
    """Returns listed blocks as a mask [B, T, T]."""
    B, _, N = counts_B1N.shape
    listed_BNN = torch.zeros(B, N, N, dtype=torch.bool)
    for b in range(B):
        for row in range(N):
            listed_BNN[b, row, order_B1NN[b, 0, row, : counts_B1N[b, 0, row]].long()] = True
    return listed_BNN.repeat_interleave(block, 1).repeat_interleave(block, 2)


@pytest.mark.parametrize("limits", LIMITS)
def test_the_blocks_for_flex_attention_hold_exactly_what_is_seen(limits):
    mask = visible(*limits).block_mask()
    partial_BTT = as_pairs(mask.kv_num_blocks, mask.kv_indices, 8)
    full_BTT = as_pairs(mask.full_kv_num_blocks, mask.full_kv_indices, 8)
    seen_BTT = by_the_rules(*limits)
    index = torch.arange(40)
    within_BTT = torch.stack([mask.mask_mod(b, 0, index[:, None], index[None]) for b in range(2)])
    assert torch.equal((partial_BTT & within_BTT) | full_BTT, seen_BTT)
    assert not (partial_BTT & full_BTT).any()
    blocks_BNN = seen_BTT.view(2, 5, 8, 5, 8).transpose(2, 3)
    assert full_BTT[:, ::8, ::8].equal(blocks_BNN.all(-1).all(-1))  # no work for a mask where none is needed
    if limits[0] == NO_LIMIT:
        assert (partial_BTT | full_BTT)[:, ::8, ::8].equal(blocks_BNN.any(-1).any(-1))  # nor where nothing is seen


def test_a_sequence_must_be_whole_blocks_for_flex_attention():
    with pytest.raises(ValueError, match="data.seq_len=40: FlexAttention goes by blocks of 16 tokens: use a multiple"):
        visible(block=16).block_mask()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("limits", LIMITS)
def test_flex_attention_agrees_with_the_plain_way(limits):
    both = visible(*limits, scale=0.12)
    with torch.no_grad():
        assert torch.allclose(both.fast(*qkv()), both.plain(*qkv()), atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch's own modules, when inductor imports them
@pytest.mark.parametrize("limits", [(100, NO_LIMIT), (NO_LIMIT, 2)])
def test_compiled_flex_attention_agrees_with_the_plain_way(limits):
    tokens_BT = torch.ones(1, 512, dtype=torch.int64)
    tokens_BT[0, 200] = tokens_BT[0, 300] = EOS
    both = visible(*limits, tokens_BT=tokens_BT, block=128)
    args = qkv(T=512, num_seqs=1)
    with torch.no_grad():
        fast = torch.compile(both.fast, dynamic=False)(*args)
        assert torch.allclose(fast, both.plain(*args), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("limits", [(100, NO_LIMIT), (NO_LIMIT, 2)])
def test_flex_attention_on_a_gpu_has_the_plain_ways_gradients(limits):
    tokens_BT = torch.ones(1, 512, dtype=torch.int64, device="cuda")
    tokens_BT[0, 200] = tokens_BT[0, 300] = EOS
    args = [tensor.requires_grad_() for tensor in qkv(T=512, K=32, num_seqs=1, device="cuda")]

    def attention(way):
        near = [torch.tensor(limit, dtype=torch.int32, device="cuda") for limit in limits]
        both = Visible(tokens_BT, EOS, *near, min(limits[0], limits[1] * 128))
        return getattr(both, way)(*args)

    fast, expected = torch.compile(attention, dynamic=False)("fast"), attention("plain")
    assert torch.allclose(fast, expected, atol=2e-3)
    for fast_grad, plain_grad in zip(
        torch.autograd.grad(fast.square().sum(), args), torch.autograd.grad(expected.square().sum(), args), strict=True
    ):
        assert torch.allclose(fast_grad, plain_grad, atol=2e-2)


SHAPE = {"vocab_size": 32, "seq_len": 64, "num_layers": 4, "num_heads": 2, "width": 32, "activations": "float32"}


def awakened(rung, **args):
    model = models.load(rung)(**SHAPE, **args)
    model.init_weights(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


@pytest.mark.parametrize("rung", ["r19", "r21", "r26", "r28", "r51", "r53"])  # each has scales of its own
def test_the_8_bit_head_is_near_the_plain_one_and_validation_has_the_plain_one(rung):
    tokens_BT = torch.randint(EOS, (2, 64), generator=torch.Generator().manual_seed(2))
    grads = []
    for fp8_head in (False, True):
        model = awakened(rung, fp8_head=fp8_head)
        model(tokens_BT, tokens_BT).backward()
        present = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        grads.append(torch.cat([grad.float().flatten() for grad in present]))
    difference = (grads[1] - grads[0]).norm() / grads[0].norm()
    assert 0.001 < difference < 0.15  # most of r51 and r53, where the head is the embedding too
    with torch.no_grad():
        plain, in_8_bits = (awakened(rung, fp8_head=fp8_head).eval() for fp8_head in (False, True))
        assert torch.equal(plain.logits(tokens_BT), in_8_bits.logits(tokens_BT))


@pytest.mark.parametrize("rung", ["r12", "r15", "r20"])
def test_another_document_and_what_lies_outside_all_windows_change_no_logits(rung):
    model = awakened(rung, eos_token=EOS, block=8, window=8)
    tokens_BT = torch.randint(EOS, (1, 64), generator=torch.Generator().manual_seed(2))
    tokens_BT[0, 10] = EOS
    changed_BT = tokens_BT.clone()
    changed_BT[0, 5], changed_BT[0, 12] = 20, 21
    with torch.no_grad():
        moved_T = (model.logits(tokens_BT) - model.logits(changed_BT)).abs().amax(dim=(0, 2))
    assert (moved_T[5:8] > 1e-5).all() and moved_T[10:12].max() == 0  # the second document begins at 10
    assert moved_T[12] > 1e-5 and moved_T[12 + 4 * 8 :].max() == 0  # four layers of at most 8 tokens each


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch's own modules, when dynamo imports them
@pytest.mark.parametrize("rung", ["r13", "r20"])
def test_one_compiled_graph_serves_every_window(rung):
    graphs, losses = [], []
    tokens_BT = torch.randint(EOS, (1, 64), generator=torch.Generator().manual_seed(2))
    model = awakened(rung, block=8, window=16)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, dynamic=False, backend=backend)
    with torch.no_grad():
        for window in (16, 8, 48):
            model.set_window(window)
            losses.append(compiled(tokens_BT, tokens_BT).item())
            assert losses[-1] == pytest.approx(model(tokens_BT, tokens_BT).item(), abs=1e-5)
    assert len(graphs) == 1 and len(set(losses)) == 3


def test_a_window_is_whole_blocks():
    assert (awakened("r13").window_block, awakened("r16").window_block) == (64, 128)
    with pytest.raises(ValueError, match="window=192: use a multiple of 128 tokens"):
        awakened("r16").set_window(192)
    awakened("r13").set_window(192)


def test_only_the_attention_within_the_window_is_counted():
    model = awakened("r20", block=8, window=16)  # of 4 layers the third has no attention; windows 16, 8 and 16
    num_weights = sum(matrix.numel() for matrix in model.hidden_matrices()) + 32 * 32
    assert model.flops_per_token(64) == 6 * num_weights + 12 * 32 * (16 + 8 + 16)
    visible_pairs = 2 * (16 - 16 * 16 // 128) + (8 - 8 * 8 // 128)
    assert model.flops_per_token_causal(64) == 6 * num_weights + 12 * 32 * visible_pairs


def test_the_records_long_windows_are_those_of_four_layers():
    model = models.load("r20")(vocab_size=64, seq_len=128, num_layers=12, num_heads=2, width=32)
    assert [index for index in range(12) if model.has_long_window(index)] == [0, 4, 7, 11]
    assert model.windows() == [1792, 896, 896, 896, 1792, 896, 896, 896, 896, 896, 1792]  # the eighth has no attention


def test_single_ideas_can_be_taken_out():
    tokens_BT = torch.arange(32)[None]
    with_tables = awakened("r17", value_residual=True)
    without = awakened("r17", value_residual=False)
    names = dict(without.named_parameters())
    assert not [name for name in names if "value" in name and "attention.value.weight" not in name]
    assert any(name.startswith("value_embeddings.") for name in dict(with_tables.named_parameters()))
    assert torch.isfinite(without(tokens_BT, tokens_BT))
    assert set(awakened("r20", long_short=False, attention_scale=None).windows()) == {1792}


def test_the_experiments_have_the_records_sequences_and_documents():
    for rung, seq_len, val_seq_len in (("r12", 65536, None), ("r20", 65536, None), ("r21", 49152, 4 * 65536)):
        config = compose.compose([f"experiment={rung}"])
        assert (config.data.seq_len, config.data.batch_tokens) == (seq_len, 8 * seq_len)
        assert config.goal.val_seq_len == val_seq_len
        assert config.model.args == {"block": 128}
        assert datasets.chosen(config.data).eos_token == 50256


@pytest.mark.parametrize("rung", ["r12", "r20"])
def test_a_rung_has_the_documents_of_the_runs_data(rung):
    overrides = [f"experiment={rung}", "track=free", "model/size=nano", "data.seq_len=128"]
    machine = schema.Machine(num_gpus=0, num_cpus=1)
    config = resolve.resolve(compose.compose(overrides, machine), machine, vocab_size=257)
    assert build_model(config, torch.device("cpu"), eos_token=256).eos_token == 256


def test_scales_of_the_8_bit_head_are_the_records_at_their_own_sequences():
    r26, r51 = models.load("r26"), models.load("r51")  # the records divide by what we multiply by
    assert (1 / r26.x_scale(None, 768), 1 / r26.WEIGHT_SCALE, 1 / r26.GRAD_SCALE) == pytest.approx(
        (768**0.5 / 448, 24 / 448, 1 / 448)
    )
    assert (1 / r51.x_scale(None, 768), 1 / r51.WEIGHT_SCALE, 1 / r51.GRAD_SCALE) == pytest.approx(
        (100 / 448, 1.5 / 448, 0.75 / 448)
    )
    r19, r21 = models.load("r19"), models.load("r21")
    assert (r19.WEIGHT_SCALE, r19.GRAD_SCALE * 65536) == (2**5, 2**29)
    assert (r21.WEIGHT_SCALE, r21.GRAD_SCALE * 49152) == (2**9, 2**19)
