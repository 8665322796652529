"""Trace analysis: exact on real traces of others and on hand-made ones, and never lost on damaged ones."""

import functools
import gzip
import hashlib
import json
import os
import random

import numpy as np
import pytest
import traces
from traces import event, launched, rank_of, read_as_text, step, write

from bench.analysis.trace import critical, device_time, events, launches, source, window
from bench.analysis.trace.columns import Nest, covered_ns, merged_intervals, ns_by_combination
from bench.analysis.trace.load import find, load
from bench.cli import analyze

EXACT = json.loads((traces.SHARED / "expected_exact.json").read_text()) if traces.SHARED.is_dir() else {}
needs_shared = pytest.mark.skipif(not EXACT, reason="the real traces of others are not beside this checkout")


# ---- real traces


@functools.cache
def shared(name):
    return traces.load_all(find(traces.SHARED / "files" / name))


@needs_shared
@pytest.mark.parametrize("key", sorted(EXACT))
def test_the_temporal_breakdown_of_a_real_trace_is_exact(key):
    name, number = key.split("/")
    rank = next(rank for rank in shared(name) if rank.rank == int(number))
    rows = window.device_rows(rank)
    times = device_time.breakdown(rank, rows, device_time.types(rank, rows))
    exact = EXACT[key]["exact"]
    for part, ours in (("span",) * 2, ("idle",) * 2, ("compute",) * 2, ("noncompute", "non_compute"), ("comm",) * 2):
        assert times[f"{ours}_us"] == pytest.approx(exact[part], abs=0.5), part
    for part, ours in (("idle",) * 2, ("compute",) * 2, ("noncompute", "non_compute"), ("overlap",) * 2):
        theirs = exact[f"{part}_pct"]
        assert times[f"{ours}_pct"] == (None if theirs is None else pytest.approx(theirs, abs=0.01)), part
    assert len(rows) == exact["n"]
    assert times["idle_us"] + times["compute_us"] + times["non_compute_us"] == pytest.approx(times["span_us"], abs=1e-6)


# ---- by hand


@pytest.mark.parametrize("shift_us", [-1_000_000, -1_000, 0, 1_000_000])
def test_the_spans_of_steps_do_not_depend_on_where_the_clock_starts(tmp_path, shift_us):
    """Nothing ran before the first step, which begins on the host 50 us before its kernel."""
    shifted = [row | {"ts": row["ts"] + shift_us} for row in traces.steps_of_a_kernel(800, 1000)]
    (rank,) = traces.load_all([write(tmp_path / "a.json", shifted)])
    spans = [(number, (end_ns - begin_ns) / 1e3) for number, begin_ns, end_ns in window.device_spans(rank)]
    assert spans == [(1, 1000.0), (2, 1000.0)]


def two_streams():
    """Compute 100 to 110 and 130 to 150, communication 105 to 140 on another stream, a copy 160 to 165."""
    return [
        *launched("gemm", 100, 10, 90, 1),
        *launched("gemm", 130, 20, 92, 2),
        *launched("ncclDevKernel_AllReduce", 105, 35, 94, 3, stream=9),
        *launched("Memcpy HtoD", 160, 5, 155, 4, cat="gpu_memcpy", bytes=5 * 2**20),
    ]


def test_two_streams_by_hand(tmp_path):
    rank = rank_of(tmp_path, two_streams())
    times = {"span_us": 65.0, "idle_us": 10.0, "compute_us": 30.0, "non_compute_us": 25.0}
    assert {name: rank["temporal"][name] for name in times} == times
    assert rank["overlap_pct"] == pytest.approx(100 * 15 / 35)  # 105-110 and 130-140
    assert rank["exposed_comm_us"] == 20.0
    assert {line["type"]: line["sum_us"] for line in rank["kernel_types"]} == {
        "COMPUTATION": 15.0,
        "COMMUNICATION": 20.0,
        "MEMORY": 5.0,
        "COMPUTATION overlapping COMMUNICATION": 15.0,
    }
    gemm = next(line for line in rank["kernels"] if line["name"] == "gemm")
    assert gemm["count"] == 2 and gemm["std_us"] == pytest.approx(50**0.5)
    assert [gemm[f"{name}_us"] for name in ("sum", "mean", "min", "max")] == [30.0, 15.0, 10.0, 20.0]
    assert rank["idle"][0] == {"device": 0, "stream": 7, "host_wait_us": 10.0, "kernel_wait_us": 20.0, "other_us": 0.0}
    (copy,) = rank["copies"]
    assert copy["gib"] == pytest.approx(5 / 1024) and copy["gib_per_s"] == pytest.approx(5 / 1024 / 5e-6)
    path = rank["critical_path"]
    assert sum(path[f"{kind}_us"] for kind in critical.KINDS) == path["span_us"] == 65.0
    # the copy was called at 155, the rest ended at 150
    assert [path[f"{kind}_us"] for kind in ("memory", "host", "launch")] == [5.0, 5.0, 5.0]


