"""What the runs of a race share: limits of their process, and the installed Python code with its bytecode.

A run of one arm could change it for those of the other, and so could another process of the same user.
"""

import contextlib
import hashlib
import importlib.util
import json
import marshal
import os
import re
import resource
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.base import private
from bench.base.paths import REPO
from bench.machine import environment

OF_PROCESS = ("cgroup", "autogroup", "timerslack_ns", "oom_score_adj", "coredump_filter")  # of /proc/self, inherited
CPU_LIMITS = ("cpu.max", "cpu.weight", "cpu.cfs_quota_us", "cpu.shares", "cpuset.cpus")  # of cgroup v2 and v1
PYCACHE = "__pycache__"
APART = (PYCACHE, "test")  # folders without code that runs import
HEADER_BYTES = 16  # of a .pyc: magic number, flags, time and size of the source
FILE_TIME_S = 0.02  # by which a file system's clock may lag behind


def facts(pythons: Iterable[str] = ()) -> dict[str, Any]:
    """Returns what the runs of a race get from this process and from the installed Python, by name.

    pythons: as in python_code().
    """
    shared: dict[str, Any] = {"the priority": os.getpriority(os.PRIO_PROCESS, 0)}
    if hasattr(os, "sched_getaffinity"):
        shared |= {"the CPU cores": os.sched_getaffinity(0), "the scheduling policy": os.sched_getscheduler(0)}
    numbers = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    shared |= {f"the {name}": resource.getrlimit(number) for name, number in numbers.items()}
    shared |= {f"the {name}": environment.text_of(f"/proc/self/{name}") for name in OF_PROCESS}
    groups = environment.cgroups("cpu")
    shared["the limits of the control groups"] = [
        [environment.text_of(group / limit) for limit in CPU_LIMITS] for group in groups
    ]
    return shared | python_code(pythons)


def python_code(pythons: Iterable[str] = ()) -> dict[str, list[int]]:
    """Returns {"the Python code in FOLDER": [number of files, last change]} and each interpreter's state.

    pythons: the paths of interpreters besides this one.  A folder takes a tenth of a CPU second for 20,000 files.
    """
    interpreters = {sys.executable, *pythons}
    states = {f"the Python code in {private.redact(path, REPO)}": _last_change(path) for path in _folders(interpreters)}
    return states | {f"the interpreter {private.redact(path, REPO)}": _interpreter(Path(path)) for path in interpreters}


def python_sha256(pythons: Iterable[str] = ()) -> str:
    """Returns a hash of python_code(), to be compared after an interrupt."""
    return hashlib.sha256(json.dumps(python_code(pythons), sort_keys=True).encode()).hexdigest()


def forged_bytecode(pythons: Iterable[str], since_s: float, known: set[tuple[str, int]]) -> str | None:
    """Returns the path of the first .pyc, written since then, that Python would run and that is not its source's.

    Runs write bytecode for the modules that they import.  since_s: as of time.time(); known: (path, st_ctime_ns) of
    bytecode that needs no second look, added to in place.  Only bytecode of this version of Python is read.
    """
    is_bytecode = re.compile(rf"\.{re.escape(str(sys.implementation.cache_tag))}(\.opt-\d)?\.pyc$")
    for folder in _folders({sys.executable, *pythons}):
        for entry in _files(folder, only=PYCACHE):
            changed_ns = 0
            with contextlib.suppress(OSError):  # replaced a moment ago, by one that is looked at after the next run
                changed_ns = entry.stat().st_ctime_ns if is_bytecode.search(entry.name) else 0
            if changed_ns >= (since_s - FILE_TIME_S) * 1e9 and (entry.path, changed_ns) not in known:
                if not _is_of_its_source(Path(entry.path)):
                    return private.redact(entry.path, REPO)
                known.add((entry.path, changed_ns))
    return None


def _is_of_its_source(path: Path) -> bool:
    """Returns whether this bytecode is what its source compiles to, or is not used because it is of another state."""
    try:
        source = Path(importlib.util.source_from_cache(str(path)))
        content, text, facts = path.read_bytes(), source.read_bytes(), source.stat()
        flags, time_s, num_bytes = (int.from_bytes(content[at : at + 4], "little") for at in (4, 8, 12))
        if not flags and (time_s, num_bytes) != (int(facts.st_mtime) & 0xFFFFFFFF, facts.st_size & 0xFFFFFFFF):
            return True
        level = path.name.rpartition(".opt-")[2].removesuffix(".pyc") if ".opt-" in path.name else "0"
        expected = compile(text, str(source), "exec", dont_inherit=True, optimize=int(level))
        return bool(marshal.loads(content[HEADER_BYTES:]) == expected)  # which compares all but file names
    except (FileNotFoundError, NotImplementedError):  # without its source it is not used
        return True
    except (OSError, SyntaxError, ValueError, EOFError, TypeError):
        return False


def _folders(interpreters: Iterable[str]) -> set[str]:
    folders = {site.getusersitepackages(), *site.getsitepackages()}
    folders |= set(map(str, Path(site.getuserbase()).glob("lib/python*/site-packages")))  # of any version
    folders |= {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    for path in map(Path, interpreters):
        folders |= set(map(str, path.parent.parent.glob("lib/python*/site-packages")))
        folders |= set(map(str, Path(os.path.realpath(path)).parent.parent.glob("lib/python*")))  # of a venv's base
    return folders


def _interpreter(path: Path) -> list[int]:
    """Returns the states of an interpreter, of a link to it, and of its pyvenv.cfg."""
    state: list[int] = []
    for read in (path.lstat, path.stat, (path.parent.parent / "pyvenv.cfg").stat):
        with contextlib.suppress(OSError):
            facts = read()
            state += [facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
    return state


def _last_change(folder: str) -> list[int]:
    """Returns [number of files below a folder, st_ctime_ns of the one that was changed last], without bytecode."""
    num_files, last_ns = 0, 0
    for entry in _files(folder):
        with contextlib.suppress(OSError):
            num_files, last_ns = num_files + 1, max(last_ns, entry.stat().st_ctime_ns)
    return [num_files, last_ns]


def _files(folder: str, only: str | None = None) -> Iterator[os.DirEntry[str]]:
    """Yields the files below a folder, also those that links lead to; only: of the folders of this name alone."""
    seen, waiting = set[tuple[int, int]](), [folder]
    while waiting:
        path = waiting.pop()
        is_wanted = only in (None, os.path.basename(path))
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            facts = os.stat(path)
            if (facts.st_dev, facts.st_ino) in seen:  # by a link
                continue
            seen.add((facts.st_dev, facts.st_ino))
            for entry in entries:
                if entry.is_dir():
                    is_inner = entry.name == only or entry.name not in (*APART, "site-packages")
                    waiting += [entry.path] if is_inner else []
                elif is_wanted:
                    yield entry
