"""Checkpoints of a whole run, off the clock, so that it survives the loss of its machine (docs/clusters.md).

Every checkpoint.every_min minutes, and at a warning (SIGTERM, SIGUSR1, SIGUSR2, or the launcher's file WARNED), all
ranks stop before the same step, and each writes what its next step depends on:

    checkpoint/stepN/rankR.pt     weights, buffers, optimizer, loader, random states, clock, rows of steps.csv
    checkpoint/stepN/state.json   written last, by rank 0: the step, train_s, the sha256 of each rank's file, and, if
                                  the track lets a run go on with fewer ranks, whether all have the same state

The launcher puts the sha256 of state.json into the ledger (bench/launch/resume.py), so that a file that was edited
before the run resumes is refused.  The ranks of all nodes write into the run's folder, which all nodes must see.  The
files are torch.save's and are read with weights_only=True, which executes nothing.  torch.distributed.checkpoint is
unsuitable: reading its .metadata unpickles arbitrary objects, and it only redistributes sharded tensors of its own.
"""

import contextlib
import errno
import hashlib
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils import _pytree as pytree

from bench.base import atomic, utc
from bench.record.run_folder import CHECKPOINT_STATE, WARNED, checkpoint_folder, checkpoints
from bench.training import distributed
from bench.training.distributed import Ranks

POLL_S = 0.2
NUM_KEPT = 2  # checkpoints: a launcher that is killed may not have put the last one into the ledger
PREFIX = "speedrun/checkpoint"


class Checkpoints:
    """Decides before which step all ranks save, and writes their checkpoints.

    survival: from bench/launch/resume.py; notes: the folder into which this node's launcher writes WARNED.  Without
    checkpoint.every_min only warnings cause a checkpoint; the list receives names of signals (machine/signals.py).

    Ranks agree without a collective in the timed region.  A thread of each rank watches for a request.  A rank that has
    seen one syncs its device and checks torch's store before every step until all ranks have seen it.  Then rank 0
    names the step after its next one, which no rank can have begun, because that needs rank 0's gradients.
    """

    def __init__(self, survival: dict[str, Any], ranks: Ranks, notes: Path, warnings: list[str]):
        self._folder, self._every_min = Path(survival["folder"]), survival["every_min"]
        self._ranks, self._warned, self._warnings = ranks, notes / WARNED, warnings
        self._may_shrink = survival["may_shrink"]
        self._store: Any = dist.PrefixStore(PREFIX, _get_default_store()) if ranks.world_size > 1 else None
        self._saved_s = time.monotonic()
        self._round = 0
        self._is_requested = self._has_answered = False
        self._at: int | None = None  # the step before which all ranks save
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="checkpoints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def is_due(self, steps_done: int) -> bool:
        """Whether all ranks save now.  Called before every step; costs one attribute unless a checkpoint is near."""
        if not self._is_requested:
            return False
        if self._store is None:
            return True
        distributed.sync(self._ranks.device)
        if not self._has_answered:
            self._has_answered = True
            self._store.add(f"answers/{self._round}", 1)
        if self._at is None and self._ranks.is_first:
            if self._store.add(f"answers/{self._round}", 0) == self._ranks.world_size:
                self._at = steps_done + 1
                self._store.set(f"at/{self._round}", str(self._at))
        elif self._at is None and self._store.check([f"at/{self._round}"]):
            self._at = int(self._store.get(f"at/{self._round}"))
        return steps_done == self._at

    def save(self, step: int, train_s: float, state: dict[str, Any]) -> tuple[bool, str | None]:
        """Writes this rank's state after step steps; train_s is the slowest rank's clock.

        Returns (whether the run ends here, why nothing could be saved or None), the same on every rank.
        """
        started_s, folder = time.monotonic(), checkpoint_folder(self._folder, step)
        path, why, facts = folder / f"rank{self._ranks.rank}.pt", None, {}
        own = _digest(state["trainer"]) if self._may_shrink else None
        try:
            for inner in (folder.parent, folder):  # not the run's folder, which a node may have lost
                inner.mkdir(exist_ok=True)
            with atomic.replacing(path) as file:
                torch.save(state | {"rng": _random_states(self._ranks.device)}, file)
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            facts = {path.name: {"sha256": sha256, "num_bytes": path.stat().st_size}}
        except (OSError, RuntimeError) as error:  # torch.save's own writer has its own errors for a full disk
            why = f"rank {self._ranks.rank}: {type(error).__name__}: {error}"
        everyone = distributed.gather((facts, why, self._warnings[:1], own))
        why = next((why for _, why, *_ in everyone if why), None)
        warned = next((warnings[0] for _, _, warnings, _ in everyone if warnings), None)
        if self._ranks.is_first and why is None:
            files = {name: file for facts, *_ in everyone for name, file in facts.items()}
            about = {"step": step, "train_s": train_s, "saved_at": utc.now(), "warned_by": warned, "files": files}
            about |= {"replicated": len({digest for *_, digest in everyone}) == 1} if self._may_shrink else {}
            atomic.write_json(folder / CHECKPOINT_STATE, about | {"save_s": time.monotonic() - started_s})
            for old in checkpoints(self._folder)[NUM_KEPT:]:
                shutil.rmtree(old, ignore_errors=True)
        elif self._ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        distributed.barrier()
        self._round, self._at, self._saved_s = self._round + 1, None, time.monotonic()
        self._is_requested = self._has_answered = False
        if why is not None:
            self._stopping.set()  # no more checkpoints: the run continues for as long as it can
        return warned is not None and why is None, why

    def _watch(self) -> None:
        """Runs in the thread: requests checkpoints when one is due, and notices requests of other ranks."""
        while not self._stopping.wait(POLL_S):
            if not self._warnings and self._warned.exists():
                self._warnings.append(self._warned.read_text() or "launcher")
            is_late = self._every_min is not None and time.monotonic() - self._saved_s > 60 * self._every_min
            wants = bool(self._warnings) or is_late and self._ranks.is_first
            if self._store is None:
                self._is_requested |= wants
                continue
            request = f"request/{self._round}"
            if wants:
                self._store.set(request, "1")
            if self._store.check([request]):
                self._is_requested = True


