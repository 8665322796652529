"""The public records of modded-nanogpt, judged from their logs -> docs/reference/public-records.md.

.venv/bin/python tests/benchmarks records CLONE      reads all logs of a clone (10 s), keeps what is needed of them
.venv/bin/python tests/benchmarks records            makes the page again from what was kept, as the tests do

public_records.json: a row a run as the importer makes it, and the tables of the clone's READMEs; of track 3's runs
tests/track3.csv.gz (track3.py).  No verdict is kept: those of the page are the harness's own, made anew.
public_records.yaml: which logs are a record's, and remarks.
"""

import json
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from bench.compare import eligibility
from bench.record import rows as record_rows
from bench.record.importers import dialects

HERE = Path(__file__).resolve().parent
FACTS, REMARKS = HERE / "public_records.json", HERE / "public_records.yaml"
PAGE = HERE.parent.parent / "docs/reference/public-records.md"
TRACK_3 = "track_3_optimization"
KEPT = (  # columns of a row that comparisons count with; the others are None in logs, or not needed here
    *("started_at", "train_s", "score", "num_steps", "source_sha256", "setting", "status", "validity"),
    *("track", "provenance", "target", "stop_at_target", "num_deviations", "machine_doubts"),
)
USUAL = {  # what is not kept of a row that has it
    "track": "gpt2_small",
    "target": 3.28,
    "provenance": "imported",
    "status": "complete",
    "validity": "valid",
    "stop_at_target": False,
    "num_deviations": 0,
    "machine_doubts": [],
}
ROW = re.compile(r"^\|? ?(\d+) \| ([^|]*) \|(.*)$", re.M)  # of a README's table of records
LINK = re.compile(r"\[log\]\((?:records/)?([^)]*)\)")
PULL = re.compile(r"https://github\.com/KellerJordan/modded-nanogpt/pull/(\d+)")
DATE = re.compile(r"\| (\d\d/\d\d/\d\d|\d{4}/\d\d/\d\d|-) \|")
PRINTED = r"(?i)(?:retiming|rerunning) prior record|same machine"  # before a baseline's times in a record's README
MERGED = re.compile(r"will merge at [\d.]+s to be consistent with [\d.]+s improvement(?: over [\d.]+s)?")
TIMES = re.compile(r"(?:times = |: ?[\d.]+ |: )\[([\d., ]+)\]")
MIN_TIME_S = 50  # numbers below it are losses
UNIT_S = {"hours": 3600, "minutes": 60}


def main(clone=None):
    remarks = yaml.safe_load(REMARKS.read_text())
    from benchmarks import public_records_page, track3

    if clone and not all((Path(clone) / name).exists() for name in ("README.md", "records", ".git")):
        print(f"{clone}: is no clone of https://github.com/KellerJordan/modded-nanogpt: clone it", file=sys.stderr)
        return 2
    if clone:
        FACTS.write_text(as_text(read_clone(Path(clone), remarks)))
        track3.main([clone])
    PAGE.write_text(public_records_page.page(json.loads(FACTS.read_text()), remarks))
    print(PAGE)
    return 0


# ---- of a clone


class Run(NamedTuple):
    path: str  # of its log, below records/
    row: dict[str, Any]


def read_clone(clone, remarks):
    """{"commit", "date", "tracks": {"1": [claim]}, "asked", "settings", "arms": {"1/30 baseline": encoded rows}}"""
    git = ["git", "-C", str(clone), "log", "-1", "--format=%H %cs"]
    commit, date = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split()
    first, second = (clone / "README.md").read_text().split("## Speedrun track 2")
    third = (clone / "records" / TRACK_3 / "README.md").read_text().partition("## Notable results history")[2]
    texts = {"1": first.partition("## Rules")[0], "2": second, "3": third.partition("Notes:")[0]}
    facts = {"commit": commit, "date": date, "tracks": {}, "asked": [], "settings": [], "arms": {}}
    runs = read_runs(clone / "records")
    for track, text in texts.items():
        facts["tracks"][track] = claims_of(text, track)
        for claim in facts["tracks"][track]:
            key = f"{track}/{claim['number']}"
            given = remarks["records"].get(key, {})
            if track == "3":
                claim["gpus"] = sorted({run.row["device"] or "unknown" for run in runs_of(runs, claim, given)})
                continue
            arms = {key: runs_of(runs, claim, given), f"{key} baseline": baseline_of(runs, claim, given)}
            for number, pair in enumerate(given.get("also", ())):
                arms |= {f"{key} also {number} {arm}": matching(runs, pair[arm]) for arm in ("runs", "baseline")}
            facts["arms"] |= {name: encoded([run.row for run in arm], facts) for name, arm in arms.items() if arm}
            if arms[key] and not arms[f"{key} baseline"]:
                readme = (clone / "records" / arms[key][0].path).parent / "README.md"
                own_s = [run.row["train_s"] for run in arms[key]]
                claim["printed_s"] = printed_times(readme, own_s, given.get("printed", PRINTED))
                claim["merged"] = MERGED.findall(readme.read_text()) if readme.is_file() else []
    return facts


def read_runs(folder):
    """All runs of all logs below a folder."""
    runs = []
    for path, part_of in dialects.files_of([folder]):
        name = path.relative_to(part_of).as_posix()
        runs += [Run(name, record_rows.row_of(record)) for record, _ in dialects.read_file(path)[0]]
    return runs


