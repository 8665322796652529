"""Attributes a script's CPU time, wall time and bytes read to source lines inside and outside of its own clock.

Input are the samples of bench/training/line_sampler.py and the phases of clock_lines.py: the line of the main part at
which a sample was taken determines the phase, the innermost line the place.  The timed phase is compared with the time
that the script prints.  If they disagree, or the source keeps no clock, phases are determined from the times at which
the printed lines arrived.
"""

import bisect
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from bench.base.units import MIB
from bench.record import clock_lines
from bench.record.clock_lines import AFTER, BEFORE, PAUSE, TIMED, UNTIMED

MIN_S, MIN_FRAC = 0.05, 0.25  # more CPU time at a line than the baseline's is noise up to this (assumed)
MIN_BYTES = 16 * MIB
TOLERANCE_S, TOLERANCE_FRAC = 0.2, 0.01  # between the timed samples and the printed time (assumed)
MAX_UNSEEN_S = 2.0  # from the last sample to the last printed line
Frame = tuple[str, int, str]  # file, line, function
Chain = Sequence[Frame]  # the frames of a stack, innermost first
Key = tuple[str, tuple[str, int], tuple[str, int]]  # phase, line of the main part, innermost line
NOWHERE = ("", 0)


class Used(TypedDict):
    """What was used in a phase, at one line or in total."""

    phase: str
    file: str  # "" for the total of a phase
    line: int
    text: str
    inside: str  # FILE:LINE TEXT of the innermost line of the script; "" if it is this line
    wall_s: float
    cpu_s: float  # of all threads of the process except the sampler
    others_cpu_s: float  # of processes that the script started
    bytes_read: int


class Account(TypedDict):
    """What an audit of the clock has measured."""

    phases: list[Used]
    lines: list[Used]  # in order of descending CPU time
    by: str  # what determined the phases: the source, or the printed lines
    doubt: str | None  # why the source did not determine them


def account(
    samples: Iterable[str],
    file: str,
    sources: Mapping[str, str],
    stamps_ns: Sequence[tuple[int, bool]],
    train_s: float | None,
) -> Account:
    """Attributes what a script used to phases and lines.

    samples: the lines that line_sampler wrote; file: the script; sources: {file: its text}; stamps_ns: [(time at which
    a printed line arrived, whether it is that of a validation)] in order; train_s: the training time that it prints.
    Raises ValueError if the samples do not reach the end of the script.
    """
    readings, chains = _read(samples)
    if stamps_ns and stamps_ns[-1][0] - readings[-1][0] > MAX_UNSEEN_S * 1e9:
        raise ValueError("it printed lines after its last sample: it ended its sampler, or replaced its process")
    lines = clock_lines.lines_of(sources.get(file, "")) or []
    main = [line for line in lines if not line.definition]
    by_source = _phases_by_source(readings, chains, file, main)
    timed_s = sum(spent[0] for spent, phase in zip(_spent(readings), by_source) if phase == TIMED) / 1e9
    doubt = None
    if not main:
        doubt = f"{file} starts no clock that can be read in its main part"
    elif train_s is not None and abs(timed_s - train_s) > TOLERANCE_S + TOLERANCE_FRAC * train_s:
        doubt = f"the lines inside its clock took {timed_s:.2f} s, it prints {train_s:.2f} s: it prints another clock"
    phases = by_source if doubt is None else _phases_by_stamps(readings, stamps_ns)
    totals: dict[Key, list[int]] = {}
    for spent, phase, sample in zip(_spent(readings), phases, readings[1:]):
        chain = chains[sample[4]]
        place = _main_frame(chain, file, main)
        for key in ((phase, NOWHERE, NOWHERE), *([(phase, place[:2], chain[0][:2])] if place else [])):
            totals[key] = [total + added for total, added in zip(totals.get(key, [0] * 4), spent)]
    texts = {name: text.splitlines() for name, text in sources.items()}
    used = [_used(key, total, texts) for key, total in totals.items()]
    order = (BEFORE, TIMED, PAUSE, AFTER)
    return {
        "phases": sorted((usage for usage in used if not usage["file"]), key=lambda usage: order.index(usage["phase"])),
        "lines": sorted((usage for usage in used if usage["file"]), key=cpu_s, reverse=True),
        "by": "the source" if doubt is None else "the printed lines",
        "doubt": doubt,
    }


def cpu_s(used: Used) -> float:
    """CPU seconds of the process and of all processes that it started."""
    return used["cpu_s"] + used["others_cpu_s"]


