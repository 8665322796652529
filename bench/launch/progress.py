"""What a person sees of a run: a bar on a terminal, plain lines in a pipe, and a summary at its end."""

import json
import sys
import time

from bench.record import run_folder
from bench.training.step_writer import NOTE

MAX_WARNINGS = 3  # shown after a run; the record has all
TAIL_BYTES = 8192  # of telemetry.csv: more than two ticks of 16 GPUs


class Progress:
    """show() reads what the step writer wrote (.progress.tmp, logs/rank0.log) and brings the screen up to date.

    A pipe gets every line, or with brief only those of validations.
    """

    def __init__(self, folder, num_steps, brief=False, out=None):
        self._folder, self._num_steps, self._brief = folder, num_steps, brief
        self._out = out or sys.stdout
        self._offset = 0  # into rank0.log
        self._rest = ""  # a line that is not finished
        self._waiting = []  # lines to show above the bar, once there is one
        self._bar = None
        self._started_s = time.monotonic()
        self.step = None

    def show(self):
        progress = self._read()
        self.step = progress.get("step")
        lines = [line for line in self._new_lines() if line.startswith(("step:", NOTE))]
        if self._brief or self._out.isatty():
            lines = [line for line in lines if "val_loss:" in line or line.startswith(NOTE)]
        lines = [line.removeprefix(NOTE) for line in lines]
        if self._out.isatty():
            self._draw(progress, lines)
        elif lines:
            print("\n".join(lines), file=self._out, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.show()
        if self._bar is not None:
            self._bar.close()

    def _draw(self, progress, lines):
        from tqdm import tqdm

        step = progress.get("step", 0)
        self._waiting += lines
        if self._bar is None and not step:
            since_s = time.monotonic() - self._started_s
            print(f"\r   start  loading, warming up ({since_s:.0f} s)", end="", file=self._out, flush=True)
            return
        if self._bar is None:
            print("\r\033[K", end="", file=self._out)  # back to the line's beginning, and empty it
            tqdm.monitor_interval = 0  # no thread beside the run
            self._bar = tqdm(
                total=self._num_steps, initial=step, unit="step", file=self._out, leave=False, dynamic_ncols=True
            )
        while self._waiting:
            self._bar.write(self._waiting.pop(0), file=self._out)
        facts = {}
        if "step_avg_ms" in progress:
            facts["step_avg"] = f"{progress['step_avg_ms']:.2f}ms"
            facts["tokens/s"] = f"{progress['tokens_per_s']:,.0f}"
        if progress.get("mfu") is not None:
            facts["MFU"] = f"{100 * progress['mfu']:.1f}%"
        power_w = self._power_w()
        if power_w is not None:
            facts["power"] = f"{power_w:,.0f}W"
        self._bar.n = step
        self._bar.set_postfix(facts, refresh=False)
        self._bar.refresh()

    def _read(self):
        try:
            return json.loads((self._folder / run_folder.PROGRESS).read_text())
        except (OSError, ValueError):
            return {}

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


def last_words(run: dict) -> str:
    """The record that launch() returns -> how the run ended, for a person."""
    if run["status"] == "complete":
        metrics = run["metrics"]
        doubt = "" if run["validity"] == "valid" else f", {run['validity']}: {'; '.join(run['validity_reasons'])}"
        times = f"train {metrics['train_s']:.2f} s, step_avg {metrics['step_avg_ms']:.2f} ms"
        return f"complete: val_loss {metrics['val_loss']:.4f}, {times}{doubt}\n       {run['folder']}{_warned(run)}"
    failure = run["failure"]
    where = "".join(f", {name} {failure[name]}" for name in ("rank", "step") if failure[name] is not None)
    words = f"{run['status']}: {failure['kind']}{where}: {failure['message']}\n       try: {failure['hint']}"
    return f"{words}\n       {run['folder']}{_warned(run)}"


def _warned(run):
    """What an instrument could not do, a line each: the run went on, and its author should know."""
    known = list(dict.fromkeys(f"{warning['instrument']}: {warning['error']}" for warning in run.get("warnings") or ()))
    more = [f"and {len(known) - MAX_WARNINGS} more warnings in run.json"] if len(known) > MAX_WARNINGS else []
    return "".join(f"\n       warning: {words}" for words in known[:MAX_WARNINGS] + more)


def say(topic: str, text: str) -> None:
    """Print text for the person at the terminal, with the topic before it."""
    print(f"{topic:>8}  {text}", flush=True)
