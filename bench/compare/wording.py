"""Words comparisons for text, pages and CSV: names of measures, cells of tables, the verdict as a sentence."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.base import stats, text_table
from bench.base.metric import Metric, named
from bench.compare import clocks, effects

MEASURES = {  # {key of a Comparison: (name, key of the means, their unit, decimals)}
    "time": ("time", "mean_s", "s", 3),
    "val_loss": ("val_loss", "mean", "", 5),
    "energy": ("energy", "mean_j", "J", 1),
    "memory": ("peak memory", "mean_gib", "GiB", 3),
    "compile": ("compile time", "mean_s", "s", 2),
}
FLAGS = {  # {flag of a Comparison: its meaning}
    "imported": "another harness timed these runs and wrote their logs",
    "session-unknown": "whether both arms ran in one session is unknown",
    "order-confounded": "the arms were not interleaved, so that a drift of the machine looks like a change",
    "runs-overlap": "runs overlap in time, so more than one machine ran them",
    "order-unknown": "whether the arms were interleaved is unknown",
    "uncalibrated": f"this session has no ./run.sh calibrate: a noise floor of {effects.MIN_FLOOR_PCT:g} % is assumed",
    "n=1": "a single run has no spread, so there is no verdict",
    "no-spread": "the times within an arm are identical, so probably not measured: no verdict",
    "runs-without-a-time": "some started runs failed, are invalid or still run",
    "suspect-runs": "some runs are suspect, most often disturbed by the machine; too few others remain to exclude them",
    "software-differs": "the arms' scripts have their own interpreters, with another torch, CUDA or NCCL",
    "data-unknown": "the arms' scripts brought data of their own, which were not checked",
    "suspect-records": "an instrument marked some runs suspect, or a log has lines that were not understood",
    "runs-excluded": "runs that the machine disturbed are excluded from both arms",
    "verdict-depends-on-exclusions": "with the excluded runs the times would give a different verdict",
    effects.ONE_SIDED: "runs of one arm failed or are excluded, and not as many of the other, perhaps the bad ones",
    effects.DISAGREE: "the launcher's clock does not confirm the verdict that the runs' own clocks would give",
    effects.NOT_COUNTED: "the candidate may have trained while its own clock stood still, or validates longer",
    "one-clock": "one arm's records predate the launcher's clock, so only the runs' own clocks decide",
    clocks.MORE_BESIDE: "the candidate takes longer before or after its clock, where it may have trained",
    "one-compilation": "the runs of an arm share one compilation, and its luck looks like a change: use compilations=3",
    "outliers-contradict": "the change has the other sign once outlying runs count in full",
    "baseline-unsteady": "the baseline differs from itself: its runs in even rounds from those in odd ones",
    "seed-given": "the first seed was chosen: somebody may have known the losses that these seeds give",
    "same-seed": "repeats of one seed count as one loss",
    "steps-differ": "the arms ran different numbers of steps to the same target",
    "tokens-differ": "the arms use different numbers of tokens per step to reach the same target",
    "mixed-code": "an arm mixes runs of different code, or records whose code identities cannot be compared",
    "open-division": "some runs change what their track fixes",
    "not-at-a-planned-look": "the number of runs is not one at which the plan looks: no verdict",
    "without-its-plan": "these runs of a race are compared without its plan: name the race instead",
    "unplanned-look": "someone looked at an interim state that the plan does not foresee: the verdict is not evidence",
    "run-again": "{} runs of the baseline and {} of the candidate were interrupted and run again, perhaps the bad ones",
    "raced-before": "the ledger has races of these arms, or near ones: repeated often enough, a race differs by chance",
    "forced": "numbers were requested although the runs are not comparable",
}
MAX_MDE_PCT, MAX_NEEDED = 1000, 1000  # MAX_NEEDED: most runs of each arm that another race is advised to make
HEAD = ("change", "95 % interval", "p", "n", "CV %", "MDE (80 % power)")


def unit_of(key: str) -> tuple[str, str, int]:
    """Returns (suffix of the keys of a measure's change, the change's unit, decimals)."""
    return ("", "", 5) if key == "val_loss" else ("_pct", " %", 2)


def metric_of(comparison: Mapping[str, Any]) -> Metric:
    """Returns the metric that is compared as the loss.  comparison: a Comparison of any version, or its Loss."""
    return named(*((comparison.get("val_loss") or comparison).get("metric") or (None,)))


def name_of(key: str, comparison: Mapping[str, Any]) -> str:
    """Returns the name of a measure; that of the loss is the goal's metric."""
    return metric_of(comparison).name if key == "val_loss" else MEASURES[key][0]


