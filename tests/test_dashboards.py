"""Finished records in other people's dashboards: after the run, with the record's own numbers, and never in its way."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from real_runs import SHORT, bench, folders, run_json

from bench.base.paths import REPO
from bench.cli import dashboard as verb
from bench.launch import initial_record
from bench.launch.prepare import prepare
from bench.machine import environment
from bench.record import run_folder, verification
from bench.record.exporters import dashboards
from bench.record.verification import RunFiles

EXAMPLE = Path(__file__).parent / "records" / "20261121T031500Z-gpt2-adamw-48623a63-s0"


def needs(name):
    is_installed = importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(not is_installed, reason=f"needs the package {name}, an optional extra")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A kept record in a results folder of its own, with steps of known times."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    folder = tmp_path / "results" / "free" / EXAMPLE.name
    shutil.copytree(EXAMPLE, folder)
    (folder / "steps.csv").write_text(
        "step,flags,tokens,lr,train_loss,val_loss,step_ms,data_ms,t_ns\n"
        "0,,0,,,5.5,,,\n1,,1024,0.003,5.25,,100.5,1.5,2000000000\n"
        "2,memory_history,2048,0.002,4.75,4.5,300.5,2.5,3000000000\n"
    )
    event = {"t_ns": 1_000_000_000, "utc": "2026-11-21T03:15:01.000Z", "event": "run_start"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    return folder


UTC_S = 1795230901.0  # 2026-11-21T03:15:01Z
FINAL_VAL_LOSS = json.loads((EXAMPLE / "run.json").read_text())["metrics"]["val_loss"]


# ---- without any of their packages


def test_series_settings_and_final_numbers_are_read_from_the_folder(run):
    exported = dashboards.read(run)
    (_, *at_s), series = zip(*((at_s, values) for _, at_s, values in exported.points), strict=True)
    assert [step for step, *_ in exported.points] == [0, 1, 2] and at_s == [UTC_S + 1, UTC_S + 2]
    times = {"time/step_ms": 100.5, "time/data_ms": 1.5}
    disturbed = {"disturbed/step_ms": 300.5, "disturbed/data_ms": 2.5}
    assert series == (
        {"loss/val": 5.5, "progress/tokens": 0.0},
        {"loss/train": 5.25, "optim/lr": 0.003, "progress/tokens": 1024.0} | times,
        {"loss/train": 4.75, "loss/val": 4.5, "optim/lr": 0.002, "progress/tokens": 2048.0} | disturbed,
    )
    assert exported.final["final/val_loss"] == FINAL_VAL_LOSS
    assert exported.settings["model.arch"] == "gpt2" and exported.settings["data.train_glob"] == "None"
    assert (exported.settings["seed"], exported.settings["name"]) == (run_json(run)["seed"], run_json(run)["name"])
    assert exported.tags["track"] == run_json(run)["track"]


def test_a_missing_package_is_a_warning_with_the_command_that_installs_it(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in dashboards.names() else find(name))
    chosen = {"tensorboard": {}, "wandb": {}, "mlflow": {}}
    warnings = dashboards.warnings(chosen)
    assert [warning["instrument"] for warning in warnings] == list(chosen)
    error = warnings[0]["error"]
    assert error.startswith("the package tensorboard is not installed: ") and str(Path.home()) + "/" not in error
    assert error.endswith(" -m pip install tensorboard")
    dashboards.after_run(tmp_path, chosen, say=pytest.fail)
    with pytest.raises(ValueError, match="--to wandb: the package wandb is not installed"):
        verb.main([str(tmp_path), "--to", "wandb"])


def test_exporters_change_no_id_and_no_protocol():
    """Two runs that differ in them alone are repeats, and their times may be compared."""
    env = environment.environment() | {"env": {}}
    records = []
    for overrides in ([], ["exporters=[wandb,mlflow]", "exporters.wandb.project=mine"]):
        record = initial_record.record_of(prepare([*SHORT, *overrides]), env, ["run"])
        records.append(record | {"environment": record["environment"] | {"torch": "2"}})
    bare, exported = records
    assert exported["exporters"]["wandb"] == {"project": "mine", "entity": None, "mode": "offline"}
    assert bare["exporters"] == {} and exported["instruments"] == bare["instruments"]
    for key in ("config_id", "timing_protocol", "deviations"):
        assert bare[key] == exported[key]
    for record in records:
        record["environment"] |= dict.fromkeys(("driver", "cuda", "nccl"))
    assert environment.comparability_id(bare) == environment.comparability_id(exported)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (f"sqlite:///{Path.home()}/mine.db", "sqlite:///~/mine.db"),
        ("'postgresql://ada:secret@db/runs'", "postgresql://USER:PASSWORD@db/runs"),
    ],
)
def test_where_an_exporter_writes_is_in_no_record_with_a_home_folder_or_a_password(tmp_path, uri, shown):
    env = environment.environment()
    job = prepare([*SHORT, "exporters=[mlflow]", f"exporters.mlflow.tracking_uri={uri}"])
    record = initial_record.record_of(job, env, ["run", *job.overrides])
    initial_record.write_inputs(tmp_path, job, env, started_s=0.0, code=record["code"])
    texts = [json.dumps(record), *((tmp_path / name).read_text() for name in ("config.yaml", "overrides.yaml"))]
    for text in texts:
        assert shown in text and uri.strip("'") not in text
    assert job.config.exporters["mlflow"]["tracking_uri"] == uri.strip("'")  # what the export after the run gets


def test_a_record_does_not_choose_the_server_that_it_is_sent_to(run, monkeypatch):
    """With it would go the credentials for MLflow of whoever exports a stranger's record."""
    own = {"mlflow": {"tracking_uri": "https://evil.example", "experiment": None}}
    (run / "run.json").write_text(json.dumps(run_json(run) | {"exporters": own}))
    sent = []
    monkeypatch.setattr(dashboards, "missing", lambda name: None)
    monkeypatch.setitem(dashboards.EXPORT, "mlflow", lambda exported, settings: sent.append(settings) or {})
    assert verb.main([str(run), "--to", "mlflow"]) == 0
    assert verb.main([str(run), "--to", "mlflow", "--set", "tracking_uri=https://mine.example"]) == 0
    assert [settings["tracking_uri"] for settings in sent] == [None, "https://mine.example"]


