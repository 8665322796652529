"""Reads logs of KellerJordan/modded-nanogpt (and llm.c's main.log), in all formats from 2024-06 to 2026.

A file has no run, one, or several; what a log does not say is None.  step_avg has been printed with three meanings; the
one that fits the log's own numbers is chosen.
"""

import contextlib
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from bench.base import utc
from bench.machine import code_state
from bench.record.importers import lines
from bench.record.importers.lines import Array, Columns, Metrics
from bench.record.importers.records import Run

# Patterns for facts outside of the metric lines.  They begin with a newline, which is faster than ^ with re.M.
TORCH = re.compile(rb"\nRunning [Pp]y[Tt]orch (\S+)(?: compiled for CUDA (\S+))?")
PYTHON_VERSION = re.compile(rb"\nRunning Python (\S+)")
ON_DEVICE = re.compile(rb" on (?:device_name=)?((?:NVIDIA|AMD) [^\n]*?) with world_size[= ](\d{1,6})\b")
ON_DEVICES = re.compile(
    rb"\nRunning on (\d{1,4}) x ([^\n]+?)(?: at ([\d.]{1,8}) W)?(?: with world_size (\d{1,6}))?$", re.M
)
SMI_GPU = re.compile(rb"\n\| +(\d{1,3}) +(NVIDIA \S[^|\n]*?) +(?:On|Off) *\|")
SMI_POWER = re.compile(rb"/ *(\d{1,6})W *\|")
SMI_DRIVER = re.compile(rb"Driver Version: (\S+)")
SMI_DATE = re.compile(rb"\n(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (\w{3} +\d+ \d\d:\d\d:\d\d \d{4})\s*$", re.M)
UTC_STAMP = re.compile(rb"\nRun UTC timestamp=(\S+)")
SEED = re.compile(rb"\n(?:Using seed=|args: \{(?:[^\n]*, )?'seed': )(\d{1,20})\b")
PEAK = re.compile(rb"\npeak memory (?:consumption|allocated)(?: training)?: (\d{1,12}) ([MG])iB")
# A line of 40 or more =.  To be fast, the lookbehind comes after the literal text.
RULE = re.compile(rb"=" * 40 + rb"(?<![^\n]={40})[= \t\r]*$", re.M)
PYTHON = re.compile(rb'"""|\'\'\'|#|@|(?:import|from|def|class|if|try)\b')  # the possible beginnings of code
FILE = re.compile(r"^-{40}\n# (\S+)\n-{40}$", re.M)  # the header of each further file that a log embeds
STRING = re.compile(rb"""(\"{3}|'{3})[\s\S]*?\1""")
IMPORT = re.compile(rb"^(?:import|from) \w", re.M)
# What may differ in the code of repeats: a literal seed, the name of the run
OF_ONE_RUN = re.compile(rb"""(?i)(\b(?:manual_)?seed\b\W{1,5})\d+|(\brun_id\s*=\s*)(?:"[^"\n]*"|'[^'\n]*')""")
SCRIPT = "train_gpt.py"
STAMP = "%Y-%m-%dT%H:%M:%SZ"
UNTIMED_STEPS = 10
MEANINGS = (
    "cumulative: train_time/step",
    "cumulative, first steps untimed: train_time/(step-10)",
    "window since previous val",
)
FIT_FRAC = 0.003  # how far a printed step_avg may be off, as it is rounded and printing takes time


def read(data: bytes) -> tuple[list[Run], dict[str, Any]]:
    """Reads a log.  Returns its runs, none if it is not a training log, and facts about the file.

    facts: {"unmatched": [(line number from 1, text)], "num_repeated", "num_validated_again"}.
    """
    data = lines.plain(data)
    code, start = _source(data)
    source, code_id = None, None
    if code:
        source = hashlib.sha256(code).hexdigest()
        code_id = hashlib.sha256(OF_ONE_RUN.sub(rb"\1\2", code)).hexdigest()
    first_number = data.count(b"\n", 0, start) + 1
    metrics, text, is_metric = lines.read(data[start:])
    _drop_second_lines(metrics, text)
    _drop_summaries(metrics, text)
    spans = _split(metrics, text)
    facts_by_run = zip(spans, _facts_of_runs(metrics, spans, text, is_metric))
    runs = [_run(metrics, span, facts, source, number) for number, (span, facts) in enumerate(facts_by_run)]
    for run in runs:
        run.code_id = code_id
    unmatched = [(first_number + line, text) for line, text in sorted(metrics.unmatched)]
    counts = {"num_repeated": metrics.num_repeated, "num_validated_again": metrics.num_validated_again}
    return runs, {"unmatched": unmatched} | counts


