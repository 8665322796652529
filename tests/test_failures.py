"""What ranks and the agent left behind is classified as one cause."""

import errno
import json
import runpy
from pathlib import Path

import pytest

from bench.base import atomic
from bench.config import user_code
from bench.launch import finish
from bench.record import failures, ledger
from bench.training.timing.step_log import NonFiniteLoss


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def report(folder, rank, kind, message, at_s, step=7):
    failure = failures.failure(kind, message, rank, step) | {"failed_at_s": at_s, "traceback": "..."}
    (folder / "logs" / f"rank{rank}.failure.json").write_text(json.dumps(failure))


def agent(folder, *failed):
    rows = [{"rank": rank, "exit_code": code, "failed_at_s": at_s} for rank, code, at_s in failed]
    (folder / "logs" / "agent.json").write_text(json.dumps({"failures": rows}))


def test_a_good_end_is_no_failure(folder):
    assert failures.classify(folder, 0) is None


def test_the_killed_rank_is_the_cause_not_those_who_lost_it(folder):
    report(folder, 0, "exception", "RuntimeError: [../gloo/transport/tcp/pair.cc] Connection closed by peer", 100.0)
    agent(folder, (0, 1, 100.0), (1, -9, 100.0))
    cause = failures.classify(folder, 1)
    assert (cause["kind"], cause["rank"], cause["signal"], cause["exit_code"]) == ("rank_killed", 1, "SIGKILL", -9)


def test_a_kill_by_the_agent_long_after_the_first_failure_is_no_cause(folder):
    report(folder, 0, "collective_timeout", "RuntimeError: Timed out waiting 5000ms", 100.0)
    agent(folder, (0, 1, 100.0), (1, -9, 131.0))
    assert (failures.classify(folder, 1)["kind"], failures.classify(folder, 1)["rank"]) == ("collective_timeout", 0)


def test_the_rank_that_failed_first_is_the_cause(folder):
    report(folder, 0, "exception", "RuntimeError: Connection reset", 100.0)
    report(folder, 1, "out_of_memory", "RuntimeError: can't allocate memory", 100.2)
    report(folder, 2, "non_finite_loss", "NonFiniteLoss: train_loss=nan at step 9", 100.1, step=9)
    failure = failures.classify(folder, 1)
    assert (failure["kind"], failure["rank"], failure["step"]) == ("non_finite_loss", 2, 9)
    assert "failed_at_s" not in failure and "traceback" not in failure


def test_a_crash_in_native_code_is_distinguished_from_a_kill(folder):
    agent(folder, (3, -11, 100.0))
    failure = failures.classify(folder, 1)
    assert (failure["kind"], failure["signal"], failure["rank"]) == ("rank_crashed", "SIGSEGV", 3)


@pytest.mark.parametrize("exit_code", [-15, 143])
def test_what_starts_the_ranks_ended_from_outside_is_an_interrupted_run(folder, exit_code):
    failure = failures.classify(folder, exit_code)
    assert (failure["kind"], failure["signal"], failure["exit_code"]) == ("interrupted", "SIGTERM", exit_code)


def test_a_signal_to_torchrun_is_an_interrupted_run_though_it_ends_with_exit_code_1(folder):
    line = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 27060 got signal: 15\n"
    (folder / "logs" / "agent.log").write_text(f"Traceback (most recent call last):\n{line}")
    failure = failures.classify(folder, 1)
    assert (failure["kind"], failure["signal"], failure["exit_code"]) == ("interrupted", "SIGTERM", 1)


def test_an_agent_that_says_nothing_is_reported_as_that(folder):
    assert "exit code 1" in failures.classify(folder, 1)["message"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NonFiniteLoss(3, float("nan")), "non_finite_loss"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (RuntimeError("[gloo] Timed out waiting 5000ms for recv operation"), "collective_timeout"),
        (ValueError("pysource/train_000000.bin: it is cut"), "bad_data"),
        (ValueError("optim.lr=-1"), "bad_setting"),
        (ZeroDivisionError("division by zero"), "exception"),
    ],
)
def test_every_kind_of_error_has_a_name_and_a_hint(error, kind):
    assert failures.kind_of(error) == kind
    assert failures.HINTS[kind]


def test_a_value_error_of_the_users_own_code_is_not_called_a_bad_setting(tmp_path, monkeypatch):
    monkeypatch.setattr(user_code, "working_folder", lambda: str(tmp_path))
    (tmp_path / "my_optim.py").write_text("def step(): raise ValueError('not enough values to unpack')\n")
    with pytest.raises(ValueError) as raised:
        runpy.run_path(str(tmp_path / "my_optim.py"))["step"]()
    assert failures.kind_of(raised.value) == "exception"


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("ModuleNotFoundError: No module named 'wandb'", "script.python=PATH"),
        ("KeyError: 'DATA': the script needs this environment variable", "script.env={NAME: null}"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'", "prepare its data"),
        ("the script ended with exit code 1", "script.python=PATH"),
    ],
)
def test_an_exception_gets_the_remedy_for_what_it_lacks_and_an_exit_code_the_last_words(folder, message, hint):
    lines = "Traceback:", "[rank0]: ModuleNotFoundError: No module named 'wandb'", "a.b.ChildFailedError:", "======"
    (folder / "logs" / "rank0.log").write_text("\n".join(lines))
    report(folder, 0, "exception", message, at_s=1.0)
    failure = failures.classify(folder, 1)
    assert hint in failure["hint"]
    assert failure["message"] == message + ": ModuleNotFoundError: No module named 'wandb'" * message.endswith("code 1")


def test_a_failing_rank_can_still_speak_on_a_full_disk(folder, monkeypatch):
    atomic.reserve(folder)
    really = Path.write_text

    def full_until_released(self, text, *args, **kwargs):
        if (folder / atomic.RESERVE).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(self, text, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full_until_released)
    failures.write(folder, 0, 12, OSError(errno.ENOSPC, "No space left on device"))
    assert failures.classify(folder, 1)["kind"] == "disk_full"


def test_the_record_of_a_complete_run_waits_for_space_on_a_full_disk(tmp_path, monkeypatch, capsys):
    folder, full, write = tmp_path / "track" / "run", iter(range(4)), atomic.write_json
    folder.mkdir(parents=True)

    def full_for_a_while(path, obj, **options):
        if path.name == "run.json" and next(full, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, obj, **options)

    monkeypatch.setattr(atomic, "write_json", full_for_a_while)
    monkeypatch.setattr(finish.time, "sleep", lambda seconds: None)
    ledger.append(tmp_path, "start", run="track/run", race=None)  # an end alone begins no ledger
    finish._write(folder, {"run_id": "run", "status": "complete", "failure": None, "validity": "valid"})
    assert "the disk is full, and the record of run waits for space" in capsys.readouterr().err
    end = ledger.read(tmp_path).lines[-1]
    assert end["status"] == "complete" and not ledger.is_changed(folder, end)
