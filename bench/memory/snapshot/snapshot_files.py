"""Where a run folder holds its snapshots."""

from bench.memory.rss import SUFFIX

PATTERNS = ("memory/*.pickle", "memory/*" + SUFFIX, "traces/**/*_mem.pickle")


def in_folder(folder):
    """Paths, sorted."""
    return sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
