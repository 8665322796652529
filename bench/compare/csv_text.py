"""The numbers of comparisons as CSV, a metric a line, unrounded."""

import csv
import io
from collections.abc import Iterable

from bench.compare.text import METRICS
from bench.compare.verdict import Comparison

COLUMNS = ("against", "metric", "verdict", "a_mean", "b_mean", "change", "unit")
COLUMNS += ("ci95_low", "ci95_high", "p", "p_holm", "n_a", "n_b", "mde_pct", "baseline", "candidate")


def text(results: Iterable[tuple[str, Comparison]]) -> str:
    """[(name of B, Comparison)] -> CSV with a head line; the unit of change is per cent, of val_loss nats."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, result in results:
        for key, (metric, mean_key, _, _) in METRICS.items():
            numbers, verdict = result[key], result["verdict"] if key == "time" else ""
            low, high = numbers["ci95_pct"] or ("", "")
            change = [*numbers[mean_key], numbers["change_pct"], "%", low, high, numbers["p"], numbers["p_holm"]]
            writer.writerow([name, metric, verdict, *change, *numbers["n"], numbers["mde_pct"], *result["arms"]])
        loss = result["val_loss"]
        low, high = loss["ci95_nats"] or ("", "")
        change = [*loss["mean"], loss["change_nats"], "nats", low, high, loss["p"], ""]
        writer.writerow([name, "val_loss", loss["verdict"], *change, *loss["n"], "", *result["arms"]])
    return out.getvalue()
