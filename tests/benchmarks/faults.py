"""Every file operation of every command that writes records, failed in every way, and processes killed at any moment.

    .venv/bin/python tests/benchmarks faults [NUM_PLACES [NUM_KILLS [SEED [COMMAND,...]]]]

NUM_PLACES: of all commands together, drawn by SEED; "all" (the default) takes hours, "each" tries one kind of fault at
every operation.
NUM_KILLS: 200, of runs of one and two processes, of scripts' runs and of the last run of races, every second one of a
kind of process in turn.  COMMAND: run, pair (two processes), script (a run of one), sweep, race, resume (the last run
of a race, and its end), import, publish.  Each place that leaves something wrong is printed as JSON when it is found
(tests/disk_faults_judge.py says what may never be so).
"""

import itertools
import json
import random
import sys
import tempfile
import time

import disk_faults
from disk_faults_scenarios import SCENARIOS

NUM_KILLS = 200
ROLES = {  # command: kinds of its processes; "": any
    "pair": ("worker", "sampler", "agent", "guard", ""),
    "run": ("", "sampler", "worker", "agent"),
    "script": ("", "sampler"),
    "resume": ("",),
}
SHARES = {"run": 9, "pair": 3, "script": 2, "sweep": 3, "race": 1, "resume": 3, "import": 2, "publish": 3}


def measure(num_places="all", num_kills=NUM_KILLS, seed="0", commands=""):
    """Returns [(what, number, sign, target)]."""
    chance, outcomes, commands = random.Random(seed), [], commands.split(",") if commands else list(SHARES)
    with tempfile.TemporaryDirectory() as folder, disk_faults.Workshop(folder) as shop:
        if num_places != "0":
            for name in commands:
                outcomes += _places(shop, name, chance, num_places, sum(SHARES[command] for command in commands))
        kills = [(name, role) for name in commands for role in ROLES.get(name, ())]
        for name, role in itertools.islice(itertools.cycle(kills), int(num_kills)):
            outcomes.append(_shown(shop.kill(SCENARIOS[name], chance, role)))
    hits = [outcome for outcome in outcomes if outcome.hit]
    wrong = [outcome for outcome in hits if outcome.wrong]
    return [
        ("places and kills that hit", len(hits), ">=", 1),
        ("of them that left something lost or false", len(wrong), "<=", 0),
        ("records that were looked at", sum(outcome.num_records for outcome in hits), ">=", 1),
    ]


def _places(shop, name, chance, num_places, all_shares):
    scenario, operations = SCENARIOS[name], shop.count(SCENARIOS[name])
    print(f"{name}: {len(operations)} operations", file=sys.stderr, flush=True)
    if num_places == "all":
        chosen = [place for operation in operations for place in disk_faults.every_place(operation)]
    else:
        wanted = len(operations) if num_places == "each" else round(int(num_places) * SHARES[name] / all_shares)
        chosen = disk_faults.places(operations, chance, wanted)
    for number, kind in chosen:
        yield _shown(shop.fault(scenario, number, kind))


def _shown(outcome):
    if outcome.wrong:
        print(json.dumps({"place": outcome.place, "code": outcome.code, "wrong": outcome.wrong}), flush=True)
    verdict = "WRONG" if outcome.wrong else "ok"
    print(f"{time.strftime('%H:%M:%S')} {verdict} {outcome.place}", file=sys.stderr, flush=True)
    return outcome
