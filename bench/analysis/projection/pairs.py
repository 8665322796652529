"""Checks the projection on pairs: the same step on few and on more GPUs, mostly measured by others.

Each step is projected from the smaller number and compared with the larger.  No constant of the projection was fitted
to any of these: links are NCCL's own figures, messages were read from the scripts.  So every pair is held out.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.analysis.projection import links
from bench.analysis.projection.projected import Message, Projection, Scaling, Step, project
from bench.web.document import and_

Kind = Literal["node", "nodes", "cpu", "trace"]
KINDS: dict[Kind, str] = {
    "node": "GPUs of one node, the same batch",
    "nodes": "more nodes, the same work for each GPU",
    "trace": "GPUs of one node, from traces of half of the ranks",
    "cpu": "processes of one CPU, the same batch, CPU time of a rank",
}
NANOGPT = "KellerJordan/modded-nanogpt, records/"
TITAN = "pytorch/torchtitan, benchmarks/"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"  # as drivers name them
D, VOCAB = 768, 50304
MATRIX = 4 * D * D  # bytes of an attention weight in float32; an MLP weight has four times as many

# track 3: an all-reduce for every tensor after the backward pass, then Muon's matrices are gathered one from each rank
TRACK_3 = (
    Message("all_reduce", MATRIX, 48),
    Message("all_reduce", 4 * MATRIX, 24),
    Message("all_reduce", 2 * VOCAB * D),
    Message("all_reduce", 4 * VOCAB * D),
    Message("all_reduce", 4 * D, 99),  # biases and gains
    Message("all_gather", MATRIX, 48, is_per_rank=True),
    Message("all_gather", 4 * MATRIX, 24, is_per_rank=True),
)
# AdamW of embedding and head on every GPU: 14 and 28 bytes an element, read and written, at an H200's 4.8 TB/s
TRACK_3_REPLICATED_MS = (14 + 28) * VOCAB * D / 4.8e12 * 1e3
EMBEDDING = 2 * VOCAB * D  # in bfloat16
# July 2026: everything is launched after the backward pass; Adam's tensors in every second step
PREFIX = (
    Message("reduce_scatter", 5 * EMBEDDING, 0.5),
    Message("reduce_scatter", EMBEDDING, 0.5),
    Message("all_gather", 5 * EMBEDDING, 0.5),
    Message("all_gather", EMBEDDING, 0.5),
    Message("all_gather", 2 * 15 * VOCAB * 192, 0.5),  # bigram embeddings, whose gradients are sent sparsely
    *(Message(name, num_bytes) for name in ("reduce_scatter", "all_gather") for num_bytes in (25.2e6, 28.3e6, 113.2e6)),
    Message("all_reduce", 4 * D, 6),
)
# January 2026: Adam's gradients from hooks in the backward pass, every second step; Muon's 16 and 24 matrices after it
FUSED = (
    Message("reduce_scatter", EMBEDDING, 2.5, is_beside=True),
    Message("all_gather", EMBEDDING, 2.5),
    *(Message(name, part * MATRIX / 2) for name in ("reduce_scatter", "all_gather") for part in (16, 24)),
)
LAYER, TABLE = 218.1e6, 525.3e6  # parameters of Llama 3.1 8B: of each of 32 layers, of embedding and head
FSDP = (  # parameters in bfloat16 before forward and backward, gradients in float32; all but the first and last hidden
    Message("all_gather", 2 * LAYER, 64, is_beside=True),
    Message("reduce_scatter", 4 * LAYER, 32, is_beside=True),
    Message("all_gather", 2 * TABLE),
    Message("reduce_scatter", 4 * TABLE),
)


@dataclass(frozen=True)
class Pair:
    """A checked pair.  about: what else differs, "" for nothing; projected_ms: of traces, which are not kept here."""

    kind: Kind
    source: str
    device: str
    step: Step
    num_gpus: int
    measured_ms: float
    num_nodes: int = 1
    about: str = ""
    link: str = "nvlink4"
    projected_ms: float | None = None

    @property
    def from_gpus(self) -> int:
        """The number of GPUs that is projected from; for traces the number of ranks that were kept."""
        return NUM_CUT if self.kind == "trace" else self.step.num_gpus

    @property
    def ratio(self) -> float:
        return self.num_gpus / self.from_gpus


@dataclass(frozen=True)
class Error:
    """The error of a pair.  baseline_pct: of dividing by the number of GPUs, or for weak scaling of an unchanged step;
    None for traces, whose step is the whole job's."""

    pair: Pair
    projected_ms: float
    error_pct: float
    baseline_pct: float | None
    exposed_frac: float


