"""The lines that nanoGPT, nanochat, KempnerForge and llm.c print, a class each: row() of one line, clock() of all rows.

row(line): {"step", ...}, None for another line; row k is after k optimizer steps.  nanoGPT and nanochat number a step
from 0 and print it when it is done, so their line of step k is row k + 1; their validation k comes before step k and is
row k.  clock(by_step): (what train_time_ms means, number of first steps that are untimed); it adds what it can compute.
"""

import re

# Of bounded length: where what follows does not fit, a longer number would be tried again and again, a digit shorter.
FLOAT = r"([-+]?(?:\d[\d,]{0,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,5})?|nan|inf|-inf)"
# nanochat's total time has no step up to number 10, from 0 in base_train.py, from 1 in chat_sft.py
NUM_UNTIMED, NUM_UNTIMED_SFT = 11, 10


def as_number(text: str) -> float | None:
    """ "1,234" -> 1234.0; None for what is not a number."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def summed(by_step: dict[int, dict], untimed: int) -> None:
    """train_time_ms of each step by adding up step_ms after the untimed ones, if every step was printed."""
    last = max(by_step)
    times_ms = [by_step.get(step, {}).get("step_ms") for step in range(1, last + 1)]
    if None in times_ms[untimed:] or not times_ms[untimed:]:
        return
    total_ms = 0.0
    for step, step_ms in enumerate(times_ms, 1):
        total_ms += step_ms if step > untimed else 0.0
        if step in by_step:
            by_step[step]["train_time_ms"] = total_ms


class Summed:
    """The clock is the sum of the steps' times, where every step was printed."""

    meaning = "sum of the steps' times"

    def clock(self, by_step):
        summed(by_step, untimed=0)
        return self.meaning, 0


class NanoGpt(Summed):
    """train.py: "iter 10: loss 5.9123, time 210.50ms, mfu 12.30%", "step 250: train loss 4.1000, val loss 4.2000".

    An iteration's time is from the end of the one before it: one after a validation holds the validation, flagged.
    """

    meaning = "sum of the iterations' times, validations included"
    looks_like = re.compile(r"^\s*(?:iter|step) \d+:")
    step = re.compile(rf"iter (\d+): loss {FLOAT}, time {FLOAT}ms")
    val = re.compile(rf"step (\d+): train loss {FLOAT}, val loss {FLOAT}")
    facts = {
        "batch_tokens": re.compile(r"tokens per iteration will be: ([\d,]+)"),
        "max_iters": re.compile(r"\A(?:.*\n)?(?:Overriding: )?max_iters = (\d{1,9})\b", re.S),  # the last one counts
    }

    def row(self, line):
        if match := self.step.search(line):
            return {"step": int(match[1]) + 1, "train_loss": as_number(match[2]), "step_ms": as_number(match[3])}
        if match := self.val.search(line):
            return {"step": int(match[1]), "val_loss": as_number(match[3])}
        return None

    def clock(self, by_step):
        """The iterations' sum where every one was printed; validations are in it."""
        for step in [step for step, row in by_step.items() if "val_loss" in row]:
            by_step.get(step + 1, {})["flags"] = "validation"
        return super().clock(by_step)


class NanoChat:
    """base_train.py: "step 00012/21400 (0.06%) | loss: 9.1 | lrm: 1.00 | dt: 812.30ms | tok/sec: 645,280 | ... | total
    time: 0.03m", "Step 00250 | Validation bpb: 1.1".  Bits per byte are not nats per token: they are the headline, not
    val_loss.

    chat_sft.py has no "/21400" and numbers from 1; that of 2025 prints "Step 00010/00700 | Training loss: 1.2| lrm:
    ...", and validates for the last time before its last number.
    """

    looks_like = re.compile(r"^\s*[Ss]tep \d+(?:/\d+)? (?:\(|\|)")
    step = re.compile(
        rf"step (\d+)(?:/(\d+))? \([\d.]+%\) \| loss: {FLOAT}.*?\| dt: {FLOAT}ms(?:.*\| total time: {FLOAT}m)?"
    )
    old_sft = re.compile(rf"Step (\d+)/(\d+) \| Training loss: {FLOAT}\|")
    val = re.compile(rf"Step (\d+) \| Validation (bpb|loss): {FLOAT}")
    # "CORE metric: 0.2", "mmlu_acc: 0.28, arc_easy_acc: 0.31"
    other = re.compile(r"Step (\d+) \| (?!Valid)[\w -]+: [-+]?[\d.]+")
    facts = {
        "batch_tokens": re.compile(r"Total batch size ([\d,]+) =>"),
        "gpu_name": re.compile(r"^GPU: (.+?) \|", re.M),
        "world_size": re.compile(r"Distributed world size: (\d+)"),
        "peak_mib": re.compile(r"Peak memory usage: ([\d,.]+)MiB"),
        "total_min": re.compile(r"Total training time: ([\d.]+)m"),
    }

    def row(self, line):
        if match := self.step.search(line):
            row = {"step": int(match[1]) + 1, "total": int(match[2])} if match[2] else {"step": int(match[1])}
            row |= {"train_loss": as_number(match[3]), "step_ms": as_number(match[4])}
            return row | ({"train_time_ms": 60e3 * as_number(match[5])} if match[5] else {})
        if match := self.old_sft.search(line):
            return {"step": int(match[1]) + 1, "total": int(match[2]) - 1, "train_loss": as_number(match[3])}
        if match := self.val.search(line):
            return {"step": int(match[1]), "val_loss" if match[2] == "loss" else "val_bpb": as_number(match[3])}
        return {"step": int(match[1])} if (match := self.other.search(line)) else None

    def clock(self, by_step):
        """As the program counts it; to the millisecond where every step was printed, else in hundredths of a minute."""
        is_sft = not any("total" in row for row in by_step.values())
        untimed = NUM_UNTIMED_SFT if is_sft else NUM_UNTIMED
        summed(by_step, untimed)
        return f"time of the steps, the first {untimed} untimed", untimed


