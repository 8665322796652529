"""The ranks of a run.  Only this module reads RANK, WORLD_SIZE and the like, and sets up torch.distributed.

A single process starts no process group; every function then returns what one rank's group would.
"""

import datetime
import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

T = TypeVar("T")
WARMUP_TIMEOUT_S = 600.0  # minimum until set_timeout(): cold compilations take minutes, and differ between ranks


@dataclass(frozen=True)
class Ranks:
    """The place of this process among those of its run, and its device."""

    rank: int
    world_size: int
    device: torch.device
    local_rank: int = 0  # rank among those of its node
    local_size: int | None = None  # number of ranks on its node; None: all
    node: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def start(device_type: str, timeout_s: float, num_processes: int | None = None) -> Ranks:
    """Joins the process group that torchrun's environment describes, with NCCL on GPUs and gloo on CPUs.

    device_type is "cuda" or "cpu", timeout_s that of a collective.  Raises ValueError if torchrun started another
    number of processes than num_processes; None accepts any number.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if num_processes not in (None, world_size):
        hint = f"start torchrun --nproc_per_node={num_processes}, or change config.yaml"
        raise ValueError(f"hardware.num_processes={num_processes}, but torchrun started {world_size}: {hint}")
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device, backend, device_id = torch.device("cpu"), "gloo", None
    if device_type == "cuda":
        # a rank that sees its own GPU only (srun --gpus-per-task=1) has it as number 0
        index = local_rank if torch.cuda.device_count() > 1 else 0
        device = device_id = torch.device(device_type, index)
        backend = "nccl"
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s), device_id=device_id)
    return Ranks(rank, world_size, device, local_rank, local_size, int(os.environ.get("GROUP_RANK", 0)))


def set_timeout(timeout_s: float) -> None:
    """Sets the timeout of every later collective."""
    if dist.is_initialized():
        _set_pg_timeout(datetime.timedelta(seconds=timeout_s))


def barrier() -> None:
    """Waits until every rank has called it."""
    if dist.is_initialized():
        dist.barrier()


def sync(device: torch.device) -> None:
    """Waits until the device has done everything that was submitted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums over ranks, in place, on every rank."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def all_mean(flat: torch.Tensor) -> dist.Work:
    """Starts to average flat over ranks, in place, on every rank.  When the work is done, call as_mean()."""
    return dist.all_reduce(flat, op=_mean_op(), async_op=True)


def scatter_mean(part: torch.Tensor, flat: torch.Tensor) -> dist.Work:
    """Starts to average flat over ranks; this rank receives only its part.  When the work is done, call as_mean().

    gloo all-reduces all of flat, which is twice the traffic and gives the same numbers as all_mean().
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.13's name, 2.12's
    return scatter(part, flat, op=_mean_op(), async_op=True)


def as_mean(reduced: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Divides, in place, what gloo has only summed; NCCL has divided already."""
    return reduced if _mean_op() == dist.ReduceOp.AVG else reduced.div_(ranks.world_size)


def gather_in_place(flat: torch.Tensor, part: torch.Tensor) -> dist.Work:
    """Starts to gather the parts of all ranks into flat, of which part is this rank's."""
    gather_parts = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # 2.13's name, 2.12's
    return gather_parts(flat, part, async_op=True)


def from_first(tensor: torch.Tensor) -> torch.Tensor:
    """Replaces tensor, in place, by rank 0's on every rank."""
    dist.broadcast(tensor, src=0)
    return tensor


def _mean_op() -> Any:
    return dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM


def gather(value: T) -> list[T]:
    """Returns every rank's value, in order of ranks, on every rank.  Values are pickled: trusted processes only."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def stop() -> None:
    """Leaves the process group, all ranks together."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
