"""Starts the sampling process (sampler.py) from its parent, waits until it is ready, steers it and ends it."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.base.paths import CHECKOUT, CODE, REPO

READY_S = 20.0  # for an interpreter to start on a busy machine, while graphs are compiled
ANSWER_S = 5.0  # NVML answers in milliseconds; a driver that hangs must not delay the run
NOTHING: dict[str, Any] = {
    "source": None,
    "num_samples": {},
    "foreign_processes": {},
    "unsupported": {},
    "warnings": [],
}


class Sampling:
    """The sampling process.  path: of telemetry.csv; intervals: {"interval_ms", "host_interval_ms"}; uuids: of the
    run's GPUs as NVML writes them, [] if unknown; num_devices: 0 without GPUs; root_pid: the run is this process and
    its descendants; code: the folder from which the sampler imports."""

    def __init__(
        self,
        path: Path,
        intervals: Mapping[str, float],
        uuids: list[str],
        num_devices: int,
        root_pid: int,
        code: Path = CODE,
    ):
        job = {"path": str(path.absolute()), **intervals, "uuids": uuids, "num_devices": num_devices}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.machine.telemetry.sampler", json.dumps(job | {"root_pid": root_pid})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # else an order that a dead sampler did not read fails again when the pipe is closed
            cwd=code,
            env=os.environ | {CHECKOUT: str(REPO)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout, self._rest = self._process.stdin, self._process.stdout, b""

    def wait(self) -> None:
        """Waits until the sampler is ready.  Raises TimeoutError, or RuntimeError if it has ended."""
        self._answer(READY_S)

    def start(self) -> dict[str, Any]:
        """Starts to sample.  Returns {"t_ns", "energy_j": {device: joules}}; raises as wait()."""
        return self._ask("start")

    def stop(self) -> dict[str, Any]:
        """Returns what start() does, with "report"; without an answer, only warnings, as the file is still useful."""
        try:
            return self._ask("stop")
        except (OSError, RuntimeError, TimeoutError) as error:
            report = NOTHING | {"warnings": [str(error)]}
            return {"t_ns": time.perf_counter_ns(), "energy_j": {}, "report": report}

    def _ask(self, command: str) -> dict[str, Any]:
        self._stdin.write(f"{command}\n".encode())
        return self._answer(ANSWER_S)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        until_s, out = time.monotonic() + timeout_s, self._stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([out], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise TimeoutError(f"the sampler of telemetry.csv gave no answer in {timeout_s:g} s")
            data = os.read(out, 1 << 16)
            if not data:
                raise RuntimeError("the sampler of telemetry.csv has ended; the log of rank 0 may say why")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        if not line.startswith(b"{"):  # of a sitecustomize that prints
            return self._answer(until_s - time.monotonic())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def pause(self) -> None:
        """Stops the process until resume()."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Closes the sampler's standard input, which ends it; one that hangs in the driver is killed."""
        self._stdin.close()
        self._stdout.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(2.0)