@pytest.mark.parametrize("linked", ["dashboards", "dashboards/wandb"])
def test_no_export_is_written_through_a_link_that_came_with_the_record(run, tmp_path, monkeypatch, printed, linked):
    mine = tmp_path / "mine"
    for name in ("tensorboard", "wandb"):
        (mine / name).mkdir(parents=True)
        (mine / name / "a run").touch()
    (run / linked).parent.mkdir(exist_ok=True)
    (run / linked).symlink_to(mine)
    monkeypatch.setattr(dashboards, "missing", lambda name: None)
    for module in ("wandb", "tensorboard.compat.proto.event_pb2", "tensorboard.summary.writer.event_file_writer"):
        parts = module.split(".")
        for number in range(len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[: number + 1]), mock.MagicMock())
    for name in ["wandb", *["tensorboard"] * (linked == "dashboards")]:
        assert "it is a link, through which nothing is written" in printed(verb, run, "--to", name, code=1)
    kept = sorted(path.relative_to(mine).as_posix() for path in mine.rglob("*"))
    assert kept == ["tensorboard", "tensorboard/a run", "wandb", "wandb/a run"]


def test_an_export_that_fails_is_reported_and_leaves_the_record_as_it_is(run, monkeypatch, printed, capsys):
    before = (run / "run.json").read_bytes()
    monkeypatch.setitem(dashboards.EXPORT, "wandb", lambda exported, settings: 1 / 0)
    monkeypatch.setattr(dashboards, "missing", lambda name: None)
    assert "no export to wandb: ZeroDivisionError" in printed(verb, run, "--to", "wandb", code=1)
    prints_and_exports = lambda exported, settings: print("their own words") or {"folder": "x"}  # noqa: E731
    monkeypatch.setitem(dashboards.EXPORT, "wandb", prints_and_exports)
    assert verb.main([str(run), "--to", "wandb", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "their own words\n"
    facts = {"run_id": run.name, "exporter": "wandb", "error": None, "facts": {"folder": "x"}}
    assert json.loads(captured.out) == [facts]
    assert (run / "run.json").read_bytes() == before
    ok, remark = verification.nothing_is_unrecorded(RunFiles(run), run_folder.read(run))
    assert ok, remark


def test_an_export_after_the_run_that_hangs_or_fails_is_said_and_never_raised(run, monkeypatch):
    log = []
    monkeypatch.setattr(dashboards.importlib.util, "find_spec", lambda name: True if name == "mlflow" else None)
    chosen = {"mlflow": {"tracking_uri": "postgresql://ada:secret@db/runs", "experiment": None}, "wandb": {}}
    commands = []

    def hangs(*args, **options):
        raise subprocess.TimeoutExpired("export", dashboards.TIMEOUT_S)

    monkeypatch.setattr(subprocess, "run", hangs)
    dashboards.after_run(run, chosen, log.append)
    done = subprocess.CompletedProcess([], 1, "something\nrun: no export to mlflow: OSError: full\n", "")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: commands.append(command) or done)
    dashboards.after_run(run, chosen, log.append)
    assert commands[0][-2:] == ['--set=tracking_uri="postgresql://ada:secret@db/runs"', "--set=experiment=null"]
    assert len(log) == 2 and log[0].startswith("no export to mlflow: TimeoutExpired") and "OSError: full" in log[1]


def test_a_run_that_has_not_ended_and_what_is_no_exporter_are_refused(run, monkeypatch):
    with pytest.raises(ValueError, match="--to excel: choose from mlflow, tensorboard, wandb"):
        verb.main([str(run), "--to", "excel"])
    with pytest.raises(ValueError, match="--set colour=red: wandb has project, entity, mode"):
        dashboards.settings_of("wandb", ["colour=red"])
    expected = {"project": "mine", "entity": None, "mode": "offline"}
    assert dashboards.settings_of("wandb", ["project=mine"]) == expected
    monkeypatch.setattr(run_folder, "read", lambda folder: {"status": "running"})
    with pytest.raises(ValueError, match="the run has not ended"):
        dashboards.read(run)


# ---- with the real packages


def export(run, name):
    """Exports in a process of its own, as after a run: the packages warn, and take seconds to import."""
    command = [sys.executable, "-m", "bench", "dashboard", str(run), "--to", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPO)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)[0]["facts"]


