"""Words of the user -> jobs: whose traces are read together."""

from collections.abc import Iterable
from pathlib import Path

from bench.record import named


def jobs(words: Iterable[str]) -> list[tuple[list[str], list[Path]]]:
    """(words, paths) of each job: all files are the ranks of one, each folder is one.  ValueError: unknown word."""
    files, folders = [], []
    for word in words:
        for path in named.find([word])[0].holders:
            (files if path.is_file() else folders).append((word, path))
    found = [files] * bool(files) + [[one] for one in folders]
    return [(list(dict.fromkeys(word for word, _ in job)), [path for _, path in job]) for job in found]
