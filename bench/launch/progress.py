"""What a person sees of a run while it runs: a bar on a terminal, some twenty lines in a pipe."""

import os
import re
import time
from pathlib import Path

from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.base.units import format_about_s
from bench.launch.console import Bars, show
from bench.record import run_folder
from bench.training.step_writer import NOTE

NUM_LINES = 10  # of steps, and of validations, in a pipe
STEP = re.compile(r"step:(\d{1,9})/\d")  # of our own runs, and of a script that prints as they do
VALIDATION = re.compile(r"step:(\d{1,9})/\d+ val_loss:([\d.]+)")
PACE_STEPS = 10  # between which a run's pace is taken, at least
TAIL_BYTES = 8192  # of telemetry.csv: more than two ticks of 16 GPUs


class Progress:
    """show() reads what the step writer wrote (.progress.tmp, logs/rank0.log) and brings the screen up to date.

    num_steps: None where it is still to be read; brief: of a run in a series, no line for a mere step; blind: of a
    race, no number that is measured, and no line.
    """

    def __init__(self, folder: Path, num_steps: int | None, bars: Bars, brief: bool = False, blind: bool = False):
        self._folder, self._num_steps, self._bars = folder, num_steps, bars
        self._brief, self._blind = brief, blind
        self._offset = 0  # into rank0.log
        self._rest = b""  # a line that is not finished
        self._next = {False: 0, True: 0}  # step from which on the next line is shown, of steps and of validations
        self._started_s = time.monotonic()
        self._first = self._seen = None  # (seconds, step) when the first step was seen, and the last one
        self.step = None
        self.sign = None  # changes whenever the run gets on: a step, or a line that rank 0 printed
        self.validations = []  # (step, val_loss in nats per token) of each seen so far

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.show()

    def show(self) -> None:
        progress = run_folder.progress(self._folder)
        self.step = progress.get("step")
        self.sign = self.step, self._log_bytes()
        self._num_steps = progress.get("num_steps", self._num_steps)
        if self.step:
            self._seen = time.monotonic(), self.step
            self._first = self._first or self._seen
        if not self._blind:
            lines = self._new_lines()
            result = filter(None, map(VALIDATION.match, lines))
            self.validations += [(int(match[1]), float(match[2])) for match in result]
            show(list(self._chosen(lines)))
        if self._bars.are_live:
            self._draw(progress)

    def whole_s(self) -> float | None:
        """Seconds from launch to the last step at this run's own pace; None until it has some steps behind it."""
        if self._first is None or self._seen[1] - self._first[1] < PACE_STEPS:
            return None
        return self._seen[0] - self._started_s + self._left_s()

    def _left_s(self):
        (first_s, first_step), (seen_s, step) = self._first, self._seen
        return (seen_s - first_s) / (step - first_step) * (self._num_steps - step)

    def _draw(self, progress):
        if not self.step:
            self._bars.draw("run", 0, None, f"loading, warming up ({time.monotonic() - self._started_s:.0f} s)")
            return
        words = [f"step {self.step}/{self._num_steps}"]
        if not self._blind:
            if self.step > self._first[1]:
                words.append(f"{format_about_s(self._left_s())} to go")
            words += self._measured(progress)
        self._bars.draw("run", self.step, self._num_steps, ", ".join(words))

    def _measured(self, progress):
        if "step_avg_ms" in progress:
            yield f"step_avg {progress['step_avg_ms']:.2f} ms"
        if progress.get("tokens_per_s") is not None:  # not of a script
            yield f"{progress['tokens_per_s']:,.0f} tokens/s"
        if progress.get("mfu") is not None:
            yield f"MFU {100 * progress['mfu']:.1f} %"
        power_w = self._power_w()
        if power_w is not None:
            yield f"{power_w:,.0f} W"

    def _chosen(self, lines):
        """Notes, validations and steps: on a terminal no mere step, else about NUM_LINES of each."""
        every = -(-self._num_steps // NUM_LINES)
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
            if step >= min(self._next[is_validation], self._num_steps) or self._bars.are_live:
                self._next[is_validation] = (step // every + 1) * every
                if not after.startswith(line.partition(" ")[0] + " "):  # a validation of this step, which says it too
                    yield line

    def _power_w(self):
        """Of all GPUs together at the last whole tick of telemetry.csv; None without."""
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

    def _log_bytes(self):
        try:
            return os.stat(self._folder / "logs" / "rank0.log").st_size
        except OSError:
            return None

    def _new_lines(self):
        try:
            with plain_file.opened(self._folder / "logs" / "rank0.log") as file:
                file.seek(self._offset)
                new = file.read()
        except (OSError, Damaged):
            return []
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [line.decode(errors="replace").removesuffix("\r") for line in lines]
