"""Makes records as a race leaves them, which pass every rule of verify and are in the ledger, without training.

Data, config and names are those of track cpu_nano; the test chooses times, losses and regions.
"""

import dataclasses
import functools
import itertools
import random
import shutil
import tempfile
import types
import unittest.mock
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from bench.api import judging
from bench.base import atomic, metric, utc
from bench.claims.rules import rulebook
from bench.cli import race
from bench.config import compose, identity, resolve, schema, stages
from bench.config.resolve import deviations_of
from bench.machine import environment
from bench.machine.signals import Interrupted
from bench.plans.race import arm_process, planning
from bench.record import ledger, metrics, run_folder, step_files
from models.stages import ends_of

BASE = Path(__file__).parent / "records" / "20261121T031500Z-gpt2-adamw-48623a63-s0"
BEGIN = datetime(2026, 11, 21, 8, tzinfo=UTC)
NUM_STEPS = 120
REGIONS = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")


def at(minute, seconds=0.0):
    """Returns the start of the run with this number, or a time so many seconds later, as text."""
    return utc.text(BEGIN + timedelta(minutes=minute, seconds=seconds))


def failed(*arguments):
    """Returns {rule: evidence} of judge's rules that fail."""
    ((_, claim),) = judging.claims_of([str(argument) for argument in arguments])
    return {rule["rule"]: rule["evidence"] for rule in rulebook.check(claim) if rule["passed"] is False}


@functools.cache  # composing takes a third of a second
def _composed(overrides):
    config = resolve.resolve(compose.compose(["track=cpu_nano", *overrides]), schema.Machine(0, 2), 257)
    return config, deviations_of(config)


def config(seed=0, overrides=()):
    return dataclasses.replace(_composed(tuple(overrides))[0], seed=seed)


