"""Ranks that answer a question instead of training: the doctor's probe, a measurement of the passport.

A rank is  python -m MODULE FOLDER  where FOLDER/asked.json has the question; it leaves FOLDER/rankN.answer.json, or
logs/rankN.failure.json as in a run.
"""

import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.base import atomic
from bench.base.reading import plain_file
from bench.config.schema import HardwareConfig
from bench.launch import ranks
from bench.machine.preflight import Check
from bench.record import failures
from bench.training import flight_recorder

START_S = 90.0  # for the processes to import torch, also from a cold disk
ERROR_LINE = re.compile(r"timed out|timeout|error", re.I)


@dataclass(frozen=True)
class Answers:
    """found, failed: in rank order, of those that left one.  exit_code: of the agent, None: the time was exceeded."""

    num_ranks: int
    found: list[dict]
    failed: list[dict]
    exit_code: int | None
    output: str

    def why_missing(self, timeout_s: float) -> Check:
        """Why not every rank answered, as far as it is known.  timeout_s: what the ranks were given."""
        if self.failed:
            first = min(self.failed, key=lambda one: one["failed_at_s"])
            why, hint = f"rank {first['rank']}: {first['message'][:300]}", first["hint"]
        else:
            lines = [line.strip() for line in self.output.splitlines() if line.strip()]
            last = next(filter(ERROR_LINE.search, lines), lines[-1] if lines else "they printed nothing")
            ended = "did not end in time" if self.exit_code is None else f"ended with exit code {self.exit_code}"
            why = f"the processes {ended}: {last[:300]}"
            hint = "the same with more output: NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL ./run.sh doctor"
        if "timed out" in why.lower() or "timeout" in why.lower():
            why_not = "is a firewall, a dead rank or a broken NVLink between them?"
            hint = f"{why_not} --timeout-s={2 * timeout_s:g} waits longer"
        return Check("collective", "fail", f"{len(self.found)} of {self.num_ranks} ranks answered; {why}", hint)


def of_ranks(
    module: str,
    asked: dict,
    hardware: HardwareConfig,
    num_ranks: int,
    num_threads: int,
    wait: Callable[[ranks.Group, Path], bool],
) -> Answers:
    """Starts the ranks, ends them and reads their answers.  hardware: resolved.

    wait(the ranks, folder): until they have ended or the time is exceeded -> whether they have ended.
    """
    env = ranks.environment(dataclasses.replace(hardware, num_processes=num_ranks, num_threads=num_threads))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        (folder / "asked.json").write_text(json.dumps(asked))
        try:
            with (
                ranks.Guard(folder) as guard,
                ranks.started(guard, num_ranks, folder, env, (sys.executable, "-m", module)) as group,
            ):
                exit_code = group.exit_code() if wait(group, folder) else None
            output = plain_file.text(folder / "logs" / ranks.LOG, plain_file.MAX_LINES_BYTES, errors="replace")
        except ranks.CannotStart as error:
            exit_code, output = 1, str(error)
        result, failed = (
            [one for rank in range(num_ranks) if (one := atomic.read_json(folder / f"{name.format(rank)}.json"))]
            for name in ("rank{}.answer", "logs/rank{}.failure")  # one that a rank could not finish is none
        )
    return Answers(num_ranks, result, failed, exit_code, output)


def answer(folder: str, of: Callable[[Path, dict], dict]) -> None:
    """One rank: leaves of(folder, the question), or why it failed."""
    path, rank = Path(folder), int(os.environ.get("RANK", 0))
    flight_recorder.enable_stack_dumps(path)
    try:
        result = of(path, json.loads((path / "asked.json").read_text()))
        (path / f"rank{rank}.answer.json").write_text(json.dumps(result))
    except BaseException as error:
        failures.write(path, rank, None, error)
        raise
