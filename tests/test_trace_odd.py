"""Kineto traces as they come: every oddity that a real one had, or that JSON allows.  None may change a number."""

import gzip
import json

import pytest
import traces
from traces import event, launched, step, write

from bench.analysis.trace import source
from bench.analysis.trace.load import find, load
from bench.analysis.trace.text import document


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


def of(path, **options):
    found = traces.analysed(find(path), **options)
    (document(found, "x").terminal(), document(found, "x").markdown(), json.dumps(found, allow_nan=False))
    return found["ranks"][next(iter(found["ranks"]))]


def is_the_same(path):
    found = of(path)
    assert (found["temporal"]["span_us"], found["temporal"]["idle_us"], found["temporal"]["compute_us"]) == (
        65.0,
        30.0,
        30.0,
    )
    assert found["kernels"][0]["name"] == "gemm" and found["kernels"][0]["std_us"] == pytest.approx(50**0.5)
    assert (found["num_device_rows"], found["profiler_steps"], found["launches"]["num_unlinked"]) == (4, [1], 0)
    assert found["copies"][0]["gib"] == 5 / 1024 and found["cut"] is None and found["num_bad_events"] == 0
    assert next(line for line in found["operators"] if line["name"] == "aten::mm")["device_us"] == 30.0
    return True


def text_of(events, **meta):
    return json.dumps({"schemaVersion": 1, **meta, "traceEvents": events}, ensure_ascii=False)


# ---- files


@pytest.mark.parametrize("indent", [1, 2, 4, "\t"])
def test_any_indentation(tmp_path, indent):
    assert is_the_same(write(tmp_path / "a.json", rows(), indent=indent))


def test_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(
        b"\xef\xbb\xbf" + text_of(rows(), distributedInfo={"rank": 3, "world_size": 4}).encode()
    )
    assert is_the_same(tmp_path / "a.json")
    assert load(tmp_path / "a.json").rank == 3


def test_windows_line_ends(tmp_path):
    (tmp_path / "a.json").write_bytes(json.dumps({"traceEvents": rows()}, indent=1).replace("\n", "\r\n").encode())
    assert is_the_same(tmp_path / "a.json")


def test_a_list_at_the_top(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(rows()))
    assert is_the_same(tmp_path / "a.json")


def test_what_the_file_says_of_itself_may_come_last(tmp_path):
    after = {
        "distributedInfo": {"rank": 2, "world_size": 4},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1735632360000000000,
    }
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": rows(), **after}))
    assert is_the_same(tmp_path / "a.json")
    rank = load(tmp_path / "a.json")
    assert (rank.rank, rank.world_size, rank.meta["displayTimeUnit"]) == (2, 4, "ms")


def test_gzip_of_several_members(tmp_path):
    data = text_of(rows()).encode()
    (tmp_path / "a.json.gz").write_bytes(
        b"".join(gzip.compress(data[at : at + 300]) for at in range(0, len(data), 300))
    )
    assert is_the_same(tmp_path / "a.json.gz")


def test_gzip_under_a_plain_name_and_plain_under_a_gzip_name(tmp_path):
    (tmp_path / "a.json").write_bytes(gzip.compress(text_of(rows()).encode()))
    (tmp_path / "b.pt.trace.json.gz").write_text(text_of(rows()))
    assert is_the_same(tmp_path / "a.json") and is_the_same(tmp_path / "b.pt.trace.json.gz")


def test_a_zip_archive_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(source.NoTrace, match=r"a.zip: it is a zip archive.*unpack it"):
        load(tmp_path / "a.zip")


@pytest.mark.parametrize("events", [[], [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]])
def test_a_trace_in_which_nothing_happened(tmp_path, events):
    path = write(tmp_path / "a.json", events)
    found = of(path)
    assert found["temporal"]["span_us"] is None and found["kernels"] == [] and found["advice"] == []
    assert "nothing to analyse" in document(traces.analysed([path]), "x").terminal()


# ---- values


def as_words(rows):
    for one in rows:
        one["args"] = {key: str(value) for key, value in one["args"].items()}
    return [{key: str(value) if isinstance(value, int) else value for key, value in one.items()} for one in rows]


def test_numbers_as_words(tmp_path):
    assert is_the_same(write(tmp_path / "a.json", as_words(rows())))


