"""Logs of KellerJordan/modded-nanogpt (and llm.c's main.log) -> runs: all formats from 2024-06 to 2026.

A file holds no run, one, or several; what a log does not say is None.  step_avg was printed with three meanings, which are
told apart by trying each on the log's own numbers.
"""

import hashlib
import re
from datetime import datetime

import numpy as np

from bench.importers import lines
from bench.importers.run import Run

TORCH = re.compile(rb"^Running [Pp]y[Tt]orch (\S+) compiled for CUDA (\S+)", re.M)
PYTHON = re.compile(rb"^Running Python (\S+)", re.M)
ON_DEVICE = re.compile(rb"(?:^Running on device_name=| on )((?:NVIDIA|AMD) [^\n]*?) with world_size[= ](\d+)", re.M)
SMI_GPU = re.compile(rb"^\|\s+\d+\s+(NVIDIA \S[^|]*?)\s+(?:On|Off)\s*\|", re.M)
SMI_POWER = re.compile(rb"/\s*(\d+)W\s*\|")
SMI_DRIVER = re.compile(rb"Driver Version: (\S+)")
SMI_DATE = re.compile(rb"^(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (\w{3} +\d+ \d\d:\d\d:\d\d \d{4})\s*$", re.M)
UTC = re.compile(rb"^Run UTC timestamp=(\S+)", re.M)
SEED = re.compile(rb"^Using seed=(\d+)", re.M)
PEAK = re.compile(rb"^peak memory (?:consumption|allocated): (\d+) MiB", re.M)
RULE = b"=" * 40
UNTIMED_STEPS = 10
MEANINGS = ("cumulative: train_time/step", "cumulative, first steps untimed: train_time/(step-10)", "window since previous val")
FIT_FRAC = 0.003  # of a printed step_avg: rounding, and the time of a line itself


def read(data, name):
    """The bytes of a log, and its name -> (list of Run, facts of the file).

    facts: {"unmatched": lines, "format_id", "num_tail_lines"}.  No run: the file is no training log.
    """
    found, head, other = lines.read(lines.plain(data))
    source, rest = _source(head)
    facts = _environment(rest + b"\n" + other)
    runs = []
    for number, places in enumerate(_split(found)):
        runs.append(_run(found, places, facts, source, number))
    return runs, {"unmatched": found.unmatched, "num_tail_lines": found.num_tail_lines, "format_id": _format(found, name)}


def _split(found):
    """Places of each run: one ends where steps go back, where the same line comes again, or where the total changes."""
    if not len(found):
        return []
    step, total = found.columns["step"], found.columns["total"]
    kind = np.where(np.isnan(found.columns["val_loss"]) & np.isnan(found.columns["val_diverged"]), 0, 1)
    again = (step[1:] == step[:-1]) & (kind[1:] == kind[:-1])
    another = (total[1:] != total[:-1]) & ~(np.isnan(total[1:]) & np.isnan(total[:-1]))
    starts = [0, *(np.flatnonzero((step[1:] < step[:-1]) | again | another) + 1)]
    return [np.arange(start, stop) for start, stop in zip(starts, [*starts[1:], len(step)])]


def _run(found, places, facts, source, number):
    columns = {name: values[places] for name, values in found.columns.items()}
    is_val = ~np.isnan(columns["val_loss"])
    total = columns["total"][-1]
    val = np.flatnonzero(is_val)
    timed = np.flatnonzero(~np.isnan(columns["train_time_ms"]))
    last_step = int(columns["step"].max())
    final = int(val[-1]) if len(val) else None
    declared = None if np.isnan(total) else int(total)
    diverged = np.flatnonzero(~np.isnan(columns["train_diverged"]) | ~np.isnan(columns["val_diverged"]))
    complete = not len(diverged) and final is not None and int(columns["step"][final]) == (last_step if declared is None else declared)
    time_ms = None if not len(timed) else float(columns["train_time_ms"][final if final is not None and not np.isnan(columns["train_time_ms"][final]) else timed[-1]])
    printed = columns["step_avg_ms"][final] if final is not None else np.nan
    headline = {}
    for place in reversed(places if found.extras else ()):
        if found.extras.get(int(place), {}).get("val_ema_loss"):
            headline = {"val_ema_loss": found.extras[int(place)]["val_ema_loss"]}
            break
    return Run(
        number=number, columns=columns, num_steps=last_step, declared_steps=declared, complete=bool(complete),
        val_loss=None if final is None else float(columns["val_loss"][final]), val_step=None if final is None else int(columns["step"][final]),
        train_time_ms=time_ms, step_avg_ms=None if np.isnan(printed) else float(printed), step_avg_meaning=_meaning(columns),
        extras={str(int(columns["step"][place - places[0]])): extra for place, extra in found.extras.items() if places[0] <= place <= places[-1]},
        headline=headline, facts=facts, source_sha256=source, diverged_step=int(columns["step"][diverged[0]]) if len(diverged) else None,
    )  # fmt: skip


