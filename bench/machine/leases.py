"""Leases of this machine's GPUs: only one run, race or sweep has a GPU at a time, whichever user started it.

A lease is a socket in the abstract namespace of unix(7), whose name only one process of a network namespace can have.
The kernel releases it when the process ends, even if it is killed.  Containers with a network of their own see only
their own leases.  Child processes use the leases of their parent: the variable INHERITED names the GPUs and the inodes
of their sockets, so that a child which outlives its parent's lease notices that another process has the GPU.

python -m bench.machine.leases NUMBER   leases GPUs until its input ends, for a race on each of its other nodes
"""

import contextlib
import errno
import itertools
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.config import schema
from bench.machine import gpus

INHERITED = "SPEEDRUN_LEASED_GPUS"  # NAME@INODE of each, separated by spaces
HELD, BUSY = "leased: ", "busy: "  # what main() prints begins so
SOCKETS = Path("/proc/net/unix")  # one per line, which ends in inode and address
NUM_ASKING = 64  # processes that may query the owner at a time; they read its credentials, and nothing is sent
_held: dict[str, socket.socket] = {}  # leases of this process


def lease(name: str) -> str | None:
    """Reserves a GPU, by its name for CUDA_VISIBLE_DEVICES, until release() or the end of this process.

    Returns None if this process or one of its ancestors has it now, else who has it.  A process that was forked from
    this one without exec keeps the lease for as long as it runs.
    """
    if name in _held:
        return None
    address, mine = _address(name), socket.socket(socket.AF_UNIX)
    try:
        mine.bind(f"\0{address}")
        mine.listen(NUM_ASKING)
    except OSError as error:
        mine.close()
        if error.errno != errno.EADDRINUSE:
            return None  # a system without such sockets has no leases
        if _is_inherited(name):
            return None
        with socket.socket(socket.AF_UNIX) as other, contextlib.suppress(OSError):
            other.settimeout(1.0)
            other.connect(f"\0{address}")
            credentials = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _ = struct.unpack("3i", credentials)
            return f"process {pid} of user {uid}"
        return "another process"  # too many processes are querying its owner
    _held[name] = mine
    _tell(_inherited() | {name: str(os.fstat(mine.fileno()).st_ino)})
    return None


def _address(name: str) -> str:
    """Returns the address of a lease's socket, without the leading zero byte."""
    return f"speedrun-gpu:{name}"


def _is_inherited(name: str) -> bool:
    """Whether this process, or one that started it, leased a GPU and still has it."""
    inode = _inherited().get(name)
    try:
        lines = [line.split() for line in SOCKETS.read_text(errors="replace").splitlines()]
    except OSError:  # a system that does not list them
        return inode is not None
    return [inode, f"@{_address(name)}"] in [line[-2:] for line in lines]


def _inherited(text: str | None = None) -> dict[str, str]:
    """Returns {name of a GPU: inode of the socket that was its lease}, by INHERITED or another text of its form."""
    entries = (os.environ.get(INHERITED, "") if text is None else text).split()
    return {name: inode for name, _, inode in (entry.rpartition("@") for entry in entries)}


def _tell(inodes: Mapping[str, str]) -> None:
    """Sets the variable that names the GPUs which child processes may use."""
    os.environ.pop(INHERITED, None)
    if inodes:
        os.environ[INHERITED] = " ".join(f"{name}@{inode}" for name, inode in inodes.items())


@contextlib.contextmanager
def held_elsewhere(names_and_inodes: str) -> Iterator[None]:
    """Context in which child processes on other nodes use leases that another process has there, as INHERITED says."""
    before = _inherited()
    _tell(before | _inherited(names_and_inodes))
    try:
        yield
    finally:
        _tell(before)


def release(name: str) -> None:
    """Releases a GPU that this process has leased."""
    _held.pop(name).close()
    _tell({other: inode for other, inode in _inherited().items() if other != name})


def lease_device(device: gpus.Device) -> str | None:
    """Leases a GPU if its memory is free.  Returns None, or why it cannot be used."""
    if not _is_inherited(device.name) and (why := gpus.crowded(device.memory_gib, device.used_memory_gib)):
        return why
    owner = lease(device.name)
    return owner and f"{owner} has it"


class Busy(ValueError):
    """A resource that a command needs is in use: the same command may succeed later."""

    exit_code = os.EX_TEMPFAIL  # 75


@contextlib.contextmanager
def held(number: int) -> Iterator[None]:
    """Context in which this process has leased the first `number` visible GPUs, as far as the driver names them.

    Raises Busy if a process that is not an ancestor of this one has one of them.
    """
    before = set(_held)
    try:
        for device in gpus.devices()[:number] if number else []:
            if owner := lease(device.name):
                remedy = "wait for its end, or choose other GPUs with CUDA_VISIBLE_DEVICES"
                raise Busy(f"GPU {device.number}: {owner} has it, for a run, a race or a sweep: {remedy}")
        yield
    finally:
        for name in _held.keys() - before:
            release(name)


def held_by_ranks(hardware: schema.HardwareConfig) -> contextlib.AbstractContextManager[None]:
    """Returns held() for as many GPUs as ranks run on this node."""
    return held(hardware.ranks_of_node if hardware.device == "cuda" else 0)


@contextlib.contextmanager
def free(number: int) -> Iterator[list[gpus.Device] | None]:
    """Context that leases `number` visible GPUs with free memory and yields them, or None if there are not enough."""
    before = set(_held)
    try:
        leased = list(itertools.islice((device for device in gpus.devices() if not lease_device(device)), number))
        yield leased if len(leased) == number else None
    finally:
        for name in _held.keys() - before:
            release(name)


def main(number: str) -> int:
    """Leases GPUs until standard input ends.  Prints HELD and INHERITED's value, or BUSY and why not."""
    try:
        with held(int(number)):
            print(f"{HELD}{os.environ.get(INHERITED, '')}", flush=True)
            sys.stdin.read()
        return 0
    except Busy as error:
        print(f"{BUSY}node {os.environ.get('SLURMD_NODENAME', '?')}: {error}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
