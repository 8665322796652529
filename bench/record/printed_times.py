"""Compares the training time that a script prints with the times at which its lines arrived, from rows of steps.csv.

Row k has the time that the script printed at step k (train_time_ms; train_time_at_val_ms if its validation printed
another one) and when that line arrived (line_t_ns, val_line_t_ns: time.perf_counter_ns of another process).

Between the lines of two steps an honest script counts all the time that passes.  Before the line of a validation it
need not, because its clock is paused during the validation (not nanoGPT's: its next iteration includes the
validation).  So uncounted time may only be there, and a script can never count more time than has passed.

A line may arrive late, because its reader or the script waited for a core, but never early.  So a single line proves
nothing: what counts is the smaller value of two neighbouring lines.  What only the last line before a validation shows
is attributed to that validation, where bench/compare/effects.py compares it with the other arm.
"""

import bisect
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypedDict, cast

from bench.base.text_table import counted
from bench.record import outside_clock
from bench.record.step_files import StepRow

MAX_UNTIMED_STEPS, RESTART_MS = 10, 1.0
MIN_UNTIMED_STEPS, MAX_UNTIMED_TIMES = 5, 2.0  # with fewer untimed steps, all may be compiling (assumed)
MAX_WAITED_FRAC = 1 / 3  # a busy machine excuses up to this fraction of the counted time; 0.19 was measured at load 15
UNNAMED_STEPS = 2  # steps without a printed time are allowed after the last time, and where the clock is restarted
FAST_FRAC = 0.1  # so many of the later steps may be faster than the first ones, which no clock saw, need have been
UNSEEN_FRAC = 0.1  # this fraction of the counted time may pass uncounted before a validation whose steps have no lines


class Account(TypedDict):
    """How much time passed between the first and the last line of a script, and how much of it the script counted."""

    wall_of_lines_s: float
    counted_s: float
    uncounted_s: float
    uncounted_at_validations_s: float  # the part of uncounted_s before the lines of validations
    unseen_s: float  # the part of that in which steps had no lines, so that it may be training
    overcounted_s: float  # the longest time that was counted in a row without having passed


class Line(NamedTuple):
    """A printed line that contains a training time."""

    t_ns: int  # when it arrived
    step: int
    is_val: bool
    time_ms: float  # as printed


def events(rows: Sequence[StepRow]) -> list[Line]:
    """Returns every line that contains a time, in the order of arrival."""
    lines = []
    holders = {row["step"] for row in rows if row.get("flags") == "validation"}  # steps whose time includes validation
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
    """Returns the step, one of the first ten, at which the script restarted its clock: earlier steps are untimed.

    modded-nanogpt restarted its clock until 2025.  Returns 0 if the script did not, or more than once.
    """
    back = [b for a, b in pairwise(events(rows)) if b.time_ms < a.time_ms]
    return back[0].step if len(back) == 1 and back[0].step <= MAX_UNTIMED_STEPS and back[0].time_ms <= RESTART_MS else 0


def drop_backward(rows: Sequence[StepRow], num_untimed_steps: int = 0) -> list[str]:
    """Removes times that go back, and step times derived from them, from rows.  Returns [a sentence about it] or []."""
    latest_ms, latest_step, dropped = 0.0, 0, dict[int, str]()
    for row in rows:
        for name in ("train_time_ms", "train_time_at_val_ms"):
            if (time_ms := row.get(name)) is None:
                continue
            steps_ms = latest_ms / max(latest_step, 1) * (row["step"] - latest_step + 1)  # at most, since a restart
            is_restart = latest_step <= MAX_UNTIMED_STEPS and time_ms <= max(steps_ms, RESTART_MS)
            if time_ms >= latest_ms or (num_untimed_steps and is_restart):
                latest_ms, latest_step = time_ms, row["step"]
            else:
                dropped.setdefault(row["step"], f"from {latest_ms:g} to {time_ms:g} ms at step {row['step']}")
                row[name] = None
        if {row["step"], row["step"] - 1} & dropped.keys():
            row["step_ms"] = None
    if not dropped:
        return []
    where = f"{next(iter(dropped.values()))} ({counted(len(dropped), 'step')})"
    return [f"the time that it prints goes back {where}: it counts nowhere"]


