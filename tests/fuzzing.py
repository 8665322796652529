"""Damages files one after the other, and calls the verbs on them in one process.

    python fuzzing.py records RESULTS FIRST END [SEED]     each field and file of one record among good ones
    python fuzzing.py races RESULTS FIRST END [SEED]       the same for a race, its plan and ledger, and a claim

The cases are divided into NUM_PARTS parts, of which FIRST to END - 1 are run.  SEED chooses the values.  With SEED 0,
as in the tests, it also chooses some of the verbs for each case; otherwise all verbs are called.

Prints JSON {"calls": number, "faults": [[case, verb, what]]}: tracebacks, hangs, good neighbours that are not shown,
and control characters on the terminal.  Memory is limited to 1 GiB beyond the imports.
"""

import contextlib
import io
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import claimed
import kept_records
import pytest
import yaml

NUM_PARTS = 16
GIB = 2**30
MAX_S = 10
NAMES = "abcdefghij"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise(NAMES)
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n" for before, name in itertools.pairwise(NAMES)
)
NINES = "9" * 400
WRONG = (None, True, 7, -1, 1.5, 10**400, "x", "\x1b]0;owned\x07", [], [1], [[1]], {}, {"a": [1]}, [None, {}])
JSON = ("", "null", "7", "[1]", "[" * 50_000, '{"a":' * 50_000, '{"a": "' + '\\"' * 20_000, "\0", '{"a": 1e400}')
YAML = ("", "7", "[" * 50_000, "- " * 50_000, BOMB, MERGED, "a: !!python/object/apply:os.system [id]", "&a [*a]")
YAML += ("a: " + "1:" * 9999, f"a: {NINES}")
CSV = ("", "step\n", "step,step_ms,val_loss\n" + "9" * 25 + ",1e400,1\n", 'step,"\n' * 9, "\0\n\0\n", "a" * 2_000_000)
CSV += (f"step,t_ns\n1,{NINES}\n",)
CELLS = ("", "x", NINES, "1e400", "nan", "-1", "\x1b]0;owned\x07", "true", "[1]")
JSONL = ("7\n", "[" * 50_000 + "\n", '{"event": 7}\n', '{"event": "stall"}\n', "{}\n", '"' + '\\"' * 20_000)
JSONL += ('{"event": "run_start", "t_ns": "x"}\n', f'{{"event": "run_start", "t_ns": {NINES}}}\n')
FILES = dict.fromkeys(("config.yaml", "overrides.yaml"), YAML)
FILES |= dict.fromkeys(("run.json", "environment.json", "code/commit.json", "analysis.json", "certificate.json"), JSON)
FILES |= dict.fromkeys(("memory/x_rank0.rss.json", "memory/x.pickle"), JSON)
FILES |= dict.fromkeys(("steps.csv", "steps_by_rank.csv", "telemetry.csv"), CSV)
FILES |= dict.fromkeys(("events.jsonl", "../../ledger.jsonl"), JSONL)


MAKERS = (
    ("pipe", os.mkfifo),
    ("device", lambda path: os.symlink("/dev/zero", path)),
    ("folder", os.mkdir),
    ("loop", lambda path: os.symlink(path, path)),
)


class Hang(BaseException):
    """A verb takes too long."""


# A case is (description, file, its new content: text, or a function that replaces the file at its path).


def file_cases(path, facts, chance, num_values, label=None):
    """Yields cases with invalid values in every field of a JSON or YAML file."""
    dump = yaml.safe_dump if path.suffix == ".yaml" else json.dumps
    for field in paths_of(facts):
        for value in chance.sample(WRONG, num_values):
            name = f"{label or path.name} {'.'.join(map(str, field))} = {str(value)[:20]}"
            yield name, path, dump(with_value(facts, field, value))


def line_cases(path, chance, num_values, kind=None):
    """Yields cases for every field in the lines of a JSONL file, once for lines with the same value of the key kind."""
    lines, seen = [json.loads(line) for line in path.read_text().splitlines()], set()
    for number, line in enumerate(lines):
        for key in line:
            place = (line[kind] if kind else number, key)
            if place in seen:
                continue
            seen.add(place)
            for value in chance.sample(WRONG, num_values):
                changed = [*lines[:number], line | {key: value}, *lines[number + 1 :]]
                text = "".join(json.dumps(row) + "\n" for row in changed)
                yield f"{path.name} {place[0]}.{key} = {str(value)[:20]}", path, text


