"""Compares interleaved runs within blocks, so that drift of the machine cancels.

A round is one run of each arm, back to back; two rounds are a block.  The log of a measure is fitted with a constant
for each block, a linear trend over the slots (runs in the order of their starts) and the difference between the arms.
What a block has in common and a steady drift then cancel.  Residuals beyond HUBER_SDS robust standard deviations are
clipped (Huber 1973), so that one outlying run in ten neither hides nor creates a difference.

If a plan has several compilations per arm, the runs of a compilation share an error (from an autotuned kernel or a
memory layout), so the sample consists of the mean differences of the compilations.

A sequential plan (an interim analysis after every round) is judged by an e-process: the Bayes factor for a normal prior
on the difference in units of the runs' standard deviation, with the right Haar prior on the nuisance parameters.  If
there is no difference, it is a nonnegative martingale (Perez-Ortiz, Lardy, de Heide and Gruenwald 2024), so it reaches
1 / alpha in at most a share alpha of all races, whenever the analyses take place (Ville 1939).
"""

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.base import stats
from bench.compare.eligibility import identity, is_timed
from bench.record.rows import Row

MIN_ROUNDS = 4  # fewer leave too few degrees of freedom; Welch's test is used instead
ROUNDS_OF_BLOCK = 2
HUBER_SDS = 2.0  # clips 5 % of normal residuals, which costs about 2 % of the precision (simulated)
MAX_ITERATIONS = 5000  # 30 usually suffice; with 50, 1 estimate in 70 was off by up to half a run's standard deviation
PRIOR_SDS = 4.0  # sd of the e-process's prior in sds of a run: 0.8 % if repeats differ by 0.2 %
MAX_EXACT_ROUNDS = 12  # up to here all sign patterns are tried, at most 4,096
NUM_PATTERNS = 10_000  # random sign patterns if there are more rounds


@dataclass(frozen=True)
class Design:
    """The position of each run in its race."""

    slots: Mapping[str, int]  # {identity() of a row: position among the runs of both arms}; two slots are a round
    compilations: Sequence[int]  # number of the compilation that each round used; () if each arm has only one
    is_sequential: bool  # whether the plan has an interim analysis after every round


class Fit(NamedTuple):
    """The difference between the arms' mean logs, and what tests of it need."""

    test: stats.Welch
    middle: float  # midpoint of the logs: the adjusted means of A and B are middle -+ difference / 2
    num_rounds: int | None = None  # complete rounds, compared within blocks; None for Welch's test without blocks
    num_clipped: int = 0  # runs whose residuals were clipped
    unclipped: float = math.nan  # the difference by least squares; nan without blocks
    p_flips: float | None = None  # p of the sign-flip test; None if too few rounds allow no p below alpha
    log_e: float | None = None  # log e-value against no difference; None without blocks
    shrinkage: float = math.inf  # 1 + (variance of the prior) / (variance of the estimate)
    is_sequential: bool = False

    def p_equivalent(self, low: float, high: float) -> float | None:
        """Returns the p of two one-sided tests that the difference is within (low, high); None without a test."""
        test = self.test
        if not self.is_sequential or test.se is None or test.df is None:
            return stats.equivalence_p(test, low, high)
        if not low < test.difference < high:
            return 1.0
        edges = [(test.difference - edge) / test.se for edge in (low, high)]
        return max(min(1.0, math.exp(-log_e_value(t, test.df, self.shrinkage))) for t in edges)

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        """Returns the confidence interval (low, high) of the difference, or None without a test.

        For a sequential plan it holds at all interim analyses together, and is (-inf, inf) if there are too few rounds.
        """
        test = self.test
        if not self.is_sequential or test.se is None or test.df is None:
            return stats.interval(test, confidence)
        half_width = _e_quantile(1 - confidence, test.df, self.shrinkage) * test.se
        return test.difference - half_width, test.difference + half_width

    def smallest_difference(self, alpha: float) -> float | None:
        """Returns the difference that the test detects with a power of 80 % (MDE), or None without a test."""
        test = self.test
        if test.se is None or test.df is None:
            return None
        if not self.is_sequential:
            return stats.detectable(test.se, test.df, alpha)
        difference = _e_quantile(alpha, test.df, self.shrinkage) * test.se + self.spare(stats.WANTED_POWER)
        return difference if math.isfinite(difference) else None

    def interval_pct(self, confidence: float = 0.95) -> list[float] | None:
        """Returns the interval() of logs as changes in %, or None without a test or if it is unbounded."""
        edges = self.interval(confidence)
        return [100 * math.expm1(edge) for edge in edges] if edges and math.isfinite(edges[1]) else None

    def detectable_pct(self, alpha: float, floor_pct: float = 0.0) -> float | None:
        """Returns the change in % that exceeds the floor with p < alpha in 80 of 100 races, or None without a test."""
        detectable = self.smallest_difference(alpha)
        if detectable is None:
            return None
        beyond_floor = math.log1p(floor_pct / 100) + self.spare(stats.WANTED_POWER) if floor_pct else 0.0
        return 100 * math.expm1(max(detectable, beyond_floor))

    def spare(self, power: float) -> float:
        """Returns by how much a true difference must exceed a threshold for estimates to exceed it with this power."""
        test = self.test
        return 0.0 if test.se is None or test.df is None else stats.student_t_quantile(power, test.df) * test.se


