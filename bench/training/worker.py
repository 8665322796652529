"""One rank of one race: build, warm up and give the state back, race, record, also when it fails.

Started by bench/launch/agent.py, or by hand with torchrun, as  python -m bench.training.worker FOLDER  where FOLDER holds config.yaml,
run.json and, if a launcher started this, .launch.tmp.  Writes logs/rankN.log (by hand: to the terminal); rank 0 writes
steps.csv, events.jsonl and .result.tmp; a rank that fails writes logs/rankN.failure.json.  Needs no Hydra.
"""

import os
import time

STARTED_S = time.time()  # before the imports below: they take seconds, and the record says how many
AGENT_PID = os.getppid()  # as early as possible: a process whose parent has ended gets another one

import contextlib  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from pathlib import Path  # noqa: E402

from bench import utc  # noqa: E402
from bench.machine import processes  # noqa: E402
from bench.memory.peaks import peaks_for  # noqa: E402
from bench.paths import results_root  # noqa: E402
from bench.record import failures, run_folder, step_files  # noqa: E402
from bench.training import flight_recorder  # noqa: E402
from bench.training.step_writer import NOTE, PEN, Scribe  # noqa: E402


def main(folder):
    folder = Path(folder)
    rank = int(os.environ.get("RANK", 0))
    launch = _launch(folder)
    if launch:
        _redirect_output(folder / "logs" / f"rank{rank}.log")
    else:
        _make_ready(folder, rank)
    _end_with_agent(folder, rank, launch)
    flight_recorder.arm(folder)
    progress = {"step": 0}
    try:
        _run(folder, launch, progress)
    except BaseException as error:
        if failures.write(folder, rank, progress["step"], error) in ("collective_timeout", "exception"):
            flight_recorder.dump(folder, rank)
        raise


def _run(folder, launch, progress):
    import torch

    import_s = time.time() - STARTED_S
    from bench.config import schema
    from bench.training import distributed

    config = schema.read(folder)
    hardware = config.hardware
    torch.set_num_threads(hardware.num_threads)  # torchrun by hand sets OMP_NUM_THREADS=1
    torch.use_deterministic_algorithms(hardware.deterministic)
    ranks = distributed.start(hardware.device, hardware.collective_timeout_s, hardware.num_processes)
    times = {"launch_s": STARTED_S - launch["started_s"] if launch else None, "import_s": import_s}
    run = run_folder.read(folder)
    shards = _shards(launch, run)
    emitted = Emitted(ranks.rank)
    peaks = peaks_for(ranks.device.type, ranks.device)
    rows = []  # of the steps, as the log reads them
    watch = _watch(folder, config, ranks, emitted, peaks, rows)
    try:
        started = time.perf_counter()
        from bench.training.trainer import Trainer

        watch.on_build_start()
        trainer = Trainer(config, ranks, shards["train"], shards["val"])
        watch.on_build_end()
        times["build_s"] = time.perf_counter() - started
        mine = _race(folder, config, ranks, trainer, run, times, progress, watch, emitted, peaks, rows)
    except BaseException as error:
        watch.on_failure(error)
        emitted.write(folder)
        raise
    finally:
        watch.close()
    mine |= {"warnings": watch.warnings, "events": emitted.kept}  # complete only now: closing may have said more
    everyone = distributed.gather(mine)
    if ranks.is_first:
        from bench.training import gather_result

        summaries = watch.merge([rank["summaries"] for rank in everyone])
        everyone[0]["warnings"] = watch.warnings  # merging may have said more
        gather_result.write(folder, config, schema.num_micro_steps(config), trainer, times, everyone, summaries)
    distributed.barrier()  # no rank leaves while another may still need it
    trainer.close()
    del trainer
    gc.collect()
    distributed.stop()


