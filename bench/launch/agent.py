"""torchrun for one run: starts N ranks, waits, writes how they ended.  python -m bench.launch.agent FOLDER N WORD...

A rank is the program WORD... with FOLDER as its last word: by default python -m bench.training.worker.

The same elastic agent as torchrun --standalone; called as a library, because only so does it say which rank ended
with which exit code.  Its answer is FOLDER/logs/agent.json: {"failures": [{"rank", "exit_code", "failed_at_s"}]}.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bench.launch.nodes.rank_processes import KILL_AFTER_S, WAKE_AFTER_S

LOOK_EVERY_S = 0.5
LOOPBACK, LOOPBACK_S = "127.0.0.1", 3.0


class NoLogs(LogsSpecs):
    """The ranks open their logs themselves; torch's default makes a folder in the temp directory for every run."""

    root_log_dir = os.devnull

    def reify(self, envs):
        """envs: {local rank: its environment} -> the agent's own output for all of them, and no error files."""
        none = dict.fromkeys(envs, "")
        return LogsDest(stdouts=none, stderrs=none, error_files=none)


def main(folder, num_processes, program=(sys.executable, "-m", "bench.training.worker")):
    _check_loopback()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        logs_specs=NoLogs(),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr=LOOPBACK,  # a laptop without network cannot look its own name up
        max_restarts=0,
        monitor_interval=0.1,
    )
    threading.Thread(target=_hurry, args=(Path(folder) / "logs",), name="hurry", daemon=True).start()
    try:
        elastic_launch(config, program[0])(*program[1:], str(folder))
    except ChildFailedError as error:
        wall_ahead_s = time.time() - time.monotonic()  # torch stamps the time of day; ranks stamp this
        failures = [
            {"rank": rank, "exit_code": failure.exitcode, "failed_at_s": failure.timestamp - wall_ahead_s}
            for rank, failure in sorted(error.failures.items())
        ]
        (Path(folder) / "logs" / "agent.json").write_text(json.dumps({"failures": failures}))
        return 1
    return 0


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


def _hurry(logs):
    """When one rank has failed, end the others soon.

    torch sends them SIGTERM and waits 30 s (also where shutdown_timeout says less, pytorch #192815).  A stopped process
    gets no signal: it is woken, so that it leaves its stack and ends; what has not ended then is killed.
    """
    while not any(logs.glob("rank*.failure.json")):
        time.sleep(LOOK_EVERY_S)
    time.sleep(WAKE_AFTER_S)
    _signal_children(signal.SIGCONT)
    time.sleep(KILL_AFTER_S - WAKE_AFTER_S)
    _signal_children(signal.SIGKILL)


def _signal_children(number):
    """Linux only; elsewhere it takes torch's 30 s."""
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in path.read_text().split():
                os.kill(int(pid), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *([sys.argv[3:]] if sys.argv[3:] else [])))
