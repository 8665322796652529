"""A rank of a run, from its config to its record, in the order in which it happens.

    read config.yaml, join the other ranks           Run.__init__
    build model, optimizer, loader                   _build            trainer.py, model.py, reducer.py
    run every graph once, and undo it                _warm_up          trainer.py, causality.py
    train by the clock until the goal                _train, loop.py   clock.py, step_log.py, step_writer.py
    check the trained model against the rules        _check_model      causality.py, side_effects.py, referee_loss.py
    gather what all ranks measured                   _write_record     gather_result.py
    profile a few more steps                         _look             look.py

worker.py is the process around it; the launcher makes run.json of its results (bench/launch/finish.py).
"""

import contextlib
import functools
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch

from bench.base import metric as goal_metric
from bench.config import schema
from bench.config.stages import mean_batch_tokens
from bench.data.shards import check as check_shard
from bench.data.sources import datasets
from bench.machine import environment
from bench.machine.meters import CpuMeter
from bench.record import metrics, outside_clock, run_folder
from bench.training import (
    causality,
    checkpoint,
    compile_flags,
    distributed,
    gather_result,
    imported,
    look,
    side_effects,
    weights,
)
from bench.training.instruments.base import Context, InstrumentSet, warning
from bench.training.instruments.registry import last_step, load
from bench.training.memory import peaks_for
from bench.training.model import choose_kernels, kernel_facts, stage_facts
from bench.training.referee_loss import RefereeLoss
from bench.training.step_writer import NOTE, RankEvents, StepWriter
from bench.training.timing.clock import Clock, GcPolicy, marks_for, reporter
from bench.training.timing.loop import FinishLine, train
from bench.training.timing.step_log import StepLog
from bench.training.trainer import Trainer


