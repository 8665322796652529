"""Reads the console logs of other programs, with a class for each program in FORMS.

Row k is the state after k optimizer steps.  nanoGPT and nanochat number steps from 0 and print a step when it is done,
so that their line of step k is row k + 1; their validation k comes before step k and is row k.  Colours are removed.
"""

import itertools
import math
import re
from typing import Any

import numpy as np

from bench.record.importers.lines import COLUMNS
from bench.record.importers.records import PRINTED_METRICS, Run

# The length is bounded to limit backtracking: if what follows does not match, every shorter number is tried.
FLOAT = r"(?:[-+]?(?:\d[\d,]{0,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,5})?|nan|inf|-inf)"
TRAIN_LOSS, VAL_LOSS, STEP_MS = (rf"(?P<{name}>{FLOAT})" for name in ("train_loss", "val_loss", "step_ms"))
# {group of a pattern in another unit: (column, factor)}
UNITS = {"train_time_s": ("train_time_ms", 1e3), "train_time_min": ("train_time_ms", 60e3), "step_s": ("step_ms", 1e3)}
# nanochat's total time excludes the steps up to number 10, counted from 0 in base_train.py and from 1 in chat_sft.py
NUM_UNTIMED, NUM_UNTIMED_SFT = 11, 10
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LOSSES = ("train_loss", "val_loss", "val_bpb")  # if one is nan or inf, the run diverged
VALIDATED = ("val_loss", *PRINTED_METRICS)
VAL_BPB = rf"(?P<val_bpb>{FLOAT})"
MAX_LINE_CHARS = 10_000  # longer lines are not searched for metrics; no program prints such a metric line

Row = dict[str, Any]  # the numbers in a line: "step" and others
Rows = dict[int, Row]  # the rows of a run by step


class Form:
    """Reads the lines of one program: parsed() reads a line, clock() computes the times of a run's rows.

    patterns: {pattern: what is added to the line's step to get the row's}.  A pattern has a group for each number,
    named after its column: step, total, train_loss, a key of UNITS, ...  A line without a step describes the weights
    after the last step that was named.  The clock is what the program printed (prints_time), or else the sum of the
    steps' times, if every step was printed with a time.
    """

    name: str
    looks_like: re.Pattern[str]
    patterns: dict[str, int] = {}
    facts: dict[str, re.Pattern[str]] = {}  # patterns for facts outside of the rows; the last group is the fact
    meaning = "sum of the steps' times"  # what train_time_ms is
    prints_time = False
    num_untimed = 0  # the number of first steps that train_time_ms excludes
    metric = "val_loss"  # the metric that the program's authors use
    _latest = 0  # the last step that was named

    def parsed(self, line: str) -> Row | None:
        """Returns the row of a metric line, None for any other line."""
        row: Row = {}
        for pattern, offset in self.patterns.items():
            if match := re.search(pattern, line):
                row |= {name: as_number(text) for name, text in match.groupdict().items() if text is not None}
                row["step"] = self._latest = int(row.get("step", self._latest)) + offset
        for name, (column, factor) in UNITS.items():
            if name in row:
                number = row.pop(name)
                row[column] = None if number is None else factor * number
        if row.get("total") is not None:
            row["total"] = int(row["total"])
        return row or None

    def row(self, line: str) -> Row | None:
        """Returns parsed() of a line as printed; None also if a number in it cannot be read."""
        if len(line) > MAX_LINE_CHARS:
            return None
        try:
            return self.parsed(COLOUR.sub("", line))
        except (TypeError, ValueError):
            return None

    def clock(self, by_step: Rows) -> tuple[str, int]:
        """Adds train_time_ms to the rows.  Returns what it means, and the number of first steps that are untimed."""
        if not self.prints_time:
            add_train_time(by_step, self.num_untimed)
        return self.meaning, self.num_untimed

    def read(self, data: bytes) -> tuple[list[Run], dict[str, Any]]:
        """Reads a log.  Returns its runs, and facts about the file, as modded_nanogpt.read() does."""
        text = COLOUR.sub("", data.decode("utf-8", "replace"))
        runs: list[Rows] = []
        unmatched, latest = [], 0
        for number, line in enumerate(text.splitlines(), 1):
            if (row := self.row(line)) is None:
                if self.looks_like.search(line[:MAX_LINE_CHARS]):
                    unmatched.append((number, line[:200]))
                continue
            if not runs or (row["step"] <= min(runs[-1]) and row["step"] < latest):  # the first step again: a new run
                runs.append({})
            latest = row["step"]
            known = {name: value for name, value in row.items() if value is None or math.isfinite(value)}
            if "train_time_ms" in row and "train_time_ms" not in known:
                known["train_time_ms"] = math.inf  # Run reports it as impossible
            if any(name in row and name not in known for name in LOSSES):
                known["diverged"] = 1
            runs[-1].setdefault(latest, {}).update(known)  # a resumed run repeats steps
        matches = ((name, pattern.search(text)) for name, pattern in self.facts.items())
        facts = {name: match[match.re.groups] for name, match in matches if match}
        made = [_run(by_step, number, facts if len(runs) == 1 else {}, self) for number, by_step in enumerate(runs)]
        counts = {"num_repeated": 0, "num_tail_lines": 0, "format_id": self.name if runs else "not_a_run"}
        return made, {"unmatched": unmatched} | counts


