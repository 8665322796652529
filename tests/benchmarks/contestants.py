"""Who is believed: planted cheats and honest contestants, each run and audited as its user would.

    .venv/bin/python tests/benchmarks contestants cheats [NAME ...]     each cheat once: which check caught it
    .venv/bin/python tests/benchmarks contestants honest [NUM_RUNS]     honest ones in rotation: who was accused

A cheat is caught where its record is not complete, is invalid, carries a doubt about the contestant (a disturbed
machine is no such doubt), fails `verify` or fails `audit`; a script that moves time or work within the tolerances,
where a race with the honest one shows the time that it moved, does not call it faster and does not count a lower loss.
An honest contestant is accused where any of the former holds.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
PLANTED = REPO / "tests" / "planted"
BIGRAM = PLANTED / "contestants" / "bigram.py"
OWN = "tests/planted/contestants/own.py"  # relative: a record keeps no private path
LIARS = OWN.replace("own.py", "liars.py")
SMALL = ("model.num_layers=2", "model.width=64", "model.num_heads=2", "hardware.num_threads=1")
ON_TRACK = ("track=cpu_nano", "hardware=cpu")

CHEATING_SCRIPTS = (
    "half_the_time", "patched_clock", "three_percent_less", "works_off_the_clock", "trains_in_validations",
    "prints_at_the_end", "trains_on_val", "reads_by_cat", "opens_train_once", "trains_before_its_clock",
    "lowers_val_loss", "lowers_gradually", "lowers_a_little", "scales_val_loss", "constant_val_loss",
    "validates_on_128", "easy_half", "sees_the_target", "knows_val",
)  # fmt: skip
WITHIN_TOLERANCES = ("three_percent_less", "trains_in_validations")  # of a single run: a race must refuse their win
NOT_CAUGHT = dict.fromkeys(WITHIN_TOLERANCES, "NOT CAUGHT (on a busy machine a race may show too little: race again)")
NUM_RACED = 10  # runs an arm, with seeds from 0 on: trains_in_validations has the lower mean loss
CHEATING_MODELS = (
    "ScaledLoss", "ScaledAtTheEnd", "EasyTokens", "StashedTargets", "RemembersValidation", "TrainsInEvaluation",
    "SeesTheNext", "SeesTheNextLater", "SeesOtherRows", "SeesItsBlock", "TrainsInItsInit", "SlowsTheClock",
)  # fmt: skip


def _script(variant, *overrides):
    return (*ON_TRACK, f"script={BIGRAM}", f"script.args=[{variant},'--seed={{seed}}']", *overrides)


def _own(name, file=OWN):
    return (*ON_TRACK, *SMALL, "model=gpt2", f"model.arch={file}:{name}")


LYING_MODELS = ("OwnTensors", "ReadsTheStack", "ReplacesTheLoader", "LooksAheadUnlessExamined", "LowersWhatIsWritten")
CHEATS = {name: _script(name) for name in CHEATING_SCRIPTS} | {name: _own(name) for name in CHEATING_MODELS}
CHEATS |= {name: (*_own(name, LIARS), "checkpoint.save=true") for name in LYING_MODELS}
HONEST = {
    **{name: _script(name) for name in ("plain", "late_lines", "long_validations", "opens_every_step", "memory_maps")},
    "late_compile": _script("late_compile"),
    "modded_two_ranks": (
        *ON_TRACK, f"script={PLANTED}/scripts/modded/train_gpt.py", "script.args=['20']", "hardware.num_processes=2",
    ),
    "nanogpt": (
        *ON_TRACK, f"script={PLANTED}/scripts/nano/train.py", "script.args=['--max_iters=40','--seed={seed}']",
        "script.raw_data=true", "script.data=data/toy",
    ),
    "Honest": _own("Honest"),
    **{model: (*ON_TRACK, *SMALL, f"model={model}") for model in ("gpt2", "modern", "windowed")},
    "muon": (*ON_TRACK, *SMALL, "model=modern", "optim=muon"),
    "bfloat16": (*ON_TRACK, *SMALL, "hardware.dtype=bfloat16"),
    "two_ranks": (*ON_TRACK, *SMALL, "hardware.num_processes=2"),
}  # fmt: skip


def main(kind="cheats", *arguments):
    with tempfile.TemporaryDirectory() as results:
        if kind == "cheats":
            return _cheats(results, arguments or CHEATS)
        return _honest(results, int(arguments[0]) if arguments else len(HONEST))


def _cheats(results, names):
    through = []
    for name in names:
        caught_by = examined(results, CHEATS[name]) or wins_nothing(results, name)
        print(f"{name:26} {caught_by or NOT_CAUGHT.get(name, 'NOT CAUGHT')}", flush=True)
        through += [name] if caught_by is None else []
    print(
        f"{len(list(names)) - len(through)} of {len(list(names))} caught{': not ' * bool(through)}{', '.join(through)}"
    )
    return 1 if through else 0


def _honest(results, num_runs):
    """Also says how often a run was set aside because the machine disturbed it, which accuses nobody."""
    accused, disturbed, started_s = [], Counter(), time.monotonic()
    names = list(HONEST)
    for number in range(num_runs):
        name = names[number % len(names)]
        is_first_round = number < len(names)
        reason = examined(results, (*HONEST[name], f"seed={number}"), audits=is_first_round, disturbed=disturbed)
        if reason:
            accused.append((name, reason))
            print(f"run {number}: {name}: {reason}", flush=True)
    load = os.getloadavg()[1]
    print(f"{num_runs} runs in {time.monotonic() - started_s:.0f} s at load {load:.1f}: {len(accused)} accused")
    print(f"set aside for the machine: {dict(disturbed)}")
    return 1 if accused else 0


def examined(results, overrides, audits=True, disturbed=None):
    """Runs, verifies and audits one contestant.  Returns what is held against it; None: nothing is."""
    from bench.record import rows

    before = {path.parent for path in Path(results).glob("*/*/run.json")}
    done = _bench(results, "run", *overrides)
    new_folders = {path.parent for path in Path(results).glob("*/*/run.json")} - before
    if len(new_folders) != 1:
        return f"refused: {(done.stderr or done.stdout).strip().splitlines()[-1][:140]}"
    (folder,) = new_folders
    run = json.loads((folder / "run.json").read_text())
    if run["status"] != "complete":
        return f"{run['status']}: {run['failure']['message'][:140]}"
    if run["validity"] == "invalid":
        return f"invalid: {run['validity_reasons'][0][:140]}"
    disturbances = rows.row_of(run)["machine_doubts"]
    if disturbed is not None:
        disturbed.update(["disturbed"] * bool(disturbances))
    doubts = [reason for reason in run["validity_reasons"] if reason not in disturbances]
    if doubts:
        return f"doubted: {doubts[0][:140]}"
    if (verified := _bench(results, "verify", str(folder))).returncode:
        return f"verify: {verified.stdout.strip()[-140:]}"
    if audits and (audited := _bench(results, "audit", str(folder))).returncode == 1:
        return f"audit: {audited.stdout.strip().splitlines()[-1][:140]}"
    return None


def wins_nothing(results, name):
    """Races a script that no check caught against the honest one.  Returns why it wins nothing; None: it may win."""
    if name not in WITHIN_TOLERANCES:
        return None
    script = f"script={BIGRAM} \"script.args=[{{}},'--seed={{{{seed}}}}']\""
    arms = f"A={script.format('plain')}", f"B={script.format(name)}"
    done = _bench(results, "race", *arms, f"n={NUM_RACED}", "seed=0", *ON_TRACK, "--anyway", "--json")
    if done.returncode not in (0, 2):
        raise RuntimeError(done.stderr or done.stdout)
    return refused_win(json.loads(done.stdout)["result"]["against"]["B"])


def refused_win(race):
    """Returns why neither time nor loss of a Comparison with the honest script is the cheat's win; None: one may be.

    That the race shows no difference is not enough: the time that the cheat does not count must be shown.
    """
    from bench.compare import effects

    time, change = race["time"], race["val_loss"]["change"] or 0.0
    if race["verdict"] == "faster" or not effects.spends_more_outside(time):
        return None
    if change < 0 and effects.NOT_COUNTED not in race["flags"]:
        return None
    outside = time["outside"]
    clocks = f"{time['change_pct']:+.2f} % by its own clock, {outside['change_pct']:+.2f} % by the launcher's"
    extra = f"{outside['extra_s']:.3f} s more outside its own (p = {outside['extra_p']:.1g})"
    loss = f", loss {change:+.3f} nats{' not counted' * (change < 0)}"
    return f"race: {race['verdict']}: {clocks}, {extra}{loss}"


def _bench(results, *args):
    env = os.environ | {"SPEEDRUN_RESULTS": str(results), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run([sys.executable, "-m", "bench", *args], cwd=REPO, env=env, capture_output=True, text=True)
