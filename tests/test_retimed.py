"""Gains that were timed again through the graph of dependencies, against schedules whose rules are known.

A made-up machine runs a program of kernels on streams, event waits, copies that block and collectives between ranks.
The program is traced, one thing in it is made faster, and it runs again: the second run says what the gain is.
"""

import gzip
import json
import random
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pytest
from cases import slow
from traces import SHARED, event, load_all, needs_shared, step, write

from bench.analysis.explain import account, device_steps, document, perfetto, retimed
from bench.analysis.explain.parts import Change
from bench.analysis.trace import categories, load, skew, window
from bench.cli import explain as verb

CALL_US, LATENCY_US = 4, 5
LARGE = slow("param_dlrm_8rank")
H100 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}


class Launch(NamedTuple):
    """host_us: the host's own work before it; after: the kernel of another stream that it waits for; is_read: the host
    waits until it is done; is_collective: it ends on both ranks together."""

    host_us: int
    stream: int
    us: int
    after: int | None = None
    is_read: bool = False
    is_collective: bool = False


def played(programs: Mapping[int, list[Launch]], faster: dict[tuple[int, int], int]) -> dict[int, list[dict]]:
    """Returns {rank: events} of {rank: program}.  faster: {(rank, launch): us that are taken off its kernel}."""
    events = {rank: [] for rank in programs}
    host = dict.fromkeys(programs, 10)
    free: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], int] = {}
    for index in range(len(next(iter(programs.values())))):
        begun = {}
        for rank, program in programs.items():
            launch = program[index]
            host[rank] += launch.host_us
            if launch.after is not None:
                events[rank].append(event("cuda_runtime", "cudaStreamWaitEvent", host[rank], 1))
                host[rank] += 1
            begun[rank] = host[rank]
            start = max(host[rank] + LATENCY_US, free.get((rank, launch.stream), 0))
            if launch.after is not None:
                start = max(start, ends[rank, launch.after])
            ends[rank, index] = start + launch.us - faster.get((rank, index), 0)
            free[rank, launch.stream] = start
        if programs[0][index].is_collective:
            last = max(free[rank, programs[rank][index].stream] for rank in programs)
            for rank in programs:
                ends[rank, index] = last + programs[rank][index].us
        for rank, program in programs.items():
            launch, start = program[index], free[rank, program[index].stream]
            free[rank, launch.stream] = ends[rank, index]
            call_us = ends[rank, index] + 2 - begun[rank] if launch.is_read else CALL_US
            name = "nccl_all_reduce" if launch.is_collective else f"kernel_{index}"
            ids = {"correlation": index + 1}
            call = "cudaMemcpy" if launch.is_read else "cudaLaunchKernel"
            events[rank].append(event("cuda_runtime", call, begun[rank], call_us, **ids))
            placed = {"device": 0, "stream": launch.stream}
            kernel = event("kernel", name, start, ends[rank, index] - start, **ids, **placed)
            events[rank].append(kernel)
            host[rank] = begun[rank] + call_us
    for rank in programs:
        events[rank].append(step(1, 0, host[rank] + 1))
    return events


def traced(folder, programs, faster) -> tuple[retimed.Graph, list]:
    folder.mkdir(exist_ok=True)
    files = [
        write(folder / f"rank{rank}.json", events, **H100, distributedInfo={"rank": rank, "world_size": len(programs)})
        for rank, events in played(programs, faster).items()
    ]
    ranks = load_all(files)
    spans = {rank.rank: (window.device_spans(rank)[0][1], window.device_spans(rank)[-1][2]) for rank in ranks}
    rows = {rank.rank: device_steps.counted_rows(rank, categories.RULES) for rank in ranks}
    return retimed.Graph(ranks, spans, skew.waits(rows)[0]), ranks


def a_program(chance: random.Random, num: int) -> list[Launch]:
    program = []
    for index in range(num):
        stream = chance.choice((7, 7, 7, 20))
        others = [before for before in range(index) if program[before].stream != stream]
        after = others[-1] if others and chance.random() < 0.3 else None
        is_read = chance.random() < 0.05
        program.append(Launch(chance.choice((2, 5, 5, 60)), stream, chance.randint(5, 60), after, is_read))
    return program