def _meaning(columns):
    """Which of MEANINGS gives the printed step_avg; None: none was printed, or none fits."""
    step, time_ms, printed = columns["step"], columns["train_time_ms"], columns["step_avg_ms"]
    known = ~np.isnan(printed) & ~np.isnan(time_ms) & (step > 0)
    if not known.any():
        return None
    is_val = known & ~np.isnan(columns["val_loss"])
    errors = {}
    with np.errstate(divide="ignore", invalid="ignore"):
        errors[MEANINGS[0]] = np.abs(time_ms / step / printed - 1)[known]
        late = known & (step > 2 * UNTIMED_STEPS)
        errors[MEANINGS[1]] = np.abs(time_ms / (step - UNTIMED_STEPS) / printed - 1)[late]
        places = np.flatnonzero(is_val)
        windows = np.diff(time_ms[places]) / np.diff(step[places]) if len(places) > 1 else np.empty(0)
        errors[MEANINGS[2]] = np.abs(windows / printed[places[1:]] - 1) if len(places) > 1 else np.empty(0)
    fits = {name: float(np.mean(found)) for name, found in errors.items() if len(found) and np.isfinite(np.mean(found))}
    best = min(fits, key=fits.get, default=None)  # by the mean: a wrong meaning may fit most steps of an even race
    return best if best is not None and np.median(errors[best]) < FIT_FRAC else None


def _environment(data):
    """What the log says of where it ran; None for what it does not say."""
    torch, python, device = TORCH.search(data), PYTHON.search(data), ON_DEVICE.search(data)
    gpus = [gpu.decode("utf-8", "replace") for gpu in SMI_GPU.findall(data)]
    powers, driver = SMI_POWER.findall(data), SMI_DRIVER.search(data)
    peak, seed = PEAK.search(data), SEED.search(data)
    world_size = int(device.group(2)) if device else None
    return {
        "torch": torch and torch.group(1).decode(), "cuda": torch and torch.group(2).decode(), "python": python and python.group(1).decode(),
        "gpu_name": gpus[0] if gpus else device and device.group(1).decode(), "num_gpus": len(gpus) or world_size, "world_size": world_size,
        "power_limit_w": float(powers[0]) if powers and len(set(powers)) == 1 else None, "driver": driver and driver.group(1).decode(),
        "peak_mib": peak and int(peak.group(1)), "seed": seed and int(seed.group(1)), "started_at": _started(data),
    }  # fmt: skip


def _started(data):
    """As the log has it: of nvidia-smi in the machine's own time zone, which the log does not name."""
    if found := UTC.search(data):
        return found.group(1).decode("ascii", "replace")
    if found := SMI_DATE.search(data):
        try:
            return datetime.strptime(" ".join(found.group(1).decode().split()), "%b %d %H:%M:%S %Y").strftime("%Y-%m-%dT%H:%M:%SZ")
        except ValueError:
            return None
    return None


def _source(head):
    """(sha256 of the code that a log embeds, what follows it): it stands before the first rule, or between the first two.

    No rule: no code, (None, head).
    """
    first = _rule(head, 0)
    if first is None:
        return None, head
    code, after = head[: first[0]].strip(), first[1]
    if not code:
        second = _rule(head, after) or (len(head), len(head))
        code, after = head[after : second[0]].strip(), second[1]
    return (hashlib.sha256(code).hexdigest() if code else None), head[after:]


def _rule(head, start):
    """(start, end) of the next line of nothing but =, at least 40; None: there is none."""
    while (at := head.find(RULE, start)) >= 0:
        end = head.find(b"\n", at)
        end = len(head) if end < 0 else end
        if (at == 0 or head[at - 1 : at] == b"\n") and not head[at:end].strip(b"= \t\r"):
            return at, end
        start = end
    return None


def _format(found, name):
    """A short name of the kind of log."""
    shapes = set(found.shapes)
    if not len(found):
        return "not_a_run"
    if any(shape.startswith("s:") for shape in shapes):
        return "llmc"
    unit = "s" if any("train_time:s" in shape for shape in shapes) else "ms"
    extra = "_extra" if found.extras else ""
    return f"{unit}_train_loss{extra}" if any("train_loss:" in shape for shape in shapes) else f"{unit}{extra}"
