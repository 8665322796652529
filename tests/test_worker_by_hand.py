"""A run's folder is all that its workers need: torchrun starts them by hand on a copy of it."""

import os
import shutil
import subprocess
import sys

import pytest
import real_runs

from bench.data.sources import datasets
from bench.data.sources.source import data_root
from bench.record import run_folder, step_files


def torchrun(folder):
    """Runs torchrun as a user types it, but on a free port."""
    arguments = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "bench.training.worker"]
    return started(*arguments, str(folder), TMPDIR=str(real_runs.temp_in(folder.parent)))


def worker(folder, **env):
    """Runs the worker as the only process of torchrun, for what is refused before there is more than one."""
    return started("bench.training.worker", str(folder), **env)


def started(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=real_runs.REPO,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.parametrize("of", ["a failed run", "its inputs alone", "a run that was killed with its launcher"])
def test_workers_started_by_hand_repeat_the_run_bit_for_bit(two_rank_run, tmp_path, of):
    original, folder = two_rank_run, tmp_path / "try"
    if of == "its inputs alone":
        folder.mkdir()
        for name in ("config.yaml", "run.json"):
            shutil.copy(original / name, folder)
    else:
        shutil.copytree(original, folder)
        (folder / "logs" / "rank1.failure.json").write_text("{}")
    if of == "a run that was killed with its launcher":
        launch = '{"folder": "/gone", "launcher_pid": 1, "started_s": 0.0, "shards": {}}'
        (folder / run_folder.LAUNCH).write_text(launch)
    done = torchrun(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step:6/6 val_loss:" in done.stdout + done.stderr  # on the terminal, not in a log
    assert real_runs.losses(folder) == real_runs.losses(original)
    names = [event["event"] for event in step_files.read_events(folder)]
    assert (names.count("run_start"), names.count("run_stop")) == (1, 1)  # none of the earlier run's
    assert list((folder / "logs").iterdir()) == []
    assert '"launch_s": null' in (folder / run_folder.RESULT).read_text()


def test_another_number_of_processes_is_refused(two_rank_run, tmp_path):
    folder = tmp_path / "try"
    shutil.copytree(two_rank_run, folder)
    done = worker(folder)
    assert done.returncode == 1
    assert "hardware.num_processes=2, but torchrun started 1: start torchrun --nproc_per_node=2" in done.stderr


def test_a_record_in_the_results_folder_is_not_overwritten(two_rank_run, tmp_path):
    folder = real_runs.copy_of(two_rank_run, tmp_path / "results")
    before = real_runs.losses(folder)
    done = worker(folder, SPEEDRUN_RESULTS=str(tmp_path / "results"))
    assert done.returncode == 1
    assert f"ValueError: {folder}: a run by hand would overwrite this record: copy it" in done.stderr
    assert real_runs.losses(folder) == before


def test_a_folder_of_something_else_is_refused_and_keeps_its_files(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine.log").write_text("mine")
    done = worker(tmp_path)
    assert done.returncode == 1
    assert f"ValueError: {tmp_path}: has not both config.yaml and run.json: give a copy" in done.stderr
    assert (tmp_path / "logs" / "mine.log").read_text() == "mine"


def test_a_shard_that_is_not_there_is_named_with_the_place_and_what_to_try(finished_run, tmp_path):
    folder, data = tmp_path / "try", tmp_path / "data"
    shutil.copytree(finished_run, folder)
    done = worker(folder, SPEEDRUN_DATA=str(data))
    name = real_runs.run_json(folder)["data"]["train"][0]["file"]
    assert done.returncode == 1
    assert f"CheckFailed: {data / name}: the shard {name} of run.json is not there: ./run.sh data" in done.stderr
    assert "SPEEDRUN_DATA=/path" in done.stderr


def test_another_shard_under_the_same_name_is_refused(two_rank_run, tmp_path, monkeypatch):
    data = real_runs.run_json(two_rank_run)["data"]
    for file in data["train"] + data["val"]:
        (tmp_path / file["file"]).parent.mkdir(exist_ok=True)
        shutil.copy(data_root() / file["file"], tmp_path / file["file"])
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    shards = datasets.recorded(data)
    assert [shard.num_tokens for shard in shards["val"]] == [file["num_tokens"] for file in data["val"]]
    path = tmp_path / data["val"][0]["file"]
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(datasets.CheckFailed, match=f"sha256 [0-9a-f]+ instead of {data['val'][0]['sha256']}"):
        datasets.recorded(data)


def test_shards_outside_the_data_folder_are_found_by_their_redacted_paths(two_rank_run, tmp_path, monkeypatch):
    data = real_runs.run_json(two_rank_run)["data"]
    (file,) = data["val"]
    shutil.copy(data_root() / file["file"], tmp_path / "mine.bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("~/mine.bin", str(tmp_path / "mine.bin")):
        (shard,) = datasets.recorded(data | {"train": [], "val": [file | {"file": name}]})["val"]
        assert shard.path == tmp_path / "mine.bin"
