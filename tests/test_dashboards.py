"""Finished records in other people's dashboards: after the race, with the record's own numbers, and never in its way."""

import importlib.util
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from racing import run_json

from bench.cli import dashboard
from bench.exporters import dashboards, reading
from bench.instruments import load
from bench.instruments.base import Context
from bench.paths import REPO
from bench.record import run_folder, verification
from bench.training.timers import HostMarks

EXAMPLE = Path(__file__).parent / "records" / "20261121T031500Z-gpt2-adamw-48623a63-s0"


def needs(name):
    there = importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(not there, reason=f"needs the package {dashboards.PACKAGES[name]}, an optional extra")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A kept record in a results folder of its own, with steps of known times."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    folder = tmp_path / "results" / "free" / EXAMPLE.name
    shutil.copytree(EXAMPLE, folder)
    (folder / "steps.csv").write_text(
        "step,flags,tokens,lr,train_loss,val_loss,step_ms,data_ms,t_ns\n"
        "0,,0,,,5.5,,,\n1,,1024,0.003,5.25,,100.5,1.5,2000000000\n2,memory_history,2048,0.002,4.75,4.5,300.5,2.5,3000000000\n"
    )
    event = {"t_ns": 1_000_000_000, "utc": "2026-11-21T03:15:01.000Z", "event": "run_start"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    return folder


UTC_S = 1795230901.0  # 2026-11-21T03:15:01Z
FINAL_VAL_LOSS = json.loads((EXAMPLE / "run.json").read_text())["metrics"]["val_loss"]


# ---- without any of their packages


def test_series_settings_and_final_numbers_are_read_from_the_folder(run):
    found = reading.read(run)
    assert found.points == [
        (0, pytest.approx(found.points[0][1]), {"loss/val": 5.5, "progress/tokens": 0.0}),
        (
            1,
            UTC_S + 1,
            {
                "loss/train": 5.25,
                "optim/lr": 0.003,
                "progress/tokens": 1024.0,
                "time/step_ms": 100.5,
                "time/data_ms": 1.5,
            },
        ),
        (
            2,
            UTC_S + 2,
            {
                "loss/train": 4.75,
                "loss/val": 4.5,
                "optim/lr": 0.002,
                "progress/tokens": 2048.0,
                "disturbed/step_ms": 300.5,
                "disturbed/data_ms": 2.5,
            },
        ),
    ]
    assert found.final["final/val_loss"] == FINAL_VAL_LOSS
    assert found.settings["model.arch"] == "gpt2" and found.settings["data.train_glob"] == "None"
    assert found.tags["track"] == run_json(run)["track"]


def test_a_package_that_is_lacking_is_a_warning_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, find=importlib.util.find_spec: None if name in dashboards.PACKAGES else find(name),
    )
    chosen = {"tensorboard": {}, "wandb": {}, "mlflow": {}}
    made, warnings = load(chosen, Context(tmp_path, 0, 2, "cpu", 4, HostMarks()))
    assert made == [] and [warning["instrument"] for warning in warnings] == list(chosen)
    assert warnings[0]["error"].startswith("ImportError: the package tensorboard is not installed: ")
    assert (
        warnings[0]["error"].endswith(" -m pip install tensorboard")
        and str(Path.home()) + "/" not in warnings[0]["error"]
    )
    made, warnings = load(chosen, Context(tmp_path, 1, 2, "cpu", 4, HostMarks()))
    assert warnings == []  # once is enough
    dashboards.after_race(tmp_path, {"instruments": chosen}, say=pytest.fail)
    with pytest.raises(ValueError, match="--to wandb: the package wandb is not installed"):
        dashboard.main([str(tmp_path), "--to", "wandb"])


def test_an_export_that_fails_is_noted_and_leaves_the_record_as_it_is(run, monkeypatch, capsys):
    before = (run / "run.json").read_bytes()
    broken = types.ModuleType("bench.exporters.wandb")
    broken.export = lambda exported, settings: 1 / 0
    monkeypatch.setitem(sys.modules, "bench.exporters.wandb", broken)
    monkeypatch.setattr(dashboard, "require", lambda name: None)
    assert dashboard.main([str(run), "--to", "wandb"]) == 1
    assert "no export to wandb: ZeroDivisionError" in capsys.readouterr().out
    assert (
        json.loads((run / "dashboards" / "dashboards.json").read_text())["wandb"]["error"]
        == "ZeroDivisionError: division by zero"
    )
    assert (run / "run.json").read_bytes() == before
    ok, words = verification.nothing_is_unrecorded(run, run_folder.read(run))
    assert ok, words


