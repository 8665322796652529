"""Kineto traces as they come: every oddity that a real one had, or that JSON allows.  None may change a number."""

import gzip
import json
import re

import msgspec
import pytest
import traces
from traces import event, launched, read_as_text, step, write

from bench.analysis.explain import account, explained
from bench.analysis.explain import document as documents
from bench.analysis.trace import events, source
from bench.analysis.trace.load import find, load
from bench.cli import analyze


def rows():
    """A kernel 100 to 110, another 130 to 150, a copy 160 to 165, a memset of no length at 165: 35 us busy of 65."""
    return [
        *launched("gemm", 100, 10, 90, 1),
        *launched("gemm", 130, 20, 92, 2),
        event("cpu_op", "aten::mm", 88, 8, **{"External id": 5}),
        *launched("Memcpy HtoD (Pinned -> Device)", 160, 5, 155, 4, cat="gpu_memcpy", bytes=5 * 2**20),
        *launched("Memset (Device)", 165, 0, 156, 5, cat="gpu_memset"),
        step(1, 80, 90),
    ]


def read(path, **options):
    """The analysis of the first rank, which every form of the answer can show."""
    report = traces.analysed(find(path), **options)
    read_as_text(report), json.dumps(report, allow_nan=False)
    return next(iter(report["ranks"].values()))


def read_rows(folder, events, **options):
    return read(write(folder / "a.json", events), **options)


def is_the_same(path):
    report = read(path)
    assert [report["temporal"][f"{name}_us"] for name in ("span", "idle", "compute")] == [65.0, 30.0, 30.0]
    assert report["kernels"][0]["name"] == "gemm" and report["kernels"][0]["std_us"] == pytest.approx(50**0.5)
    assert (report["num_device_rows"], report["profiler_steps"], report["launches"]["num_unlinked"]) == (4, [1], 0)
    assert report["copies"][0]["gib"] == 5 / 1024 and report["cut"] is None and report["num_bad_events"] == 0
    assert next(line for line in report["operators"] if line["name"] == "aten::mm")["device_us"] == 30.0


def text_of(events, indent=None, **meta):
    document = {"schemaVersion": 1, **meta, "traceEvents": events}
    return json.dumps(document, ensure_ascii=False, indent=indent)


# ---- files


def as_words(rows):
    for row in rows:
        row["args"] = {key: str(value) for key, value in row["args"].items()}
    return [{key: str(value) if isinstance(value, int) else value for key, value in row.items()} for row in rows]


PLAIN = text_of(rows())
MEMBERS = [gzip.compress(PLAIN.encode()[at : at + 300]) for at in range(0, len(PLAIN), 300)]
FLOATS = {'"stream": 7': '"stream": 7.0', '"dur": 20': '"dur": 2e1', '"ts": 130': '"ts": 1.3E2'}
FLOATS |= {'"correlation": 1}': '"correlation": 1.0}'}
AS_FLOATS = PLAIN
for whole, written in FLOATS.items():
    AS_FLOATS = AS_FLOATS.replace(whole, written)
OLD = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset", "cuda_runtime": "Runtime"}
OLD |= {"cpu_op": "Operator"}
WAITING = event("cuda_sync", "Event Sync", 0, 500, pid=0, tid=7, stream=7, correlation=99)
INFOS = (None, [], "x", {"rank": None}, {"rank": "a", "world_size": -3}, {"rank": [1]}, {"world_size": 10**9})
WRITINGS = {
    **{f"indented by {indent!r}": ("a.json", text_of(rows(), indent)) for indent in (1, 2, 4, "\t")},
    "Windows line ends": ("a.json", text_of(rows(), 1).replace("\n", "\r\n")),
    "a list at the top": ("a.json", json.dumps(rows())),
    "gzip of several members": ("a.json.gz", b"".join(MEMBERS)),
    "gzip under a plain name": ("a.json", gzip.compress(PLAIN.encode())),
    "plain under a gzip name": ("b.pt.trace.json.gz", PLAIN),
    "numbers as words": ("a.json", text_of(as_words(rows()))),
    "numbers as floats and in scientific notation": ("a.json", AS_FLOATS),
    "categories of torch 1.11": ("a.json", text_of([row | {"cat": OLD.get(row["cat"], row["cat"])} for row in rows()])),
    "stamps with nanoseconds": ("a.json", re.sub(r'"(ts|dur)": (\d+)', r'"\1": \2.000', PLAIN)),
    "rows of synchronisation, which are no device time": ("a.json", text_of([*rows(), WAITING])),
    **{f"ranks: {info}": ("a.json", text_of(rows(), distributedInfo=info)) for info in INFOS},
}


