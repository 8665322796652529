"""The table of what each verb reads and writes: its inputs, how they may be damaged, its outputs and their escaping.

tests/walk.py tries an entry, tests/test_inputs.py a sample of entries, and `tests/benchmarks inputs` every pair of
their parts, and writes docs/reference/faults.md.
"""

import csv
import io
import json
import os
import re
import shutil
from html.parser import HTMLParser
from typing import NamedTuple

FACTS, STEPS = ("RUN/run.json", "RUN/config.yaml"), ("RUN/steps.csv",)
RUN = (*FACTS, *STEPS)
VERIFIED = (*RUN, "RUN/steps_by_rank.csv")
PAGE = (*VERIFIED, "RUN/events.jsonl", "RUN/analysis.json")
LEDGER, STORE = ("RESULTS/ledger.jsonl",), ("RESULTS/.store.sqlite",)
COUNT = ("RESULTS/.ledger.count", "STATE/count.json")
RACE, HERE = ("RACE/plan.json", "RACE/race.json"), ("RUN/environment.json",)
CLAIMED = (*VERIFIED, *HERE, "RUN/audit.json", *RACE, "STATE/count.json")
OF_SEARCH = ("SEARCH/ledger.jsonl", "SEARCH/.ledger.count")
OF_CLAIM = ("CLAIM/claim.yaml", "CLAIM/README.md", "CLAIM/ledger.jsonl", "CLAIM/.ledger.count")
JUDGED = (*CLAIMED, *LEDGER, *COUNT, *STORE)
OF_RERUNS = ("RUN/audit.json", "RUN/certificate.json")
COPIED = (*RUN, *RACE, "RACE/race.md", *LEDGER)


class Verb(NamedTuple):
    """A command and its inputs.

    command: its capitals stand for paths.  reads: every file that it opens and others may have written.  home: a
    folder of the World.
    """

    command: str
    reads: tuple[str, ...]
    home: str = "results"


READS = {
    "verify": Verb("verify RUN", VERIFIED),
    "table": Verb("table RESULTS", (*FACTS, *LEDGER, *STORE)),
    "table --leaderboard": Verb("table --leaderboard RESULTS", (*JUDGED, "RUN/overrides.yaml", "RESULTS/README.md")),
    "sql": Verb("sql QUERY RESULTS", (*FACTS, *LEDGER, *STORE)),
    "compare": Verb("compare RACE", (*RUN, *HERE, "RACE/race.json", *LEDGER)),
    "judge": Verb("judge RACE:B", JUDGED),
    "judge CLAIM": Verb("judge CLAIM", (*CLAIMED, *OF_CLAIM), "claim"),
    "judge --claim": Verb("judge RACE:B --claim OUT", (*JUDGED, "RACE/race.md")),
    "publish": Verb(
        "publish RACE --name mine", (*CLAIMED, *LEDGER, *COUNT, *COPIED, "RESULTS/README.md", "CWD/README.md")
    ),
    "collect": Verb("collect RESULTS --into OUT", (*RUN, *RACE, *OF_RERUNS, *LEDGER, *COUNT)),
    "report RUN": Verb("report RUN", PAGE),
    "report RACE": Verb("report RACE", (*PAGE, "RACE/race.json")),
    "report": Verb("report RESULTS --out OUT", (*JUDGED, *PAGE, "RUN/overrides.yaml", "RESULTS/README.md")),
    "export": Verb("export RUN --to csv --steps", ("RUN/run.json", *STEPS)),
    "export mllog": Verb("export RUN --to mllog", ("RUN/run.json", *STEPS, "RUN/events.jsonl")),
    "explain": Verb("explain RUN", ("RUN/run.json", *STEPS, "RUN/steps_by_rank.csv", "RUN/events.jsonl")),
    "replay": Verb("replay --check RUN", (*FACTS, "RUN/overrides.yaml")),
    "import": Verb("import modded-nanogpt LOG", ("LOG",)),
    "analyze": Verb("analyze TRACE", ("TRACE",)),
    "memory": Verb("memory SNAPSHOT", ("SNAPSHOT",)),
    "race --look": Verb("race --look NAME", (*RUN, *HERE, "RACE/plan.json", *LEDGER)),
    "race --resume": Verb("race --resume --anyway", (*PAGE, *HERE, *RACE, *LEDGER, *COUNT), "open"),
    "referee submit": Verb(
        "referee submit optim.beta2=0.92", (*PAGE, *HERE, *RACE, *LEDGER, *COUNT, *OF_SEARCH), "search"
    ),
    "referee status": Verb("referee status", ("STATE/count.json", *OF_SEARCH), "search"),
}
ELSEWHERE = {  # {verb that measures, fetches or makes something: what it reads, and where that is tested}
    "run": "conf/, code, git, shards, a script: copied or hashed before its ranks start, compared when they have ended",
    "speedrun": "as run",
    "submit": "settings, a script's sources and commits; it writes into the queue of a results folder",
    "agent": "the queue of a results folder, then as run",
    "study": "as race",
    "ladder": "as race",
    "bisect": "as race, and commits",
    "calibrate": "as race",
    "history": "as table, and commits",
    "project": "as explain, and traces",
    "dashboard": "as export",
    "audit": "as verify and run",
    "pr": "logs and sources of a pull request, which are never run without --go",
    "init": "nothing but what it would write over",
    "data": "shards and their hashes; a server",
    "doctor": "the machine",
    "completion": "nothing",
}
BELIEVED = {  # {input: when it is trusted}
    "RUN/run.json": "if each field is of its kind; by a verdict if it is the one that the ledger's end line names",
    "RUN/config.yaml": "by a verdict if its hash is in run.json, and only then through a link",
    "RUN/steps.csv": "by a verdict if its hash is in run.json",
    "RUN/steps_by_rank.csv": "by a verdict if its hash is in run.json",
    "RUN/environment.json": "only for what is shown of it",
    "RUN/overrides.yaml": "if its hash is in run.json",
    "RUN/events.jsonl": "only for what is shown of it",
    "RUN/analysis.json": "only for what is shown of it",
    "RUN/audit.json": "if its runs are there and verify",
    "RUN/certificate.json": "as the claim of the place that it came from",
    "RACE/plan.json": "if it is the one that the ledger's plan line names",
    "RACE/race.json": "if it is the one that the ledger's last line of the race names",
    "RACE/race.md": "never: it is copied",
    "RESULTS/ledger.jsonl": "if each line names the one before it and none is missing by the count",
    "RESULTS/.ledger.count": "the larger of the two counts",
    "STATE/count.json": "the larger of the two counts",
    "RESULTS/.store.sqlite": "if nobody else can have written it, as long as the files of a row are unchanged",
    "RESULTS/README.md": "never: tables within it are written again",
    "CWD/README.md": "never: tables within it are written again",
    "CLAIM/claim.yaml": "as far as the runs and races beside it bear it out",
    "CLAIM/README.md": "never: its table is compared with the runs",
    "CLAIM/ledger.jsonl": "as the file of RESULTS",
    "CLAIM/.ledger.count": "as the file of RESULTS",
    "SEARCH/ledger.jsonl": "if each line names the one before it; decisions follow from the records again",
    "SEARCH/.ledger.count": "as the file of RESULTS",
    "LOG": "only as an imported log, and marked as one",
    "TRACE": "only for what is shown of it",
    "SNAPSHOT": "only for what is shown of it; Python's pickle never loads it",
}
OF_RECORDS = {*RUN, "RUN/steps_by_rank.csv"}  # files that must be as recorded for a verdict
VERDICTS = ("verify", "judge", "judge CLAIM", "judge --claim", "collect")