def as_number(text: str) -> float | None:
    """Parses a number: "1,234" -> 1234.0; None for text that is not a number."""
    try:
        return to_float(text)
    except ValueError:
        return None


def to_float(text: str) -> float:
    """Parses a number: "1,234" -> 1234.0.  Raises ValueError for text that is not a number."""
    return float(text.replace(",", ""))


def add_train_time(by_step: Rows, num_untimed: int = 0) -> None:
    """Adds train_time_ms, the sum of step_ms after the untimed steps, to each row, unless a step_ms is unknown."""
    last = max(by_step)
    times_ms = [by_step.get(step, {}).get("step_ms") for step in range(num_untimed + 1, last + 1)]
    if not times_ms or None in times_ms:
        return
    for step, total_ms in enumerate([*[0.0] * num_untimed, *itertools.accumulate(times_ms)], 1):
        if step in by_step:
            by_step[step]["train_time_ms"] = total_ms


class NanoGpt(Form):
    """train.py: "iter 10: loss 5.9123, time 210.50ms, mfu 12.30%", "step 250: train loss 4.1000, val loss 4.2000".

    An iteration's time begins at the end of the previous one, so that it may include a validation; such ones are
    flagged.
    """

    name = "nanogpt"
    meaning = "sum of the iterations' times, validations included"
    looks_like = re.compile(r"^\s*(?:iter|step) \d+:")
    patterns = {
        rf"iter (?P<step>\d+): loss {TRAIN_LOSS}, time {STEP_MS}ms": 1,
        rf"step (?P<step>\d+): train loss {FLOAT}, val loss {VAL_LOSS}": 0,
    }
    facts = {
        "batch_tokens": re.compile(r"tokens per iteration will be: ([\d,]+)"),
        "max_iters": re.compile(r"\A(?:.*\n)?(?:Overriding: )?max_iters = (\d{1,9})\b", re.S),  # the last match counts
    }

    def clock(self, by_step: Rows) -> tuple[str, int]:
        """Does what Form.clock() does, and flags the iterations whose times include a validation."""
        for step in [step for step, row in by_step.items() if "val_loss" in row]:
            by_step.get(step + 1, {})["flags"] = "validation"
        return super().clock(by_step)


SPEED = (  # what nanochat prints after the number of a step
    rf"\([\d.]+%\) \| loss: {TRAIN_LOSS}.*?\| dt: {STEP_MS}ms(?:.*\| total time: (?P<train_time_min>{FLOAT})m)?"
)