@pytest.mark.parametrize("name", WRITINGS)
def test_the_same_events_have_the_same_numbers_however_they_are_written(tmp_path, name):
    file, content = WRITINGS[name]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    is_the_same(tmp_path / file)


def test_what_the_file_says_of_itself_may_come_first_or_last(tmp_path):
    facts = {"distributedInfo": {"rank": 2, "world_size": 4}, "displayTimeUnit": "ms"}
    for document in ({**facts, "traceEvents": rows()}, {"traceEvents": rows(), **facts}):
        (tmp_path / "a.json").write_text("\ufeff" + json.dumps(document), encoding="utf-8")
        is_the_same(tmp_path / "a.json")
        rank = load(tmp_path / "a.json")
        assert (rank.rank, rank.world_size, rank.meta["displayTimeUnit"]) == (2, 4, "ms")


def test_a_zip_archive_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(source.NoTrace, match=r"a.zip: it is a zip archive.*unpack it"):
        load(tmp_path / "a.zip")


@pytest.mark.parametrize("events", [[], [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]])
def test_a_trace_in_which_nothing_happened(tmp_path, events):
    analysis = read_rows(tmp_path, events)
    assert analysis["temporal"]["span_us"] is None and analysis["kernels"] == [] and analysis["advice"] == []
    assert "nothing to analyse" in read_as_text(traces.analysed([tmp_path / "a.json"]))
    assert analyze.main([str(tmp_path / "a.json")]) == 2
    write(tmp_path / "b.json", [event("cpu_op", "a", 1, 1)])
    assert analyze.main([str(tmp_path / "b.json")]) == 0


def test_a_trace_that_ends_before_its_first_event_is_refused(tmp_path):
    """Else analyze would end with exit code 0."""
    packed = gzip.compress(
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}'
    )
    (tmp_path / "rank0.json.gz").write_bytes(packed[:40])
    with pytest.raises(source.NoTrace, match=r"rank0.json.gz: .*no event is in what can be read of it"):
        load(tmp_path / "rank0.json.gz")


# ---- values


def test_values_that_are_no_json_number(tmp_path):
    odd = [event("cpu_op", "x", 1, 1, grid="NAN", occupancy="INF"), event("kernel", "lost", "NAN", 1)]
    text = text_of([*rows(), *odd, event("kernel", "lost", 5, "INF", pid=0)])
    (tmp_path / "a.json").write_text(text.replace('"NAN"', "NaN").replace('"INF"', "Infinity"))
    analysis = read(tmp_path / "a.json")
    assert (analysis["temporal"]["span_us"], analysis["num_bad_events"]) == (65.0, 2)


@pytest.mark.parametrize("block_bytes", [source.BLOCK_BYTES, 256])
def test_digits_survive_where_a_value_is_no_json(tmp_path, monkeypatch, block_bytes):
    """A chunk with NaN is read another way, and a stamp of 19 digits must not become a double there."""
    monkeypatch.setattr(source, "BLOCK_BYTES", block_bytes)
    odd = event("cpu_op", "x", 1, 1, worth="NAN")
    events = [*(event("cpu_op", "x", 1712195495502000 + num, 1) for num in range(20)), odd]
    events += [*launched("gemm", "TS", "DUR", "TS", 1), odd]
    text = text_of(events).replace('"TS"', "1712195495502094.593").replace('"DUR"', "0.001").replace('"NAN"', "NaN")
    (tmp_path / "a.json").write_text(text)
    rank = load(tmp_path / "a.json")
    row = rank.device_rows()[0]
    assert (rank.ts[row], rank.end[row], rank.num_events) == (1712195495502094593, 1712195495502094594, 24)


