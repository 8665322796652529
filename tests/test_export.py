"""Records exported for other programs, which read what was written."""

import csv
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import export
from bench.record import run_folder, step_files
from bench.record.exporters import formats
from bench.record.importers import dialects, modded_nanogpt, records
from bench.report import run_page

REPO = Path(__file__).resolve().parent.parent
COMPLETE = Path(__file__).parent / "records" / "20261121T031500Z-gpt2-adamw-48623a63-s0"


def test_csv_has_a_line_a_run_or_a_step(printed):
    (row,) = csv.DictReader(io.StringIO(printed(export, COMPLETE, "--to", "csv")))
    assert (row["run_id"], float(row["val_loss"])) == (COMPLETE.name, 4.25)
    rows = list(csv.DictReader(io.StringIO(printed(export, COMPLETE, "--to", "csv", "--steps"))))
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4] and rows[4]["val_loss"] == "4.25"


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    out = tmp_path / "mine.csv"
    out.touch(mode=0o600)
    assert export.main([str(COMPLETE), "--to", "csv", "--out", str(out)]) == 0
    assert out.stat().st_mode & 0o777 == 0o600 and COMPLETE.name in out.read_text()


def test_a_pipe_that_is_named_is_written_to_and_not_replaced():
    """bash names such a pipe for >(program).  Root's --out /dev/full once replaced the device by a file."""
    reading, writing = os.pipe()
    assert export.main([str(COMPLETE), "--to", "csv", "--out", f"/dev/fd/{writing}"]) == 0
    assert COMPLETE.name.encode() in os.read(reading, 2**16)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_file_of_a_record_is_not_replaced(tmp_path, form):
    (tmp_path / "ledger.jsonl").write_text("{}\n")
    shutil.copytree(COMPLETE, tmp_path / "run")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/sweep.json").write_text("{}")
    (tmp_path / "link").symlink_to("run/code")
    names = ("ledger.jsonl", "run/run.json", "run/steps.csv", "run/events.jsonl", "run/environment.json")
    names += (".ledger.count", "claim.yaml", "run/summary.md", "run/telemetry.node1.csv", "sweep/points.12.jsonl")
    names += ("run/code/commit.json", "run/code/own/net/net.py", "link/diff.patch", "run/logs/rank0.log")
    names += ("run/traces/a", "sweep/sweep.json", "sweep/study.json")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).open("a").close()
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ValueError, match="is a file of a record, which is not replaced"):
            export.main([str(COMPLETE), "--to", form, "--out", str(tmp_path / name)])
        (tmp_path / "by_link").unlink(missing_ok=True)
        (tmp_path / "by_link").symlink_to(tmp_path / name)
        with pytest.raises(ValueError, match="is a file of a record, which is not replaced"):
            export.main([str(COMPLETE), "--to", form, "--out", str(tmp_path / "by_link")])
        assert (tmp_path / name).read_bytes() == before
    (tmp_path / "mine" / "code").mkdir(parents=True)
    for name in ("mine/steps.csv", "mine/code/steps.csv", "run/steps.mine.csv", "run/memory/page.html"):
        assert export.main([str(COMPLETE), "--to", form, "--out", str(tmp_path / name)]) == 0


def test_what_is_no_file_is_not_replaced_and_a_link_is_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_folder").symlink_to("folder")
    (tmp_path / "latest.json").symlink_to("of_today.json")
    for name in ("folder", "pipe", "to_folder"):
        with pytest.raises(ValueError, match="is no file, and would be replaced"):
            export.main([str(COMPLETE), "--to", "csv", "--out", str(tmp_path / name)])
    assert export.main([str(COMPLETE), "--to", "csv", "--out", str(tmp_path / "latest.json")]) == 0
    assert (tmp_path / "latest.json").is_symlink() and (tmp_path / "of_today.json").read_text()


def test_mllog_lines_are_json_with_the_keys_of_mlperf(tmp_path):
    shutil.copytree(COMPLETE, tmp_path / "run", ignore=shutil.ignore_patterns("events.jsonl"))
    lines = formats.mllog(tmp_path / "run").splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert all(set(event) == {"namespace", "time_ms", "event_type", "key", "value", "metadata"} for event in events)
    keys = [event["key"] for event in events]
    assert keys.index("run_start") < keys.index("eval_accuracy") < keys.index("run_stop")
    assert events[-1]["key"] == "run_stop" and events[-1]["time_ms"] is None  # without events nobody knows
    assert events[-1]["metadata"] == {"status": "success", "train_s": 0.22, "validity": "valid"}
    copy_with(tmp_path / "invalid", validity="invalid")
    assert '"status": "aborted"' in (stop := formats.mllog(tmp_path / "invalid")) and '"validity": "invalid"' in stop


def test_a_complete_run_whose_steps_are_cut_is_exported_as_nothing(tmp_path):
    path = copy_with(tmp_path / "run") / "steps.csv"
    path.write_text(path.read_text()[:-9])
    for write in (formats.mllog, formats.modded_nanogpt_log):
        with pytest.raises(ValueError, match="the last line is cut"):
            write(tmp_path / "run")