def known_measures(comparison: Mapping[str, Any]) -> list[str]:
    """Returns the keys of the measures that have a mean in some arm.  comparison: a Comparison of any version."""
    means = {key: (comparison.get(key) or {}).get(mean_key) or () for key, (_, mean_key, *_) in MEASURES.items()}
    return [key for key in MEASURES if any(mean is not None for mean in means[key])]


def cells(comparison: Mapping[str, Any], key: str) -> list[str]:
    """Returns the means of both arms, then the cells of HEAD, "" for unknown.  p is adjusted (Holm) if possible."""
    _, mean_key, unit, decimals = MEASURES[key]
    measure, (end, sign, digits) = comparison[key], unit_of(key)
    change, cvs_pct = measure.get(f"change{end}"), measure.get("cv_pct")
    if not cvs_pct:  # a Loss has sd and mean instead
        spreads = zip(measure["sd"], measure["mean"], strict=True)
        cvs_pct = [None if sd is None or not mean else 100 * sd / mean for sd, mean in spreads]
    return [
        *("" if mean is None else f"{mean:,.{decimals}f} {unit}".rstrip() for mean in measure[mean_key]),
        "" if change is None else f"{change:+.{digits}f}{sign}",
        interval(measure.get(f"ci95{end}"), digits, sign),
        p_text(measure.get("p") if measure.get("p_holm") is None else measure["p_holm"]),
        ", ".join(map(str, measure["n"])),
        ", ".join("-" if cv is None else f"{cv:.2f}" for cv in cvs_pct),
        loss_mde_text(measure) if key == "val_loss" else mde_text(measure.get("mde_pct")),
    ]


def loss_mde_text(loss: Mapping[str, Any]) -> str:
    """Returns the MDE of a Loss in its unit, "" if it is not known."""
    return "" if loss.get("mde") is None else f"{loss['mde']:.2g} {metric_of(loss).unit}".rstrip()


def mde_text(mde_pct: float | None) -> str:
    """Returns the MDE with its unit, "over ..." beyond MAX_MDE_PCT, or "" for None."""
    if mde_pct is None:
        return ""
    return f"over {MAX_MDE_PCT} %" if mde_pct > MAX_MDE_PCT else f"{text_table.two_digits(mde_pct)} %"


def interval(edges: Sequence[float] | None, decimals: int, unit: str) -> str:
    """Returns "LOW to HIGH" with the unit (such as " %") at the end, or "" for None."""
    return "" if edges is None else f"{edges[0]:+.{decimals}f} to {edges[1]:+.{decimals}f}{unit}"


def p_text(p: float | None) -> str:
    """Returns p with two significant digits, or "" for None."""
    return "" if p is None else f"{p:.2g}" if p >= 1e-4 else f"{p:.1e}" if p >= 1e-16 else "<1e-16"


def p_sentence(p: float | None) -> str:
    """Returns "p = 0.011", "p < 1e-16", or "p = -" for None."""
    text = p_text(p)
    return f"p < {text[1:]}" if text.startswith("<") else f"p = {text or '-'}"