class NanoChat(Form):
    """base_train.py: "step 00012/21400 (0.06%) | loss: 9.1 | lrm: 1.00 | dt: 812.30ms | tok/sec: 645,280 | ... | total
    time: 0.03m", "Step 00250 | Validation bpb: 1.1", "Step 21400 | CORE metric: 0.2585".

    chat_sft.py has no "/21400" and numbers from 1; its version of 2025 prints "Step 00010/00700 | Training loss: 1.2|
    lrm: ...", and its last validation comes before its last step.
    """

    name = "nanochat"
    metric = "val_bpb"
    looks_like = re.compile(r"^\s*[Ss]tep \d+(?:/\d+)? (?:\(|\|)")
    patterns = {
        rf"step (?P<step>\d+)/(?P<total>\d+) {SPEED}": 1,
        rf"step (?P<step>\d+) {SPEED}": 0,
        rf"Step (?P<step>\d+)/(?P<num_printed>\d+) \| Training loss: {TRAIN_LOSS}\|": 1,
        rf"Step (?P<step>\d+) \| Validation bpb: {VAL_BPB}": 0,
        rf"Step (?P<step>\d+) \| CORE metric: (?P<core>{FLOAT})": 0,
        rf"Step (?P<step>\d+) \| Validation loss: {VAL_LOSS}": 0,
        # "mmlu_acc: 0.28, arc_easy_acc: 0.31"
        r"Step (?P<step>\d+) \| (?!Valid)[\w -]+: [-+]?[\d.]+": 0,
    }
    facts = {
        "batch_tokens": re.compile(r"Total batch size ([\d,]+) =>"),
        "gpu_name": re.compile(r"^GPU: (.+?) \|", re.M),
        "world_size": re.compile(r"Distributed world size: (\d+)"),
        "peak_mib": re.compile(r"Peak memory usage: ([\d,.]+)MiB"),
        "total_min": re.compile(r"Total training time: ([\d.]+)m"),
    }

    def parsed(self, line: str) -> Row | None:
        row = super().parsed(line)
        if row and "num_printed" in row:
            row["total"] = int(row.pop("num_printed")) - 1
        return row

    def clock(self, by_step: Rows) -> tuple[str, int]:
        """Uses the sum of the steps' times if every step was printed, else the total in hundredths of a minute."""
        self.num_untimed = NUM_UNTIMED if any("total" in row for row in by_step.values()) else NUM_UNTIMED_SFT
        self.meaning = f"time of the steps, the first {self.num_untimed} untimed"
        return super().clock(by_step)


class KempnerForge(Form):
    """format_metrics: "[step 10] loss=7.1 | lr=3.00e-04 | grad_norm=1.200 | tok/s=51,200 | mfu=31.2% | mem=71.2/80GB |
    step_time=0.64s", "[step 100] eval/loss=2.3400 | eval/perplexity=10.3812"; keys that are not known here are ignored.
    """

    name = "kempnerforge"
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

    def parsed(self, line: str) -> Row | None:
        match = self.line.search(line)
        if not match:
            return None
        row: Row = {"step": int(match[1])}
        fields = [word.strip().partition("=") for word in match[2].split("|")]
        for key, equals, text in fields:
            if not equals or (key in self.keys and as_number(text) is None):
                return None
            if key in self.keys:
                row[self.keys[key]] = as_number(text)
            elif key == "step_time" and text.endswith("s"):
                row["step_ms"] = as_number(text[:-2]) if text.endswith("ms") else 1e3 * to_float(text[:-1])
            elif key == "mem" and "/" in text:
                row["peak_mib"] = 1024 * to_float(text.split("/")[0])
        return row


class LlmC(Form):
    """train_gpt2.py: "step    1/19560 | train loss 10.9 | norm 15.1 | lr 2.57e-06 | (812.3 ms | 645280 tok/s)", and
    train_gpt2.cu: "step    1/19560 | loss 10.9 (-0.53z)| norm 15.1 (+nanz)| lr 2.57e-06 | 812.3 ms | 31.9% bf16 ...".
    Before it "val loss 10.9" without a step, which is that of the weights after the last printed step.
    """

    name = "llm.c"
    looks_like = re.compile(r"^\s*(?:step\s+\d+/\d+ \||val loss )")
    deviations = r" ?(?:\([-+.\w]+z\))?\| "  # what train_gpt2.cu puts between a number and the next one
    patterns = {
        rf"step\s+(?P<step>\d+)/(?P<total>\d+) \| (?:train )?loss +{TRAIN_LOSS}{deviations}"
        rf"(?:norm +(?P<grad_norm>{FLOAT}){deviations})?(?:lr (?P<lr>{FLOAT}) \| )?\(?{STEP_MS} ms": 0,
        rf"^\s*val loss {VAL_LOSS}": 0,
    }
    facts = {
        "batch_tokens": re.compile(r"total[ _](?:desired )?batch[ _]size(?:: |=)([\d,]+)"),
        "gpu_name": re.compile(r"^\| device +\| (.+?) +\|", re.M),
        "world_size": re.compile(r"\* num_processes=(\d+)"),
    }


