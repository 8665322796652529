"""What a script says its training took, against when its lines came: pure, from the rows of its steps.csv.

Row k has the time that the script printed at step k (train_time_ms; train_time_at_val_ms where its validation printed
another one) and when that line came (line_t_ns, val_line_t_ns; time.perf_counter_ns of another process).

Between two lines of steps a script that is honest counts what passed.  Before a validation's line it need not: its
clock stands still while it validates (nanoGPT's does not: its next iteration holds the validation).  So time that no
line counts may lie only there; and a script can never count more time than has passed.

A line may come late and never early, be it that its reader or the script itself waited for a core.  So what one line
says alone is no reproach: the later one of two neighbours that say the same is.  What the last line before a validation
says alone counts as part of that validation, and there bench/compare/effects.py holds it against the other arm.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypedDict, cast

from bench.base.text_table import counted
from bench.record import outside_clock
from bench.record.step_files import StepRow

MAX_UNTIMED_STEPS, RESTART_MS = 10, 1.0
MIN_UNTIMED_STEPS, MAX_UNTIMED_TIMES = 5, 2.0  # fewer may all compile (assumed)
MAX_WAITED_FRAC = 1 / 3  # of the counted time: how much of it a busy machine may excuse; up to 0.19 was seen at load 15
UNNAMED_STEPS = 2  # whose time a script need not name: after its last line with one, or as it sets its clock back
UNSEEN_FRAC = 0.1  # of the counted time: what may pass uncounted before a validation whose steps have no lines


class Account(TypedDict):
    """What passed between the lines of a script, and what it counted of that."""

    wall_of_lines_s: float
    counted_s: float
    uncounted_s: float  # passed and was not counted
    uncounted_at_validations_s: float  # of it before a validation's line
    unseen_s: float  # of that, where steps passed since the line before, so that it may be training
    overcounted_s: float  # the most that was counted in a row and had not passed; of single lines nothing adds up


class Line(NamedTuple):
    """A line with a time."""

    t_ns: int
    step: int
    is_val: bool
    time_ms: float  # as it says


def events(rows: Sequence[StepRow]) -> list[Line]:
    """Every line with a time, in the order of coming."""
    lines = []
    holders = {row["step"] for row in rows if row.get("flags") == "validation"}  # whose own time holds the validation
    for row in rows:
        time_ms = row.get("train_time_ms")
        if row.get("line_t_ns") is not None and time_ms is not None:
            lines.append(Line(row["line_t_ns"], row["step"], False, time_ms))
        at_val_ms = row.get("train_time_at_val_ms")
        at_val_ms = time_ms if at_val_ms is None else at_val_ms
        at_val_ms = 0.0 if at_val_ms is None and not row["step"] else at_val_ms
        if row.get("val_line_t_ns") is not None and at_val_ms is not None and row["step"] + 1 not in holders:
            lines.append(Line(row["val_line_t_ns"], row["step"], True, at_val_ms))
    return sorted(lines)


def restarted_at(rows: Sequence[StepRow]) -> int:
    """The step, of the first ten, at which the clock was set back to its beginning once: those before are in no time.

    As modded-nanogpt did until 2025.  0: it was not.
    """
    back = [b for a, b in pairwise(events(rows)) if b.time_ms < a.time_ms]
    return back[0].step if len(back) == 1 and back[0].step <= MAX_UNTIMED_STEPS and back[0].time_ms <= RESTART_MS else 0


def drop_backward(rows: Sequence[StepRow], num_untimed_steps: int = 0) -> list[str]:
    """Takes times that go back out of the rows, with the steps' times that rest on them -> a sentence about them."""
    latest_ms, latest_step, dropped = 0.0, 0, dict[int, str]()
    for row in rows:
        for name in ("train_time_ms", "train_time_at_val_ms"):
            if (time_ms := row.get(name)) is None:
                continue
            if time_ms >= latest_ms or (num_untimed_steps and latest_step <= MAX_UNTIMED_STEPS):
                latest_ms, latest_step = time_ms, row["step"]
            else:
                dropped.setdefault(row["step"], f"from {latest_ms:g} to {time_ms:g} ms at step {row['step']}")
                row[name] = None
        if {row["step"], row["step"] - 1} & dropped.keys():
            row["step_ms"] = None
    where = next(iter(dropped.values()), None)
    return [f"the time that it prints goes back {where} ({counted(len(dropped), 'step')}): it counts nowhere"] * bool(
        where
    )


def timed(rows: Sequence[StepRow], num_untimed_steps: int = 0) -> list[Line]:
    """The lines after the untimed steps."""
    lines = [line for line in events(rows) if line.step >= num_untimed_steps]
    starts = [number for number, (a, b) in enumerate(pairwise(lines), 1) if _set_back(a, b)]
    return lines[starts[-1] :] if starts and num_untimed_steps else lines


def _set_back(a: Line, b: Line) -> bool:
    """Whether the clock went back between two lines, the first of which is of a step that may be untimed."""
    return b.time_ms < a.time_ms and a.step <= MAX_UNTIMED_STEPS