def text_cases(path, texts):
    """Yields cases of a file with other texts, or replaced by a pipe, a device, a folder or a link to itself."""
    yield from ((f"{path.name} {text[:25]!r}", path, text) for text in texts)
    yield from ((f"{path.name} is a {kind}", path, make) for kind, make in MAKERS)


def record_cases(folder, chance):
    """Yields cases for every field in a record's files, every column of its tables, and every file replaced."""
    run = json.loads((folder / "run.json").read_text())
    run |= {"costs": {"stall": {"count": 1, "ms": 2.0}}, "race": {"race_id": "x", "arm": "A", "discarded": False}}
    run |= {"warnings": [{"instrument": "host", "rank": 0, "error": "x"}]}
    run |= {"doubts": [{"instrument": "host", "doubt": "x"}], "sweep": {"sweep_id": "sweep-12345678"}}
    run |= {"instrument_summaries": {"telemetry": {"by_device": {"cpu": {"slowed_frac": 0.1}}, "energy_j": 1.0}}}
    yield from file_cases(folder / "run.json", run | {"script": None, "imported": None}, chance, 3)
    for name in ("environment.json", "code/commit.json", "config.yaml", "overrides.yaml"):
        load = json.loads if name.endswith("json") else yaml.safe_load
        yield from file_cases(folder / name, load((folder / name).read_text()), chance, 2, name)
    yield from line_cases(folder / "events.jsonl", chance, 2)
    head, *rows = [line.split(",") for line in (folder / "steps.csv").read_text().splitlines()]
    for column, name in enumerate(head):
        for cell in chance.sample(CELLS, 3):
            changed = [[*row[:column], cell, *row[column + 1 :]] for row in rows]
            text = "".join(",".join(row) + "\n" for row in [head, *changed])
            yield f"steps.csv {name} = {cell[:20]!r}", folder / "steps.csv", text
    for name, texts in FILES.items():
        yield from text_cases(folder / name, texts)


def race_cases(race, claim, chance):
    """Yields cases for every field and file of a race, its plan and its claim, and every field of the ledger."""
    for path in (race / "race.json", race / "plan.json", claim / "claim.yaml"):
        is_yaml = path.suffix == ".yaml"
        yield from file_cases(path, (yaml.safe_load if is_yaml else json.loads)(path.read_text()), chance, 2)
        yield from text_cases(path, YAML if is_yaml else JSON)
    yield from line_cases(race.parent.parent / "ledger.jsonl", chance, 2, "event")


def with_value(nested, path, value):
    """Returns a copy of nested dicts and lists with another value at the path."""
    nested = json.loads(json.dumps(nested, default=str))
    inside = nested
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return nested


def paths_of(value, path=()):
    """Yields the paths of all values in nested dicts and lists, but only the first of each list."""
    for key in value if isinstance(value, dict) else range(min(1, len(value))):
        yield (*path, key)
        if isinstance(value[key], (dict, list)):
            yield from paths_of(value[key], (*path, key))


def verbs_of_a_record(bad, results):
    """Returns {name: arguments} of the calls for one damaged record."""
    good, other = (str(path) for path in sorted(results.glob("cpu_nano/*"))[:2])
    return {
        "table": ["table", str(results)],
        "group": ["table", "--group", str(results)],
        "csv": ["table", str(results), "--csv", "--columns", "*"],
        "report RUN": ["report", str(bad)],
        "report --md": ["report", "--md", str(bad)],
        "curves": ["report", good, str(bad), "--out", str(results / "curves.html")],
        "compare": ["compare", good, other, "vs", str(results)],
        "why": ["compare", good, str(bad), "--why"],
        "verify": ["verify", str(bad)],
        "judge": ["judge", good, str(bad)],
        "export csv": ["export", str(results), "--to", "csv"],
        "export steps": ["export", str(results), "--to", "csv", "--steps"],
        "mllog": ["export", str(results), "--to", "mllog"],
        "log": ["export", str(bad), "--to", "modded-nanogpt"],
        "site": ["report", str(results), "--anyway"],
    }