def test_a_log_says_nothing_that_a_terminal_obeys(tmp_path):
    folder = copy_with(tmp_path / "run", environment={"cpu_model": "\x1b]0;owned\x07"})
    (folder / "code" / "diff.patch").write_text("+\tlr = 1\x07\n")
    log = formats.modded_nanogpt_log(folder)
    assert "\x1b" not in log and "\x07" not in log and "\\x1b]0;owned\\x07" in log
    assert "# +\tlr = 1\\x07\n" in log


def test_a_log_has_no_credential_and_no_private_path_of_the_diff(tmp_path):
    folder = copy_with(tmp_path / "run")
    token = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
    (folder / "code" / "diff.patch").write_text(f"+api_key = '{token}'\n+home = '{Path.home()}/data'\n")
    log = formats.modded_nanogpt_log(folder)
    assert token not in log and "# +api_key = 'SECRET'\n" in log and "# +home = '~/data'\n" in log


@pytest.mark.parametrize("name", ["config.yaml", "overrides.yaml"])
def test_what_a_link_in_a_record_leads_to_is_in_no_log_and_on_no_page(tmp_path, name):
    folder = copy_with(tmp_path / "run")
    (tmp_path / "private").write_text("swordfish")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "private")
    assert "swordfish" not in formats.modded_nanogpt_log(folder) + run_page.html(folder)


@pytest.mark.parametrize("name", ["code/diff.patch", "code"])
def test_a_record_whose_code_holds_a_link_gives_no_log(tmp_path, name):
    folder = copy_with(tmp_path / "run")
    (folder / "code" / "diff.patch").write_text("+swordfish\n")
    (folder / "code").rename(tmp_path / "private")
    (folder / "code").mkdir() if name != "code" else None
    (folder / name).symlink_to(tmp_path / "private" / name.partition("/")[2])
    with pytest.raises(ValueError, match=f"run/{name} is a link, so no file of this code/ is used"):
        formats.modded_nanogpt_log(folder)
    assert "swordfish" not in run_page.html(folder)


def test_mllog_has_the_times_of_the_events(capsys):
    assert export.main([str(COMPLETE), "--to", "mllog"]) == 0
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in capsys.readouterr().out.splitlines()]
    at_ms = {event["key"]: event["time_ms"] for event in events}
    assert [at_ms[key] - at_ms["init_start"] for key in ("init_stop", "run_start", "run_stop")] == [1000, 1000, 2000]
    last = [event for event in events if event["key"] == "eval_accuracy"][-1]
    assert last["metadata"]["step_num"] == 4
    assert last["metadata"]["samples_count"] == step_files.read(COMPLETE)[-1]["tokens"]


def test_a_modded_nanogpt_log_is_read_back_by_its_importer(tmp_path):
    assert export.main([str(COMPLETE), "--to", "modded-nanogpt", "--out", str(tmp_path / "a.txt")]) == 0
    ((run,), facts) = modded_nanogpt.read((tmp_path / "a.txt").read_bytes())
    assert (run.val_loss, run.num_steps, run.complete, facts["unmatched"]) == (4.25, 4, True, [])
    assert run.train_time_ms == 220 and run.facts["seed"] == 0  # train_s, and not the steps' 50 + 52 + 60 + 56
    assert run.step_avg_meaning == modded_nanogpt.MEANINGS[0]


