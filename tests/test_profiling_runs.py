"""Runs with each recipe: the losses of a run without, bit for bit, and the files that were promised, each opened."""

import json
import os
import subprocess
import sys

import pytest
import real_runs
import traces
from profiled import names, outside_of_steps, read, step_names

from bench.analysis.trace import load
from bench.analysis.trace.text import document

pytestmark = pytest.mark.slow
COMMON = ("goal.num_steps=15", "goal.val_every_steps=8", "hardware.num_processes=2", "instruments=[regions]")
STAGES = ("stage1-model_init", "stage2-eval_bpb", "stage3-training_microsteps", "stage4-optimizer_step")


@pytest.fixture(scope="module")
def run_with(tmp_path_factory):
    """run_with(recipe) returns the folder of its run, which is made when it is first requested."""
    folders = {}

    def of(recipe):
        if recipe not in folders:
            results = tmp_path_factory.mktemp("results")
            overrides = {"plain": (), "stages": ("--enable_profiling=True",)}.get(recipe, (f"profile={recipe}",))
            folders[recipe] = real_runs.run(results, *COMMON, *overrides)
        return folders[recipe]

    return of


def flagged(folder):
    return [int(row["step"]) for row in real_runs.steps(folder) if row["flags"]]


def recipe_of(folder, instrument):
    run = real_runs.run_json(folder)
    assert not [warning for warning in run["warnings"] if warning["instrument"] == instrument]
    return run, run["instrument_summaries"][instrument]


def test_the_modded_recipe_traces_every_rank_and_changes_no_loss(run_with):
    folder = run_with("modded")
    assert real_runs.losses(folder) == real_runs.losses(run_with("plain"))
    for rank in range(2):
        trace = read(folder / "traces" / f"modded_rank{rank}.pt.trace.json.gz")
        assert step_names(trace) == [f"ProfilerStep#{step}" for step in (11, 12, 13, 14)]
        assert len(trace["traceEvents"]) > 50 and outside_of_steps(trace) == []
        assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (rank, 2)
        assert {"data", "forward", "backward", "optimizer"} <= set(names(trace))
        assert (folder / "traces" / "ops" / f"modded_rank{rank}.json").exists()
    run, summary = recipe_of(folder, "trace")
    window = summary["modded"]
    assert (window["status"], window["steps"], window["num_events"] > 50) == ("recorded", [11, 14], True)
    assert window["profiled_step_ms"] > 0 and window["other_step_ms"] > 0 and window["cost_pct"] is not None
    assert flagged(folder) == list(range(6, 16))  # warm-up from 6; in 15 the ranks may still wait for each other
    assert run["metrics"]["num_flagged_steps"] == 10
    assert {file["role"] for file in run["artifacts"] if file["path"].startswith("traces/")} == {"trace"}


def test_a_speedrun_under_a_profiler_is_one_run_that_stops_after_its_window(run_with, tmp_path):
    arguments = ["speedrun", *real_runs.SHORT, *COMMON, "profile=modded", "profile.stop_after_window=true"]
    done = real_runs.bench(tmp_path, *arguments, "seed=0", code=0)
    assert "one profiled run, which is not eligible" in done.stdout and "verdict" not in done.stdout
    (folder,) = real_runs.folders(tmp_path)
    assert real_runs.losses(folder) == real_runs.losses(run_with("plain"))[:15]  # of 15 steps: no last validation
    run, summary = recipe_of(folder, "trace")
    assert (run["status"], run["failure"]["kind"], run["failure"]["step"]) == ("stopped", "stopped", 14)
    assert "stopped at step 14: the profiler's window ended" in done.stdout
    assert (summary["modded"]["status"], summary["modded"]["steps"]) == ("recorded", [11, 14])
    assert len(read(folder / "traces" / "modded_rank1.pt.trace.json.gz")["traceEvents"]) > 50
    assert (run["validity"], run["validity_reasons"]) == ("invalid", ["the run did not complete"])
    rows = json.loads(real_runs.bench(tmp_path, "table", str(tmp_path), "--group", "--json").stdout)
    assert [(row["n"], row["num_stopped"], row["train_s_mean"]) for row in rows] == [(0, 1, None)]


