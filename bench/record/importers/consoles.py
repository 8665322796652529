"""Console logs in one of console_forms.FORMS -> runs.  Colours are taken off; row k of a run is after k steps."""

import math
import re

import numpy as np

from bench.record.importers.console_forms import FORMS, as_number
from bench.record.importers.foreign_run import Run
from bench.record.importers.lines import COLUMNS

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MAX_LINE_CHARS = 10_000  # of a line that is searched for metrics; no program prints a longer one


def read(data: bytes, form: str, reader: object = None) -> tuple[list[Run], dict]:
    """The bytes of a console log -> (list of Run, facts of the file, as modded_nanogpt.read has them).

    reader: of the form; None is that of FORMS.
    """
    text, reader = COLOUR.sub("", data.decode("utf-8", "replace")), reader or FORMS[form]()
    runs, unmatched, latest = [], [], 0
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = reader.row(line) if len(line) <= MAX_LINE_CHARS else None
        except (TypeError, ValueError):  # not a number, in a line that looks right
            row = None
        if row is None:
            if reader.looks_like.search(line[:MAX_LINE_CHARS]):
                unmatched.append((number, line[:200]))
            continue
        if not runs or (row["step"] <= min(runs[-1]) and row["step"] < latest):  # back at the first step: another run
            runs.append({})
        latest = row["step"]
        runs[-1].setdefault(latest, {}).update(_finite(row))  # a run that was resumed did this step again
    facts = {name: match[match.re.groups] for name, pattern in reader.facts.items() if (match := pattern.search(text))}
    made = [_run(by_step, number, form, facts if len(runs) == 1 else {}, reader) for number, by_step in enumerate(runs)]
    counts = {"num_repeated": 0, "num_tail_lines": 0, "format_id": form if runs else "not_a_run"}
    return made, {"unmatched": unmatched} | counts


def _finite(row):
    """Without losses that are not numbers; "diverged" says that there was one."""
    kept = {name: value for name, value in row.items() if not isinstance(value, float) or math.isfinite(value)}
    return kept | ({"diverged": 1} if len(kept) < len(row) else {})


def _run(by_step, number, form, facts, reader):
    meaning, num_untimed = reader.clock(by_step)
    rows = [by_step[step] for step in sorted(by_step)]

    def of_rows(name):
        return [row[name] for row in rows if name in row]

    columns = {name: np.array([row.get(name, np.nan) for row in rows], float) for name in (*COLUMNS, "step_ms")}
    last, total = rows[-1]["step"], int(facts["total"]) if "total" in facts else None
    # nanoGPT's last iteration has the number max_iters
    total = int(facts["max_iters"]) + 1 if "max_iters" in facts else next(iter(of_rows("total")), total)
    timed, validated = of_rows("train_time_ms"), [row for row in rows if "val_loss" in row or "val_bpb" in row][-1:]
    if "total_min" in facts and ("train_time_ms" not in rows[-1] or len(timed) < last):
        timed.append(60e3 * as_number(facts["total_min"]))
    val_step = validated[0]["step"] if validated else None
    diverged = next((row["step"] for row in rows if "diverged" in row), None)
    peaks_mib = of_rows("peak_mib") + [as_number(facts[name]) for name in ("peak_mib",) if name in facts]
    batch_tokens = as_number(facts["batch_tokens"]) if "batch_tokens" in facts else None
    if "num_tokens" in facts:
        batch_tokens = as_number(facts["num_tokens"]) / last
    known = {"gpu_name": facts.get("gpu_name"), "peak_mib": max(peaks_mib, default=None)}
    return Run(
        number=number,
        columns=columns,
        num_steps=last,
        declared_steps=total,
        val_step=val_step,
        diverged_step=diverged,
        complete=diverged is None and _is_complete(form, last, val_step, total, facts),
        val_loss=next(reversed(of_rows("val_loss")), None),
        train_time_ms=timed[-1] if timed else None,
        step_avg_ms=None,
        step_avg_meaning=meaning if timed else None,
        num_untimed_steps=num_untimed if timed else 0,
        facts=known | {"world_size": int(facts["world_size"]) if "world_size" in facts else None},
        model=form,
        headline={"val_bpb": str(validated[0]["val_bpb"])} if validated and "val_bpb" in validated[0] else {},
        flags={row["step"]: row["flags"] for row in rows if "flags" in row},
        batch_tokens=None if batch_tokens is None else round(batch_tokens),
    )


def _is_complete(form, last, val_step, total, facts):
    """Whether the run went to its end: the log says so, or has its last step, or (no total) its last validation."""
    validates_last = val_step is not None and form == "nanochat"  # if it validates at all
    says_done = "num_done" in facts or "total_min" in facts  # printed at the end
    if says_done and (not validates_last or val_step == last):
        return total is None or last >= min(total, int(facts.get("num_done", total)))
    if form == "nanogpt":  # validates before the last iteration, and prints every tenth
        return last >= total - 1 if total is not None else val_step is not None and val_step >= last - 1
    return val_step is not None and val_step >= (last if total is None else total)