def beyond(candidate: Account, baseline: Account) -> list[str]:
    """Returns a sentence for each line and phase outside the clock that uses more than in the baseline, largest first.

    Lines are matched by their text.  Differences up to MIN_S plus MIN_FRAC are noise.
    """
    own, theirs = _by_text(candidate), _by_text(baseline)
    sentences, in_lines = list[tuple[float, str]](), dict.fromkeys(UNTIMED, 0.0)
    for (phase, text, inside), (s, num_bytes, at) in own.items():
        if phase == TIMED:
            continue
        old_s, old_bytes, _ = theirs.get((phase, text, inside), (0.0, 0, at))
        more_s, more_bytes = s - old_s, num_bytes - old_bytes
        if more_s > MIN_S + MIN_FRAC * old_s or more_bytes > MIN_BYTES + MIN_FRAC * old_bytes:
            timed_s = [  # summed over innermost lines: which of them a sample hits is chance
                sum(used[0] for key, used in side.items() if key[:2] == (TIMED, text)) for side in (theirs, own)
            ]
            is_moved = more_s > MIN_S and timed_s[0] - timed_s[1] > more_s / 2
            cpu = "of CPU time" if is_moved else "more CPU time"
            when = f"moved out of the timed region (now {phase})" if is_moved else phase
            read = f" and {more_bytes / MIB:.0f} MiB read" if more_bytes > MIB else ""
            sentences.append((more_s, f"{max(0.0, more_s):.2f} s {cpu}{read} {when}: {place_of(at)}"))
            in_lines[phase] += more_s
    for phase in UNTIMED:
        all_s = [
            sum(cpu_s(used) for used in side["phases"] if used["phase"] == phase) for side in (candidate, baseline)
        ]
        more_s = all_s[0] - all_s[1] - in_lines[phase]
        if more_s > 2 * MIN_S + MIN_FRAC * all_s[1]:
            sentences.append((more_s, f"{more_s:.2f} s more CPU time {phase}, at no single line"))
    return [sentence for _, sentence in sorted(sentences, reverse=True)]


def place_of(used: Used) -> str:
    """Returns FILE:LINE with its text, and the innermost line that it calls."""
    return f"{used['file']}:{used['line']} {used['text']}" + (f" (in {used['inside']})" if used["inside"] else "")


def _by_text(account: Account) -> dict[tuple[str, str, str], tuple[float, int, Used]]:
    """Returns {(phase, text, innermost text): (CPU s, bytes read, the first such line)}, valid in any version."""
    totals: dict[tuple[str, str, str], tuple[float, int, Used]] = {}
    for used in account["lines"]:
        key = used["phase"], used["text"], used["inside"].partition(" ")[2]
        s, num_bytes, at = totals.get(key, (0.0, 0, used))
        totals[key] = s + cpu_s(used), num_bytes + used["bytes_read"], at
    return totals


def _read(samples: Iterable[str]) -> tuple[list[list[int]], list[Chain]]:
    """Returns (samples in order of time, stacks), without unfinished lines.  ValueError for fewer than two samples."""
    readings: list[list[int]] = []
    chains: list[Chain] = []
    for text in samples:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if len(line) == 1:
            chains.append([(file, number, name) for file, number, name in line[0]])
        else:
            readings.append(line)
    if len(readings) < 2:
        raise ValueError("the script was not sampled: it replaced its process, or ended before its first line")
    return sorted(readings), chains


def _spent(readings: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the differences between consecutive samples: [wall ns, CPU ns, CPU ns of child processes, bytes read]."""
    return [[max(0, new - old) for old, new in zip(a[:4], b[:4])] for a, b in zip(readings, readings[1:])]


def _main_frame(chain: Chain, file: str, main: Sequence[clock_lines.Line]) -> Frame | None:
    """Returns the frame of the script's main part; if that is not on the stack, the outermost frame, or None."""
    main_frames = [frame for frame in chain if main and frame[0] == file and frame[2] == main[0].main]
    return next(reversed(main_frames or chain), None)


def _phases_by_source(
    readings: Sequence[Sequence[int]], chains: Sequence[Chain], file: str, main: Sequence[clock_lines.Line]
) -> list[str]:
    """Returns the phases of all samples but the first: of their line in the main part, or of the sample before."""
    numbers, phases, phase = [line.number for line in main], [], BEFORE
    for sample in readings[1:]:
        frame = _main_frame(chains[sample[4]], file, main)
        if frame and main and frame[2] == main[0].main and (number := bisect.bisect(numbers, frame[1])):
            phase = main[number - 1].phase
        phases.append(phase if frame or sample is not readings[-1] else AFTER)
    return phases


def _phases_by_stamps(readings: Sequence[Sequence[int]], stamps_ns: Sequence[tuple[int, bool]]) -> list[str]:
    """Returns phases by printed lines: BEFORE the first, AFTER the last, PAUSE before a validation's, else TIMED."""
    times = [t_ns for t_ns, _ in stamps_ns]
    phases = []
    for sample in readings[1:]:
        number = bisect.bisect_left(times, sample[0])
        is_edge = number in (0, len(times))
        phases.append(
            (BEFORE if number == 0 and times else AFTER) if is_edge else PAUSE if stamps_ns[number][1] else TIMED
        )
    return phases


def _used(key: Key, total: Sequence[int], texts: Mapping[str, Sequence[str]]) -> Used:
    phase, (file, line), inner = key
    inside = "" if inner == (file, line) else f"{inner[0]}:{inner[1]} {_text(texts, *inner)}"
    return {
        "phase": phase,
        "file": file,
        "line": line,
        "text": _text(texts, file, line),
        "inside": inside,
        "wall_s": total[0] / 1e9,
        "cpu_s": total[1] / 1e9,
        "others_cpu_s": total[2] / 1e9,
        "bytes_read": total[3],
    }


def _text(texts: Mapping[str, Sequence[str]], file: str, line: int) -> str:
    lines = texts.get(file, ())
    return lines[line - 1].partition("  #")[0].strip() if 0 < line <= len(lines) else ""
