"""The analysis beyond times: FLOPs and rates, who launched what, advice, and how it reads."""

import pytest
import traces
from traces import event, launched, rank_of, read_as_text, step, write

from bench.analysis.explain import account
from bench.analysis.trace import analysis, formulas
from bench.analysis.trace.load import find, load
from bench.analysis.trace.text import document, short
from bench.cli import analyze

BF16, SDPA = "c10::BFloat16", "aten::_scaled_dot_product"
H100 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}


def op(name, ts, dur, *dims, kind="float", **args):
    return event("cpu_op", name, ts, dur, **{"Input Dims": list(dims), "Input type": [kind] * len(dims)}, **args)


# ---- FLOPs


@pytest.mark.parametrize(
    "name, dims, flop",
    [
        ("aten::mm", [[2, 3], [3, 5], [2, 5]], 2 * 2 * 3 * 5),  # into a tensor that was there
        ("aten::addmm", [[5], [2, 3], [3, 5], [], [], [2, 5]], 60),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 420),
        (f"{SDPA}_flash_attention", [[2, 4, 8, 16]] * 3, 4 * 2 * 4 * 8 * 8 * 16),
        ("aten::mm", None, None),
        ("aten::add", [[2, 3], [2, 3]], None),
        ("aten::matmul", [[4, 2, 3], [3, 5]], 240),
        ("aten::matmul", [[2, 3], [4, 3, 5]], 240),
        ("aten::linear", [[4, 2, 3], [5, 3], [5]], 240),
        # queries [B, H, T, K] = [2, 4, 8, 16], keys of 6, values of 10 numbers: 2 * 2 * 4 * 8 * 6 * (16 + 10)
        (f"{SDPA}_efficient_attention", [[2, 4, 8, 16], [2, 4, 6, 16], [2, 4, 6, 10]], 2 * 2 * 4 * 8 * 6 * 26),
        # FlashAttention's own operators have time before heads: [B, T, H, K]
        ("aten::_flash_attention_forward", [[2, 8, 4, 16], [2, 6, 4, 16], [2, 6, 4, 16]], 2 * 2 * 4 * 8 * 6 * 32),
        ("flash_attn::_flash_attn_forward", [[2, 8, 4, 16], [2, 6, 1, 16], [2, 6, 1, 16]], 2 * 2 * 4 * 8 * 6 * 32),
        ("aten::_flash_attention_backward", [[2, 8, 4, 16]] * 2 + [[2, 6, 4, 16]] * 2, 2 * 2 * 4 * 8 * 6 * 80),
        # four packed sequences of 64 tokens: if of 16 each and causal, 128 pairs each and head
        ("aten::_flash_attention_forward", [[64, 4, 16], [64, 4, 16], [64, 4, 16], [5], [5]], 2 * 4 * 4 * 128 * 32),
        ("aten::_flash_attention_forward", [[8, 4, 16], [64, 4, 16], [64, 4, 16], [5], [5]], None),  # of a cache
        ("aten::_grouped_mm", [[64, 16], [8, 16, 32], [8]], 2 * 64 * 16 * 32),
        ("aten::_scaled_mm", [[64, 16], [16, 32], [], []], 2 * 64 * 16 * 32),
        ("vllm::rocm_unquantized_gemm", [[64, 16], [32, 16], [32]], 2 * 64 * 16 * 32),  # its weight is [n, k]
        ("_C::cutlass_scaled_mm", [[64, 32], [64, 16], [16, 32], [1], [1]], 2 * 64 * 16 * 32),  # the result comes first
        ("mine::gemm", [[64, 16], [32, 8]], None),
        # 64 tokens in 2 of 8 experts each: [16, 2 x 24] up, [24, 16] down
        ("vllm::fused_experts", [[64, 16], [8, 48, 16], [8, 16, 24], [64, 2], [64, 2]], 2 * 64 * 2 * 16 * (48 + 24)),
        ("vllm::fused_experts", [[64, 16], [8, 48, 8], [8, 16, 12], [64, 2], [64, 2]], None),  # packed weights
        ("aten::mm", [[2, 3], [4, 5]], None),
        ("aten::mm", [[2, -3], [-3, 5]], None),
        ("aten::mm", [[10**30, 3], [3, 5]], None),
        ("aten::mm", [["a", 3], [3, 5]], None),
        ("aten::mm", "mm", None),
        ("aten::addmm", [[5], [2, 3]], None),
    ],
)
def test_flops_of_shapes(name, dims, flop):
    assert formulas.flops(name, dims) == flop


