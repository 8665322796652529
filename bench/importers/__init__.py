"""Training logs of other harnesses -> records.  One file a format; records.py makes records of what they find.

    runs = load(["records/track_1_short/2026-02-28_TransposeCopyBackward/baseline"])     nothing is written
"""

import os
from pathlib import Path

from bench.importers import consoles, modded_nanogpt, records

FORMATS = ("modded-nanogpt", "nanochat", "nanogpt", "kempnerforge")
SUFFIXES = (".txt", ".log", ".stdout", ".out")


def load(paths, form="modded-nanogpt"):
    """Logs and folders of logs -> records in memory, without those of files that are no training logs."""
    return [record for path, part_of in files(paths) for record, _ in read(path, form, part_of)[0]]


def files(paths):
    """Words of a user -> [(file, folder it was found under, or None)], each once.  ValueError for what is not there."""
    found = {}
    for word in paths:
        path = Path(word)
        if path.is_file():
            found.setdefault(path.resolve(), None)
        elif path.is_dir():
            for folder, _, names in sorted(os.walk(path)):
                for name in sorted(names):
                    if name.endswith(SUFFIXES):
                        found.setdefault(Path(folder, name).resolve(), path.resolve())
        else:
            raise ValueError(f"{word}: there is no such file or folder; give logs ({', '.join(SUFFIXES)}) or folders of them")
    return list(found.items())


def read(path, form="modded-nanogpt", part_of=None):
    """One file -> (list of (record, rows of steps.csv), {"unmatched", "num_tail_lines", "format_id", "sha256", "num_bytes"})."""
    if form not in FORMATS:
        raise ValueError(f"{form}: there is no such format; choose from {', '.join(FORMATS)}")
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    runs, facts = modded_nanogpt.read(data, Path(path).name) if form == "modded-nanogpt" else consoles.read(data, form)
    digest = records.sha256(data)
    found = [records.of_run(run, path, digest, form, len(runs), facts["format_id"], part_of) for run in runs]
    return found, facts | {"sha256": digest, "num_bytes": len(data)}