class Emitted:
    """What this rank's instruments emit: rank 0's goes to the scribe as soon as there is one, others' waits in .kept."""

    def __init__(self, rank):
        self._rank, self._sink = rank, None
        self.kept = []

    def __call__(self, name, **facts):
        now_ns = time.perf_counter_ns()
        t_ns = facts.pop("t_ns", now_ns)  # of what is told later than it happened
        event = {"t_ns": t_ns, "utc": utc.now((now_ns - t_ns) / 1e9), "event": name, "rank": self._rank, **facts}
        self._sink(event) if self._sink else self.kept.append(event)

    def flow_to(self, sink):
        """From here on to sink; None keeps again."""
        while sink and self.kept:
            sink(self.kept.pop(0))
        self._sink = sink

    def write(self, folder):
        """What was kept, where no result will be: the race has failed."""
        while self.kept:
            with contextlib.suppress(OSError):
                step_files.append_event(folder, self.kept.pop(0))


def _watch(folder, config, ranks, emit, peaks, rows):
    """The chosen instruments, made; one that cannot be made is a warning."""
    from bench import instruments
    from bench.instruments.base import Context, InstrumentSet
    from bench.training.timers import marks_for

    device = ranks.device
    marks = marks_for(device.type)
    context = Context(
        folder,
        ranks.rank,
        ranks.world_size,
        device.type,
        config.goal.num_steps,
        marks,
        device.index,
        emit,
        _say,
        peaks,
        rows=rows,
    )
    made, warnings = instruments.load(config.instruments, context)
    return InstrumentSet(made, warnings=warnings)


def _say(text):
    """A line for the person at the terminal, if this is rank 0; for the rank's log in any case."""
    os.write(1, f"{NOTE}{text}\n".encode())


def _race(folder, config, ranks, trainer, run, times, progress, watch, emitted, peaks, rows):
    """Warm up, race, and return what this rank has to say: {"train_s", "rows", "columns", ...}."""
    from bench.instruments.base import InstrumentSet
    from bench.machine.environment import CpuMeter
    from bench.training import distributed, loop
    from bench.training.clock import Clock
    from bench.training.gc_policy import Collector
    from bench.training.step_log import StepLog
    from bench.training.timers import marks_for

    marks = marks_for(ranks.device.type)
    warm = StepLog(marks, ranks.device, 2)
    trainer.attach(InstrumentSet(essential=warm), warm)
    watch.on_warmup_start()
    times.update(trainer.warm_up())
    watch.on_warmup_end()
    gc.collect()
    peaks.reset()

    goal = config.goal
    scribe = _scribe(folder, config, trainer, run) if ranks.is_first else None
    if scribe:
        emitted.flow_to(scribe.emitted)
    on_val = scribe.validation if scribe else None
    log = StepLog(marks, ranks.device, goal.num_steps, on_row=_on_row(progress, scribe), on_val=on_val, rows=rows)
    watch.attach(log)
    collector = Collector(config.hardware.gc, config.hardware.gc_every_steps)
    trainer.attach(watch, log, checks=(*((scribe.check,) if scribe else ()), *collector.checks))

    clock = Clock(lambda: distributed.sync(ranks.device), distributed.barrier)
    collector.before_race()
    waited_ns = trainer.loader.wait_ns
    meter = CpuMeter()
    if scribe:
        scribe.event("warmup_stop", **{name: times[name] for name in ("warmup_s", "compile_s", "compile_cache")})
        scribe.event("run_start")
    watch.on_run_start()
    try:
        num_steps, _ = loop.race(
            trainer.step, trainer.evaluate, _reached(goal, run), goal.num_steps, goal.val_every_steps, clock, watch
        )
        own_cpu_s = meter.own_cpu_s()
        collector.after_race()
        watch.on_run_end()
        foreign = meter.foreign_cpu_cores(sum(distributed.gather(own_cpu_s)))
        if scribe:
            scribe.event("run_stop", step=num_steps, train_s=clock.train_s)
        answers = {
            what: watch.collect(what) for what in ("columns", "flags", "summary", "doubts")
        }  # while they still hold all
        watch.collect_warnings()
    except BaseException:
        emitted.flow_to(None)  # what is emitted from here on, Emitted.write() writes
        if scribe:
            with contextlib.suppress(Exception):  # what is known is written; what ended the race is what is told
                scribe.close()
        raise
    emitted.flow_to(None)
    if scribe:
        scribe.close()
    return {
        "train_s": clock.train_s,
        "paused_s": {reason: ns / 1e9 for reason, ns in clock.paused_ns.items()},
        "num_pauses": clock.num_pauses,
        "num_steps": num_steps,
        "rows": log.rows,
        "val_losses": log.val_losses,
        "columns": answers["columns"],
        "flags": answers["flags"],
        "summaries": answers["summary"],
        "doubts": answers["doubts"],
        "loader_wait_ms": (trainer.loader.wait_ns - waited_ns) / 1e6,
        "peak_mem_gib": peaks.whole_gib(),
        "foreign_cpu_cores": foreign,
    }


