"""Where a run folder holds its snapshots."""

from pathlib import Path

from bench.memory.rss import SUFFIX

PATTERNS = ("memory/*.pickle", "memory/*" + SUFFIX, "traces/**/*_mem.pickle")


def in_folder(folder: Path) -> list[Path]:
    """Run folder -> paths of its snapshots, sorted; [] without any."""
    return sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
