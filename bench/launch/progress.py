"""What a person sees of a run while it runs: a bar on a terminal, some twenty lines in a pipe."""

import time
from pathlib import Path

from bench import atomic
from bench.launch.console import Bars, show
from bench.record import run_folder
from bench.training.step_writer import NOTE
from bench.units import format_about_s

NUM_LINES = 10  # of steps, and of validations, in a pipe
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
        self._rest = ""  # a line that is not finished
        self._next = {False: 0, True: 0}  # step from which on the next line is shown, of steps and of validations
        self._started_s = time.monotonic()
        self._first = None  # (seconds, step) when the first step was seen
        self.step = None

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.show()

    def show(self) -> None:
        progress = atomic.read_json(self._folder / run_folder.PROGRESS, {})
        self.step = progress.get("step")
        self._num_steps = progress.get("num_steps", self._num_steps)
        if not self._blind:
            show(list(self._chosen(self._new_lines())))
        if self._bars.are_live:
            self._draw(progress)

    def _draw(self, progress):
        now_s = time.monotonic()
        if not self.step:
            self._bars.draw("run", 0, None, f"loading, warming up ({now_s - self._started_s:.0f} s)")
            return
        first_s, first_step = self._first = self._first or (now_s, self.step)
        words = [f"step {self.step}/{self._num_steps}"]
        if not self._blind:
            if self.step > first_step:
                left_s = (now_s - first_s) / (self.step - first_step) * (self._num_steps - self.step)
                words.append(f"{format_about_s(left_s)} to go")
            words += self._measured(progress)
        self._bars.draw("run", self.step, self._num_steps, ", ".join(words))

    def _measured(self, progress):
        if "step_avg_ms" in progress:
            yield f"step_avg {progress['step_avg_ms']:.2f} ms"
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
            if not line.startswith("step:"):
                continue
            is_validation = "val_loss:" in line
            if not is_validation and (self._brief or self._bars.are_live):
                continue
            step = int(line[len("step:") : line.index("/")])
            if step >= min(self._next[is_validation], self._num_steps) or self._bars.are_live:
                self._next[is_validation] = (step // every + 1) * every
                if not after.startswith(line.partition(" ")[0] + " "):  # a validation of this step, which says it too
                    yield line

    def _power_w(self):
        """Of all GPUs together at the last whole tick of telemetry.csv; None without."""
        try:
            with open(self._folder / "telemetry.csv", "rb") as file:
                columns = file.readline().decode().rstrip("\n").split(",")
                file.seek(max(file.tell(), file.seek(0, 2) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").split("\n")[1:-1]
            rows = [dict(zip(columns, line.split(","))) for line in lines]
            watts = [float(row["power_w"]) for row in rows if row["t_ns"] == rows[-1]["t_ns"] and row.get("power_w")]
        except (OSError, ValueError, KeyError, IndexError):
            return None
        return sum(watts) if watts else None

    def _new_lines(self):
        try:
            with open(self._folder / "logs" / "rank0.log", errors="replace") as file:
                file.seek(self._offset)
                text = self._rest + file.read()
                self._offset = file.tell()
        except OSError:
            return []
        *lines, self._rest = text.split("\n")
        return lines