def test_numbers_as_floats_and_in_scientific_notation(tmp_path):
    text = (
        text_of(rows())
        .replace('"stream": 7', '"stream": 7.0')
        .replace('"dur": 20', '"dur": 2e1')
        .replace('"ts": 130', '"ts": 1.3E2')
        .replace('"correlation": 1}', '"correlation": 1.0}')
    )
    (tmp_path / "a.json").write_text(text)
    assert is_the_same(tmp_path / "a.json")


def test_values_that_are_no_json_number(tmp_path):
    odd = [
        event("cpu_op", "x", 1, 1, grid="NAN", occupancy="INF"),
        event("kernel", "lost", "NAN", 1),
        event("kernel", "lost", 5, "INF", pid=0),
    ]
    text = text_of(rows() + odd).replace('"NAN"', "NaN").replace('"INF"', "Infinity")
    (tmp_path / "a.json").write_text(text)
    found = of(tmp_path / "a.json")
    assert (found["temporal"]["span_us"], found["num_bad_events"]) == (65.0, 2)


def test_digits_survive_where_a_value_is_no_json(tmp_path):
    """A chunk with NaN is read another way, and a stamp of 19 digits must not become a double there."""
    text = text_of(
        [event("cpu_op", "x", 1, 1, worth="NAN"), *launched("gemm", "TS", "DUR", 5, 1), event("cpu_op", "last", 1, 1)]
    )
    (tmp_path / "a.json").write_text(
        text.replace('"TS"', "1712195495502094.593").replace('"DUR"', "0.001").replace('"NAN"', "NaN")
    )
    rank = load(tmp_path / "a.json")
    row = rank.device_rows()[0]
    assert (rank.ts[row], rank.end[row]) == (1712195495502094593, 1712195495502094594)


def test_digits_survive_where_only_a_later_chunk_shows_them(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 256)
    text = text_of([*(event("cpu_op", "x", num, 1) for num in range(20)), *launched("gemm", "TS", "DUR", "TS", 1)])
    (tmp_path / "a.json").write_text(text.replace('"TS"', "1712195495502094.593").replace('"DUR"', "0.001"))
    rank = load(tmp_path / "a.json")
    assert rank.ts[rank.device_rows()[0]] == 1712195495502094593 and rank.num_events == 22


def test_stamps_of_microseconds_and_of_nanoseconds_give_the_same(tmp_path):
    write(tmp_path / "us.json", launched("gemm", 1000, 7, 990, 1))
    (tmp_path / "ns.json").write_text(
        text_of(launched("gemm", "TS", "DUR", 990, 1)).replace('"TS"', "1000.000").replace('"DUR"', "7.000")
    )
    assert of(tmp_path / "us.json")["temporal"] == of(tmp_path / "ns.json")["temporal"]


def test_an_event_without_duration_or_start_is_no_range(tmp_path):
    odd = [
        {
            key: value
            for key, value in event("kernel", "lost", 3, 4, stream=7, device=0, correlation=9).items()
            if key != left_out
        }
        for left_out in ("dur", "ts")
    ]
    found = of(write(tmp_path / "a.json", rows() + odd))
    assert (found["temporal"]["span_us"], found["num_device_rows"], found["num_bad_events"]) == (65.0, 4, 2)


def test_negative_and_zero_durations_hold_no_time_and_are_counted(tmp_path):
    found = of(
        write(tmp_path / "a.json", [*rows(), *launched("gemm", 105, -4, 91, 8), *launched("gemm", 108, 0, 91, 9)])
    )
    assert (found["temporal"]["compute_us"], found["temporal"]["idle_us"]) == (30.0, 30.0)
    gemm = found["kernels"][0]
    assert (gemm["count"], gemm["sum_us"], gemm["min_us"]) == (4, 26.0, -4.0)


def test_a_correlation_that_comes_twice_counts_no_row_twice(tmp_path):
    """The last call in the file launched it; HTA counts the kernel once for each."""
    found = of(
        write(
            tmp_path / "a.json",
            [*rows(), event("cuda_runtime", "cudaLaunchKernel", 95, 1, correlation=1), step(2, 200, 10)],
        )
    )
    assert found["kernels"][0]["count"] == 2 and found["launches"]["num_launches"] == 4


def test_names_in_any_language_and_of_any_length(tmp_path):
    names = ["größe ☃ 核函数", "ядро<float>", "\u202eevil", "a" * 50_000, "", " ", "|x|", "k\nk", "🎉" * 3]
    found = of(
        write(
            tmp_path / "a.json",
            [row for num, name in enumerate(names) for row in launched(name, 10 * num, 5, 0, num + 1)],
        )
    )
    assert sorted(line["name"] for line in found["kernels"]) == sorted(names)
    text = document(traces.analysed([tmp_path / "a.json"]), "x").terminal()
    assert "\u202e" not in text and max(map(len, text.splitlines())) < 400


