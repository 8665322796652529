"""Peak memory of each phase: what is read, what is left alone, and what all ranks say together."""

import fake_cuda
import pytest
import real_runs
from fake_cuda import context
from real_runs import TWO, run_json, steps

from bench.analysis.memory import pickles
from bench.training.instruments import memory
from bench.training.instruments.base import Instrument, InstrumentSet
from bench.training.memory import CudaPeaks, ProcessPeaks

GIB = 2**30


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


def watched(instrument):
    instrument.name = "memory"
    return InstrumentSet([instrument])


# ---- peaks


def test_a_stretchs_peak_is_its_own_and_the_whole_forgets_none(cuda):
    peaks = CudaPeaks(0)
    cuda.peak(allocated=7 * GIB)
    cuda.peak(allocated=1 * GIB)
    peaks.reset()
    cuda.peak(allocated=3 * GIB, active=4 * GIB, reserved=6 * GIB)
    cuda.peak(allocated=2 * GIB, active=2 * GIB)
    assert peaks.split()["peak_bytes"] == {"allocated": 3 * GIB, "active": 4 * GIB, "reserved": 6 * GIB}
    assert peaks.split()["peak_bytes"] == {"allocated": 2 * GIB, "active": 2 * GIB, "reserved": 6 * GIB}
    assert peaks.whole_gib() == {"allocated": 3.0, "active": 4.0, "reserved": 6.0}


def proc(folder, now_kib, highest_kib):
    (folder / "status").write_text(f"Name:\tpython\nVmHWM:\t{highest_kib} kB\nVmRSS:\t{now_kib} kB\n")
    return ProcessPeaks(str(folder))


def test_where_linux_forgets_no_peak_that_of_the_process_so_far_counts(tmp_path):
    peaks = proc(tmp_path, 100, 300)
    (tmp_path / "clear_refs").mkdir()  # cannot be written
    for highest_kib in (300, 400):
        proc(tmp_path, 90, highest_kib)
        assert peaks.split()["peak_bytes"] == {"rss": highest_kib * 1024}
    assert peaks.whole_gib() == {"rss": 400 * 1024 / GIB}


def test_where_linux_forgets_a_peak_the_highest_since_then_counts(tmp_path):
    peaks = proc(tmp_path, 100, 300)
    peaks.split()
    assert (tmp_path / "clear_refs").read_text() == "5"
    proc(tmp_path, 100, 150)
    assert peaks.split()["peak_bytes"] == {"rss": 150 * 1024}
    assert peaks.whole_gib() == {"rss": 300 * 1024 / GIB}