def test_an_export_after_the_race_that_hangs_or_fails_is_said_and_never_raised(run, monkeypatch):
    said = []
    monkeypatch.setattr(dashboards.importlib.util, "find_spec", lambda name: True if name == "mlflow" else None)
    chosen = {"instruments": {"mlflow": {}, "wandb": {}, "regions": {}}}

    def hangs(*args, **more):
        raise subprocess.TimeoutExpired("export", dashboards.TIMEOUT_S)

    monkeypatch.setattr(subprocess, "run", hangs)
    dashboards.after_race(run, chosen, said.append)
    done = subprocess.CompletedProcess([], 1, "something\nrun: no export to mlflow: OSError: full\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: done)
    dashboards.after_race(run, chosen, said.append)
    assert len(said) == 2 and said[0].startswith("no export to mlflow: TimeoutExpired") and "OSError: full" in said[1]
    assert json.loads((run / "dashboards" / "dashboards.json").read_text())["mlflow"]["error"].startswith(
        "TimeoutExpired"
    )


def test_a_race_that_is_running_and_what_is_no_exporter_are_refused(run, monkeypatch):
    with pytest.raises(ValueError, match="--to excel: choose from tensorboard, wandb, mlflow"):
        dashboard.main([str(run), "--to", "excel"])
    with pytest.raises(ValueError, match="--set colour=red: wandb has project, entity, mode"):
        dashboard.settings_of(run_json(run), "wandb", ["colour=red"])
    assert dashboard.settings_of(run_json(run), "wandb", ["project=mine"]) == {
        "project": "mine",
        "entity": None,
        "mode": "offline",
    }
    assert dashboard.settings_of({"instruments": {"wandb": {"mode": "online"}}}, "wandb")["mode"] == "online"
    monkeypatch.setattr(run_folder, "read", lambda folder: {"status": "running"})
    with pytest.raises(ValueError, match="the race is still running"):
        reading.read(run)


# ---- with the real packages


def export(run, name):
    """In a process of its own, as after a race: their packages warn, and import for seconds."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", "dashboard", str(run), "--to", name],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPO,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((run / "dashboards" / "dashboards.json").read_text())[name]


@needs("tensorboard")
def test_tensorboard_reads_back_every_loss_the_settings_and_the_final_numbers(run):
    import warnings

    for _ in range(2):  # the second replaces the first
        export(run, "tensorboard")
    (file,) = (run / "dashboards" / "tensorboard").iterdir()
    assert file.name.endswith(".speedrun") and file.name.count(".") == 4  # without the machine's name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(file.parent))
        read.Reload()
        losses = [(event.step, event.wall_time, event.value) for event in read.Scalars("loss/train")]
        assert losses == [(1, UTC_S + 1, 5.25), (2, UTC_S + 2, 4.75)]
        assert [event.value for event in read.Scalars("final/val_loss")] == [pytest.approx(FINAL_VAL_LOSS, rel=1e-6)]
        assert "run/text_summary" in read.Tags()["tensors"] or "run" in read.Tags()["tensors"]
        assert read.summary_metadata["_hparams_/session_start_info"].plugin_data.plugin_name == "hparams"


@needs("wandb")
def test_wandb_offline_holds_every_step_and_says_nothing_of_the_machine(run):
    export(run, "wandb")
    facts = export(run, "wandb")
    (file,) = (run / "dashboards" / "wandb").glob("offline-run-*/*.wandb")
    reader = (
        "import json, struct, sys\n"
        "from wandb.proto import wandb_internal_pb2 as pb\n"
        "data, at, record = open(sys.argv[1], 'rb').read(), 7, b''\n"  # LevelDB's log format behind a head of 7 bytes
        "while at + 7 <= len(data):\n"
        "    if 32768 - at % 32768 < 7:\n"
        "        at += 32768 - at % 32768\n"
        "        continue\n"
        "    length, kind = struct.unpack('<HB', data[at + 4 : at + 7])\n"
        "    record, at = record + data[at + 7 : at + 7 + length], at + 7 + length\n"
        "    if kind in (2, 3):\n"  # goes on in the next block
        "        continue\n"
        "    found, record = pb.Record.FromString(record), b''\n"
        "    if found.WhichOneof('record_type') == 'history':\n"
        "        print(json.dumps({'/'.join(i.nested_key) or i.key: json.loads(i.value_json) for i in found.history.item}))\n"
        "    if found.WhichOneof('record_type') == 'run':\n"
        "        print(json.dumps({'host': found.run.host, 'run': found.run.run_id, 'remote': found.run.git.remote_url}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", reader, str(file)], capture_output=True, text=True, timeout=60
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert {"host": "", "run": run.name, "remote": ""} in lines and facts["run_id"] == run.name
    history = [(line["_step"], line["loss/train"]) for line in lines if "loss/train" in line]
    assert history == [(1, 5.25), (2, 4.75)]
    assert not list(file.parent.rglob("wandb-metadata.json"))


@needs("mlflow")
def test_mlflow_keeps_one_run_of_each_record_with_its_series_settings_and_status(run):
    first, second = export(run, "mlflow"), export(run, "mlflow")
    assert first["run_id"] != second["run_id"]
    store = f"sqlite:///{run.parent.parent / 'mlflow.db'}"
    reader = (
        "import json, sys\n"
        "from mlflow import MlflowClient\n"
        "client = MlflowClient(tracking_uri=sys.argv[1])\n"
        "runs = client.search_runs([e.experiment_id for e in client.search_experiments()])\n"
        "for r in runs:\n"
        "    history = [(m.step, m.value, m.timestamp) for m in client.get_metric_history(r.info.run_id, 'loss/train')]\n"
        "    print(json.dumps([r.info.run_name, r.info.status, history, r.data.metrics['final/val_loss'], r.data.params['model.arch'], sorted(r.data.tags)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", reader, store], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    name, status, history, val_loss, arch, tags = json.loads(line)
    assert (name, status, arch) == (run.name, "FINISHED", "gpt2")
    assert history == [[1, 5.25, round(1e3 * UTC_S) + 1000], [2, 4.75, round(1e3 * UTC_S) + 2000]]
    assert val_loss == FINAL_VAL_LOSS
    assert not any(tag.startswith("mlflow.user") or "source" in tag for tag in tags)


def test_a_race_that_names_exporters_is_exported_or_warned_and_passes_verification(every_instrument_run):
    there = [name for name in dashboards.PACKAGES if importlib.util.find_spec(name)]
    folder = every_instrument_run
    run = run_json(folder)
    assert sorted(warning["instrument"] for warning in run["warnings"]) == sorted(set(dashboards.PACKAGES) - set(there))
    for name in there:
        assert json.loads((folder / "dashboards" / "dashboards.json").read_text())[name]["error"] is None
    ok, words = verification.nothing_is_unrecorded(folder, run)
    assert ok, words