def test_queue_length_and_launch_delay_by_hand(tmp_path):
    """Calls at 0 and 10, kernels at 20 (for 30) and 50: one queued from 0, two from 10, one from 20, none from 50."""
    rank = load(write(tmp_path / "a.json", [*launched("k", 20, 30, 0, 1), *launched("k", 50, 10, 10, 2)]))
    rows = window.device_rows(rank)
    (queue,) = launches.queues(rank, rows)
    assert (queue["max"], queue["mean"]) == (2, pytest.approx((10 * 1 + 10 * 2 + 30 * 1) / 50))
    figures = launches.statistics(rank, rows)
    assert figures["delay_us_mean"] == pytest.approx((18 + 38) / 2) and figures["num_launches"] == 2


def test_each_step_has_a_critical_path_of_what_its_host_launched(tmp_path):
    """Step 1 runs 10 us of gemm; step 2 10 us, a gap: the host had launched nothing until 145; and 5 us more."""
    calls = [launched("gemm", ts, 10, ts - lead, number) for number, (ts, lead) in ((1, (100, 10)), (2, (130, 5)))]
    rows = [step(1, 80, 40), step(2, 120, 40), step(3, 160, 10), *sum(calls, []), *launched("gemm", 150, 5, 145, 3)]
    paths = rank_of(tmp_path, rows)["critical_path_of_steps"]
    names = ("step", "span_us", "compute_us", "host_us", "launch_us")
    assert [[path[name] for name in names] for path in paths] == [[1, 10.0, 10.0, 0.0, 0.0], [2, 25.0, 15.0, 5.0, 5.0]]


def test_the_largest_gap_says_what_the_host_was_doing(tmp_path):
    rows = [*two_streams()[:-2], *launched("Memcpy HtoD", 160, 5, 157, 4), event("cpu_op", "aten::item", 148, 12)]
    expected = {"us": 10.0, "start_us": 50.0, "before": "gemm", "after": "Memcpy HtoD", "host": "aten::item"}
    assert rank_of(tmp_path, rows)["gaps"][0] == expected


def collectives_of(folder, rows_by_rank):
    for rank, rows in enumerate(rows_by_rank):
        write(folder / f"rank{rank}.json", rows, distributedInfo={"rank": rank, "world_size": len(rows_by_rank)})
    return traces.analysed(find(folder))["overall"]["collectives"]


def test_the_late_rank_is_the_one_with_the_shortest_collective(tmp_path):
    rows = [launched("ncclDevKernel_AllReduce", start, dur, 90, 1) for start, dur in ((100, 50), (140, 10))]
    facts = collectives_of(tmp_path, rows)
    assert facts["waits"] == [{"rank": 0, "wait_us": 40.0, "num_last": 0}, {"rank": 1, "wait_us": 0.0, "num_last": 1}]
    assert facts["worst"][0]["late_rank"] == 1


@pytest.mark.parametrize("numbers_of", ["kernels", "operators"])
def test_collectives_of_a_trace_whose_first_ones_are_cut_meet_by_their_sequence_numbers(tmp_path, numbers_of):
    """Rank 1 lacks 11 and 12 of 11 to 14, and has 15 and 16: as many of the name, so that their order says nothing."""
    durations_us, ranks = ({11: 50, 12: 40, 13: 10, 14: 20}, {13: 30, 14: 5, 15: 50, 16: 50}), []
    for by_seq in durations_us:
        ranks.append([])
        for seq, dur in by_seq.items():
            message = {"Collective name": "allreduce", "Process Group Name": "0", "Seq": seq}
            args = message if numbers_of == "kernels" else {"External id": seq}
            ranks[-1] += launched("ncclDevKernel_AllReduce", 100 * seq, dur, 100 * seq - 9, seq, **args)
            ranks[-1].append(
                event("cpu_op", "record_param_comms", 100 * seq - 10, 5, **message, **{"External id": seq})
            )
    facts = collectives_of(tmp_path, ranks)
    assert (facts["num_matched"], facts["num_unmatched"]) == (2, 4)  # by their order 4 would be, each with another
    worst = [(line["call"], line["late_rank"], line["longest_wait_us"]) for line in facts["worst"]]
    assert worst == [(13, 0, 20.0), (14, 1, 15.0)]


