"""Accounts of steps: they add up, their parts were worked out by hand, and planted slowdowns come out on top."""

import functools
import json
import shutil
import time

import browser
import pytest
import real_runs
import traces
from traces import SHARED, event, launched, load_all, needs_shared, step, write

from bench.analysis.explain import account, ceilings, document, parts, ranking, traffic
from bench.analysis.explain.device_steps import Device, owners
from bench.analysis.explain.explained import add_recorded_events, explain_record
from bench.analysis.trace import formulas, load, operators
from bench.api import traces as api_traces
from bench.base.units import GIB
from bench.cli import explain as verb
from bench.machine import passports
from bench.record import step_files

H100 = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}]}
BF16 = "c10::BFloat16"
ROTARY = [[4], [4, 8], [4, 2], [], [99, 8]]
MM = {"Input Dims": [[1024, 1024], [1024, 1024]], "Input type": [BF16, BF16]}
SMALL = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}


def one_step():
    """A step of 100 us on an H100 with nearly every kind of part in it."""
    return [
        step(1, 0, 100),
        event("cpu_op", "aten::mm", 10, 4, **MM),
        *launched("gemm", 20, 10, 12, 1),  # the step's own code from 0 to 10, aten::mm until 12, its launch until 20
        *launched("my_kernel", 32, 8, 15, 2, call_dur=1),  # launched in time: 2 us between kernels
        *launched("ncclDevKernel_AllGather", 35, 15, 17, 3, stream=9, call_dur=1),  # 10 of its 15 us are exposed
        event("cuda_runtime", "cudaDeviceSynchronize", 45, 15),
        event("user_annotation", "optimizer", 60, 40),
        *launched("update", 70, 20, 65, 4, call_dur=1),
    ]


def explained(path, events, **meta):
    return account.accounts_of(load_all([write(path, events, **meta)]))[1]


def parts_ns(answer, rank="0"):
    return {line["part"]: line["sum_ns"] for line in answer["ranks"][rank]["parts"]}


def test_the_first_lines_say_that_the_host_is_the_critical_path_and_what_costs_it_most(tmp_path):
    kernels = [*launched("my_kernel", 60, 30, 58, 1), *launched("tiny_kernel", 90.5, 0.05, 59, 2, call_dur=0.5)]
    path = write(tmp_path / "a.json", [step(1, 0, 91), event("cpu_op", "aten::addmm", 0, 60), *kernels], **H100)
    text = str(api_traces.explain(path)).splitlines()
    host = "  The host is the critical path: the device waits 0.060 of 0.091 ms for its host. The longest waits: "
    assert text[1].startswith(f"{host}aten::addmm 0.058") and "a CUDA graph" in text[1]
    first = account.accounts_of(load_all([path]))[1]["next"][0]
    assert (first["what"], first["gain_ms"]) == ("aten::addmm", 0.058)  # also before the first call that was recorded
    assert any("Not shown: " in line for line in text) and not any("host: tiny_kernel" in line for line in text)


def test_a_trace_without_shapes_or_operators_names_the_option_that_records_them(tmp_path):
    product = event("cpu_op", "aten::mm", 10, 4)
    for number, rows, option in (
        (1, [event("cpu_op", "aten::mm", 10, 4, **SMALL)], None),
        (2, [product], "no operator's shapes were recorded, so none has a bound: record with record_shapes=True"),
        (3, [], "no operators were recorded, so no kernel has a bound: record ProfilerActivity.CPU too"),
    ):
        path = write(tmp_path / f"{number}.json", [step(1, 0, 50), *rows, *launched("gemm", 20, 10, 12, 1)], **H100)
        explanation = api_traces.explain(path)
        missing = explanation.to_dict()["missing"]
        assert missing is None if option is None else missing.startswith(option)
        assert ("Not modelled: no operator" in str(explanation)) == (option is not None)


def test_records_of_the_ladder_are_named_for_traces_with_attention_and_a_loss(tmp_path):
    product = [event("cpu_op", "aten::mm", 10, 4, **SMALL), *launched("gemm", 20, 10, 12, 1)]
    others = [*launched("flash_fwd_kernel", 32, 8, 15, 2), *launched("nll_loss_forward", 42, 8, 17, 3)]
    for events, records in ((product, []), (product + others, ["r10"])):
        lines = explained(tmp_path / "a.json", [step(1, 0, 100), *events], **H100)["next"]
        [product_line] = [line for line in lines if line["part"] == parts.SLOWER]
        assert product_line["ladder"] == records


def test_every_microsecond_of_a_step_made_by_hand_is_in_its_part(tmp_path):
    explanation = explained(tmp_path / "a.json", one_step(), **H100)
    # 2 * 1024**3 FLOP / 989e12 FLOP/s = 2.171 us; its bytes, 3 * 2 MiB / 3.35e12 bytes/s, would take 1.878 us
    assert parts_ns(explanation) == {
        parts.ARITHMETIC: 2171,
        parts.SLOWER: 7829,
        parts.OPTIMIZER: 20_000,
        parts.UNBOUND: 8_000,
        parts.EXPOSED: 10_000,
        parts.BETWEEN: 2_000,
        parts.LAUNCH: 8_000 + 5_000,
        # before aten::mm, in it, in the optimizer before and after "update"
        parts.HOST: 10_000 + 2_000 + 5_000 + 10_000,
        parts.SYNC: 10_000,
    }
    assert explanation["step_ms"] == 0.1
    assert explanation["limit_ms"] == pytest.approx(0.002171)


def test_a_host_that_is_blocked_in_a_copy_while_a_kernel_waits_is_no_launch(tmp_path):
    events = [
        step(1, 0, 10_000),
        *launched("kernel", 9000, 1000, 5, 1, call_dur=5),  # launched at 5 us, begun at 9 ms
        event("cuda_runtime", "hipMemcpyWithStream", 300, 8500),
    ]
    ns = parts_ns(explained(tmp_path / "a.json", events, **H100))
    # its launch until 0.2 ms after its call, at 210 us; until 300 us nobody knows for what it waits
    assert (ns[parts.LAUNCH], ns[parts.SYNC]) == (205_000, 8_500_000)
    assert ns[parts.DEPENDENCY] == 90_000 + 200_000
    explanation = explained(tmp_path / "b.json", events, **H100)
    assert max(explanation["next"], key=lambda line: line["most_ms"])["what"] == "hipMemcpyWithStream"


