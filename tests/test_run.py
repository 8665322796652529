"""Whole runs, started as a user starts them: what is in the record, and that the losses are always the same."""

import getpass
import json
import re
import socket
import statistics
from pathlib import Path

import numpy as np
import pytest
import real_runs
import torch

import models
from bench.config import schema
from bench.launch.prepare import prepare
from bench.record import step_files


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


def test_a_run_leaves_a_complete_record(finished_run):
    run = real_runs.run_json(finished_run)
    assert real_runs.ending(finished_run)[0] == 0, real_runs.said(finished_run)[1]
    assert (run["status"], run["failure"], run["seed"], run["track"]) == ("complete", None, 5, "free")
    assert finished_run.name == run["run_id"]
    assert re.fullmatch(r"\d{8}T\d{6}Z-gpt2-adamw-[0-9a-f]{8}-s5-m[0-9a-f]{6}", run["run_id"])
    assert run["metrics"]["num_steps"] == 6
    assert run["metrics"]["train_s"] == max(run["measured"]["train_s_by_rank"])
    assert run["metrics"]["step_avg_ms"] == pytest.approx(1e3 * run["metrics"]["train_s"] / 6)
    assert run["metrics"]["tokens_per_s"] == pytest.approx(6 * real_runs.BATCH_TOKENS / run["metrics"]["train_s"])
    assert run["metrics"]["mfu"] is None  # no peak is known for a CPU, and none is guessed
    assert set(run["instruments"]) >= {"regions", "garbage", "recompiles", "host"}
    assert run["warnings"] == []
    assert set(run["costs"]) >= {"stall", "gc", "recompile", "graph_break", "non_finite_loss"}
    assert run["skew"] is None  # one rank
    assert {check["name"] for check in run["preflight"]} >= {"disk", "memory", "cpu load", "threads", "epochs"}
    num_tokens = run["data"]["train"][0]["num_tokens"]
    assert run["data"]["epochs"] == pytest.approx(6 * real_runs.BATCH_TOKENS / num_tokens)
    assert run["timing_protocol"]["garbage_collection"] == "collected and frozen before the start, left on"
    names = {artifact["path"] for artifact in run["artifacts"]}
    assert {"config.yaml", "overrides.yaml", "steps.csv", "events.jsonl", "environment.json", "logs/rank0.log"} <= names
    assert "run.json" not in names


def test_steps_csv_has_a_row_for_every_step_and_the_first_validation(finished_run):
    rows = real_runs.steps(finished_run)
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row["val_loss"]] == ["0", "3", "6"]
    assert [int(row["tokens"]) for row in rows] == [real_runs.BATCH_TOKENS * step for step in range(7)]
    shares = []
    for row in rows[1:]:
        parts = sum(float(row[name]) for name in ("data_ms", "forward_ms", "backward_ms", "optimizer_ms"))
        shares.append(parts / float(row["step_ms"]))
    assert max(shares) <= 1 + 1e-9  # the marks of a step enclose those of its regions, however busy the machine is
    assert statistics.median(shares) > 0.9
    for row in rows[1:]:
        assert 0 < float(row["cpu_ms"]) <= float(row["step_ms"]) + 1
    starts_ns = [int(row["t_ns"]) for row in rows[1:]]
    assert starts_ns == sorted(starts_ns)


def test_events_are_in_the_order_of_things(finished_run):
    events = [json.loads(line) for line in (finished_run / "events.jsonl").read_text().splitlines()]
    names = [event["event"] for event in events]
    own = ["init_start", "warmup_stop", "run_start", "eval_stop", "eval_stop", "eval_stop", "run_stop", "run_end"]
    assert [name for name in names if name in own] == own
    assert names.index("run_start") < names.index("gc_total") < names.index("run_stop")  # of an instrument
    assert all(event["utc"] and event["t_ns"] for event in events)


def test_the_record_names_no_person(finished_run):
    files = [path for path in finished_run.rglob("*") if path.is_file() and "code" not in path.parts]
    text = "".join(path.read_text(errors="replace") for path in files)  # code/ holds the user's own words
    assert str(real_runs.REPO) not in text
    assert str(Path.home()) + "/" not in text
    assert len(socket.gethostname()) < 4 or socket.gethostname() not in text
    assert len(getpass.getuser()) < 5 or getpass.getuser() not in text


def test_lines_are_those_of_modded_nanogpt(results, finished_run):
    lines = [
        line for line in (finished_run / "logs" / "rank0.log").read_text().splitlines() if line.startswith("step:")
    ]
    number = r"\d+(\.\d+)?"
    assert len(lines) == 9
    assert re.fullmatch(rf"step:0/6 val_loss:{number} train_time:0ms", lines[0])
    assert re.fullmatch(rf"step:1/6 train_time:{number}ms step_avg:{number}ms", lines[1])
    assert re.fullmatch(rf"step:6/6 val_loss:{number} train_time:{number}ms step_avg:{number}ms", lines[-1])
    step_avg = f"{real_runs.run_json(finished_run)['metrics']['step_avg_ms']:.2f}"
    assert lines[-1].endswith(f" step_avg:{step_avg}ms")  # the record's is the last one printed
    assert f", step_avg {step_avg} ms" in real_runs.ending(finished_run)[1]


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(results, finished_run):
    assert real_runs.losses(real_runs.run(results, "seed=5")) == real_runs.losses(finished_run)
    assert real_runs.losses(real_runs.run(results, "seed=6")) != real_runs.losses(finished_run)


