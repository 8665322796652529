"""Fresh seeds against what was recorded: is the record one of them?"""

from collections.abc import Sequence

from bench.base import stats
from bench.compare import target
from bench.plans.replay import outcomes

CONFIDENCE = 0.99  # of the interval in which a record of the same distribution lies


def prediction_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Where one more value of the same normal distribution lies: mean +- t(n - 1) * sd * sqrt(1 + 1/n).

    values: at least two.  NIST/SEMATECH e-Handbook of Statistical Methods, section 7.2 and 1.3.5.2.
    """
    n, mean = len(values), stats.mean(values)
    half = stats.student_t_quantile(0.5 + confidence / 2, n - 1) * stats.sd(values) * (1 + 1 / n) ** 0.5
    return mean - half, mean + half


def judged(
    recorded_loss: float, losses: Sequence[float], target_val_loss: float | None, p_value: float, reached: bool | None
) -> tuple[str, str, dict]:
    """Last val_losses of fresh seeds -> (word, sentence, numbers).

    target_val_loss, p_value: the track's; reached: whether the record reached the target, None without one.
    """
    low, high = prediction_interval(losses)
    facts = {"val_losses": list(losses), "prediction_interval": [low, high], "recorded_val_loss": recorded_loss}
    is_within = low <= recorded_loss <= high
    said = [
        f"the recorded val_loss {recorded_loss:.4f} is {'within' if is_within else 'outside'} {low:.4f} to {high:.4f}, "
        f"where {CONFIDENCE:.0%} of runs lie by {len(losses)} fresh seeds (mean {stats.mean(losses):.4f})"
    ]
    word = outcomes.REPRODUCED if is_within else outcomes.DIFFERS
    if target_val_loss is not None and reached:
        result = target.of_losses(losses, target_val_loss, p_value)
        facts |= {"target_val_loss": target_val_loss, "p": result["p"]}
        is_below = f"{'' if result['below'] else 'not shown to be '}below {target_val_loss:g}"
        p = "no spread to judge by" if result["p"] is None else f"p = {result['p']:.2g}"
        said.append(f"their mean is {is_below} ({p})")
        word = word if result["below"] else outcomes.DIFFERS
    return word, "; ".join(said), facts