def test_a_launch_that_holds_the_host_counts_as_long_as_it_holds_it(tmp_path):
    events = [*launched("first", 15, 50, 0, 1), *launched("loaded", 900, 50, 200, 2, call_dur=700)]
    line = explained(tmp_path / "a.json", [*events, *launched("last", 950, 50, 905, 3)], **H100)["next"][0]
    assert (line["what"], line["gain_ms"]) == ("before loaded", 0.7)  # and "last" is launched as much earlier


MEASURED = passports.Ceilings(
    [
        {"kind": "gemm", "precision": "bfloat16", "shape": [8192, 8192, 8192], "high": 800.0},
        {"kind": "gemm", "precision": "bfloat16", "shape": [1024, 1024, 1024], "high": 400.0},
        {"kind": "copy", "num_bytes": GIB, "high": 2e12 / GIB},
        # 28 MB on the bus in 5 us
        {"kind": "collective", "name": "all_gather", "num_bytes": GIB, "world_size": 8, "high": 5.6e12 / GIB},
        {"kind": "launch", "name": "kernel, host time", "low": 3.0, "high": 9.0},
        {"kind": "launch", "name": "kernel, until it is done", "low": 20.0, "high": 30.0},
    ],
    "2026-11-22T10:00:00.000Z",
)


def test_limits_are_the_passports_where_there_is_one_and_say_so(tmp_path):
    facts = {"Collective name": "_allgather_base", "In msg nelems": 1_000_000, "dtype": "Float", "Group size": 8}
    events = one_step()
    next(call for call in events if call["name"].startswith("nccl") and call["cat"] == "kernel")["args"].update(facts)
    ranks = load_all([write(tmp_path / "a.json", events, **H100)])
    explanation = account.accounts_of(ranks, measured_of=lambda rank, device: MEASURED)[1]
    ns = parts_ns(explanation)
    # 2 * 1024**3 FLOP at 800 TFLOP/s 2,684 ns, at 400 5,369; its bytes, 6 MiB at 2e12 bytes/s, would take 3,146
    assert (ns[parts.BANDWIDTH], ns.get(parts.SHAPE), ns[parts.SLOWER]) == (3146, None, 6854)
    # 4 MB from each of eight ranks, 28 MB on the bus: 5 of its 15 us, and so of the 10 that are exposed
    assert (ns[parts.WIRE], ns[parts.EXPOSED]) == (3333, 6667)
    # the device waited for two launches, of 8 and 5 us, which need 3 us each
    assert (ns[parts.LATENCY], ns[parts.LAUNCH]) == (6_000, 7_000) and sum(ns.values()) == 100_000
    sources = {line["part"]: line["source"] for line in explanation["parts"]}
    measured = dict.fromkeys((parts.LATENCY, parts.BANDWIDTH, parts.WIRE), "measured, passport of 2026-11-22")
    assert measured | {parts.HOST: None} == {part: sources[part] for part in (*measured, parts.HOST)}
    gains = {line["part"]: line["gain_ms"] for line in explanation["next"]}
    assert gains[parts.EXPOSED] == pytest.approx(0.010)  # at its bandwidth it could still be hidden


def test_what_a_products_shape_costs_lies_between_its_peak_and_its_time():
    facts = {"name": "aten::mm", "shapes": [[1024, 1024], [1024, 1024]], "types": None, "precision": "bfloat16"}
    facts |= {"flop": 2 * 1024**3, "moved_bytes": None}
    bound = ceilings.Ceilings("NVIDIA H100 80GB HBM3", MEASURED).bound(facts, 1e-5)
    assert bound == (parts.ARITHMETIC, pytest.approx(2.684e-6, rel=1e-3), pytest.approx(5.369e-6, rel=1e-3))
    peak = ceilings.Ceilings("NVIDIA H100 80GB HBM3", MEASURED).peak("float8")
    assert peak.per_s == 1979e12 and peak.source.startswith("data sheet: ")
    assert ceilings.Ceilings(None, MEASURED).peak("float16") is None


@pytest.mark.parametrize(
    "name, dims, shape",
    [
        ("aten::mm", [[3, 4], [4, 5]], (3, 4, 5)),
        ("aten::addmm", [[5], [3, 4], [4, 5]], (3, 4, 5)),
        ("aten::matmul", [[2, 3, 4], [4, 5]], (6, 4, 5)),
        ("aten::linear", [[2, 3, 4], [5, 4]], (6, 4, 5)),
        ("aten::bmm", [[2, 3, 4], [2, 4, 5]], None),
        ("aten::mm", [[3, 4], [3, 5]], None),
        ("aten::add", [[3, 4], [3, 4]], None),
    ],
)
def test_the_shape_of_a_product_is_rows_depth_and_columns(name, dims, shape):
    assert formulas.product_shape(name, dims) == shape


# ---- two accounts


def host_steps(durations_us, own_us):
    """Steps of these lengths; in each an operator takes own_us, the rest is the host's."""
    events, at_us = [], 0
    for number, us in enumerate(durations_us):
        events += [step(number, at_us, us), event("cpu_op", "aten::one", at_us, own_us)]
        at_us += us
    return events


def test_the_rows_of_a_difference_add_up_to_that_of_the_steps_to_the_nanosecond(tmp_path):
    a = explained(tmp_path / "a.json", host_steps([100, 101, 101, 9], 50))  # three count: a mean of 100,666.67 ns
    b = explained(tmp_path / "b.json", host_steps([120, 121, 9], 30))  # two: 120,500
    difference = account.difference(a, b)
    assert (difference["a"]["step_ns"], difference["b"]["step_ns"]) == (100_667, 120_500)
    rows = {row["part"]: row["change_ns"] for row in difference["parts"]}
    assert rows == {parts.UNBOUND: -20_000, parts.HOST: 90_500 - 50_667}
    assert sum(rows.values()) == difference["change_ns"] == 19_833
    first = difference["lines"][0]
    assert (first["part"], first["change_ms"]) == (parts.HOST, pytest.approx(0.0398333, rel=1e-4))
    assert difference["rest_ms"] == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="of the host, the other of the record"):
        account.difference(a, b | {"of": "record"})


