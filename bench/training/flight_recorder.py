"""When a collective times out: what each rank was doing, kept in the record.

The launcher switches torch's flight recorder on (a ring buffer of each rank's last collectives); the worker that sees a
timeout writes its buffer to logs/rankN.flight.json, NCCL's watchdog writes logs/flight_rankN of every rank before it
aborts (a pickle: stored, never opened here), and a rank that is ended from outside leaves the Python stack of
each of its threads in logs/rankN.log.
"""

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL has its own; a CPU build has the other only
NUM_COLLECTIVES = 2000  # of each rank; torch's own default for NCCL


def variables(num_processes: int) -> dict[str, str]:
    """Environment variables of the ranks: the recorder for gloo and NCCL, and NCCL's dump.  One rank alone: {}."""
    if num_processes == 1:
        return {}
    return {
        "TORCH_FR_BUFFER_SIZE": str(NUM_COLLECTIVES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # end the process on a timeout, the only way that dumps first
    }


def enable_stack_dumps(folder: Path) -> None:
    """Before torch is imported: stacks on a signal that ends this process, and where NCCL's dump goes."""
    faulthandler.enable(all_threads=True)  # SIGSEGV, SIGABRT and their like; in C, so that a held lock cannot stop it
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):  # torch 2.10 and later, and before
        os.environ[name] = str(Path(folder) / "logs" / "flight_rank")  # torch appends the rank


def dump(folder: Path, rank: int) -> None:
    """This rank's last collectives as JSON -> logs/rankN.flight.json; nothing where torch has recorded none."""
    dumps: dict[int, bytes] = {}  # number of collectives -> JSON
    try:
        from torch._C import _distributed_c10d as c10d

        for recorder in [getattr(c10d, name) for name in RECORDERS if hasattr(c10d, name)]:
            text = recorder()
            text = text.encode() if isinstance(text, str) else text
            dumps.setdefault(len(json.loads(text).get("entries") or ()), text)
    except Exception as error:  # another torch: the failure itself matters more
        print(f"flight recorder: {type(error).__name__}: {error}", file=sys.stderr)
    if max(dumps, default=0):
        (Path(folder) / "logs" / f"rank{rank}.flight.json").write_bytes(dumps[max(dumps)])
