"""Observes a run while it lasts: its progress, shown as a bar on a terminal or as some twenty lines in a pipe; whether
it stalls; and the edges of its clock."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.base.units import format_about_s
from bench.config.schema import HardwareConfig
from bench.launch.console import Bars, show
from bench.machine import stamped_pipes
from bench.record import failures, outside_clock, run_folder
from bench.training.step_writer import NOTE

NUM_LINES = 10  # number of lines for steps, and for validations if they are more than twice as many, in a pipe
STEP = re.compile(r"step:(\d{1,9})/\d")  # of our own runs, and of scripts that print the same format
VALIDATION = re.compile(r"step:(\d{1,9})/\d+ val_loss:([\d.]+)")
TAIL_BYTES = 8192  # read from the end of telemetry.csv: more than two ticks of 16 GPUs
NUM_LOOKS = 10  # checks within the stall timeout
MARGIN_S = 60.0  # for ranks to end after their own timeout
IDLE_CORES = 0.05  # below it all the run's processes together are idle (assumed): a waiting sampler and agent use 0.02
MAX_EDGES = 200_000  # a clock has two for each validation, so never as many


class Progress:
    """Shows the progress of a run: show() reads the step writer's files (.progress.tmp, logs/rank0.log).

    num_steps: None if not known yet; brief: for a run in a series, steps without a validation get no line; blind: for a
    race, only the step and the power are shown, and neither lines nor numbers that decide it.
    """

    def __init__(self, folder: Path, num_steps: int | None, bars: Bars, brief: bool = False, blind: bool = False):
        self._folder, self._num_steps, self._bars = folder, num_steps, bars
        self._brief, self._blind = brief, blind
        self._offset = 0  # position in rank0.log
        self._rest = b""  # an unfinished line
        self._next = {False: 0, True: 0}  # {is a validation: first step whose line is shown next}
        self._validated = 0  # the latest step with a validation
        self._started_s = time.monotonic()
        self._first: tuple[float, int] | None = None  # (time.monotonic(), step) at the first observation
        self._seen: tuple[float, int] | None = None  # and at the latest
        self.step: int | None = None
        self.sign: Hashable = None  # changes with every step and every line of rank 0
        self.validations: list[tuple[int, float]] = []  # (step, nats per token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.show()

    def show(self) -> None:
        progress = run_folder.progress(self._folder)
        self.step = progress.get("step")
        with contextlib.suppress(OSError):
            self.sign = self.step, os.stat(self._folder / "logs" / "rank0.log").st_size
        self._num_steps = progress.get("num_steps", self._num_steps)
        if self.step:
            self._seen = time.monotonic(), self.step
            self._first = self._first or self._seen
        if not self._blind:
            show(list(self._chosen(self.read())))
        if self._bars.are_live:
            self._draw(progress)

    def read(self) -> list[str]:
        """Returns the lines that rank 0 printed since the last call; at first, those of earlier segments too."""
        try:
            with plain_file.opened(self._folder / "logs" / "rank0.log") as file:
                file.seek(self._offset)
                new = file.read()
        except (OSError, Damaged):
            return []
        self._offset += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        lines = [line.decode(errors="replace").removesuffix("\r") for line in whole]
        matches = filter(None, map(VALIDATION.match, lines))
        self.validations += [(int(match[1]), float(match[2])) for match in matches]
        return lines

    def _left_s(self) -> float | None:
        """Returns the seconds left at the pace of the steps seen so far, None before the second of them."""
        if self._first is None or self._seen is None or self._num_steps is None or self._seen[1] == self._first[1]:
            return None
        pace_s = (self._seen[0] - self._first[0]) / (self._seen[1] - self._first[1])
        return pace_s * (self._num_steps - self._seen[1])

    def _draw(self, progress: Mapping[str, Any]) -> None:
        if not self.step:
            self._bars.draw("run", 0, None, f"loading, warming up ({time.monotonic() - self._started_s:.0f} s)")
            return
        shown = [f"step {self.step}/{self._num_steps}"]
        if not self._blind:
            if (left_s := self._left_s()) is not None:
                shown.append(f"{format_about_s(left_s)} to go")
            if "step_avg_ms" in progress:
                shown.append(f"step_avg {progress['step_avg_ms']:.2f} ms")
            if progress.get("tokens_per_s") is not None:  # a script has none
                shown.append(f"{progress['tokens_per_s']:,.0f} tokens/s")
            if progress.get("mfu") is not None:
                shown.append(f"MFU {100 * progress['mfu']:.1f} %")
        if (power_w := self._power_w()) is not None:
            shown.append(f"{power_w:,.0f} W")
        self._bars.draw("run", self.step, self._num_steps, ", ".join(shown))

    def _chosen(self, lines: list[str]) -> Iterator[str]:
        """Yields notes, about NUM_LINES steps, and as many validations, or all if they are at most twice as many.

        On a terminal it yields all validations and no steps.
        """
        num_steps = self._num_steps or 1
        every = -(-num_steps // NUM_LINES)
        for line, after in zip(lines, [*lines[1:], ""], strict=False):
            if line.startswith(NOTE):
                yield line.removeprefix(NOTE)
            match = STEP.match(line)
            if match is None:
                continue
            is_validation = "val_loss:" in line
            if not is_validation and (self._brief or self._bars.are_live):
                continue
            step = int(match[1])
            are_few = is_validation and (step - self._validated) * 2 * NUM_LINES >= num_steps
            self._validated = step if is_validation else self._validated
            if are_few or step >= min(self._next[is_validation], num_steps) or self._bars.are_live:
                self._next[is_validation] = (step // every + 1) * every
                if not after.startswith(line.partition(" ")[0] + " "):  # its validation line has the same
                    yield line

    def _power_w(self) -> float | None:
        """Returns the power of all GPUs at the last complete tick of telemetry.csv, None without one."""
        try:
            with plain_file.opened(self._folder / "telemetry.csv") as file:
                columns = file.readline().decode().rstrip("\n").split(",")
                file.seek(max(file.tell(), file.seek(0, 2) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").split("\n")[1:-1]
            rows = [dict(zip(columns, line.split(","))) for line in lines]
            watts = [float(row["power_w"]) for row in rows if row["t_ns"] == rows[-1]["t_ns"] and row.get("power_w")]
        except (OSError, ValueError, KeyError, IndexError):
            return None
        return sum(watts) if watts else None


class Limits:
    """Limits of how long a run may last and stand still.  cpu_s(): returns {pid: CPU seconds} of its processes.

    During a long validation, a compilation or a wait for the GPU nothing is printed, but a core is busy.  So a run is
    stalled only if it shows no progress and its processes use no CPU time.  An endless loop is not noticed.
    """

    def __init__(self, hardware: HardwareConfig, cpu_s: Callable[[], dict[int, float]]):
        self._hardware, self._cpu_s = hardware, cpu_s
        self._began_s = self._alive_s = self._looked_s = time.monotonic()
        self._sign: Hashable = None
        self._cpu_before_s: dict[int, float] | None = None
        self._stall_s = hardware.stall_timeout_s
        if self._stall_s is not None and (hardware.num_processes or 1) > 1:
            # the timeout of waiting ranks has the better message
            self._stall_s = max(self._stall_s, hardware.collective_timeout_s + MARGIN_S)

    def exceeded(self, progress: Progress) -> dict[str, Any] | None:
        """Returns the failure of a run that has to be ended, or None if it may go on."""
        hardware, now_s = self._hardware, time.monotonic()
        if self._stands_still(progress.sign, now_s):
            why = f"no step and no line for hardware.stall_timeout_s={hardware.stall_timeout_s:g}, and nothing computed"
            return failures.failure("stalled", why, step=progress.step)
        if hardware.wall_timeout_s is not None and now_s > self._began_s + hardware.wall_timeout_s:
            why = f"exceeded hardware.wall_timeout_s={hardware.wall_timeout_s}"
            return failures.failure("wall_timeout", why, step=progress.step)
        return None

    def _stands_still(self, sign: Hashable, now_s: float) -> bool:
        """Returns whether the run is stalled.  sign: changes whenever the run makes progress."""
        if self._stall_s is None:
            return False
        if sign != self._sign:
            self._sign, self._cpu_before_s = sign, None
            self._alive_s = self._looked_s = now_s
            return False
        if now_s - self._looked_s < self._stall_s / NUM_LOOKS:
            return False
        before_s, self._cpu_before_s = self._cpu_before_s, self._cpu_s()
        if before_s is not None:  # at the first check, it is not known whether a core was busy
            used_s = sum(spent_s - before_s.get(pid, 0.0) for pid, spent_s in self._cpu_before_s.items())
            if used_s > IDLE_CORES * (now_s - self._looked_s):
                self._alive_s = now_s
        self._looked_s = now_s
        return before_s is not None and now_s - self._alive_s >= self._stall_s


class EdgePipe:
    """The launcher's own clock of a run: rank 0 reports each edge of its clock through this pipe.

    Used as a context around the ranks; afterwards clock(train_s) gives run.json["referee"]["clock"].  path: where rank
    0 writes, None if the file system has no pipes.
    """

    def __init__(self, folder: Path):
        self.path: str | None = str(folder.absolute() / ".clock.pipe.tmp")
        self._edges: list[tuple[int, int, str]] = []
        self._rest, self._why = b"", ""
        try:
            self.fd = stamped_pipes.opened(self.path)
        except OSError as error:
            self.path, self._why = None, f"the launcher could not create a pipe for its clock ({error.strerror})"

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        if self.path is not None:
            self._stack.callback(os.close, self.fd)
            self._reader = self._stack.enter_context(stamped_pipes.StampedPipes([self]))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def take(self, data: bytes, t_ns: int, late_ns: int) -> None:
        """Receives what rank 0 wrote; see stamped_pipes.Sink."""
        *edges, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:64]
        if len(self._edges) < MAX_EDGES:
            self._edges += [(t_ns, late_ns, edge.decode("ascii", "replace")[:64]) for edge in edges]

    def clock(self, claimed_train_s: float | None) -> outside_clock.Clock:
        """Returns the clock, once the context is left.  claimed_train_s: by rank 0's own clock, None if unknown."""
        if self.path is None:
            return outside_clock.unknown("none", self._why, claimed_train_s)
        return outside_clock.clock_from_edges(self._edges, self._reader.gaps_ns, claimed_train_s)