def test_a_step_begins_where_the_device_has_finished_the_one_before(tmp_path):
    events = [step(1, 0, 10), step(2, 10, 10), step(3, 20, 10)]
    events += [*launched("a", 5, 20, 1, 1), *launched("b", 26, 20, 11, 2), *launched("c", 50, 20, 21, 3)]
    explanation = explained(tmp_path / "a.json", events)
    assert [(row["step"], row["ms"]) for row in explanation["ranks"]["0"]["steps"]] == [(1, 0.025), (2, 0.021)]
    assert explanation["ranks"]["0"]["steps"][1]["sum_ns"] == {parts.UNBOUND: 20_000, parts.BETWEEN: 1_000}


def two_ranks(folder, slow_us=25):
    folder.mkdir(exist_ok=True)
    ranks = []
    for rank, (kernel, own_us) in enumerate((("quick", 10), ("slow", slow_us))):
        events = [*launched("forward_" + kernel, 1, own_us, 0, 1, call_dur=0.5)]
        events += launched("ncclDevKernel_AllReduce", 1 + own_us, 40 - own_us, 0.6, 2, call_dur=0.2)
        ranks.append(write(folder / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2}))
    return ranks


def test_waiting_is_charged_to_the_rank_that_came_last(tmp_path):
    facts = account.accounts_of(load_all(two_ranks(tmp_path)))[1]
    assert parts_ns(facts, "0") == {parts.UNBOUND: 10_000, parts.WAITING: 15_000, parts.EXPOSED: 15_000}
    assert parts_ns(facts, "1") == {parts.UNBOUND: 25_000, parts.EXPOSED: 15_000}
    [late] = facts["lateness"]
    assert (late["rank"], late["wait_ms"], late["without_ms"]) == (1, 0.015, 0.025)
    assert late["more"] == {parts.UNBOUND: pytest.approx(0.015)}
    assert late["reasons"][0]["what"] == "forward_slow"
    first = facts["next"][0]
    assert (first["part"], first["rank"], first["gain_ms"]) == (parts.WAITING, 1, 0.015)
    alone = account.accounts_of(load_all(two_ranks(tmp_path)[:1]))[1]
    assert alone["doubts"][0].startswith("the traces are of 1 of 2 ranks") and "of 2 ranks" not in str(facts["doubts"])


@pytest.mark.parametrize("goes_on_ms, ns", [(60, [30e6, 20e6, 50e6]), (75, [0, 0, 0])])  # 15 ms later it did more
def test_a_thread_that_recorded_nothing_waited_for_a_message_if_it_went_on_at_once(tmp_path, goes_on_ms, ns):
    for rank, own_ms in enumerate((10, 40)):
        message = event("user_annotation", "gloo:all_reduce", 1000 * own_ms, 1000 * (60 - own_ms), tid=2)
        own = [event("cpu_op", "a", 0, 1000 * own_ms), event("cpu_op", "b", 1000 * goes_on_ms, 5000)]
        write(tmp_path / f"rank{rank}.json", [step(1, 0, 80_000), *own, message])
    first, second = (tmp_path / f"rank{rank}.json" for rank in (0, 1))
    both, alone = (parts_ns(account.accounts_of(load_all(files))[1]) for files in ([first, second], [first]))
    assert [both.get(parts.WAITING, 0), both.get(parts.EXPOSED, 0), alone.get(parts.EXPOSED, 0)] == ns


def test_the_first_three_lines_of_a_comparison_name_what_a_device_waited_for(tmp_path):
    two_ranks(tmp_path / "a", slow_us=10)
    two_ranks(tmp_path / "b")
    late, cause = str(api_traces.explain(tmp_path / "a", tmp_path / "b")).splitlines()[1:3]
    assert late.startswith(
        "  In B the other ranks wait 0.015 of 0.040 ms for rank 1, which is late: it spends 0.025 ms"
    )
    assert "no bound known (rank 1): forward_slow" in cause
    without = [row for row in one_step() if row["name"] != "cudaDeviceSynchronize"]
    files = [write(tmp_path / f"{len(events)}.json", events, **H100) for events in (without, one_step())]
    assert "synchronisation: cudaDeviceSynchronize" in str(api_traces.explain(*files)).splitlines()[1]


def test_at_each_moment_one_range_has_the_time():
    start, end, layer = (0, 5, 8, 30), (10, 20, 9, 40), (1, 0, 0, 2)
    assert owners(list(zip(start, end, layer)), 2, 35) == [(2, 5, 0), (5, 20, 1), (20, 30, -1), (30, 35, 3)]
    assert owners([], 2, 35) == [(2, 35, -1)]


