"""The ranks of a run or of the doctor's probe: the environment that they get, and the agent that starts them."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from bench.base.paths import CHECKOUT, CODE, REPO, working_folder
from bench.config.schema import HardwareConfig
from bench.machine import processes, run_processes
from bench.training import flight_recorder

WORKER = (sys.executable, "-m", "bench.training.worker")
IN_RUN = "SPEEDRUN_IN_RUN"  # of ranks: what they start is not a run
GRACE_S = 5.0  # for the agent to end its ranks after SIGTERM; killed, they end because it is gone


def environment(hardware: HardwareConfig) -> dict[str, str]:
    """hardware: resolved -> the ranks' environment variables; environment.json records these, not the launcher's."""
    env = dict(os.environ) | {"SPEEDRUN_CWD": working_folder(), CHECKOUT: str(REPO)}
    env["OMP_NUM_THREADS"] = str(hardware.num_threads)
    if hardware.device == "cpu":
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads beside a busy core: steps 10 to 90 times slower
        env["CUDA_VISIBLE_DEVICES"] = ""
        # Inductor's cache ignores this variable: code for 16 lanes, run with 8, gave NaN and wrong numbers (torch 2.13)
        if (capability := env.get("ATEN_CPU_CAPABILITY")) is not None:
            cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{capability}"
            env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    for name, value in flight_recorder.variables(hardware.num_processes).items():
        env.setdefault(name, value)
    if hardware.deterministic:
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return env


def agent(
    folder: Path,
    num_processes: int,
    env: Mapping[str, str],
    log: BinaryIO,
    program: Sequence[str] = WORKER,
    code: Path = CODE,
) -> contextlib.AbstractContextManager[subprocess.Popen]:
    """A context that yields the agent's Popen: num_processes ranks of  PROGRAM folder,  ended with the block.

    log: a file for what the agent itself prints.  code: the folder that agent and ranks import from.

    The owner of the run (owner.py) ends what the agent leaves.
    """
    words = [sys.executable, "-m", "bench.launch.agent", str(folder), str(num_processes), *program]
    marked = env | {IN_RUN: "1"} | run_processes.mark(folder)
    return processes.child(words, code, marked, log, GRACE_S, lambda: run_processes.wake(folder))


class OfAgent:
    """The ranks of a run that the agent has started, while process, its Popen, lives."""

    failure = None  # that nobody but its ranks could report

    def __init__(self, process):
        self._process = process
        self.pid = process.pid

    def has_ended(self, within_s: float) -> bool:
        """Whether all ranks end within so many seconds."""
        return processes.has_ended(self.pid, within_s)

    def exit_code(self) -> int:
        """0 where all ended well.  After has_ended()."""
        return self._process.wait()


@contextlib.contextmanager
def started(folder, num_processes, env, log, program=WORKER, code=CODE):
    """A context that yields OfAgent."""
    with agent(folder, num_processes, env, log, program, code) as process:
        yield OfAgent(process)
