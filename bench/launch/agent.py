"""torchrun for one run: starts N ranks, waits, writes how they ended.  python -m bench.launch.agent FOLDER N WORD...

A rank is the program WORD... with FOLDER as its last word: by default python -m bench.training.worker.  It finds the
variables that torchrun --standalone gives; rank 0 holds the store where they meet.  What ranks leave behind, a daemon
with another session and environment too, becomes this process' child and ends with it.  torch's own agent would import
torch a second time, 2 s of every run's start, and waits 30 s for ranks that do not end.

The answer is FOLDER/logs/agent.json: {"failures": [{"rank", "exit_code", "failed_at_s"}]}.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import uuid
from pathlib import Path

from bench.launch.nodes.rank_processes import KILL_AFTER_S, RankProcesses
from bench.machine import processes

LOOK_EVERY_S = 0.5
ORPHANS_WITHIN_S = 5.0  # to end what ranks left behind; the run's owner waits longer for what has its mark
LOOPBACK, LOOPBACK_S = "127.0.0.1", 3.0


def main(folder, num_processes, program=(sys.executable, "-m", "bench.training.worker")):
    """Exit code: 1 where a rank failed."""
    _check_loopback()
    logs = Path(folder) / "logs"
    signal.signal(signal.SIGTERM, _leave)
    processes.adopt_orphans()
    with _reserved_port() as port:
        of_rank = {rank: dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)) for rank in range(num_processes)}
        ranks = RankProcesses((*program, str(folder)), os.environ | _alike(num_processes, port), of_rank, log=None)
        try:
            failures = _first_failures(ranks, logs)
            if failures:
                (logs / "agent.json").write_text(json.dumps({"failures": failures}))
        finally:
            ranks.close()
            processes.end_children(ORPHANS_WITHIN_S)
    return 1 if failures else 0


def _alike(num_processes, port):
    """What torchrun --standalone says to every rank, but for TORCHELASTIC_USE_AGENT_STORE: there is none."""
    return {
        "MASTER_ADDR": LOOPBACK,  # a laptop without network cannot look its own name up
        "MASTER_PORT": str(port),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(num_processes)),
        **dict.fromkeys(("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _first_failures(ranks, logs):
    """Wait for the ranks -> the failures of those that failed first; the others are left to be ended.

    A rank that has written its failure and then hangs, in a library's destructors, is ended too.
    """
    reported_s = None
    while ranks.are_left:
        ranks.wait(LOOK_EVERY_S)
        processes.reap(processes.children() - ranks.pids)
        now_s = time.monotonic()
        failures = [{"rank": rank, "exit_code": code, "failed_at_s": now_s} for rank, code in ranks.ended() if code]
        if failures:
            return failures
        if reported_s is None and any(logs.glob("rank*.failure.json")):
            reported_s = now_s
        if reported_s is not None and now_s - reported_s > KILL_AFTER_S:
            ranks.kill()
    return []


def _leave(number, frame):
    signal.signal(number, signal.SIG_IGN)  # once is enough
    sys.exit(128 + number)


def _check_loopback():
    """Ranks meet on 127.0.0.1 whether there is one or more; without it torch tries for minutes, and says only that.

    OSError with the reason, which ends up in logs/agent.log and from there in the record.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=LOOPBACK_S).close()
    except OSError as error:
        why = error.strerror or error
        raise OSError(error.errno, f"{LOOPBACK} cannot be reached, where ranks meet: {why}") from None


@contextlib.contextmanager
def _reserved_port():
    """A context that yields a port that no other program is given meanwhile.

    Bound, but nobody listens: so rank 0, whose store sets SO_REUSEADDR as well (as all of torch's do), can bind it too.
    That is Linux's rule; elsewhere the port is let go, and is most likely still free when rank 0 asks for it.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOOPBACK, 0))
        port = reserved.getsockname()[1]
        if sys.platform != "linux":
            reserved.close()
        yield port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *([sys.argv[3:]] if sys.argv[3:] else [])))
