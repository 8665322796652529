"""Classifies kernels by their names: the one table behind every breakdown by category.

RULES are tried in order and the first match wins, because names nest: a FlashAttention kernel has "cutlass" among its
template arguments, and inductor writes the names of the operators that it fused into those of its kernels.  Every rule
has an example that it must match, which tests/test_categories.py checks.  A user's own rules come first:

    - {category: communication, pattern: my_ring_reduce, example: "my_ring_reduce<float>(Args)"}      rules.yaml

Names are data from outside: they are only ever searched, and only in their first MAX_CHARS.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench.base.reading import plain_file, yaml_file
from bench.base.reading.damage import Damaged

MATMUL, ATTENTION, NORMALISATION, LOSS = "matmul", "attention", "normalisation", "loss"
OPTIMIZER, COMMUNICATION, MEMORY_COPY = "optimizer", "communication", "memory copy"
# triton: kernels of Triton of no other kind; elementwise: also reductions and indexing
TRITON, ELEMENTWISE, OTHER = "triton", "elementwise", "other"
CATEGORIES = (MATMUL, ATTENTION, NORMALISATION, LOSS, OPTIMIZER, COMMUNICATION, MEMORY_COPY, TRITON, ELEMENTWISE, OTHER)
MAX_CHARS = 2000  # template arguments may have tens of thousands; the beginning says what a kernel is
# fmt: on
UNSPECIFIC = (TRITON, ELEMENTWISE, OTHER)
HOST_RANGES = ("nccl:", "gloo:", "record_param_comms")  # of the host, around kernels that are counted themselves


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pattern for names, a regular expression without regard to case.  example: a real name that it must match."""

    category: str
    pattern: str
    example: str = ""


# fmt: off
RULES = (
    # Inductor's kernels first: triton_<kind>_fused_<operators>.  tem: a template (matmul, attention); for: a foreach.
    Rule(ATTENTION, r"^triton_tem_fused\w*attention", "triton_tem_fused_flex_attention_backward_2"),
    Rule(MATMUL, r"^triton_tem_", "triton_tem_fused_addmm_relu_1"),
    Rule(OPTIMIZER, r"^triton_\w*(?:_adam|_foreach_|addcdiv|lerp)", "triton_poi_fused_addcdiv_lerp_sqrt_4"),
    Rule(OPTIMIZER, r"^triton_for_fused_", "triton_for_fused_0"),
    Rule(LOSS, r"^triton_\w*(?:log_softmax|nll_loss|cross_entropy)", "triton_red_fused__log_softmax_mul_tanh_7"),
    Rule(ATTENTION, r"^triton_\w*softmax", "triton_per_fused__safe_softmax_add_where_6"),
    Rule(NORMALISATION, r"^triton_\w*(?:_norm|rsqrt)", "triton_red_fused_add_mean_mul_pow_rsqrt_0"),
    Rule(TRITON, r"^triton_(?:poi|red|per|unk|mix|spl)_", "triton_poi_fused__unsafe_view_mul_silu_2"),
    # Communication comes before the categories whose patterns its names contain.
    Rule(COMMUNICATION, r"[nrhx]ccl|oneccl",
         "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    Rule(COMMUNICATION, r"(?:deep_)?ep::int(?:er|ra)node|deep_ep|notify_dispatch|notify_combine|get_dispatch_layout",
         "void deep_ep::internode::combine<false, 4, __nv_bfloat16, 16, 4, 4, 16, 24>(int4*, float*)"),
    Rule(COMMUNICATION, r"nvshmem|rocshmem|msccl|mori_shmem", "nvshmemi_proxy_barrier_kernel"),
    Rule(COMMUNICATION, r"ep(?:dispatch|combine)(?:intra|inter)node", "EpDispatchIntraNodeKernel_bf16"),  # AMD's MORI
    Rule(COMMUNICATION, r"exchangesplitandoffset", "exchangeSplitAndOffset(long*, long*, int)"),  # all_to_all_vdev
    Rule(COMMUNICATION, r"(?:put|wait)_signal_kernel|barrier_kernel",  # torch's symmetric memory
         "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)"),
    Rule(COMMUNICATION, r"lamport", "void mnnvl_lamport_rmsnorm<__nv_bfloat16>(int)"),  # TensorRT-LLM's, flashinfer's
    Rule(COMMUNICATION, r"cross_device_reduce|quick_?reduce|userbuffers",
         "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)"),
    Rule(COMMUNICATION, r"multimem|(?:one|two)_?shot_?|symm_?mem|symmetric_memory",
         "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)"),
    Rule(COMMUNICATION, r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv",
         "void dlslime::intranode_alltoall_kernel(signed char*, int)"),
    # Copies by the driver; copies by a kernel are elementwise.
    Rule(MEMORY_COPY, r"^(?:hip)?mem(?:cpy|set)|^dma_request", "Memcpy HtoD (Pinned -> Device)"),
    Rule(MEMORY_COPY, r"^copy(?:host|device)|^fillbuffer|rocclr_(?:copy|fill)", "__amd_rocclr_fillBufferAligned"),
    # A log-softmax is the loss; any other softmax in a transformer is attention that is not fused.
    Rule(LOSS, r"log_?softmax|softmax_warp_\w+<[^<>]*, \d+, true",
         "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
         "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float*, int)"),
    Rule(LOSS, r"entropy|(?<![a-z])loss|mse_kernel|mse_backward", "nll_loss_forward_reduce_cuda_kernel_2d"),
    Rule(ATTENTION, r"flash(?!infer)|fmha|sdpa|attention|attn|(?<![a-z])mha_|(?:prefill|decode)with\w*kvcache",
         "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<> > >"),
    Rule(ATTENTION, r"(?<!log_)(?<!log)softmax|bwd_kernel_d[kq]|paged_?kv",
         "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*)"),
    # Normalisation and optimizer before matmul: their arguments may name it, not the other way round.
    Rule(NORMALISATION, r"(?:layer|rms|batch|group|instance|qk)_?norm|normali[sz]e|gammabeta|bn_(?:fw|bw)_",
         "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)"),
    Rule(OPTIMIZER, r"adam|adagrad|fused_?sgd|fusedoptimizer|muon|newton_?schulz|polar_?express",
         "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float>(int)"),
    Rule(OPTIMIZER, r"multi_tensor_apply",  # torch._foreach_*: optimizers, and the clipping of gradients
         "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor<float>>"),
    Rule(MATMUL, r"gemm|gemv|nvjet|cublas|xmma|wgmma|splitk_?reduce|cutlass", "nvjet_tst_64x8_64x16_2x1_v_bz_TNT"),
    Rule(MATMUL, r"^cijk_|tensile|hipblas|wvsplitk", "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64"),
    Rule(MATMUL, r"matmul|(?<![a-z])(?:add|b|scaled_|baddb)?mm(?![a-z])", "_scaled_mm_kernel"),
    Rule(MATMUL, r"^xxt_|^ba_plus_caa|linear_relu_square", "XXT_kernel"),  # modded-nanogpt: Muon's, the MLP's
    # Convolutions are products of matrices too, and no transformer has many.
    Rule(MATMUL, r"cudnn|conv\dd|convolve|[dw]grad_|winograd|miopen", "cudnn_infer_volta_scudnn_128x64_relu_nn_v1"),
    Rule(ELEMENTWISE, r"elementwise|reduce_?kernel|segmented_reduce|copy_\w*kernel|pool_",
         "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"),
    Rule(ELEMENTWISE, r"catarray|ind(?:ex|ices)|gather|scatter|embedding|transpose|permute|where_kernel|fill",
         "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2>(float*)"),
    Rule(ELEMENTWISE, r"cub::|thrust::|rocprim|devicescan|distribution_|rope|rotary|silu|gelu|quant|dropout",
         "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800>"),
    Rule(TRITON, r"^triton_", "triton_mul_add_by_hand"),
)
# Where an annotation around the launch says more than an unspecific kernel name.
ANNOTATION_RULES = (
    Rule(OPTIMIZER, r"^optimizer|zero_grad|grad_?clip", "Optimizer.step#AdamW.step"),
    Rule(LOSS, r"cross_?entropy|nll_loss|(?<![a-z])loss(?![a-z])", "cross_entropy_loss"),
    Rule(NORMALISATION, r"(?:layer|rms|batch|group)_?norm", "nn.Module: RMSNorm_3"),
    Rule(ATTENTION, r"attention|attn|sdpa", "nn.Module: CausalSelfAttention_0"),
)