def loss_sentences(loss: Mapping[str, Any], arms: Sequence[str]) -> list[str]:
    """Returns sentences on whether the losses reach the target and stay within the margin, or are not compared."""
    metric = metric_of(loss)
    if loss.get("change") is None:
        return [f"{metric.name} is not compared: {' and '.join(loss['reasons'])}"] if loss.get("reasons") else []
    lines = []
    if loss.get("target") is not None and any(p is not None for p in loss["p_target"]):
        tests = [
            f"{name} {p_sentence(p)}{f' ({metric.better})' if below else ' (not shown)' if p is not None else ''}"
            for name, p, below in zip(arms, loss["p_target"], loss["below_target"], strict=True)
        ]
        needed = f"one-sided t, needed p < {loss['target_p_value']:g}"
        lines.append(f"mean {metric.name} {metric.better} {loss['target']:g}, {needed}: {', '.join(tests)}")
    way = "rise" if metric.sign > 0 else "fall"
    rise, p = f"a {way} of {loss['margin']:g} {metric.unit}".rstrip(), p_sentence(loss.get("p_not_worse"))
    wider = "" if loss["margin"] or metric.margin is not None else "; margin=NUMBER allows a small one"
    sentences = {
        "waived": "the losses of both arms are bit-identical: there is nothing to test",
        "not_worse": f"{arms[1]}'s {metric.name} is not worse: {rise} is excluded ({p})",
        "worse": f"{arms[1]}'s {metric.name} is worse throughout the 95 % interval",
        "inconclusive": f"not shown that {arms[1]}'s {metric.name} is not worse: {rise} is not excluded ({p}){wider}",
    }
    lines += [sentences[loss["verdict"]]] if loss["verdict"] in sentences else []
    return lines + list(loss.get("remarks") or ())


def standalone_verdict(comparison: Mapping[str, Any]) -> str:
    """Returns the sentence with the verdict in it.  comparison: a Comparison of any version."""
    verdict, sentence = str(comparison["verdict"]).replace("_", " "), str(comparison["words"])
    says_it = verdict in ("faster", "slower", "better", "worse", "equivalent")
    says_it |= sentence.startswith((verdict, "no verdict"))
    return sentence if says_it else f"{verdict}: {sentence}"


def answer_sentence(comparison: Mapping[str, Any], on: str, verdict: str) -> str:
    """Returns the answer to one question as a sentence to be shown beside the verdict."""
    if on == "loss":
        sentence = _sentence_of_losses(comparison, verdict)
    elif on == "steps_to_target":
        sentence = _sentence_of_steps(comparison, verdict)
    elif on == "time_to_target" and comparison["kind"] != "time_to_target" and comparison["comparable"]:
        sentence = f"no time to a target: it compares {comparison['kind_words']}"
    else:
        sentence = _sentence_of_times(comparison, verdict)
    if on in ("loss", "steps_to_target") and (arm := comparison["val_loss"].get("flattered")) is not None:
        of_arms = "{} than of {}".format(*comparison["arms"][:: 1 if arm == 0 else -1])
        sentence += f"; more runs of {of_arms} failed, have no value or count as one: none counts in its favour"
    if effects.NOT_COUNTED in comparison["flags"]:
        metric = metric_of(comparison)
        lower = f"{'lower' if metric.sign > 0 else 'higher'} {metric.name} is"
        gain = "fewer steps are" if comparison["on"] == "steps_to_target" else lower
        return f"{sentence}; {extra_sentence(comparison)}, so its {gain} not counted"
    return sentence


def _sentence_of_losses(comparison: Mapping[str, Any], verdict: str) -> str:
    loss, (a, b) = comparison["val_loss"], comparison["arms"]
    if verdict == "not_comparable":
        return str(loss["reasons"][0])
    if loss["verdict"] == "waived":
        return f"{b}'s losses are bit-identical to {a}'s"
    if loss["p"] is None:
        why = "no verdict: the losses have no spread to judge by (n = {} and {} different seeds and trajectories)"
        return why.format(*loss["n"])
    if "not-at-a-planned-look" in comparison["flags"]:
        return _not_at_a_look(comparison)
    if loss["verdict"] == "unknown" and not comparison["comparable"]:
        return f"no verdict: {comparison['reasons'][0]}"
    metric = metric_of(loss)
    unit = f" {metric.unit}" if metric.unit else ""
    mde, alpha = loss_mde_text(loss), comparison["time"]["alpha"]
    numbers = _numbers(loss, interval(loss["ci95"], 5, unit), alpha)
    change = f"{loss['change']:+.5f}{unit} of {metric.name}"
    if verdict in ("better", "worse"):
        return f"{b} is {verdict} than {a}: {change} ({numbers})"
    if verdict == "equivalent":
        return f"{b} is as good as {a}: {change} is inside the margin of {loss['margin']:g}{unit} ({numbers})"
    is_open = mde and (loss["p"] if loss.get("p_holm") is None else loss["p_holm"]) >= alpha
    return f"{b} against {a}: {change} ({numbers}){f'; {_detects(comparison, loss, mde)}' if is_open else ''}"


