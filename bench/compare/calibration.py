"""Calibrations: by how much runs of the same code differ on this machine, in this session.

A calibration is a JSON file in results/calibrations/.  The noise floor of a session bounds the difference between two
groups of n runs of the same code in 95 of 100 cases (floor_for() converts it to other n).  A smaller difference is
never reported as faster or slower.  A calibration whose runs were disturbed is not kept.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict, cast

from bench.base import stats
from bench.base.paths import results_root
from bench.base.reading import json_file
from bench.compare import eligibility, verdict
from bench.compare.effects import DRIFT_PCT, MIN_FLOOR_PCT, SESSION_DRIFT_PCT
from bench.record.rows import Row

SCHEMA_VERSION = 1
FOLDER = "calibrations"
NS = (2, 3, 5, 8, 10, 20)
CHANGES_PCT = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Kept(TypedDict):
    """The fields of a calibration file that are read back."""

    session_id: str | None
    comparability_id: str | None
    floor_pct: float | int
    floor_n: int
    cv_pct: float | int | None


class Found(Kept):
    """A calibration as find() returns it."""

    file: str  # file name
    exact: bool  # whether its runs have the requested comparability_id


def calibrate(a_rows: list[Row], b_rows: list[Row]) -> dict[str, Any]:
    """Returns the calibration, without its time stamp, from the rows of the two groups of an A/A race.

    Raises ValueError if the groups are not comparable, fewer than two runs a side are timed, or all times are equal.
    """
    aa = verdict.compare_rows(a_rows, b_rows)
    if not aa["comparable"]:
        raise ValueError(f"these runs cannot be used to calibrate: {aa['reasons'][0]}")
    excluded = {run["run_id"] for run in aa["excluded"]}
    timed = [[row for row in rows if eligibility.is_timed(row)] for rows in (a_rows, b_rows)]
    groups = [[row for row in rows if row["run_id"] not in excluded] for rows in timed]
    ns, rows = [len(group) for group in groups], groups[0] + groups[1]
    if min(ns) < 2:
        raise ValueError(f"{ns[0]} and {ns[1]} runs have a time, and 2 a side are needed: give more runs, n=5")
    times_s = eligibility.times_s(rows)
    spread = stats.sd([math.log(time_s) for time_s in times_s])
    if not spread:
        raise ValueError(f"{len(rows)} identical times: not measured? give runs with times of their own")
    mdes = {n: stats.smallest_difference((spread, spread), (n, n)) for n in NS}
    losses = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    first, flags = rows[0], [flag for flag in aa["flags"] if flag != "uncalibrated"]
    return {
        "schema_version": SCHEMA_VERSION,
        **{key: first[key] for key in ("session_id", "comparability_id", "config_id", "name", "track", "device")},
        "runs": [row["run_id"] for row in sorted(rows, key=lambda row: row["started_at"] or "")],
        "excluded": aa["excluded"],
        "doubts": _doubts(rows, aa["flags"]),
        "n": ns,
        "floor_pct": floor_pct(spread, len(rows) - 1, min(ns)),
        "floor_n": min(ns),
        "cv_pct": stats.cv_pct(times_s),
        "mean_s": stats.mean(times_s),
        "val_loss_sd": stats.sd(losses),
        "aa": aa["time"] | {"verdict": aa["verdict"], "flags": flags},
        # a change below the minimum floor gets no verdict, however many runs there are
        "smallest_change_pct": {str(n): max(MIN_FLOOR_PCT, _pct(mde)) for n, mde in mdes.items() if mde is not None},
        "needed_n": {f"{change:g}": stats.needed_n(math.log1p(change / 100), spread) for change in CHANGES_PCT},
    }


def _doubts(rows: list[Row], flags: list[str]) -> list[str]:
    """Returns the reasons to doubt that the machine was quiet; if there are none, the calibration may be kept."""
    disturbed = [row["machine_doubts"] for row in rows if row["machine_doubts"]]
    doubts = [f"the machine disturbed {len(disturbed)} of {len(rows)} runs: {disturbed[0][0]}"] if disturbed else []
    num_marked = sum(row["validity"] == "suspect" and not row["machine_doubts"] for row in rows)
    if "suspect-records" in flags and num_marked:
        doubts.append(f"{num_marked} of {len(rows)} runs are suspect by their own records")
    return doubts


def floor_pct(spread: float, df: int, n: int) -> float:
    """Returns the 95 % prediction band for the difference between two groups of n runs of the same code.

    It is t * sd * sqrt(2 / n).  spread: sd of log run times, estimated with df degrees of freedom.
    """
    return _pct(stats.student_t_quantile(0.975, df) * spread * math.sqrt(2 / n))


def floor_for(kept: Kept, num_a: int, num_b: int) -> float:
    """Scales the floor to groups of num_a and num_b runs, as the standard error of the difference does."""
    shrink = math.sqrt((1 / num_a + 1 / num_b) * kept["floor_n"] / 2)
    return _pct(math.log1p(kept["floor_pct"] / 100) * shrink)


def _pct(log_change: float) -> float:
    return 100 * math.expm1(log_change)


# ---- kept per session


def folder() -> Path:
    """Returns the folder of the calibrations, which may not exist yet."""
    return results_root() / FOLDER


def find(session_id: str | None, comparability_id: str | None = None) -> Found | None:
    """Returns the session's newest calibration, preferably one with this comparability_id, or None."""
    calibrations: list[Found] = []
    for path in sorted(folder().glob("*.json")):
        with contextlib.suppress(ValueError):  # not a calibration, or a damaged one
            kept = cast(Kept, json_file.read(path, Kept))
            if kept["session_id"] == session_id is not None and kept["floor_pct"] > 0:
                calibrations.append({**kept, "file": path.name, "exact": kept["comparability_id"] == comparability_id})
    return max(calibrations, key=lambda kept: (kept["exact"], kept["file"]), default=None)


def find_for_rows(rows: list[Row]) -> Found | None:
    """Returns find() for the rows' session; None if they are of several sessions."""
    sessions, ids = {row["session_id"] for row in rows}, {row["comparability_id"] for row in rows}
    return find(sessions.pop(), ids.pop() if len(ids) == 1 else None) if len(sessions) == 1 else None


def drift_pct(history: Iterable[Row], is_one_session: bool) -> float:
    """Returns the change in % that machine drift alone may cause between arms that were not interleaved.

    It is the largest difference between repeats of one config and code in the history: between the first and the second
    half of a session, or between sessions.  It is at least what public logs show (DRIFT_PCT, SESSION_DRIFT_PCT).
    """
    repeats: dict[tuple[str | None, ...], dict[str | None, list[Row]]] = {}
    for row in history:
        if eligibility.is_timed(row) and row["started_at"] and not row["machine_doubts"]:
            alike = row["config_id"], row["source_sha256"], row["device"], row["comparability_id"]
            repeats.setdefault(alike, {}).setdefault(row["session_id"], []).append(row)
    differences = [DRIFT_PCT if is_one_session else SESSION_DRIFT_PCT]
    for by_session in repeats.values():
        groups = [sorted(rows, key=lambda row: row["started_at"] or "") for rows in by_session.values()]
        if is_one_session:
            pairs = [(rows[: len(rows) // 2], rows[(len(rows) + 1) // 2 :]) for rows in groups if len(rows) >= 4]
        else:
            pairs = [pair for pair in itertools.combinations(groups, 2) if min(map(len, pair)) >= 2]
        for pair in pairs:
            first, second = (stats.mean(map(math.log, eligibility.times_s(rows))) for rows in pair)
            differences.append(_pct(abs(second - first)))
    return max(differences)
