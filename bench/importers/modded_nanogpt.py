"""Logs of KellerJordan/modded-nanogpt (and llm.c's main.log) -> runs: all formats from 2024-06 to 2026.

A file holds no run, one, or several; what a log does not say is None.  step_avg was printed with three meanings, which are
told apart by trying each on the log's own numbers.
"""

import contextlib
import hashlib
import re
from datetime import UTC, datetime

import numpy as np

from bench import utc
from bench.importers import lines
from bench.importers.foreign_run import Run

# of what a log says around its metric lines; a newline first, which is looked for more quickly than a line's beginning
TORCH = re.compile(rb"\nRunning [Pp]y[Tt]orch (\S+)(?: compiled for CUDA (\S+))?")
PYTHON_VERSION = re.compile(rb"\nRunning Python (\S+)")
ON_DEVICE = re.compile(rb" on (?:device_name=)?((?:NVIDIA|AMD) [^\n]*?) with world_size[= ](\d{1,6})\b")
ON_DEVICES = re.compile(
    rb"\nRunning on (\d{1,4}) x ([^\n]+?)(?: at ([\d.]{1,8}) W)?(?: with world_size (\d{1,6}))?$", re.M
)  # ./run.sh export
SMI_GPU = re.compile(rb"\n\| +(\d{1,3}) +(NVIDIA \S[^|\n]*?) +(?:On|Off) *\|")
SMI_POWER = re.compile(rb"/ *(\d{1,6})W *\|")
SMI_DRIVER = re.compile(rb"Driver Version: (\S+)")
SMI_DATE = re.compile(rb"\n(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (\w{3} +\d+ \d\d:\d\d:\d\d \d{4})\s*$", re.M)
UTC_STAMP = re.compile(rb"\nRun UTC timestamp=(\S+)")
SEED = re.compile(rb"\n(?:Using seed=|args: \{(?:[^\n]*, )?'seed': )(\d{1,20})\b")
PEAK = re.compile(rb"\npeak memory (?:consumption|allocated)(?: training)?: (\d{1,12}) ([MG])iB")
RULE = b"=" * 40
PYTHON = re.compile(rb'"""|\'\'\'|#|@|(?:import|from|def|class|if|try)\b')  # how code may begin
IMPORT = re.compile(rb"^(?:import|from) \w", re.M)
STAMP = "%Y-%m-%dT%H:%M:%SZ"
UNTIMED_STEPS = 10
MEANINGS = (
    "cumulative: train_time/step",
    "cumulative, first steps untimed: train_time/(step-10)",
    "window since previous val",
)
FIT_FRAC = 0.003  # of a printed step_avg: rounding, and the time of a line itself


def read(data, name):
    """The bytes of a log, and its name -> (list of Run, facts of the file).

    facts: {"unmatched": [(line number from 1, text)], "num_repeated", "num_tail_lines", "format_id"}.  No run: no training log.
    """
    data = lines.plain(data)
    source, start = _source(data)
    first_number = data.count(b"\n", 0, start) + 1
    found, text, is_metric = lines.read(data[start:])
    _drop_told_again(found, text)
    runs, places = [], _split(found)
    for number, facts in enumerate(_facts_of_runs(found, places, text, is_metric)):
        runs.append(_run(found, places[number], facts, source, number))
    unmatched = [(first_number + line, text) for line, text in found.unmatched]
    return runs, {
        "unmatched": unmatched,
        "num_repeated": found.num_repeated,
        "num_tail_lines": len(found.tails),
        "format_id": _format(found),
    }


def _split(found):
    """Places of each run: one ends where steps go back, where the same step comes again, or where the total changes."""
    if not len(found):
        return []
    step, total = found.columns["step"], found.columns["total"]
    another = (total[1:] != total[:-1]) & ~(np.isnan(total[1:]) & np.isnan(total[:-1]))
    starts = [0, *(np.flatnonzero((step[1:] < step[:-1]) | lines.same_again(found) | another) + 1).tolist()]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(step)])]