class Run:
    """Run(...).train() does the whole run; rank 0 leaves steps.csv, events.jsonl and .result.tmp in folder.

    launch is what the launcher wrote for its workers, or None; started_s is when this process began, by
    time.monotonic().  The list warnings receives the names of signals that announce the run's end.
    """

    def __init__(
        self, folder: Path, launch: dict[str, Any] | None, started_s: float, warnings: list[str] | None = None
    ):
        launch = launch or {}
        launched_s = launch.get("started_s")  # absent if another machine launched the run: its clock differs
        launch_s = None if launched_s is None else started_s - launched_s
        self.times: dict[str, Any] = {"launch_s": launch_s, "import_s": time.monotonic() - started_s}
        self.folder = folder
        self.rows: list[dict[str, Any]] = []  # this rank's (StepLog), as they become known
        self._log: StepLog | None = None
        self.referee: dict[str, dict[str, Any]] = {}  # outcomes of the checks, for run.json["referee"]
        self._survival, self._warnings = launch.get("survival"), warnings if warnings is not None else []
        of_segment = (self._survival or {}).get("settings", ())  # config.yaml has those of the first one
        self.config = schema.read(folder, [*launch.get("secrets", ()), *of_segment])
        hardware = self.config.hardware
        compile_flags.watch()
        torch.set_num_threads(hardware.num_threads)  # torchrun without the launcher sets OMP_NUM_THREADS=1
        choose_kernels(hardware)
        self.ranks = distributed.start(
            hardware.device, max(hardware.collective_timeout_s, distributed.WARMUP_TIMEOUT_S), hardware.num_processes
        )
        self.record = run_folder.read(folder)
        if launch:
            self.shards = {split: [check_shard(path) for path in launch["shards"][split]] for split in ("train", "val")}
        else:
            self.shards = datasets.recorded(self.record["data"])
        self._edge_pipe = launch.get("edge_pipe")
        self._t_offset_ns = launch.get("t_offset_ns", 0)  # node 0's clock minus this node's
        self._stopped_at: int | None = None  # the step after which profile.stop_after_window ended the run
        self._earlier: dict[str, Any] = {}  # what _save_state() wrote in the run's earlier segments
        self.events, self.marks = RankEvents(self.ranks.rank), marks_for(self.ranks.device.type)
        self.peaks = peaks_for(self.ranks.device.type, self.ranks.device)
        self.instruments = self._load_instruments()

    @property
    def step(self) -> int:
        """The row of steps.csv of the step that runs, or that ran last; 0 before training."""
        return self._log.step if self._log else 0

    def train(self) -> None:
        """Does the whole run.  On a failure, the events until then are kept."""
        try:
            self._build()
            self._warm_up()
            self._resume()
            measured = self._train()
            if measured is not None:
                self._check_model()
        except BaseException as error:
            self.instruments.on_failure(error)
            self.events.write(self.folder)
            raise
        finally:
            self.instruments.close()
        if measured is not None:  # otherwise a warning ended the run, and its last checkpoint has everything
            if self.config.checkpoint.save and self.ranks.is_first and self._stopped_at is None:
                self._save_weights(measured.rows[-1])
            self._write_record(measured)
            distributed.barrier()  # no rank may leave, or risk another step, while another rank still needs it
            if self._is_looking():
                self._look(len(measured.rows))
        self._trainer.close()
        del self._trainer
        gc.collect()
        distributed.stop()

    def _build(self) -> None:
        started_s = time.perf_counter()
        self.instruments.on_build_start()
        self._trainer = Trainer(self.config, self.ranks, self.shards["train"], self.shards["val"])
        self.instruments.on_build_end()
        self.times["build_s"] = time.perf_counter() - started_s

    def _warm_up(self) -> None:
        self._referee_loss = RefereeLoss(self._trainer, is_required=self.config.track.name != "free")
        self._referee_loss.at_start()
        torch.cuda.empty_cache()  # a row's logits may be larger than all of a step; what the warm-up leaves fits steps
        log = StepLog(self.marks, self.ranks.device, self.config.goal.num_steps)
        self._trainer.attach(InstrumentSet(essential=log), log)
        self.instruments.on_warmup_start()
        times = self._trainer.warm_up()
        causal = causality.worst(distributed.gather(times.pop("causality")))
        self.times |= times | {"sdpa_backends": causal.pop("sdpa_backends")}
        self.times["causality"] = "checked" if causal["why"] is None else f"not checked: {causal['why']}"
        self.referee["causality"] = {"seed": self._trainer.causality_seed, "start": causal}
        if causal["why"] is not None and self.ranks.is_first:
            facts = {"instrument": "causality guard", "edge": "warmup", "error": self.times["causality"]}
            self.instruments.warnings.append(facts)
        self.instruments.on_warmup_end()
        gc.collect()
        self.peaks.reset()
        distributed.set_timeout(self.config.hardware.collective_timeout_s)

    def _resume(self) -> None:
        """Resumes where the run's earlier segments ended, if there are any."""
        if self._survival and self._survival["step"] is not None:
            self._earlier = checkpoint.load(self._survival, self.ranks)
            self._referee_loss.restore(self._earlier["referee_loss"])  # before the weights are no longer the first
            self._trainer.restore(self._earlier["trainer"])
            self.rows.extend(self._earlier["rows"])

    def _save_state(self, step: int, stop: int, log: StepLog, clock: Clock, finish_line: FinishLine) -> bool:
        """Saves a checkpoint, in a pause of the clock.  Returns whether the run ends with it."""
        log.on_checkpoint(clock.train_s)
        slowest_s = max(distributed.gather(clock.train_s))
        state = {
            "loop": [step, stop],
            "train_s": slowest_s,
            "paused": [clock.paused_ns.get("validation", 0), clock.num_pauses.get("validation", 0)],
            "last": finish_line.last,
            "rows": log.rows,
            "first_row": log.first_row or self._earlier.get("first_row"),
            "trainer": self._trainer.state(),
            "referee_loss": self._referee_loss.state(),
        }
        ends, why = self._checkpoints.save(step, slowest_s, state)
        if why and self.ranks.is_first:
            self.instruments.warnings.append({"instrument": "checkpoint", "edge": f"step {step}", "error": why})
        if self._writer:
            self._writer.event("checkpoint", step=step, train_s=clock.train_s, **({"error": why} if why else {}))
        return ends

    def _train(self) -> gather_result.RankResult | None:
        """Trains by the clock; returns what this rank measured, or None if the run ended with a checkpoint."""
        goal, hardware, trainer, instruments = self.config.goal, self.config.hardware, self._trainer, self.instruments
        earlier: dict[str, Any] = {"loop": (0, 0), "train_s": 0.0, "paused": (0, 0), "last": (0, 0.0)} | self._earlier
        self._facts = self._known_facts()
        self._writer = writer = self._step_writer() if self.ranks.is_first else None
        log = self._log = StepLog(
            self.marks,
            self.ranks.device,
            goal.num_steps,
            on_row=writer.row if writer else None,
            rows=self.rows,
            metrics=self._metrics,
            train_s=earlier["train_s"],
        )
        finish_line = FinishLine(
            goal,
            self._facts["model"]["flops_per_token"],
            self._facts["measured"]["batch_tokens"],
            lambda train_s: max(distributed.gather(train_s)),
            trainer.set_horizon,
            self._is_target,
            last_step(self.config.instruments) if self.config.profile.stop_after_window else None,
        )
        finish_line.last = tuple(earlier["last"])
        policy = GcPolicy(hardware.gc, hardware.gc_every_steps)
        instruments.attach(log)
        trainer.attach(instruments, log, checks=(*((writer.check,) if writer else ()), *policy.checks))
        report = reporter(self._edge_pipe if self.ranks.is_first else None)
        sync = functools.partial(distributed.sync, self.ranks.device)
        clock = Clock(sync, distributed.barrier, report=report, train_s=earlier["train_s"])
        clock.paused_ns["validation"], clock.num_pauses["validation"] = earlier["paused"]
        saving = None
        with contextlib.ExitStack() as stack:
            if writer:
                stack.enter_context(writer)
                stack.enter_context(self.events.handed_to(writer.emitted))
            stack.callback(log.read_completed)
            policy.before_training()
            waited_ns, meter = trainer.loader.wait_ns, CpuMeter()
            if writer:
                names = ("warmup_s", "compile_s", "compile_cache")
                writer.event("warmup_stop", **{name: self.times[name] for name in names})
                writer.event("run_start")
            instruments.on_run_start()
            if self._survival:
                self._checkpoints = checkpoint.Checkpoints(self._survival, self.ranks, self.folder, self._warnings)
                stack.callback(self._checkpoints.close)
                save = functools.partial(self._save_state, log=log, clock=clock, finish_line=finish_line)
                saving = self._checkpoints.is_due, save
            num_steps, val_loss = train(
                trainer.step, self._referee_loss.evaluate, finish_line, clock, instruments, saving, earlier["loop"]
            )
            if val_loss is None:
                return None
            self._stopped_at = num_steps if num_steps == finish_line.stop_after else None
            own_cpu_s = self.ranks.node, meter.own_cpu_s()
            policy.after_training()
            instruments.on_run_end()
            node_cpu_s = sum(cpu_s for node, cpu_s in distributed.gather(own_cpu_s) if node == self.ranks.node)
            foreign_cpu_cores = meter.foreign_cpu_cores(node_cpu_s)
            if num_saved := clock.num_pauses.get("checkpoint"):
                self.times["num_checkpoints"] = num_saved
            if writer:
                writer.event("run_stop", step=num_steps, train_s=clock.train_s)
            observed = {kind: instruments.collect(kind) for kind in ("columns", "flags", "summary", "doubts")}
            instruments.collect_warnings()
        return gather_result.RankResult(
            train_s=clock.train_s,
            validation_s=clock.paused_ns.get("validation", 0) / 1e9,
            num_validations=clock.num_pauses.get("validation", 0),
            rows=log.rows,
            columns=observed["columns"],
            flags=observed["flags"],
            summaries=observed["summary"],
            doubts=observed["doubts"] | {outside_clock.CLOCK: meter.doubts_about_threads(hardware)},
            loader_wait_ms=(trainer.loader.wait_ns - waited_ns) / 1e6,
            peak_mem_gib=self.peaks.whole_gib(),  # before the referee's passes
            foreign_cpu_cores=foreign_cpu_cores,
            node=self.ranks.node,
            t_offset_ns=self._t_offset_ns,
        )

    def _check_model(self) -> None:
        """Checks that the model is still causal, that evaluating it changes nothing, and that its loss is true.

        Done off the clock, right after the last validation, before anything else calls the model; validity.py judges.
        """
        if self._stopped_at is not None:
            return
        started_s = time.perf_counter()
        everyone = distributed.gather(self._trainer.check_at_end())
        causal = causality.worst([rank["causality"] for rank in everyone])
        causal.pop("sdpa_backends", None)
        self.referee["causality"]["end"] = causal
        evaluation = side_effects.worst([rank["evaluation"] for rank in everyone])
        self.referee["evaluation"] = evaluation | {"check_s": time.perf_counter() - started_s}
        self.referee["loss"] = self._referee_loss.at_end(self.rows[-1]["step"] if self.rows else 0)

    def _save_weights(self, last_row: dict[str, Any]) -> None:
        """Saves the weights, off the clock.  If that fails, the run, which has been measured, only gets a warning."""
        started_s = time.perf_counter()
        record: Any = self.record
        about = {name: str(record[name]) for name in ("run_id", "config_id", "seed")}
        about |= {"format": "pt", "step": str(last_row["step"]), "val_loss": repr(last_row["val_loss"])}
        try:
            weights.write(self.folder / weights.FILE, self._trainer.model.state_dict(), about)
        except (OSError, ValueError) as error:
            self.instruments.warnings.append(warning("checkpoint", "after training", error))
        self.times["checkpoint_s"] = time.perf_counter() - started_s

    def _write_record(self, measured: gather_result.RankResult) -> None:
        """Gathers what all ranks measured, which rank 0 writes."""
        measured.code = imported.facts(hashes=self.ranks.is_first)
        measured.compile_flags = {
            name: value for name, value in compile_flags.changed().items() if name not in self._trainer.own_flags
        }
        measured.warnings, measured.events = self.instruments.warnings, self.events.kept  # close() may have added some
        everyone = distributed.gather(measured)
        if self._writer is not None:
            facts = {
                "stopped_at": self._stopped_at,
                "model": self._facts["model"],
                "measured": self.times | self._facts["measured"],
                "torch_facts": environment.torch_facts() | {"num_threads": torch.get_num_threads()},
                "instrument_summaries": self.instruments.merge([rank.summaries for rank in everyone]),
                "referee": self.referee | {"code": imported.merged([rank.code for rank in everyone])},
            }
            everyone[0].warnings = self.instruments.warnings  # merge() may have added some
            gather_result.write(self.folder, self._writer.rows, everyone, facts, begins_look=self._is_looking())

    def _is_looking(self) -> bool:
        return bool(self.config.look.enabled) and self._stopped_at is None

    def _look(self, num_steps: int) -> None:
        """Profiles a few more steps.  The measurements are written already, and the model is discarded afterwards."""
        facts, warnings = look.look(self.config.look, self._trainer, self._context, num_steps)
        everyone = distributed.gather(warnings)
        if self.ranks.is_first:
            gather_result.add_look(self.folder, facts, everyone)
        distributed.barrier()

    def _load_instruments(self) -> InstrumentSet:
        """Loads the chosen instruments; one that fails to start becomes a warning."""
        ranks = self.ranks

        def say(text: str) -> None:
            os.write(1, f"{NOTE}{text}\n".encode())

        context = self._context = Context(
            self.folder,
            ranks.rank,
            ranks.world_size,
            ranks.device.type,
            self.config.goal.num_steps,
            self.marks,
            ranks.device.index,
            self.events,
            say,
            self.peaks,
            rows=self.rows,
            node=ranks.node,
            local_rank=ranks.local_rank,
            local_size=ranks.local_size,
        )
        instruments, warnings = load(self.config.instruments, context)
        return InstrumentSet(instruments, warnings=warnings)

    def _known_facts(self) -> dict[str, Any]:
        """Returns run.json's facts about model and batch, which are known before the first step."""
        config, model = self.config, self._trainer.model
        stages = stage_facts(config, self._trainer.timeline, self._trainer.flops_per_token())
        return {
            "model": {
                "arch": self._trainer.arch,
                "num_params": sum(parameter.numel() for parameter in model.parameters()),
                **metrics.mean_flops_per_token(stages),
            },
            "measured": {
                "batch_tokens": mean_batch_tokens(config),
                **({"stages": stages} if config.stages else {"num_micro_steps": stages[0]["num_micro_steps"]}),
                "dtype": config.hardware.dtype,
                "reducer": self._trainer.reducer.name,
                **kernel_facts(),
                **({} if self._referee_loss.val_bytes is None else {"val_bytes": self._referee_loss.val_bytes}),
            },
        }

    def _metrics(self) -> dict[str, float | None]:
        """Returns what the last validation measured besides val_loss."""
        val_bpb = self._referee_loss.val_bpb
        return {} if val_bpb is None else {"val_bpb": val_bpb}

    def _step_writer(self) -> StepWriter:
        record: Any = self.record | self._facts
        return StepWriter(
            self.folder,
            self.config.goal.num_steps,
            tokens=lambda num_steps: metrics.tokens_in_steps(record["measured"], num_steps),
            lr=self._trainer.lr,
            speed=lambda train_s, num_steps: metrics.speed(record, train_s, num_steps),
            metrics=[
                *(name for name in (goal_metric.VAL_BPB.name,) if self.config.goal.metric == name),
                *["train_s"] * (self.config.goal.time_budget_s is not None),
            ],
            earlier=[self._earlier["first_row"], *self.rows] if self._earlier else [],
        )

    def _is_target(self, val_loss: float) -> bool:
        """Whether val_loss, or the goal's metric at that validation, reaches a target at which the run may stop."""
        goal = self.config.goal
        if not goal.stop_at_target:
            return False
        if goal.target_value is not None:
            return goal.of.reaches(self._metrics().get(goal.of.name) or val_loss, goal.target_value)
        assert goal.target_gap_nats is not None  # stop_at_target needs one of the two targets
        return bool(val_loss - self.record["data"]["floor_nats"] <= goal.target_gap_nats)
