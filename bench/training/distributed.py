"""Ranks: the only reader of RANK, LOCAL_RANK and WORLD_SIZE, and the only caller of torch.distributed's set-up.

One process alone starts no process group: every function then does the obvious thing.
"""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self):
        return self.rank == 0


def start(device_type, timeout_s, num_processes=None):
    """Join the process group that torchrun's environment names.  nccl on GPUs, gloo on CPUs.

    num_processes: how many there must be, None for any number; ValueError where torchrun started another number.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if num_processes not in (None, world_size):
        hint = f"start torchrun --nproc_per_node={num_processes}, or change config.yaml"
        raise ValueError(f"hardware.num_processes={num_processes}, but torchrun started {world_size}: {hint}")
    device, backend, device_id = torch.device("cpu"), "gloo", None
    if device_type == "cuda":
        device = device_id = torch.device(device_type, int(os.environ.get("LOCAL_RANK", 0)))
        backend = "nccl"
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s), device_id=device_id)
    return Ranks(rank, world_size, device)


def barrier():
    if dist.is_initialized():
        dist.barrier()


def sync(device):
    """Wait until the device has done everything that was submitted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_sum(tensor):
    """In place: the sum over ranks, on every rank."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather(value):
    """Any small picklable value -> list over ranks, on every rank.  Between our own processes only."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def stop():
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
