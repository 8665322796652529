"""The benchmark of a GPU: its plain loops train, its rounds and ratios are right, and all of it runs on a CPU."""

import contextlib
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import real_runs
import torch
from benchmarks import gpu, rows
from benchmarks.gpu import NanoGPT, Setting, Track3

from bench.base.paths import REPO
from bench.machine import processes
from models.gpt2 import GPT2


@pytest.fixture
def setting():
    tokens = np.tile(np.arange(16, dtype=np.uint16), 64)  # the next token is always the one above
    return Setting(tokens, 4, 16, 2, torch.device("cpu"), False, contextlib.nullcontext)


def loss_of(loop):
    tokens_BT = torch.arange(17)[None] % 16
    with torch.no_grad():
        return loop.model(tokens_BT[:, :-1], tokens_BT[:, 1:]).item()


@pytest.mark.parametrize("name", ["nanoGPT", "track 3"])
def test_a_plain_loop_learns(setting, name):
    torch.manual_seed(0)
    model = GPT2(16, 16, 1, 2, 32)
    model.init_weights(torch.Generator().manual_seed(0))
    loop = NanoGPT(model, setting) if name == "nanoGPT" else Track3(1, 32, 16, setting)
    before = loss_of(loop)
    for _ in range(30):
        loop.step()
    assert loss_of(loop) < 0.8 * before


def test_a_round_runs_all_forwards_and_backwards_and_stops_at_its_time():
    calls, kept, seconds = [], [], {"a": 1.0, "b": 2.0}
    contest = types.SimpleNamespace(blocks=seconds, _seconds_of=lambda name: calls.append(name) or seconds[name])
    times_s = gpu.Contest.rounds(contest, 9, lambda seconds_of: not kept.append(len(seconds_of["a"])))
    assert times_s == {"a": [2.0] * 5, "b": [4.0] * 5} and kept == [1, 2, 3, 4, 5]
    assert calls[:4] == ["a", "b", "b", "a"]
    assert gpu._ratio(times_s, "a", "b", 0.95, "X", False)[:4] == ("a / b (X)", 0.5, "<=", 0.95)
    assert gpu._ratio(times_s, "a", "b", 0.95, "X", True)[2:4] == (None, None)


@pytest.mark.parametrize("memory_gib, num_seqs", [(140, 64), (80, 64), (40, 32), (24, 8), (None, 64)])
def test_micro_steps_fit_the_gpu_and_make_the_same_step(memory_gib, num_seqs):
    size = gpu._small({"memory_gib": memory_gib})  # 0.6 * 32 + 15 = 34.2 < 36; 0.6 * 8 + 15 = 19.8 < 21.6
    assert size.num_seqs == num_seqs and size.num_seqs * size.num_micro_steps * size.seq_len == 524_288


def test_what_has_no_target_has_no_verdict(capsys):
    assert rows.show([rows.Row("x", 2.0, ci95=(1.0, 3.0))]) == 0
    assert "MISSED" not in capsys.readouterr().out


def test_a_measurement_that_is_cut_off_leaves_the_rows_of_the_rounds_that_ended(tmp_path, monkeypatch):
    loader = importlib.machinery.SourceFileLoader("ci_gpu", str(REPO / ".ci/gpu"))
    loader.exec_module(own := importlib.util.module_from_spec(importlib.util.spec_from_loader("ci_gpu", loader)))
    stand_in = tmp_path / "python"  # writes one round's row, and hangs in the next
    row = json.dumps([rows.Row("a / b", 0.5, "<=", 0.95)._asdict()])
    stand_in.write_text(f"#!/bin/sh\necho '{row}' >${{3#--rows=}}\nexec sleep 60\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr(own, "LEAST_S", 0.0)
    session = own.Session(tmp_path, minutes=1 / 60, is_rehearsal=True)
    own.speed(session)
    assert [row["what"] for row in json.loads((tmp_path / "checks.json").read_text())] == ["a / b"]
    assert not session.is_whole


def test_what_a_session_on_a_gpu_has_started_ends_if_it_is_killed(tmp_path):
    command = [sys.executable, ".ci/gpu", "speed", "--rehearse", f"--out={tmp_path}"]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL) as session:
        (child,) = real_runs.wait_for(lambda: processes.children(session.pid), 60)
        real_runs.wait_for(lambda: b"tests/benchmarks" in Path(f"/proc/{child}/cmdline").read_bytes(), 60)
        session.kill()
    real_runs.wait_for(lambda: processes.start_ticks(child) is None, 30)


@pytest.mark.slow
def test_what_a_gpu_is_asked_is_answered_in_a_rehearsal(tmp_path):
    command = [sys.executable, ".ci/gpu", "truth", "speed", "--rehearse", "--minutes=15", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=1000)
    checks = {row["what"]: row for row in json.loads((tmp_path / "checks.json").read_text())}
    assert " cut after" not in done.stdout and "not run" not in done.stdout, done.stdout
    speed = {what: row for what, row in checks.items() if "rehearsal on a CPU" in what}
    assert all(row["target"] is None and row["measured"] > 0 for row in speed.values())
    assert len(speed) == 6 + 8 + 4 + 6  # ratios and rates of one process; of two that reduce gradients
    assert "failed" not in (tmp_path / "15-speed.log").read_text()
    exact = [what for what in checks if what.endswith(("as expected", "exit code", "a look changed"))]
    assert len(exact) == 8 + 6 + 1 and all(rows.Row(**checks[what]).verdict == "met" for what in exact), checks