def claims_of(text, track):
    """Returns [{"number", "date", "link", "pull", and what it claims}] of a README's table.  21b is the second 21."""
    claims = []
    for number, claimed, rest in ROW.findall(text):
        link, pull, date = LINK.search(rest), PULL.search(rest), DATE.search(f"|{rest}")
        number += ["", "b", "c"][sum(claim["number"].rstrip("bc") == number for claim in claims)]
        claim = {"number": number, "date": date[1], "link": link and link[1], "pull": pull and pull[1]}
        if track == "3":
            mean, n, mark = re.match(r" ([\d.]+) \(n=(\d+)\)(\S)", rest).groups()
            claim |= {"link": f"{TRACK_3}/{link[1]}", "steps": int(re.match(r"\d+", claimed)[0])}
            claim |= {"n": int(n), "mean": mean, "mark": mark}
        else:
            amount, unit = re.match(r"([\d.]+) (hours|minutes)", claimed).groups()
            digits = len(amount.partition(".")[2])
            claim |= {"s": round(float(amount) * UNIT_S[unit], 3), "rounding_s": UNIT_S[unit] / 2 / 10**digits}
        claims.append(claim)
    return claims


def runs_of(runs, claim, given):
    """A record's runs: as the yaml says, or those beside the linked log, on tracks 1 and 2 of its code and GPUs."""
    if "runs" in given or not claim["link"]:
        return matching(runs, given["runs"]) if given else []
    link = PurePosixPath(claim["link"])
    linked = [run for run in runs if run.path == claim["link"]]
    if link.parent.name == "results":  # track 3 has some logs without a folder of their own
        return linked
    beside = matching(runs, f"{link.parent if link.suffix else link}/*")
    alike = ("source_sha256", "device") if linked and "s" in claim else ()
    return [run for run in beside if all(run.row[column] == linked[0].row[column] for column in alike)]


def baseline_of(runs, claim, given):
    """The runs of the baseline that lies in the record's own folder; []: there is none."""
    if "baseline" in given or not claim["link"]:
        return matching(runs, given["baseline"]) if given.get("baseline") else []
    return matching(runs, "/".join([*PurePosixPath(claim["link"]).parts[:2], "*baseline*", "*"]))


def matching(runs, pattern):
    """Returns the runs of FOLDER/GLOB, or FOLDER/GLOB@CODE (the beginning of its sha256); copies of a log once."""
    glob, _, code = pattern.partition("@")
    matched = [run for run in runs if PurePosixPath(run.path).match(glob)]
    matched = [run for run in matched if (run.row["source_sha256"] or "").startswith(code)]
    return [matched[number] for number in eligibility.index_of_runs([run.row for run in matched])]


def printed_times(path, own_s, pattern=PRINTED):
    """The times of the record before that a README prints, in seconds; None: none, or none beside own_s.

    own_s: the times of the record's logs.  Where the README prints others, the logs are of another day.  pattern: after
    which the times stand.
    """
    text = path.read_text() if path.is_file() else ""
    numbers = {float(number) for number in re.findall(r"\d+\.\d+", text)}
    is_theirs = 2 * sum(round(time_s or 0, 3) in numbers for time_s in own_s) >= len(own_s)
    for match in re.finditer(pattern, text) if is_theirs else ():
        for times in TIMES.findall(text[match.end() : match.end() + 500]):
            numbers = [float(time) for time in times.split(",") if time.strip()]
            if min(numbers) > MIN_TIME_S:
                return numbers
    return None


# ---- rows, kept compactly


def encoded(rows, facts):
    """Returns rows as {"common": {column: value}, "columns", "runs": [[value of each column]]}."""
    rows = [{column: row[column] for column in KEPT} for row in rows]
    for row in rows:
        setting = json.loads(row["setting"])
        facts["asked"] = list(setting)  # of every log the same
        filled = {key: value for key, value in setting.items() if value is not None}
        filled = {key: [len(value), value[0]] if isinstance(value, list) else value for key, value in filled.items()}
        facts["settings"] += [filled] if filled not in facts["settings"] else []
        row["setting"] = facts["settings"].index(filled)
        row["source_sha256"] = (row["source_sha256"] or "")[:12] or None
    columns = [name for name in KEPT if any(row[name] != rows[0][name] for row in rows)] or ["train_s"]
    common = {name: value for name, value in rows[0].items() if name not in columns and value != USUAL.get(name)}
    return {"common": common, "columns": columns, "runs": [[row[name] for name in columns] for row in rows]}


def decoded(name, facts):
    """The rows of an arm as the harness compares them; its runs are called by its name and a number."""
    arm, rows = facts["arms"][name], []
    for number, values in enumerate(arm["runs"]):
        row = dict.fromkeys(record_rows.COLUMNS) | {"config": (), "run_id": f"{name} {number}"} | USUAL | arm["common"]
        row |= dict(zip(arm["columns"], values, strict=True))
        settings = facts["settings"][row["setting"]].items()
        settings = {key: value[1:] * value[0] if isinstance(value, list) else value for key, value in settings}
        rows.append(row | {"setting": record_rows.encoded(dict.fromkeys(facts["asked"]) | settings)})
    return rows


def as_text(facts):
    """JSON, a run, an arm's head or a claim to a line."""
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    for shape in (r"\[[^\[\]{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(shape, lambda match: " ".join(match[0].split()), text)
    return text + "\n"
