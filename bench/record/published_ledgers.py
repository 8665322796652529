"""What publications know of a ledger: each copies it as a whole, and git keeps the copies of earlier days.

A ledger that lacks lines of a copy was cut or rewritten after it was published, or is one of two that grew from one.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.base.paths import PUBLISHED, published_root, results_root, shown
from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged
from bench.machine import git
from bench.record import ledger

MAX_BLOBS = 500  # of the history, the newest first


def faults(book: ledger.Ledger) -> list[str]:
    """A sentence for each published copy that has lines which this ledger lacks.

    A copy of another ledger says nothing, nor does a later copy of this one where this one is an older copy itself.
    """
    own = {line["sha256"] for line in book.lines if "sha256" in line}
    first = next((line["sha256"] for line in book.lines if "sha256" in line), None)
    is_live = book.results.resolve() == results_root().resolve()
    sentences = []
    for where, text in _copies():
        lines = _lines(text)
        missing = [line for line in lines if line["sha256"] not in own]
        if not missing or lines[0]["sha256"] != first:
            continue
        if not is_live and book.lines[-1].get("sha256") in {line["sha256"] for line in lines}:
            continue
        facts: Mapping[str, Any] = missing[0]
        what = " ".join(str(facts[key]) for key in ("event", "run", "race_id", "at") if facts.get(key))
        remedy = f"the first is {what}: restore them, or merge the two ledgers line by line"
        sentences.append(f"{where} has {len(missing)} lines that are missing from this ledger, {remedy}")
    return sentences


def _copies() -> list[tuple[str, str]]:
    """[(what it is called, its text)], those in the history without the ones that lie in the folder."""
    here = {}
    for path in sorted(published_root().glob(f"*/{ledger.NAME}")):
        try:
            here[plain_file.text(path, plain_file.MAX_LINES_BYTES)] = shown(path)
        except Damaged:  # of a publication: judge says so of itself
            continue
    project = published_root().parent.parent
    before = _of_history(project, git.ask(project, "for-each-ref", "--format=%(objectname)"))
    return [(name, text) for text, name in ({text: name for name, text in before} | here).items()]


@functools.cache
def _of_history(project: Path, refs: str | None) -> list[tuple[str, str]]:
    """[(what it is called, its text)] of each ledger that a commit of these refs has among its publications."""
    listed = git.ask(project, "rev-list", "--objects", "--all", "--", f"results/{PUBLISHED}") if refs else None
    objects = [line.partition(" ")[::2] for line in (listed or "").splitlines()]
    blobs = [(name, path) for name, path in objects if path.endswith(f"/{ledger.NAME}")][:MAX_BLOBS]
    texts = [(f"{path} in git ({name[:8]})", git.ask(project, "cat-file", "blob", name)) for name, path in blobs]
    return [(name, text) for name, text in texts if text is not None]


def _lines(text: str) -> list[ledger.Line]:
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json_file.parsed(line, Path(ledger.NAME), ledger.Line))
        except Damaged:
            continue
    return lines
