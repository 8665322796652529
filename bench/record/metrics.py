"""Computes the derived numbers of a record, run.json["metrics"], from its raw facts.  Verify recomputes them.

A number is None if a fact is missing: the run did not finish, the peak of the device is unknown, or there is no GPU.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from bench.base import metric, stats
from bench.base.units import ms_from_s, s_from_ms
from bench.machine import peak_rates
from bench.record.shape import Facts, Section, world_sizes
from bench.record.step_files import StepRow

MAX_UNTIMED_FRAC = 0.01  # if the steps' times lack more of a run's time than this, they do not say when a step was
# The fraction by which a budget may be exceeded: programs check their clock after a step, so that 600 s end at 600.1 s
BUDGET_SLACK_FRAC = {"time_s": 1e-3, "tokens": 0.0, "flops": 1e-9}


def metrics(run: Facts, steps: Sequence[StepRow]) -> Section:
    """Computes metrics from a run's "measured", "model", "environment", "world_size", "data", "goal" and steps.csv."""
    measured = run["measured"]
    num_steps = steps[-1]["step"] if steps else None
    val_loss = _last(steps, metric.VAL_LOSS.name)
    train_s = max(measured.get("train_s_by_rank") or (), default=None)  # the slowest rank's clock
    num_untimed_steps = measured.get("num_untimed_steps") or 0
    timed_s, num_timed_steps = timed(train_s, steps, num_untimed_steps)
    num_flagged_steps = None
    if num_timed_steps is not None:
        num_flagged_steps = max(0, steps[-1]["step"] - num_untimed_steps) - num_timed_steps
    floor_nats, wall_s = run["data"].get("floor_nats"), measured.get("wall_s")
    gap_nats = None if val_loss is None or floor_nats is None else val_loss - floor_nats
    mem_gib = peak_mem_gib(measured.get("peak_mem_gib_by_rank"))
    clean_ms = [row["step_ms"] for row in steps if row.get("step_ms") is not None and not row.get("flags")]
    timed_ms = clean_ms if train_s is not None else []
    goal_metric, goal = metric.from_goal(run.get("goal")), run.get("goal") or {}
    names_score = goal_metric != metric.VAL_LOSS or bool(goal.get("budget"))
    scores = _scores_within(run, steps, goal_metric) if goal.get("budget") else None
    score = _last(steps, goal_metric.name) if scores is None else goal_metric.best(scores)
    reached = target_reached(goal, score, gap_nats) if train_s is not None else None
    return {
        "num_steps": num_steps,
        "val_loss": val_loss,
        **({"score": score} if names_score else {}),
        **({} if scores is None else {"num_scores": len(scores)}),
        "train_s": train_s,
        "num_flagged_steps": num_flagged_steps,
        **speed(run, timed_s, num_timed_steps, [row["step"] for row in _flagged(steps, num_untimed_steps)]),
        "step_ms_p50": stats.percentile(timed_ms, 50),
        "step_ms_p95": stats.percentile(timed_ms, 95),
        "peak_mem_gib": max(mem_gib, default=None),
        "peak_mem_gib_min": min(mem_gib, default=None),
        "compile_s": measured.get("compile_s"),
        "goodput_frac": train_s / wall_s if train_s is not None and wall_s else None,  # wall_s: launch to record
        "target_reached": reached,
        "gap_nats": gap_nats,
        **energy(run, num_steps),
    }


