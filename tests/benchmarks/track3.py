"""The results of modded-nanogpt's track 3 as this program's importer reads their logs -> tests/track3.csv.gz.

python -m tests.benchmarks.track3 CLONE      a clone of https://github.com/KellerJordan/modded-nanogpt (MIT licence)

A row per run and validation near the step that the result claims: result,step,mean,n (of upstream's table), run,
code (a number for each; empty: the log embeds none), seed, at, val_loss.  tests/test_track3.py judges them.
"""

import csv
import gzip
import io
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.claims import claim as claims
from bench.record.importers import dialects

FOLDER = Path("records/track_3_optimization")
OUT = Path(__file__).parent.parent / "track3.csv.gz"
COLUMNS = ("result", "step", "mean", "n", "run", "code", "seed", "at", "val_loss")
# | 14 | 3150(!) | 3.2776 (n=4)V | ... | [log](results/20260504_contra_muon_mlp_soapish/0248....txt) |
ROW = re.compile(r"\| (\d+) \| (\d+)(?:\(!\))? \| ([\d.]+) \(n=(\d+)\)\S+ \|.*?\[log\]\(results/([^)]+)\)")
NEAR_STEPS = 150  # before the claimed step, and a little after it
# where the logs of a result are not all that lies in the folder that its row links to
LOGS = {
    19: "20260508_klsoap_h_clean_tuple_sweep/b1095_sh090/*.txt",
    23: "20260508_muown/a26c8aa2-993d-443f-b931-845724d07015.txt",
    44: "20260609_soap_f1_auxb2_clean/H100_*.txt",
}


class Result(NamedTuple):
    """A row of upstream's table."""

    number: int
    step: int
    mean: float
    n: int
    logs: str  # glob below results/


def results(readme: str) -> list[Result]:
    """Returns the results in upstream's README of the track, the oldest first."""
    entries = []
    for number, step, mean, n, link in ROW.findall(readme):
        folder = link.split("/")[0]
        logs = LOGS.get(int(number), f"{folder}/**/*.txt" if "/" in link else folder)
        entries.append(Result(int(number), int(step), float(mean), int(n), logs))
    return entries


def rows_of(clone: Path, result: Result) -> Iterator[tuple[object, ...]]:
    """Yields what each run of the result validated near the claimed step, each run once."""
    runs: list[tuple[str | None, int | None, dict[int, float]]] = []
    for path in sorted((clone / FOLDER / "results").glob(result.logs)):
        for record, rows in dialects.read_file(path)[0]:
            curve = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
            curve = claims.averaged_of(record) or curve
            runs.append(((record["imported"] or {})["code_id"], record["seed"], curve))
    runs.sort(key=lambda run: -len(run[2]))
    kept: list[tuple[str | None, int | None, dict[int, float]]] = []
    for run in runs:
        if not any(claims.are_one(run[2], other[2]) for other in kept):
            kept.append(run)
    codes = {code: str(number) for number, code in enumerate(dict.fromkeys(run[0] for run in kept if run[0]))}
    for number, (code, seed, curve) in enumerate(kept):
        for at, val_loss in curve.items():
            if result.step - NEAR_STEPS <= at <= result.step + NEAR_STEPS // 5:
                yield (*result[:4], number, codes.get(code, ""), "" if seed is None else seed, at, val_loss)


def kept() -> Iterator[tuple[int, int, float, int, list[dict[str, Any]]]]:
    """(result, step, mean, n of upstream's table, [{"seed", "code", "curve"}] of its runs) of each result in OUT."""
    with gzip.open(OUT, "rt") as file:
        rows = list(csv.DictReader(file))
    for number, group in itertools.groupby(rows, lambda row: int(row["result"])):
        result_rows, runs = list(group), []
        for _, lines in itertools.groupby(result_rows, lambda row: row["run"]):
            run_rows = list(lines)
            curve = {int(row["at"]): float(row["val_loss"]) for row in run_rows}
            runs.append({"seed": run_rows[0]["seed"] or None, "code": run_rows[0]["code"], "curve": curve})
        first = result_rows[0]
        yield number, int(first["step"]), float(first["mean"]), int(first["n"]), runs


def main(argv: list[str]) -> int:
    """Write OUT from a clone.  Exit codes: 0 written, 2 usage error."""
    if len(argv) != 1 or not (readme := Path(argv[0]) / FOLDER / "README.md").is_file():
        print(__doc__, file=sys.stderr)
        return 2
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    entries = results(readme.read_text())
    for result in entries:
        writer.writerows(rows_of(Path(argv[0]), result))
    OUT.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))
    print(f"{OUT}: {len(entries)} results, {OUT.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