def test_sends_and_receives_and_names_that_one_rank_does_not_number_meet_in_their_order(tmp_path):
    ranks = []
    for rank, (number, name) in enumerate(((7, "send"), (9, "recv"))):
        rows = launched("ncclDevKernel_SendRecv", 100, 10 + rank, 90, 1, **{"Collective name": name, "Seq": number})
        args = {"Collective name": "allreduce", "Seq": 3} if rank else {}
        ranks.append(rows + launched("ncclDevKernel_AllReduce", 200, 10, 190, 2, **args))
    facts = collectives_of(tmp_path, ranks)
    assert (facts["num_matched"], facts["num_unmatched"]) == (2, 0)
    assert {line["call"] for line in facts["worst"]} == {0}


def test_two_devices_of_one_process_have_timelines_of_their_own(tmp_path):
    calls = [launched("gemm", 10 * n, 10, 2 * n, n + 1, device=n % 2) for n in range(4)]
    devices = rank_of(tmp_path, sum(calls, []))["devices"]
    assert [devices[device]["idle_us"] for device in ("0", "1")] == [10.0, 10.0]


# ---- intervals against a picture of every nanosecond


@pytest.mark.parametrize("seed", range(30))
def test_interval_arithmetic_is_that_of_a_brute_force(seed):
    draw = random.Random(seed)
    pictures, sets = [], []
    for _ in range(3):
        pairs = [(start := draw.randrange(60), start + draw.randrange(-2, 12)) for _ in range(draw.randrange(12))]
        picture = np.zeros(80, bool)
        for start, end in pairs:
            picture[start : max(start, end)] = True
        pictures.append(picture)
        sets.append(merged_intervals(*(np.array(side, np.int64) for side in (zip(*pairs) if pairs else ((), ())))))
    for picture, merged in zip(pictures, sets):
        assert covered_ns(merged) == picture.sum()
        assert (merged[0][1:] > merged[1][:-1]).all()  # what touches is one
    masks = pictures[0] * 1 + pictures[1] * 2 + pictures[2] * 4
    by_mask = {mask: n for mask in range(1, 8) if (n := int((masks == mask).sum()))}
    assert ns_by_combination(sets) == by_mask