def _unnamed_s(rows: Sequence[StepRow], lines: Sequence[Line], num_untimed_steps: int) -> Iterator[tuple[float, str]]:
    """(seconds that no time of the script covers, where): as it set its clock back, and after its last time."""
    for a, b in pairwise(line for line in events(rows) if line.step >= num_untimed_steps):
        if num_untimed_steps and _set_back(a, b):
            yield (b.t_ns - a.t_ns) / 1e9 - b.time_ms / 1e3, f"as it set its clock back, after step {a.step}"
    last = lines[-1]
    later = [row for row in rows if row["step"] > last.step]
    stamps_ns = [t_ns for row in later for t_ns in (row.get("line_t_ns"), row.get("val_line_t_ns")) if t_ns is not None]
    yield (max(stamps_ns, default=last.t_ns) - last.t_ns) / 1e9, f"after step {last.step}, the last whose time it names"


def account(rows: Sequence[StepRow], num_untimed_steps: int = 0) -> Account | dict[str, None]:
    """From the first line after the untimed steps to the last; all None without two times."""
    lines = timed(rows, num_untimed_steps)
    return dict.fromkeys(Account.__annotations__) if len(lines) < 2 else _account(lines)


def _account(lines: Sequence[Line]) -> Account:
    facts = cast(Account, dict.fromkeys(Account.__annotations__, 0.0))
    most_s = 0.0
    for a, b in pairwise(lines):
        wall_s, counted_s = (b.t_ns - a.t_ns) / 1e9, (b.time_ms - a.time_ms) / 1e3
        facts["wall_of_lines_s"] += wall_s
        facts["counted_s"] += counted_s
        facts["uncounted_s"] += wall_s - counted_s
        if b.is_val:
            facts["uncounted_at_validations_s"] += wall_s - counted_s
            facts["unseen_s"] += wall_s - counted_s if b.step > a.step + 1 else 0.0
        most_s = max(most_s, facts["uncounted_s"])
        facts["overcounted_s"] = max(facts["overcounted_s"], most_s - facts["uncounted_s"])
    return facts


def clock(
    rows: Sequence[StepRow],
    num_untimed_steps: int,
    late_ns: Mapping[int, int],
    gaps_ns: Iterable[tuple[int, int]] = (),
    validation_at_start_s: float | None = None,
    is_wall: bool = False,
    waits_ns: Iterable[tuple[int, int]] = (),
) -> outside_clock.Clock:
    """What the launcher's clock says of these lines.

    late_ns: {a line's t_ns: by how much it may be late}; gaps_ns: of the reader; validation_at_start_s: as in Clock;
    is_wall: the script prints no time, that of its lines is taken; waits_ns: [(t_ns, for how long the rank that waited
    most had then waited for a core since it began)].
    """
    lines = timed(rows, num_untimed_steps)
    if len(lines) < 2:
        return outside_clock.unknown("lines", "fewer than two lines name a time")
    found = _account(lines)
    stamps = [(line.t_ns, late_ns.get(line.t_ns, 0)) for line in lines]
    at_validations_s = 0.0 if is_wall else max(0.0, found["uncounted_at_validations_s"])
    each_s = [] if is_wall else _portions(lines)[1]
    times = outside_clock.clock_from_times(
        stamps, gaps_ns, at_validations_s, each_s, validation_at_start_s, found["counted_s"], source="lines"
    )
    waited_ns = [(t_ns, waited) for t_ns, waited in waits_ns if t_ns <= lines[-1].t_ns]
    before_ns = max((waited for t_ns, waited in waited_ns if t_ns <= lines[0].t_ns), default=0)
    times["ranks_waited_s"] = (waited_ns[-1][1] - before_ns) / 1e9 if waited_ns else None
    return times


def _portions(lines: Sequence[Line]) -> tuple[float, list[float]]:
    """(seconds that passed uncounted between steps, [seconds uncounted at each validation]).

    The former as far as two neighbouring lines agree on it; the rest is the following validation's.
    """
    uncounted_s = [(line.t_ns - lines[0].t_ns) / 1e9 - (line.time_ms - lines[0].time_ms) / 1e3 for line in lines]
    between_s, at_validations_s, first = 0.0, [], 0
    for number in range(1, len(lines) + 1):
        if number < len(lines) and not lines[number].is_val:
            continue
        last = number - 1  # of the steps from first on
        sure_s = uncounted_s[first]
        if last > first:
            sure_s = min(uncounted_s[last - 1 : last + 1])
        between_s += sure_s - uncounted_s[first]
        if number < len(lines):
            at_validations_s.append(uncounted_s[number] - sure_s)
        first = number
    return between_s, at_validations_s