def test_a_faster_kernel_gains_what_the_program_gains_when_it_runs_again(tmp_path):
    """What held nothing up is not in a trace, so a few gains are wrong; all of a kernel's time is wrong far more."""
    traced_ns, foretold, true = [], [], []
    for seed in range(8):
        chance = random.Random(seed)
        programs = {0: a_program(chance, 60)}
        graph, [rank] = traced(tmp_path, programs, {})
        rows = sorted(graph.devices[0].ends, key=lambda row: rank.correlation[row])
        changed = [index for index in range(60) if programs[0][index].us > 20]
        taken_ns = [programs[0][index].us // 2 * 1000 for index in changed]
        sets = [{0: [Change(rows[index], ns)]} for index, ns in zip(changed, taken_ns)]
        traced_ns += taken_ns
        foretold += graph.saved_ns(sets)[0].tolist()
        for index, ns in zip(changed, taken_ns):
            again, _ = traced(tmp_path, programs, {(0, index): ns // 1000})
            true.append(graph.at_ns[graph.devices[0].last] - again.at_ns[again.devices[0].last])
    error = np.abs(np.subtract(foretold, true)).mean()
    assert error < 0.05 * np.mean(traced_ns) and error < 0.15 * np.abs(np.subtract(traced_ns, true)).mean()
    assert np.equal(foretold, true).mean() > 0.9


def test_what_the_host_does_between_launches_counts_only_where_the_device_waits_for_it(tmp_path):
    slow_host = [Launch(60, 7, 10) for _ in range(10)]
    graph, _ = traced(tmp_path / "a", {0: slow_host}, {})
    begin_ns = 10_000 + 3 * 64_000  # the fourth launch comes 60 us of work after the third one's call
    assert graph.saved_ns([{0: [Change(None, 50_000, begin_ns=begin_ns)]}])[0].tolist() == [50_000]
    slow_device = [Launch(5, 7, 60) for _ in range(10)]
    graph, _ = traced(tmp_path / "b", {0: slow_device}, {})
    assert graph.saved_ns([{0: [Change(None, 5_000, begin_ns=10_000 + 4 * 9_000)]}])[0].tolist() == [0]


def test_a_rank_that_is_early_gains_nothing_and_the_late_one_gains_for_both(tmp_path):
    early, late = ([Launch(2, 7, us), Launch(2, 7, 20, is_collective=True), Launch(2, 7, 5)] for us in (50, 80))
    graph, ranks = traced(tmp_path, {0: early, 1: late}, {})
    rows = {rank.rank: sorted(graph.devices[rank.rank].ends) for rank in ranks}
    first = {
        number: next(row for row in rows[number] if rank.names[rank.name[row]] == "kernel_0")
        for number, rank in zip(rows, ranks)
    }
    early_change = {0: [Change(first[0], 20_000)]}
    late_change = {1: [Change(first[1], 20_000)]}
    more_of_late = {1: [Change(first[1], 40_000)]}
    saved_us = graph.saved_ns([early_change, late_change, more_of_late]) // 1000
    assert saved_us.tolist() == [[0, 20, 30], [0, 20, 30]]  # beyond 30 us the other rank is the late one


@needs_shared
@pytest.mark.parametrize("name", ["modded_8xh100", "tl_h100_qwen", "hta_trace_diff_test", LARGE])
def test_an_unchanged_graph_gives_the_recorded_steps_to_the_nanosecond(name):
    ranks = [rank for rank in load_all(load.find(SHARED / "files" / name)) if len(rank.device_rows())]
    spans = {rank.rank: (window.device_spans(rank)[0][1], window.device_spans(rank)[-1][2]) for rank in ranks}
    rows = {rank.rank: device_steps.counted_rows(rank, categories.RULES) for rank in ranks}
    graph = retimed.of(ranks, spans, skew.waits(rows)[0])
    assert graph.ends_ns([{}])[:, 0].tolist() == [end for _, end in spans.values()]
    nothing_left = [{number: [Change(row, 10**12) for row in device.ends] for number, device in graph.devices.items()}]
    assert graph.saved_ns(nothing_left).sum() > 0


@needs_shared
@pytest.mark.parametrize("name", ["modded_8xh100", LARGE])
@pytest.mark.slow
def test_a_gain_above_a_lines_own_time_names_the_rank_with_most_of_it(name):
    explanation = account.accounts_of(load_all(load.find(SHARED / "files" / name)))[1]
    above = [line for line in explanation["next"] if line["gain_ms"] > line["most_ms"] * (1 + 1e-9)]
    shown = str(document.from_accounts({name: explanation}))
    assert above and shown.count("for which the others wait") == len(above)
    most = [line["of_rank"][0] for line in above]  # not the rank whose time alone gains most, which is 7 in DLRM's
    assert most == {"modded_8xh100": [1, 1], "param_dlrm_8rank": [6, 7, 7, 5]}[name]
    for line in above:
        rank, own_ms = line["of_rank"]
        assert line["gain_ms"] <= own_ms and f"; up to {own_ms:.3f} on rank {rank}, for which" in shown


@needs_shared
@pytest.mark.parametrize("name, all_us", [("tl_h100_qwen/Qwen*", 35_183.362), ("modded_8xh100/rank1*", 127_573.797)])
def test_an_annotated_trace_keeps_every_event_and_its_account_tiles_each_step(tmp_path, name, all_us):
    trace = next((SHARED / "files").glob(name))
    assert verb.main([str(trace), "--perfetto", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    before, after = (json.loads(gzip.decompress(file.read_bytes())) for file in (trace, path))
    assert after["traceEvents"][: len(before["traceEvents"])] == before["traceEvents"]
    assert before | {"traceEvents": []} == after | {"traceEvents": []}
    added = after["traceEvents"][len(before["traceEvents"]) :]
    slices = [event for event in added if event.get("tid") == perfetto.ACCOUNT]
    assert sum(event["dur"] for event in slices) == pytest.approx(all_us)
    ends = [event["ts"] + event["dur"] for event in slices]
    assert all(begin["ts"] == pytest.approx(end, abs=0.01) for begin, end in zip(slices[1:], ends))
    path_us = sum(event["dur"] for event in added if event.get("tid") == perfetto.PATH)
    assert 0.95 * all_us < path_us <= all_us + 1
    rows = {(event["pid"], event["tid"]) for event in before["traceEvents"] if event.get("cat") == "kernel"}
    sent, met = ([event for event in added if event["ph"] == phase] for phase in "sf")
    assert sent and {(event["pid"], event["tid"]) for event in sent + met} <= rows
    assert all(a["id"] == b["id"] and a["ts"] < b["ts"] for a, b in zip(sent, met))
    first, again = (account.accounts_of(load_all([file]))[1] for file in (trace, path))
    assert first["parts"] == again["parts"] and first["next"] == again["next"]
    for number, line in enumerate(first["next"][: perfetto.NUM_RANKED], start=1):
        us = sum(event["dur"] for event in added if str(event.get("tid")).startswith(f"4 ranking, {number}:"))
        assert us >= 1e3 * first["num_steps"] * line["most_ms"] * (1 - 1e-6), line  # more where a bound divides it


def test_a_page_of_a_trace_names_no_private_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "zaphod"))
    name = f"{tmp_path}/zaphod/proj/train.py(12): step"
    events = [
        step(1, 0, 100),
        event("python_function", name, 1, 90),
        event("cuda_runtime", "cudaLaunchKernel", 5, 3, correlation=1),
    ]
    write(tmp_path / "rank0.json.gz", [*events, event("kernel", "k", 10, 20, correlation=1)])
    assert verb.main([str(tmp_path / "rank0.json.gz"), "--html", str(tmp_path / "page.html")]) == 0
    rank = load.load(tmp_path / "rank0.json.gz")
    assert "~/proj/train.py(12): step" in rank.names and "zaphod" not in (tmp_path / "page.html").read_text()


def test_an_annotated_trace_never_takes_the_place_of_the_trace(tmp_path):
    write(tmp_path / "rank0.json.gz", [step(1, 0, 100), event("kernel", "k", 10, 20, correlation=1)])
    before = (tmp_path / "rank0.json.gz").read_bytes()
    with pytest.raises(ValueError, match="name another folder"):
        verb.main([str(tmp_path / "rank0.json.gz"), "--perfetto", str(tmp_path)])
    assert (tmp_path / "rank0.json.gz").read_bytes() == before


def test_an_annotated_trace_replaces_an_annotated_trace_alone_and_a_folder_that_cannot_be_written_is_said(tmp_path):
    write(tmp_path / "rank0.json.gz", [step(1, 0, 100), event("kernel", "k", 10, 20, correlation=1)])
    (tmp_path / "private").write_text("mine")
    (tmp_path / "out").mkdir()
    annotated = tmp_path / "out" / "rank0.json.gz"
    for _ in range(2):
        assert verb.main([str(tmp_path / "rank0.json.gz"), "--perfetto", str(tmp_path / "out")]) == 0
    for is_link in (True, False):
        annotated.unlink()
        if is_link:
            annotated.symlink_to("../private")
        else:
            annotated.write_text("mine")  # another job's
        with pytest.raises(
            ValueError, match="would be replaced, and has no mark of this program .*; remove it, or name another path"
        ):
            verb.main([str(tmp_path / "rank0.json.gz"), "--perfetto", str(tmp_path / "out")])
    assert (tmp_path / "private").read_text() == annotated.read_text() == "mine"
    with pytest.raises(ValueError, match="cannot be written .File exists."):
        verb.main([str(tmp_path / "rank0.json.gz"), "--perfetto", str(tmp_path / "private")])
