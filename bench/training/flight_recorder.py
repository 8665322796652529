"""Keeps in the record what each rank was doing when a collective timed out.

The launcher enables torch's flight recorder, a ring buffer of each rank's last collectives.  The worker that sees a
timeout writes its buffer to logs/rankN.flight.json; NCCL's watchdog writes logs/flight_rankN of every rank before it
aborts (a pickle, which is never opened here); and a rank that is ended from outside leaves the Python stacks of all its
threads in logs/rankN.log.
"""

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL's recorder, and the only one of a CPU build
NUM_COLLECTIVES = 2000  # size of each rank's buffer; torch's default for NCCL


def variables(num_processes: int) -> dict[str, str]:
    """Returns the ranks' environment variables for the recorder and NCCL's dump; {} for a single rank."""
    if num_processes == 1:
        return {}
    return {
        "TORCH_FR_BUFFER_SIZE": str(NUM_COLLECTIVES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # ends the process on a timeout; the only mode that dumps first
    }


def enable_stack_dumps(folder: Path) -> None:
    """Prints stacks at a fatal signal, and sets where NCCL's dump goes.  Call it before torch is imported."""
    faulthandler.enable(all_threads=True)  # for SIGSEGV, SIGABRT and the like; written in C, so no lock can block it
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(folder) / "logs" / "flight_rank")  # torch appends the rank


def dump(folder: Path, rank: int) -> None:
    """Writes this rank's last collectives to logs/rankN.flight.json, unless torch has recorded none."""
    dumps: dict[int, bytes] = {}  # {number of collectives: JSON}
    try:
        from torch._C import _distributed_c10d as c10d

        for recorder in [getattr(c10d, name) for name in RECORDERS if hasattr(c10d, name)]:
            text = recorder()
            text = text.encode() if isinstance(text, str) else text
            dumps.setdefault(len(json.loads(text).get("entries") or ()), text)
    except Exception as error:  # another version of torch; the run's own failure matters more
        print(f"flight recorder: {type(error).__name__}: {error}", file=sys.stderr)
    if max(dumps, default=0):
        (Path(folder) / "logs" / f"rank{rank}.flight.json").write_bytes(dumps[max(dumps)])