def _another(path, world):
    """Replaces a file by that of another run."""
    others = [other for other in path.parent.parent.glob(f"*/{path.name}") if other.parent != path.parent]
    shutil.copy(others[0] if others else world.made / "a.log", path)


PRIVATE = "a link to a private file"
KINDS = {  # {kind of damage: function that replaces the removed input, whose content is in World.here / "elsewhere"}
    "removed": lambda path, world: None,
    "empty": lambda path, world: path.write_text(""),
    "a folder": lambda path, world: path.mkdir(),
    "a pipe": lambda path, world: os.mkfifo(path),
    "a device": lambda path, world: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path, world: path.symlink_to(path.name),
    "a link to what it was": lambda path, world: path.symlink_to(world.here / "elsewhere"),
    PRIVATE: lambda path, world: path.symlink_to(world.private),
    "4 TiB of holes": lambda path, world: (path.touch(), os.truncate(path, 2**42)),
    "a picture": lambda path, world: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256))),
    "a list": lambda path, world: path.write_text("[[1, null, {}]]\n"),
    "longer": lambda path, world: path.write_bytes((world.here / "elsewhere").read_bytes() + b"\n7\n"),
    "another run's": _another,
}
PHASES = ("before", "while")  # damage before the command starts, or once it has read the input for the first time
WALK = [
    (verb, name, kind, phase) for verb, row in READS.items() for name in row.reads for kind in KINDS for phase in PHASES
]


class _Tags(HTMLParser):
    """Finds tags, attributes and handlers in a page that come from a record."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if "evil" in tag or any("evil" in name for name, _ in attributes):
            self.found.append(f"<{tag}> of a record in the page")


def _markdown(text):
    wrong = {"mentions somebody": r"@evil", "has a tag": r"(?<!\\)<evil", "ends a cell": r"(?<!\\)\|evil"}
    return [f"Markdown {what}: {match[0]}" for what, form in wrong.items() if (match := re.search(form, text))]


def _csv(text):
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    return [f"a formula: {cell[:40]}" for cell in cells if cell[:1] == "=" and "evil" in cell]


def _json(text):
    try:
        json.loads(text or "null")
    except ValueError as error:
        return [f"no JSON: {error}"]
    return []


EVIL = "=1+evil@evil |evil <evil evil=1></script><evil>\x1b]0;evil\x07\u202e"
MEDIA = {  # {medium: function that returns sentences on text of a record that has an effect there}
    "terminal": lambda text: [],  # checked for all output by walk._of_answer()
    "HTML": lambda text: _Tags(text).found,
    "Markdown": _markdown,
    "csv": _csv,
    "JSON": _json,
}
WRITES = {  # {output: (key of READS, arguments or None for that verb's, medium)}
    "verify": ("verify", None, "terminal"),
    "table": ("table", None, "terminal"),
    "table --csv": ("table", "table RESULTS --csv --columns *", "csv"),
    "table --md": ("table", "table RESULTS --md --columns *", "Markdown"),
    "table --json": ("table", "table --json RESULTS", "JSON"),
    "sql --csv": ("sql", "sql QUERY RESULTS --csv", "csv"),
    "sql --md": ("sql", "sql QUERY RESULTS --md", "Markdown"),
    "compare": ("compare", None, "terminal"),
    "compare --md": ("compare", "compare RACE --md", "Markdown"),
    "judge": ("judge", None, "terminal"),
    "report RUN": ("report RUN", None, "HTML"),
    "report --md RUN": ("report RUN", "report --md RUN", "Markdown"),
    "report RACE": ("report RACE", None, "HTML"),
    "report": ("report", None, "HTML"),
    "export": ("export", "export RUN --to csv", "csv"),
    "explain": ("explain", None, "terminal"),
}
