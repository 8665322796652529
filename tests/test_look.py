"""The look after the race: what it leaves, that it changes no number, and that no run is lost to it."""

import errno
import gzip
import json
import signal
import time

import pytest
import real_runs
import scripted
from cases import slow

from bench.base.paths import REPO
from bench.base.reading import yaml_file
from bench.config import compose, identity, schema
from bench.launch import after_race, prepare
from bench.launch.script import script_look, trace_files
from bench.record import failures, run_folder
from bench.training import gather_result, look

SAVED = "checkpoint.save=true"
FILES = [
    "look_rank0.pt.trace.json.gz",
    "ops/look_account.json",
    "ops/look_account.txt",
    "ops/look_rank0.json",
    "ops/look_rank0.txt",
]
# a model that ends its rank in the look: when the result of the run has been written
ENDING = """
import os, signal, sys, time
from models.gpt2 import GPT2
class Net(GPT2):
    def forward(self, tokens_BT, targets_BT):
        if os.path.exists(os.path.join(sys.argv[-1], ".result.tmp")):
            {end}
        return super().forward(tokens_BT, targets_BT)
"""


def losses(folder):
    names = ("step", "train_loss", "val_loss", "flags", "lr")
    return [tuple(row[name] for name in names) for row in real_runs.steps(folder)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(a run without a look, the same with one)."""
    results = tmp_path_factory.mktemp("results")
    overrides = ["hardware.num_threads=1", SAVED, "seed=4"]
    return real_runs.run(results, *overrides, "look=off"), real_runs.run(results, *overrides, "look=on")


def test_a_look_leaves_a_trace_tables_a_memory_page_and_an_account(pair):
    folder, run = pair[1], real_runs.run_json(pair[1])
    assert (
        sorted(p.relative_to(folder / "traces").as_posix() for p in folder.glob("traces/**/*") if p.is_file()) == FILES
    )
    assert (folder / "memory" / "look_rank0.html").read_text().count("Alive at the peak") == 1
    assert run["look"]["status"] == "recorded" and run["look"]["steps"] == [9, 11]  # 6 steps, waits 1, warms up 1
    with gzip.open(folder / "traces" / FILES[0], "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"ProfilerStep#9", "ProfilerStep#11"} <= names and "ProfilerStep#8" not in names
    assert (
        run["look"]["next"][0]["gain_ms"] > 0
        and "Largest possible savings" in (folder / "traces" / FILES[2]).read_text()
    )
    assert run["warnings"] == []
    assert {file["path"] for file in run["artifacts"]} >= {f"traces/{name}" for name in FILES} | {
        "memory/look_rank0.html"
    }


def tensors(folder):
    """The bytes of the weights: what follows the header, whose length stands in the first eight bytes."""
    file = (folder / "checkpoint" / "weights.safetensors").read_bytes()
    return file[8 + int.from_bytes(file[:8], "little") :]


def test_no_number_of_the_run_is_of_the_look(pair):
    without, looked = map(real_runs.run_json, pair)
    assert "look" not in without and not (pair[0] / "traces").exists()
    assert losses(pair[0]) == losses(pair[1]) and len(losses(pair[1])) == 7
    assert tensors(pair[0]) == tensors(pair[1])
    for name in ("config_id", "instruments", "timing_protocol", "deviations"):
        assert without[name] == looked[name]
    assert without["metrics"].keys() == looked["metrics"].keys() and looked["metrics"]["num_flagged_steps"] == 0
    events = [
        [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()] for folder in pair
    ]
    assert set(events[1]) <= set(events[0]) | {"stall", "gc"}
    assert looked["measured"]["wall_s"] > looked["metrics"]["train_s"]


def test_a_record_with_a_look_verifies_and_names_no_private_path(pair):
    real_runs.bench(pair[1].parents[1], "verify", str(pair[1]), code=0)
    for path in pair[1].glob("traces/**/*.*"):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert str(real_runs.REPO).encode() not in text, path
    assert str(real_runs.REPO) not in (pair[1] / "memory" / "look_rank0.html").read_text()


@pytest.mark.slow
def test_two_ranks_look_together(tmp_path):
    folder = real_runs.run(tmp_path, *real_runs.TWO, "look=on")
    run = real_runs.run_json(folder)
    assert run["look"]["status"] == "recorded" and run["warnings"] == []
    assert [(folder / "traces" / f"look_rank{rank}.pt.trace.json.gz").is_file() for rank in (0, 1)] == [True, True]
    assert list(json.loads((folder / "traces" / "ops" / "look_account.json").read_text())["ranks"]) == ["0", "1"]


def ended(tmp_path, end):
    """The record of a run whose model ends in the look."""
    (tmp_path / "net.py").write_text(ENDING.format(end=end))
    done = real_runs.bench(
        tmp_path / "results", "run", *real_runs.SHORT, "model.arch=net.py:Net", "look=on", SPEEDRUN_CWD=str(tmp_path)
    )
    (folder,) = real_runs.folders(tmp_path / "results")
    return done, folder, real_runs.run_json(folder)


@pytest.mark.parametrize("end", ["raise RuntimeError('no more')", slow("os.kill(os.getpid(), signal.SIGKILL)")])
def test_what_ends_the_look_ends_no_run(tmp_path, end):
    done, folder, run = ended(tmp_path, end)
    assert (done.returncode, run["status"], run["failure"]) == (0, "complete", None), done.stdout
    assert run["metrics"]["num_steps"] == 6 and len(losses(folder)) == 7 and run["metrics"]["val_loss"] is not None
    (warning,) = [warning for warning in run["warnings"] if warning["instrument"] == "look"]
    assert ("no more" if "raise" in end else "SIGKILL") in warning["error"]


def test_what_ends_the_ranks_in_the_look_is_a_warning_unless_it_speaks_of_the_run():
    def measured(status="begun"):
        return {"look": {"status": status, "began_s": 1.0}, "warnings": []}

    stop = failures.failure("interrupted", "the launcher got SIGINT", None, 6, "SIGINT")
    written = measured()
    assert after_race.spared(written, stop) is None
    assert written["look"] == {"status": "not finished", "began_s": 1.0, "interrupted_by": "SIGINT"}
    assert "the launcher got SIGINT" in written["warnings"][0]["error"]
    assert failures.interrupted_by({"failure": None, "look": written["look"]}) == "SIGINT"
    bad = failures.failure("bad_data", "changed")
    assert after_race.spared(measured(), bad) is bad and after_race.spared({}, stop) is stop
    assert after_race.spared(measured("recorded"), stop) is stop


def ended_in_its_look(folder, number):
    """Sends that signal to a run's launcher in the look.  Returns (record, what it printed, folder)."""
    (folder / "net.py").write_text(ENDING.format(end="print('looking', flush=True), time.sleep(60)"))
    overrides = [*real_runs.SHORT, "model.arch=net.py:Net", "look=on"]
    process = real_runs.started(folder / "results", "run", *overrides, SPEEDRUN_CWD=str(folder))
    until_s = time.monotonic() + 120
    while "looking" not in real_runs.logs(folder / "results") and time.monotonic() < until_s:
        time.sleep(0.1)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    (run_of,) = real_runs.folders(folder / "results")
    real_runs.wait_for(lambda: real_runs.run_json(run_of)["status"] != "running")
    return real_runs.run_json(run_of), text, run_of


@pytest.mark.slow
def test_a_run_interrupted_in_its_look_stays_complete(tmp_path):
    run, text, folder = ended_in_its_look(tmp_path, signal.SIGINT)
    assert (run["status"], run["look"]["interrupted_by"]) == ("complete", "SIGINT"), text
    assert len(losses(folder)) == 7


@pytest.mark.slow
def test_a_launcher_killed_in_the_look_leaves_what_was_measured_and_no_complete_run(tmp_path):
    run, _, folder = ended_in_its_look(tmp_path, signal.SIGKILL)
    assert (run["status"], run["validity"], run["failure"]["kind"]) == ("aborted", "invalid", "launcher_killed")
    assert "in the look after the race: what was measured is kept" in run["failure"]["message"]
    assert run["metrics"]["val_loss"] == float(losses(folder)[-1][2]) and run["metrics"]["train_s"] > 0
    assert "look" not in run and real_runs.wait_for(lambda: not list(folder.glob(".*.tmp")))


@pytest.mark.parametrize(
    ("num_done", "num_steps", "expected"), [(6, 5, [1, 2, 3, 4, 5]), (2, 5, [0, 1, 0, 1, 0]), (1, 2, [0, 0])]
)
def test_the_last_steps_are_trained_again(num_done, num_steps, expected):
    assert look.repeated_steps(num_done, num_steps) == expected


def test_a_run_that_profiles_itself_is_not_looked_at():
    with pytest.raises(ValueError, match="look.enabled=true: instruments.trace already profiles this run"):
        prepare.prepare(["track=cpu_nano", "hardware=cpu", "profile=modded", "look=on"], say=lambda text: None)
    job = prepare.prepare(["track=cpu_nano", "hardware=cpu", "profile=modded"], say=lambda text: None)
    assert job.config.look.enabled is False and job.with_look(True).config.look.enabled is False


def test_a_look_is_no_part_of_the_config_id():
    ids = {
        identity.config_id(compose.compose(["track=cpu_nano", "hardware=cpu", override]))
        for override in ("look=on", "look=off", "look=auto")
    }
    assert len(ids) == 1


def test_a_series_looks_once_and_on_a_cpu_without_being_told(tmp_path):
    done = real_runs.bench(tmp_path, "speedrun", *real_runs.SHORT, "track.repeats=2", "--anyway", code=0)
    runs = [real_runs.run_json(folder) for folder in real_runs.folders(tmp_path)]
    assert sorted("look" in run for run in runs) == [False, True] and len({run["config_id"] for run in runs}) == 1
    assert done.stdout.count("largest possible gain") == 1


def test_a_disk_that_fills_in_the_look_leaves_what_was_measured(tmp_path, monkeypatch):
    path = tmp_path / run_folder.RESULT
    path.write_text(json.dumps({"look": {"status": "begun", "began_s": 1.0}, "warnings": [], "train_s": 2.5}))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gather_result.atomic, "write_json", full)
    gather_result.add_look(tmp_path, {"status": "recorded"}, [[]])
    measured = json.loads(path.read_text())
    assert after_race.spared(measured, None) is None and measured["train_s"] == 2.5
    assert measured["look"]["status"] == "not finished" and "could not be written" in measured["warnings"][0]["error"]


