"""What rounding does to runs, and which changes of a setting a replay on another machine sees.

    .venv/bin/python tests/benchmarks rounding FOLDER

Trains cpu_nano 50 times, half an hour on two quiet cores with AVX-512; runs that FOLDER already has
are not made again.  Honest runs are of one config and seed at other instruction sets and numbers of threads; changed
ones have another setting.  Writes plans/replay/rounding.json (what rounding does before any update) and prints how far
honest and changed records lie from replays at the other instruction sets, as plans/replay/outcomes.py measures it.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

from bench.plans.replay import outcomes
from bench.record import step_files

REPO = Path(__file__).resolve().parents[2]
THREADS = "threads1"
CONFIGS = {"gpt2": [], "modern": ["model=modern"], "gpt2-muon": ["optim=muon"]}
SEEDS = {"gpt2": (0, 1, 2)}  # of the others 0
CHANGES = {
    "lr": ["optim.lr=0.001818"],
    "beta2": ["optim.beta2=0.9595"],
    "eps": ["optim.eps=1e-7"],
    "wd": ["optim.weight_decay=0.0"],
    "wd101": ["optim.weight_decay=0.101"],
}  # of gpt2 with adamw
SEEN = {  # in bfloat16; in float32 all are refused
    "lr": (">=", outcomes.REFUSED_SHARE),
    "beta2": (">=", outcomes.REFUSED_SHARE),
    "eps": (">=", outcomes.HOLDS_SHARE),
    "wd": ("<=", outcomes.REFUSED_SHARE),
    "wd101": ("<=", outcomes.HOLDS_SHARE),
}


def measure(folder):
    """Returns [(what, number, sign, target)]."""
    folder = Path(folder)
    honest, changed = {}, {}
    for dtype in outcomes.INSTRUCTION_SETS:
        for config, overrides in CONFIGS.items():
            for seed in SEEDS.get(config, (0,)):
                honest[dtype, config, seed] = {at: losses(folder, dtype, overrides, seed, at) for at in levels(dtype)}
        for change, overrides in CHANGES.items():
            changed[dtype, change] = losses(folder, dtype, overrides, 0, "native")
    kept = {
        dtype: first_frac(runs for (of, _, _), runs in honest.items() if of == dtype)
        for dtype in outcomes.INSTRUCTION_SETS
    }
    outcomes.ROUNDING_FILE.write_text(json.dumps({"schema_version": 1, "first_frac": kept}, indent=1) + "\n")
    outcomes.first_frac.cache_clear()
    return list(_rows(honest, changed))


def _rows(honest, changed):
    for dtype in outcomes.INSTRUCTION_SETS:
        shares = [
            share(runs, recorded, at, dtype)
            for (of, _, _), runs in honest.items()
            if of == dtype
            for at, recorded in runs.items()
        ]
        flat = [value for run_shares in shares for value in run_shares]
        yield f"{dtype}: honest records that were replayed elsewhere", len(flat), ">=", 1
        yield f"{dtype}: the farthest of them, in multiples of rounding", max(flat), "<=", outcomes.REFUSED_SHARE
        yield f"{dtype}: of them held", sum(value <= outcomes.HOLDS_SHARE for value in flat) / len(flat), ">=", 0.8
        for change in CHANGES:
            near = min(share(honest[dtype, "gpt2", 0], changed[dtype, change], None, dtype))
            sign, target = (">=", outcomes.REFUSED_SHARE) if dtype == "float32" else SEEN[change]
            yield f"{dtype}: {change}, the nearest to a replay", near, sign, target


def share(runs, recorded, at, dtype):
    """How far a record lies from replays at each other level; levels that gave its own bits do not count."""
    perturbed = list(levels(dtype))[1:-1]
    for replay_at, replay in runs.items():
        others = [runs[level] for level in perturbed if level not in (at, replay_at)]
        if replay_at == at or not others:
            continue
        pairs = [outcomes.fracs_between(*pair) for pair in itertools.combinations([replay, *others], 2)]
        moved = outcomes.moved_by_rounding(outcomes.fracs_between(recorded, replay), pairs, outcomes.first_frac(dtype))
        yield max(window.share for window in moved)


def levels(dtype):
    """Returns {name: variables} of the machine as it is, of the perturbed ones, and of one thread."""
    return (
        {"native": {}} | {f"level{n}": env for n, env in enumerate(outcomes.INSTRUCTION_SETS[dtype], 1)} | {THREADS: {}}
    )


def first_frac(groups):
    """Returns {kind of loss: the largest difference of a pair before any update, or float32's last place if more}."""
    largest = dict.fromkeys(outcomes.LOSSES, 2.0**-23)
    for runs in groups:
        for pair in itertools.combinations(runs.values(), 2):
            for (step, kind), frac in outcomes.fracs_between(*pair).items():
                largest[kind] = max(largest[kind], frac if step <= 1 else 0.0)
    return {kind: float(f"{frac:.3g}") for kind, frac in largest.items()}


def losses(folder, dtype, extra, seed, at):
    """Returns {(step, kind of loss): loss} of a run, which is made if it is not there."""
    extra = [*extra, f"seed={seed}", f"hardware.dtype={dtype}", f"hardware.num_threads={1 if at == THREADS else 2}"]
    results = folder / "-".join([at, *extra]).replace("/", "_")
    if not list(results.glob("cpu_nano/*/run.json")):
        print(f"training {at} {' '.join(extra)} ...", file=sys.stderr, flush=True)
        env = os.environ | levels(dtype)[at] | {"SPEEDRUN_RESULTS": str(results)}
        command = [sys.executable, "-m", "bench", "run", "track=cpu_nano", "hardware.device=cpu", *extra]
        subprocess.run(command, cwd=REPO, env=env, check=True, stdout=subprocess.DEVNULL)
    (run,) = results.glob("cpu_nano/*/run.json")
    rows = step_files.read(run.parent, strict=True)
    return {(row["step"], kind): row[kind] for row in rows for kind in outcomes.LOSSES if row.get(kind) is not None}