def _why_alpha(comparison: Mapping[str, Any]) -> str:
    """Returns why alpha is less than the usual 0.05."""
    plan, weight = comparison.get("plan") or {}, comparison.get("earlier_weight", 1.0)
    whys = ["half of the study's, which also asks for the time to the same loss"] * (plan.get("name") == "study")
    whys += [f"earlier races of these arms left {100 * weight:.0f} % of it"] * (weight < 1)
    whys += ["its looks share it"] * (len(plan.get("looks") or ()) > 1 and not plan.get("sequential"))
    return ", ".join(whys or ["that of its plan"])


def _detects(comparison: Mapping[str, Any], measure: Mapping[str, Any], mde: str) -> str:
    """Returns the smallest change that these runs can detect, and how to detect one of the size that was measured."""
    plan, time, least = comparison["plan"], comparison["time"], f"these runs can only detect changes above {mde}"
    least, alpha, p, share = f"{least} (MDE, 80 % power)", time["alpha"], measure["p"], 1.0
    if p < alpha:  # but not after Holm
        least = f"p counts after Holm's correction for several candidates, without which {least}"
        share = p / measure["p_holm"]
    elif p < stats.ALPHA:  # the interval excludes 0, and yet it is not enough
        least = f"p is not below the alpha of {apart(alpha, p)} ({_why_alpha(comparison)}); {least}"
    if not plan:
        return f"{least}: add runs to detect smaller ones"
    alpha *= math.exp(effects.log_left(time, comparison["on"]))
    is_loss = measure is comparison["val_loss"]
    difference = measure["change"] if is_loss else math.log1p(measure["change_pct"] / 100)
    sds = measure["sd"] if is_loss else [cv and cv / 100 for cv in measure.get("cv_pct") or [None]]
    sd = None if None in sds else math.sqrt(stats.mean([sd * sd for sd in sds]))
    n = None if plan.get("sequential") else stats.needed_n(difference, sd, share * alpha)
    n = n and max(n, 1 + max(measure["n"]))
    again = f"race again with n={n} to detect one of this size"
    if not n or n > MAX_NEEDED:
        far = "a new race needs far more runs from the start"
        again = f"to detect one of this size takes over {MAX_NEEDED:,} runs of each arm" if n else far
    return f"{least}: {again}, at the alpha of {text_table.two_digits(alpha)} that this one leaves"


def apart(number: float, other: float) -> str:
    """Returns a number with the digits, two or more, that tell it from another one."""
    return next(
        (f"{number:.{num}g}" for num in range(2, 7) if f"{number:.{num}g}" != f"{other:.{num}g}"), f"{number:g}"
    )


def _sentence_of_steps(comparison: Mapping[str, Any], verdict: str) -> str:
    steps, (a, b) = comparison["steps_to_target"], comparison["arms"]
    means = " and ".join("unknown" if mean is None else f"{mean:,.10g}" for mean in steps["mean"])
    if steps["why"] is not None:
        return f"steps to the target: {means}, not compared: {steps['why']}"
    if "not-at-a-planned-look" in comparison["flags"]:
        return _not_at_a_look(comparison)
    p = "the same number in every run" if steps["p"] is None else f"p = {steps['p']:.2g}"
    phrases = {"better": "fewer steps than", "worse": "more steps than", "equivalent": "as many steps as"}
    compared = f"{b} needs {phrases[verdict]} {a}" if verdict in phrases else f"{b} against {a}"
    return f"{compared} to the target: {means} ({p})"


def _not_at_a_look(comparison: Mapping[str, Any]) -> str:
    looks, started = ", ".join(map(str, comparison["plan"]["looks"])), " and ".join(map(str, comparison["started"]))
    return f"no verdict: {started} runs were started, but the plan looks at {looks} per arm"