@pytest.mark.parametrize(
    "name, shapes, types, num_bytes",
    [
        ("aten::add", [[4, 8], [8]], ["float", "float"], 4 * (32 + 8 + 32)),
        ("aten::mul_", [[4, 8], []], ["c10::BFloat16", "Scalar"], 2 * (32 + 32)),
        ("aten::eq", [[4, 8], [4, 8]], ["long int", "long int"], 8 * 64 + 32),
        ("aten::add", [[4, 8], [8]], ["float", "who knows"], None),
        ("aten::index_select", [[4, 8], [], [2]], ["float", "Scalar", "long int"], 2 * 2 * 4 * 4 + 2 * 8),
        ("aten::gather", [[9, 8], [], [3, 8]], ["float", "Scalar", "long int"], 2 * 24 * 4 + 24 * 8),
        ("aten::fill_", [[4, 8], []], ["float", "Scalar"], 4 * 32),
        ("aten::copy_", [[4, 8], [4, 8], []], ["float", "c10::BFloat16", "Scalar"], 6 * 32),
        ("aten::sum", [[4, 8], [], [], []], ["float", "ScalarList", "Scalar", ""], 4 * 32),
        ("aten::_softmax", [[4, 8], [], []], ["c10::BFloat16", "Scalar", "Scalar"], 2 * 64),
        ("aten::mul", [[4, 8], []], ["c10::complex<double>", "double"], 16 * 64 + 8),
        ("aten::unheard_of", [[4, 8]], ["float"], None),
        ("aten::nll_loss_backward", [[4, 8]], ["float"], None),  # too few arguments
        ("aten::sigmoid", [[4, 8], [4, 8]], ["float", "float"], 4 * 64),  # the second is its result (out=)
        ("aten::mse_loss", [[4, 8], [4, 8], []], ["float", "float", "Scalar"], 4 * 64),
        ("aten::mse_loss_backward", [[], [4, 8], [4, 8]], ["float"] * 3, 4 * (1 + 96)),
        ("aten::nll_loss_backward", [[], [4, 8], [4]], ["float", "float", "long int"], 4 * 4 + 4 * 8),
        ("aten::max_pool2d_with_indices_backward", [[2], [8], [2]], ["float", "float", "long int"], 4 * 10 + 8 * 2),
        ("aiter::rms_norm", [[4, 8], [8], []], [BF16, BF16, "Scalar"], 2 * (32 + 8 + 32)),  # its result is no argument
        ("aten::add", [[4, 8], []], [BF16, "double"], 2 * 64 + 8),  # a number does not widen the result
        ("other::add", [[4, 8], [4, 8]], ["float", "float"], None),
        ("vllm::fused_add_rms_norm", [[4, 8], [4, 8], [8], []], ["c10::BFloat16"] * 3 + ["Scalar"], 2 * 72),
        ("triton_poi_fused_add_mul_0", [[4, 8], [4, 8], [1]], ["float", "c10::BFloat16", "Scalar"], None),
        ("triton_poi_fused_add_mul_0", [[4, 8], [4, 8], []], ["float", "c10::BFloat16", "Scalar"], 6 * 32),
        ("triton_poi_fused_embedding_add_0", [[4, 8], [4, 8]], ["float", "float"], None),
        ("triton_poi_fused_add_mul_0", None, None, None),
        ("_C::rotary_embedding", ROTARY, ["long int", BF16, BF16, "Scalar", BF16], 2 * 2 * 40),
        ("x::store_cache", [[4, 8]] * 2 + [[99, 8]] * 2 + [[4]], [BF16] * 2 + ["unsigned char"] * 2 + ["int"], 3 * 64),
    ],
)
def test_bytes_are_known_from_shapes_or_not_at_all(name, shapes, types, num_bytes):
    facts = {"name": name, "shapes": shapes, "types": types, "flop": None, "bytes": None, "precision": None}
    assert traffic.moved_bytes(facts) == num_bytes


CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4, 64, 64>"
APPLY = "multi_tensor_apply_kernel<at::native::TensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4>>"
PAIR = [[4, 8], [3]]


@pytest.mark.parametrize(
    "name, lists, kernel, num_bytes",
    [
        ("aten::cat", [[[4, 8], [4, 2]]], CAT, 2 * 2 * 40),
        ("aten::cat", [[[4, 8], [4, 2]]], "a kernel that says nothing of its types", None),
        ("aten::_foreach_add_", [PAIR, PAIR], APPLY, 4 * 3 * 35),  # two lists are read, one is written
        ("aten::_foreach_norm", [PAIR], APPLY, 4 * 35),
        ("aten::_foreach_copy_", [PAIR, PAIR], APPLY, 4 * 2 * 35),
        # parameters, gradients and two moments are read, all but the gradients written; steps are single numbers
        ("aten::_fused_adamw_", [PAIR, PAIR, PAIR, PAIR, [], [[1], [1]]], APPLY, 4 * (4 + 3) * 35),
    ],
)
def test_the_types_of_lists_are_those_of_the_kernel(name, lists, kernel, num_bytes):
    facts = {"name": name, "shapes": lists, "types": ["TensorList"] * len(lists), "bytes": None}
    assert traffic.moved_bytes(facts, kernel) == num_bytes


@pytest.mark.parametrize(
    "name, shapes, types, mib",
    [  # MiB that TraceLens' own reference tables give ("Data Moved (MB)", its tests' unified_perf_summary.csv)
        ("aten::mm", [[8944, 1024], [1024, 2816]], [BF16, BF16], 71.0078125),
        ("aten::bmm", [[16, 5185, 64], [16, 64, 5185]], [BF16, BF16], 840.6953430),
        ("aten::copy_", [[16, 16, 559, 64], [16, 16, 559, 64], []], [BF16, BF16, "Scalar"], 34.9375),
        ("aten::add", [[16, 16, 559, 64], [16, 16, 559, 64], []], [BF16, BF16, "Scalar"], 52.40625),
        ("aten::mul", [[16, 559, 1024], [16, 559, 1]], ["float", "float"], 69.9091187),
        ("aten::div", [[1, 5184, 768], [1, 5184, 1]], [BF16, BF16], 15.1973877),
        ("aten::pow", [[16, 559, 1024], []], ["float", "Scalar"], 69.875),
        ("aten::silu", [[16, 559, 2816]], [BF16], 96.078125),
        ("aten::neg", [[16, 16, 559, 32]], [BF16], 17.46875),
        ("aten::mean", [[16, 559, 1024], [], [], []], ["float", "ScalarList", "Scalar", ""], 34.9375038),
    ],
)
def test_bytes_are_those_of_an_independent_tool(name, shapes, types, mib):
    facts = {"name": name, "shapes": shapes, "types": types, "bytes": None}
    facts["bytes"] = formulas.traffic_bytes(name, shapes, types)
    assert traffic.moved_bytes(facts) / 2**20 == pytest.approx(mib, rel=1e-3)


def test_a_generated_kernel_reads_at_most_one_number_a_point():
    facts = {"name": "triton_poi_fused_embedding_add_0", "shapes": [[99, 8], [4, 8], []], "bytes": None}
    facts |= {"types": ["float", "float", "Scalar"], "concrete": ["", "", "32"]}
    assert traffic.moved_bytes(facts) == 4 * (32 + 32)
    assert traffic.moved_bytes(facts | {"concrete": ["", "", "x"]}) is None


