"""The numbers of comparisons as CSV, a metric a line, unrounded."""

import csv
import io
from collections.abc import Iterable

from bench.compare.measures import MEASURES, unit_of
from bench.compare.verdict import Comparison

COLUMNS = ("against", "metric", "verdict", "a_mean", "b_mean", "change", "unit")
COLUMNS += ("ci95_low", "ci95_high", "p", "p_holm", "n_a", "n_b", "mde_pct", "baseline", "candidate")


def text(results: Iterable[tuple[str, Comparison]]) -> str:
    """[(name of B, Comparison)] -> CSV with a head line; the unit of change is per cent, of val_loss nats."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, result in results:
        verdicts = {"time": result["verdict"], "val_loss": result["val_loss"]["verdict"]}
        for key, (metric, mean_key, *_) in MEASURES.items():
            measure, (end, unit, _) = result[key], unit_of(key)
            numbers = [*measure[mean_key], measure[f"change_{end}"], unit.strip() or end]
            numbers += [*(measure[f"ci95_{end}"] or ("", "")), measure["p"], measure.get("p_holm"), *measure["n"]]
            writer.writerow([name, metric, verdicts.get(key, ""), *numbers, measure.get("mde_pct"), *result["arms"]])
    return out.getvalue()