def test_stamps_however_they_are_written_are_nanoseconds_exactly():
    for texts, expected_ns in (
        (["1712195495502094", "7", "-3"], [1712195495502094000, 7000, -3000]),
        (["1712195495502094.593", "1712195495502095.007"], [1712195495502094593, 1712195495502095007]),
        (["1712195495502094.593", "1712195495502095", "1.5"], [1712195495502094593, 1712195495502095000, 1500]),
        (["123.4", "55555.555"], [123_400, 55_555_555]),  # 16 bytes with commas, and a point four before each eighth
        (["1.2.345", "9.8.765"], [events.BAD, events.BAD]),
        (["1,2", "3"], [events.BAD, 3000]),
        (["4611686018427387.903", "4611686018427387.904"], [2**62 - 1, events.BAD]),
    ):
        assert events.nanoseconds([msgspec.Raw(text.encode()) for text in texts]).tolist() == expected_ns, texts


def test_an_event_without_duration_or_start_is_no_range(tmp_path):
    lost = event("kernel", "lost", 3, 4, stream=7, device=0, correlation=9)
    odd = [{key: value for key, value in lost.items() if key != missing} for missing in ("dur", "ts")]
    analysis = read_rows(tmp_path, rows() + odd)
    assert (analysis["temporal"]["span_us"], analysis["num_device_rows"], analysis["num_bad_events"]) == (65.0, 4, 2)


def test_an_event_of_negative_duration_is_damaged_and_one_of_no_duration_is_counted(tmp_path):
    analysis = read_rows(tmp_path, [*rows(), *launched("gemm", 105, -4, 91, 8), *launched("gemm", 108, 0, 91, 9)])
    assert (analysis["temporal"]["compute_us"], analysis["temporal"]["idle_us"]) == (30.0, 30.0)
    gemm = analysis["kernels"][0]
    assert (gemm["count"], gemm["sum_us"], gemm["min_us"], analysis["num_bad_events"]) == (3, 30.0, 0.0, 1)


DAMAGES = {
    "begin before the host launches them, by up to 0.020 ms": launched("gemm", 105, 1, 125, 8),
    "gemm takes 1000 ms, longer than all else in the trace (0.09 ms)": launched("gemm", 105, 1e6, 91, 8),
    "2 could not be": launched("gemm", 1e14, 5, 91, 8)[1:] + launched("gemm", 105, 1e14, 91, 8)[1:],
    "not read: 1 event (mtia_insight)": [event("mtia_insight", "x", 105, 1), event("overhead", "x", 105, 1)],
    "1 of 5 device rows are there twice": rows()[3:4],
    "1 pair of ProfilerSteps overlap, first #1 and #2": [step(2, 160, 90)],
    "5 launches have no kernel in the trace": [event("cuda_runtime", "cudaLaunchKernel", 91, 2, correlation=8)],
}


@pytest.mark.parametrize(("damage", "added"), DAMAGES.items())
def test_analyze_and_explain_name_the_damage_of_a_file_before_its_numbers(tmp_path, damage, added):
    write(tmp_path / "a.json", rows() + added)
    accounts = explained.explain_paths("a", [tmp_path / "a.json"])
    for text in (read_as_text(traces.analysed([tmp_path / "a.json"])), documents.from_accounts(accounts).terminal()):
        assert damage in text.split("\n\n")[1], text
    write(tmp_path / "b.json", rows())
    whole = explained.explain_paths("b", [tmp_path / "b.json"])["b"]
    assert whole["doubts"] == [] and damage in account.difference(whole, accounts["a"])["b"]["doubts"][0]


def test_what_a_capture_launches_has_no_kernel_and_none_is_lost(tmp_path):
    calls = [("cudaStreamBeginCapture", 7), ("cuLaunchKernelEx", 8), ("hipModuleLaunchKernel", 9)]
    calls = [event("cuda_runtime", name, 90 + number, 1, correlation=number) for name, number in calls]
    ended = event("cuda_runtime", "cudaStreamEndCapture", 100, 1, correlation=10)
    assert read_rows(tmp_path, [*rows(), *calls[1:]])["doubts"][0].startswith("2 of 6 launches have no kernel")
    assert read_rows(tmp_path, [*rows(), *calls, ended])["doubts"] == []