def graph_and_capture(folder, kernels=("one", "two", "three"), **names):
    """A step whose graph runs some kernels, and its capture: a product, a copy, and what no operator launched."""
    call = event("cuda_runtime", "cudaGraphLaunch", 5, 5, correlation=9)
    rows = [launched(name, 20 + 10 * at, 10, 5, 9)[1] for at, name in enumerate(kernels)]
    calls = [("StreamBeginCapture", 0, 1), ("StreamEndCapture", 40, 1), ("LaunchKernel", 50, 1)]
    captured = [event("cuda_runtime", f"cuda{name}", ts, dur) for name, ts, dur in calls]
    captured += [
        event("cuda_runtime", "cudaLaunchKernel", 12 + 10 * at, 2, **{key: value[at] for key, value in names.items()})
        for at in range(3)
    ]
    captured += [event("cpu_op", "aten::mm", 10, 9, **MM)]
    captured += [event("cpu_op", "aten::copy_", 20, 9, **MM | {"Input type": ["float", BF16]})]
    run = write(folder / "replay.json", [step(1, 0, 60), call, *rows], **H100)
    return run, write(folder / "capture.json", captured)


def test_the_kernels_of_a_graph_are_those_of_its_capture(tmp_path, answer_of):
    run, capture = graph_and_capture(tmp_path)
    assert parts_ns(account.accounts_of(load_all([run]))[1])[parts.UNBOUND] == 30_000
    explanation = answer_of(verb, run, "--capture", capture)
    ns = parts_ns(explanation)
    # the product needs 2,171 ns; the copy of 6 MiB 1,878 at 3.35e12 bytes/s; of the third kernel nothing is known
    assert (ns[parts.ARITHMETIC], ns[parts.BANDWIDTH], ns[parts.UNBOUND]) == (2171, 1878, 10_000)
    assert sum(ns.values()) == explanation["ranks"]["0"]["step_sum_ns"]


@pytest.mark.parametrize(
    "kernels, names, unbound_ns",
    [
        (("one", "two", "three"), ("one", "two", "three"), 10_000),
        (("one", "two", "other"), ("one", "two", "three"), 10_000),  # the last launch is not in the graph
        (("a", "b", "c", "d", "e"), ("one", "two", "three"), 50_000),  # it is of another graph
        (("one", "fill", "two", "three"), ("one", "two", "three"), 20_000),  # a memset that is a kernel
    ],
)
def test_a_capture_with_other_kernels_is_not_of_the_graph(tmp_path, kernels, names, unbound_ns):
    run, capture = graph_and_capture(tmp_path, kernels, kernel=names)
    explanation = account.accounts_of(load_all([run]), captured=[load.load(capture)])[1]
    assert parts_ns(explanation)[parts.UNBOUND] == unbound_ns


def test_a_device_without_a_known_name_is_found_by_what_it_is(tmp_path):
    facts = {"computeMajor": 9, "computeMinor": 4, "numSms": 304, "totalGlobalMem": 206141652992}
    explanation = explained(tmp_path / "a.json", one_step(), deviceProperties=[{"name": "", **facts}])
    assert explanation["ranks"]["0"]["ceiling"] == "data sheet: AMD Instinct MI300X and MI325X data sheets, dense"
    explanation = explained(tmp_path / "a.json", one_step(), deviceProperties=[{"name": "", **facts, "numSms": 228}])
    assert explanation["ranks"]["0"]["ceiling"] == "the best rate in this trace, because the device's peak is unknown"


def test_bounds_are_those_of_the_data_sheet_and_unknown_without_one():
    facts = {"name": "aten::mm", "shapes": None, "types": None, "precision": "bfloat16", "flop": 989e9}
    facts |= {"bytes": 335e6, "moved_bytes": 335e6}
    h100 = ceilings.Ceilings("NVIDIA H100 80GB HBM3")
    assert h100.bound(facts, 0.01) == (parts.ARITHMETIC, pytest.approx(0.001), pytest.approx(0.001))
    assert h100.bound(facts | {"moved_bytes": 33.5e9}, 0.02) == (parts.BANDWIDTH, 0.01, 0.01)
    assert ceilings.Ceilings("Somebody's GPU").bound(facts, 0.01) is None
    observed = ceilings.Ceilings(None)
    observed.observe([("float32", 1e9, 0.5), ("float32", 3e9, 1.0), ("float32", 1e9, 0.01)])  # the last shows no rate
    assert observed.bound(facts | {"precision": "float32", "flop": 6e9}, 9.0) == (parts.SEEN, 2.0, 2.0)


def test_an_operators_time_outside_the_product_within_it_shows_no_rate(tmp_path):
    events = [event("cpu_op", "aten::matmul", 0, 20, **SMALL), event("cpu_op", "aten::mm", 1, 18, **SMALL)]
    rank = load.load(write(tmp_path / "a.json", events))
    assert operators.leaves_with_flops(rank).tolist() == [False, True]
    assert parts_ns(explained(tmp_path / "a.json", events)) == {parts.SEEN: 18_000, parts.UNBOUND: 2_000}


@pytest.mark.parametrize("meta", [{}, H100])
def test_a_device_without_a_data_sheet_is_never_at_its_peak_nor_is_the_host_of_one(tmp_path, meta):
    facts = explained(tmp_path / "a.json", [event("cpu_op", "aten::mm", 0, 20, **SMALL)], **meta)
    assert facts["limit_ms"] == 0.0
    assert [(line["part"], line["gain_ms"]) for line in facts["next"]] == [(parts.SEEN, 0.02)]  # it is in the list


def test_a_collective_needs_what_must_cross_the_links():
    h100 = ceilings.Ceilings("NVIDIA H100 80GB HBM3")
    assert h100.collective_s("allreduce", 450_000_000, "Float", 8) == pytest.approx(4 * 450e6 / 450e9)
    assert h100.collective_s("_allgather_base", 100, "Float", 4) == pytest.approx(4 * 400 * 3 / 4 / 450e9)
    assert ceilings.Ceilings("NVIDIA L4").collective_s("allreduce", 450, "Float", 8) is None  # it has no links


