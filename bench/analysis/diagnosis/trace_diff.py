"""What changed between the traces of two groups of runs: one trace of each, where both left one."""

import os
from collections.abc import Iterable
from pathlib import Path

from bench.analysis.trace import diff, load
from bench.analysis.trace.source import NoTrace

MAX_LINES = 10


def of_folders(a_folders: Iterable[Path | str], b_folders: Iterable[Path | str]) -> dict | None:
    """Run folders of A and of B -> {"a", "b": the files, "by", "step_ms" or "span_ms", "change_ms", "rest_ms", "lines"}

    The first run of each arm that has traces, the files of one name if there are some, else the first of each: the same
    window of the same rank.  Kernels are matched by name; without device rows, operators.  None without such traces.
    """
    a_file, b_file = _pair(_first_traces(a_folders), _first_traces(b_folders))
    if a_file is None:
        return None
    try:
        ranks = [load.load(path) for path in (a_file, b_file)]
    except NoTrace:
        return None
    by = "kernel" if all(len(rank.device_rows()) for rank in ranks) else "operator"
    result = diff.compare(*(diff.profile(rank, by) for rank in ranks))
    lines = [line for line in result["lines"] if line["status"] != "same"]
    words = {"a": _name(a_file), "b": _name(b_file), "by": by}
    return words | result | {"lines": lines[:MAX_LINES], "num_lines": len(lines)}


def _first_traces(folders):
    for folder in folders:
        traces = os.path.join(folder, "traces")
        if os.path.isdir(traces):
            try:
                return load.find(traces)
            except NoTrace:
                continue
    return []


def _pair(a_files, b_files):
    if not a_files or not b_files:
        return None, None
    b_by_name = {path.name: path for path in b_files}
    same = [(path, b_by_name[path.name]) for path in a_files if path.name in b_by_name]
    return same[0] if same else (a_files[0], b_files[0])


def _name(path):
    """<run_id>/traces/<file>"""
    return "/".join(path.parts[-3:])
