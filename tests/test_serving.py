"""Bounds of what inference servers run: attention over a cache of keys, and experts whose weights are no argument."""

import pytest
from traces import event, launched, load_all, write

from bench.analysis.explain import account, parts, traffic
from bench.analysis.explain.serving import Lengths

H100 = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}]}  # 989e12 FLOP/s in bfloat16, 3.35e12 bytes/s
BF16 = "c10::BFloat16"


def parts_ns(path, events):
    explanation = account.accounts_of(load_all([write(path, events, **H100)]))[1]
    return {line["part"]: line["sum_ns"] for line in explanation["ranks"]["0"]["parts"]}


@pytest.mark.parametrize(
    "name, lengths",
    [
        ("execute_5_context_1(sq3sk5sqsq9sqsk15)_generation_2(sq2sk9sqsq2sqsk9)", (5, 14, 11, 24)),
        ("step[MIXED bs=3 c=1 g=2 c_sq=3 c_sk=5 c_sqsq=9 c_sqsk=15 g_sq=2 g_sk=9 g_sqsq=2 g_sqsk=9]", (5, 14, 11, 24)),
        ("decode[bs=2 tok=2 d=2 sqsq=2 sqsk=9 sk=9]", (2, 9, 2, 9)),
        ("step[DECODE bs=32]", None),
        ("execute_context_1(888_788544)_generation_0(0)", None),
    ],
)
def test_lengths_of_sequences_are_those_of_the_servers_annotations(name, lengths):
    assert Lengths.from_name(name) == lengths


def test_a_token_sees_the_cache_and_the_new_ones_up_to_itself():
    # three new tokens of five see 3, 4 and 5; with 8 heads of 4 numbers: 12 pairs, two products
    facts = {"shapes": [[3, 8, 4], [3, 2, 4], [3, 2, 4], [3, 8, 4]], "types": [BF16] * 4}
    flop, num_bytes = Lengths(3, 5, 9, 15).needs(facts)
    assert flop == 2 * 8 * 12 * (4 + 4)
    assert num_bytes == 2 * (5 * 2 * (4 + 4)) + 2 * (2 * 3 * 8 * 4)  # keys and values of two heads; queries and results
    assert Lengths(4, 5, 16, 20).needs(facts) == (None, None)  # more new tokens than queries: of another batch


@pytest.mark.parametrize(
    "name, shapes, types, mib, gflop",
    [  # TraceLens' own figures for these calls, tests/traces/inference/*/perf_csvs/InferenceAttention_fwd.csv
        ("vllm::unified_attention_with_output", [[32, 64, 64], [32, 8, 64], [32, 8, 64], [32, 64, 64]], [BF16] * 4,
         108.08984375, 0.902529024),
        ("sglang_profiler::attention_paged_attention_ragged_100",
         [[32, 32, 128], [10905190400], [32, 32, 128], [835874, 1, 8, 128], [835874, 1, 8, 128]],
         [BF16, "unsigned char", BF16, BF16, BF16], 128.56640625, 0.53714944),
    ],
)  # fmt: skip
def test_attention_over_a_cache_moves_what_an_independent_tool_says(name, shapes, types, mib, gflop):
    total = {"vllm": 55086, "sglang_profiler": 32785}[name.split("::")[0]]
    flop, num_bytes = Lengths(32, total, 32, total).needs({"name": name, "shapes": shapes, "types": types})
    assert (num_bytes / 2**20, flop / 1e9) == (pytest.approx(mib), pytest.approx(gflop))
    assert traffic.ATTENTION.search(name.split("::")[-1])


def attention(annotation, kernel_us):
    shapes = [[64, 8, 128], [64, 8, 128], [64, 8, 128], [64, 8, 128]]  # 512 KiB together
    inputs = {"Input Dims": shapes, "Input type": [BF16] * 4}
    return [
        event("user_annotation", annotation, 0, 30),
        event("cpu_op", "vllm::unified_attention_with_output", 5, 20, **inputs),
        *launched("paged", 40, kernel_us, 10, 1),
    ]


def test_attention_needs_the_keys_of_the_batch_but_with_a_window_or_without_lengths_its_arguments_alone(tmp_path):
    # 32,000 tokens of 4,096 bytes, and 256 KiB of queries and results: 131.3 MB, 39.204 us
    decode = "execute_64_context_0(sq0sk0sqsq0sqsk0)_generation_64(sq64sk32000sqsq64sqsk32000)"
    num_bytes = 32_000 * 4096 + 2 * 64 * 8 * 128 * 2
    full = parts_ns(tmp_path / "a.json", attention(decode, 100))
    assert full[parts.BANDWIDTH] == round(num_bytes / 3.35e12 * 1e9)
    arguments_ns = round(4 * 64 * 8 * 128 * 2 / 3.35e12 * 1e9)
    assert parts_ns(tmp_path / "a.json", attention(decode, 20))[parts.BANDWIDTH] == arguments_ns
    assert parts_ns(tmp_path / "a.json", attention("no lengths", 100))[parts.BANDWIDTH] == arguments_ns
    assert parts.UNBOUND not in full


def experts(stack=(16, 512, 2048), topk="4"):
    """vLLM's experts: 8192 tokens of 1,024 numbers, 16 experts of 2,048 columns, packed; two kernels after the topk."""
    weights = {"Input Dims": [list(stack), []], "Input type": ["unsigned char", "ScalarList"]}
    chosen = {"Input Dims": [[8192, 16], []], "Input type": [BF16, "Scalar"], "Concrete Inputs": ["", topk]}
    tokens = {"Input Dims": [[8192, 1024], [8192, 16], []], "Input type": [BF16, BF16, ""]}
    return [
        event("cpu_op", "vllm::moe_forward", 0, 100, **tokens),
        event("cpu_op", "TopK", 5, 10, **chosen),
        event("cuda_runtime", "cuLaunchKernel", 8, 2),
        event("cpu_op", "aten::view", 20, 5, **weights),
        *launched("_matmul_ogs_NNT_bf16xbf16xmxfp4", 200, 500, 30, 1),
        *launched("_finalize_scatter", 700, 10, 50, 2),
    ]


def test_the_weights_of_experts_are_those_seen_last_before_the_product(tmp_path):
    ns = parts_ns(tmp_path / "a.json", experts())
    # each of 8,192 tokens with 4 experts of 512 * 2,048 bytes, two numbers a byte
    assert ns[parts.ARITHMETIC] == round(2 * 8192 * 4 * 2 * 512 * 2048 / 989e12 * 1e9)
    assert ns[parts.UNBOUND] == 10_000  # the second kernel has seen no weights since the first
    for unknown in (experts(stack=(8, 512, 2048)), experts(topk="")):  # of another number of experts; how many a token
        assert parts_ns(tmp_path / "b.json", unknown)[parts.UNBOUND] == 510_000


def test_embedding_bags_read_their_indices_and_their_backward_pass_its_gradient():
    forward = {"name": "fbgemm::split_embedding_codegen_lookup_adagrad_function", "bytes": None}
    forward |= {"shapes": [[640649648], [4], [768], [385]], "types": ["float", "int", "long int", "long int"]}
    assert traffic.moved_bytes(forward) == 8 * (768 + 385)
    backward = {"name": "torch::autograd::CppNode<SplitLookupFunction_adagrad_Op>", "bytes": None}
    assert traffic.moved_bytes(backward | {"shapes": [[128, 48]], "types": ["float"]}) == 4 * 128 * 48