def test_collections_and_recompilations_of_the_record_are_put_where_they_were(tmp_path):
    events = [step(7, 1000, 100), event("cpu_op", "aten::one", 1000, 100)]
    [rank] = load_all([write(tmp_path / "rank0.json", events)])
    step_files.write(tmp_path, [{"step": 7, "step_ms": 0.1, "t_ns": 5_000_000}])
    step_files.append_event(tmp_path, {"t_ns": 5_020_000, "event": "gc", "step": 7, "ms": 0.03, "generation": 2})
    step_files.append_event(tmp_path, {"t_ns": 5_060_000, "event": "recompile", "step": 7, "ms": 0.02, "function": "f"})
    add_recorded_events([rank], tmp_path)
    explanation = account.accounts_of([rank])[1]
    assert parts_ns(explanation) == {parts.UNBOUND: 50_000, parts.GARBAGE: 30_000, parts.COMPILATION: 20_000}
    assert explanation["next"][0]["what"] == "garbage collection of generation 2"


def test_a_compilation_before_the_window_is_named(tmp_path, finished_run):
    folder = real_runs.copy_of(finished_run, tmp_path / "results")
    explanation = explain_record(folder)
    counted = [row["step"] for row in explanation["ranks"]["0"]["steps"]]
    for step_number, ms in ((0, 900.0), (-1, 300.0), (counted[0], 70.0)):  # the last is in a step that counts
        recompilation = {"event": "recompile", "step": step_number, "ms": ms, "function": "gpt2.py:27", "t_ns": 0}
        step_files.append_event(folder, recompilation)
    outside = explain_record(folder)["outside"]
    (line,) = outside
    assert (line["what"], line["count"], line["ms"]) == ("recompilation of gpt2.py:27", 2, 1200.0)
    lines = str(api_traces.explain(finished_run, folder)).splitlines()
    assert lines[1].strip().startswith("only B, outside these steps: compilation: recompilation of gpt2.py:27, 2 times")


@pytest.mark.parametrize("annotations", [["forward"], []])
def test_a_long_gap_without_stacks_is_known_by_its_edges(tmp_path, annotations):
    events = [
        step(1, 0, 20_000),
        *[event("user_annotation", name, 0, 20_000) for name in annotations],
        event("cpu_op", "aten::one", 0, 1000),
        event("cpu_op", "aten::fills_the_queue", 2000, 5990, tid=2),  # ends 10 us before the main thread goes on
        event("cpu_op", "aten::two", 8000, 4000),
        event("cpu_op", "aten::three", 15_000, 4500),
    ]
    pieces = {(p["part"], p["what"]): p["ms"] for p in explained(tmp_path / "a.json", events)["ranks"]["0"]["pieces"]}
    assert pieces[parts.SYNC, "waits for a thread: aten::fills_the_queue"] == 7.0
    part = parts.HOST if annotations else parts.UNKNOWN
    assert pieces[part, "no operator after aten::two, before aten::three"] == 3.0
    assert pieces[parts.HOST, "forward" if annotations else "outside operators, after aten::three"] == 0.5


@pytest.mark.parametrize("calls", [{20: 500}, {20: 5000}, {20: 500, 13: 900}, {}])
def test_a_row_without_its_launch_waits_for_a_stream_or_if_it_names_none_for_the_host(tmp_path, calls):
    """calls: {number: start us}, two that are not in order say nothing; with none, as for MTIA's copies, no number."""
    part = parts.DEPENDENCY if calls == {20: 500} else parts.UNKNOWN if calls else parts.HOST
    ours = [(1000, {"correlation": 11}), (4100, {"correlation": 12})]
    events = [event("kernel", "a", ts, 100, pid=0, tid=7, stream=7, **(of if calls else {})) for ts, of in ours]
    events.append(event("cpu_op", "aten::item", 1050, 3040))
    events += sum((launched("b", 4200 + ts / 10, 50, ts, number) for number, ts in calls.items()), [])
    assert parts_ns(explained(tmp_path / "a.json", events))[part] >= 3_000_000


def test_a_row_without_a_call_has_that_of_the_next_row_that_has_one(tmp_path):
    events = sum((launched(f"k{number}", 100 * number, 10, 100 * number - 50, number) for number in (1, 3)), [])
    events += [event("kernel", f"k{number}", 100 * number, 10, pid=0, tid=7, stream=7) for number in (2, 4)]
    write(tmp_path / "a.json", events)
    device = Device(*load_all([tmp_path / "a.json"]))
    first, _, third, _ = device.calls
    assert min(first, third) >= 0 and device.next_calls == [first, third, third, -1]


def test_backward_begins_where_the_thread_of_forward_ends(tmp_path):
    """Without steps the main thread is the process's first, although autograd's has more operators."""
    (call_a, a), (call_b, b) = launched("a", 900, 100, 800, 1), launched("b", 1600, 100, 1510, 2)
    events = [event("cpu_op", "aten::ones_like", 0, 1000, pid=5, tid=5), a, b, call_a | {"pid": 5, "tid": 5}]
    events.append(call_b | {"pid": 5, "tid": 6})
    events += [event("cpu_op", f"Backward{n}", 1500 + 150 * n, 140, pid=5, tid=6) for n in range(4)]
    pieces = {(p["part"], p["what"]): p["ms"] for p in explained(tmp_path / "a.json", events)["ranks"]["0"]["pieces"]}
    assert pieces[parts.HOST, "outside operators, after aten::ones_like"] == 0.5


def test_between_operators_a_short_time_is_the_hosts_and_a_long_one_without_stacks_unknown(tmp_path):
    events = [event("cpu_op", f"aten::{name}", start, 100) for name, start in (("a", 0), ("b", 150), ("c", 5000))]
    pieces = {(p["part"], p["what"]): p["ms"] for p in explained(tmp_path / "a.json", events)["ranks"]["0"]["pieces"]}
    assert pieces[parts.HOST, "outside operators, after aten::a"] == 0.05
    assert pieces[parts.UNKNOWN, "no operator after aten::b, before aten::c"] == 4.75


def test_a_record_without_a_trace_is_explained_from_its_columns(finished_run):
    explanation = explain_record(finished_run)
    ns = parts_ns(explanation)
    assert sum(ns.values()) == explanation["ranks"]["0"]["step_sum_ns"]
    rows = [row for row in step_files.read(finished_run) if row.get("step_ms") is not None and not row.get("flags")]
    assert explanation["step_ms"] == pytest.approx(sum(row["step_ms"] for row in rows) / len(rows), abs=1e-6)
    assert ns[parts.LOADER] == pytest.approx(1e6 * sum(row["data_ms"] for row in rows), abs=len(rows))