def _drop_told_again(found, text):
    """A run whose lines all stand in the one before, its last among them, is no other: a driver's summary, say, of its log."""
    places = _split(found)
    kept = np.ones(len(found), bool)
    for before, after in zip(places, places[1:]):
        if len(after) > len(before) or text[found.line_numbers[before[-1]]] != text[found.line_numbers[after[-1]]]:
            continue
        if {text[number] for number in found.line_numbers[after]} <= {
            text[number] for number in found.line_numbers[before]
        }:
            kept[after] = False
    if not kept.all():
        found.num_repeated += np.count_nonzero(~kept)
        found.keep(kept)


def _facts_of_runs(found, places, text, is_metric):
    """What the log says around the lines of each run: of the machine before them, of the peak within and after them.

    A later run of a file without a head of its own is of the same machine; its seed and its start are not told.
    """
    starts = [int(found.line_numbers[of_run[0]]) for of_run in places]
    ends = [int(found.line_numbers[of_run[-1]]) for of_run in places]
    first = {}
    for number, (start, end) in enumerate(zip(starts, ends)):
        before = text.without(is_metric, ends[number - 1] + 1 if number else 0, start)
        after = text.without(is_metric, start, starts[number + 1] if number + 1 < len(starts) else len(text))
        told = _environment(b"\n" + (before if len(places) > 1 else before + b"\n" + after))
        first = first or told
        if number and told["torch"] is None and told["gpu_name"] is None:
            told = first | {name: told[name] for name in ("seed", "started_at", "started_zone")}
        peak = PEAK.search(b"\n" + after)
        yield told | {"peak_mib": peak and int(peak[1]) * (1024 if peak[2] == b"G" else 1)}


def _run(found, places, facts, source, number):
    columns = {name: values[places.start : places.stop] for name, values in found.columns.items()}
    is_val = ~np.isnan(columns["val_loss"])
    total = columns["total"][-1]
    val = np.flatnonzero(is_val)
    timed = np.flatnonzero(~np.isnan(columns["train_time_ms"]))
    last_step = int(columns["step"].max())
    final = int(val[-1]) if len(val) else None
    declared = None if np.isnan(total) else int(total)
    diverged = np.flatnonzero(~np.isnan(columns["train_diverged"]) | ~np.isnan(columns["val_diverged"]))
    complete = (
        not len(diverged)
        and final is not None
        and int(columns["step"][final]) == (last_step if declared is None else declared)
    )
    at = (
        final
        if final is not None and final in timed and columns["step"][final] == last_step
        else timed[-1]
        if len(timed)
        else None
    )
    printed = columns["step_avg_ms"][final] if final is not None else np.nan
    meaning, headline = _meaning(columns), {}
    for place in reversed(places if found.extras else ()):
        if found.extras.get(int(place), {}).get("val_ema_loss"):
            headline = {"val_ema_loss": found.extras[int(place)]["val_ema_loss"]}
            break
    return Run(
        number=number,
        columns=columns,
        num_steps=last_step,
        declared_steps=declared,
        complete=bool(complete),
        val_loss=None if final is None else float(columns["val_loss"][final]),
        val_step=None if final is None else int(columns["step"][final]),
        train_time_ms=None if at is None else float(columns["train_time_ms"][at]),
        step_avg_ms=None if np.isnan(printed) else float(printed),
        step_avg_meaning=meaning,
        num_untimed_steps=UNTIMED_STEPS if meaning == MEANINGS[1] else 0,
        extras={
            str(int(columns["step"][place - places[0]])): extra
            for place, extra in found.extras.items()
            if places[0] <= place <= places[-1]
        },
        headline=headline,
        facts=facts,
        tail_averages=found.tails,
        other_lines=found.others,
        source_sha256=source,
        diverged_step=int(columns["step"][diverged[0]]) if len(diverged) else None,
    )


def _meaning(columns):
    """Which of MEANINGS gives the printed step_avg; None: none was printed, or none fits."""
    known = ~np.isnan(columns["step_avg_ms"]) & ~np.isnan(columns["train_time_ms"]) & (columns["step"] > 0)
    if not known.any():
        return None
    step, time_ms, printed, val_loss = (
        columns[name][known] for name in ("step", "train_time_ms", "step_avg_ms", "val_loss")
    )
    late, is_val = step > 2 * UNTIMED_STEPS, ~np.isnan(val_loss)
    with np.errstate(divide="ignore", invalid="ignore"):
        averages = (
            (time_ms / step, printed),
            (time_ms[late] / (step[late] - UNTIMED_STEPS), printed[late]),
            (np.diff(time_ms[is_val]) / np.diff(step[is_val]), printed[is_val][1:]),
        )
        errors = {name: np.abs(average / told - 1) for name, (average, told) in zip(MEANINGS, averages)}
    fits = {name: fit for name, found in errors.items() if len(found) and np.isfinite(fit := found.sum() / len(found))}
    best = min(fits, key=fits.get, default=None)  # by the mean: a wrong meaning may fit most steps of an even race
    return best if best is not None and 2 * np.count_nonzero(errors[best] < FIT_FRAC) > len(errors[best]) else None


