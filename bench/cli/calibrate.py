"""How small a difference can this machine measure?  ./run.sh calibrate [n=5] [overrides]      same code, A B B A

Prints the noise floor of this session, the MDE (minimum detectable effect, 80 % power) of n runs, and how many runs
are needed to detect a given change; the verdicts of this session use it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.base import atomic, text_table, utc
from bench.base.paths import results_root
from bench.cli import arguments
from bench.compare import calibration, target, wording
from bench.launch import console, launcher, ready, summary
from bench.launch.console import say
from bench.launch.prepare import prepare, requested_config
from bench.plans.race.plan import MAX_N
from bench.record import ledger, run_folder
from bench.record.rows import row_of
from bench.record.shape import CALIBRATION

DEFAULT_N = 5
ORDER = "ABBA"


def main(argv: list[str]) -> int:
    """Exit codes: 0 calibrated, 1 a run failed or the machine disturbed them (nothing is kept), 2 usage error."""
    args = _parser().parse_intermixed_args(argv)
    n, overrides = _n_and_overrides(args.overrides)
    with console.output(args.quiet, args.json):
        warm_up, *runs = _make_runs(n, overrides, args.anyway, ["calibrate", *argv])
    if len(runs) < 2 * n or runs[-1]["status"] != "complete":
        if args.json:
            print(json.dumps({"runs": [summary.as_json(run) for run in (warm_up, *runs)]}, indent=1))
        return 1
    if len({run["code"]["source_sha256"] for run in runs}) > 1:
        raise ValueError("the code or conf/ changed between the runs, which then measure more than noise: run it again")
    rows = [row_of(run_folder.read(run["folder"])) for run in runs]
    # runs of A and of B, in the order of their starts: A B B A A B B A ...
    a_rows, b_rows = ([row for number, row in enumerate(rows) if ORDER[number % len(ORDER)] == arm] for arm in "AB")
    try:
        noise = calibration.calibrate(a_rows, b_rows) | {"made_at": utc.now(), "warm_up_run": warm_up["run_id"]}
    except ValueError as error:
        if not any(row["machine_doubts"] for row in rows):
            raise
        say("not kept", f"{error}\ntry: stop other programs, then calibrate again", always=True)
        return 1
    path = None if noise["doubts"] else keep(noise)
    as_text = f"{text(noise)}\n\n{_end(noise, path)}"
    print(json.dumps(noise | {"file": path and path.name}, indent=1) if args.json else as_text)
    return 0 if path else 1


def check(argv: list[str]) -> None:
    """Raises ValueError for arguments that make no run, before they are submitted with cluster=slurm."""
    requested_config(_n_and_overrides(_parser().parse_intermixed_args(argv).overrides)[1])


def _end(noise: dict[str, Any], path: Path | None) -> str:
    if path is None:
        why = "; ".join(noise["doubts"])
        return f"not kept, and no verdict uses it: {why}\ntry: stop other programs, then calibrate again"
    session = noise["session_id"]
    used = f"verdicts of session {session} use it" if session else "no verdict uses it: the runs name no session"
    margin_pct = target.rules_of(noise["track"]).equivalence_margin_pct
    coarse = f"\nthe floor is coarser than the margin of {margin_pct:g} %: with {noise['floor_n']} runs a side nothing"
    coarse += " is called equivalent; a quieter machine or more runs help"
    return f"kept in {path}: {used}" + coarse * (noise["floor_pct"] > margin_pct)


def keep(noise: dict[str, Any]) -> Path:
    """Writes the calibration to results/calibrations/. Returns its path."""
    stamp = noise["made_at"].replace("-", "").replace(":", "").split(".")[0]
    path = calibration.folder() / f"{stamp}Z-{noise['session_id'] or 'unknown'}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(path, noise)
    return path


def _n_and_overrides(arguments: Sequence[str]) -> tuple[int, list[str]]:
    n, overrides = DEFAULT_N, []
    for word in arguments:
        if word.startswith("n="):
            if not word[2:].isdecimal() or not 2 <= int(word[2:]) <= MAX_N:
                raise ValueError(f"{word}: use 2 or more runs per side, at most {MAX_N:,}")
            n = int(word[2:])
        else:
            overrides.append(word)
    return n, overrides


def _next_seed(config_id: str) -> int:
    """Returns the first seed after those of all started runs of a config."""
    starts = [run["start"] for run in ledger.read(results_root()).runs.values()]
    return max((start["seed"] or 0 for start in starts if start["config_id"] == config_id), default=-1) + 1


def _make_runs(n: int, overrides: list[str], anyway: bool, command: list[str]) -> list[dict[str, Any]]:
    """Makes a discarded warm-up run, then 2 n runs with fresh seeds. Returns them, up to the first that failed."""
    seeds = [word for word in overrides if word.startswith("seed=")]
    overrides = [word for word in overrides if word not in seeds]
    job = prepare([*overrides, *seeds[-1:]], say=lambda text: say("data", text))
    first_seed = job.config.seed if seeds else _next_seed(job.config_id)
    job = job.with_seed(first_seed)
    jobs = [job, *(job.with_seed(seed) for seed in range(first_seed, first_seed + 2 * n))]
    ready.agree(ready.checks(job), anyway, "the noise floor")
    tag = {"race_id": CALIBRATION, "arm": "A", "position": 0, "attempt": 1, "discarded": False}
    plan, first_plan = {"race": tag}, {"race": tag | {"discarded": True}}
    labels = ["warm-up, to be discarded", *(f"seed {job.config.seed}" for job in jobs[1:])]
    runs = []
    for run in launcher.launch_each(jobs, command, labels, plan, first_plan):
        runs.append(run)
        if run["status"] != "complete":
            break
    return runs


def text(noise: dict[str, Any]) -> str:
    """Returns the calibration as text for a person."""
    aa = noise["aa"]
    low, high = aa["ci95_pct"]
    flags = f" ({', '.join(aa['flags'])})" if aa["flags"] else ""
    runs = f"{noise['n'][0]} + {noise['n'][1]} runs of {noise['name']} ({noise['config_id'] or 'logs'})"
    mdes = [[n, wording.mde_text(pct)] for n, pct in noise["smallest_change_pct"].items()]
    needed = [[f"{pct} %", str(n or "too many")] for pct, n in noise["needed_n"].items()]
    lines = [
        f"{runs} on {noise['device']}, mean {noise['mean_s']:.2f} s, CV {noise['cv_pct']:.2f} %",
        f"A against A: {aa['change_pct']:+.2f} %, 95 % interval {low:+.2f} to {high:+.2f} %, p = {aa['p']:.2g}{flags}",
        f"noise floor: {noise['floor_pct']:.2f} %, groups of {noise['floor_n']} runs of the same code stay within it",
        "",
        text_table.render(["runs a side", "MDE (80 % power)"], mdes, [True, True]),
        "",
        text_table.render(["to show a change of", "runs a side"], needed, [True, True]),
    ]
    return "\n".join(lines)


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh calibrate", main=main)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="n=5 runs per side; settings as for run")
    parser.flag("--anyway", help=ready.ANYWAY)
    parser.forms("print what is kept as JSON, or the runs if one failed", says_more=True)
    return parser