def test_damaged_letters_cost_one_name(tmp_path):
    data = text_of([*rows(), *launched("UMLAUT", 150, 1, 140, 9)]).encode().replace(b"UMLAUT", b"gr\xf6sse")
    (tmp_path / "a.json").write_bytes(data)
    assert of(tmp_path / "a.json")["num_device_rows"] == 5


# ---- what PyTorch, CUDA and ROCm write


def test_categories_of_pytorch_1_11(tmp_path):
    old = {
        "kernel": "Kernel",
        "gpu_memcpy": "Memcpy",
        "gpu_memset": "Memset",
        "cuda_runtime": "Runtime",
        "cpu_op": "Operator",
    }
    assert is_the_same(write(tmp_path / "a.json", [one | {"cat": old.get(one["cat"], one["cat"])} for one in rows()]))


def test_steps_as_operators_with_a_space_as_in_old_files(tmp_path):
    two = [event("Operator", "ProfilerStep #1", 80, 40), event("Operator", "ProfilerStep #2", 120, 60)]
    found = of(write(tmp_path / "a.json", [*rows()[:-1], *two]))
    assert (found["profiler_steps"], found["profiler_steps_excluded"], found["num_device_rows"]) == ([1], [2], 2)


def test_amd_names(tmp_path):
    amd = [
        event("cuda_runtime", "hipExtModuleLaunchKernel", 0, 5, correlation=1),
        event("kernel", "Cijk_Alik_Bljk_BBS_BH", 10, 30, pid=2, tid=0, device=2, stream=0, correlation=1),
        event("hip_runtime", "hipMemcpyWithStream", 6, 5, correlation=2),
        event("gpu_memcpy", "CopyHostToDevice", 50, 10, pid=2, tid=0, device=2, stream=0, correlation=2, bytes=2**20),
        event("hip_runtime", "hipLaunchKernel", 12, 5, correlation=3),
        event(
            "kernel",
            "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
            70,
            10,
            pid=2,
            tid=1,
            device=2,
            stream=1,
            correlation=3,
        ),
        event("cuda_runtime", "hipDeviceSynchronize", 20, 30),
    ]
    found = of(write(tmp_path / "a.json", amd))
    assert {line["name"][:8]: (line["type"], line["category"]) for line in found["kernels"]} == {
        "Cijk_Ali": ("COMPUTATION", "matmul"),
        "CopyHost": ("MEMORY", "memory copy"),
        "ncclDevK": ("COMMUNICATION", "communication"),
    }
    assert (found["comm_us"], found["overlap_pct"], found["launches"]["num_launches"]) == (10.0, 0.0, 3)
    assert found["synchronisations"] == [{"name": "hipDeviceSynchronize", "count": 1, "sum_us": 30.0}]
    assert found["host_copies"] == {"sum_us": 10.0, "exposed_us": 10.0, "pageable_us": 0.0}


def test_triton_kernels_whose_operator_has_their_name_and_a_stream(tmp_path):
    """The host's range is none of the device's time, and the kernel is the range's."""
    name = "triton_poi_fused_add_0"
    triton = [
        event("cpu_op", name, 0, 90, stream=7, grid="grid(100,)", kernel_backend="triton"),
        event("cuda_driver", "cuLaunchKernel", 20, 5, correlation=3),
        event("kernel", name, 30, 2, pid=0, tid=7, device=0, stream=7, correlation=3),
    ]
    found = of(write(tmp_path / "a.json", triton))
    assert (found["temporal"]["span_us"], found["kernels"][0]["count"], found["launches"]["num_launches"]) == (
        2.0,
        1,
        1,
    )
    assert (found["operators"][0]["name"], found["operators"][0]["device_us"]) == (name, 2.0)


def graph():
    """One call launches three kernels of a graph, 10 us each from 50, and one launches a single kernel."""
    nodes = [
        event(
            "kernel",
            f"k{num}",
            50 + 10 * num,
            10,
            pid=0,
            tid=7,
            device=0,
            stream=7,
            correlation=1,
            **{"graph id": 3, "graph node id": 60 + num},
        )
        for num in range(3)
    ]
    return [event("cuda_runtime", "cudaGraphLaunch", 10, 20, correlation=1), *nodes, *launched("gemm", 80, 5, 35, 2)]


