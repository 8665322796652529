"""Audits the weights that a run ended with: their logits come from two new processes that never learn a target.

The run's own checks call the model in the process that trained it, where its author's code can recognize the referee,
replace the loader or the loss, and remember targets.  Here two processes, one after the other, build the model from its
code and the saved weights, each in a sandbox without data, network or a way to the other; they import no optimizer.  Of
each batch one of them, drawn by lot, gets the tokens, and the other the same with random ones behind a cut in each row.
What is before a cut must get the same logits from both, so a model that looks ahead is found whatever it recognizes.
This process computes the loss of the logits.  It must be the one that the run claims, and must hold on tokens beyond
goal.val_tokens too.
"""

import dataclasses
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.base import stats
from bench.base.paths import CHECKOUT, REPO, working_folder
from bench.base.units import GIB
from bench.config.stages import val_seq_len
from bench.data import shards
from bench.data.sources import datasets
from bench.launch import ranks
from bench.launch.prepare import Job, frozen
from bench.machine import environment, sandbox
from bench.plans.audit.counterfactual import NotPossible
from bench.record import certificates, run_folder, validity
from bench.record.certificates import DOUBTED, FAILED, PASSED

Tensor = Any  # of torch, which only functions here import
KIND = certificates.WEIGHTS
PROGRAM = "bench.training.weights"
MAX_LOGITS_BYTES = 2**31  # from each of the two processes; a validation with more is checked in part
HELD_OUT_FRAC = 0.25  # held-out batches as a share of those of the validation
NEAR_TOKENS = 8  # before a cut, also compared by themselves: a model that looks ahead looks at the next tokens
LEAST_S, TIMES = 60.0, 4.0  # a process is ended after so many seconds, plus so many times the wall time of the run
TICK_S, MAX_MESSAGE_BYTES = 0.1, 4096
SE = 6.0  # standard errors by which the loss of a part of the validation may differ from that of the whole