class AutoResearch(Form):
    """train.py: "step 00012 (3.2%) | loss: 5.1 | lrm: 1.00 | dt: 812ms | ... | remaining: 290s", each overwriting the
    previous one; then "val_bpb:          0.997900", "training_seconds: 300.1", "num_steps:        953".  Steps are
    numbered from 0, and the first 11 are untimed.
    """

    name = "autoresearch"
    metric = "val_bpb"
    looks_like = re.compile(r"^step \d+ \(.*remaining:|^val_bpb:")
    patterns = {
        rf"step (?P<step>\d+) \([\d.]+%\) \| loss: {TRAIN_LOSS} \|.*\| dt: {STEP_MS}ms \|.*\| remaining: ": 1,
        rf"^val_bpb:\s+{VAL_BPB}": 0,
        rf"^training_seconds:\s+(?P<train_time_s>{FLOAT})": 0,
        rf"^peak_vram_mb:\s+(?P<peak_mib>{FLOAT})": 0,  # 2**20 bytes
    }
    facts = {"num_done": re.compile(r"^num_steps:\s+(\d+)", re.M)}
    meaning, num_untimed = f"time of the steps, the first {NUM_UNTIMED} untimed", NUM_UNTIMED


class ParameterGolf(Form):
    """train_gpt.py: "step:1000/20000 val_loss:2.3 val_bpb:1.4 train_time:43540ms ...", in later records "1000/20000
    val_loss: 2.3 val_bpb: 1.4"; at the end "stopping_early: wallclock_cap train_time:600038ms step:13780/20000".

    What counts is the compressed model after it was loaded again: the last line of the form "LABEL val_loss:2.0727
    val_bpb:1.2244", except labels with diagnostic or pre-quant, and the size of that submission.
    """

    name = "parameter-golf"
    metric = "val_bpb"
    meaning, prints_time = "wall time of training, as printed", True
    looks_like = re.compile(r"^(?:step:)?\d+/\d+ (?:train|val)_loss:")
    patterns = {
        rf"^(?:step:)?(?P<step>\d+)/(?P<total>\d+) train_loss: ?{TRAIN_LOSS}"
        rf"(?: train_time: ?(?:(?P<train_time_ms>{FLOAT})ms|(?P<train_time_min>{FLOAT})m))?": 0,
        rf"^(?:step:)?(?P<step>\d+)/(?P<total>\d+) val_loss: ?{VAL_LOSS} val_bpb: ?{VAL_BPB}"
        rf"(?: train_time: ?(?P<train_time_ms>{FLOAT})ms)?": 0,
        rf"^stopping_early: wallclock_cap train_time: ?(?P<train_time_ms>{FLOAT})ms step: ?(?P<step>\d+)/": 0,
        rf"^(?!\S*(?i:diagnostic|pre-quant))[a-z]\S*(?: \w+:\w+){{0,3}} val_loss:{VAL_LOSS} val_bpb:{VAL_BPB}": 0,
        r"^Total submission size \S+: (?P<artifact_bytes>\d+) bytes": 0,
    }
    facts = {
        "num_done": re.compile(r"^stopping_early: wallclock_cap .* step: ?(\d+)/", re.M),
        "world_size": re.compile(r"^\s*world_size: ?(\d+)", re.M),
        "peak_mib": re.compile(r"^peak memory allocated: (\d+) MiB", re.M),
        "batch_tokens": re.compile(r"^\s*train_batch_tokens: ?(\d+)", re.M),
        "seed": re.compile(r"^\s*seed: ?(\d+)", re.M),
    }