def test_analyze_and_explain_say_that_traces_seem_to_be_of_several_jobs(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    write(paths[0], rows(), deviceProperties=[{"name": "NVIDIA H100"}], distributedInfo={"rank": 0})
    for name, number, later_s, doubt in (
        ("NVIDIA H100", 1, 0, ""),
        ("NVIDIA A100", 1, 0, "the traces differ in their device (NVIDIA A100, NVIDIA H100)"),
        ("NVIDIA H100", 0, 0, "b.json says that it is of the same rank as another file"),
        ("NVIDIA H100", 1, 90, "rank 1 was recorded 90 s after rank 0"),
    ):
        events = [row | {"ts": row["ts"] + 1e6 * later_s} for row in rows()]
        write(paths[1], events, deviceProperties=[{"name": name}], distributedInfo={"rank": number})
        for doubts in (explained.explain_paths("a", paths)["a"], traces.analysed(paths)["overall"]):
            assert [found[: len(doubt)] for found in doubts["doubts"]] == [doubt] * bool(doubt)


def test_a_correlation_that_comes_twice_counts_no_row_twice(tmp_path):
    """The last call in the file launched it; HTA counts the kernel once for each."""
    again = event("cuda_runtime", "cudaLaunchKernel", 95, 1, correlation=1)
    analysis = read_rows(tmp_path, [*rows(), again, step(2, 200, 10)])
    assert analysis["kernels"][0]["count"] == 2 and analysis["launches"]["num_launches"] == 4


def test_names_in_any_language_and_of_any_length(tmp_path):
    names = ["größe ☃ 核函数", "ядро<float>", "\u202eevil", "a" * 50_000, "", " ", "|x|", "k\nk", "🎉" * 3]
    names.append("<" * 30_000 + ">" * 30_000)  # levels of a template
    events = [row for num, name in enumerate(names) for row in launched(name, 10 * num, 5, 0, num + 1)]
    analysis = read_rows(tmp_path, events)
    assert sorted(line["name"] for line in analysis["kernels"]) == sorted(names)
    text = read_as_text(traces.analysed([tmp_path / "a.json"]))
    assert "\u202e" not in text and max(map(len, text.splitlines())) < 400


def test_damaged_letters_cost_one_name(tmp_path):
    data = text_of([*rows(), *launched("UMLAUT", 150, 1, 140, 9)]).encode().replace(b"UMLAUT", b"gr\xf6sse")
    (tmp_path / "a.json").write_bytes(data)
    assert read(tmp_path / "a.json")["num_device_rows"] == 5


# ---- what PyTorch, CUDA and ROCm write


def test_amd_names(tmp_path):
    place, nccl = {"pid": 2, "device": 2}, "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    copy = {"correlation": 2, "bytes": 2**20}
    amd = [
        event("cuda_runtime", "hipExtModuleLaunchKernel", 0, 5, correlation=1),
        event("kernel", "Cijk_Alik_Bljk_BBS_BH", 10, 30, tid=0, stream=0, correlation=1, **place),
        event("hip_runtime", "hipMemcpyWithStream", 6, 5, correlation=2),
        event("gpu_memcpy", "CopyHostToDevice", 50, 10, tid=0, stream=0, **copy, **place),
        event("hip_runtime", "hipLaunchKernel", 12, 5, correlation=3),
        event("kernel", nccl, 70, 10, tid=1, stream=1, correlation=3, **place),
        event("cuda_runtime", "hipDeviceSynchronize", 20, 30),
    ]
    analysis = read_rows(tmp_path, amd)
    assert {line["name"][:8]: (line["type"], line["category"]) for line in analysis["kernels"]} == {
        "Cijk_Ali": ("COMPUTATION", "matmul"),
        "CopyHost": ("MEMORY", "memory copy"),
        "ncclDevK": ("COMMUNICATION", "communication"),
    }
    assert (analysis["comm_us"], analysis["overlap_pct"], analysis["launches"]["num_launches"]) == (10.0, 0.0, 3)
    assert analysis["synchronisations"] == [{"name": "hipDeviceSynchronize", "count": 1, "sum_us": 30.0}]
    assert analysis["host_copies"] == {"sum_us": 10.0, "exposed_us": 10.0, "pageable_us": 0.0}


def test_an_mtias_kernels_and_copies_are_rows_of_a_device_and_its_waits_are_not(tmp_path):
    """As in HolisticTraceAnalysis' two traces of one: arguments alone tell a kernel, a copy and a wait apart."""
    kernel, copy, wait = {"row": 0, "correlation": 1}, {"direction": "HOST_TO_DEVICE"}, {"wait_on_stream": 104}
    ranges = [("fc-dtype_Float", 10, 30, kernel), ("dma_request", 35, 15, copy), ("event_wait", 10, 80, wait)]
    mtia = [event("mtia_ccp_events", name, ts, dur, pid=17, stream=112, **args) for name, ts, dur, args in ranges]
    analysis = read_rows(tmp_path, [event("mtia_runtime", "runFunction", 0, 5, correlation=1), *mtia])
    assert (analysis["temporal"]["span_us"], analysis["temporal"]["compute_us"], analysis["doubts"]) == (40.0, 30.0, [])
    assert [(line["type"], line["category"]) for line in analysis["kernels"]] == [
        ("COMPUTATION", "other"),
        ("MEMORY", "memory copy"),
    ]


def test_triton_kernels_whose_operator_has_their_name_and_a_stream(tmp_path):
    """The host's range is none of the device's time, and the kernel is the range's."""
    name = "triton_poi_fused_add_0"
    triton = [
        event("cpu_op", name, 0, 90, stream=7, grid="grid(100,)", kernel_backend="triton"),
        event("cuda_driver", "cuLaunchKernel", 20, 5, correlation=3),
        event("kernel", name, 30, 2, pid=0, tid=7, device=0, stream=7, correlation=3),
    ]
    analysis = read_rows(tmp_path, triton)
    assert (analysis["temporal"]["span_us"], analysis["kernels"][0]["count"]) == (2.0, 1)
    assert analysis["launches"]["num_launches"] == 1
    assert (analysis["operators"][0]["name"], analysis["operators"][0]["device_us"]) == (name, 2.0)


def test_kernels_of_a_graph_share_one_launch(tmp_path):
    """One call launches three kernels of a graph, 10 us each from 50, and one launches a single kernel."""
    nodes = [launched(f"k{num}", 50 + 10 * num, 10, 0, 1)[1] for num in range(3)]
    call = event("cuda_runtime", "cudaGraphLaunch", 10, 20, correlation=1)
    graph = [call, *nodes, *launched("gemm", 80, 5, 35, 2)]
    analysis = read_rows(tmp_path, graph)
    assert (analysis["temporal"]["idle_us"], analysis["num_device_rows"]) == (0.0, 4)
    expected = {"num_launches": 1, "num_graph_launches": 1, "num_graph_rows": 3, "num_unlinked": 0, "call_us_mean": 2.0}
    assert {key: analysis["launches"][key] for key in expected} == expected
    assert analysis["queues"][0]["max"] == 2  # the graph from 10 to 50, the kernel from 35 to 80
    assert [line["operator"] for line in analysis["launchers"]] == [None] * 4
    analysis = read_rows(tmp_path, [*graph, event("user_annotation", "replay", 0, 32)])
    by_kernel = {line["kernel"]: line["annotation"] for line in analysis["launchers"]}
    assert by_kernel == {"k0": "replay", "k1": "replay", "k2": "replay", "gemm": None}


def test_kernels_without_a_recorded_launch(tmp_path):
    """Without steps they count, and the external id still gives the operator.  Of one step those count that ran after
    its first kernel, as earlier ones are of an earlier step; of several their step is unknown.
    """
    lost = event("kernel", "lost", 40, 20, pid=0, tid=7, device=0, stream=7, correlation=77, **{"External id": 5})
    analysis = read_rows(tmp_path, [*rows()[:-1], lost])
    assert (analysis["temporal"]["span_us"], analysis["launches"]["num_unlinked"]) == (125.0, 1)
    assert next(line for line in analysis["launchers"] if line["kernel"] == "lost")["operator"] == "aten::mm"
    analyses = [read_rows(tmp_path, [*rows(), lost | {"ts": at}]) for at in (40, 120)]
    assert [analysis["num_device_rows_excluded"]["not_launched"] for analysis in analyses] == [1, 0]
    assert [analysis["temporal"]["span_us"] for analysis in analyses] == [65.0, 65.0]
    events = [*rows(), lost, step(2, 170, 10)]
    analysis = read_rows(tmp_path, events)
    assert (analysis["num_device_rows"], analysis["num_device_rows_excluded"]["not_launched"]) == (4, 1)
    assert read_rows(tmp_path, events, include_last_step=True)["num_device_rows"] == 4
    sentence = "1 device rows are not counted: their launch was not recorded"
    assert sentence in read_as_text(traces.analysed([tmp_path / "a.json"]))


def test_where_no_launch_was_recorded_at_all_rows_belong_to_the_step_in_which_they_ran(tmp_path):
    without_calls = [row for row in rows() if row["cat"] != "cuda_runtime"]
    late = event("kernel", "gemm", 180, 5, pid=0, tid=7, device=0, stream=7)
    analysis = read_rows(tmp_path, [*without_calls, step(2, 170, 30), late])
    last = analysis["num_device_rows_excluded"]["last_step"]
    assert (analysis["num_device_rows"], last) == (4, 1) and "it waits for is not known" in analysis["advice"][0]


def on_gpu(number, ts, dur):
    return event("gpu_user_annotation", f"ProfilerStep#{number}", ts, dur, pid=0, tid=7)


@pytest.mark.parametrize(
    ("steps", "num_device_rows", "counted", "excluded"),
    [
        ([], 4, [], []),
        ([step(30, 170, 10), step(9, 80, 40), step(12, 130, 30)], 4, [9, 12], [30]),  # out of order, with gaps
        # as operators with a space, in old files
        ([event("Operator", "ProfilerStep #1", 80, 40), event("Operator", "ProfilerStep #2", 120, 60)], 2, [1], [2]),
        # HTA takes the last start of either, so that the last step counts whole
        ([step(1, 80, 40), step(2, 120, 60), on_gpu(2, 400, 60)], 2, [1], [2]),
        # that only the GPU shows: everything counts, as no host says where the last one begins
        ([on_gpu(7, 100, 25), on_gpu(8, 125, 45)], 4, [7, 8], []),
    ],
)
def test_steps_in_any_form(tmp_path, steps, num_device_rows, counted, excluded):
    analysis = read_rows(tmp_path, rows()[:-1] + steps)
    numbers = (analysis["num_device_rows"], analysis["profiler_steps"], analysis["profiler_steps_excluded"])
    assert numbers == (num_device_rows, counted, excluded)
    if counted == [7, 8]:  # those of the device
        lines = [(line["step"], line["host_us"], line["busy_us"], line["num_kernels"]) for line in analysis["steps"]]
        assert lines == [(7, None, 10.0, 1), (8, None, 25.0, 3)]


def test_missing_ranks_and_ranks_that_say_nothing(tmp_path):
    for number in (1, 3):
        write(tmp_path / f"worker{number}.json", rows(), distributedInfo={"rank": number, "world_size": "4"})
    report = traces.analysed(find(tmp_path))
    assert (list(report["ranks"]), report["overall"]["missing_ranks"]) == (["1", "3"], [0, 2])
    assert "2 of 4 ranks are missing: [0, 2]" in read_as_text(report)
    (tmp_path / "two").mkdir()
    for name in ("host_a.json", "host_b.json"):
        write(tmp_path / "two" / name, rows())
    assert list(traces.analysed(find(tmp_path / "two"))["ranks"]) == ["0", "1"]


def test_allocations_are_moments(tmp_path):
    """profile_memory: 100 asked for and 40 freed in mm, 30 asked for by no known operator; not the host's."""
    moments = []
    for ts, num_bytes, device_type in ((89, 100, 1), (90, -40, 1), (70, 30, 1), (89, 5000, 0)):
        moment = event("cpu_instant_event", "[memory]", ts, 0, **{"Bytes": num_bytes, "Device Type": device_type})
        del moment["dur"]
        moments.append(moment | {"ph": "i", "s": "t"})
    is_the_same(write(tmp_path / "a.json", rows() + moments))
    (line,) = read(tmp_path / "a.json")["operators"]
    assert (line["allocated_bytes"], line["net_bytes"]) == (100, 60)
    assert read_rows(tmp_path, rows())["operators"][0]["allocated_bytes"] is None


def test_launches_whose_kernels_the_profiler_lost_are_reported(tmp_path):
    """CUPTI before 13.1 loses the first kernels of a profile; of the last step nothing is expected."""
    lost = [event("cuda_runtime", "cudaLaunchKernel", 5 + number, 1, correlation=900 + number) for number in range(3)]
    (doubt,) = read_rows(tmp_path, [*rows(), *lost])["doubts"]
    assert doubt.startswith("3 of 7 launches have no kernel in the trace: the profiler lost them")
    assert doubt in read_as_text(traces.analysed([tmp_path / "a.json"]))
    late = event("cuda_runtime", "cudaLaunchKernel", 175, 1, correlation=990)
    for written in (rows(), [*rows(), step(2, 170, 10), late], lost):  # the last is a trace without a device
        assert read_rows(tmp_path, written)["doubts"] == []