def sources(data: bytes) -> dict[str, str]:
    """Returns {file: its text} of the code that a log embeds, first the script as train_gpt.py; {} without code."""
    code = _source(lines.plain(data))[0] or b""
    script, *others = FILE.split(code.decode("utf-8", "replace"))
    named = [(SCRIPT, script), *zip(others[::2], others[1::2])]
    first = dict(reversed(named))  # of a name that is there twice the first, which ran
    return {name: first[name] for name, _ in named} if IMPORT.search(code) else {}


def code_key(files: Mapping[str, str]) -> str:
    """Returns a hash of code without literal seeds, the run's name, comments and docstrings, which repeats share."""
    texts = (OF_ONE_RUN.sub(rb"\g<1>\g<2>0", text.encode()) for _, text in sorted(files.items()))
    return hashlib.sha256(b"\0".join(map(code_state.normalised, texts))).hexdigest()


def _split(metrics: Metrics, text: Sequence[bytes]) -> list[range]:
    """Returns the ranges of the runs' metric lines.

    A run begins where steps start again, at the first step of the run before or earlier.  Elsewhere lines whose steps
    do not rise, or with another total, are another run's only after a header.  A last step alone begins no run.
    """
    step, total = metrics.columns["step"], _totals(metrics)
    starts = [0] if len(step) else []
    for index in (np.flatnonzero((step[1:] <= step[:-1]) | (total[1:] != total[:-1])) + 1).tolist():
        again = step[index] < step[index - 1] and step[index] <= max(1, step[starts[-1]])
        if step[index] != total[index] and (again or _has_header(metrics, text, index)):
            starts.append(index)
    return [range(start, stop) for start, stop in itertools.pairwise([*starts, len(step)])]


def _totals(metrics: Metrics) -> Array:
    return np.nan_to_num(metrics.columns["total"], nan=-1)  # as nan is not equal to itself


def _has_header(metrics: Metrics, text: Sequence[bytes], index: int) -> bool:
    """Whether facts about a machine or a start stand before a metric line, after the one before it."""
    between = text[metrics.line_numbers[index - 1] + 1 : metrics.line_numbers[index]]
    return any(fact is not None for fact in _environment(b"\n".join([b"", *between])).values()) if between else False


def _drop_second_lines(metrics: Metrics, text: Sequence[bytes]) -> None:
    """Keeps the first line of each step and kind (training, validation) of a run; what else it prints trains nothing.

    A copy is dropped.  Further validations of the last step are kept as text; if there are other such lines, as of a
    second rank, all are reported.
    """
    step, total, numbers = metrics.columns["step"], _totals(metrics), metrics.line_numbers
    is_val = ~(np.isnan(metrics.columns["val_loss"]) & np.isnan(metrics.columns["val_diverged"]))
    kept = np.ones(len(metrics), bool)
    for span in _split(metrics, text):
        mine = slice(span.start, span.stop)
        is_first = np.zeros(len(span), bool)
        is_first[np.unique(2 * step[mine] + is_val[mine], return_index=True)[1]] = True
        latest = np.maximum.accumulate(np.where(total[mine] == total[span.start], step[mine], -1))
        kept[mine] = is_first & (step[mine] == latest)
        if kept[mine].all():
            continue
        lines_kept = {text[number].rstrip() for number in numbers[mine][kept[mine]]}
        dropped = [span.start + index for index in np.flatnonzero(~kept[mine]).tolist()]
        others = {index: line for index in dropped if (line := text[numbers[index]].rstrip()) not in lines_kept}
        metrics.num_repeated += len(dropped) - len(others)
        if all(is_val[index] and step[index] == latest[-1] for index in others):
            metrics.num_validated_again += len(others)
            metrics.others += [line.decode("utf-8", "replace") for line in others.values()]
        else:
            for index in others:
                metrics.report(text, numbers[index])
    metrics.keep(kept)