def test_kernels_of_a_graph_share_one_launch(tmp_path):
    found = of(write(tmp_path / "a.json", graph()))
    assert (found["temporal"]["idle_us"], found["num_device_rows"]) == (0.0, 4)
    facts = {
        key: found["launches"][key]
        for key in ("num_launches", "num_graph_launches", "num_graph_rows", "num_unlinked", "call_us_mean")
    }
    assert facts == {
        "num_launches": 1,
        "num_graph_launches": 1,
        "num_graph_rows": 3,
        "num_unlinked": 0,
        "call_us_mean": 2.0,
    }
    assert found["queues"][0]["max"] == 2  # the graph from 10 to 50, the kernel from 35 to 80
    assert [line["operator"] for line in found["launchers"]] == [None] * 4
    path = write(tmp_path / "b.json", [*graph(), event("user_annotation", "replay", 0, 32)])
    assert {line["kernel"]: line["annotation"] for line in of(path)["launchers"]} == {
        "k0": "replay",
        "k1": "replay",
        "k2": "replay",
        "gemm": None,
    }


def test_kernels_without_a_recorded_launch(tmp_path):
    """Without steps they count, and the external id still gives the operator.  Of one step those count that ran after
    its first kernel, as earlier ones are of an earlier step; of several their step is unknown.
    """
    lost = event("kernel", "lost", 40, 20, pid=0, tid=7, device=0, stream=7, correlation=77, **{"External id": 5})
    found = of(write(tmp_path / "a.json", [*rows()[:-1], lost]))
    assert (found["temporal"]["span_us"], found["launches"]["num_unlinked"]) == (125.0, 1)
    assert next(line for line in found["launchers"] if line["kernel"] == "lost")["operator"] == "aten::mm"
    of_one = [of(write(tmp_path / "a.json", [*rows(), lost | {"ts": at}])) for at in (40, 120)]
    assert [found["num_device_rows_excluded"]["not_launched"] for found in of_one] == [1, 0]
    assert [found["temporal"]["span_us"] for found in of_one] == [65.0, 65.0]
    path = write(tmp_path / "b.json", [*rows(), lost, step(2, 170, 10)])
    assert (of(path)["num_device_rows"], of(path)["num_device_rows_excluded"]) == (
        4,
        {"last_step": 0, "not_launched": 1},
    )
    assert of(path, include_last_step=True)["num_device_rows"] == 4
    assert (
        "1 device rows are not counted: their launch was not recorded"
        in document(traces.analysed([path]), "x").terminal()
    )


def test_where_no_launch_was_recorded_at_all_rows_belong_to_the_step_in_which_they_ran(tmp_path):
    path = write(
        tmp_path / "a.json",
        [one for one in rows() if one["cat"] != "cuda_runtime"]
        + [step(2, 170, 30), event("kernel", "gemm", 180, 5, pid=0, tid=7, device=0, stream=7)],
    )
    found = of(path)
    assert (
        found["num_device_rows"],
        found["steps"][0]["num_kernels"],
        found["num_device_rows_excluded"]["last_step"],
    ) == (4, 4, 1)


def test_steps_that_only_the_gpu_shows(tmp_path):
    """Everything counts, as no host says where the last one begins; the steps are those of the device."""
    on_gpu = [
        event("gpu_user_annotation", f"ProfilerStep#{num}", start, dur, pid=0, tid=7)
        for num, start, dur in ((7, 100, 25), (8, 125, 45))
    ]
    found = of(write(tmp_path / "a.json", rows()[:-1] + on_gpu))
    assert (found["num_device_rows"], found["profiler_steps"], found["profiler_steps_excluded"]) == (4, [7, 8], [])
    assert [(line["step"], line["host_us"], line["busy_us"], line["num_kernels"]) for line in found["steps"]] == [
        (7, None, 10.0, 1),
        (8, None, 25.0, 3),
    ]


def test_the_gpus_step_lags_and_does_not_move_the_window(tmp_path):
    """HTA takes the last start of either, so that the last step counts whole."""
    two = [step(1, 80, 40), step(2, 120, 60), event("gpu_user_annotation", "ProfilerStep#2", 400, 60, pid=0, tid=7)]
    found = of(write(tmp_path / "a.json", rows()[:-1] + two))
    assert (found["num_device_rows"], found["profiler_steps"]) == (2, [1])