def verdict(folder: Path, run: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Returns {"outcome", "why", "nats", "moved_nats"} of a run's final weights.  Raises NotPossible."""
    path = folder / run_folder.WEIGHTS
    kept = [file["sha256"] for file in run["artifacts"] if file["path"] == run_folder.WEIGHTS]
    if not path.is_file() or not kept:
        raise NotPossible("it has no weights: run it with checkpoint.save=true")
    if shards.sha256(path) != kept[0]:
        return {"outcome": FAILED, "why": f"{run_folder.WEIGHTS} is not the file that the run wrote"}
    try:
        return _judge(_examined(folder, run, job), run)
    except sandbox.Refused as error:
        raise NotPossible(str(error)) from None
    except ValueError as error:
        return {"outcome": DOUBTED, "why": str(error)}


def _examined(folder: Path, run: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Returns the mean nats of the batches of the validation and beyond it, and how much the cuts moved them.

    N batches, B rows, T tokens of a row.
    """
    import torch

    from bench.data.loader import ValRows  # and nothing that imports the code of a model into this process

    chance, vocab_size, val_tokens = random.SystemRandom(), job.dataset.vocab_size, job.config.goal.val_tokens
    seq_len, num_seqs = val_seq_len(job.config), job.config.hardware.micro_batch_seqs or 1
    shape = seq_len, max(1, num_seqs * job.config.data.seq_len // seq_len)
    rows = ValRows(job.dataset.val, val_tokens, *shape, 0, 1, torch.device("cpu"))
    batch_tokens = math.prod(rows.shape_BT)
    most = max(2, MAX_LOGITS_BYTES // (4 * batch_tokens * vocab_size))
    val = chance.sample(list(rows.places), min(len(rows.places), most))
    last = rows.num_tokens - 1 - batch_tokens
    num_beyond = math.ceil(HELD_OUT_FRAC * len(val)) if last >= val_tokens else 0
    beyond = [chance.randint(val_tokens, last) for _ in range(num_beyond)]
    tokens_NBT, targets_NBT = map(torch.stack, zip(*rows.at([*val, *beyond]), strict=True))

    draw = torch.Generator().manual_seed(chance.getrandbits(63))
    cuts_NB1 = torch.randint(1, tokens_NBT.shape[2], (*tokens_NBT.shape[:2], 1), generator=draw)
    distance_NBT = cuts_NB1 - torch.arange(tokens_NBT.shape[2])  # to the cut: 1 for the last token before it
    eos_token = datasets.chosen(job.config.data).eos_token  # stays, because attention adds up documents as blocks
    is_kept_NBT = (distance_NBT > 0) | (tokens_NBT == (-1 if eos_token is None else eos_token))
    others_NBT = torch.randint(vocab_size, tokens_NBT.shape, generator=draw)
    cut_NBT = torch.where(is_kept_NBT, tokens_NBT, others_NBT)
    lots_N11 = torch.randint(2, (len(tokens_NBT), 1, 1), generator=draw) == 0
    questions = [torch.where(lots, tokens_NBT, cut_NBT) for lots in (lots_N11, ~lots_N11)]
    with tempfile.TemporaryDirectory(prefix="speedrun-logits-") as scratch:
        outputs = _logits(folder, run, job, questions, Path(scratch))
        first, second = (_nats(logits_NBTV, targets_NBT) for logits_NBTV in outputs)
    nats_NBT, cut_nats_NBT = torch.where(lots_N11, first, second), torch.where(lots_N11, second, first)

    moved = [
        (cut_nats_NBT - nats_NBT)[(distance_NBT > 0) & (distance_NBT <= near)].abs().mean().item()
        for near in (NEAR_TOKENS, tokens_NBT.shape[2])
    ]
    means = nats_NBT.mean((1, 2)).tolist()
    return {
        "is_whole": len(val) == len(rows.places),
        "validation": _summary(means[: len(val)]),
        "held_out": _summary(means[len(val) :]) | {"num_tokens": len(beyond) * batch_tokens},
        "moved_nats": max(moved),
    }


def _nats(logits_NBTV: Tensor, targets_NBT: Tensor) -> Tensor:
    """Returns the nats of each target, [N, B, T] float64, computed a batch at a time."""
    import torch

    pairs = zip(logits_NBTV, targets_NBT, strict=True)
    return torch.stack(
        [(l_BTV.logsumexp(-1) - l_BTV.gather(-1, t_BT[..., None])[..., 0]).double() for l_BTV, t_BT in pairs]
    )


def _summary(means: Sequence[float]) -> dict[str, Any]:
    """Returns what validity.too_good() needs to know of the mean nats of some batches."""
    nats, sd_nats = (stats.mean(means), stats.sd(means) or 0.0) if means else (None, 0.0)
    return {"from_logits_nats": nats, "sd_nats": sd_nats, "sd_of_batches_nats": sd_nats, "num_batches": len(means)}


def _logits(folder: Path, run: Mapping[str, Any], job: Job, questions: Sequence[Tensor], scratch: Path) -> list[Tensor]:
    """Returns the logits [N, B, T, V] that a process each gives for its tokens [N, B, T]; they lie below scratch.

    Raises ValueError if one of them fails or writes anything else, and sandbox.Refused.
    """
    import torch

    limit_s = LEAST_S + TIMES * float(run["metrics"].get("wall_s") or 0.0)
    limits = dataclasses.replace(sandbox.machine_limits(limit_s), disk_gib=4 * MAX_LOGITS_BYTES / GIB)
    with frozen(job) as copied:
        own: list[str] = [copied.own_folder] if copied.own_folder else []
        readable: list[Path | str] = [copied.code, folder / "config.yaml", folder / run_folder.WEIGHTS, *own]
        env = environment.passed(ranks.environment(job.config.hardware))
        env |= {"SPEEDRUN_CWD": working_folder(), CHECKOUT: str(REPO)}
        argv = [sys.executable, "-m", PROGRAM, str(folder.absolute()), *map(str, questions[0].shape[1:]), *own]
        readable += sandbox.python_files(sys.executable)
        argv, env = sandbox.command(argv, env, readable, limits=limits, cwd=copied.code)
        logits = []
        for number, tokens_NBT in enumerate(questions):
            path = scratch / str(number)
            why = _ended(argv, env, tokens_NBT.numpy().tobytes(), path, limits, limit_s)
            num_scores, rest = divmod(path.stat().st_size, 4 * tokens_NBT.numel())
            if why is not None or rest or num_scores < job.dataset.vocab_size:
                why = why or f"it wrote {path.stat().st_size} bytes"
                raise ValueError(f"the model could not be evaluated from its weights: {why[:200]}")
            shape = *tokens_NBT.shape, num_scores
            logits.append(torch.from_file(str(path), size=math.prod(shape), dtype=torch.float32).view(shape))
    return logits


def _ended(
    argv: Sequence[str], env: Mapping[str, str], given: bytes, path: Path, limits: sandbox.Limits, limit_s: float
) -> str | None:
    """Runs a program in its sandbox, which answers into path.  Returns why it failed, None if it did not."""
    question, errors = path.with_suffix(".given"), path.with_suffix(".errors")
    why: str | None = None
    question.write_bytes(given)
    with open(question, "rb") as stdin, open(path, "wb") as stdout, open(errors, "wb") as stderr:
        process = subprocess.Popen(argv, env=env, stdin=stdin, stdout=stdout, stderr=stderr)
    watch, end_s = sandbox.Watch(process.pid, limits, path.parent), time.monotonic() + limit_s
    try:
        while why is None and process.poll() is None:
            time.sleep(TICK_S)
            why = f"it took more than {limit_s:.0f} s" if time.monotonic() > end_s else watch.exceeded()
    finally:
        process.kill()
        process.wait()
    if why is None and process.returncode:
        with open(errors, "rb") as file:
            file.seek(max(0, errors.stat().st_size - MAX_MESSAGE_BYTES))
            why = file.read().decode(errors="replace").strip().rpartition("\n")[2]
        why = why or f"exit code {process.returncode}"
    return why


def _judge(facts: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    validation, claimed = facts["validation"], run["metrics"]["val_loss"]
    bound = validity.bound_nats(str(run["hardware"]["dtype"]), True)  # the run may have been compiled
    part = 0.0 if facts["is_whole"] else SE * validation["sd_nats"] / math.sqrt(validation["num_batches"])
    nats, moved_nats = validation["from_logits_nats"], facts["moved_nats"]
    finding = f"its final weights, in new processes without data, give {nats:.6f} nats on the validation"
    outcome, why = PASSED, f"{finding}, as it claims, and no later token changes a loss before it"
    if not moved_nats <= bound:
        outcome, why = (
            FAILED,
            f"{finding}, {moved_nats:.6f} of them by tokens that follow: it sees what it must predict",
        )
    elif not abs(nats - claimed) <= bound + part:
        outcome, why = FAILED, f"{finding}, but it claims {claimed:.6f} (tolerance {bound + part:g})"
    elif doubt := validity.too_good({"val_loss": nats, "validation": validation}, facts["held_out"]):
        outcome, why = DOUBTED, doubt
    return {"outcome": outcome, "why": why, "nats": nats, "moved_nats": moved_nats}
