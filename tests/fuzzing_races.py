"""Damaged races, plans and claims through the verbs, as fuzzing.py: python fuzzing_races.py RESULTS FIRST END

A race of two arms, and beside RESULTS a claim's folder of its runs: each field and file damaged, one after the other.
"""

import json
import random
import shutil
import signal
import sys
from pathlib import Path

import claimed
import fuzzing
import pytest
import yaml

NUM_VALUES = 2  # of fuzzing.WRONG, for each field


def made(results):
    """(folder of a race, folder of a claim of one of its arms)."""
    with pytest.MonkeyPatch.context() as patch:
        racers = claimed.Racers(claimed.Results(results), lambda arm, seed: 10.0 + 0.01 * seed + 0.5 * (arm == "B"))
        racers.install(patch)
        from bench.cli import judge, race

        race.main(["A=", "B=optim.beta2=0.99", "n=3"])
        (folder,) = (results / "races").glob("*")
        found = json.loads((folder / "race.json").read_text())
        runs = [str(results / run) for run in found["arms"]["A"]["runs"]]
        judge.main(["--claim", str(results.parent / "claim"), *runs])
    return folder, results.parent / "claim"


def cases(race, claim, chance):
    """(what, damage(), the file): every field with values that it cannot have, every file with texts."""
    for path in (race / "race.json", race / "plan.json", claim / "claim.yaml"):
        is_yaml = path.suffix == ".yaml"
        found = yaml.safe_load(path.read_text()) if is_yaml else json.loads(path.read_text())
        dumped = yaml.safe_dump if is_yaml else json.dumps
        for field in fuzzing.paths_of(found):
            for value in chance.sample(fuzzing.WRONG, NUM_VALUES):
                words = f"{path.name} {'.'.join(map(str, field))} = {str(value)[:20]}"
                text = dumped(fuzzing.with_value(found, field, value))
                yield words, lambda p=path, t=text: p.write_text(t), path
        for text in fuzzing.YAML if is_yaml else fuzzing.JSON:
            yield f"{path.name} {text[:25]!r}", lambda p=path, t=text: p.write_text(t), path
        for what, make in fuzzing.MAKERS:
            yield f"{path.name} is a {what}", lambda p=path, m=make: fuzzing.replaced(p, m), path


def of_the_ledger(results, chance):
    """A wrong value for every field of every line of a race's ledger."""
    path = results / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seen = set()
    for number, line in enumerate(lines):
        for key in line:
            if (line["event"], key) in seen:
                continue
            seen.add((line["event"], key))
            for value in chance.sample(fuzzing.WRONG, NUM_VALUES):
                changed = [*lines[:number], line | {key: value}, *lines[number + 1 :]]
                text = "".join(json.dumps(one) + "\n" for one in changed)
                words = f"ledger.jsonl {line['event']} {key} = {str(value)[:20]}"
                yield words, lambda t=text: path.write_text(t), path


def verbs(race, claim, results):
    """{name: words} of the calls for one damaged file."""
    of_claim = {"judge": ["judge", str(claim)], "publish": ["publish", str(claim), "--name", "x/y"]}
    return of_claim | {
        "compare": ["compare", str(race)],
        "arm": ["compare", f"{race}:A", f"{race}:B"],
        "report": ["report", str(race)],
        "look": ["race", "--look", race.name],
        "judge race": ["judge", *sorted(map(str, results.glob("cpu_nano/*")))[:2]],
        "leaderboard": ["table", "--leaderboard", str(results)],
        "table": ["table", str(results)],
    }


def main(results, first, end, seed=0):
    signal.signal(signal.SIGALRM, fuzzing._hang)
    chance, num_calls, faults = random.Random(seed), 0, []
    race, claim = made(results)
    fuzzing.bounded()
    listed = [*cases(race, claim, chance), *of_the_ledger(results, chance)]
    for number, (what, damage, path) in enumerate(listed):
        chosen = range(9) if seed else chance.sample(range(9), 4)
        if number % fuzzing.NUM_PARTS not in range(first, end):
            continue
        before = path.read_bytes()
        damage()
        calls = list(verbs(race, claim, results).items())
        for index in chosen:
            code, _, fault = fuzzing.call(calls[index][1])
            num_calls += 1
            if fault is None and code not in (0, 1, 2):
                fault = f"exit code {code}"
            if fault:
                faults.append([what, calls[index][0], fault])
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.write_bytes(before)
    print(json.dumps({"calls": num_calls, "cases": len(listed), "faults": faults}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