def test_the_limit_of_a_record_is_its_own_flops_at_the_peak(finished_run, tmp_path):
    folder = real_runs.copy_of(finished_run, tmp_path / "results")
    (folder / "events.jsonl").unlink(missing_ok=True)  # a stall of this machine would take all of its step
    run = json.loads((folder / "run.json").read_text())
    run["environment"]["gpus"] = [{"name": "NVIDIA H100 80GB HBM3"}]
    run["measured"]["dtype"] = "bfloat16"
    run["model"]["flops_per_token"], run["measured"]["batch_tokens"] = 989_000_000, 2_000  # 2 ms a step
    (folder / "run.json").write_text(json.dumps(run))
    assert explain_record(folder)["limit_ms"] == pytest.approx(2.0)


def test_a_slow_rank_of_a_record_is_the_first_line_with_its_size(two_rank_run, tmp_path):
    folder = real_runs.copy_of(two_rank_run, tmp_path / "results")
    rows, by_rank = step_files.read(folder), step_files.read_by_rank(folder)
    own_ms = {row["step"]: 5.0 for row in rows if row.get("step_ms")}
    slow_ms = {step: ms + 400.0 for step, ms in own_ms.items()}
    step_files.write_by_rank(folder, by_rank | {"own_ms": [own_ms, slow_ms]})
    for row in rows:
        if row.get("step_ms"):  # as it is when rank 0 waits: within its backward
            row |= {"step_ms": row["step_ms"] + 400.0, "backward_ms": row["backward_ms"] + 400.0}
    step_files.write(folder, rows)
    explanation = explain_record(folder)
    first = explanation["next"][0]
    assert (first["part"], first["rank"]) == (parts.WAITING, 1)
    assert first["gain_ms"] == pytest.approx(400.0, rel=1e-3)
    assert sum(parts_ns(explanation).values()) == explanation["ranks"]["0"]["step_sum_ns"]


# ---- real traces

NAMES = [path.name for path in (SHARED / "files").glob("*")]
LARGE = ("param_dlrm_8rank", "hta_trace_diff_control")
NAMES.sort(key=lambda name: (name == "modded_8xh100", name))  # which the next test reads too


@functools.lru_cache(maxsize=1)  # of two tests in a row
def ranks_of(name):
    return load_all(sorted((SHARED / "files" / name).glob("*.json*")))


@needs_shared
@pytest.mark.parametrize(
    ("name", "include_last_step"),
    [
        pytest.param(name, last, marks=pytest.mark.slow if name in LARGE else ())
        for name in NAMES
        for last in ((False, True) if name == "param_dlrm_8rank" else (False,))
    ],
)
def test_real_traces_add_up_to_the_nanosecond(name, include_last_step):
    explanation = account.accounts_of(ranks_of(name), include_last_step=include_last_step)[1]
    for rank in explanation["ranks"].values():
        assert sum(line["sum_ns"] for line in rank["parts"]) == rank["step_sum_ns"]
        for counted in rank["steps"]:
            assert sum(counted["sum_ns"].values()) == round(1e6 * counted["ms"])
    assert sum(line["ms"] for line in explanation["parts"]) == pytest.approx(explanation["step_ms"], rel=1e-9)
    whole_ns = account.whole_ns(explanation)
    assert sum(whole_ns.values()) == pytest.approx(1e6 * explanation["step_ms"], abs=0.51)
    against_itself = account.difference(explanation, explanation)
    assert against_itself["change_ns"] == 0 and against_itself["lines"] == []


@needs_shared
def test_of_eight_h100s_rank_1_is_late_because_its_host_is():
    ranks = ranks_of("modded_8xh100")
    explanation, analysed = account.accounts_of(ranks)[1], traces.analysed([rank.path for rank in ranks])
    for rank in explanation["ranks"]:
        ns = parts_ns(explanation, rank)
        exposed_ns = ns[parts.WAITING] + ns[parts.EXPOSED] + ns[parts.WIRE]
        assert exposed_ns == pytest.approx(1e3 * analysed["ranks"][rank]["exposed_comm_us"], rel=1e-4)
    late = explanation["lateness"][0]
    assert late["rank"] == 1
    assert next(iter(late["more"])) == parts.HOST
    assert explanation["next"][0]["part"] == parts.WAITING and explanation["next"][0]["rank"] == 1
    assert explanation["ranks"]["0"]["ceiling"].startswith("data sheet: NVIDIA H100")


# ---- the verb


def test_the_verb_prints_words_or_json(tmp_path, answer_of, printed):
    write(tmp_path / "a.json", one_step(), **H100)
    output = printed(verb, tmp_path / "a.json")
    about = "a step takes 0.10 ms: 0.00 ms of roofline time, "
    assert output.startswith(f"{tmp_path.name}/a.json: {about}")
    assert "Largest possible savings" in output
    assert answer_of(verb, tmp_path / "a.json")["step_ms"] == 0.1


def test_the_verb_explains_the_difference_of_two_traces_or_runs(
    tmp_path, finished_run, bare_run, answer_of, printed, capsys
):
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file, own_us in zip(files, (50, 30)):
        write(file, host_steps([100, 100, 9], own_us))
    output = printed(verb, *files)
    assert "What changed" in output and "-0.020" in output and "+0.020" in output
    assert answer_of(verb, *files)["change_ns"] == 0
    assert verb.main([*map(str, two_ranks(tmp_path)), "--json"]) == 0  # two files that are ranks of one job
    assert set(json.loads(capsys.readouterr().out)["ranks"]) == {"0", "1"}
    difference = answer_of(verb, finished_run, bare_run)
    assert sum(row["change_ns"] for row in difference["parts"]) == difference["change_ns"]
    assert difference["a"]["of"] == "record"