def _sentence_of_times(comparison: Mapping[str, Any], verdict: str) -> str:
    time, (a, b) = comparison["time"], comparison["arms"]
    if verdict == "not_comparable":
        return _losses_sentence(comparison)
    if time["p"] is None:
        if comparison["plan"] and min(time["n"]) > 1 and time["rounds"] is None and time["ci95_pct"] is None:
            return "no verdict: identical times in each arm, or too few rounds for a plan that looks after each"
        why = "one run has no spread" if min(time["n"]) < 2 else "identical times in each arm: not measured?"
        return f"no verdict: {why}"
    if "not-at-a-planned-look" in comparison["flags"]:
        return _not_at_a_look(comparison)
    numbers = _time_numbers(time)
    if verdict in ("faster", "slower"):
        return _difference(time, verdict, a, b)
    change = f"{time['change_pct']:+.2f} %"
    if verdict == "equivalent":
        return f"{b} is as fast as {a}: {change} is inside the margin of {time['margin_pct']:g} % ({numbers})"
    if verdict == "not_interleaved":
        unknown = "session-unknown" in comparison["flags"]
        by = f"the {text_table.two_digits(time['drift_pct'])} % by which repeats of the same code differ"
        drift = f"widened by {by} {'between sessions' if unknown else 'within a session'}"
        edges = interval(time["ci95_pct"], 2, " %")
        return f"{b} against {a}: {change} (interval {edges}, {drift}): ./run.sh race interleaves them"
    return f"{b} against {a}: {change} ({numbers}); {_why_inconclusive(comparison)}"


def _numbers(measure: Mapping[str, Any], edges: str, alpha: float) -> str:
    p_holm = "" if measure.get("p_holm") is None else f", {apart(measure['p_holm'], alpha)} after Holm"
    n = f"n = {measure['n'][0]} and {measure['n'][1]}"
    p = measure["p"] if measure.get("p_holm") is None else measure["p_holm"]
    return f"95 % interval {edges or 'unbounded'}, p = {apart(measure['p'], alpha)}{p_holm}{below(p, alpha)}, {n}"


def below(p: float, alpha: float) -> str:
    """Returns the alpha that p is below, to follow it in a sentence, unless that is the usual 0.05."""
    return f", below the alpha of {apart(alpha, p)}" if p < alpha < stats.ALPHA else ""


def _time_numbers(time: Mapping[str, Any]) -> str:
    """Returns interval, p and n, and the sign-flip test if it contradicts the test that decides."""
    numbers, p_flips = _numbers(time, interval(time["ci95_pct"], 2, " %"), time["alpha"]), time.get("p_flips")
    if p_flips is None or (time["p"] < time["alpha"]) == (p_flips < time["alpha"]):
        return numbers
    return f"{numbers}; a sign-flip test over {time['rounds']} rounds disagrees, p = {p_flips:.2g}"


def _difference(time: Mapping[str, Any], verdict: str, a: str, b: str) -> str:
    """Returns a sentence that leads with the clock that shows the smaller difference."""
    by_launcher, own_pct = time.get("outside"), abs(time["change_pct"])
    less_pct = abs(by_launcher["change_pct"]) if by_launcher else own_pct
    if not by_launcher or round(less_pct, 2) >= round(own_pct, 2):
        return f"{b} is {own_pct:.2f} % {verdict} than {a} ({_time_numbers(time)})"
    both = f"by the launcher's clock, {own_pct:.2f} % by its own ({_time_numbers(time)})"
    return f"{b} is {less_pct:.2f} % {verdict} than {a} {both}"


def design_sentences(comparison: Mapping[str, Any]) -> list[str]:
    """Returns sentences on margin, test and what lowered alpha.  comparison: a Comparison of any version."""
    time, loss = comparison.get("time") or {}, comparison.get("val_loss") or {}
    sentences, metric = [], metric_of(loss)
    if source := loss.get("margin_source"):
        sentences.append(f"margin for {metric.name}: {loss['margin']:g} {metric.unit}".rstrip() + f" ({source})")
    if comparison.get("on") == "loss":
        if loss.get("p") is not None:
            test = "an e-process" if (comparison.get("plan") or {}).get("sequential") else "Welch's t"
            sentences.append(f"test: {test} on the final {metric.name}, {loss['n'][0]} and {loss['n'][1]} runs")
        time = {"alpha": time.get("alpha")}  # how times are compared is not the question
    if num_rounds := time.get("rounds"):
        clipped = f"; {text_table.counted(time['clipped'], 'outlying run')} clipped" if time["clipped"] else ""
        sentences.append(f"design: {num_rounds} rounds, compared within blocks of two{clipped}")
    if (again := time.get("baseline")) and again["ci95_pct"] and min(again["n"]) > 2:
        text = f"even and odd rounds: {again['change_pct']:+.2f} % ({interval(again['ci95_pct'], 2, ' %')})"
        sentences.append(f"{comparison['arms'][0]} against itself, {text}")
    if (weight := comparison.get("earlier_weight", 1.0)) < 1:
        alpha = f"alpha is {text_table.two_digits(time['alpha'])}"
        sentences.append(f"{alpha}: earlier races of these arms have left {100 * weight:.0f} % of it")
    return sentences