class SlowRun(Form):
    """train.py: "step 00012 (0.06%) | loss: 9.1 | dt: 812.30ms | tok/sec: 645,280 | bf16_mfu: 40.00% | eta: 46.1m",
    "Step 00250 | Epoch 1 | Val BPB: 1.1 | Val Loss: 3.4"; for averaged logits "[label] Val BPB: 1.0 | Val Loss: 3.3".
    """

    name = "slowrun"
    looks_like = re.compile(r"^step \d+ \(.*bf16_mfu|Val BPB: ")
    patterns = {
        rf"^step (?P<step>\d+) \([\d.]+%\) \| loss: {TRAIN_LOSS} \| dt: {STEP_MS}ms \|.*bf16_mfu": 0,
        rf"^(?:Step (?P<step>\d+) \| )?.*Val BPB: {VAL_BPB} \| Val Loss: {VAL_LOSS}": 0,
    }
    facts = {
        "batch_tokens": re.compile(r"^Batch size: ([\d,]+) tokens", re.M),
        "peak_mib": re.compile(r"^Peak memory: ([\d,.]+) MiB", re.M),
        "total_min": re.compile(r"^Total training time: ([\d.]+)m", re.M),  # excludes steps after a recompilation
    }
    meaning, prints_time = "the program's own total, without the steps after a compilation", True


FORMS: dict[str, type[Form]] = {
    form.name: form for form in (NanoChat, NanoGpt, KempnerForge, LlmC, AutoResearch, ParameterGolf, SlowRun)
}


def _run(by_step: Rows, number: int, facts: dict[str, str], form: Form) -> Run:
    meaning, num_untimed = form.clock(by_step)
    rows = [by_step[step] for step in sorted(by_step)]

    def values_of(name: str) -> list[Any]:
        return [row[name] for row in rows if name in row]

    names = (*COLUMNS, "step_ms", *PRINTED_METRICS)
    columns = {name: np.array([row.get(name, np.nan) for row in rows], float) for name in names}
    last, total = rows[-1]["step"], int(facts["total"]) if "total" in facts else None
    # the number of nanoGPT's last iteration is max_iters
    total = int(facts["max_iters"]) + 1 if "max_iters" in facts else next(iter(values_of("total")), total)
    timed, validated = values_of("train_time_ms"), [row for row in rows if "val_loss" in row or "val_bpb" in row][-1:]
    if "total_min" in facts and ("train_time_ms" not in rows[-1] or len(timed) < last):
        timed.append(60e3 * to_float(facts["total_min"]))
    val_step = validated[0]["step"] if validated else None
    diverged = next((row["step"] for row in rows if "diverged" in row), None)
    peaks_mib = values_of("peak_mib") + [as_number(facts[name]) for name in ("peak_mib",) if name in facts]
    batch_tokens = as_number(facts["batch_tokens"]) if "batch_tokens" in facts else None
    if "num_tokens" in facts:
        batch_tokens = to_float(facts["num_tokens"]) / last
    known = {"gpu_name": facts.get("gpu_name"), "peak_mib": max(peaks_mib, default=None)}
    known |= {"seed": int(facts["seed"])} if "seed" in facts else {}
    return Run(
        number=number,
        columns=columns,
        num_steps=last,
        declared_steps=total,
        val_step=val_step,
        diverged_step=diverged,
        complete=diverged is None and _is_complete(form.name, last, val_step, total, facts),
        val_loss=next(reversed(values_of("val_loss")), None),
        train_time_ms=timed[-1] if timed else None,
        step_avg_ms=None,
        step_avg_meaning=meaning if timed else None,
        num_untimed_steps=num_untimed if timed else 0,
        facts=known | {"world_size": int(facts["world_size"]) if "world_size" in facts else None},
        model=form.name,
        metric=form.metric if values_of(form.metric) else "val_loss",
        headline={"val_bpb": str(validated[0]["val_bpb"])} if validated and "val_bpb" in validated[0] else {},
        flags={row["step"]: row["flags"] for row in rows if "flags" in row},
        batch_tokens=None if batch_tokens is None else round(batch_tokens),
    )


def _is_complete(form: str, last: int, val_step: int | None, total: int | None, facts: dict[str, str]) -> bool:
    """Whether a run is complete: the log says so, or it has the last step or, if no total is known, validates it."""
    validates_last = val_step is not None and form == "nanochat"  # nanochat does if it validates at all
    says_done = "num_done" in facts or "total_min" in facts  # programs print these at the end
    if says_done and (not validates_last or val_step == last):
        return total is None or last >= min(total, int(facts.get("num_done", total)))
    if form == "nanogpt":  # it validates before the last iteration, and prints every tenth iteration
        return last >= total - 1 if total is not None else val_step is not None and val_step >= last - 1
    return val_step is not None and val_step >= (last if total is None else total)