def speed(run: Facts, timed_s: float | None, num_steps: int | None, flagged: Collection[int] = ()) -> Section:
    """Computes the metrics of speed of num_steps steps that took timed_s, in a finished run or one that is training.

    run: as for metrics().  flagged: the steps in between that are in neither num_steps nor timed_s.  While a run is
    training, its clock is not synchronised and no step is flagged yet.
    """
    world_size, last = run["world_size"], (num_steps or 0) + len(flagged)
    num_tokens, model = tokens_in_steps(run["measured"], last, flagged), flops_per_token(run, last, flagged)
    rate = num_tokens / timed_s if num_tokens and timed_s else None  # global, over all ranks
    peak = peak_flops(run)
    steady_rate = rate if len(set(world_sizes(run))) == 1 else None  # known only if their number never changed
    return {
        "step_avg_ms": step_avg_ms(None if timed_s is None else ms_from_s(timed_s), num_steps),
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": steady_rate / world_size if steady_rate and run["environment"].get("gpus") else None,
        "mfu": mfu(model.get("flops_per_token"), steady_rate, world_size, peak),
        "mfu_causal": mfu(model.get("flops_per_token_causal"), steady_rate, world_size, peak),
        "mfu_at_clock": mfu_at_clock(model.get("flops_per_token"), steady_rate, run, peak),
    }


def timed(
    train_s: float | None, steps: Sequence[StepRow], num_untimed_steps: int = 0
) -> tuple[float, int] | tuple[None, None]:
    """Returns (seconds, number of steps) for timing statistics, which exclude the steps that an instrument disturbed.

    The step_ms of the flagged steps are subtracted from train_s, the time of the synchronised clock.  (None, None)
    without a time or a step.  num_untimed_steps: the first steps of some foreign logs, which their clock excludes.
    """
    if train_s is None or not steps:
        return None, None
    flagged_ms = [row["step_ms"] for row in _flagged(steps, num_untimed_steps)]
    return train_s - s_from_ms(sum(flagged_ms)), max(0, steps[-1]["step"] - num_untimed_steps) - len(flagged_ms)


def _flagged(steps: Sequence[StepRow], num_untimed_steps: int) -> list[StepRow]:
    """Returns the rows of timed steps that an instrument disturbed."""
    timed_rows = (row for row in steps if row["step"] > num_untimed_steps and row.get("step_ms") is not None)
    return [row for row in timed_rows if row.get("flags")]


def flagged_steps(run: Facts) -> tuple[int | None, int | None]:
    """Returns the numbers of flagged steps that an instrument disturbed, and of those whose time includes a validation.

    In a script or a log, a flag means that a validation is part of a step's time, unless a profiler ran.
    """
    num_flagged = run["metrics"].get("num_flagged_steps")
    is_its_own = run.get("script") or run.get("imported")
    num_disturbed = 0 if is_its_own and set(run.get("instruments") or ()) <= {"telemetry"} else num_flagged
    return num_disturbed, None if num_disturbed else num_flagged


def step_avg_ms(train_ms: float | None, num_steps: int | None) -> float | None:
    """Milliseconds per step, for every step_avg that is printed or recorded.  None without a time or a step."""
    return train_ms / num_steps if train_ms is not None and num_steps else None


