"""Damaged records, one after the other, through the verbs, in one process.

    python fuzzing.py RESULTS FIRST END [SEED]

The cases are dealt to NUM_PARTS parts: parts FIRST to END - 1.  SEED draws the values, and six of the verbs a case;
beside 0, the tests', with it every case goes through every verb.

Prints JSON {"calls": number, "faults": [[case, verb, what]]}: tracebacks, hangs, good neighbours that are not shown,
and control characters on the terminal.  Memory is bounded to 1 GiB beyond what is imported.
"""

import contextlib
import io
import itertools
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

import kept_records
import yaml

NUM_PARTS = 16  # of the cases
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
    """A verb is not back in time."""


def of_fields(chance):
    """(what, damage(folder)) of each field of run.json with two values that it cannot have."""
    run = json.loads((kept_records.COMPLETE / "run.json").read_text())
    run |= {"costs": {"stall": {"count": 1, "ms": 2.0}}, "race": {"race_id": "x", "arm": "A", "discarded": False}}
    run |= {
        "warnings": [{"instrument": "host", "rank": 0, "error": "x"}],
        "doubts": [{"instrument": "host", "doubt": "x"}],
    }
    run |= {"instrument_summaries": {"telemetry": {"by_device": {"cpu": {"slowed_frac": 0.1}}, "energy_j": 1.0}}}
    run |= {"sweep": {"sweep_id": "sweep-12345678"}, "script": None, "imported": None}
    for path in paths_of(run):
        for value in chance.sample(WRONG, 3):
            yield (
                f"run.json {'.'.join(map(str, path))} = {str(value)[:20]}",
                lambda folder, p=path, v=value: put(folder, run, p, v),
            )


def of_other_fields(chance):
    """The same of every other file of a record: each field of its objects and events, each column of its tables."""
    for name in ("environment.json", "code/commit.json", "config.yaml", "overrides.yaml"):
        text = (kept_records.COMPLETE / name).read_text()
        load, dump = (json.loads, json.dumps) if name.endswith("json") else (yaml.safe_load, yaml.safe_dump)
        found = load(text)
        for path in paths_of(found):
            for value in chance.sample(WRONG, 2):
                words = f"{name} {'.'.join(map(str, path))} = {str(value)[:20]}"
                text = dump(with_value(found, path, value))
                yield words, lambda folder, n=name, t=text: (folder / n).write_text(t)
    lines = [json.loads(line) for line in (kept_records.COMPLETE / "events.jsonl").read_text().splitlines()]
    for number, event in enumerate(lines):
        for key in event:
            for value in chance.sample(WRONG, 2):
                changed = [*lines[:number], event | {key: value}, *lines[number + 1 :]]
                text = "".join(json.dumps(one) + "\n" for one in changed)
                words = f"events.jsonl {number}.{key} = {str(value)[:20]}"
                yield words, lambda folder, t=text: (folder / "events.jsonl").write_text(t)
    head, *rows = [line.split(",") for line in (kept_records.COMPLETE / "steps.csv").read_text().splitlines()]
    for column, name in enumerate(head):
        for cell in chance.sample(CELLS, 3):
            changed = [[*row[:column], cell, *row[column + 1 :]] for row in rows]
            text = "".join(",".join(row) + "\n" for row in [head, *changed])
            yield f"steps.csv {name} = {cell[:20]!r}", lambda folder, t=text: (folder / "steps.csv").write_text(t)


def with_value(found, path, value):
    """A copy of nested dicts and lists with another value at one place."""
    found = json.loads(json.dumps(found, default=str))
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return found


def paths_of(value, path=()):
    """Every place in nested dicts and lists, of lists the first."""
    for key in value if isinstance(value, dict) else range(min(1, len(value))):
        yield (*path, key)
        if isinstance(value[key], (dict, list)):
            yield from paths_of(value[key], (*path, key))


def put(folder, run, path, value):
    changed = json.loads(json.dumps(run)) | json.loads((folder / "run.json").read_text())
    for key in run:
        changed.setdefault(key, run[key])
        if changed[key] is None or key in ("costs", "race", "warnings", "doubts", "instrument_summaries", "sweep"):
            changed[key] = json.loads(json.dumps(run[key]))
    (folder / "run.json").write_text(json.dumps(with_value(changed, path, value)))


def of_files(_chance):
    """(what, damage(folder)) of each file: other texts, a pipe, a device, a folder, a link to itself."""
    for name, texts in FILES.items():
        for text in texts:
            yield f"{name} {text[:25]!r}", lambda folder, n=name, t=text: (folder / n).write_text(t)
        for what, make in MAKERS:
            yield f"{name} is a {what}", lambda folder, n=name, m=make: replaced(folder / n, m)


def replaced(path, make):
    path.unlink(missing_ok=True)
    make(path)


def verbs(bad, results):
    """[words] of the calls for one damaged record."""
    good = str(results / "cpu_nano" / "20261122T000001Z-gpt2-adamw-48623a63-s1")
    other = str(results / "cpu_nano" / "20261122T000002Z-gpt2-adamw-48623a63-s2")
    return {
        "table": ["table", str(results)],
        "group": ["table", "--group", str(results)],
        "csv": ["table", "--csv", "--all-columns", str(results)],
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
    }  # fmt: skip


def call(words):
    """(exit code or None, stdout, what went wrong or None)."""
    from bench.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    started_s = time.monotonic()
    try:
        signal.alarm(MAX_S)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
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


def main(results, first, end, seed=0):
    signal.signal(signal.SIGALRM, _hang)
    chance, num_calls, faults = random.Random(seed), 0, []
    for good in (1, 2, 3):
        kept_records.add(results, good)
    bounded()
    cases = [*of_fields(chance), *of_other_fields(chance), *of_files(chance)]
    for number, (what, damage) in enumerate(cases):
        chosen = range(15) if seed else chance.sample(range(15), 6)
        if number % NUM_PARTS not in range(first, end):
            continue
        bad = kept_records.add(results, 9)
        ledger = results / "ledger.jsonl"
        for name in ("code", "memory"):
            (bad / name).mkdir(exist_ok=True)
        damage(bad)
        calls = list(verbs(bad, results).items())
        for index in chosen:
            name, words = calls[index]
            code, out, fault = call(words)
            num_calls += 1
            if fault is None and code not in (0, 1, 2):
                fault = f"exit code {code}"
            if fault is None and name in ("table", "csv", "export csv", "mllog") and "000001Z-" not in out:
                fault = f"exit code {code}, and the good neighbours are not shown"
            if fault:
                faults.append([what, name, fault])
        remove(bad)
        remove(ledger)
    print(json.dumps({"calls": num_calls, "cases": len(cases), "faults": faults}))


def bounded():
    """Memory to 1 GiB from here on."""
    import bench.report.site.site  # noqa: F401 - what is imported is not what a record costs

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, used + GIB))


def _hang(*_):
    raise Hang


def remove(path):
    import shutil

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
