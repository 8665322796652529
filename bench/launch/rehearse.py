"""Rehearses models for a GPU, one after another in separate processes, and turns the findings into checks.

bench/training/rehearsal/ describes what a rehearsal does.  It is not part of a run.
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
from bench.config import compose, groups, schema, user_code
from bench.launch import own_model
from bench.machine.preflight import Check

NUM_LAYERS = 4  # enough for every kind of layer in models/ladder; a test compares it with 12
TIMEOUT_S = 3600.0  # of one model; r53 takes the longest
NOT_EXPERIMENTS = ("smoke", "stages")  # experiments for CPUs
USABLE_FRAC = 0.9  # as in config/resolve.py
MAX_OF_ESTIMATE = 1.1  # tolerance of the rough estimate: USABLE_FRAC leaves as much
NOT_FOUND = (
    "not found by a rehearsal: wrong numbers, slow kernels, what cuBLAS, cuDNN and NCCL do, DDP's own reducer, memory "
    "of libraries and fragments, errors of a driver"
)
OPTIMIZERS = {  # for models/gpt2.py; those of the ladder are in its experiments
    "adamw": ["optim=adamw"],
    "muon": ["optim=muon"],
    "muon-batched": ["optim=muon", "optim.muon_batched=compiled"],
    "shard": ["optim=muon", "hardware.reducer=shard"],
}


def choices() -> list[str]:
    """Returns all names that can be rehearsed: experiments made for GPUs, other models, optimizers and reducers."""
    experiments = [name for name in groups.choices("experiment") if name not in NOT_EXPERIMENTS]
    return [*experiments, *(name for name in groups.choices("model") if name not in experiments), *OPTIMIZERS]


def overrides_of(name: str) -> list[str]:
    """Returns a choice, or a model of the user's own, as overrides of a run.  Raises ValueError for other names."""
    if user_code.is_import_path(name):
        return ["track=gpt2_small", f"model.arch={name}"]
    if name not in choices():
        raise ValueError(f"doctor --rehearse-gpu {name}: unknown; choose from {', '.join(choices())}")
    if name in groups.choices("experiment"):
        return [f"experiment={name}"]
    return [
        "track=gpt2_small",
        *([f"model={name}"] if name in groups.choices("model") else ["model=gpt2", *OPTIMIZERS[name]]),
    ]