def test_instruments_change_no_bit(finished_run, bare_run):
    assert real_runs.losses(bare_run) == real_runs.losses(finished_run)
    assert "forward_ms" not in real_runs.steps(bare_run)[1]


def test_all_instruments_together_change_no_bit(finished_run, every_instrument_run):
    """But window, stages and nsys, which have tests of theirs."""
    folder = every_instrument_run
    assert real_runs.losses(folder) == real_runs.losses(finished_run)
    run = real_runs.run_json(folder)
    every = {path.stem for path in (real_runs.REPO / "conf" / "instruments").glob("*.yaml")}
    assert set(run["instruments"]) == every - {"window", "stages", "nsys"}
    assert set(run["instrument_summaries"]) >= {"trace", "memory", "telemetry", "regions"}
    names = {artifact["path"] for artifact in run["artifacts"]}
    assert any(name.endswith(".pt.trace.json.gz") for name in names) and "telemetry.csv" in names


def test_a_plain_loop_without_warm_up_gives_the_same_bits(finished_run):
    """The reference: no warm-up, no instruments, no threads; the harness must add nothing and lose nothing."""
    expected = [float(row["train_loss"]) for row in real_runs.steps(finished_run)[1:]]
    assert plain_losses(schema.read(finished_run)) == expected


def plain_losses(config):
    torch.set_num_threads(config.hardware.num_threads)
    shard = prepare(real_runs.SHORT).dataset.train[0].path
    stream = torch.from_numpy(np.fromfile(shard, dtype="<u2", offset=1024).astype(np.int64))
    shape = {"seq_len": config.data.seq_len, "num_layers": 2, "num_heads": 4, "width": 64}  # of real_runs.SMALL
    model = models.load(config.model.arch)(vocab_size=config.model.vocab_size, **shape)
    model.init_weights(torch.Generator().manual_seed(config.seed))
    optimizer = config.optim.build(model, 0, 1, "cpu")
    losses = []
    for step in range(config.goal.num_steps):
        first, end = real_runs.BATCH_TOKENS * step, real_runs.BATCH_TOKENS * (step + 1)
        tokens_BT = stream[first:end].view(-1, config.data.seq_len)
        targets_BT = stream[first + 1 : end + 1].view(-1, config.data.seq_len)
        loss = model(tokens_BT, targets_BT)
        loss.backward()
        if config.optim.grad_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip_norm)
        lr_frac = config.optim.schedule.lr_frac(step, config.goal.num_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_frac
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def test_the_losses_are_the_same_for_two_ranks(finished_run, two_rank_run):
    """To float rounding: sums over ranks are taken in another order."""
    has_every_ranks_steps(two_rank_run)
    assert numbers(two_rank_run) == pytest.approx(numbers(finished_run), rel=2e-5)


@pytest.mark.parametrize("num_processes", [4, 8])
def test_the_losses_are_the_same_for_more_ranks(ranks_run, finished_run, num_processes):
    assert numbers(ranks_run(num_processes)) == pytest.approx(numbers(finished_run), rel=2e-5)


def has_every_ranks_steps(folder):
    by_rank, rows = step_files.read_by_rank(folder), step_files.read(folder)
    for row in rows[1:]:
        slowest_ms = max(rank_ms[row["step"]] for rank_ms in by_rank["step_ms"])
        assert slowest_ms == pytest.approx(row["step_ms"], abs=1e-3)
        assert all(0 < rank_ms[row["step"]] <= slowest_ms for rank_ms in by_rank["own_ms"])
    run = real_runs.run_json(folder)
    assert len(run["skew"]["own_ms"]["late_steps_by_rank"]) == 2
    expected = {"count": run["skew"]["own_ms"]["num_late_steps"], "ms": run["skew"]["own_ms"]["late_ms_sum"]}
    assert run["costs"]["late_rank"] == expected
    assert {event["rank"] for event in step_files.read_events(folder) if event["event"] == "gc_total"} == {0, 1}


@pytest.mark.slow
def test_micro_steps_change_only_the_rounding(results, finished_run):
    folder = real_runs.run(results, "seed=5", "hardware.micro_batch_seqs=2")
    assert numbers(folder) == pytest.approx(numbers(finished_run), rel=2e-5)
    assert real_runs.run_json(folder)["measured"]["num_micro_steps"] == 4


def numbers(folder):
    return [float(loss) for row in real_runs.losses(folder) for loss in row[1:] if loss]


def test_a_run_stops_at_its_target(results):
    folder = real_runs.run(
        results, "goal=target", "goal.target_val_loss=5.5", "goal.num_steps=30", "goal.val_every_steps=2"
    )
    run = real_runs.run_json(folder)
    assert run["metrics"]["target_reached"] is True
    assert 0 < run["metrics"]["num_steps"] < 30
    assert run["metrics"]["val_loss"] <= 5.5


@pytest.mark.slow
def test_what_a_track_fixes_may_be_changed_but_the_record_says_so(results):
    done = real_runs.bench(
        results,
        "run",
        "track=cpu_nano",
        "goal.num_steps=4",
        "goal.val_tokens=4096",
        "hardware=cpu",
        "name=short",
        code=0,
    )
    (folder,) = [path for path in real_runs.folders(results) if "-short-" in path.name]
    expected = ["goal.num_steps: 4 instead of 120", "goal.val_tokens: 4096 instead of 32768"]
    assert real_runs.run_json(folder)["deviations"] == expected
    assert "open division: goal.num_steps: 4 instead of 120" in done.stdout