def test_a_real_process_is_seen_to_grow_and_its_peak_to_be_forgotten():
    peaks = ProcessPeaks()
    peaks.split()
    before = peaks.now_bytes()
    held = bytearray(64 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    del held
    grown = peaks.split()["peak_bytes"]["rss"]
    assert grown >= before + 50 * 2**20
    assert peaks.whole_gib()["rss"] * GIB >= grown


# ---- the instrument memory


def run_phases(instrument, cuda, train_gib, val_gib, num_rounds=2):
    watch = watched(instrument)
    watch.on_build_start()
    cuda.peak(allocated=1 * GIB, reserved=2 * GIB)
    watch.on_build_end()
    watch.on_warmup_start()
    cuda.peak(allocated=9 * GIB)
    cuda.peak(allocated=1 * GIB)
    watch.on_warmup_end()
    instrument.context.peaks.reset()
    watch.on_run_start()
    for number in range(num_rounds):
        watch.on_phase("validation")
        cuda.peak(allocated=val_gib * GIB)
        cuda.peak(allocated=1 * GIB)
        watch.on_validation(number, 4.0, 1.0)
        watch.on_step_start(number)
        watch.on_phase("forward")
        cuda.peak(allocated=(train_gib + number) * GIB)
        cuda.peak(allocated=1 * GIB)
        watch.on_step_end(number)
    watch.on_run_end()
    return watch


def test_each_phase_has_its_own_peak_and_the_peak_of_the_run_stays_known(cuda, tmp_path):
    where, events, _ = context(tmp_path, peaks=CudaPeaks(0))
    instrument = memory.INSTRUMENT(where)
    run_phases(instrument, cuda, train_gib=3, val_gib=5)
    summary = instrument.summary()
    assert summary["what"] == "CUDA allocator" and summary["total_gib"] == 80.0
    peaks = {phase: summary[f"{phase}_peak_allocated_gib"] for phase in ("build", "warmup", "train", "validation")}
    assert peaks == {"build": 1.0, "warmup": 9.0, "train": 4.0, "validation": 5.0}
    assert summary["train_num_alloc_retries"] == 0 and events == []
    assert where.peaks.whole_gib()["allocated"] == 5.0  # of the run: what run.py records, without the warm-up


def test_a_retry_is_reported_with_its_step_and_what_that_step_took_longer(cuda, tmp_path, monkeypatch):
    now_ns = 0
    monkeypatch.setattr(memory.time, "perf_counter_ns", lambda: now_ns)
    where, events, _ = context(tmp_path, num_steps=20, peaks=CudaPeaks(0))
    instrument = memory.INSTRUMENT(where)
    cuda.stats["num_alloc_retries"] = 7  # of the warm-up: not reported again
    instrument.on_run_start()
    reads = cuda.num_reads
    for step in range(20):
        instrument.on_step_start(step)
        now_ns += 50_000_000 if step == 12 else 10_000_000
        cuda.stats["num_alloc_retries"] += 2 if step == 12 else 0
        instrument.on_step_end(step)
    assert cuda.num_reads - reads == 3 + 1  # the first three steps and the slow one: the others cost no look
    assert events == [{"event": "allocator_retry", "step": 13, "count": 2, "ms": pytest.approx(40.0)}]
    instrument.on_run_end()
    assert instrument.summary()["train_num_alloc_retries"] == 2 and len(events) == 1


def test_a_retry_in_a_step_that_was_not_slow_is_reported_without_a_step(cuda, tmp_path):
    where, events, _ = context(tmp_path, peaks=CudaPeaks(0))
    instrument = memory.INSTRUMENT(where)
    instrument.on_run_start()
    cuda.stats["num_alloc_retries"] = 1
    instrument.on_phase("validation")
    assert events == [{"event": "allocator_retry", "step": None, "count": 1, "ms": None}]


def test_over_ranks_the_largest_and_the_smallest_peak_are_reported_and_counts_added_up(cuda, tmp_path):
    instrument = memory.INSTRUMENT(context(tmp_path)[0])
    shared = {"what": "CUDA allocator", "total_gib": 80.0, "train_num_ooms": 1}
    ranks = [{**shared, "train_peak_allocated_gib": gib} for gib in (3.0, 5.0, 4.0)]
    peaks = {"train_peak_allocated_gib": 5.0, "train_peak_allocated_gib_min": 3.0, "fullest_rank": 1}
    assert instrument.merge([*ranks, {}]) == shared | {"train_num_ooms": 3} | peaks
    assert instrument.merge([{}, {}]) == {}


def test_when_the_run_fails_what_each_phase_needed_is_an_event(cuda, tmp_path):
    where, events, _ = context(tmp_path, peaks=CudaPeaks(0))
    instrument = memory.INSTRUMENT(where)
    instrument.on_run_start()
    cuda.peak(allocated=79 * GIB)
    instrument.on_failure(RuntimeError("out of memory"))
    assert events[0]["event"] == "memory_at_failure" and events[0]["train_peak_allocated_gib"] == 79.0


def test_a_merge_that_fails_is_a_warning_that_reaches_rank_0(tmp_path):
    class Odd(Instrument):
        def merge(self, summaries):
            raise RuntimeError("no")

    odd, plain = Odd(context(tmp_path)[0]), Instrument(context(tmp_path)[0])
    odd.name, plain.name = "odd", "plain"
    watch = InstrumentSet([odd, plain])
    by_rank = [{"odd": {"a": 1}, "plain": {"b": 1}}, {"odd": {"a": 2}, "plain": {"b": 2}, "only_there": {"c": 3}}]
    assert watch.merge(by_rank) == {"odd": {"a": 1}, "plain": {"b": 1}}
    assert watch.warnings == [{"instrument": "odd", "edge": "merge", "error": "RuntimeError: no"}]


# ---- a real run


@pytest.mark.slow
def test_on_two_cpu_ranks_both_are_recorded_and_no_loss_changes(results_dir, two_rank_run):
    folder = real_runs.run(results_dir, "seed=5", *TWO, "instruments=[memory,memory_history]")
    run = run_json(folder)
    assert [row["train_loss"] for row in steps(folder)] == [row["train_loss"] for row in steps(two_rank_run)]
    summary = run["instrument_summaries"]["memory"]
    assert summary["what"] == "resident set of the process" and summary["fullest_rank"] in (0, 1)
    for phase in ("build", "warmup", "train", "validation"):
        least, most = summary[f"{phase}_peak_rss_gib_min"], summary[f"{phase}_peak_rss_gib"]
        assert 0 < least <= most <= run["metrics"]["peak_mem_gib"] + 1e-3
    (window,) = run["instrument_summaries"]["memory_history"]["windows"]
    assert window["ranks"] == [0, 1] and window["status"] == "recorded"
    expected = ["", "", "", "memory_history", "memory_history", "memory_history", ""]
    assert [row["flags"] for row in steps(folder)] == expected
    for rank in (0, 1):
        samples = pickles.load_rss(folder / "memory" / f"steps_rank{rank}.rss.json")
        phases = ["data", "forward", "backward", "optimizer"]
        marks = [name for _, name in samples["marks"]]
        assert marks == ["step 3", *phases, "validation", "step 4", *phases, "end"]
    assert run["warnings"] == []