@pytest.mark.parametrize("seed", range(20))
def test_the_innermost_range_is_that_of_a_brute_force(seed, tmp_path):
    draw = random.Random(seed)
    ranges = [(0, 200)]

    def nest(low, high, depth):
        at = low
        while depth and at + 4 < high and len(ranges) < 60:
            start = draw.randrange(at, high - 2)
            end = draw.randrange(start + 1, high)
            ranges.append((start, end))
            nest(start, end, depth - 1)
            at = end + draw.randrange(2)

    nest(0, 200, 4)
    ops = [event("cpu_op", f"op{num % 3}", start, end - start) for num, (start, end) in enumerate(ranges)]
    rank = load(write(tmp_path / "a.json", ops))
    nested = Nest(rank, np.flatnonzero(rank.is_kind(events.CPU_OP)))
    times, wanted = np.arange(0, 210_000, 500), rank.names_that("op1".__eq__)
    for name, innermost in ((None, nested.innermost(times)), ("op1", nested.innermost(times, wanted))):
        for time, row in zip(times, innermost):
            ends = (num for num, (start, end) in enumerate(ranges) if start * 1000 <= time < end * 1000)
            around = [ranges[num][1] - ranges[num][0] for num in ends if name in (None, f"op{num % 3}")]
            assert (None if row < 0 else int(rank.dur[row]) // 1000) == min(around, default=None)


# ---- every kind of file


def test_braces_quotes_and_foreign_letters_in_names_do_not_matter(tmp_path):
    names = ['a}, {"ph": "X"', '"},{"cat":"kernel', "\\", "größe ☃", 'x\\"},{\\"ph\\":', "[[[", "\x1b[2J<script>"]
    rows = [row for num, name in enumerate(names) for row in launched(name, 10 * num, 5, 0, num + 1)]
    for indent in (None, 1):
        report = traces.analysed([write(tmp_path / "a.json", rows, indent=indent)])
        assert sorted(line["name"] for line in report["ranks"]["0"]["kernels"]) == sorted(names)
    terminal, markdown = read_as_text(report, both=True)
    assert "\x1b" not in terminal and "<script>" not in markdown


def test_a_cpu_trace_has_operators_and_says_nothing_of_a_device(tmp_path):
    rank = rank_of(tmp_path, [event("cpu_op", "aten::mm", 0, 10), step(1, 0, 20)])
    assert rank["temporal"]["span_us"] is None and rank["overlap_pct"] is None and rank["advice"] == []
    assert rank["operators"][0]["cpu_us"] == 10.0
    assert "no device rows" in read_as_text(traces.analysed([tmp_path / "a.json"]))


def test_a_cut_file_is_read_as_far_as_it_goes_and_says_so(tmp_path):
    rows = [row for num in range(200) for row in launched("gemm", 10 * num, 5, 0, num + 1)]
    whole = write(tmp_path / "a.json", rows).read_bytes()
    (tmp_path / "a.json").write_bytes(whole[: len(whole) * 3 // 4])
    report = traces.analysed([tmp_path / "a.json"])
    rank = report["ranks"]["0"]
    assert rank["cut"] == "the file ends in the middle of the events" and 140 <= rank["num_device_rows"] <= 151
    assert rank["cut"] in read_as_text(report)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(whole)[:-200])
    assert load(tmp_path / "b.json.gz").cut == "the compressed data end early"
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(random.Random(0).randbytes(1000).hex().encode() + whole)[:200])
    with pytest.raises(source.NoTrace):
        load(tmp_path / "c.json.gz")


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_file_is_refused_or_read_but_never_breaks_anything(tmp_path, seed):
    draw = random.Random(seed)
    mm = event("cpu_op", "aten::mm", 0, 10, **{"Input Dims": [[2, 3], [3, 4]]})
    data = bytearray(write(tmp_path / "a.json", [step(1, 0, 50), *two_streams(), mm]).read_bytes())
    odd = [b"{", b"}", b"]", b'"', b"NaN", b"1e400", b"-", b"null", b"99999999999999999999999"]
    for _ in range(draw.randrange(1, 8)):
        place, what = draw.randrange(len(data)), draw.randrange(4)
        if what == 0:
            data[place] = draw.randrange(256)
        elif what == 1:
            del data[place : place + draw.randrange(40)]
        elif what == 2:
            data[place:place] = draw.choice(odd)
        else:
            del data[place:]
            data += b" "
    (tmp_path / "a.json").write_bytes(bytes(data))
    try:
        report = traces.analysed([tmp_path / "a.json"])
    except source.NoTrace:
        return
    json.dumps(report), read_as_text(report)


@pytest.mark.parametrize("text", ["", "hello", "{}", '{"a": 1}', "\x00\x01\x02", '{"traceEvents'])
def test_what_is_no_trace_is_one_clear_sentence(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(source.NoTrace, match="a.json: "):
        load(tmp_path / "a.json")


def test_a_file_made_to_exhaust_memory_is_left_early(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MAX_EVENT_BYTES", 2**20)
    monkeypatch.setattr(source, "BLOCK_BYTES", 2**16)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [{"name": "' + b"a" * 2**24))
    read = source.Source(tmp_path / "a.json.gz")
    assert list(read.chunks()) == [] and read.cut == "there is no end of an event in 1 MiB"
    deep, kernel = b"[" * 100_000 + b"]" * 100_000, b'{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}'
    (tmp_path / "b.json").write_bytes(b'{"traceEvents": [{"ph": "X", "args": ' + deep + b"}, " + kernel + b"]}")
    assert len(load(tmp_path / "b.json").ts) <= 1


def test_blocks_may_end_anywhere(tmp_path, monkeypatch):
    path = write(tmp_path / "a.json", two_streams(), indent=1)
    for size in (64, 65, 100, 333):
        monkeypatch.setattr(source, "BLOCK_BYTES", size)
        assert len(load(path).ts) == 8


# ---- what is said


def test_the_verb_prints_and_writes_into_a_run_folder(tmp_path, printed, capsys):
    run = tmp_path / "run"
    (run / "traces").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="it holds no trace"):
        find(run)
    write(run / "traces" / "window_rank0.json", two_streams())
    assert "gemm" in printed(analyze, run)
    assert json.loads((run / "analysis.json").read_text())["ranks"]["0"]["temporal"]["span_us"] == 65.0
    assert (run / "summary.md").read_text().startswith("# Trace analysis")
    assert analyze.main([str(run), "--json"]) == 0
    keys = {"profiler_steps", "temporal", "overlap_pct", "exposed_comm_us", "idle", "kernel_types", "kernels"}
    assert keys <= set(json.loads(capsys.readouterr().out)["ranks"]["0"])


def test_a_trace_is_not_taken_for_the_markdown_to_write(tmp_path):
    """As in `analyze --md rank0.json rank1.json`."""
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", two_streams())
    before = (tmp_path / "rank0.json").read_bytes()
    with pytest.raises(ValueError, match="rank0.json: is a trace, and would be replaced: give --md last, or --md FILE"):
        analyze.main(["--md", str(tmp_path / "rank0.json"), str(tmp_path / "rank1.json")])
    assert (tmp_path / "rank0.json").read_bytes() == before
    for _ in range(2):  # over its own, whatever it is called
        assert analyze.main([str(tmp_path / "rank1.json"), "--md", str(tmp_path / "NOTES")]) == 0


@pytest.mark.parametrize("link", ["traces", "traces/rank0.json", "rank0.json"])
def test_links_of_a_strangers_record_lead_to_no_trace_of_ours(tmp_path, link):
    ours, run = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    write(ours / "rank0.json", two_streams())
    run.mkdir()
    (run / "run.json").write_text("{}")
    if "/" in link:
        (run / "traces").mkdir()
    target = ours / "rank0.json" if "rank0" in link else ours
    (run / link).symlink_to(target)
    with pytest.raises(ValueError, match="a link leads to it, out of its record: name the file itself"):
        analyze.main([str(run)])
    assert not (run / "analysis.json").exists() and analyze.main([str(target)]) == 0
    sha256 = hashlib.sha256((ours / "rank0.json").read_bytes()).hexdigest()  # as of traces moved to a larger disk
    artifacts = [{"path": path, "sha256": sha256} for path in (link, f"{link}/rank0.json")]
    (run / "run.json").write_text(json.dumps({"artifacts": artifacts}))
    (ours / "report.html").write_text("a page that lies there too")
    assert analyze.main([str(run)]) == 0
    (run / "run.json").write_text('{"artifacts": [{"path": ["x"]}, 3]}')
    with pytest.raises(ValueError, match="a link leads to it"):
        analyze.main([str(run)])


def test_an_analysis_is_written_through_no_link_and_waits_for_no_pipe(tmp_path, capsys):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "traces").mkdir(parents=True)
    for name in ("a", "b"):
        write(run / "traces" / f"{name}_rank0.json", two_streams(), speedrun={"window": name})
    (run / "run.json").write_text("{}")
    os.mkfifo(run / "summary.md")
    (run / "windows").symlink_to(elsewhere)
    assert analyze.main([str(run)]) == 0
    said = capsys.readouterr().err
    assert "summary.md: cannot be read (it is not a regular file)" in said and f"{run}/windows: it is a link" in said
    assert (run / "analysis.json").exists() and not list(elsewhere.iterdir())


def test_kernels_are_named_as_they_are_and_their_numbers_stand_right(tmp_path):
    names = ["reduce_kernel<128, 4, Op<float>>", "Memcpy HtoD (Pinned -> Device)", "[red]x[/red] :smile:"]
    rows = [row for num, name in enumerate(names) for row in launched(name, 2000 * num, 10**num, 0, num + 1)]
    lines = read_as_text(traces.analysed([write(tmp_path / "a.json", rows)])).splitlines()
    begin = lines.index("Kernels") + 4
    assert [line[: len(names[0])].strip() for line in lines[begin : begin + 3]] == names[::-1]
    ends = {line.index(ms) + len(ms) for line, ms in zip(lines[begin : begin + 3], ("0.100", "0.010", "0.001"))}
    assert ends == {lines[begin - 2].index(" ms ") + len(" ms")}