def _environment(data):
    """What the log says of where it ran; None for what it does not say."""
    torch, python, device = TORCH.search(data), PYTHON_VERSION.search(data), ON_DEVICE.search(data)
    gpus = _one_table(SMI_GPU.findall(data))
    powers, driver = SMI_POWER.findall(data), SMI_DRIVER.search(data)
    seed, (started_at, zone) = SEED.search(data), _started(data)
    if exported := ON_DEVICES.search(data):
        gpus, powers = [_words(exported[2])] * int(exported[1]), [exported[3]] if exported[3] else []
    world_size = int(device[2]) if device else int(exported[4]) if exported and exported[4] else None
    return {
        "torch": torch and _words(torch[1]),
        "cuda": torch and torch[2] and _words(torch[2]),
        "python": python and _words(python[1]),
        "gpu_name": gpus[0] if gpus else device and _words(device[1]),
        "num_gpus": len(gpus) or world_size,
        "world_size": world_size,
        "power_limit_w": float(powers[0]) if powers and len(set(powers)) == 1 else None,
        "driver": driver and _words(driver[1]),
        "seed": seed and int(seed[1]),
        "started_at": started_at,
        "started_zone": zone,
    }


def _words(text):
    return text.decode("utf-8", "replace").strip()


def _one_table(rows):
    """[(index, name)] of the rows of nvidia-smi -> the names of one table: a log may hold it twice."""
    names = {}
    for index, name in rows:
        names.setdefault(int(index), _words(name))
    return list(names.values())


def _started(data):
    """(time, zone): nvidia-smi prints the machine's own time, of a zone that the log does not name."""
    with contextlib.suppress(ValueError):
        if found := UTC_STAMP.search(data):
            return utc.parse(_words(found[1])).astimezone(UTC).strftime(STAMP), "UTC"
    with contextlib.suppress(ValueError):
        if found := SMI_DATE.search(data):
            moment = datetime.strptime(" ".join(_words(found[1]).split()), "%b %d %H:%M:%S %Y")
            return moment.strftime(STAMP), "unknown: the machine's own"
    return None, None


def _source(data):
    """(sha256 of the code that a log embeds, where what follows it starts): before the first rule, or between the first two.

    No code: (None, 0).  Lines in it that look like metric lines are code, if it is Python; else there is no code there.
    """
    metric = lines.first(data)
    first = _rule(data, 0)
    if first is None:
        return None, 0
    start, last = 0, first
    if not data[: first[0]].strip():
        start, last = first[1], _rule(data, first[1])
    stop, after = last or (len(data), len(data))
    code = data[start:stop].strip()
    if metric < stop and not (last and PYTHON.match(code) and IMPORT.search(code)):
        return None, 0
    return (hashlib.sha256(code).hexdigest() if code else None), after


def _rule(data, start):
    """(start, end) of the next line of nothing but =, at least 40; None: there is none."""
    while (at := data.find(RULE, start)) >= 0:
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        if (at == 0 or data[at - 1 : at] == b"\n") and not data[at:end].strip(b"= \t\r"):
            return at, end
        start = end
    return None


def _format(found):
    """A short name of the kind of log."""
    if not len(found):
        return "Z_not_a_run_log"
    if any(shape.startswith("s:") for shape in found.shapes):
        return "A_llmc_s_trl"
    if not any("train_time:s" in shape for shape in found.shapes):
        return "B_ms_trainloss" if any("train_loss:" in shape for shape in found.shapes) else "C_ms_no_trainloss"
    if found.extras:
        return "F_s_ext"
    return "E1_s_val_only" if all("val_loss:" in shape for shape in found.shapes) else "E2_s_with_train_lines"