def _drop_summaries(metrics: Metrics, text: Sequence[bytes]) -> None:
    """Drops what a driver prints again after a run: lines that are all in it, with the same last line.

    Other lines without a header that are fewer than those of a run to the same step are reported, as they show no run.
    """
    step, total = metrics.columns["step"], _totals(metrics)
    kept = np.ones(len(metrics), bool)
    longest: dict[tuple[float, float], range] = {}  # {(last step, total): the last of the runs with the most lines}
    for span in _split(metrics, text):
        old = longest.setdefault((step[span[-1]], total[span[-1]]), span)
        new_lines, old_lines = ([text[number] for number in metrics.line_numbers[part]] for part in (span, old))
        is_copy = old is not span and new_lines[-1] == old_lines[-1] and set(new_lines) <= set(old_lines)
        if is_copy:
            metrics.num_repeated += len(span)
        elif len(span) < len(old) and not _has_header(metrics, text, span.start):
            for index in span:
                metrics.report(text, metrics.line_numbers[index])
        else:
            longest[step[span[-1]], total[span[-1]]] = max(span, old, key=len)
            continue
        kept[span] = False
    metrics.keep(kept)


def _facts_of_runs(
    metrics: Metrics, spans: list[range], text: Sequence[bytes], is_metric: Array
) -> Iterator[dict[str, Any]]:
    """Yields the facts of each run: those of the machine come before its lines, the memory peak in or after them.

    A later run without a header is from the same machine as the first one; its seed and start are unknown.
    """
    starts = [int(metrics.line_numbers[span[0]]) for span in spans] + [len(text)]
    end = 0  # the end of the previous run
    first: dict[str, Any] = {}
    for number, span in enumerate(spans):
        before = lines.without(text, is_metric, end, starts[number])
        after = lines.without(text, is_metric, starts[number], starts[number + 1])
        end = int(metrics.line_numbers[span[-1]]) + 1
        facts = _environment(b"\n" + (before if len(spans) > 1 else before + b"\n" + after))
        first = first or facts
        if number and facts["torch"] is None and facts["gpu_name"] is None:
            facts = first | {name: facts[name] for name in ("seed", "started_at", "started_zone")}
        peak = PEAK.search(b"\n" + after)
        yield facts | {"peak_mib": peak and int(peak[1]) * (1024 if peak[2] == b"G" else 1)}


def _run(metrics: Metrics, span: range, facts: dict[str, Any], source: str | None, number: int) -> Run:
    columns = {name: values[span.start : span.stop] for name, values in metrics.columns.items()}
    step, has_time = columns["step"].astype(int), ~np.isnan(columns["train_time_ms"])
    validated, timed = np.flatnonzero(~np.isnan(columns["val_loss"])), np.flatnonzero(has_time)
    last = validated[-1] if len(validated) else None  # the line of the last validation
    diverged = np.flatnonzero(~np.isnan(columns["train_diverged"]) | ~np.isnan(columns["val_diverged"]))
    declared = None if np.isnan(columns["total"][-1]) else int(columns["total"][-1])
    num_steps, meaning = int(step.max()), _meaning(columns)
    complete = last is not None and not len(diverged) and step[last] == (num_steps if declared is None else declared)
    at_end = last is not None and has_time[last] and step[last] == num_steps
    timed_at = last if at_end else timed[-1] if len(timed) else None
    extras = {index - span.start: metrics.extras[index] for index in span if index in metrics.extras}
    ema = next((extra["val_ema_loss"] for extra in reversed(extras.values()) if extra.get("val_ema_loss")), None)

    def at(name: str, index: int | None) -> float | None:
        """Returns a number of a line; None without the line or the number."""
        return None if index is None or np.isnan(columns[name][index]) else float(columns[name][index])

    return Run(
        number=number,
        columns=columns,
        num_steps=num_steps,
        declared_steps=declared,
        complete=bool(complete),
        val_loss=at("val_loss", last),
        val_step=None if last is None else int(step[last]),
        train_time_ms=at("train_time_ms", timed_at),
        step_avg_ms=at("step_avg_ms", last),
        step_avg_meaning=meaning,
        num_untimed_steps=UNTIMED_STEPS if meaning == MEANINGS[1] else 0,
        extras={str(step[index]): extra for index, extra in extras.items()},
        headline={} if ema is None else {"val_ema_loss": ema},
        facts=facts,
        tail_averages=metrics.tails,
        other_lines=metrics.others,
        source_sha256=source,
        diverged_step=int(step[diverged[0]]) if len(diverged) else None,
    )