def category(kernel_name: str, annotation: str | None = None, rules: tuple[Rule, ...] = RULES) -> str:
    """Returns one of CATEGORIES.  annotation: the innermost range around the launch; it decides for vague names."""
    by_name = _first(kernel_name, rules)
    if annotation is not None and by_name in UNSPECIFIC:
        by_annotation = _first(annotation, ANNOTATION_RULES)
        return by_name if by_annotation == OTHER else by_annotation
    return by_name


def is_communication(kernel_name: str, rules: tuple[Rule, ...]=RULES) -> bool:
    """Returns whether a device event moves data between GPUs, unlike the host's "nccl:all_reduce" ranges."""
    return _first(kernel_name, rules) == COMMUNICATION


def load_rules(path: str | Path) -> tuple[Rule, ...]:
    """Returns the rules in a user's YAML or JSON list of {category, pattern[, example]}, followed by RULES.

    Raises ValueError for another form, an unknown category, a pattern that is not a regular expression, and an example
    that its own pattern does not match.
    """
    try:
        entries = msgspec.convert(yaml_file.parsed(plain_file.text(path), path), list[Rule])  # reads json as well
    except (Damaged, msgspec.ValidationError) as error:
        form = "give a list of {category, pattern} and, if useful, example"
        raise ValueError(f"rules={path}: cannot be read ({error}): {form}") from None
    for number, rule in enumerate(entries, 1):
        where = f"rules={path}: entry {number}"
        if rule.category not in CATEGORIES:
            raise ValueError(f"{where}: category={rule.category}: choose from {', '.join(CATEGORIES)}")
        try:
            ((_, search, is_lower),) = _searches((rule,))
        except re.error as error:
            raise ValueError(f"{where}: pattern={rule.pattern}: {error}") from None
        if rule.example and not search(rule.example.lower() if is_lower else rule.example):
            raise ValueError(f"{where}: pattern={rule.pattern} does not match its example {rule.example}")
    return (*entries, *RULES)


@functools.lru_cache(maxsize=65536)
def _first(name: str, rules: tuple[Rule, ...]) -> str:
    if name.startswith(HOST_RANGES):
        return OTHER
    name = name[:MAX_CHARS]
    names = (name, name.lower())
    return next((category for category, search, is_lower in _searches(rules) if search(names[is_lower])), OTHER)


@functools.lru_cache(maxsize=64)
def _searches(rules: tuple[Rule, ...]) -> list[tuple[str, Callable[[str], re.Match[str] | None], bool]]:
    """Returns [(category, search, whether to search the name in lower case)], which is thrice as fast."""
    flags = [re.NOFLAG if rule.pattern.islower() else re.IGNORECASE for rule in rules]
    return [(rule.category, re.compile(rule.pattern, flag).search, not flag) for rule, flag in zip(rules, flags)]