# ---- of scripts


def nanogpt(steps):
    return [f"iter {step}: loss 4.1, time 12.0ms, mfu 1.0%" for step in steps]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([f"step:{step}/20 train_time:{step}ms step_avg:1ms" for step in range(1, 21)], (1, 11, 13)),
        # a line every 10 steps: one is warmed up in, one recorded; line 0 is printed when one step is done
        (nanogpt(range(0, 50, 10)), (10, 12, 12)),
        # the validation is in step 12, which is neither recorded nor warmed up in
        ([*nanogpt(range(11)), "step 11: train loss 4.0, val loss 4.1", *nanogpt(range(11, 30))], (1, 14, 16)),
        (nanogpt(range(12)), None),
        (nanogpt(range(0, 500, 100)), None),
    ],
)
def test_a_scripts_window_begins_and_ends_at_its_lines_without_a_validation(lines, expected):
    assert script_look.window(schema.LookConfig(), lines, trace_files.edges(None)) == expected


@pytest.fixture(scope="module")
def scripted_look(tmp_path_factory):
    """A script of two ranks, which is looked at."""
    overrides = ["look=on", "script.args=[40]", "hardware.num_processes=2", "hardware.num_threads=1"]
    return scripted.run(tmp_path_factory.mktemp("results"), scripted.MODDED, *overrides)


