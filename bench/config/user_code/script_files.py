"""The files of a user's training script: those that are its identity, and what may lie beside it.

The sources in the script's folder and below are read, hashed and kept; everything else there (data, pictures, large
files) the script finds by a link, and it is not part of the identity.
"""

import os
from pathlib import Path

MAIN = ":__main__"  # PATH:__main__ names a script where a class is PATH:NAME (bench/config/user_code/classes.py)
SUFFIXES = (".py", ".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".ptx", ".sh")
PROGRAMS = tuple(suffix for suffix in SUFFIXES if suffix != ".sh")  # a shell's file may hold anything: export KEY=...
TEXTS = (".json", ".toml", ".yaml", ".yml", ".txt", ".cfg")  # beside the script only: what it may read as settings
# Folders that hold what programs wrote, and environments: neither part of the identity nor linked.
OUTPUTS = ("logs", "log", "out", "outputs", "results", "runs", "wandb", "checkpoints", "__pycache__", "node_modules")
APART = ("data", "records")  # linked, and no part of the identity: data, and other people's runs
MAX_FILES = 400
MAX_BYTES = 2**20  # of a file
MAX_DEPTH = 4


def sources(script: Path) -> dict[str, Path]:
    """{"script/train_gpt.py": its path} of the sources beside the script and below, but for EXCLUDED, sorted."""
    result = {script.name: script}
    for parent, folders, names in os.walk(script.parent):
        below = Path(parent).relative_to(script.parent)
        folders[:] = sorted(name for name in folders if is_searched(Path(parent, name), len(below.parts)))
        suffixes = SUFFIXES if below.parts else SUFFIXES + TEXTS
        for name in sorted(names):
            path = Path(parent, name)
            if path.suffix in suffixes and len(result) < MAX_FILES and _is_small(path):
                result[(below / name).as_posix()] = path
    return {f"script/{name}": result[name] for name in sorted(result)}


EXCLUDED = (
    f"files but {', '.join(SUFFIXES)} (and {', '.join(TEXTS)} beside the script), of more than {MAX_BYTES} bytes, "
    f"the {MAX_FILES + 1}th and later ones, hidden folders, environments, folders deeper than {MAX_DEPTH}, "
    f"and the folders {', '.join((*APART, *OUTPUTS))}"
)


def is_searched(folder: Path, depth: int) -> bool:
    """Whether the sources in this folder, so deep below the script's, are part of the identity."""
    return folder.name not in APART and is_linked(folder) and depth < MAX_DEPTH and not folder.is_symlink()


def is_linked(path: Path) -> bool:
    """Whether the script shall find it: not what earlier runs wrote, which it would write into."""
    if path.name.startswith("."):
        return False
    return not path.is_dir() or (path.name not in OUTPUTS and not (path / "pyvenv.cfg").exists())


def _is_small(path):
    try:
        return path.is_file() and path.stat().st_size <= MAX_BYTES
    except OSError:
        return False
