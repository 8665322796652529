"""Notes which files a process reads and makes, by Python's audit events; bench/launch/opened.py judges the notes.

It needs only the standard library of Python 3.8, as script_worker.py runs it beside another torch.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import site
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

DATA = (".bin", ".npy", ".npz", ".parquet", ".arrow", ".pt", ".pth", ".ckpt", ".safetensors")
AGAIN_NS = 100_000_000
MAX_FILES, OTHERS = 100_000, "other files"  # all further ones are noted as one
MAX_MISSING = 1000  # files that were looked for and not there
REDIRECTED = re.compile(r"(?:>>?|\btee(?:\s+-\w+)*\s)\s*([^\s'\"=<>|;&]+)")  # in a command: what it writes
MUCH = 2**62  # bytes that stand for those of other files, and of a folder that is moved
PACKAGES = ("site-packages", "dist-packages")
SETTINGS = ("/etc/", "/proc/sys/", "/sys/")  # of the system: who writes there changes them for all
SYSTEM = ("/bin", "/etc", "/lib", "/lib64", "/proc", "/sys", "/usr")


def watch(path: str, accepted: Iterable[str] = ()) -> None:
    """Appends a line to the file `path` for each file that this process and its forks read, look for or make.

    Not noted are the interpreter, its packages, the system's files but changed settings, compile caches, sources
    of modules that are loaded already (a traceback reads them), and accepted files and folders.  A data file has a line
    whenever it is opened, at most ten a second; any other has one.  Only Python's events are seen and the files that a
    command names, not what torch.from_file, C++ and other programs read.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    now_ns, write_to = time.perf_counter_ns, os.write  # kept before a script can replace them
    by_hand = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # which a contestant's settings may choose
    added = [path for path in sys.path if os.path.basename(path) in PACKAGES and path not in by_hand]  # by .pth files
    packages = _below([sys.prefix, sys.base_prefix, site.getusersitepackages(), *site.getsitepackages(), *added])
    loaded = [file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    unnoted = packages + _below([*SYSTEM, *_caches(), *loaded, *accepted])
    missing: set[str] = set()
    noted: dict[tuple[str, bool, bool, bool], int] = {}  # {(true path, reads, writes, is there): ns of its last line}

    def note(
        name: Any,
        reads: bool,
        writes: bool,
        is_moved: bool = False,
        hides: bool = False,
        itself: bool = False,
        may_miss: bool = False,
    ) -> None:
        named = os.path.abspath(os.fsdecode(name))
        if named.startswith(packages) and not (writes or hides):
            return
        real, status = os.path.realpath(named), None
        if hides or itself:  # a link itself, not what it names
            real = os.path.join(os.path.realpath(os.path.dirname(named)), os.path.basename(named))
        with contextlib.suppress(OSError):
            status = os.stat(real, follow_symlinks=not itself)
        is_folder = status is not None and stat.S_ISDIR(status.st_mode)
        is_file = status is not None and (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode))
        is_here = (is_folder and is_moved) or is_file if status else writes or may_miss
        is_unnoted = f"{real}{os.sep}".startswith(unnoted) and not (writes and real.startswith(SETTINGS))
        if not hides and (not is_here or is_unnoted):
            return
        if status is None and may_miss:
            if real not in missing and len(missing) >= MAX_MISSING:
                return  # a program may look for many; what it finds is noted
            missing.add(real)
        key, t_ns = (real, reads, writes, status is not None), now_ns()
        if key in noted and (not named.endswith(DATA) or t_ns - noted[key] < AGAIN_NS):
            return
        facts: dict[str, Any] = {"path": _utf8(named), "real": _utf8(real), "num_bytes": 0, "changed_ns": 0}
        if status:
            facts.update(num_bytes=MUCH if is_folder else status.st_size, changed_ns=status.st_ctime_ns)
        if key not in noted and len(noted) >= MAX_FILES:
            key, facts = (
                (OTHERS, True, False, True),
                {"path": OTHERS, "real": OTHERS, "num_bytes": MUCH, "changed_ns": 0},
            )
        noted[key] = t_ns
        # what a file without bytes holds later, this process has put there
        facts.update(reads=key[1], writes=key[2], is_new=not facts["num_bytes"], hides=hides, t_ns=t_ns)
        write_to(fd, json.dumps(facts).encode() + b"\n")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError, TypeError, ValueError):  # such as a file descriptor in place of a name
            if event == "open":
                mode = args[2] & os.O_ACCMODE
                note(args[0], mode != os.O_WRONLY, mode != os.O_RDONLY, may_miss=mode == os.O_RDONLY)
            elif event in ("os.rename", "os.link"):
                note(_at(args[0], args[2]), True, False, is_moved=True)
                note(_at(args[1], args[3]), False, True, itself=True)
            elif event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
                arguments = args[:1] if event == "os.system" else args[1][1:]
                text = " ".join(map(os.fsdecode, arguments))
                for word in REDIRECTED.findall(text):
                    note(os.path.expanduser(word), False, True)
                for word in re.split(r"[\s'\"=<>|;&]+", REDIRECTED.sub(" ", text)):
                    note(word, True, False)
            elif event == "os.mkdir" and not os.path.exists(made := _at(args[0], args[2])):
                note(made, False, True)
            elif event == "os.remove":
                note(_at(*args), False, True, itself=True)
            elif event in ("os.symlink", "os.setxattr", "os.utime"):  # which may hold data where no file is opened
                folder_fd = -1 if event == "os.setxattr" else args[-1]
                note(_at(args[event == "os.symlink"], folder_fd), False, False, hides=True)
            elif event in ("import", "ctypes.dlopen"):  # of a compiled module, or of a library
                note(args[event == "import"], True, False)

    sys.addaudithook(hook)


def _at(name: Any, folder_fd: int) -> Any:
    """Returns a name in an open folder (dir_fd=), -1 for none, as a path."""
    return name if folder_fd < 0 else os.path.join(os.readlink(f"/proc/self/fd/{folder_fd}"), os.fsdecode(name))


def _below(folders: Iterable[str]) -> tuple[str, ...]:
    paths = {path for folder in folders for path in (os.path.abspath(folder), os.path.realpath(folder))}
    return tuple(os.path.join(path, "") for path in paths)


def _utf8(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _caches() -> list[str]:
    """Returns the folders of compiled code.  Not all of ~/.cache, which may hold weights and data."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    named = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")]
    caches = [os.path.join(home, name) for name in ("torch_extensions", "torch/kernels", "matplotlib")]
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        caches.append(os.path.join(tempfile.gettempdir(), f"torchinductor_{user}"))
    return [os.path.expanduser("~/.triton"), *caches, *filter(None, named)]