def mfu(flops_per_token: float | None, rate: float | None, world_size: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation, 0 to 1: flops_per_token * tokens_per_s / (world_size * peak of one device).

    Chowdhery et al. 2022 (PaLM), appendix B.  flops_per_token counts forward and backward, without recomputation.
    """
    if flops_per_token is None or rate is None or peak is None:
        return None
    return flops_per_token * rate / (world_size * peak)


def peak_flops(run: Facts) -> float | None:
    """Dense peak FLOP/s of the run's slowest device in its dtype; None on a CPU and if a device is unknown."""
    gpus, dtype = run["environment"].get("gpus") or (), run["measured"].get("dtype")
    peaks = [peak_rates.peak_flops(gpu["name"], dtype) for gpu in gpus]
    known_peaks = [peak for peak in peaks if peak is not None]
    return min(known_peaks, default=None) if len(known_peaks) == len(peaks) else None


def mfu_at_clock(flops_per_token: float | None, rate: float | None, run: Facts, peak: float | None) -> float | None:
    """mfu() relative to the peak at the mean SM clock that telemetry measured in the timed region; None if unknown."""
    names = {gpu["name"] for gpu in run["environment"].get("gpus") or ()}
    clock_mhz = _telemetry(run).get("mean_sm_clock_mhz")
    peak_clock_mhz = peak_rates.peak_clock_mhz(names.pop()) if len(names) == 1 else None
    if peak is None or not clock_mhz or peak_clock_mhz is None:
        return None
    return mfu(flops_per_token, rate, run["world_size"], peak * clock_mhz / peak_clock_mhz)


def energy(run: Facts, num_steps: int | None) -> dict[str, float | None]:
    """Energy and mean power of all the run's GPUs together in the timed region, including flagged steps."""
    summary = _telemetry(run)
    summary = {} if run.get("segments") else summary  # the summary covers only the last segment
    energy_j, num_tokens = summary.get("energy_j"), tokens_in_steps(run["measured"], num_steps or 0)
    return {
        "energy_j": energy_j,
        "energy_j_per_step": energy_j / num_steps if energy_j is not None and num_steps else None,
        "energy_j_per_token": energy_j / num_tokens if energy_j is not None and num_tokens else None,
        "mean_power_w": summary.get("mean_power_w"),
    }


def _telemetry(run: Facts) -> Section:
    return (run.get("instrument_summaries") or {}).get("telemetry") or {}


def peak_mem_gib(by_rank: Mapping[str, Sequence[float | None]] | None) -> list[float]:
    """Returns each rank's peak in GiB from {kind: [GiB of each rank]}: memory allocated by torch, or the resident set.

    If a script died before it reported the former, NVML's figures of the memory in use on each GPU are returned.
    """
    by_rank = by_rank or {}
    peaks_gib = by_rank.get("allocated") or by_rank.get("device") or by_rank.get("rss") or ()
    return [gib for gib in peaks_gib if gib is not None]


def target_reached(goal: Section | None, score: float | None, gap_nats: float | None) -> bool | None:
    """Whether the goal's metric, or gap_nats, has reached its target; None without a target or a value."""
    goal = goal or {}
    for value, target in ((score, target_of(goal)), (gap_nats, goal.get("target_gap_nats"))):
        if target is not None:
            return None if value is None else metric.from_goal(goal).reaches(value, target)
    return None


def target_of(goal: Section) -> float | None:
    """Returns the target of the metric in run.json["goal"]; None without one, and for target_gap_nats."""
    target: float | None = goal.get("target_val_loss" if metric.from_goal(goal) == metric.VAL_LOSS else "target")
    return target


def score_text(run: Facts) -> str:
    """Describes what a complete run reached: "val_loss 2.7551", after the score in the goal's metric if it differs."""
    loss, goal = run["metrics"].get("val_loss"), metric.from_goal(run.get("goal"))
    scores = [] if loss is None else [f"val_loss {loss:.4f}"]
    if (score := run["metrics"].get("score")) is not None:
        within = " within its budget" if (run.get("goal") or {}).get("budget") else ""
        scores = [f"{goal.name} {score:.6g}{within}", *(f"{text} at the end" if within else text for text in scores)]
    return ", ".join(scores) or f"no {goal.name}"


def _scores_within(run: Facts, steps: Sequence[StepRow], goal_metric: metric.Metric) -> list[float]:
    """Returns the values of the goal's metric in the validations within the budget, of which the best counts."""
    values = [row.get(goal_metric.name) if is_within else None for row, is_within in within_budget(run, steps)]
    return [value for value in values if value is not None and math.isfinite(value)]


def step_past_budget(run: Facts, steps: Sequence[StepRow]) -> int | None:
    """Returns the first step that is known to exceed the goal's budget; None without one, or without a budget."""
    checks = within_budget(run, steps) if (run.get("goal") or {}).get("budget") else ()
    return next((row["step"] for row, is_within in checks if is_within is False), None)


def within_budget(run: Facts, steps: Sequence[StepRow]) -> Iterator[tuple[StepRow, bool | None]]:
    """Yields each row and whether it is within the goal's budget; None if what it had used is unknown.

    The time of a row is its train_s; else the printed training time so far; else the sum of the steps' times so far, if
    that adds up to the run's time.  The time of the last row is that of the whole run.
    """
    budget, spent_s = run["goal"]["budget"], 0.0
    train_s = max(run["measured"].get("train_s_by_rank") or (), default=None)
    most = {unit: amount * (1 + BUDGET_SLACK_FRAC[unit]) for unit, amount in budget.items()}
    timed_ms = [0.0 if "untimed" in (row.get("flags") or "") else row.get("step_ms") or 0.0 for row in steps]
    is_whole = train_s is None or abs(s_from_ms(sum(timed_ms)) - train_s) <= MAX_UNTIMED_FRAC * train_s
    for row, step_ms in zip(steps, timed_ms, strict=True):
        spent_s += s_from_ms(step_ms)
        printed_ms = row.get("train_time_at_val_ms") or row.get("train_time_ms")
        tokens = tokens_in_steps(run["measured"], row["step"])
        flops_each = run["model"].get("flops_per_token")
        flops = None if tokens is None or flops_each is None else tokens * flops_each
        own_s = s_from_ms(printed_ms) if printed_ms is not None else spent_s if is_whole else None
        if row is steps[-1] and train_s is not None:
            own_s = train_s
        used = {"time_s": own_s if row.get("train_s") is None else row["train_s"], "tokens": tokens, "flops": flops}
        within = [amount <= most[unit] for unit in budget if (amount := used[unit]) is not None]
        yield row, all(within) if len(within) == len(budget) else None


def _last(steps: Sequence[StepRow], name: str) -> float | None:
    values: list[float] = [row[name] for row in steps if row.get(name) is not None]
    return values[-1] if values and math.isfinite(values[-1]) else None


def tokens_in_steps(measured: Facts, num_steps: int, without: Collection[int] = ()) -> int | None:
    """Tokens of the first num_steps steps, except the steps in without (counted from 1); None if not recorded.

    measured: run.json["measured"].  Without stages every step has batch_tokens; with stages each has its own number,
    and batch_tokens is the mean over the whole run.
    """
    if measured.get("stages"):
        return sum(num * stage["batch_tokens"] for stage, num in _in_stages(measured, num_steps, without))
    batch_tokens = measured.get("batch_tokens")
    return None if batch_tokens is None else (num_steps - len(without)) * batch_tokens


def flops_per_token(run: Facts, num_steps: int, without: Collection[int] = ()) -> dict[str, float | None]:
    """Returns {"flops_per_token", "flops_per_token_causal"}, means over the tokens of tokens_in_steps(), or None."""
    names = ("flops_per_token", "flops_per_token_causal")
    tokens = tokens_in_steps(run["measured"], num_steps, without)
    if not run["measured"].get("stages") or not tokens:
        return {name: run["model"].get(name) for name in names}
    shares = _in_stages(run["measured"], num_steps, without)
    return {name: sum(num * stage["batch_tokens"] * stage[name] for stage, num in shares) / tokens for name in names}


def mean_flops_per_token(stages: Sequence[Section]) -> dict[str, int]:
    """Returns what flops_per_token() does over all steps of a run's stages, rounded to integers."""
    num_steps = sum(stage["num_steps"] for stage in stages)
    means = flops_per_token({"measured": {"stages": stages}}, num_steps)
    return {name: stages[0][name] if len(stages) == 1 else round(mean or 0) for name, mean in means.items()}


def _in_stages(measured: Facts, num_steps: int, without: Collection[int]) -> list[tuple[Section, int]]:
    """Returns [(stage, number of the first num_steps steps in it, except those in without)]."""
    shares = []
    for stage in measured["stages"]:
        first, last = stage["first_step"], min(num_steps, stage["first_step"] + stage["num_steps"] - 1)
        excluded = sum(first <= step <= last for step in without)
        shares.append((stage, max(0, last - first + 1) - excluded))
    return shares