def _reached(goal, run):
    """val_loss -> whether the race may end there."""
    if not goal.stop_at_target:
        return lambda val_loss: False
    if goal.target_val_loss is not None:
        return lambda val_loss: val_loss <= goal.target_val_loss
    return lambda val_loss: val_loss - run["data"]["floor_nats"] <= goal.target_gap_nats


def _on_row(progress, scribe):
    def on_row(row):
        progress["step"] = row["step"]
        if scribe:
            scribe.row(row)

    return on_row


def _scribe(folder, config, trainer, run):
    from bench.machine.peak_rates import peak_flops

    gpus = run["environment"]["gpus"]
    peak = peak_flops(gpus[0]["name"], config.hardware.dtype) if gpus and config.hardware.device == "cuda" else None
    flops_per_token = trainer.model.flops_per_token(config.data.seq_len)
    frac = None if peak is None else flops_per_token / (peak * config.hardware.num_processes)
    return Scribe(folder, config.goal.num_steps, config.data.batch_tokens, frac)


def _shards(launch, run):
    """{"train": [Shard], "val": [Shard]}, checked: those of the launcher, or by hand those that run.json names."""
    from bench.data import shards, sources

    if not launch:
        return sources.recorded(run["data"])
    return {split: [shards.check(path) for path in launch["shards"][split]] for split in ("train", "val")}


def _launch(folder):
    """What the launcher wrote for its workers (initial_record.write_inputs); None: started by hand."""
    try:
        launch = json.loads((folder / run_folder.LAUNCH).read_text())
    except FileNotFoundError:
        return None
    is_copy = launch["folder"] != str(folder.resolve())  # of a run that was killed with its launcher: nobody cleaned up
    return None if is_copy else launch


def _make_ready(folder, rank):
    """By hand: rank 0 removes what an earlier run wrote.  ValueError where folder is not a copy of a run's."""
    if not all((folder / name).is_file() for name in ("config.yaml", "run.json")):
        raise ValueError(f"{folder}: has not both config.yaml and run.json: give a copy of a run's folder")
    if folder.resolve().is_relative_to(results_root().resolve()):
        raise ValueError(f"{folder}: a run by hand would overwrite this record: copy it to another folder first")
    (folder / "logs").mkdir(exist_ok=True)
    if rank == 0:
        run_folder.remove_outputs(folder)


def _redirect_output(path):
    """Everything this rank and the libraries in it print goes to one file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)


def _end_with_agent(folder, rank, launch):
    """A killed launcher or agent takes its workers along; rank 0 then writes the record that the launcher cannot."""
    once = threading.Lock()

    def gone():
        with once:  # both may be gone, and the agent is killed with its launcher: whoever comes first writes
            try:
                if rank == 0 and launch and processes.has_ended(launch["launcher_pid"], within_s=0.5):
                    PEN.acquire()
                    failures.write_launcher_killed(folder)
            finally:
                os._exit(1)

    if launch:
        processes.when_gone(launch["launcher_pid"], gone, "launcher-watch")
    processes.when_gone(AGENT_PID, gone, "agent-watch")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not sys.exit: DDP over gloo aborts in its static destructors in about 1 exit of 20