def verbs_of_a_race(race, claim, results):
    return {
        "judge": ["judge", str(claim)],
        "publish": ["publish", str(claim), "--name", "x/y"],
        "compare": ["compare", str(race)],
        "arm": ["compare", f"{race}:A", f"{race}:B"],
        "report": ["report", str(race)],
        "look": ["race", "--look", race.name],
        "judge race": ["judge", *sorted(map(str, results.glob("cpu_nano/*")))[:2]],
        "leaderboard": ["table", "--leaderboard", str(results)],
        "table": ["table", str(results)],
    }


def raced(results):
    """Makes a race of two arms and a claim of one of them; returns their folders."""
    from bench.cli import judge, race

    with pytest.MonkeyPatch.context() as patch:
        racers = claimed.Racers(claimed.Results(results), lambda arm, seed: 10.0 + 0.01 * seed + 0.5 * (arm == "B"))
        racers.install(patch)
        race.main(["A=", "B=optim.beta2=0.99", "n=3"])
        (folder,) = (results / "races").glob("*")
        runs = json.loads((folder / "race.json").read_text())["arms"]["A"]["runs"]
        judge.main(["--claim", str(results.parent / "claim"), *(str(results / run) for run in runs)])
    return folder, results.parent / "claim"


def call(arguments):
    """Calls a verb; returns (exit code or None, stdout, what went wrong or None)."""
    from bench.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    started_s = time.monotonic()
    try:
        signal.alarm(MAX_S)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        signal.alarm(0)
    except Hang:
        return None, "", f"not back after {time.monotonic() - started_s:.0f} s"
    except BaseException as error:
        signal.alarm(0)
        last = traceback.extract_tb(error.__traceback__)[-1]
        return None, "", f"{type(error).__name__}: {str(error)[:80]} ({Path(last.filename).name}:{last.lineno})"
    text = out.getvalue() + err.getvalue()
    raw = "\x1b]0;" in text or "\x07" in text
    return code, out.getvalue(), "what a record says reaches the terminal raw" if raw else None


def main(what, results, first, end, seed=0):
    signal.signal(signal.SIGALRM, _hang)
    chance, num_calls, faults = random.Random(seed), 0, []
    if what == "records":
        bad = [kept_records.add(results, number) for number in (1, 2, 3, 9)][-1]
        for name in ("code", "memory"):
            (bad / name).mkdir(exist_ok=True)
        cases, verbs, num_chosen = list(record_cases(bad, chance)), verbs_of_a_record(bad, results), 6
    else:
        race, claim = raced(results)
        cases, verbs, num_chosen = list(race_cases(race, claim, chance)), verbs_of_a_race(race, claim, results), 4
    bounded()
    for number, (case, path, content) in enumerate(cases):
        chosen = list(verbs) if seed else chance.sample(list(verbs), num_chosen)
        if number % NUM_PARTS not in range(first, end):
            continue
        before = path.read_bytes() if path.exists() else None
        remove(path)
        content(path) if callable(content) else path.write_text(content)
        for name in chosen:
            code, out, fault = call(verbs[name])
            num_calls += 1
            if fault is None and code not in (0, 1, 2):
                fault = f"exit code {code}"
            shows_all = what == "records" and name in ("table", "csv", "export csv", "mllog")
            if fault is None and shows_all and "000001Z-" not in out:
                fault = f"exit code {code}, and the good neighbours are not shown"
            if fault:
                faults.append([case, name, fault])
        remove(path)
        if before is not None:
            path.write_bytes(before)
    print(json.dumps({"calls": num_calls, "cases": len(cases), "faults": faults}))


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def bounded():
    """Limits memory to 1 GiB more than is used now."""
    import bench.report.site.site  # noqa: F401 - imported now, so that it is not counted

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, used + GIB))


def _hang(*_):
    raise Hang


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