def rehearse(overrides: list[str], gpu: str = "h100", num_layers: int = NUM_LAYERS) -> dict[str, Any]:
    """Runs the rehearsal and returns its facts, or {"error"} if there are none or it took more than TIMEOUT_S.

    num_layers: use at most so many of the model's, 0 for all.  Kernels once compiled are kept for the next model.
    Raises ValueError, as a run does, for a model or optimizer of the user's own that cannot be trained.
    """
    own_model.check(compose.compose(overrides, schema.Machine(1, 1)))
    folder = Path(tempfile.gettempdir()) / f"speedrun-rehearsal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")} | os.environ
    command = [sys.executable, "-m", "bench.training.rehearsal.rehearse", gpu, str(num_layers), *overrides]
    try:
        done = subprocess.run(
            command, cwd=CODE, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {TIMEOUT_S:.0f} s"}
    lines = done.stdout.strip().splitlines()
    try:
        facts: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"error": f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"}
    return facts


def judge(name: str, facts: dict[str, Any]) -> list[Check]:
    """Returns a check for each finding, after a summary if no finding is a failure."""
    for failure in ("unavailable", "error"):
        if failure in facts:
            remedy = "see the message; the rehearsal knows torch 2.13 and Triton 3.7"
            return [Check(name, "fail", str(facts[failure]).strip().splitlines()[0][:300], remedy)]
    findings = list(_findings(name, facts))
    if any(finding.status == "fail" for finding in findings):
        return findings
    return [Check(name, "ok", _summary(facts)), *findings]


def _summary(facts: dict[str, Any]) -> str:
    per_step = [row["triton_kernels"] + row["other_operators"] for row in facts["per_step"].values()]
    launches = f"{min(per_step)}" if min(per_step) == max(per_step) else f"{min(per_step)} to {max(per_step)}"
    shared_kib = facts["largest_shared_bytes"] / 1024
    kernels = f"{facts['num_kernels']} Triton kernels, of shared memory at most {shared_kib:.0f} KiB"
    if not facts["has_triton"]:
        kernels = "kernels not compiled: pip install triton"
    peaks = [
        f"{live_gib:.1f} GiB in a {part} ({estimated_gib:.1f} estimated)"
        for part, live_gib, estimated_gib in _live(facts)
    ]
    peak = f"at most {', '.join(peaks)} with {facts['num_layers']} layers"
    steps = f"{facts['num_graphs']} graphs, {launches} launches a step"
    return f"{steps}, {facts['collectives']} collectives, {kernels}, {peak}"


def _live(facts: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yields ("step" or "validation", GiB live at its peak, GiB estimated)."""
    peaks = facts["peak_gib"].items()
    yield "step", max(gib for phase, gib in peaks if phase in ("warm-up", "step")), facts["estimated_gib"]
    yield (
        "validation",
        max((gib for phase, gib in peaks if "validation" in phase), default=0.0),
        facts["estimated_val_gib"],
    )


def _findings(name: str, facts: dict[str, Any]) -> Iterator[Check]:
    for reason in facts["graph_breaks"]:
        yield Check(name, "fail", f"graph break: {reason}", "write that part so that dynamo can trace it")
    after = [*facts["graphs_after_warmup"], *facts["recompiles_after_warmup"]]
    if after:
        why = facts["recompiles_after_warmup"][0][1] if facts["recompiles_after_warmup"] else "a new function"
        remedy = "make what changes a tensor, or a shape that the warm-up sees"
        yield Check(
            name, "fail", f"{len(facts['graphs_after_warmup'])} graphs compiled after the warm-up: {why}", remedy
        )
    for operator in facts["without_kernel"]:
        yield Check(name, "fail", f"{operator} has no kernel for this GPU", "use an operator that has one")
    for kernel in facts["too_large"]:
        limit_kib, shared_kib = (facts["shared_limit_bytes"] / 1024, kernel.get("shared_bytes", 0) / 1024)
        text = kernel.get("error") or f"{shared_kib:.0f} KiB of shared memory, of {limit_kib:.0f} a block may have"
        yield Check(name, "fail", f"{kernel['name']} ({kernel['config']}): {text}", "use smaller blocks")
    if facts["num_maskless"]:
        text = (
            f"{facts['num_maskless']} of {facts['num_flex']} calls of FlexAttention see every token: their mask is lost"
        )
        yield Check(name, "fail", text, "make the BlockMask where dynamo sees it made, not in a method that assigns it")
    for phase, text, count in facts["syncs"]:
        if phase == "step":
            yield Check(
                name, "warn", f"the host waits for the GPU in a step: {text}, {count} times", "keep it on the GPU"
            )
    if facts["out_of_order"]:
        yield Check(name, "fail", facts["out_of_order"], "let every rank call the same collectives in one order")
    for operator, count in facts["one_by_one"].items():
        text = f"the optimizer calls {operator} {count} times a step, once or more for every tensor"
        yield Check(name, "warn", text, f"use torch._foreach_{operator}, or foreach=True")
    peak_gib, phase = max((num_gib, phase) for phase, num_gib in facts["peak_gib"].items())
    if not facts["has_triton"]:
        return  # unfused operators keep tensors that Inductor's kernels never write
    if peak_gib > facts["memory_gib"]:
        text = f"{peak_gib:.1f} GiB live in the {phase}, of {facts['memory_gib']:.1f} that a GPU has"
        yield Check(name, "fail", text, "lower hardware.micro_batch_seqs")
    elif peak_gib > USABLE_FRAC * facts["memory_gib"]:
        text = f"{peak_gib:.1f} GiB live in the {phase}: above the {USABLE_FRAC:.0%} of memory that the estimate fills"
        yield Check(name, "warn", text, "lower hardware.micro_batch_seqs")
    for part, live_gib, estimated_gib in _live(facts):
        if live_gib > MAX_OF_ESTIMATE * estimated_gib:
            text = f"{live_gib:.1f} GiB live in a {part}, above the {estimated_gib:.1f} that choose micro-batches"
            yield Check(name, "warn", text, "give hardware.micro_batch_seqs on GPUs of less memory")
