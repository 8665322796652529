"""What the runs of a race share: limits of their process, and the installed Python code with its bytecode.

A run of one arm could change it for those of the other, and so could another process of the same user.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.base import private
from bench.base.paths import REPO
from bench.machine import bytecode, environment, meters

OF_PROCESS = ("cgroup", "autogroup", "timerslack_ns", "oom_score_adj", "coredump_filter")  # of /proc/self, inherited
V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.cfs_burst_us", "cpu.shares")  # limits of cgroup v1, then of v2
LIMITS = (*V1, "cpu.max", "cpu.max.burst", "cpu.weight", "cpu.idle", "cpuset.cpus", "memory.high", "io.max")
PYCACHE = "__pycache__"
APART = (PYCACHE, "site-packages")  # folders that are looked at by themselves
TESTS = "test"  # the standard library's own, which no run imports
BYTECODE = re.compile(r"\.([^.]+)(\.opt-\d)?\.pyc$")
ANSWER_S, BATCH = 60.0, 500  # for an interpreter to start, and to compile so many sources
CHECK = Path(bytecode.__file__).read_text()
ASK = """
import json, os, site, sys, sysconfig
found = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages") or ".zip" in path]
found += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
found += [site.getusersitepackages(), *site.getsitepackages()]
print(json.dumps([sys.implementation.cache_tag, sorted(set(found))]))
"""  # what a .pth adds besides is noted where it is read: see bench/training/open_watch.py
Bytecode = tuple[str, int, int]  # path, inode, ns of the last change
VERSION = "2:"  # begins python_sha256(), as another version of this program hashes other facts
FILE_TIME_S = 0.02  # by which a file system's clock may lag behind


def facts(pythons: Iterable[str] = ()) -> dict[str, Any]:
    """Returns what the runs of a race get from this process and from the installed Python, by name.

    pythons: as in python_code().
    """
    shared: dict[str, Any] = {"the priority": os.getpriority(os.PRIO_PROCESS, 0)}
    shared["the CPU cores"] = meters.usable_cpus()
    with contextlib.suppress(AttributeError, OSError):
        shared["the scheduling policy"] = os.sched_getscheduler(0)
    numbers = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    shared |= {f"the {name}": resource.getrlimit(number) for name, number in numbers.items()}
    shared |= {f"the {name}": environment.text_of(f"/proc/self/{name}") for name in OF_PROCESS}
    groups = environment.cgroups("cpu")
    shared["the limits of the control groups"] = [
        [environment.text_of(group / limit) for limit in LIMITS] for group in groups
    ]
    return shared | python_code(pythons)


def python_code(pythons: Iterable[str] = ()) -> dict[str, list[int]]:
    """Returns {"the Python code in FOLDER": _state_of_code()} and each interpreter's state.

    pythons: the paths of interpreters besides this one.  A folder takes a tenth of a CPU second for 20,000 files.
    """
    interpreters = {sys.executable, *pythons}
    folders = {folder for path in interpreters for folder in _installation(path).folders}
    states = {f"the Python code in {private.redact(path, REPO)}": _state_of_code(path) for path in folders}
    return states | {f"the interpreter {private.redact(path, REPO)}": _interpreter(Path(path)) for path in interpreters}


def python_sha256(pythons: Iterable[str] = ()) -> str:
    """Returns a hash of python_code(), to be compared after an interrupt."""
    return VERSION + hashlib.sha256(json.dumps(python_code(pythons), sort_keys=True).encode()).hexdigest()


def forged_bytecode(pythons: Iterable[str], since_s: float, known: set[Bytecode]) -> str | None:
    """Returns the path of a .pyc, put there since then, that one of the Pythons would run and that is not its source's.

    Runs write bytecode for the modules that they import.  since_s: as of time.time(); known: bytecode that needs no
    second look, added to in place.
    """
    interpreters = [sys.executable, *pythons]
    by_tag = {_installation(path).cache_tag: path for path in reversed(interpreters)}
    new: dict[str, dict[str, Bytecode]] = {tag: {} for tag in by_tag}  # {tag: {path: what is there}}
    for folder in {folder for path in interpreters for folder in _installation(path).folders}:
        for entry in _files(folder, only=PYCACHE):
            match = BYTECODE.search(entry.name)
            if match and match[1] in by_tag:
                with contextlib.suppress(OSError):  # replaced a moment ago, by one that is looked at after the next run
                    facts, place = entry.stat(), os.stat(os.path.dirname(entry.path))  # which may have been moved
                    found = entry.path, facts.st_ino, facts.st_ctime_ns
                    is_new = max(facts.st_ctime_ns, place.st_ctime_ns) >= (since_s - FILE_TIME_S) * 1e9
                    if is_new and found not in known:
                        new[match[1]][entry.path] = found
    for tag, paths in new.items():
        if forged := _forged(by_tag[tag], list(paths)):
            return private.redact(forged[0], REPO)
        known.update(paths.values())
    return None


def _forged(python: str, paths: Sequence[str]) -> list[str]:
    """Returns those paths of bytecode that are not their source's, by an interpreter that reads no bytecode itself."""
    without, forged = ("-I", "-S", "-B", "-X", f"pycache_prefix={os.devnull}"), list[str]()
    for at in range(0, len(paths), BATCH):
        answer = _answer([python, *without, "-c", CHECK], json.dumps(paths[at : at + BATCH]))
        if answer is None:
            why = f"it did not compare the bytecode that runs wrote with its sources in {ANSWER_S:g} s"
            raise ValueError(f"{private.redact(python, REPO)}: {why}: race again")
        forged += answer
    return forged


class Installation(NamedTuple):
    """What an interpreter runs: the tag of its bytecode, and its standard library and packages."""

    cache_tag: str
    folders: tuple[str, ...]  # absolute, among them zip files; they need not exist


@functools.cache
def _installation(python: str) -> Installation:
    """Asks an interpreter, which may be another version.  One that does not answer can run nothing either."""
    answer = _answer([python, "-c", ASK], "")
    return Installation(answer[0], tuple(map(os.path.abspath, answer[1]))) if answer else Installation("", ())


def _answer(command: Sequence[str], text: str) -> Any:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=ANSWER_S, cwd="/")
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _interpreter(path: Path) -> list[int]:
    """Returns the states of an interpreter, of a link to it, and of its pyvenv.cfg."""
    state: list[int] = []
    for read in (path.lstat, path.stat, (path.parent.parent / "pyvenv.cfg").stat):
        with contextlib.suppress(OSError):
            facts = read()
            state += [facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
    return state


def _state_of_code(path: str) -> list[int]:
    """Returns [number of files, a sum over their inodes and times of change] of a folder or zip, without bytecode.

    The sum also tells a folder that is moved to another's place, whose files keep their times.
    """
    num_files, total = 0, 0
    for file in [path] if os.path.isfile(path) else _files(path):
        with contextlib.suppress(OSError):
            facts = os.stat(file)
            num_files, total = num_files + 1, (total + hash((facts.st_ino, facts.st_ctime_ns))) % 2**63
    return [num_files, total]


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
                    is_library = path == folder and os.path.basename(folder).startswith("python")
                    apart = (*APART, TESTS) if is_library else APART
                    waiting += [entry.path] if entry.name == only or entry.name not in apart else []
                elif is_wanted:
                    yield entry
