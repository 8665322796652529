"""Projects a step to more GPUs: divided work, messages on another link, what hides them, and the slowest of all.

    step = work + replicated + exposed messages + waiting for the slowest

work        the forward and backward passes.  strong: the batch stays the same, so N GPUs have 1/N of it each; weak:
            each GPU keeps its own
replicated  what every GPU does in full, such as an optimizer that is not sharded
exposed     messages after the backward pass, and of those beside it what is not done when it ends: they become ready
            one after the other, evenly over the last backward pass, and follow each other on the link
slowest     the expected maximum of N steps that differ by chance, each by the spread of one

The measured step is taken apart by the same rules: projected to the measured number of GPUs, it stays as it was.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from bench.analysis.diagnosis import stalls
from bench.analysis.explain import ceilings, device_steps, retimed
from bench.analysis.explain.parts import Change
from bench.analysis.projection.links import Curve
from bench.analysis.trace import load, operators, skew, window
from bench.analysis.trace.analysis import device_name
from bench.analysis.trace.device_time import COMMUNICATION
from bench.base import stats
from bench.base.units import MIB, ms_from_ns
from bench.record import run_folder, step_files
from bench.record.shape import Record

Scaling = Literal["strong", "weak"]
BUCKET_BYTES = 25 * MIB  # as in torch's DistributedDataParallel and in bench/training/reducer.py
GRADIENT_BYTES = 4  # weights and their gradients are float32
CPU = "CPU"  # in place of a device's name
BACKWARD_FRAC = 2 / 3  # backward's share of the passes, as it has twice the products of forward


@dataclass(frozen=True)
class Message:
    """A message.  num_bytes: of all ranks together, as nccl-tests counts; count: how often in a step, on average.

    is_beside: the backward pass can hide it.  is_per_rank: num_bytes is one rank's part and count the number of parts,
    of which every rank has one in each round, as modded-nanogpt gathers what Muon updated.
    """

    collective: str
    num_bytes: float
    count: float = 1.0
    is_beside: bool = False
    is_per_rank: bool = False

    def on(self, num_gpus: int) -> tuple[float, float]:
        """Returns (bytes, count) among so many GPUs."""
        if self.is_per_rank:
            return self.num_bytes * num_gpus, float(math.ceil(self.count / num_gpus))
        return self.num_bytes, self.count


@dataclass(frozen=True)
class Step:
    """One step as measured, in milliseconds.  backward_ms: of all its micro-batches; num_micro: their number.

    spread_ms: the standard deviation of a rank's step by chance, 0 if not known; slots: how many processes run side by
    side at full speed, None for any number (one on each GPU).
    """

    ms: float
    num_gpus: int
    messages: Sequence[Message] = ()
    num_nodes: int = 1
    backward_ms: float = 0.0
    num_micro: int = 1
    replicated_ms: float = 0.0
    spread_ms: float = 0.0
    slots: int | None = None


@dataclass(frozen=True)
class Projection:
    """The parts of a step on num_gpus GPUs, in milliseconds, which add up to ms.  messages_ms: hidden ones included."""

    num_gpus: int
    num_nodes: int
    work_ms: float
    replicated_ms: float
    exposed_ms: float
    slowest_ms: float
    messages_ms: float

    @property
    def ms(self) -> float:
        return self.work_ms + self.replicated_ms + self.exposed_ms + self.slowest_ms

    @property
    def exposed_frac(self) -> float:
        return self.exposed_ms / self.ms


def project(step: Step, num_gpus: int, num_nodes: int, curve: Curve, scaling: Scaling) -> Projection:
    """Projects a step.  Raises ValueError if the curve lacks so many GPUs, or if messages leave no time for work."""
    here_ms, _ = _exposed(step, step.num_gpus, step.num_nodes, 1.0, curve)
    work_ms = step.ms - step.replicated_ms - here_ms - step.spread_ms * expected_maximum(step.num_gpus)
    if work_ms <= 0:
        too_slow = f"messages alone would take {here_ms:.4g} of the {step.ms:.4g} ms that were measured"
        raise ValueError(f"--link {curve.name}: {too_slow}: the step was measured over a faster link: name that one")
    share = step.num_gpus / num_gpus if scaling == "strong" else 1.0
    slowdown = _crowding(num_gpus, step.slots) / _crowding(step.num_gpus, step.slots)
    exposed_ms, messages_ms = _exposed(step, num_gpus, num_nodes, share, curve)
    slowest_ms = step.spread_ms * (1.0 if scaling == "weak" else math.sqrt(share)) * expected_maximum(num_gpus)
    replicated_ms = step.replicated_ms * slowdown
    return Projection(
        num_gpus, num_nodes, work_ms * share * slowdown, replicated_ms, exposed_ms, slowest_ms, messages_ms
    )


def _crowding(num_gpus: int, slots: int | None) -> float:
    return max(1.0, num_gpus / slots) if slots else 1.0


def _exposed(step: Step, num_gpus: int, num_nodes: int, share: float, curve: Curve) -> tuple[float, float]:
    """Returns (exposed ms, all ms) of a step's messages.  share: of the measured work that each GPU has now."""
    last_backward_ms = step.backward_ms * share / max(1.0, step.num_micro * share)
    after_ms, beside = 0.0, []
    for message in step.messages:
        num_bytes, count = message.on(num_gpus)
        ms = 1e3 * curve.seconds(message.collective, num_bytes, num_gpus, num_nodes)
        if message.is_beside:
            times = max(1, round(count))
            beside += [ms * count / times] * times
        else:
            after_ms += count * ms
    end_ms = 0.0
    for number, ms in enumerate(beside, 1):
        end_ms = max(end_ms, last_backward_ms * number / len(beside)) + ms
    return after_ms + max(0.0, end_ms - last_backward_ms), after_ms + sum(beside)