def geometric_means(values: Sequence[Sequence[float]], fitted: Fit | None) -> list[float | None]:
    """Returns the geometric means of both arms; with a fit, they are adjusted so that their ratio is its change."""
    if fitted is None:
        return [math.exp(stats.mean(map(math.log, numbers))) if numbers else None for numbers in values]
    half = fitted.test.difference / 2
    return [math.exp(fitted.middle - half), math.exp(fitted.middle + half)]


def rounds(a_rows: Sequence[Row], b_rows: Sequence[Row]) -> list[tuple[Row, Row]] | None:
    """Pairs the started runs of A and B into rounds, in order, or returns None if they do not form rounds.

    They do if both arms have the same number of runs, each consecutive pair has one run of each arm, and each arm comes
    first about equally often (A B, A B, A B would confound drift with a difference).  Logs of another harness never
    form rounds, because nothing shows that they were planned.
    """
    both = [*a_rows, *b_rows]
    if len(a_rows) != len(b_rows) or any(row["started_at"] is None or row["provenance"] == "imported" for row in both):
        return None
    starts = sorted(
        (row["started_at"] or "", arm, index)
        for arm, rows in enumerate((a_rows, b_rows))
        for index, row in enumerate(rows)
    )
    pairs = list(zip(starts[::2], starts[1::2], strict=True))
    num_a_first = sum(first[1] == 0 for first, _ in pairs)
    is_balanced = abs(2 * num_a_first - len(pairs)) <= max(1, len(pairs) / 3)
    if not is_balanced or any(first[1] == second[1] for first, second in pairs):
        return None
    by_arm = [sorted(pair, key=lambda start: start[1]) for pair in pairs]
    return [(a_rows[a[2]], b_rows[b[2]]) for a, b in by_arm]


