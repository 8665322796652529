"""What a comparison measures, in words: names and units, the cells of a table, sentences.  For text, pages and csv."""

from collections.abc import Mapping, Sequence

from bench.base.terminal import text_table

MEASURES = {  # key of the Comparison: (name, key of the means, their unit, decimals)
    "time": ("time", "mean_s", "s", 3),
    "val_loss": ("val_loss", "mean", "", 5),
    "energy": ("energy", "mean_j", "J", 1),
    "memory": ("peak memory", "mean_gib", "GiB", 3),
    "compile": ("compile time", "mean_s", "s", 2),
}
MAX_MDE_PCT = 1000
HEAD = ("change", "95 % interval", "p", "n", "CV %", "MDE (80 % power)")


def unit_of(key: str) -> tuple[str, str, int]:
    """(end of the keys of its change, the change's unit, decimals)."""
    return ("nats", "", 5) if key == "val_loss" else ("pct", " %", 2)


def known(result: Mapping) -> list[str]:
    """Keys of what was measured of some run.  result: a Comparison of any version."""
    means = {key: (result.get(key) or {}).get(mean_key) or () for key, (_, mean_key, *_) in MEASURES.items()}
    return [key for key in MEASURES if any(mean is not None for mean in means[key])]


def cells(result: Mapping, key: str) -> list[str]:
    """The means of both arms, then those of HEAD; "" for what is unknown.  p is Holm's where there is one."""
    _, mean_key, unit, decimals = MEASURES[key]
    measure, (end, sign, digits) = result[key], unit_of(key)
    change, cvs_pct = measure.get(f"change_{end}"), measure.get("cv_pct")
    if not cvs_pct:  # of losses
        spreads = zip(measure["sd"], measure["mean"], strict=True)
        cvs_pct = [None if sd is None or not mean else 100 * sd / mean for sd, mean in spreads]
    return [
        *("" if mean is None else f"{mean:,.{decimals}f} {unit}".rstrip() for mean in measure[mean_key]),
        "" if change is None else f"{change:+.{digits}f}{sign}",
        interval(measure.get(f"ci95_{end}"), digits, sign),
        p_words(measure.get("p") if measure.get("p_holm") is None else measure["p_holm"]),
        ", ".join(map(str, measure["n"])),
        ", ".join("-" if cv is None else f"{cv:.2f}" for cv in cvs_pct),
        mde_words(measure.get("mde_pct")),
    ]


def mde_words(mde_pct: float | None) -> str:
    """The MDE with its unit; beyond MAX_MDE_PCT its digits say nothing.  "" for None."""
    if mde_pct is None:
        return ""
    return f"over {MAX_MDE_PCT} %" if mde_pct > MAX_MDE_PCT else f"{text_table.two_digits(mde_pct)} %"


def interval(edges: Sequence[float] | None, decimals: int, unit: str) -> str:
    """low, high -> words with the unit (" %") at their end; "" for None."""
    return "" if edges is None else f"{edges[0]:+.{decimals}f} to {edges[1]:+.{decimals}f}{unit}"


def p_words(p: float | None) -> str:
    """As many digits as say something; "" for None."""
    return "" if p is None else f"{p:.2g}" if p >= 1e-4 else f"{p:.1e}" if p >= 1e-16 else "<1e-16"


def p_sentence(p: float | None) -> str:
    """ "p = 0.011", "p < 1e-16"; "p = -" for None."""
    words = p_words(p)
    return f"p < {words[1:]}" if words.startswith("<") else f"p = {words or '-'}"


def loss_sentences(loss: Mapping, arms: Sequence[str]) -> list[str]:
    """What is shown of the losses against the target and against the margin, or why they are not compared."""
    if loss.get("change_nats") is None:
        return [f"val_loss is not compared: {' and '.join(loss['reasons'])}"] if loss.get("reasons") else []
    lines = []
    if loss.get("target") is not None and any(p is not None for p in loss["p_target"]):
        tests = [
            f"{name} {p_sentence(p)}{' (below)' if below else ' (not shown)' if p is not None else ''}"
            for name, p, below in zip(arms, loss["p_target"], loss["below_target"], strict=True)
        ]
        needed = f"needed p < {loss['target_p_value']:g}"
        lines.append(f"mean val_loss below {loss['target']:g}, one-sided t, {needed}: {', '.join(tests)}")
    rise, p = f"a rise of {loss['margin_nats']:g} nats", p_sentence(loss.get("p_not_worse"))
    words = {
        "waived": "the losses of both arms are the same bit for bit: there is nothing to test",
        "not_worse": f"{arms[1]}'s val_loss is not worse: {rise} is excluded ({p})",
        "worse": f"{arms[1]}'s val_loss is worse, and {rise} is not excluded",
        "inconclusive": f"not shown that {arms[1]}'s val_loss is not worse: {rise} is not excluded ({p})",
    }
    return lines + ([words[loss["verdict"]]] if loss["verdict"] in words else []) + list(loss.get("remarks") or ())