@functools.cache
def expected_maximum(count: int) -> float:
    """Returns the expected maximum of count independent standard normal values: 0 of one, 1.42 of 8 (Tippett 1925)."""
    if count < 2:
        return 0.0
    total, step = 0.0, 1 / 256
    for index in range(-8 * 256, 8 * 256 + 1):
        z = index * step
        below = 0.5 * math.erfc(-z / math.sqrt(2))
        total += z * count * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) * below ** (count - 1) * step
    return total


@dataclass
class Job:
    """A step to project.  device: the driver's name of it, CPU, or None if not known; assumed: taken for granted.

    unlike: why no checked pair is like its projection, None if there is no such reason.
    """

    title: str
    step: Step
    device: str | None
    run: Record | None = None
    assumed: list[str] = field(default_factory=list)
    unlike: str | None = None


def from_record(folder: Path) -> Job:
    """Takes a run's step apart.  Raises ValueError if fewer than two steps were timed undisturbed, or if nothing says
    what the ranks send each other."""
    run = run_folder.read(folder)
    step_ms = [row["step_ms"] for row in step_files.read(folder) if row.get("step_ms") and not row.get("flags")]
    metrics, measured, hardware, env = (run[name] or {} for name in ("metrics", "measured", "hardware", "environment"))
    ms, num_params = metrics.get("step_avg_ms"), (run.get("model") or {}).get("num_params")
    if len(step_ms) < 2 or ms is None:
        raise ValueError(f"{folder}: it has fewer than two undisturbed steps with a time: run it longer")
    world_size = run["world_size"]
    if not num_params or world_size is None:
        raise ValueError(f"{folder}: a script's record does not say what its ranks send each other: name its traces")
    assumed: list[str] = []
    regions = (run.get("instrument_summaries") or {}).get("regions") or {}
    optimizer_ms = regions.get("optimizer_ms") or 0.0
    backward_ms = regions.get("backward_ms")
    if backward_ms is None:
        backward_ms = BACKWARD_FRAC * ms
        assumed.append("no region was timed (instruments=[regions]): the optimizer's time is taken to be 0, "
                       "that of the backward pass two thirds of the step")  # fmt: skip
    kind, is_sharing = measured.get("reducer"), "muon" in str(run.get("optim"))
    if kind is None:
        kind = hardware.get("reducer") or "ddp"
        assumed.append(f"one process reduces nothing: more of them use {kind}")
    num_bytes = GRADIENT_BYTES * num_params
    num_buckets = max(1, math.ceil(num_bytes / BUCKET_BYTES))
    collective = "reduce_scatter" if kind == "shard" else "all_reduce"
    messages = [Message(collective, num_bytes / num_buckets, num_buckets, is_beside=kind != "plain")]
    if kind == "shard" or is_sharing:
        messages.append(Message("all_gather", num_bytes / num_buckets, num_buckets))
        optimizer_ms = 0.0  # it is divided among the GPUs, as the passes are
    is_cpu, gpus = hardware.get("device") == "cpu", env.get("gpus") or [{}]
    threads = hardware.get("num_threads") or env.get("num_threads")
    jumps_ms = [abs(after - before) for before, after in zip(step_ms, step_ms[1:])]  # without drift and stalls
    step = Step(
        ms,
        world_size,
        messages,
        len(run.get("nodes") or ()) or 1,
        backward_ms,
        measured.get("num_micro_steps") or 1,
        optimizer_ms,
        stalls.SD_PER_MAD / math.sqrt(2) * (stats.percentile(jumps_ms, 50) or 0.0),
        max(1, env["num_cpus"] // threads) if is_cpu and threads and env.get("num_cpus") else None,
    )
    has_stages = len(measured.get("stages") or ()) > 1
    unlike = "the steps of its stages are of different sizes" if has_stages else None
    return Job(folder.name, step, CPU if is_cpu else gpus[0].get("name"), run, assumed, unlike)


def check_batch(job: Job, num_gpus: int) -> None:
    """Raises ValueError if the run's batch does not divide among so many GPUs; notes smaller micro-batches in job."""
    assert job.run is not None
    seqs = (job.run["hardware"] or {}).get("micro_batch_seqs")
    batch = job.step.num_micro * job.step.num_gpus * (seqs or 0)
    if seqs and (num_gpus > batch or batch % num_gpus):
        raise ValueError(f"--gpus {num_gpus}: it does not divide the {batch} sequences of a step; see --scaling weak")
    if seqs and batch // num_gpus < seqs:
        job.assumed.append(f"micro-batches of {batch // num_gpus} sequences take as long for each as those of {seqs}")
        job.unlike = f"micro-batches get smaller, from {seqs} to {batch // num_gpus} sequences"


def from_traces(
    title: str, paths: Sequence[Path], num_gpus: int, num_nodes: int, curve: Curve
) -> tuple[Job, Projection]:
    """Returns the job in the traces, and its projection to num_gpus GPUs, where each GPU keeps its work.

    The graph of bench/analysis/explain/retimed.py says what slower collectives hold up.  Raises ValueError if none has
    a known size, if their groups differ in size, or for fewer than half of the ranks, as the latest of them decides.
    """
    files = {file.resolve(): file for path in paths for file in load.find(path)}  # each once
    every = next(iter(load.by_window([*files.values()]).values()))
    ranks = [rank for rank in every if len(rank.device_rows())]
    if not ranks:
        raise ValueError(f"{title}: the trace has no device: a run on a CPU is projected from its record")
    spans = {rank.rank: window.device_spans(rank) for rank in ranks}
    spans_ns = {number: (steps[0][1], steps[-1][2]) for number, steps in spans.items()}
    rows = {rank.rank: device_steps.counted_rows(rank) for rank in ranks}
    collectives = skew.waits(rows)[0]
    graph = retimed.of(ranks, spans_ns, collectives)
    if graph is None:
        large = f"more than {retimed.MAX_ROWS:,} kernels: name the traces of fewer ranks or steps"
        contrary = "collectives come in orders that contradict each other: name the traces of one job and one window"
        is_large = sum(len(rank.device_rows()) for rank in ranks) > retimed.MAX_ROWS
        raise ValueError(f"{title}: {large if is_large else contrary}")
    if not any(end > begin for begin, end in spans_ns.values()):
        raise ValueError(f"{title}: its kernels have no duration, so there is no step to project")
    waits = {
        (number, row): wait for line in collectives for number, row, wait in zip(rows, line["rows"], line["wait_ns"])
    }
    then: dict[int, list[Change]] = {}
    without: dict[int, list[Change]] = {}
    groups, messages_ns, num_unknown, num_known = set(), 0.0, 0, 0
    shortest_ns: dict[tuple[str, int, str | None, int] | None, int] = {}
    calls = [
        (rank, row, int(rank.dur[row]) - waits.get((rank.rank, row), 0), operators.collective_of(rank, row))
        for rank, mine, kinds in rows.values()
        for row in mine[kinds == COMMUNICATION].tolist()
    ]
    for _, _, own_ns, facts in calls:
        shortest_ns[facts] = min(own_ns, shortest_ns.get(facts, own_ns))
    for rank, row, own_ns, facts in calls:
        without.setdefault(rank.rank, []).append(Change(row, own_ns))
        message = facts and ceilings.message(*facts)
        if facts is None or message is None:
            num_unknown += 1
            continue
        name, num_bytes = message
        groups.add(facts[3])
        num_known += 1
        ns = 1e9 * curve.seconds(name, num_bytes, num_gpus, num_nodes)
        messages_ns += ns
        if len(ranks) < facts[3]:  # what it took beyond the shortest of its kind, it waited for a rank without a trace
            own_ns = shortest_ns[facts]
        then.setdefault(rank.rank, []).append(Change(row, own_ns - round(ns)))
    if not num_known:
        raise ValueError(f"{title}: the trace says of no collective how large it is: record it with torch 2.1 or later")
    if len(groups) > 1:
        raise ValueError(f"{title}: groups of {min(groups)} to {max(groups)} ranks: only data parallelism is projected")
    (group,) = groups
    if 2 * len(ranks) < group:
        raise ValueError(f"{title}: {len(ranks)} of {group} ranks: how late the others come is unknown: name more")
    num_steps = len(next(iter(spans.values())))
    ends_ns = graph.ends_ns([{}, then, without]) - np.array([[begin] for begin, _ in spans_ns.values()])
    measured_ms, then_ms, without_ms = (ms_from_ns(float(ns)) / num_steps for ns in ends_ns.max(axis=0))
    own_ms = [ms_from_ns(float(ns)) / num_steps for ns in ends_ns[:, 2]]
    spread_ms = stats.sd(own_ms) or 0.0
    slowest_ms = spread_ms * max(0.0, expected_maximum(num_gpus) - expected_maximum(len(ranks)))
    job = Job(title, Step(measured_ms, group), device_name(ranks[0]))
    if idle := [rank.path.name for rank in every if not len(rank.device_rows())]:
        job.assumed.append(f"{', '.join(idle)}: no kernel can be read in it, so it does not count")
    if len(ranks) < group:
        job.assumed.append(f"the {group - len(ranks)} ranks without a trace are as fast as those with one")
    if num_unknown:
        job.assumed.append(f"{num_unknown} of {num_unknown + num_known} collectives, of unknown size, keep their time")
    exposed_ms = max(0.0, then_ms - without_ms)
    all_ms = messages_ns / 1e6 / num_steps / len(ranks)
    return job, Projection(num_gpus, num_nodes, then_ms - exposed_ms, 0.0, exposed_ms, slowest_ms, all_ms)