def load(survival: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Returns this rank's state and restores its random states.

    If the checkpoint is of another number of ranks, whose states are the same, "referee_loss", which is not, is None,
    and "rows" have the mean loss and the longest time of its ranks.

    Raises ValueError if a file cannot be read, OSError if this node sees another file than the launcher has checked.
    """
    folder, files = checkpoint_folder(Path(survival["folder"]), survival["step"]), survival["files"]

    def read(name: str, where: torch.device, mmap: bool = False) -> dict[str, Any]:
        path, sha256 = folder / name, None
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != files[name]["sha256"]:
            raise OSError(errno.ESTALE, "this node sees another file than node 0 does", f"{folder.name}/{name}")
        try:
            state: dict[str, Any] = torch.load(path, map_location=where, weights_only=True, mmap=mmap)
        except Exception as error:  # torch raises errors of many types for a truncated file, or one with objects in it
            raise ValueError(f"{folder.name}/{name} cannot be read: {type(error).__name__}: {error}") from None
        return state

    state = read(f"rank{ranks.rank if ranks.rank < len(files) else 0}.pt", ranks.device)
    if len(files) != ranks.world_size:
        by_rank = zip(*(read(name, torch.device("cpu"), mmap=True)["rows"] for name in files), strict=True)
        state |= {"rows": [_mean_row(rows) for rows in by_rank], "referee_loss": None}
    _set_random_states(state.pop("rng"), ranks.device)
    return state


def _mean_row(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Returns a step's row of all ranks, as gather_result.py makes it of theirs, with the mark "is_of_all"."""
    mean = sum(row["train_loss"] for row in rows) / len(rows)
    return rows[0] | {"train_loss": mean, "step_ms": max(row["step_ms"] for row in rows), "is_of_all": True}


def _digest(state: dict[str, Any]) -> str:
    """Returns a hash of a state's structure, tensors and numbers, which tells whether ranks have the same."""
    leaves, structure = pytree.tree_flatten(state)
    sha256 = hashlib.sha256(repr(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            sha256.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            sha256.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        else:
            sha256.update(repr(leaf).encode())
    return sha256.hexdigest()


def _random_states(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, keys.tolist(), *rest]
    return states


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"].cpu())
    random.setstate(states["python"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    if "numpy" in states:
        import numpy

        numpy.random.set_state(tuple(states["numpy"]))


def copy_into(live: Any, saved: Any, where: str = "optimizer") -> None:
    """Copies an optimizer's saved state into the live one, in place: tensors keep their memory and dtype.

    Raises ValueError if the two have different keys.
    """
    if not isinstance(saved, dict) or live.keys() != saved.keys():
        raise ValueError(f"{where}: the checkpoint is of another state")
    for key, value in live.items():
        if isinstance(value, torch.Tensor):
            value.copy_(saved[key])
        elif isinstance(value, dict):
            copy_into(value, saved[key], f"{where}.{key}")
