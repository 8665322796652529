"""Profiler windows of a script: settings for its worker, and the traces that the worker leaves."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged
from bench.config import windows as config_windows
from bench.launch.script.work_folder import WORK
from bench.record.importers import dialects
from bench.record.shape import Section
from bench.record.step_files import StepRow
from bench.training.instruments import registry
from bench.training.profiling import files

MAX_CYCLES = 1000  # of a repeated window: the number of a script's steps is unknown
NAMES = ("trace", "window")  # instruments with windows for scripts: profile=modded, profile=window
# The line that reports a finished step: its pattern, and what to add to the number in it.
EDGES = {
    "modded-nanogpt": (r"^step:(\d+)/\d+ ", 0),
    "nanogpt": (r"^iter (\d+): loss", 1),
    "nanochat": (r"^step (\d+)/\d+ \(", 1),
    "kempnerforge": (r"\[step (\d+)\] loss=", 0),
    "llm.c": (r"^step\s+(\d+)/\d+ \|", 0),
    "nanoswe": (r"^step (\d+) \| loss ", 1),
    "autoresearch": (r"^step (\d+) \(.*remaining: ", 1),
    "slowrun": (r"^step (\d+) \(.*bf16_mfu", 0),
    "parameter-golf": (r"^(?:step:)?(\d+)/\d+ train_loss:", 0),
}


class Noted(TypedDict):
    """A worker's note about a recorded window."""

    name: str
    disturbed: NotRequired[list[int]]  # first and last step


def profile_of(chosen: Mapping[str, Section], dialect: dialects.Dialect | None) -> Section | None:
    """Returns what bench/training/script_profiler.py reads of the launch file, None without a window."""
    windows = _windows(chosen)
    if not windows:
        return None
    names = ("name", "first_step", "last_step", "begin_step", "ranks")
    window_facts = [
        {name: getattr(window, name) for name in names} | {"options": dataclasses.asdict(window.options)}
        for window in windows
    ]
    return {"windows": window_facts, "edges": edges(dialect)}


def edges(dialect: dialects.Dialect | None) -> list[tuple[str, int]]:
    """Returns patterns of lines that report a finished step, as in EDGES."""
    if dialect is None:
        return list(EDGES.values())
    return [EDGES[dialect] if isinstance(dialect, str) else dialects.edge(dialect)]


def step_done(line: str, patterns: Sequence[tuple[str, int]]) -> int | None:
    """Returns the step that a line reports as finished, by edges(), or None."""
    for pattern, offset in patterns:
        if match := re.search(pattern, line):
            return int(match[1]) + offset
    return None


@dataclasses.dataclass
class _Written:
    """A trace that another process exported, as a profile; work: the script's folder, cut from the trace's paths."""

    raw: Path
    work: Path

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_bytes(self.raw.read_bytes().replace(f"{self.work}/".encode(), b""))
        self.raw.unlink()


def conclude(folder: Path, chosen: Mapping[str, Section], num_ranks: int, rows: list[StepRow]) -> dict[str, Section]:
    """Moves the traces into traces/ and flags every disturbed row in place.  Returns the instruments' summaries."""
    summaries: dict[str, Section] = {}
    noted = [_noted(folder, rank) for rank in range(num_ranks)]
    for name in NAMES:
        last_row = rows[-1]["step"] if rows else 0
        for window in _windows({name: chosen[name]} if name in chosen else {}, last_row):
            facts: Section = {"status": "not reached", "steps_asked": [window.first_step, window.last_step]}
            for rank, windows in enumerate(noted):
                recorded = windows.get(window.name)
                raw = folder / f".{window.name}_rank{rank}.raw.tmp"  # a fixed name, not one from the script's process
                if not recorded or raw.is_symlink() or not raw.is_file():
                    continue
                suffix = ".pt.trace.json.gz" if window.gzip else ".pt.trace.json"
                path = folder / "traces" / f"{window.name}_rank{rank}{suffix}"
                saved = files.save(_Written(raw, (folder / WORK).resolve()), path, window.max_mib)
                file = saved.path.relative_to(folder / "traces").as_posix()
                facts |= {"status": "recorded", "files": [*facts.get("files", ()), file], f"rank{rank}": saved.facts()}
                first_step, last_step = recorded["disturbed"]
                for row in rows:
                    flags = (row.get("flags") or "").split(";")
                    if first_step <= row["step"] <= last_step and config_windows.FLAG not in flags:
                        row["flags"] = ";".join(filter(None, [*flags, config_windows.FLAG]))
            summaries.setdefault(name, {})[window.name] = facts
    return summaries


def are_done(folder: Path, chosen: Mapping[str, Section], num_ranks: int) -> bool:
    """Whether every rank has recorded, or missed, each of its windows."""
    windows = _windows(chosen)
    for rank in range(num_ranks):
        mine = {window.name for window in windows if window.ranks is None or rank in window.ranks}
        if mine and not mine <= set(_noted(folder, rank)):
            return False
    return True


def _windows(chosen: Mapping[str, Section], num_steps: int | None = None) -> list[config_windows.ProfilerWindow]:
    """Returns the instruments' windows, a repeated one as its cycles.  num_steps: of the script, None if unknown."""
    names = [name for name in NAMES if name in chosen]
    windows = [window for name in names for window in registry.kind(name).profiler_windows(chosen[name]) or ()]
    return [cycle for window in windows for cycle in itertools.islice(window.cycles(num_steps), MAX_CYCLES)]


def _noted(folder: Path, rank: int) -> dict[str, Noted]:
    """Returns {window: what training/script_profiler.py noted of it} of a rank, {} if the script damaged that."""
    path = folder / f".rank{rank}.profiled.tmp"
    try:
        windows = json_file.parsed(plain_file.content(path), path, list[Noted])
    except Damaged:
        return {}
    return {noted["name"]: noted for noted in windows}