CONV = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
DATA, WEIGHT = [4, 6, 9, 9], [8, 3, 3, 3]  # of two groups
GRADIENT, VARLEN = [[4, 8, 5, 5], DATA, WEIGHT], [[64, 4, 16]] * 3 + [[5], [5]]


@pytest.mark.parametrize(
    "name, dims, concrete, flop",
    [  # (9 + 2 - 3) // 2 + 1 = 5 positions an axis, 8 outputs of 3 x 3 x 3 numbers at each
        ("aten::convolution", [DATA, WEIGHT], CONV, 2 * 4 * 25 * 8 * 27),
        ("aten::cudnn_convolution", [DATA, WEIGHT], ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "2"], 2 * 4 * 25 * 8 * 27),
        ("aten::convolution", [DATA, WEIGHT], None, None),  # strides were not recorded
        ("aten::convolution", [DATA, WEIGHT], [*CONV[:3], "[0, 2]", *CONV[4:]], None),
        # transposed: each of the 81 inputs meets the whole weight, [in, out / groups, 3, 3]
        ("aten::convolution", [[4, 8, 9, 9], WEIGHT], [*CONV[:6], "True", *CONV[7:]], 2 * 4 * 81 * 8 * 27),
        (
            "aten::convolution_backward",
            GRADIENT,
            [""] * 4 + CONV[3:] + ["[True, True, False]"],
            2 * 2 * 4 * 25 * 8 * 27,
        ),
        ("aten::convolution_backward", GRADIENT, None, 2 * 4 * 25 * 8 * 27),  # of one gradient at least
        # windows of 3 + 1 tokens: 4 sequences of 16, each (4 x 16 - 8) pairs
        ("flash_attn::_flash_attn_varlen_forward", VARLEN, [""] * 10 + ["3", "0"], 2 * 4 * 4 * 56 * 32),
    ],
)
def test_flops_that_strides_and_windows_decide(name, dims, concrete, flop):
    assert formulas.flops(name, dims, concrete) == flop


@pytest.mark.parametrize(
    ("name", "dims", "kind", "num_bytes"),
    [  # data, weight and result, or the factors and the result, each at its own width
        ("aten::convolution", [DATA, WEIGHT], BF16, 2 * (4 * 6 * 81 + 216 + 4 * 8 * 25)),
        ("aten::mm", [[8, 4], [4, 16]], BF16, 2 * (32 + 64 + 128)),
        ("aten::addmm", [[16], [8, 4], [4, 16]], "float", 4 * (32 + 64 + 128)),
        ("aten::_scaled_mm", [[8, 4], [4, 16]], "c10::Float8_e4m3fn", 32 + 64 + 2 * 128),
        ("aten::mm", [[8, 4], [4, 16]], "", None),
    ],
)
def test_bytes_of_products_and_convolutions(name, dims, kind, num_bytes):
    assert formulas.traffic_bytes(name, dims, [kind] * len(dims), CONV) == num_bytes