def from_rows(a_rows: Sequence[Row], b_rows: Sequence[Row], plan: Mapping[str, Any] | None = None) -> Design | None:
    """Returns the design of the started runs and their race's plan, or None if Welch's test is to compare them.

    A run outside the rounds that has no time, because it failed or is invalid, is ignored.
    """
    planned = plan or {}
    pairs = rounds(a_rows, b_rows) or rounds(*([row for row in rows if is_timed(row)] for rows in (a_rows, b_rows)))
    if not pairs:
        return None
    slots: dict[str, int] = {}
    for number, pair in enumerate(pairs):
        in_time = sorted(pair, key=lambda row: row["started_at"] or "")
        slots |= {identity(row): 2 * number + position for position, row in enumerate(in_time)}
    num_compilations, num_planned = planned.get("compilations") or 1, planned.get("n") or len(pairs)
    compilations = [number * num_compilations // num_planned for number in range(len(pairs))]
    return Design(slots, compilations if num_compilations > 1 else (), bool(planned.get("sequential")))


def fit(
    values: Sequence[Sequence[float]], keys: Sequence[Sequence[str]], design: Design | None, alpha: float
) -> Fit | None:
    """Fits the difference between logs (or losses) of A's and B's runs, whose rows have the identities keys.

    Returns None if an arm has no value.  A sequential plan has no test before MIN_ROUNDS are complete.
    """
    if not all(values):
        return None
    welch = stats.welch(*values)
    plain = Fit(welch, (stats.mean(values[0]) + stats.mean(values[1])) / 2)
    if design is None or welch.t is None or any(key not in design.slots for arm_keys in keys for key in arm_keys):
        return plain
    if design.is_sequential:  # Welch's p does not hold at every interim analysis
        plain = plain._replace(test=stats.Welch(welch.difference, None, None, None, None))
    slots = [[design.slots[key] for key in arm_keys] for arm_keys in keys]
    complete = sorted({slot // 2 for slot in slots[0]} & {slot // 2 for slot in slots[1]})
    if len(complete) < MIN_ROUNDS:
        return plain
    least_squares = _fit_blocks(values, slots, math.inf)
    blocked = least_squares if design.is_sequential or least_squares is None else _fit_blocks(values, slots, HUBER_SDS)
    if least_squares is None or blocked is None:
        return plain
    by_slot = blocked.cleaned
    sides = [dict(zip((slot // 2 for slot in arm_slots), arm_slots, strict=True)) for arm_slots in slots]
    differences = [by_slot[sides[1][number]] - by_slot[sides[0][number]] for number in complete]
    test, e_test, shrinkage = blocked.test, least_squares.test, 1 + PRIOR_SDS**2 / least_squares.variance
    groups = _grouped(differences, [design.compilations[number] for number in complete] if design.compilations else ())
    if groups is not None:
        test = e_test = _sample_test(blocked.test.difference, groups)
        shrinkage = 1 + PRIOR_SDS**2 * len(groups)
    log_e = None if e_test.t is None or e_test.df is None else log_e_value(e_test.t, e_test.df, shrinkage)
    if design.is_sequential and log_e is not None:
        test = test._replace(p=min(1.0, math.exp(-log_e)))
    sample = groups or differences
    p_flips = flips_p(sample) if 2 / 2 ** len(sample) < alpha else None
    return Fit(
        test,
        blocked.middle,
        len(complete),
        blocked.num_clipped,
        least_squares.test.difference,
        p_flips,
        log_e,
        shrinkage,
        design.is_sequential,
    )


class _Blocked(NamedTuple):
    test: stats.Welch
    middle: float
    variance: float  # variance of the estimate if a run has unit variance
    cleaned: dict[int, float]  # {slot: log with the trend removed and the residual clipped}
    num_clipped: int


def _fit_blocks(logs: Sequence[Sequence[float]], slots: Sequence[Sequence[int]], clip_sds: float) -> _Blocked | None:
    """Fits blocks, trend and difference; returns None if arm and trend are collinear, or nothing varies.

    The block constants are swept out first, which leaves two regressors (Frisch and Waugh 1933).  Huber's estimate is
    iterated on pseudo-values (fit + clipped residual); the standard error is Huber's with the correction K.
    """
    runs = sorted((slot, float(arm), log) for arm in range(len(slots)) for slot, log in zip(slots[arm], logs[arm]))
    blocks = [slot // (2 * ROUNDS_OF_BLOCK) for slot, _, _ in runs]
    arm_of, slot_of = (_swept([run[column] for run in runs], blocks) for column in (1, 0))
    aa, at, tt = _dot(arm_of, arm_of), _dot(arm_of, slot_of), _dot(slot_of, slot_of)
    determinant, num = aa * tt - at * at, len(runs)
    num_parameters = len(set(blocks)) + 2
    df = num - num_parameters
    if determinant <= 1e-9 * aa * tt or df < 1:
        return None
    observed = [log for *_, log in runs]
    pseudo, fitted, difference, trend, num_clipped = observed, observed, math.nan, 0.0, 0
    for _ in range(MAX_ITERATIONS):
        y = _swept(pseudo, blocks)
        ya, yt = _dot(y, arm_of), _dot(y, slot_of)
        before, difference, trend = difference, (ya * tt - yt * at) / determinant, (yt * aa - ya * at) / determinant
        fitted = [
            value - swept + difference * arm + trend * slot
            for value, swept, arm, slot in zip(pseudo, y, arm_of, slot_of, strict=True)
        ]
        residuals = [value - expected for value, expected in zip(observed, fitted, strict=True)]
        scale = 1.4826 * statistics.median(map(abs, residuals)) * math.sqrt(num / df)
        if not scale:
            return None
        limit = clip_sds * scale
        pseudo = [expected + min(max(rest, -limit), limit) for expected, rest in zip(fitted, residuals, strict=True)]
        num_clipped = sum(abs(rest) > limit for rest in residuals)
        if not num_clipped or abs(difference - before) <= 1e-12:
            break
    clipped = [value - expected for value, expected in zip(pseudo, fitted, strict=True)]
    inside = 1 - num_clipped / num
    correction = (1 + num_parameters / num * (1 - inside) / inside) / inside
    variance = tt / determinant
    se = correction * math.sqrt(_dot(clipped, clipped) / df * variance)
    if se == 0:
        return None
    df_left = max(1, df - num_clipped)
    t = difference / se
    middle_slot = (2 * (runs[-1][0] // 2) + 1) / 2
    cleaned = {run[0]: value - trend * (run[0] - middle_slot) for run, value in zip(runs, pseudo, strict=True)}
    means = [stats.mean(cleaned[slot] for slot in arm_slots) for arm_slots in slots]
    test = stats.Welch(difference, se, df_left, t, 2 * stats.student_t_sf(abs(t), df_left))
    return _Blocked(test, (means[0] + means[1]) / 2, variance, cleaned, num_clipped)


def _swept(values: Sequence[float], blocks: Sequence[int]) -> list[float]:
    """Subtracts the mean of its block from each value."""
    members: dict[int, list[float]] = {}
    for value, block in zip(values, blocks, strict=True):
        members.setdefault(block, []).append(value)
    means = {block: stats.mean(group) for block, group in members.items()}
    return [value - means[block] for value, block in zip(values, blocks, strict=True)]


def _dot(a: Iterable[float], b: Iterable[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _grouped(differences: Sequence[float], compilations: Sequence[int]) -> list[float] | None:
    """Returns the mean difference of each compilation, or None if the rounds themselves are the sample.

    That is the case with one compilation per arm, and with one per round.
    """
    by_compilation: dict[int, list[float]] = {}
    for compilation, difference in zip(compilations, differences, strict=bool(compilations)):
        by_compilation.setdefault(compilation, []).append(difference)
    is_shared = bool(compilations) and len(by_compilation) < len(differences)
    return [stats.mean(group) for group in by_compilation.values()] if is_shared else None


def _sample_test(difference: float, values: Sequence[float]) -> stats.Welch:
    """Returns Student's test of a sample of differences, or only the given difference if they have no spread."""
    spread = stats.sd(values)
    if not spread:
        return stats.Welch(difference, None, None, None, None)
    se, df = spread / math.sqrt(len(values)), len(values) - 1
    mean = stats.mean(values)
    return stats.Welch(mean, se, df, mean / se, 2 * stats.student_t_sf(abs(mean / se), df))


def flips_p(differences: Sequence[float]) -> float:
    """Returns the two-sided p of the sign-flip test: how often random signs give a mean at least as large.

    Under the null hypothesis each sign is as random as the order of the round.  Exact up to MAX_EXACT_ROUNDS rounds,
    beyond that by NUM_PATTERNS seeded patterns and the observed one (Phipson and Smyth 2010).
    """
    observed = abs(math.fsum(differences)) * (1 - 1e-12)
    if len(differences) <= MAX_EXACT_ROUNDS:
        patterns = itertools.product((1, -1), repeat=len(differences))
        return sum(abs(_dot(signs, differences)) >= observed for signs in patterns) / 2 ** len(differences)
    chance = random.Random(0)
    drawn = (chance.choices((1, -1), k=len(differences)) for _ in range(NUM_PATTERNS))
    return (1 + sum(abs(_dot(signs, differences)) >= observed for signs in drawn)) / (1 + NUM_PATTERNS)


def log_e_value(t: float, df: float, shrinkage: float) -> float:
    """Returns the log Bayes factor of a normal prior on the standardised difference (nuisances: Haar) vs none.

    -ln(r) / 2 + (df + 1) / 2 * ln((1 + t^2 / df) / (1 + t^2 / (df r))), r: shrinkage (Goenen et al. 2005).
    """
    square = t * t / df
    return -math.log(shrinkage) / 2 + (df + 1) / 2 * (math.log1p(square) - math.log1p(square / shrinkage))


def _e_quantile(alpha: float, df: float, shrinkage: float) -> float:
    """Returns the t at which log_e_value() is -ln(alpha), or inf if there is none."""
    ratio = (math.sqrt(shrinkage) / alpha) ** (2 / (df + 1))
    return math.sqrt(df * (ratio - 1) / (1 - ratio / shrinkage)) if ratio < shrinkage else math.inf