class PrintedTimes:
    """The lines of a script that contain a time, from the first one after its untimed steps on."""

    def __init__(self, rows: Sequence[StepRow], num_untimed_steps: int = 0):
        every = events(rows)
        self._rows, self._num_untimed_steps = rows, num_untimed_steps
        self._num_validations = sum(line.is_val for line in every)
        self._with_restart = [line for line in every if line.step >= num_untimed_steps]
        restarts = [number for number, pair in enumerate(pairwise(self._with_restart), 1) if self._is_restart(*pair)]
        self._lines = self._with_restart[restarts[-1] if restarts else 0 :]
        start = self._lines[0] if self._lines else None
        self._uncounted_s = [  # uncounted time up to each line
            (line.t_ns - start.t_ns) / 1e9 - (line.time_ms - start.time_ms) / 1e3 for line in self._lines if start
        ]

    def _is_restart(self, a: Line, b: Line) -> bool:
        """Whether the script restarted its clock between two lines, after one of its untimed steps."""
        return self._num_untimed_steps > 0 and b.time_ms < a.time_ms and a.step <= MAX_UNTIMED_STEPS

    def account(self) -> Account | dict[str, None]:
        """Returns the Account of the lines, with None for every value if fewer than two lines contain a time."""
        return self._account() if len(self._lines) > 1 else dict.fromkeys(Account.__annotations__)

    def _account(self) -> Account:
        facts = cast(Account, dict.fromkeys(Account.__annotations__, 0.0))
        most_s = 0.0
        for a, b in pairwise(self._lines):  # the order of additions matters: a record's doubts are compared as text
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
        self,
        late_ns: Mapping[int, int],
        gaps_ns: Iterable[tuple[int, int]] = (),
        validation_at_start_s: float | None = None,
        is_wall: bool = False,
        waits_ns: Iterable[tuple[int, int]] = (),
    ) -> outside_clock.Clock:
        """Returns the launcher's clock of the script.

        late_ns: {t_ns of a line: by how much it may be late}; gaps_ns: [(begin, end)] of times at which the reader was
        not scheduled; validation_at_start_s: as in Clock; is_wall: the script prints no time, so that the times of its
        lines are used; waits_ns: [(t_ns, how long the rank that waited most had waited for a core until then)].
        """
        lines = self._lines
        if len(lines) < 2:
            return outside_clock.unknown("lines", "fewer than two lines name a time")
        stamps = [(line.t_ns, late_ns.get(line.t_ns, 0)) for line in lines]
        facts = self._account()
        at_validations_s = 0.0 if is_wall else max(0.0, facts["uncounted_at_validations_s"])
        validations_s, claimed_s = [] if is_wall else self._portions_s()[1], facts["counted_s"]
        times = outside_clock.clock_from_times(
            stamps, gaps_ns, at_validations_s, validations_s, validation_at_start_s, claimed_s, source="lines"
        )
        waited_ns = [(t_ns, waited) for t_ns, waited in waits_ns if t_ns <= lines[-1].t_ns]
        before_ns = max((waited for t_ns, waited in waited_ns if t_ns <= lines[0].t_ns), default=0)
        # the largest so far, because it falls when the process ends that waited most
        most_ns = max((waited for _, waited in waited_ns), default=None)
        times["ranks_waited_s"] = None if most_ns is None else (most_ns - before_ns) / 1e9
        return times

    def _portions_s(self) -> tuple[float, list[float]]:
        """Returns the uncounted seconds between steps, and a list of those at each validation.

        The former are what two neighbouring lines agree on; the rest is attributed to the following validation.
        """
        between_s, at_validations_s, first = 0.0, [], 0
        edges = [number for number, line in enumerate(self._lines) if number and line.is_val]
        for edge in [*edges, len(self._lines)]:
            sure_s = self._uncounted_s[first]
            if edge - 1 > first:
                sure_s = min(self._uncounted_s[edge - 2 : edge])
            between_s += sure_s - self._uncounted_s[first]
            if edge < len(self._lines):
                at_validations_s.append(self._uncounted_s[edge] - sure_s)
            first = edge
        return between_s, at_validations_s

    def doubts(self, outside: outside_clock.Clock) -> tuple[list[str], list[str]]:
        """Returns sentences that say why the printed times cannot be true, and how the machine disturbed them.

        outside: the launcher's clock in the record.
        """
        if len(self._lines) < 2:
            return ["fewer than two lines name a time: what the script counted cannot be checked"], []
        sentences, disturbances, facts = list[str](), list[str](), self._account()
        counted_s, unseen_s = facts["counted_s"], facts["unseen_s"]
        limit_s = outside_clock.tolerance_s(counted_s, self._num_validations, outside["reader_late_s"])
        between_s, _ = self._portions_s()
        # overcounted time: how far the uncounted time falls below what two neighbouring lines agreed on before
        agreed_s = accumulate((min(pair) for pair in pairwise(self._uncounted_s)), max)
        over_s = max([0.0, *(most_s - later_s for most_s, later_s in zip(agreed_s, self._uncounted_s[2:]))])
        # time that may pass uncounted between steps because the machine ran something else
        waited_s = min(outside.get("ranks_waited_s") or 0.0, MAX_WAITED_FRAC * abs(counted_s))
        seen = f"its lines came in {facts['wall_of_lines_s']:.2f} s and count {counted_s:.2f} s"
        if over_s > limit_s:
            over = f" ({over_s:.2f} s too much in a row, tolerance {limit_s:.2f} s)"
            sentences.append(f"it counts more time than passed: {seen}; they were not printed as it trained{over}")
        elif between_s > limit_s + waited_s:
            passed = f"{between_s:.2f} s passed between steps, where no validation is, uncounted"
            sentences.append(f"it claims less time than its lines took: {seen}; {passed} (tolerance {limit_s:.2f} s)")
        if limit_s < between_s <= limit_s + waited_s and not outside["unknown"]:
            waited = f"the script waited {waited_s:.2f} s for a CPU core"
            passed = f"{between_s:.2f} s passed uncounted between steps"
            disturbances.append(f"{passed} (tolerance {limit_s:.2f} s), and {waited}")
        if unseen_s > limit_s + UNSEEN_FRAC * abs(counted_s):
            passed = f"{unseen_s:.2f} s passed uncounted between lines that are several steps apart"
            sentences.append(f"{passed}: whether it validated or trained is not to be seen")
        step_s = abs(counted_s) / max(1, self._lines[-1].step - self._lines[0].step)
        unseen_s, most_s = self._unseen_before_s(), limit_s + UNNAMED_STEPS * step_s
        if unseen_s > most_s and self._unseen_before_s(FAST_FRAC) > most_s:
            first = self._lines[0]
            named = f"its first line is of step {first.step} and names {first.time_ms / 1e3:.2f} s"
            sentences.append(f"{named}, {unseen_s:.2f} s less than as many of the next steps take: print step 0 too")
        unnamed = [portion for portion in self._unnamed_s() if portion[0] > most_s]
        sentences += [f"{passed_s:.2f} s passed uncounted {where}" for passed_s, where in unnamed]
        sentences += self._untimed()
        for a, b in pairwise(self._with_restart):
            if b.step < a.step or (b.time_ms < a.time_ms and not self._is_restart(a, b)):
                sentences.append(f"its lines are out of order: at step {b.step} the step or the time goes back")
                break
        return sentences, disturbances

    def _unseen_before_s(self, later_frac: float | None = None) -> float:
        """Returns by how much the steps before the first line, which no clock saw, count less than as many after it.

        later_frac: compare with as many steps anywhere later, of which only this fraction took less; None: with those
        that follow at once, of which a busy machine may have stopped one.
        """
        first, lines = self._lines[0], self._lines
        num_steps = first.step - self._num_untimed_steps
        if lines != self._with_restart or num_steps < 1 or lines[-1].step == first.step:
            return 0.0  # at a restart _unnamed_s() tells
        steps, taken_ms = [line.step for line in lines], list[float]()
        for begin in lines if later_frac is not None else lines[:1]:
            end = lines[min(bisect.bisect_left(steps, begin.step + num_steps), len(lines) - 1)]
            if end.step >= begin.step + num_steps or not taken_ms:
                taken_ms.append(num_steps * (end.time_ms - begin.time_ms) / (end.step - begin.step))
        return (sorted(taken_ms)[int((later_frac or 0.0) * len(taken_ms))] - first.time_ms) / 1e3

    def _unnamed_s(self) -> Iterator[tuple[float, str]]:
        """Yields (seconds without a printed time, where): at the restart of the clock, and after the last time."""
        for a, b in pairwise(self._with_restart):
            if self._is_restart(a, b):
                yield (b.t_ns - a.t_ns) / 1e9 - b.time_ms / 1e3, f"as it set its clock back, after step {a.step}"
        last = self._lines[-1]
        later = [row for row in self._rows if row["step"] > last.step]
        stamps_ns = [row.get(name) for row in later for name in ("line_t_ns", "val_line_t_ns")]
        end_ns = max((t_ns for t_ns in stamps_ns if t_ns is not None), default=last.t_ns)
        yield (end_ns - last.t_ns) / 1e9, f"after step {last.step}, the last whose time it names"

    def _untimed(self) -> Iterator[str]:
        """Yields a sentence if the untimed steps do more work than the timed ones.

        They are untimed because the first of them compile, which does not affect their median.
        """
        walls_ms = [(row["step"], row["wall_ms"]) for row in self._rows if row.get("wall_ms") is not None]
        before_ms = [ms for step, ms in walls_ms if 0 < step <= self._num_untimed_steps]
        after_ms = [ms for step, ms in walls_ms if step > self._num_untimed_steps]
        if len(before_ms) < MIN_UNTIMED_STEPS or not after_ms:
            return
        first_ms, usual_ms = statistics.median(before_ms), statistics.median(after_ms)
        if first_ms > MAX_UNTIMED_TIMES * usual_ms + 1e3 * outside_clock.TOLERANCE_S:
            both = f"{first_ms:.0f} ms, that of the steps that it counts {usual_ms:.0f} ms"
            yield f"the median of the first {self._num_untimed_steps} steps, which its clock excludes, is {both}"