def _meaning(columns: Columns) -> str | None:
    """Returns the one of MEANINGS that the printed step_avg has; None if it was not printed or none fits."""
    is_usable = ~np.isnan(columns["step_avg_ms"]) & ~np.isnan(columns["train_time_ms"]) & (columns["step"] > 0)
    if not is_usable.any():
        return None
    names = ("step", "train_time_ms", "step_avg_ms", "val_loss")
    step, time_ms, printed, val_loss = (columns[name][is_usable] for name in names)
    late, is_val = step > 2 * UNTIMED_STEPS, ~np.isnan(val_loss)
    with np.errstate(divide="ignore", invalid="ignore"):
        averages = (
            (time_ms / step, printed),
            (time_ms[late] / (step[late] - UNTIMED_STEPS), printed[late]),
            (np.diff(time_ms[is_val]) / np.diff(step[is_val]), printed[is_val][1:]),
        )
        errors = {name: np.abs(average / reported - 1) for name, (average, reported) in zip(MEANINGS, averages)}
    fits = {name: fit for name, off in errors.items() if len(off) and np.isfinite(fit := off.sum() / len(off))}
    # the mean decides, as in a run with even steps a wrong meaning may fit most of them
    best = min(fits, key=lambda name: fits[name], default=None)
    return best if best is not None and 2 * np.count_nonzero(errors[best] < FIT_FRAC) > len(errors[best]) else None


def _environment(data: bytes) -> dict[str, Any]:
    """Returns the log's facts about machine and software; None for those that it lacks."""
    torch, python, device = TORCH.search(data), PYTHON_VERSION.search(data), ON_DEVICE.search(data)
    tables: dict[int, str] = {}
    for index, name in SMI_GPU.findall(data):
        tables.setdefault(int(index), _decoded(name))  # a log may contain the table twice
    gpus = list(tables.values())
    powers, driver = SMI_POWER.findall(data), SMI_DRIVER.search(data)
    seed, (started_at, zone) = SEED.search(data), _started(data)
    if exported := ON_DEVICES.search(data):
        gpus, powers = [_decoded(exported[2])] * int(exported[1]), [exported[3]] if exported[3] else []
    world_size = int(device[2]) if device else int(exported[4]) if exported and exported[4] else None
    return {
        "torch": torch and _decoded(torch[1]),
        "cuda": torch and torch[2] and _decoded(torch[2]),
        "python": python and _decoded(python[1]),
        "gpu_name": gpus[0] if gpus else device and _decoded(device[1]),
        "num_gpus": len(gpus) or world_size,
        "world_size": world_size,
        "power_limit_w": float(powers[0]) if powers and len(set(powers)) == 1 else None,
        "driver": driver and _decoded(driver[1]),
        "seed": seed and int(seed[1]),
        "started_at": started_at,
        "started_zone": zone,
    }


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip()


def _started(data: bytes) -> tuple[str | None, str | None]:
    """Returns (start time, zone); nvidia-smi prints local time, whose zone the log does not name."""
    with contextlib.suppress(ValueError):
        if match := UTC_STAMP.search(data):
            return utc.parse(_decoded(match[1])).astimezone(UTC).strftime(STAMP), "UTC"
    with contextlib.suppress(ValueError):
        if match := SMI_DATE.search(data):
            moment = datetime.strptime(" ".join(_decoded(match[1]).split()), "%b %d %H:%M:%S %Y")
            return moment.strftime(STAMP), "unknown: the machine's own"
    return None, None


def _source(data: bytes) -> tuple[bytes | None, int]:
    """Returns the code in a log, which is before the first rule or between the first two, and the offset of its end.

    (None, 0) without code.  A part with lines that look like metric lines is only code if it looks like Python.
    """
    metric = lines.first(data)
    first = last = RULE.search(data)
    if first is None:  # the code may be there all the same, and its docstrings may show lines of its log
        texts = STRING.finditer(data) if IMPORT.search(data, 0, metric) else ()
        return None, max((text.end() for text in texts if lines.first(text[0]) < len(text[0])), default=0)
    start = 0
    if not data[: first.start()].strip():
        start, last = first.end(), RULE.search(data, first.end())
    stop, after = last.span() if last else (len(data), len(data))
    code = data[start:stop].strip()
    if metric < stop and not (last and PYTHON.match(code) and IMPORT.search(code)):
        return None, 0
    return code or None, after
