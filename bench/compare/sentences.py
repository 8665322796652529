"""A verdict as a sentence; bench/compare/verdict.py puts it into the Comparison."""

from collections.abc import Mapping

from bench.compare import effects, measures
from bench.terminal import text_table


def alone(result: Mapping) -> str:
    """The sentence for where the verdict itself is not shown beside it.  result: a Comparison of any version."""
    verdict, words = result["verdict"].replace("_", " "), result["words"]
    says_it = verdict in ("faster", "slower", "equivalent") or words.startswith((verdict, "no verdict"))
    return words if says_it else f"{verdict}: {words}"


def of(result: Mapping) -> str:
    """The verdict as a sentence, which does not say the verdict's own word again where it would only repeat it."""
    if effects.NOT_COUNTED in result["flags"]:
        return f"{_of_verdict(result)}; {extra_words(result)}, so its lower val_loss is not counted"
    return _of_verdict(result)


def _of_verdict(result):
    time, verdict, (a, b) = result["time"], result["verdict"], result["arms"]
    if verdict == "not_comparable":
        return _words_of_losses(result)
    if time["p"] is None:
        why = "one run has no spread" if min(time["n"]) < 2 else "identical times in each arm: not measured?"
        return f"no verdict: {why}"
    if "not-at-a-planned-look" in result["flags"]:
        looks = ", ".join(map(str, result["plan"]["looks"]))
        started = " and ".join(map(str, result["started"]))
        return f"no verdict: {started} runs were started, the plan looks at {looks} a side"
    numbers = _numbers(time)
    if verdict in ("faster", "slower"):
        return _difference(time, verdict, a, b)
    change = f"{time['change_pct']:+.2f} %"
    if verdict == "equivalent":
        return f"{b} is as fast as {a}: {change} is inside the margin of {time['margin_pct']:g} % ({numbers})"
    return f"{b} against {a}: {change} ({numbers}); {_why_inconclusive(result)}"


def _numbers(time):
    low, high = time["ci95_pct"]
    p = f"p = {time['p']:.2g}" + ("" if time["p_holm"] is None else f", {time['p_holm']:.2g} after Holm")
    return f"95 % interval {low:+.2f} to {high:+.2f} %, {p}, n = {time['n'][0]} and {time['n'][1]}"


def _difference(time, verdict, a, b):
    """Of two clocks the one that says less leads: what an arm spends outside its own is part of the difference."""
    by_launcher, own_pct = time.get("outside"), abs(time["change_pct"])
    less_pct = abs(by_launcher["change_pct"]) if by_launcher else own_pct
    if round(less_pct, 2) >= round(own_pct, 2):
        return f"{b} is {own_pct:.2f} % {verdict} than {a} ({_numbers(time)})"
    low, high = by_launcher["ci95_pct"]
    less = f"95 % interval {low:+.2f} to {high:+.2f} %, one-sided p = {by_launcher['p_same_sign']:.2g}"
    less = f"{b} is {less_pct:.2f} % {verdict} than {a} by the launcher's clock ({less})"
    return f"{less} and {own_pct:.2f} % by their own ({_numbers(time)})"


def outside_words(by_launcher: Mapping) -> str:
    """The change by the launcher's clock, or why it is unknown."""
    if by_launcher["unknown"]:
        return f"unknown: {by_launcher['unknown']}"
    means = " and ".join(f"{mean_s:.2f}" for mean_s in by_launcher["mean_s"])
    if by_launcher["ci95_pct"] is None:
        return f"{by_launcher['change_pct']:+.2f} %, means {means} s"
    low, high = by_launcher["ci95_pct"]
    return f"{by_launcher['change_pct']:+.2f} % (95 % interval {low:+.2f} to {high:+.2f} %), means {means} s"


def extra_words(result: Mapping) -> str:
    """How much more time B spends outside its own clock than A."""
    (a, b), by_launcher = result["arms"], result["time"]["outside"]
    low_s, high_s = by_launcher["extra_ci95_s"]
    interval = f"95 % interval {low_s:.3f} to {high_s:.3f} s, one-sided p = {by_launcher['extra_p']:.2g}"
    return f"{b} spends {by_launcher['extra_s']:.3f} s more outside its own clock than {a} ({interval})"


def _why_inconclusive(result):
    time = result["time"]
    if effects.DISAGREE in result["flags"]:
        said = outside_words(time["outside"])
        why = "time that only one arm spends outside its own clock is part of the difference"
        return f"by the launcher's clock {said}: {why}"
    floor = text_table.two_digits(time["floor_pct"])
    if time["floor_pct"] > time["margin_pct"]:
        coarse = f"this machine's noise floor of {floor} % is coarser than the margin of {time['margin_pct']:g} %"
        return f"{coarse}: measure on a quiet machine, calibrate again"
    if (time["p"] if time["p_holm"] is None else time["p_holm"]) < time["alpha"]:
        return f"the difference is not beyond the noise floor of {floor} %"
    mde = measures.mde_words(time["mde_pct"])
    return f"the MDE (80 % power) of these runs is {mde}: run more to see a smaller change"


def _words_of_losses(result):
    """Of times that are not comparable: why; and what the losses say all the same."""
    (a, b), loss, why = result["arms"], result["val_loss"], result["reasons"][0]
    said = {
        "waived": f"{b} has those of {a}, bit for bit",
        "not_worse": f"{b} is no worse",
        "worse": f"{b} is worse",
        "inconclusive": f"whether {b} is worse is open",
    }
    if loss["verdict"] not in said:
        return why
    change = "" if loss["change_nats"] is None else f"{loss['change_nats']:+.5f} nats, "
    return f"time: {why}; val_loss: {said[loss['verdict']]} ({change}margin {loss['margin_nats']:g})"