def test_a_device_that_idles_while_its_next_launching_call_has_not_returned_waits_for_the_launch(tmp_path):
    loaded = launched("second", 5_300, 100, 50, 2, call_dur=5_000)  # begins while the first kernel runs, loads its code
    events = [step(1, 0, 5_500), *launched("first", 20, 80, 10, 1), *loaded, *launched("third", 5_990, 10, 5_310, 3)]
    answer = explained(tmp_path / "a.json", events, **H100)
    ns = parts_ns(answer)
    assert ns[parts.LAUNCH] == 10_000 + (5_250 - 100) * 1_000  # to 0.2 ms after the call
    assert ns[parts.DEPENDENCY] == 50_000 + 590_000  # the third kernel's call had returned before the gap
    early = [step(1, 0, 9_000), *launched("kernel", 20, 80, 10, 1, call_dur=8_000)]  # it ran first
    assert not any("over 1 ms" in line["what"] for line in explained(tmp_path / "b.json", early, **H100)["next"])
    (line,) = [line for line in answer["next"] if line["most_ms"] > 5]
    assert line["what"] == "cudaLaunchKernel over 1 ms, before second" and "CUDA_MODULE_LOADING" in line["advice"]


def test_the_verb_takes_a_passport_and_writes_a_page(tmp_path, answer_of):
    write(tmp_path / "a.json", one_step(), **H100)
    device = {"id": "x", "name": H100["deviceProperties"][0]["name"], "index": 0}
    gemm = {"what": "gemm", "kind": "gemm", "unit": "TFLOP/s", "precision": "bfloat16", "shape": [1024, 1024, 1024]}
    gemm |= {"low": 1.0, "value": 1.0, "high": 400.0, "num_samples": 9}
    passport = {"schema_version": 1, "at": "2026-11-22T10:00:00Z", "took_s": 1.0, "device": "cuda", "environment": {}}
    passport |= {"devices": [device | {"figures": [gemm]}], "collectives": [], "omitted": []}
    (tmp_path / "passport.json").write_text(json.dumps(passport))
    arguments = [str(tmp_path / "a.json"), "--passport", str(tmp_path / "passport.json")]
    assert parts_ns(answer_of(verb, *arguments))[parts.ARITHMETIC] == 5369
    assert verb.main([*arguments, "--html", str(tmp_path / "a.html")]) == 0
    html = (tmp_path / "a.html").read_text()
    assert "measured, passport of 2026-11-22" in html and "the step" in html and len(html) < 300_000
    assert verb.main([str(tmp_path / "a.json"), str(tmp_path / "a.json"), "--html", str(tmp_path / "b.html")]) == 0
    assert "step of B" in (tmp_path / "b.html").read_text()
    browser.look_at(tmp_path / "a.html", tmp_path / "b.html")


def test_a_run_without_a_trace_is_explained_and_its_page_has_that_folded(finished_run, monkeypatch, printed):
    section = document.section_of_run(finished_run).html()
    assert "<details>" in section and "<details open" not in section and "because the run has no trace" in section
    assert "Its traces are large" not in section
    monkeypatch.setattr(document, "MAX_TRACE_BYTES", -1)
    assert "Its traces are large" in document.section_of_run(finished_run).html()
    assert "the run has no trace" in printed(verb, finished_run)


def test_a_run_that_did_not_complete_is_explained_by_its_recorded_steps_and_says_so(finished_run, tmp_path, printed):
    folder = tmp_path / "unfinished"
    shutil.copytree(finished_run, folder)
    assert "status" not in printed(verb, folder)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"status": "running"}))  # and no process is
    assert "the run's status is aborted: these are the steps that it has recorded" in printed(verb, folder)


@pytest.mark.parametrize("events", [[], launched("kernel", 9, 0, 5, 1)])
def test_a_trace_of_nothing_that_took_time_is_refused(tmp_path, events):
    with pytest.raises(ValueError, match="no kernel and no operator that took time"):
        explained(tmp_path / "a.json", events)


@pytest.mark.slow
def test_four_times_the_steps_ranges_and_names_take_about_four_times_the_cpu_time(tmp_path):
    """In each step a range of its own name, nested in that of the step before, and a kernel of its own name."""

    def cpu_s(num):
        events = [step(at, 100 * at, 100) for at in range(num)]
        events += [event("user_annotation", f"range {at}", 100 * at, 200 * (num - at)) for at in range(num)]
        kernels = (launched(f"kernel {at}", 100 * at + 20, 30, 100 * at + 5, at + 1) for at in range(num))
        path = write(tmp_path / "a.json", [*events, *sum(kernels, [])])
        began_s = time.process_time()
        api_traces.explain(path)
        return time.process_time() - began_s

    assert min(cpu_s(8000) for _ in range(2)) < 2.5**2 * min(cpu_s(2000) for _ in range(2))


@pytest.mark.parametrize(
    ("part", "what", "num_ranks", "records"),
    [
        (parts.OPTIMIZER, "adam", 8, ["r06", "r39"]),
        (parts.OPTIMIZER, "adam", 1, ["r39"]),  # nobody to share with
        (parts.UNBOUND, "XXT_kernel", 8, ["r06", "r38"]),
        (parts.SLOWER, "aten::mm [64, 768] [768, 50257] bfloat16", 1, ["r05", "r19"]),
        (parts.SLOWER, "aten::mm [64, 768] [768, 50304] bfloat16", 1, ["r19"]),
        (parts.SLOWER, "aten::_scaled_mm [64, 768] [768, 50304] float8", 1, []),
        (parts.SLOWER, "aten::mm [64, 64] [64, 64] float32", 1, ["r10"]),
        (parts.SLOWER, "aten::mul [64, 768] [768, 50257] bfloat16", 1, []),
        (parts.UNBOUND, "void flash_fwd_kernel<Flash_fwd_kernel_traits<64> >", 1, ["r12", "r13", "r20", "r29"]),
        (parts.UNBOUND, "triton_poi_fused_mul_nll_loss_forward_pow_relu_threshold_backward_5", 1, ["r28"]),
        (parts.UNBOUND, "nll_loss_forward_reduce_cuda_kernel_2d", 1, ["r37"]),
        (parts.EXPOSED, "ncclDevKernel_AllGather_RING_LL", 8, ["r26", "r37", "r45"]),
        (parts.WAITING, "ncclDevKernel_AllGather_RING_LL", 8, []),
        (parts.HOST, None, 1, []),
    ],
)
def test_the_records_are_named_where_they_gained(part, what, num_ranks, records):
    assert ranking.records_for(part, what, num_ranks) == records
    (*lines,) = ranking.legend([{"ladder": records}])
    assert [line[:3] for line in lines] == records and all(" min): " in line for line in lines)