def test_rates_of_a_cpu_trace_count_each_product_once(tmp_path):
    """linear holds addmm holds mm: one product of 2 * 100 * 200 * 50 in the innermost's 40 us; 60 of 100 us known."""
    rows = [
        op("aten::linear", 0, 60, [100, 200], [50, 200]),
        op("aten::addmm", 5, 50, [50], [100, 200], [200, 50]),
        op("aten::mm", 10, 40, [100, 200], [200, 50]),
        event("cpu_op", "aten::empty", 20, 5),
        op("aten::mm", 60, 20, [10, 10], [10, 10]),
        event("cpu_op", "aten::add", 80, 20),
    ]
    rank = rank_of(tmp_path, rows)
    rates = [(line["name"], line["flop"], line["time_us"], line["pct_of_peak"]) for line in rank["achieved"]]
    assert rates == [("aten::mm", 2_000_000, 40.0, None), ("aten::mm", 2000, 20.0, None)]
    assert rank["achieved"][0]["tflop_per_s"] == pytest.approx(2e6 / 40e-6 / 1e12)
    whole = {"of": "cpu", "flop": 2_002_000, "time_us": 60.0, "known_frac": 0.6}
    assert rank["achieved_whole"] == whole | {"tflop_per_s": pytest.approx(2_002_000 / 60e-6 / 1e12)}
    sentence = "matrix products and attention: 33.4, over the 60 % of CPU operator time whose shapes are known"
    assert sentence in read_as_text(traces.analysed([tmp_path / "a.json"]))


def test_rates_of_a_device_are_of_its_own_kernels_and_its_own_peak(tmp_path):
    """2 * 1024^3 in 20 us is 107 TFLOP/s: of an H100's 989 in bfloat16 10.9 %.  In float32 it can only be TF32."""
    size = 1024
    for kind, peak, precision, flop_per_byte in ((BF16, 989, "bfloat16", size / 3), ("float", 494, "tf32", size / 6)):
        product = op("aten::mm", 0, 20, [size, size], [size, size], kind=kind)
        rows = [product, *launched("nvjet", 30, 20, 5, 1), *launched("add", 50, 20, 25, 2)]  # no operator launched add
        rank = rank_of(tmp_path, rows, **H100)
        (line,) = rank["achieved"]
        assert (line["precision"], line["tflop_per_s"]) == (precision, pytest.approx(2 * size**3 / 20e-6 / 1e12))
        assert line["pct_of_peak"] == pytest.approx(100 * line["tflop_per_s"] / peak, rel=0.01)
        assert rank["achieved_whole"]["known_frac"] == 0.5 and rank["achieved_whole"]["of"] == "device"
        assert (line["flop_per_byte"], line["bound"]) == (pytest.approx(flop_per_byte), "compute")
    tall = [op("aten::mm", 0, 20, [size, 1], [1, size], kind="float"), *launched("gemv", 30, 20, 5, 1)]
    assert rank_of(tmp_path, tall, **H100)["achieved"][0]["bound"] == "memory"


def test_kernels_that_are_linked_to_no_operator_give_no_rates_of_the_host(tmp_path):
    unlinked = launched("gemm", 30, 20, 0, 9)[1]
    rank = rank_of(tmp_path, [op("aten::mm", 0, 20, [64, 64], [64, 64]), unlinked])
    assert rank["achieved"] == [] and rank["achieved_whole"]["known_frac"] == 0.0
    assert rank_of(tmp_path, launched("gemm", 0, 10, 0, 1))["operators"] == []


# ---- who launched what