def outside_text(by_launcher: Mapping[str, Any]) -> str:
    """Returns the change by the launcher's clock as text, or why it is unknown."""
    if by_launcher["unknown"]:
        return f"unknown: {by_launcher['unknown']}"
    means = " and ".join(f"{mean_s:.2f}" for mean_s in by_launcher["mean_s"])
    edges = interval(by_launcher["ci95_pct"], 2, " %")
    return f"{by_launcher['change_pct']:+.2f} %{f' (95 % interval {edges})' if edges else ''}, means {means} s"


def extra_sentence(comparison: Mapping[str, Any]) -> str:
    """Returns a sentence on how much more time B spends outside its own clock than A."""
    (a, b), by_launcher = comparison["arms"], comparison["time"]["outside"]
    low_s, high_s = by_launcher["extra_ci95_s"]
    interval = f"95 % interval {low_s:.3f} to {high_s:.3f} s, one-sided p = {by_launcher['extra_p']:.2g}"
    return f"{b} spends {by_launcher['extra_s']:.3f} s more outside its own clock than {a} ({interval})"


def _why_inconclusive(comparison: Mapping[str, Any]) -> str:
    time = comparison["time"]
    if effects.DISAGREE in comparison["flags"]:
        why = "time that only one arm spends outside its own clock is part of the difference"
        return f"by the launcher's clock {outside_text(time['outside'])}: {why}"
    if len(comparison["excluded"]) == 0 and comparison.get("all_disturbed"):
        return "disturbed runs cannot tell: repeat on a quiet machine"
    everything = comparison["time_all"] or time
    if effects.ONE_SIDED in comparison["flags"] or effects.is_reversed(time, everything["change_pct"]):
        lacking = (num - n for num, n in zip(comparison["started"], time["n"], strict=True))
        runs = " and ".join(f"{num} of {name}" for num, name in zip(lacking, comparison["arms"], strict=True))
        more = "" if everything is time else f" ({everything['change_pct']:+.2f} % with the disturbed ones)"
        return f"{runs} failed or were disturbed, perhaps the bad ones{more}: race again on a quiet machine"
    if effects.rests_on_clipping(time):
        return f"it is {time['unclipped_pct']:+.2f} % once outlying runs count in full"
    floor = text_table.two_digits(time["floor_pct"])
    if time["floor_pct"] > time["margin_pct"]:
        coarse = f"this machine's noise floor of {floor} % is coarser than the margin of {time['margin_pct']:g} %"
        return f"{coarse}: measure on a quiet machine and calibrate again"
    if (time["p"] if time["p_holm"] is None else time["p_holm"]) < time["alpha"]:
        return f"the difference is not beyond the noise floor of {floor} %"
    return _detects(comparison, time, mde_text(time["mde_pct"]).removeprefix("over "))


def _losses_sentence(comparison: Mapping[str, Any]) -> str:
    """Returns why the times are not comparable, and what the losses show nevertheless."""
    (_, b), loss, why = comparison["arms"], comparison["val_loss"], str(comparison["reasons"][0])
    findings = {
        "waived": "bit-identical in both arms",
        "not_worse": f"{b} is no worse",
        "worse": f"{b} is worse",
        "inconclusive": f"not shown whether {b} is worse",
    }
    if loss["verdict"] not in findings:
        return why
    metric = metric_of(loss)
    change = "" if loss["change"] is None else f"{loss['change']:+.5f} {metric.unit}".rstrip() + ", "
    return f"time: {why}; {metric.name}: {findings[loss['verdict']]} ({change}margin {loss['margin']:g})"