@pytest.mark.slow
def test_a_script_is_looked_at_in_a_second_run(scripted_look):
    run, look = real_runs.run_json(scripted_look), real_runs.run_json(scripted_look)["look"]
    assert (run["status"], look["status"], look["steps"], run["warnings"]) == ("complete", "recorded", [13, 15], [])
    looks = [f"traces/look_rank{rank}.pt.trace.json.gz" for rank in range(2)]
    tables = [f"traces/ops/look_{name}" for name in ("rank0.json", "rank1.txt", "account.json", "account.txt")]
    memory = [f"memory/look_rank{rank}.html" for rank in range(2)]
    assert {file["path"] for file in run["artifacts"]} >= {*looks, *tables, *memory}
    assert "train_gpt.py(9" in look["next"][0]["place"] and "sleep" in look["next"][0]["place"]  # it is planted there
    assert "aten::_log_softmax" in (scripted_look / tables[1]).read_text()
    for path in memory:
        assert (scripted_look / path).read_text().count("Alive at the peak") == 1


@pytest.mark.slow
def test_nothing_of_a_scripts_second_run_is_in_its_record(scripted_look):
    run = real_runs.run_json(scripted_look)
    assert run["instrument_summaries"].keys() == {"telemetry"} and run["metrics"]["num_flagged_steps"] == 0
    assert len([path for path in run["script"]["files_written"] if path.startswith("logs/")]) == 1
    log = (scripted_look / "logs" / "rank0.log").read_text()
    assert log.count("step:40/40 val_loss") == 1 and not (scripted_look / script_look.FOLDER).exists()
    assert run["measured"]["wall_s"] < run["look"]["look_s"] + 60
    for path in (*scripted_look.glob("traces/**/*.*"), *scripted_look.glob("memory/*")):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert str(scripted_look).encode() not in text and str(real_runs.REPO).encode() not in text, path
    real_runs.bench(scripted_look.parents[1], "verify", str(scripted_look), code=0)