def test_a_kernel_belongs_to_the_operator_annotation_phase_module_and_line_around_its_launch(tmp_path):
    """In backward, autograd's thread launches; the annotation is that in which the main thread is then."""
    rows = [
        step(1, 0, 300),
        event("user_annotation", "forward", 0, 100),
        event("user_annotation", "backward", 100, 100),
        event("python_function", "train.py(12): step", 1, 90),
        event("python_function", "nn.Module: Block_3", 2, 60),
        event("python_function", "torch/nn/modules/linear.py(134): forward", 3, 50),
        event("cpu_op", "aten::linear", 5, 30),
        op("aten::addmm", 10, 20, [4], [8, 16], [16, 4]),
        *launched("gemm", 50, 10, 15, 1),
        event("cpu_op", "AddmmBackward0", 108, 30, tid=2),
        op("aten::mm", 110, 20, [8, 4], [4, 16], tid=2),
        event("cuda_runtime", "cudaLaunchKernel", 115, 2, tid=2, correlation=2),
        launched("gemm", 150, 20, 0, 2)[1],
    ]
    rank = rank_of(tmp_path, rows)
    names = ("operator", "annotation", "module", "source", "count", "device_us")
    assert [[line[name] for name in names] for line in rank["launchers"]] == [
        ["aten::mm", "backward", None, None, 1, 20.0],
        ["aten::addmm", "forward", "Block_3", "train.py(12): step", 1, 10.0],
    ]
    by_op = {line["name"]: line for line in rank["operators"]}
    assert [by_op[f"aten::{name}"]["device_us"] for name in ("addmm", "linear", "mm")] == [10.0, 0.0, 20.0]
    assert (by_op["aten::linear"]["self_cpu_us"], by_op["aten::linear"]["cpu_us"]) == (10.0, 30.0)
    assert by_op["aten::addmm"]["flop"] == 2 * 8 * 16 * 4
    assert by_op["aten::addmm"]["bytes"] == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert rank["achieved_whole"]["known_frac"] == 1.0
    assert rank["achieved"][0]["tflop_per_s"] == pytest.approx(1024 / 20e-6 / 1e12)
    phases = {line["phase"]: (line["device_us"], line["num_kernels"]) for line in rank["phases"]}
    assert phases == {"forward": (10.0, 1), "backward": (20.0, 1)}
    for key, name in (("module", "Block_3"), ("source", "train.py(12): step")):
        assert {line[key]: line["device_us"] for line in rank[f"{key}s"]} == {name: 10.0, "unknown": 20.0}


def test_modules_of_a_cpu_trace_have_their_own_time(tmp_path):
    modules = (("Net_0", 0, 100), ("Linear_0", 10, 30), ("Linear_1", 50, 40))
    rows = [event("python_function", f"nn.Module: {name}", ts, dur) for name, ts, dur in modules]
    lines = rank_of(tmp_path, [*rows, event("cpu_op", "aten::mm", 12, 5)])["modules"]
    assert [(line["module"], line["cpu_us"], line["num_calls"]) for line in lines] == [
        ("Linear_1", 40.0, 1),
        ("Net_0", 30.0, 1),
        ("Linear_0", 30.0, 1),
    ]


def test_the_last_step_is_left_out_of_everything_alike(tmp_path):
    rows = [step(1, 0, 100), step(2, 100, 100)]
    for start in (0, 100):
        rows += [event("user_annotation", "forward", start + 1, 90), event("cpu_op", "aten::mm", start + 2, 50)]
    path = write(tmp_path / "a.json", rows)
    for options, host_us, steps in (({}, 90.0, [1]), ({"include_last_step": True}, 180.0, [1, 2])):
        rank = traces.analysed([path], **options)["ranks"]["0"]
        assert (rank["phases"][0]["host_us"], rank["operators"][0]["count"]) == (host_us, len(steps))
        assert rank["profiler_steps"] == [line["step"] for line in rank["steps"]] == steps
        counts = {line["name"]: line["count"] for line in rank["annotations"]}
        assert counts == {"forward": len(steps)} | {f"ProfilerStep#{number}": 1 for number in steps}


def test_operators_that_lead_by_any_measure_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "MAX_OPERATORS", 1)
    times = (("slow", 10, 50), ("gpu", 60, 5), ("neither", 80, 20))
    rows = [op("aten::mm", 0, 10, [9, 9], [9, 9]), *launched("k", 90, 30, 61, 1)]
    rank = rank_of(tmp_path, rows + [event("cpu_op", *ranged) for ranged in times])
    assert [line["name"] for line in rank["operators"]] == ["gpu", "slow", "aten::mm"]


# ---- advice


STARVED = [row for num in range(150) for row in launched("gemm", 100 * num, 5, 100 * num - 4, num + 1)]
BUSY = [row for num in range(50) for row in launched("gemm", 100 * num, 99, 0, num + 1)]
GEMM = launched("gemm", 100, 900, 90, 2)
ONE_STEP = [step(1, 0, 1000), *launched("gemm", 10, 980, 5, 1)]


def copied(ts, name):
    return [*GEMM, *launched(f"Memcpy {name}", ts, 100, ts - 5, 1, cat="gpu_memcpy", stream=9)]


