"""Profiler windows on a script: what its worker is asked to record, and the traces that come of it."""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged
from bench.config import windows as config_windows
from bench.record.importers import dialects
from bench.training.instruments import registry
from bench.training.profiling import files

NAMES = ("trace", "window")  # instruments whose windows a script can have: profile=modded, profile=window
# A line that says that a step is done: its pattern, and what is to be added to the number in it.
EDGES = {
    "modded-nanogpt": (r"^step:(\d+)/\d+ ", 0),
    "nanogpt": (r"^iter (\d+): loss", 1),
    "nanochat": (r"^step (\d+)/\d+ \(", 1),
    "kempnerforge": (r"\[step (\d+)\] loss=", 0),
    "llm.c": (r"^step\s+(\d+)/\d+ \|", 0),
}


class Noted(TypedDict):
    """Of a recorded window."""

    name: str
    raw: NotRequired[str | None]  # the trace
    disturbed: NotRequired[list[int]]  # first and last step


def asked(chosen: Mapping[str, dict], dialect: str | None) -> dict | None:
    """What bench/training/script_profiler.py reads of the launch file; None without a window."""
    windows = _windows(chosen)
    if not windows:
        return None
    edges = (
        [EDGES[dialect]] if dialect in EDGES else list(EDGES.values()) if dialect is None else [dialects.edge(dialect)]
    )
    result = []
    for window in windows:
        facts = {name: getattr(window, name) for name in ("name", "first_step", "last_step", "begin_step", "ranks")}
        result.append(facts | {"options": dataclasses.asdict(window.options)})
    return {"windows": result, "edges": edges}


@dataclasses.dataclass
class _Written:
    """A trace that another process has exported, as a profile."""

    raw: str

    def export_chrome_trace(self, path):
        shutil.move(self.raw, path)


def conclude(folder: Path, chosen: Mapping[str, dict], num_ranks: int, rows: list[dict]) -> dict:
    """The traces into traces/, and in place the flag of every row that was disturbed.  Returns instrument summaries."""
    summaries = {}
    recorded = [_recorded(_noted(folder, rank)) for rank in range(num_ranks)]
    for name in NAMES:
        for window in registry.kind(name).profiler_windows(chosen[name]) if name in chosen else ():
            facts = {"status": "not reached", "steps_asked": [window.first_step, window.last_step]}
            for rank, of_rank in enumerate(recorded):
                one = of_rank.get(window.name)
                if one is None or not os.path.exists(one.get("raw") or ""):
                    continue
                saved = _saved(folder, window, rank, one["raw"])
                file = saved.path.relative_to(folder / "traces").as_posix()
                facts |= {"status": "recorded", "files": [*facts.get("files", ()), file], f"rank{rank}": saved.facts()}
                for row in rows:
                    if one["disturbed"][0] <= row["step"] <= one["disturbed"][1] and not _is_flagged(row):
                        row["flags"] = ";".join(filter(None, [row.get("flags"), config_windows.FLAG]))
            summaries.setdefault(name, {})[window.name] = facts
    return summaries


def are_done(folder: Path, chosen: Mapping[str, dict], num_ranks: int) -> bool:
    """Whether every rank has recorded, or missed, each window that it has."""
    windows = _windows(chosen)
    for rank in range(num_ranks):
        mine = {window.name for window in windows if window.ranks is None or rank in window.ranks}
        if mine and not mine <= set(_recorded(_noted(folder, rank))):
            return False
    return True


def _windows(chosen):
    return [window for name in NAMES if name in chosen for window in registry.kind(name).profiler_windows(chosen[name])]


def _noted(folder, rank):
    return folder / f".rank{rank}.profiled.tmp"


def _recorded(path):
    """{name of a window: what training/script_profiler.py noted of it} of one rank; {} where the script spoilt that."""
    try:
        noted = json_file.parsed(plain_file.content(path), path, list[Noted])
    except Damaged:
        return {}
    return {one["name"]: one for one in noted}


def _saved(folder, window, rank, raw):
    suffix = ".pt.trace.json.gz" if window.gzip else ".pt.trace.json"
    return files.save(_Written(raw), folder / "traces" / f"{window.name}_rank{rank}{suffix}", window.max_mib)


def _is_flagged(row):
    return config_windows.FLAG in (row.get("flags") or "").split(";")