CUT_MS, NUM_CUT = 42.18, 4  # mean of three steps of the eight ranks; number of ranks that are kept


def _track_1(folder: str, messages: Sequence[Message], stages: Sequence[tuple[float, float]]) -> Iterator[Pair]:
    for number, (one_ms, eight_ms) in enumerate(stages, 1):
        source = f"{NANOGPT}track_1_short/{folder}, stage {number}"
        step = Step(one_ms, 1, messages, backward_ms=one_ms * 2 / 3, num_micro=8)
        yield Pair("node", source, H100, step, 8, eight_ms)


def _track_3(folders: str, from_gpus: int, from_ms: float, to_gpus: int, to_ms: float, about: str) -> Pair:
    step = Step(from_ms, from_gpus, TRACK_3, replicated_ms=TRACK_3_REPLICATED_MS)
    return Pair("node", f"{NANOGPT}track_3_optimization/results/{folders}", H200, step, to_gpus, to_ms, about=about)


def _titan(file: str, about: str, device: str, tokens_per_s: tuple[float, float], num_gpus: tuple[int, int]) -> Pair:
    ms = [1e3 * 2 * 8192 / rate for rate in tokens_per_s]  # two sequences of 8,192 tokens a GPU
    step = Step(ms[0], num_gpus[0], FSDP, num_gpus[0] // 8, backward_ms=ms[0])
    source = f"{TITAN}{file}: {about}"
    return Pair("nodes", source, device, step, num_gpus[1], ms[1], num_gpus[1] // 8, link="nvlink4+ib400")


def _cut(ranks: Sequence[int], ms: tuple[float, float]) -> Pair:
    names = and_([str(rank) for rank in ranks])
    source = f"{NANOGPT}track_1_short/2025-10-31_AdamSyncGradientHook: profile, ranks {names}"
    about = "rank 1 is late there, and holds up all others"
    return Pair("trace", source, H100, Step(ms[0], 8), 8, CUT_MS, about=about, projected_ms=ms[1])


def _cpu(num_processes: int, measured_ms: float) -> Pair:
    """Returns a pair of times on a CPU: three interleaved runs each, on two cores shared with other programs."""
    step = Step(115.2, 1, replicated_ms=2.7)  # optimizer: 2.3 % of the step
    source = "this project: experiment=smoke, hardware.num_threads=1 hardware.micro_batch_seqs=2, November 2026"
    return Pair("cpu", source, "AMD EPYC", step, num_processes, measured_ms, about="without communication")


# {ranks: (measured, projected) ms}: neighbours, and the worst of all 70 choices
CUTS: dict[tuple[int, ...], tuple[float, float]] = {
    (2, 3, 6, 7): (42.137, 40.948),
    (0, 1, 2, 3): (42.525, 42.630),
    (1, 2, 3, 4): (42.525, 42.629),
    (2, 3, 4, 5): (42.137, 42.041),
    (3, 4, 5, 6): (42.133, 42.110),
    (4, 5, 6, 7): (42.133, 43.307),
    (0, 5, 6, 7): (42.132, 42.673),
    (0, 1, 6, 7): (42.525, 42.631),
    (0, 1, 2, 7): (42.525, 42.630),
}
PAIRS: tuple[Pair, ...] = (
    *_track_1(
        "2026-07-13_PrefixTokenPrediction, baseline-1390", PREFIX, [(230.74, 31.45), (429.95, 56.55), (632.41, 82.39)]
    ),
    *_track_1(
        "2026-07-13_PrefixTokenPrediction, prefix-1375", PREFIX, [(231.01, 31.54), (429.92, 56.62), (633.22, 82.45)]
    ),
    *_track_1("2026-01-10_FusedLinearReLUSquare", FUSED, [(246.87, 32.54), (455.03, 59.63), (658.05, 85.54)]),
    _track_3("20260517_ortho and 20260503_normuon", 1, 1073.92, 8, 144.03, "Muon without momentum, then NorMuon"),
    _track_3("20260517_ortho and 20260519_dynmuon", 1, 1073.92, 4, 288.38, "Muon, then DynMuon, which is not compiled"),
    _track_3("20260519_dynmuon and 20260503_normuon", 4, 288.38, 8, 144.03, "DynMuon, not compiled, then NorMuon"),
    _titan("llama3_h100_202412_torchtitan.md", "FSDP", H100, (5762, 5605), (8, 128)),
    _titan("llama3_h100_202412_torchtitan.md", "with torch.compile", H100, (6667, 6514), (8, 128)),
    _titan("llama3_h100_202412_torchtitan.md", "and Float8", H100, (8532, 8380), (8, 128)),
    _titan("llama3-8b_h200_202506_trainy-whitefiber.md", "Float8", H200, (10938, 10753), (32, 64)),
    *itertools.starmap(_cut, CUTS.items()),
    *(_cpu(num_processes, ms) for num_processes, ms in ((2, 58.6), (4, 30.7))),
)


def scaling_of(kind: Kind) -> Scaling:
    return "strong" if kind in ("node", "cpu") else "weak"


def errors(pairs: Sequence[Pair] = PAIRS) -> list[Error]:
    """Returns the error of each pair, the worst first."""
    pair_errors = []
    for pair in pairs:
        scaling, projected_ms, exposed_frac = scaling_of(pair.kind), pair.projected_ms, 0.0
        if projected_ms is None:
            curve = links.read(pair.link, pair.num_nodes)
            projection = project(pair.step, pair.num_gpus, pair.num_nodes, curve, scaling)
            projected_ms, exposed_frac = projection.ms, projection.exposed_frac
        share = pair.step.num_gpus / pair.num_gpus if scaling == "strong" else 1.0
        error_pct, baseline_pct = (100 * (ms / pair.measured_ms - 1) for ms in (projected_ms, pair.step.ms * share))
        baseline = None if pair.kind == "trace" else baseline_pct
        pair_errors.append(Error(pair, projected_ms, error_pct, baseline, exposed_frac))
    return sorted(pair_errors, key=lambda error: -abs(error.error_pct))


def checked(
    kind: Kind, scaling: Scaling, device: str | None, link: str, num_gpus: tuple[int, int], projection: Projection
) -> tuple[list[Error], str]:
    """Returns (errors of the pairs that resemble a projection, the worst first; what they are, or why there are none).

    num_gpus: measured and projected.
    """
    if kind == "cpu":
        return [], "of processes on a CPU only their CPU time was checked, not how long their steps take"
    like = [error for error in errors() if error.pair.kind == kind]
    if not like or scaling != scaling_of(kind):
        return [], f"no pair with {scaling} scaling is known for {KINDS[kind]}"
    pairs = [error.pair for error in like]
    devices, linked = {pair.device for pair in pairs}, {pair.link for pair in pairs}
    most, ratio = (max(numbers) for numbers in ([pair.num_gpus for pair in pairs], [pair.ratio for pair in pairs]))
    least, exposed_frac = min(pair.from_gpus for pair in pairs), max(error.exposed_frac for error in like)
    low_ms, high_ms = min(pair.measured_ms for pair in pairs), max(pair.measured_ms for pair in pairs)
    reasons = {
        f"the pairs are of {and_(sorted(devices))}, not of {device or 'an unknown device'}": device not in devices,
        f"the pairs are linked by {and_(sorted(linked))}, not by {link}": link not in linked,
        f"the pairs begin at {least} GPUs": num_gpus[0] < least,
        f"the pairs end at {most} GPUs": num_gpus[1] > most,
        "the pairs go to more GPUs, not to fewer": num_gpus[1] < num_gpus[0],
        f"the pairs multiply the GPUs by {ratio:.0f} at most": num_gpus[1] > ratio * num_gpus[0],
        f"steps of the pairs take {low_ms:,.0f} to {high_ms:,.0f} ms": not low_ms / 2 < projection.ms < 2 * high_ms,
        f"communication is exposed for {projection.exposed_frac:.0%} of the step, in the pairs for at most "
        f"{exposed_frac:.0%}": kind != "trace" and projection.exposed_frac > exposed_frac,
    }
    reason = next((reason for reason, is_outside in reasons.items() if is_outside), None)
    return ([], reason) if reason else (like, f"{len(like)} pairs of {KINDS[kind]}")