class KempnerForge(Summed):
    """format_metrics: "[step 10] loss=7.1 | lr=3.00e-04 | grad_norm=1.200 | tok/s=51,200 | mfu=31.2% | mem=71.2/80GB |
    step_time=0.64s", "[step 100] eval/loss=2.3400 | eval/perplexity=10.3812"; a line of other keys is understood and
    not kept.
    """

    meaning = "sum of the steps' times, printed in hundredths of a second"
    looks_like = re.compile(r"\[step \d+\].*=")
    line = re.compile(r"\[step (\d+)\] (\S+=.*)$")
    facts = {
        "num_tokens": re.compile(r"Training complete: \d+ steps, ([\d,]+) tokens"),
        "num_done": re.compile(r"Training complete: (\d{1,9}) steps"),
        "total": re.compile(r"Starting training: step=\d+, max_steps=(\d{1,9})\b"),
        "world_size": re.compile(r"Starting training: .*world_size=(\d{1,6})\b"),
        "gpu_name": re.compile(r"Detected GPU: (.+?) (?:→|->)"),
    }
    keys = {"loss": "train_loss", "eval/loss": "val_loss", "lr": "lr", "grad_norm": "grad_norm"}

    def row(self, line):
        match = self.line.search(line)
        if not match:
            return None
        row, words = {"step": int(match[1])}, [word.strip().partition("=") for word in match[2].split("|")]
        for key, equals, text in words:
            if not equals or (key in self.keys and as_number(text) is None):
                return None
            if key in self.keys:
                row[self.keys[key]] = as_number(text)
            elif key == "step_time" and text.endswith("s"):
                row["step_ms"] = as_number(text[:-2]) if text.endswith("ms") else 1e3 * as_number(text[:-1])
            elif key == "mem" and "/" in text:
                row["peak_mib"] = 1024 * as_number(text.split("/")[0])
        return row


class LlmC(Summed):
    """train_gpt2.py: "step    1/19560 | train loss 10.9 | norm 15.1 | lr 2.57e-06 | (812.3 ms | 645280 tok/s)", before
    it "val loss 10.9", which names no step: it is of the weights after the last step that was printed.
    """

    looks_like = re.compile(r"^\s*(?:step\s+\d+/\d+ \||val loss )")
    step = re.compile(
        rf"step\s+(\d+)/(\d+) \| train loss {FLOAT}(?: \| norm {FLOAT})?(?: \| lr {FLOAT})? \| \({FLOAT} ms"
    )
    val = re.compile(rf"^\s*val loss {FLOAT}")
    facts = {"batch_tokens": re.compile(r"total desired batch size: ([\d,]+)")}

    def __init__(self):
        self._latest = 0

    def row(self, line):
        if match := self.step.search(line):
            self._latest = int(match[1])
            names = ("train_loss", "grad_norm", "lr", "step_ms")
            row = {name: as_number(text) for name, text in zip(names, match.groups()[2:]) if text}
            return {"step": self._latest, "total": int(match[2])} | row
        if match := self.val.search(line):
            return {"step": self._latest, "val_loss": as_number(match[1])}
        return None


FORMS = {"nanogpt": NanoGpt, "nanochat": NanoChat, "kempnerforge": KempnerForge, "llm.c": LlmC}
