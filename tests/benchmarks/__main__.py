"""What needs the tests' own files, or another program, to be measured.  .venv/bin/python tests/benchmarks [PART ...]

PART: overhead (of the training loop), results, harness (the default ones), slope (table over 100,000 records) and
trace (installs HolisticTraceAnalysis), which take minutes.
Alone: gpu [--rehearse] [--rows=FILE] [--minutes=N] races the harness against plain loops on a GPU; FILE gets the rows
as JSON after each round; a rehearsal is nano-sized (gpu.py).
Alone: contestants cheats | honest [NUM_RUNS] (contestants.py), and
inputs [SEED [all]] makes each input of each verb something else (inputs.py), and
faults [NUM_PLACES [NUM_KILLS [SEED [COMMAND,...]]]] fails file operations and kills processes (faults.py).
Alone: records [CLONE] makes docs/reference/public-records.md (public_records.py).
Alone: leaks [NUM_TOKENS ...]: how small a leak an audit on random tokens finds (leaks.py).
Alone: nanogpt CLONE [NUM_THREADS ...]: the harness beside nanoGPT's own model and loop on a CPU (nanogpt.py).
Alone: hacks [models] [NAME ...]: submissions that a referee must not keep, each raced for real (hacks.py).
Alone: referee [NUM_SEARCHES]: false and true keeps of simulated searches, and their runs (referee.py).
Alone: rounding FOLDER trains at other instruction sets what bench/plans/replay/rounding.json is made of (rounding.py).
"""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("overhead", "results", "harness", "slope", "trace")


def main(parts):
    from benchmarks.rows import show

    if parts == ["--hta-python"]:
        print(importlib.import_module("benchmarks.trace").hta_python())
        return 0
    if parts[:1] == ["gpu"]:
        gpu = importlib.import_module("benchmarks.gpu")
        options = dict(part.split("=", 1) for part in parts if "=" in part)
        minutes, path = float(options.get("--minutes", gpu.MOST_MINUTES)), options.get("--rows")
        rows = gpu.measure("--rehearse" in parts, minutes, lambda rows: path and show(rows, path))
        return show(rows, path)
    if parts[:1] in (["faults"], ["inputs"], ["nanogpt"], ["rounding"]):
        return show(importlib.import_module(f"benchmarks.{parts[0]}").measure(*parts[1:]))
    if parts[:1] == ["records"]:
        return importlib.import_module("benchmarks.public_records").main(*parts[1:])
    if parts[:1] in (["contestants"], ["hacks"], ["leaks"], ["referee"]):
        return importlib.import_module(f"benchmarks.{parts[0]}").main(*parts[1:])
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        print(f"{unknown[0]}: choose from {', '.join(PARTS)}", file=sys.stderr)
        return 2
    rows = []
    for part in parts or PARTS[:-2]:
        print(f"measuring {part} ...", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"benchmarks.{part}").measure()
    return show(rows)


if __name__ == "__main__":
    sys.path[:1] = [str(HERE.parent.parent), str(HERE.parent)]  # not this folder: its names are those of the library's
    sys.exit(main(sys.argv[1:]))