@pytest.mark.parametrize(
    ("rows", "sentences"),
    [
        (
            STARVED,
            ("busy 5.0 % of the time (under 80 %): most of it waits for the host", "150 of 150 kernels take und"),
        ),
        (BUSY, ()),
        (copied(0, "HtoD (Pageable -> Device)"), ("take 10.0 % of the time (over 5 %): pin the host's memory",)),
        (copied(0, "HtoD (Pinned -> Device)"), ("copy the next batch earlier",)),
        (copied(300, "HtoD (Pageable -> Device)"), ()),  # hidden under the kernel
        (copied(0, "DtoD (Device -> Device)"), ()),
        # the profiler's own synchronisation at the end is none of the step's
        ([*ONE_STEP, event("cuda_runtime", "cudaDeviceSynchronize", 1001, 500)], ()),
        (
            [*ONE_STEP, event("cuda_runtime", "cudaStreamSynchronize", 500, 100)],
            ("waited 0.10 ms in cudaStreamSynchronize (10.0 % of its time, over 5 %)",),
        ),
        (  # without steps its time is that of its recording, 600 us, and not the device's 100 us
            [*launched("gemm", 500, 100, 0, 1), event("cuda_runtime", "cudaDeviceSynchronize", 10, 590)],
            ("waited 0.59 ms in cudaDeviceSynchronize (98.3 % of its time, over 5 %)",),
        ),
    ],
)
def test_advice_has_its_figure_and_there_is_none_without_need(tmp_path, rows, sentences):
    advice = rank_of(tmp_path, rows)["advice"]
    assert len(advice) == len(sentences)
    assert all(sentence in line for sentence, line in zip(sentences, advice))


def test_advice_on_item_counts_only_reads_of_the_device(tmp_path):
    """Two reads launch a copy, one is of a tensor of the host."""
    read, rows = "aten::_local_scalar_dense", launched("gemm", 0, 1000, 0, 1)
    for num, ts in enumerate((100, 300)):
        rows += launched("Memcpy DtoH (Device -> Pageable)", ts + 50, 2, ts + 5, num + 2, cat="gpu_memcpy")
    rows += [event("cpu_op", read, ts, dur) for ts, dur in ((100, 100), (300, 100), (600, 9))]
    rank = rank_of(tmp_path, rows)
    assert rank["items"] == {"count": 2, "sum_us": 200.0}
    (advice,) = (sentence for sentence in rank["advice"] if "The host read 2 values from the device" in sentence)
    assert "0.20 ms" in advice


def test_the_one_step_of_a_trace_is_explains_and_has_no_kernels_of_an_earlier_one(tmp_path):
    early, mine = launched("early", 0, 500, 0, 77)[1], launched("gemm", 600, 300, 510, 2)
    analysis = rank_of(tmp_path, [step(7, 505, 450), early, *mine])
    assert analysis["temporal"]["span_us"] == 300.0
    assert analysis["steps"][0]["step_us"] == 450.0  # from 505, where the host begins the step, to 955
    assert account.accounts_of([load(tmp_path / "a.json")])[1]["step_ms"] == 0.45
    assert analysis["num_device_rows_excluded"] == {"last_step": 0, "not_launched": 1}


# ---- what was named


def test_several_files_are_the_ranks_of_one_job_and_several_folders_are_several(tmp_path, answer_of):
    files = [str(write(tmp_path / f"rank{number}.json", launched("gemm", 0, 10, 0, 1))) for number in (0, 1)]
    assert list(answer_of(analyze, *files)["ranks"]) == ["0", "1"]
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        write(folder / "x.json", launched(folder.name, 0, 10, 0, 1))
    reports = answer_of(analyze, *folders)
    assert [reports[str(folder)]["ranks"]["0"]["kernels"][0]["name"] for folder in folders] == ["a", "b"]