@pytest.mark.slow
def test_a_look_of_a_script_that_cannot_be_is_a_warning_or_refused(tmp_path):
    folder = scripted.run(tmp_path, scripted.MODDED, "look=on", "script.args=[8]", "hardware.num_threads=1")
    run = real_runs.run_json(folder)
    assert (run["status"], run["look"]["status"]) == ("complete", "not recorded")
    assert "no 3 steps in a row without a validation" in run["warnings"][0]["error"]
    with pytest.raises(ValueError, match="a script.command, or a run over several nodes"):
        prepare.prepare(
            ["track=free", "script.command=[python,train.py]", f"script.root={scripted.SCRIPTS}", "look=on"]
        )


def test_of_a_script_only_the_trace_that_lies_where_the_profiler_writes_it_is_taken(tmp_path):
    """A note that names another file, and a link in the trace's place: neither file is read or removed."""
    victim, settings = tmp_path / "victim", yaml_file.read(REPO / "conf/instruments/trace.yaml")["trace"]
    victim.write_text('{"traceEvents": []}')
    folder = tmp_path / "run"
    (folder / "traces").mkdir(parents=True)
    noted = [{"name": "trace", "raw": str(victim), "disturbed": [11, 13]}]
    (folder / ".rank0.profiled.tmp").write_text(json.dumps(noted))
    for _ in range(2):
        rows = [{"step": step, "flags": ""} for step in range(1, 21)]
        summaries = trace_files.conclude(folder, {"trace": settings}, 1, rows)
        assert summaries["trace"]["trace"]["status"] == "not reached" and not any((folder / "traces").iterdir())
        assert victim.exists()
        (folder / ".trace_rank0.raw.tmp").unlink(missing_ok=True)
        (folder / ".trace_rank0.raw.tmp").symlink_to(victim)