def test_steps_that_cannot_be_read_are_no_empty_table(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(COMPLETE, folder)
    for text in ("garbage\n\1\2\n", (COMPLETE / "steps.csv").read_text()[:-9]):
        (folder / "steps.csv").write_text(text)
        with pytest.raises(ValueError, match="no record of 1 can be read"):
            export.main([str(folder), "--to", "csv", "--steps"])


def test_a_clock_that_was_restarted_after_ten_steps_is_read_back(tmp_path):
    folder = copy_with(tmp_path / "run", status="complete")
    run = json.loads((folder / "run.json").read_text())
    run["measured"]["num_untimed_steps"] = 10
    run["metrics"] |= {"num_steps": 40, "train_s": 0.6}
    (folder / "run.json").write_text(json.dumps(run))
    lines = ["step,flags,tokens,lr,train_loss,val_loss,step_ms,train_time_ms", "0,,,,,5.5,,0"]
    lines += [
        f"{step},,,,5.0,{'4.0' if step == 40 else ''},20,{20 * (step - 10 * (step > 10))}" for step in range(1, 41)
    ]
    (folder / "steps.csv").write_text("\n".join([*lines, ""]))
    ((read,), _) = modded_nanogpt.read(formats.modded_nanogpt_log(folder).encode())
    assert (read.step_avg_meaning, read.num_untimed_steps) == (modded_nanogpt.MEANINGS[1], 10)


def test_a_log_of_our_own_run_imports_to_every_digit_of_its_record(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    folder = next((REPO / "results" / "published").glob("*/cpu_nano/*-s0"))
    (tmp_path / "a.txt").write_text(formats.modded_nanogpt_log(folder))
    ((run, rows),), facts = dialects.read_file(tmp_path / "a.txt")
    own_run = run_folder.read(folder)
    for key in ("train_s", "step_avg_ms", "val_loss", "num_steps"):
        assert run["metrics"][key] == pytest.approx(own_run["metrics"][key], abs=1e-9, rel=0), key
    val_losses = {row["step"]: row["val_loss"] for row in step_files.read(folder) if row["val_loss"] is not None}
    assert {row["step"]: row["val_loss"] for row in rows if row.get("val_loss") is not None} == val_losses
    assert facts["unmatched"] == []


def test_parquet_is_read_back(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install pyarrow")
    assert export.main([str(COMPLETE), "--to", "parquet", "--steps", "--out", str(tmp_path / "a.parquet")]) == 0
    assert parquet.read_table(tmp_path / "a.parquet").column("step").to_pylist() == [0, 1, 2, 3, 4]


def test_wrong_use_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--to parquet: it cannot be printed: add --out FILE.parquet"):
        export.main([str(COMPLETE), "--to", "parquet"])
    with pytest.raises(ValueError, match="there is no run.json in or below it"):
        export.main([str(tmp_path), "--to", "csv"])
    with pytest.raises(ValueError, match="and 2 are named"):
        export.main([str(COMPLETE.parent), "--to", "modded-nanogpt"])
    with pytest.raises(ValueError, match="--steps with --to mllog: it is for csv, parquet and postgres"):
        export.main([str(COMPLETE), "--to", "mllog", "--steps"])


def test_an_imported_log_is_not_written_again(tmp_path):
    (tmp_path / "a.txt").write_text("s:0 tel:11.0092\ns:1 trl:10.9598\ns:1 tel:10.9\n")
    (pair,), _ = dialects.read_file(tmp_path / "a.txt")
    records.write(*pair, tmp_path)
    (folder,) = run_folder.find_runs([tmp_path])
    with pytest.raises(ValueError, match="was imported from a log, which is not written again"):
        formats.modded_nanogpt_log(folder)


def copy_with(to, **changes):
    """Copies the record with these facts -> its folder.  environment: only these of its facts change."""
    shutil.copytree(COMPLETE, to)
    run = json.loads((COMPLETE / "run.json").read_text())
    changes["environment"] = run["environment"] | changes.get("environment", {})
    (to / "run.json").write_text(json.dumps(run | changes))
    return to


def test_a_log_of_a_run_that_broke_off_says_how_many_steps_it_was_to_have(tmp_path):
    folder = copy_with(tmp_path / "run", status="failed")
    (folder / "config.yaml").write_text("goal:\n  num_steps: 9\n")
    ((read,), _) = modded_nanogpt.read(formats.modded_nanogpt_log(folder).encode())
    assert (read.declared_steps, read.num_steps, read.complete) == (9, 4, False)
    (folder / "config.yaml").unlink()
    with pytest.raises(ValueError, match="of an unknown number of steps"):
        formats.modded_nanogpt_log(folder)


def test_an_exported_log_has_no_line_for_what_is_unknown(tmp_path):
    unknown = dict.fromkeys(("python", "torch", "driver"))
    text = formats.modded_nanogpt_log(copy_with(tmp_path / "run", environment=unknown, seed=None, world_size=None))
    assert "None" not in text.split("=" * 100)[1]
    assert "peak memory" not in text  # a CPU's resident set is no allocated memory


def test_parquet_that_cannot_be_written_is_a_sentence_and_removes_nothing(tmp_path):
    """pyarrow unlinks its target when writing fails: as root --out /dev/full removed the device."""
    pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install pyarrow")
    (tmp_path / "a.parquet").write_text("mine")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ValueError, match="a.parquet: cannot be written"):
            export.main([str(COMPLETE), "--to", "parquet", "--out", str(tmp_path / "a.parquet")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "a.parquet").read_text() == "mine"


def test_a_standard_output_that_is_a_file_is_written_to_and_not_replaced(tmp_path):
    with open(tmp_path / "out.csv", "w") as out:
        command = [sys.executable, "-m", "bench", "export", str(COMPLETE), "--to", "csv", "--out", "/dev/stdout"]
        subprocess.run(command, stdout=out, check=True, cwd=Path(__file__).parent.parent)
    rows = (tmp_path / "out.csv").read_text().splitlines()
    assert os.path.islink("/dev/stdout") and rows[0].startswith("run_id,") and rows[-1] == "/dev/stdout"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="this machine has no /dev/shm")
def test_a_file_in_dev_shm_is_replaced_and_keeps_nothing_of_the_longer_one():
    path = Path("/dev/shm") / f"speedrun-test-{os.getpid()}.csv"
    try:
        path.write_text("x\n" * 100_000)
        assert not export.main([str(COMPLETE), "--to", "csv", "--out", str(path)])
        assert "x\n" not in path.read_text() and path.read_text().startswith("run_id,")
    finally:
        path.unlink()