def _overcounted_s(lines: Sequence[Line]) -> float:
    """The most that was counted and had not passed since two neighbouring lines said so."""
    uncounted_s = [(line.t_ns - lines[0].t_ns) / 1e9 - (line.time_ms - lines[0].time_ms) / 1e3 for line in lines]
    most_s, overcounted_s = -float("inf"), 0.0
    for number in range(2, len(lines)):
        most_s = max(most_s, min(uncounted_s[number - 2 : number]))
        overcounted_s = max(overcounted_s, most_s - uncounted_s[number])
    return overcounted_s


def _untimed(rows: Sequence[StepRow], num_untimed_steps: int) -> Iterator[str]:
    """A sentence where the steps that its clock leaves out hold more work than those that it counts.

    They are left out because the first ones compile: their median is that of steps which do not.
    """
    walls_ms = [(row["step"], row["wall_ms"]) for row in rows if row.get("wall_ms") is not None]
    before_ms, after_ms = (
        [ms for step, ms in walls_ms if (step > num_untimed_steps) == is_timed and step] for is_timed in (False, True)
    )
    if len(before_ms) < MIN_UNTIMED_STEPS or not after_ms:
        return
    first_ms, usual_ms = statistics.median(before_ms), statistics.median(after_ms)
    if first_ms > MAX_UNTIMED_TIMES * usual_ms + 1e3 * outside_clock.TOLERANCE_S:
        both = f"{first_ms:.0f} ms, that of the steps that it counts {usual_ms:.0f} ms"
        yield f"the median of the first {num_untimed_steps} steps, which its clock excludes, is {both}"


def _waited_s(outside: outside_clock.Clock, counted_s: float) -> float:
    """What may pass uncounted between steps because the machine ran something else meanwhile."""
    return min(outside.get("ranks_waited_s") or 0.0, MAX_WAITED_FRAC * abs(counted_s))


def disturbances(rows: Sequence[StepRow], num_untimed_steps: int, outside: outside_clock.Clock) -> list[str]:
    """Sentences about the machine: time passed uncounted between steps, and the script waited as long for a core."""
    lines = timed(rows, num_untimed_steps)
    if len(lines) < 2 or outside["unknown"]:
        return []
    counted_s, num_vals = _account(lines)["counted_s"], sum(line.is_val for line in events(rows))
    limit_s = outside_clock.tolerance_s(counted_s, num_vals, outside["reader_late_s"])
    between_s, waited_s = _portions(lines)[0], _waited_s(outside, counted_s)
    if not limit_s < between_s <= limit_s + waited_s:
        return []
    waited = f"the script waited {waited_s:.2f} s for a CPU core"
    return [f"{between_s:.2f} s passed uncounted between steps (tolerance {limit_s:.2f} s), and {waited}"]


def doubts(rows: Sequence[StepRow], num_untimed_steps: int, outside: outside_clock.Clock) -> list[str]:
    """Sentences: why the printed times cannot be what training took; [] where they can.  outside: the record's."""
    lines = timed(rows, num_untimed_steps)
    if len(lines) < 2:
        return ["fewer than two lines name a time: what the script counted cannot be checked"]
    found, sentences = _account(lines), []
    wall_s, counted_s = found["wall_of_lines_s"], found["counted_s"]
    num_vals = sum(line.is_val for line in events(rows))
    limit_s = outside_clock.tolerance_s(counted_s, num_vals, outside["reader_late_s"])
    between_s, over_s = _portions(lines)[0], _overcounted_s(lines)
    seen = f"its lines came in {wall_s:.2f} s and count {counted_s:.2f} s"
    if over_s > limit_s:
        over = f" ({over_s:.2f} s too much in a row, tolerance {limit_s:.2f} s)"
        sentences.append(f"it counts more time than passed: {seen}; they were not printed as it trained{over}")
    elif between_s > limit_s + _waited_s(outside, counted_s):
        passed = (
            f"{between_s:.2f} s passed between steps, where no validation is, uncounted (tolerance {limit_s:.2f} s)"
        )
        sentences.append(f"it claims less time than its lines took: {seen}; {passed}")
    if found["unseen_s"] > limit_s + UNSEEN_FRAC * abs(counted_s):
        passed = f"{found['unseen_s']:.2f} s passed uncounted between lines that are several steps apart"
        sentences.append(f"{passed}: whether it validated or trained is not to be seen")
    step_s = abs(counted_s) / max(1, lines[-1].step - lines[0].step)
    for passed_s, where in _unnamed_s(rows, lines, num_untimed_steps):
        if passed_s > limit_s + UNNAMED_STEPS * step_s:
            sentences.append(f"{passed_s:.2f} s passed uncounted {where}")
    sentences += _untimed(rows, num_untimed_steps)
    all_lines = [line for line in events(rows) if line.step >= num_untimed_steps]
    back = [
        b
        for a, b in pairwise(all_lines)
        if b.step < a.step or (b.time_ms < a.time_ms and not (num_untimed_steps and _set_back(a, b)))
    ]
    if back:
        sentences.append(f"its lines are out of order: at step {back[0].step} the step or the time goes back")
    return sentences