@traces.needs_shared
def test_every_part_of_the_answer_is_printed_for_a_real_trace():
    report = traces.analysed(find(traces.SHARED / "files" / "hta_nccl_parser_config"))
    text, advice = read_as_text(report), next(iter(report["ranks"].values()))["advice"]
    assert advice and [text.count(sentence) for sentence in advice] == [1] * len(advice)  # as verdict or below it
    for title in (
        *("Time of the device", "Kernels by type", "Categories", "Kernels", "Who launched them"),
        *("Operators by device time", "Operators by self CPU time", "Steps", "Annotations of the host"),
        *("Annotations of the GPU", "Idle time by stream", "launches: a call takes", "Queued launches"),
        *("Copies and their bandwidth", "Critical path", "Largest gaps of the device"),
        "1258 device rows of the last step, 6, are not counted",
    ):
        assert title in text, title


def test_the_verdict_says_of_which_rank_it_is_and_where_there_is_no_device(tmp_path):
    for number in (0, 1):  # in rank 0 the device is busy throughout, in rank 1 there are gaps
        rows = [row for n in range(20) for row in launched("gemm", 100 * n, 100 - 90 * number, 100 * n - 5, n + 1)]
        write(tmp_path / f"rank{number}.json", rows, distributedInfo={"rank": number, "world_size": 2})
    both = document(traces.analysed(find(tmp_path)), "x")
    assert both.verdicts[0].sentence == "nothing stands out (rank 0 of 2; --json has all)"
    report = traces.analysed([tmp_path / "rank1.json"])
    first, *others = report["ranks"]["1"]["advice"]
    assert document(report, "x").verdicts[0].sentence == first and read_as_text(report).count(first) == 1
    assert ("What it means" in read_as_text(report)) == bool(others)
    cpu = write(tmp_path / "cpu.json", [event("cpu_op", "aten::mm", 0, 10)])
    (verdict,) = document(traces.analysed([cpu]), "x").verdicts
    assert verdict.sentence == "no device rows are counted: all times below are the host's"


# ---- names


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::sqrt_kernel_cuda(at::TensorIteratorBase&)::"
            "{lambda()#2}::operator()() const::{lambda()#4}::operator()() const::{lambda(c10::BFloat16)#1}, "
            "std::array<char*, 2ul> >(int, std::array<char*, 2ul>)",
            "vectorized_elementwise_kernel<8, sqrt_kernel_cuda>",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Mainloop<2, "
            "cute::tuple<cute::C<1>, cute::C<128> >, 128>, flash::Epilogue<cute::tuple<cute::C<128> > > > > >(Params)",
            "cutlass::device_kernel<flash::FlashAttnFwdSm90<…>>",
        ),
        ("kernel<4, at::native::gpu_kernel_impl_nocast<Add<c10::BFloat16> > >(int)", "kernel<4, Add<BFloat16>>"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("triton_poi_fused_add_mul_6", "triton_poi_fused_add_mul_6"),
        ("<built-in method run_backward of torch._C._EngineBase object at 0x7f6a23a6fc70>", "run_backward (built-in)"),
        ("aten::baddbmm [8, 4] [8, 4] [8, 4] [8] float32", "aten::baddbmm [8, 4] x3 [8] float32"),
        ("a<" * 40, f"{'a<' * 15}…{('a<' * 15)[1:]}"),  # of a name that is no C++ the two ends
    ],
)
def test_a_kernels_name_is_shown_by_what_distinguishes_it(name, shown):
    assert short(name) == shown


def test_of_several_ranks_the_late_one_is_named_in_the_text(tmp_path):
    paths = []
    for rank, own_us in enumerate((10, 25)):  # rank 0 waits 15 us of the 40 that rank 1's rows span
        events = launched("forward", 1, own_us, 0, 1, call_dur=0.5)
        events += launched("ncclDevKernel_AllReduce", 1 + own_us, 40 - own_us, 0.6, 2, call_dur=0.2)
        facts = {"rank": rank, "world_size": 2}
        paths.append(write(tmp_path / f"rank{rank}.json", events, distributedInfo=facts))
    sentence = "Rank 1 comes last to 1 collective: the others waited 0.01 ms in theirs, 37.5 % of its time"
    assert sentence in read_as_text(traces.analysed(paths))
