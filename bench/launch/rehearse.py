"""Models rehearsed for a GPU, one after another, each in a process of its own, and what was found in words.

bench/training/rehearsal/ says what a rehearsal does.  Nothing of it is part of a run.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.base.paths import CODE
from bench.config import groups
from bench.machine.preflight import Check

MODULE = "bench.training.rehearsal.rehearse"
TIMEOUT_S = 3600.0  # of one model; r53 takes the longest
NOT_EXPERIMENTS = ("smoke", "stages")  # of a CPU
USABLE_FRAC = 0.9  # as in config/resolve.py
NOT_FOUND = (
    "not found by a rehearsal: whether results are right, how fast a kernel is, what cuBLAS, cuDNN and NCCL do, more "
    "than one rank (collectives, DDP's cuts), memory of libraries and fragments, errors of a driver"
)


def choices() -> list[str]:
    """All that can be rehearsed by name: every experiment made for GPUs, and the models that are none."""
    experiments = [name for name in groups.choices("experiment") if name not in NOT_EXPERIMENTS]
    return [*experiments, *(name for name in groups.choices("model") if name not in experiments)]


def overrides_of(name: str) -> list[str]:
    """A choice, as a run is asked for it.  ValueError: there is none of that name."""
    if name not in choices():
        raise ValueError(f"doctor --rehearse-gpu {name}: unknown; choose from {', '.join(choices())}")
    is_experiment = name in groups.choices("experiment")
    return [f"experiment={name}"] if is_experiment else ["track=gpt2_small", f"model={name}"]


def rehearse(overrides: list[str]) -> dict[str, Any]:
    """What the process printed; {"error"} where it printed nothing or took more than TIMEOUT_S."""
    with tempfile.TemporaryDirectory(prefix="speedrun-rehearsal-") as folder:
        environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
        command = [sys.executable, "-m", MODULE, *overrides]
        try:
            done = subprocess.run(
                command, cwd=CODE, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"it took more than {TIMEOUT_S:.0f} s"}
    lines = done.stdout.strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"error": f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"}
    return found


def judge(name: str, found: dict[str, Any]) -> list[Check]:
    """One row for what is fine and one for each finding."""
    for failure in ("unavailable", "error"):
        if failure in found:
            remedy = "see the message; the rehearsal knows torch 2.13 and Triton 3.7"
            return [Check(name, "fail", str(found[failure]).strip().splitlines()[0][:300], remedy)]
    findings = list(_findings(name, found))
    return findings or [Check(name, "ok", _summary(found))]


def _summary(found: dict[str, Any]) -> str:
    steps = [row["triton_kernels"] + row["other_operators"] for row in found["per_step"].values()]
    launches = f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    shared_kib = found["largest_shared_bytes"] / 1024
    kernels = f"{found['num_kernels']} Triton kernels, of shared memory at most {shared_kib:.0f} KiB"
    if not found["has_triton"]:
        kernels = "kernels not compiled: pip install triton"
    peak_gib = max(found["peak_gib"].values())
    return f"{found['num_graphs']} graphs, {launches} launches a step, {kernels}, peak {peak_gib:.1f} GiB"


def _findings(name: str, found: dict[str, Any]) -> Iterator[Check]:
    for reason in found["graph_breaks"]:
        yield Check(name, "fail", f"graph break: {reason}", "write that part so that dynamo can trace it")
    after = [*found["graphs_after_warmup"], *found["recompiles_after_warmup"]]
    if after:
        why = found["recompiles_after_warmup"][0][1] if found["recompiles_after_warmup"] else "a new function"
        remedy = "make what changes a tensor, or a shape that the warm-up sees"
        yield Check(
            name, "fail", f"{len(found['graphs_after_warmup'])} graphs compiled after the warm-up: {why}", remedy
        )
    for operator in found["without_kernel"]:
        yield Check(name, "fail", f"{operator} has no kernel for CUDA", "use an operator that has one")
    for kernel in found["too_large"]:
        what = (
            kernel.get("error") or f"{kernel['shared_bytes'] / 1024:.0f} KiB of shared memory, of 227 a block may have"
        )
        yield Check(name, "fail", f"{kernel['name']} ({kernel['config']}): {what}", "use smaller blocks")
    if found["num_maskless"]:
        what = (
            f"{found['num_maskless']} of {found['num_flex']} calls of FlexAttention see every token: their mask is lost"
        )
        yield Check(name, "fail", what, "make the BlockMask where dynamo sees it made, not in a method that assigns it")
    for phase, what, count in found["syncs"]:
        if phase == "step":
            yield Check(
                name, "warn", f"the host waits for the GPU in a step: {what}, {count} times", "keep it on the GPU"
            )
    peak_gib, phase = max((num_gib, phase) for phase, num_gib in found["peak_gib"].items())
    if not found["has_triton"]:
        return  # operators one by one keep what a kernel of inductor's never writes
    if peak_gib > found["memory_gib"]:
        what = f"{peak_gib:.1f} GiB live in the {phase}, of {found['memory_gib']:.1f} that a GPU has"
        yield Check(name, "fail", what, "lower hardware.micro_batch_seqs")
    elif peak_gib > USABLE_FRAC * found["memory_gib"]:
        what = f"{peak_gib:.1f} GiB live in the {phase}: above the {USABLE_FRAC:.0%} of memory that the estimate fills"
        yield Check(name, "warn", what, "lower hardware.micro_batch_seqs")
