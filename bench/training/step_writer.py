"""Rank 0's pen: step lines, the growing steps.csv, events and progress, from a thread beside the race.

The race only appends to a deque.  Twice a second this thread writes what has come: lines in modded-nanogpt's format to
standard output, rows to steps.csv, events to events.jsonl, and .progress.tmp for the launcher's bar.  After a normal
end bench/training/worker.py replaces steps.csv by the complete one; after a kill, what was written here is what is left.
"""

import collections
import os
import threading
import time

from bench import atomic, utc
from bench.record import run_folder, step_files

INTERVAL_S = 0.5
NOTE = "note: "  # marks a line of rank0.log that is meant for the terminal, beside the step lines
PEN = threading.Lock()  # whoever writes the folder holds it; one who finishes the record never gives it back
PARTIAL_COLUMNS = ("step", "train_loss", "val_loss", "step_ms")


def step_line(step, num_steps, train_s):
    return f"step:{step}/{num_steps} train_time:{1e3 * train_s:.0f}ms step_avg:{1e3 * train_s / max(step, 1):.2f}ms"


def val_line(step, num_steps, val_loss, train_s):
    rest = step_line(step, num_steps, train_s).partition(" ")[2]
    return f"step:{step}/{num_steps} val_loss:{val_loss:.4f} {rest}"


class Scribe:
    """.row(row), .validation(...), .event(name, **facts) come from the race; .check() raises what the thread met."""

    def __init__(self, folder, num_steps, batch_tokens, mfu_s_per_token=None, out=None):
        self._folder, self._num_steps, self._batch_tokens = folder, num_steps, batch_tokens
        self._mfu_s_per_token = mfu_s_per_token
        self._out = out or (lambda text: os.write(1, text.encode()))
        self._new = collections.deque()
        self._stop = threading.Event()
        self._progress = {"step": 0, "num_steps": num_steps}
        self.error = None
        with open(folder / "steps.csv", "w") as file:
            file.write(",".join(PARTIAL_COLUMNS) + "\n")
        self._thread = threading.Thread(target=self._run, name="scribe", daemon=True)
        self._thread.start()

    def row(self, row):
        self._new.append(("row", row))

    def validation(self, step, val_loss, train_s):
        self._new.append(("validation", {"step": step, "val_loss": val_loss, "train_s": train_s}))
        self.event("eval_stop", step=step, val_loss=val_loss, train_s=train_s)

    def event(self, name, **facts):
        self._new.append(("event", {"t_ns": time.perf_counter_ns(), "utc": utc.now(), "event": name, **facts}))

    def emitted(self, event):
        """An event that an instrument made, complete."""
        self._new.append(("event", event))

    def check(self):
        if self.error is not None:
            raise self.error

    def close(self):
        """Write what is left; raises what the thread met."""
        self._stop.set()
        self._thread.join()
        self.check()

    def _run(self):
        try:
            while not self._stop.wait(INTERVAL_S):
                with PEN:
                    self._write()
            with PEN:
                self._write()
        except Exception as error:  # a full disk, say: the race hears of it at its next step
            self.error = error

    def _write(self):
        lines, rows, events = [], [], []
        while self._new:
            kind, fact = self._new.popleft()
            if kind == "event":
                events.append(fact)
                continue
            self._progress.update({key: fact[key] for key in ("step", "train_s", "val_loss") if key in fact})
            if kind == "row":
                lines.append(step_line(fact["step"], self._num_steps, fact["train_s"]))
                rows.append(f"{fact['step']},{fact['train_loss']!r},,{fact['step_ms']!r}\n")
            else:
                lines.append(val_line(fact["step"], self._num_steps, fact["val_loss"], fact["train_s"]))
                rows.append(f"{fact['step']},,{fact['val_loss']!r},\n")
        if rows:
            with open(self._folder / "steps.csv", "a") as file:
                file.writelines(rows)
            self._out("\n".join(lines) + "\n")
            self._write_progress()
        for event in events:
            step_files.append_event(self._folder, event)

    def _write_progress(self):
        progress = self._progress
        if progress["step"]:
            progress["step_avg_ms"] = 1e3 * progress["train_s"] / progress["step"]
            progress["tokens_per_s"] = self._batch_tokens * progress["step"] / progress["train_s"]
            if self._mfu_s_per_token is not None:
                progress["mfu"] = progress["tokens_per_s"] * self._mfu_s_per_token
        atomic.write_json(self._folder / run_folder.PROGRESS, progress, durable=False)