def test_no_steps_at_all(tmp_path):
    found = of(write(tmp_path / "a.json", rows()[:-1]))
    assert (found["num_device_rows"], found["profiler_steps"], found["steps"], found["temporal"]["span_us"]) == (
        4,
        [],
        [],
        65.0,
    )


def test_steps_out_of_order_and_with_gaps(tmp_path):
    three = [step(30, 170, 10), step(9, 80, 40), step(12, 130, 30)]
    found = of(write(tmp_path / "a.json", rows()[:-1] + three))
    assert (found["profiler_steps"], found["profiler_steps_excluded"]) == ([9, 12], [30])


def test_synchronisation_rows_are_no_device_time(tmp_path):
    found = of(
        write(
            tmp_path / "a.json",
            [*rows(), event("cuda_sync", "Event Sync", 0, 500, pid=0, tid=7, stream=7, correlation=99)],
        )
    )
    assert found["temporal"]["span_us"] == 65.0


def test_missing_ranks_and_ranks_that_say_nothing(tmp_path):
    for number in (1, 3):
        write(tmp_path / f"worker{number}.json", rows(), distributedInfo={"rank": number, "world_size": "4"})
    found = traces.analysed(find(tmp_path))
    assert (list(found["ranks"]), found["overall"]["missing_ranks"]) == (["1", "3"], [0, 2])
    assert "2 of 4 ranks are missing: [0, 2]" in document(found, "x").terminal()
    (tmp_path / "two").mkdir()
    for name in ("host_a.json", "host_b.json"):
        write(tmp_path / "two" / name, rows())
    assert list(traces.analysed(find(tmp_path / "two"))["ranks"]) == ["0", "1"]


@pytest.mark.parametrize(
    "info", [None, [], "x", {"rank": None}, {"rank": "a", "world_size": -3}, {"rank": [1]}, {"world_size": 10**9}]
)
def test_odd_words_about_ranks(tmp_path, info):
    assert is_the_same(write(tmp_path / "a.json", rows(), distributedInfo=info))


def test_allocations_are_moments(tmp_path):
    """profile_memory: 100 asked for and 40 freed in mm, 30 asked for by no known operator; not the host's."""

    def moment(ts, num_bytes, device_type=1):
        return {
            "ph": "i",
            "cat": "cpu_instant_event",
            "s": "t",
            "name": "[memory]",
            "pid": 1,
            "tid": 1,
            "ts": ts,
            "args": {"Bytes": num_bytes, "Device Type": device_type, "Total Allocated": 7},
        }

    moments = [moment(89, 100), moment(90, -40), moment(70, 30), moment(89, 5000, 0)]
    assert is_the_same(write(tmp_path / "a.json", rows() + moments))
    (line,) = of(tmp_path / "a.json")["operators"]
    assert (line["allocated_bytes"], line["net_bytes"]) == (100, 60)
    assert of(write(tmp_path / "b.json", rows()))["operators"][0]["allocated_bytes"] is None


@traces.needs_shared
def test_a_real_trace_is_the_same_in_every_writing(tmp_path):
    with gzip.open(traces.SHARED / "files" / "hta_triton_example" / "triton_example.json.gz") as file:
        whole = json.load(file)
    first = of(write(tmp_path / "a.json", whole["traceEvents"]))
    for name, indent in (("b.json", 2), ("c.json.gz", None)):
        assert of(write(tmp_path / name, whole["traceEvents"], indent=indent)) | {"file": ""} == first | {"file": ""}


def test_launches_whose_kernels_the_profiler_lost_are_reported(tmp_path):
    """CUPTI before 13.1 loses the first kernels of a profile; of the last step nothing is expected."""
    lost = [event("cuda_runtime", "cudaLaunchKernel", 5 + number, 1, correlation=900 + number) for number in range(3)]
    path = write(tmp_path / "a.json", [*rows(), *lost])
    found = of(path)
    assert (found["num_launches_without_kernel"], found["num_launch_calls"] > 3) == (3, True)
    assert (
        "launches have no kernel in the trace: the profiler lost them"
        in document(traces.analysed([path]), "x").terminal()
    )
    assert of(write(tmp_path / "b.json", rows()))["num_launches_without_kernel"] == 0
    late = event("cuda_runtime", "cudaLaunchKernel", 175, 1, correlation=990)
    assert of(write(tmp_path / "c.json", [*rows(), step(2, 170, 10), late]))["num_launches_without_kernel"] == 0
    assert of(write(tmp_path / "d.json", lost))["num_launches_without_kernel"] == 0  # a trace without a device