def test_the_traces_of_both_ranks_are_analysed(run_with):
    folder = run_with("modded")
    report = traces.analysed(load.find(folder))
    assert set(report["ranks"]) == {"0", "1"} and report["overall"]["missing_ranks"] == []
    for rank in report["ranks"].values():
        assert (rank["profiler_steps"], rank["profiler_steps_excluded"]) == ([11, 12, 13], [14]) and rank["cut"] is None
        assert rank["num_bad_events"] == 0
        phases = {line["phase"]: line["host_us"] for line in rank["phases"]}
        assert phases["backward"] > phases["data"] > 0
        assert rank["operators"][0]["self_cpu_us"] == max(line["self_cpu_us"] for line in rank["operators"])
    assert "aten::mm" in document(report, "x").terminal() and "no device rows" in document(report, "x").terminal()


def test_kempners_window_writes_its_summary_and_changes_no_loss(run_with):
    folder = run_with("window")
    assert real_runs.losses(folder) == real_runs.losses(run_with("plain"))
    traces = folder / "traces" / "profiler_traces"
    for rank in range(2):
        trace = read(traces / f"window_rank{rank}.pt.trace.json.gz")
        assert step_names(trace) == ["ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"]
        assert len(trace["traceEvents"]) > 50 and outside_of_steps(trace) == []
    summary = (traces / "summary.md").read_text()
    assert "# Profiling Summary" in summary and "| MatMul/GEMM |" in summary and "| aten::mm |" in summary
    run, windows = recipe_of(folder, "window")
    assert windows["window"]["steps"] == [6, 8] and len(windows["window"]["breakdown"]) == 13
    assert flagged(folder) == [5, 6, 7, 8, 9]
    assert run["instruments"]["window"]["start_step"] == 5
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    expected = [("profile_start", 0), ("profile_stop", 0), ("profile_start", 1), ("profile_stop", 1)]
    assert [(event["event"], event["rank"]) for event in events if event["event"].startswith("profile_")] == expected


def test_nanochats_stages_leave_their_files_and_change_no_loss(run_with):
    folder = run_with("stages")
    assert real_runs.losses(folder) == real_runs.losses(run_with("plain"))
    (stages,) = (folder / "traces").iterdir()
    assert stages.name == folder.name[:16].replace("T", "_").strip("Z")
    for stage in STAGES:
        assert len(read(stages / f"{stage}_trace.json")["traceEvents"]) > 50
        html = (stages / f"{stage}_memory_timeline.html").read_text()
        assert '<script type="application/json" id="charts">' in html
        assert "default-src 'none'" in html  # it opens offline: nothing is fetched
    _, summary = recipe_of(folder, "stages")
    assert {phase: entry["status"] for phase, entry in summary.items()} == dict.fromkeys(
        ("model_init", "eval_bpb", "training_microsteps", "optimizer_step"), "recorded"
    )
    log = (folder / "logs" / "rank0.log").read_text()
    assert "[PROFILER:model_init] recording" in log
    assert "\033" not in log
    assert flagged(folder) == [1, 2]
    assert real_runs.run_json(folder)["command"][-1] == "--enable_profiling=True"


LOAD = """
import logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
steps = [int(step) for step in analysis.get_profiler_steps()]
print(sorted(analysis.t.traces), steps, min(map(len, analysis.t.traces.values())))
"""


def test_holistic_trace_analysis_loads_the_traces_of_all_ranks(run_with):
    """The Python in SPEEDRUN_HTA_PYTHON, or this one, needs traceinsight, the library's name on PyPI."""
    python = os.environ.get("SPEEDRUN_HTA_PYTHON", sys.executable)
    if subprocess.run([python, "-W", "ignore", "-c", "import hta"], capture_output=True).returncode:
        pytest.skip("needs traceinsight: name a Python that has it in SPEEDRUN_HTA_PYTHON")
    command = [python, "-W", "ignore", "-c", LOAD, run_with("modded") / "traces"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    ranks, steps, num_events = done.stdout.strip().rsplit("\n")[-1].replace("] ", "]|").split("|")
    assert (ranks, steps) == ("[0, 1]", "[11, 12, 13]")  # the last step is excluded, as everywhere
    assert int(num_events) > 50