def read_by(program, path):
    """The lines of JSON that a program prints of what an exporter wrote."""
    command = [sys.executable, "-W", "ignore", "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


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
        "        items = found.history.item\n"
        "        print(json.dumps({'/'.join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}))\n"
        "    if found.WhichOneof('record_type') == 'run':\n"
        "        run = found.run\n"
        "        print(json.dumps({'host': run.host, 'run': run.run_id, 'remote': run.git.remote_url}))\n"
    )
    lines = read_by(reader, file)
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
        "    points = client.get_metric_history(r.info.run_id, 'loss/train')\n"
        "    history = [(m.step, m.value, m.timestamp) for m in points]\n"
        "    facts = [r.data.metrics['final/val_loss'], r.data.params['model.arch'], sorted(r.data.tags)]\n"
        "    print(json.dumps([r.info.run_name, r.info.status, history, *facts]))\n"
    )
    ((name, status, history, val_loss, arch, tags),) = read_by(reader, store)
    assert (name, status, arch) == (run.name, "FINISHED", "gpt2")
    assert history == [[1, 5.25, round(1e3 * UTC_S) + 1000], [2, 4.75, round(1e3 * UTC_S) + 2000]]
    assert val_loss == FINAL_VAL_LOSS
    assert not any(tag.startswith("mlflow.user") or "source" in tag for tag in tags)


@pytest.mark.slow
def test_a_run_with_exporters_is_exported_or_warned_and_passes_verification(results_dir):
    installed = [name for name in dashboards.names() if importlib.util.find_spec(name)]
    done = bench(results_dir, "run", *SHORT, "exporters=[tensorboard,wandb,mlflow]", code=0)
    (folder,) = folders(results_dir)
    run = run_json(folder)
    warned = [warning["instrument"] for warning in run["warnings"]]
    assert warned == [name for name in ("tensorboard", "wandb", "mlflow") if name not in installed]
    for name in warned:
        before, _, _ = done.stdout.partition("step:0/")
        assert f"export  {name}: the package {name} is not installed" in before
    assert "no export to" not in done.stdout
    rules = {rule["rule"]: rule for rule in verification.report(folder)["rules"]}
    assert all(rule["passed"] for rule in rules.values()), rules
