"""Kernel names and what they are counted as: every rule holds for its example, and no rule robs another."""

import time

import pytest

from bench.analysis.trace.categories import ANNOTATION_RULES, CATEGORIES, RULES, category, is_communication, load_rules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.category}-{rule.example[:30]}")
def test_every_rule_gives_its_example_its_category(rule):
    """By this rule, not by an earlier one: a rule that never gets its turn is a broken window."""
    assert category(rule.example) == rule.category
    first = next(other for other in RULES if category(rule.example, rules=(other,)) == other.category)
    assert first is rule, f"{first.pattern} takes what {rule.pattern} is for"


def test_every_category_but_other_has_a_rule():
    assert {rule.category for rule in RULES} == set(CATEGORIES) - {"other"}
    assert category("at::cuda::(anonymous namespace)::spin_kernel(long)") == "other"


@pytest.mark.parametrize("rule", ANNOTATION_RULES, ids=lambda rule: rule.example)
def test_an_annotation_decides_where_the_name_could_be_anybodys(rule):
    assert category("void at::native::vectorized_elementwise_kernel<4>", rule.example) == rule.category
    assert category("nvjet_tst_64x8_64x16_2x1_v_bz_TNT", rule.example) == "matmul"  # Muon's products stay products
    assert category("ncclDevKernel_AllGather_RING_LL", rule.example) == "communication"


def test_an_annotation_that_says_nothing_changes_nothing():
    assert category("void at::native::vectorized_elementwise_kernel<4>", "ProfilerStep#7") == "elementwise"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # cutlass is among FlashAttention's template arguments: attention comes before matmul
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t> >", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("attn_fwd", "attention"),
        ("_attn_bwd_dkdv", "attention"),
        # flashinfer has other kernels than attention, and other libraries take its types as arguments
        ("void trt::quantize_with_block_size<2>(int, unsigned int*, flashinfer::QuantizationSFLayout)", "elementwise"),
        ("void flashinfer::BatchPrefillWithRaggedKVCacheKernel<flashinfer::KernelTraits<1> >(P)", "attention"),
        ("void (anonymous namespace)::softmax_warp_backward<float, half, float, 10, true, false>(float*)", "loss"),
        ("void (anonymous namespace)::softmax_warp_backward<float, half, float, 10, false, false>(half*)", "attention"),
        ("fused_softcapped_entropy_fwd_kernel", "loss"),
        ("liger_cross_entropy_kernel", "loss"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_kernel__5x_cublas", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>", "matmul"),
        ("volta_sgemm_32x128_tn", "matmul"),
        ("ba_plus_cAA_kernel", "matmul"),
        ("void splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)", "matmul"),
        ("SyncBatchNorm_kernel", "normalisation"),  # nothing is communication because it holds "Sync"
        ("admab_gemm", "matmul"),  # nor a copy because it holds "dma"
        ("hip_softcap_kernel_add", "other"),  # nor communication because it begins with "hip"
        ("_layer_norm_fwd_1pass_kernel", "normalisation"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, "
            "FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>",
            "optimizer",
        ),
        ("void at::native::elementwise_kernel<128, 2, at::native::mse_backward_cuda_kernel(at::Tensor&)>", "loss"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "elementwise"),
        ("Memset (Device)", "memory copy"),
        ("Memcpy PtoP (Device -> Device)", "memory copy"),
        ("triton_per_fused_native_layer_norm_2", "normalisation"),
        ("triton_poi_fused_cat_fill_new_zeros_0", "triton"),
        ("", "other"),
    ],
)
def test_names_that_contain_other_names(name, expected):
    assert category(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)",
        "void ncclSymkDevKernel_AllGather_ST",
        "rcclGenericKernel<1, false>",
        "_ZN5aiter26cross_device_reduce_2stageIDF16bLi8ELb0EEEv",
        "void vllm::cross_device_reduce_1stage<half, 2>(vllm::RankData*)",
        "two_shot_all_reduce_kernel_inplace",
        "void c10d::symmetric_memory::barrier_kernel(unsigned int**)",
        "void deep_ep::intranode::dispatch<8, 768>(int4*)",
        "void dlslime::intranode_alltoall_kernel",
        "nvshmemi_transfer_rma_put",
        "void ep::intranode::dispatch<8, 768, 12288>(int4*, float*, long*)",
    ],
)
def test_communication_is_more_than_a_prefix(name):
    assert is_communication(name)


@pytest.mark.parametrize(
    "name",
    [
        "nccl:all_reduce",  # a range on the host around what is counted as a kernel already
        "record_param_comms",
        "triton_poi_fused_all_gather_into_tensor_cat_3",  # a copy that inductor fused next to a collective
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float>>",
        "Memcpy DtoD (Device -> Device)",
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
    ],
)
def test_what_only_sounds_like_communication_is_none(name):
    assert not is_communication(name)


def test_a_users_rules_come_first(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(
        "- {category: communication, pattern: '^spin_', example: spin_}\n- {category: loss, pattern: nvj}\n"
    )
    rules = load_rules(path)
    assert is_communication("spin_kernel", rules) and not is_communication("spin_kernel")
    assert category("nvjet_tst_64x8", rules=rules) == "loss"
    assert category("ncclDevKernel_SendRecv", rules=rules) == "communication"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("category: loss", "Expected `array`, got `object`"),
        ("- loss", r"Expected `object`, got `str` - at `\$\[0\]`"),
        ("- {category: lost, pattern: x}", "category=lost: choose from matmul"),
        ("- {category: loss, pattern: '('}", r"pattern=\(:"),
        ("- {category: loss, pattern: a, example: b}", "does not match its example b"),
        ("- {category: loss, pattern: a, colour: b}", "unknown field `colour`.*give a list of {category, pattern}"),
        ("{", "cannot be read"),
    ],
)
def test_rules_that_cannot_be_used_are_refused_by_entry(tmp_path, text, message):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_rules(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_rules(tmp_path / "none.yaml")


def test_an_endless_name_takes_no_time():
    started_s = time.process_time()
    category("softmax_warp_x<" + "a, 1" * 1_000_000)
    assert time.process_time() - started_s < 1
