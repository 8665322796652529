"""Windows of steps under the profiler: what became of each, on one rank and on all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.config.windows import ProfilerWindow
from bench.training.profiling import files


@dataclass
class Shot:
    """One window, and what became of it on this rank."""

    window: ProfilerWindow
    status: str = "not reached"  # then "recorded", or "cut short" if the run ended within it
    rows: list[int] = field(default_factory=list)  # recorded, finished
    recording: Any = None  # a Recording (bench/training/profiling/recording.py), which needs torch
    saved: files.Saved | None = None
    flush_ms: float | None = None


def merged(summaries: Sequence[dict[str, dict]]) -> dict[str, dict]:
    """Trace.summary() of every rank -> one: of each window its first recording rank's, with all files."""
    merged_windows = {}
    for name in dict.fromkeys(name for summary in summaries for name in summary):
        of_ranks = [summary[name] for summary in summaries if name in summary]
        written = [one for one in of_ranks if one.get("files")] or of_ranks[:1]
        merged_windows[name] = window = dict(written[0])
        if len(written) > 1:
            window["files"] = [file for one in written for file in one["files"]]
            window["flush_ms"] = max(one["flush_ms"] for one in written)
            window |= {key: sum(one[key] for one in written) for key in ("num_events", "num_bytes")}
            window["dropped"] = dict(sum((Counter(one["dropped"]) for one in written), Counter()))
    return merged_windows
