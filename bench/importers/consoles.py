"""Console logs of nanoGPT, nanochat and KempnerForge -> runs.  Each has one kind of line a step; colours are taken off."""

import re

import numpy as np

from bench.importers.lines import COLUMNS
from bench.importers.run import Run

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
FLOAT = r"([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf|-inf)"
# form -> {kind of line: (regular expression, what its groups are)}
FORMS = {
    "nanogpt": {  # train.py: "iter 10: loss 5.9, time 210.5ms, mfu 12.3%" and "step 250: train loss 4.1, val loss 4.2"
        "step": (re.compile(rf"iter (\d+): loss {FLOAT}, time {FLOAT}ms(?:, mfu {FLOAT}%)?"), ("step", "train_loss", "step_ms", None)),
        "val": (re.compile(rf"step (\d+): train loss {FLOAT}, val loss {FLOAT}"), ("step", None, "val_loss")),
    },
    "nanochat": {  # base_train.py: "step 00012/21400 (0.06%) | loss: 9.1 | ... | dt: 812.30ms | tok/sec: 645,280 | ..."
        "step": (
            re.compile(rf"step (\d+)/(\d+) \([\d.]+%\) \| loss: {FLOAT} \|.*?\bdt: {FLOAT}ms \| tok/sec: {FLOAT}"),
            ("step", "total", "train_loss", "step_ms", "tokens_per_s"),
        ),
        "val": (re.compile(rf"Step (\d+) \| Validation (?:bpb|loss): {FLOAT}"), ("step", "val_loss")),
    },
    "kempnerforge": {  # "[step 10] loss=7.1 | lr=3.00e-04 | grad_norm=1.2 | tok/s=51,200 | mfu=31.2% | mem=..GB | step_time=0.64s"
        "step": (re.compile(rf"\[step (\d+)\] loss={FLOAT}(?P<rest>.*)"), ("step", "train_loss")),
        "val": (re.compile(rf"\[eval (?:at )?step (\d+)\].*?loss={FLOAT}"), ("step", "val_loss")),
    },
}
STEP_TIME = re.compile(rf"step_time={FLOAT}(ms|s)\b")
LOOKS_LIKE = {
    "nanogpt": re.compile(r"^(?:iter|step) \d+: "), "nanochat": re.compile(r"^[Ss]tep \d+[/ ]"), "kempnerforge": re.compile(r"\[(?:step|eval)[ \d]"),
}  # fmt: skip


def read(data, form):
    """The bytes of a console log -> (list of Run, {"unmatched": lines, ...}).  A metric line that cannot be read is reported."""
    rows, unmatched = [], []
    for line in COLOUR.sub("", data.decode("utf-8", "replace")).splitlines():
        row = _row(line, form)
        if row:
            rows.append(row)
        elif LOOKS_LIKE[form].search(line) and ("loss" in line):
            unmatched.append(line[:200])
    runs, start = [], 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place]["step"] < rows[place - 1]["step"]:
            runs.append(_run(rows[start:place], len(runs), form))
            start = place
    return runs, {"unmatched": unmatched, "num_tail_lines": 0, "format_id": form if rows else "not_a_run"}


def _row(line, form):
    for pattern, names in FORMS[form].values():
        if found := pattern.search(line):
            row = {}
            for name, text in zip(names, found.groups()):
                if name and text is not None:
                    row[name] = float(text.replace(",", ""))
            if form == "kempnerforge" and (time := STEP_TIME.search(line)):
                row["step_ms"] = float(time.group(1).replace(",", "")) * (1 if time.group(2) == "ms" else 1000)
            return row
    return None


def _run(rows, number, form):
    columns = {name: np.array([row.get(name, np.nan) for row in rows]) for name in COLUMNS}
    step_ms = {int(row["step"]): row["step_ms"] for row in rows if "step_ms" in row}
    steps = columns["step"]
    every_step = len(step_ms) > 1 and set(range(min(step_ms), max(step_ms) + 1)) == set(step_ms)
    val = np.flatnonzero(~np.isnan(columns["val_loss"]))
    total = next((int(row["total"]) for row in rows if "total" in row), None)
    last = int(steps.max())
    tokens = [row["tokens_per_s"] * row["step_ms"] / 1e3 for row in rows if "tokens_per_s" in row and "step_ms" in row]
    if every_step:  # step times are printed, not a running total
        elapsed = np.cumsum([step_ms[step] for step in sorted(step_ms)])
        by_step = dict(zip(sorted(step_ms), elapsed))
        columns["train_time_ms"] = np.array([by_step.get(int(step), np.nan) for step in steps])
    complete = bool(len(val)) and int(steps[val[-1]]) >= (last if total is None else total - 1)
    return Run(
        number=number, columns=columns, num_steps=last, declared_steps=total, complete=complete,
        val_loss=float(columns["val_loss"][val[-1]]) if len(val) else None, val_step=int(steps[val[-1]]) if len(val) else None,
        train_time_ms=float(elapsed[-1]) if every_step else None, step_avg_ms=None,
        step_avg_meaning=None, facts={}, extras={}, model=form, batch_tokens=round(float(np.median(tokens))) if tokens else None,
    )  # fmt: skip