class Results:
    """A results folder that is filled run by run; each starts a minute after the previous one, in the ledger too."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.clock = itertools.count()
        self.now = at(0)  # time of the ledger's next line

    def race(self, monkeypatch, *overrides, b="optim.beta2=0.99", pct=-5, luck=3, **options):
        """Races A against B, which takes pct % longer; returns the folder.  luck: seed of noise; more: for Racers."""
        chance, before = random.Random(luck), set((self.folder / "races").glob("*"))
        time_of = lambda arm, seed: 10 * (1 + pct / 100 * (arm == "B")) * (1 + chance.gauss(0, 0.002))  # noqa: E731
        Racers(self, time_of, **options).install(monkeypatch)
        code = race.main(["A=", f"B={b}", *(overrides or ["n=3"])])
        while code == 1 and options.get("hurt"):
            code = race.main(["--resume"])
        (folder,) = set((self.folder / "races").glob("*")) - before
        return folder

    def kept_race(self, monkeypatch, pct=-5, luck=3):
        """Does the same as race() in an empty results folder, by copying a race that all tests share."""
        temporary, num_runs, now = _kept_race(pct, luck)
        shutil.copytree(f"{temporary.name}/results", self.folder, dirs_exist_ok=True)
        monkeypatch.setenv("SPEEDRUN_RESULTS", str(self.folder))
        self.clock, self.now = itertools.count(num_runs), now
        (folder,) = (self.folder / "races").glob("*")
        return folder

    def _ledger(self, entry, when, *facts):
        """Calls entry (ledger.started or ledger.ended) at this time."""
        self.now = when
        with unittest.mock.patch.object(utc, "now", lambda: self.now):
            return entry(self.folder, *facts)

    def add(
        self,
        seed=0,
        train_s=10.0,
        val_loss=2.75,
        overrides=(),
        shares=None,
        race=None,
        status="complete",
        source="41",
        change=None,
        losses=None,
        train_loss=None,
    ):
        """Adds a run and returns its folder.

        shares: {region column: fraction of a step}.  change(run): edits the record first.  losses: {step: val_loss};
        None for three, the last with val_loss.  train_loss: that of every step; None to derive it from the seed.
        """
        conf = config(seed, overrides)
        run = run_folder.read_raw(BASE)
        minute = next(self.clock)
        folder = run_folder.new_folder(
            self.folder, conf.track.name, conf.name, identity.config_id(conf), seed, BEGIN + timedelta(minutes=minute)
        )
        run |= {
            "run_id": folder.name,
            "name": conf.name,
            "track": conf.track.name,
            "seed": seed,
            "config_id": identity.config_id(conf),
            "started_at": at(minute),
            "heartbeat_at": at(minute),
            "ended_at": at(minute, train_s + 20),
            "deviations": list(_composed(tuple(overrides))[1]),
            "world_size": 1,
            "hardware": schema.to_dict(conf.hardware),
            "instruments": conf.instruments,
            "optim": conf.optim.name,
        }
        run["goal"] = {name: getattr(conf.goal, name) for name in run["goal"]}
        run["goal"] |= metric.goal_facts(conf.goal.of, conf.goal.target_value)
        run["code"]["source_sha256"] = (source * 64)[:64]
        run["timing_protocol"]["instruments"] = sorted(conf.instruments)
        run["data"]["train"][0]["sha256"], run["data"]["val"][0]["sha256"] = (
            conf.data.train_sha256,
            conf.data.val_sha256,
        )
        run["measured"] |= {
            "train_s_by_rank": [train_s],
            "wall_s": train_s + 20,
            "batch_tokens": stages.mean_batch_tokens(conf),
            "peak_mem_gib_by_rank": {"rss": [0.4]},
        } | ({"stages": _stages(conf)} if conf.stages else {})
        if race:
            run["race"] = race
        if change:
            change(run)
        run["comparability_id"] = environment.comparability_id(run)
        run["ledger_sha256"] = self._ledger(ledger.started, at(minute), folder, run, identity.shape(conf))
        if status == "killed":
            return folder
        losses = losses or {0: 5.6, 60: 3.2, NUM_STEPS: val_loss}
        train_loss = 3.0 + 1e-3 * seed if train_loss is None else train_loss
        self._write(folder, conf, run, train_s, losses, shares, status, train_loss)
        self._ledger(ledger.ended, at(minute, train_s + 20), folder, run)
        return folder

    def _write(self, folder, conf, run, train_s, losses, shares, status, train_loss):
        rows = _rows(train_s, losses, shares or dict.fromkeys(REGIONS, 0.25), conf, train_loss)
        run["status"] = status
        if status != "complete":
            run["failure"] = {
                "kind": "interrupted" if status == "aborted" else "non_finite_loss",
                "rank": None,
                "step": 3,
                "signal": None,
                "exit_code": None,
                "message": "an example",
                "hint": "none",
            }
            run["validity"], run["validity_reasons"] = "invalid", ["the run did not complete"]
        (folder / "config.yaml").write_text(yaml.dump(schema.to_dict(conf), Dumper=yaml.CSafeDumper, sort_keys=False))
        step_files.write(folder, rows)
        run["metrics"] = metrics.metrics(run, rows)
        run["artifacts"] = run_folder.listed(folder)
        atomic.write_json(folder / "run.json", run)


def _stages(conf):
    stage_list = stages.stages_of(conf)
    firsts = [0, *ends_of(stage_list, NUM_STEPS)]
    keys = ("flops_per_token", "flops_per_token_causal")
    return [
        {"first_step": first + 1, "num_steps": end - first, "batch_tokens": stage.batch_tokens}
        | {"seq_len": stage.seq_len, "num_micro_steps": stages.num_micro_steps(conf, stage)}
        | dict.fromkeys(keys, 6)
        for stage, (first, end) in zip(stage_list, itertools.pairwise(firsts), strict=True)
    ]


def _rows(train_s, losses, shares, conf, train_loss=3.0):
    step_ms = 1e3 * train_s / NUM_STEPS
    rows = []
    for step in range(NUM_STEPS + 1):
        row = {"step": step, "flags": "", "tokens": stages.num_tokens(conf, step), "val_loss": losses.get(step)}
        if conf.goal.of != metric.VAL_LOSS and step in losses:
            row[conf.goal.of.name] = losses[step] / 4
        if step:
            row |= {
                "lr": conf.optim.lr,
                "train_loss": train_loss,
                "step_ms": step_ms,
                **{name: share * step_ms for name, share in shares.items()},
            }
        rows.append(row)
    return rows


@functools.cache
def _kept_race(pct, luck):
    """Returns (temporary folder, number of runs, time of the ledger's last line); the cache keeps the folder alive."""
    temporary = tempfile.TemporaryDirectory()
    results = Results(Path(temporary.name) / "results")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_STATE_HOME", f"{temporary.name}/state")
        results.race(monkeypatch, pct=pct, luck=luck, pages=True)
    return temporary, next(results.clock), results.now


def three(results, **facts):
    """Adds what ./speedrun.sh leaves: three runs with three seeds."""
    return [results.add(seed, train_s=10 + 0.01 * seed, val_loss=2.74 + 0.01 * seed, **facts) for seed in range(3)]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The results folder of this test's commands, which the test fills run by run."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    return Results(tmp_path / "results")


class Racers:
    """Replaces plans.race.arm_process by arms that take no time.  time_of, loss_of: from (arm, seed) to s, nats.

    hurt: {number of the started run, from 0: "interrupt" | "kill" | "fail"}.  pages: also write the pages of the runs.
    """

    def __init__(
        self,
        results,
        time_of,
        loss_of=lambda arm, seed: 2.75 + 0.01 * seed,
        shares_of=lambda arm: None,
        hurt=None,
        losses_of=lambda arm, seed: None,
        pages=False,
    ):
        self.results = results if isinstance(results, Results) else Results(results)
        self.time_of, self.loss_of, self.shares_of, self.hurt = time_of, loss_of, shares_of, dict(hurt or {})
        self.losses_of, self.pages = losses_of, pages
        self.num_started = 0

    def install(self, monkeypatch):
        monkeypatch.setattr(
            "bench.plans.race.planning.secrets.randbits", lambda bits: 1
        )  # so that the order of the race is reproducible
        monkeypatch.setattr("bench.plans.race.planning.secrets.randbelow", self.next_seed)
        clock = types.SimpleNamespace(**vars(utc) | {"now": lambda: self.results.now})
        for module in (ledger, planning):  # times of plans, looks and ends must be between those of the runs
            monkeypatch.setattr(module, "utc", clock)
        if not self.pages:
            monkeypatch.setattr("bench.report.race_page.write_run_pages", lambda folder: None)
        monkeypatch.setattr("bench.plans.race.spoiled.forged", lambda race, known: None)  # held clocks are not its time
        monkeypatch.setattr(arm_process, "facts", self.facts)
        monkeypatch.setattr(
            arm_process,
            "facts_of_own",
            lambda folder, arms, results: [arm_process.facts(None, overrides, results) for overrides in arms],
        )
        monkeypatch.setattr(arm_process, "start", self.start)
        monkeypatch.setattr(arm_process, "source_sha256", lambda folder, own: ("41" * 64)[:64])
        monkeypatch.setenv("SPEEDRUN_RESULTS", str(self.results.folder))

    def next_seed(self, limit):
        """Returns a seed that no run had, small because val_loss_of() adds it to the loss."""
        starts = [run["start"] for run in ledger.read(self.results.folder).runs.values()]
        return max((start["seed"] or 0 for start in starts), default=-1) + 1

    def facts(self, folder, overrides, results):
        conf = config(0, overrides)
        run = run_folder.read_raw(BASE)
        goal = conf.goal.of
        row = {"metric": goal.name, "metric_unit": goal.unit, "metric_direction": goal.direction}
        return ({} if goal == metric.VAL_LOSS else {"row": row}) | {
            "name": conf.name,
            "config_id": identity.config_id(conf),
            **identity.shape(conf),
            "track": conf.track.name,
            "deviations": list(_composed(tuple(overrides))[1]),
            "source_sha256": ("41" * 64)[:64],
            "commit": run["code"]["commit"],
            "dirty": False,
            "session_id": run["session_id"],
        }

    def start(self, folder, overrides, results, place, own=(), show=False, tick=None):
        *overrides, seed = overrides
        seed, arm = int(seed.removeprefix("seed=")), place["arm"]
        harm = self.hurt.pop(self.num_started, None)
        self.num_started += 1
        status = {"interrupt": "aborted", "kill": "killed", "fail": "failed", None: "complete"}[harm]
        facts = overrides, self.shares_of(arm), dict(place), status
        losses = self.losses_of(arm, seed)
        options = {"losses": losses} if losses else {}
        self.results.add(seed, self.time_of(arm, seed), self.loss_of(arm, seed), *facts, **options)
        if harm in ("interrupt", "kill"):
            raise Interrupted("SIGINT")
        return ""
