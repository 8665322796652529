"""However a run ends, torch's agent leaves nothing in the temp directory."""

import signal

import pytest
import racing

from bench.record import run_folder


@pytest.fixture
def temp(tmp_path):
    folder = tmp_path / "temp"
    folder.mkdir()
    return folder


def entries(temp):
    """But for torch's compile cache: one folder a user, which all runs share and which stays on purpose."""
    return sorted(path.name for path in temp.iterdir() if not path.name.startswith("torchinductor_"))


def test_a_complete_run_leaves_nothing_in_the_temp_directory(tmp_path, temp):
    folder = racing.race(tmp_path / "results", "hardware.num_processes=2", "hardware.num_threads=1", TMPDIR=str(temp))
    assert entries(temp) == []
    assert not [name for name in run_folder.files(folder) if "attempt" in name or "elastic" in name]


def test_a_failed_run_leaves_nothing_in_the_temp_directory(tmp_path, temp):
    words = ("optim.lr=1e30", "optim.grad_clip_norm=null", "goal.num_steps=50")
    done = racing.bench(tmp_path, "run", *racing.SHORT, *words, TMPDIR=str(temp))
    (folder,) = racing.folders(tmp_path)
    assert (done.returncode, racing.run_json(folder)["failure"]["kind"]) == (1, "non_finite_loss")
    assert entries(temp) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_launcher_leaves_nothing_in_the_temp_directory(tmp_path, temp, number):
    with racing.Background(tmp_path, TMPDIR=str(temp)) as run:
        run.wait_for_step(3)
        run.process.send_signal(number)
        run.process.wait(60)
        assert run.all_gone()
        assert racing.run_json(run.folder)["status"] == "aborted"
        assert not [path for path in run.folder.iterdir() if path.name.startswith(".")]
    assert entries(temp) == []


def test_the_doctor_leaves_nothing_in_the_temp_directory(tmp_path, temp):
    done = racing.bench(tmp_path, "doctor", "hardware=cpu", TMPDIR=str(temp))
    assert "2 ranks agree" in done.stdout
    assert entries(temp) == []
