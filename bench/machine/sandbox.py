"""Runs a program that nobody here vouches for: it sees the system and the folders that it is given, and nothing else.

    words, env = sandbox.command(["python", "train.py"], os.environ, readable=[code], writable=[work], limits=Limits())
    watch = sandbox.Watch(process.pid, limits, [work])      then now and then: why = watch.exceeded()

Inside there is no network but its own loopback, no other process, no home folder, no token.  Of the file system there
are SYSTEM and ETC, read-only, the folders given, and a temporary folder of its own in memory.  When its first process
ends, the kernel ends every other one, daemons too.  GPUs' devices are passed on, which has not been tried on a GPU.

bubblewrap makes it where that is installed and works, else this program's own namespaces.py.  A kernel that lets no
user make namespaces allows neither: Refused.  The kernel of Linux is the wall: this is no virtual machine.
"""

import contextlib
import functools
import glob
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.base.units import GIB, KIB
from bench.machine import environment, processes

BUBBLEWRAP, NAMESPACES, NONE = "bubblewrap", "namespaces", "none"
VARIABLE = "SPEEDRUN_SANDBOX"  # of this process and what it starts: ALWAYS, or NONE for --trust; else it is decided
ALWAYS = "always"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/sys")
ETC = (  # what programs look up there; passwords, keys and the configuration of services stay outside
    "alternatives", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
    "mime.types", "nccl.conf", "nsswitch.conf", "OpenCL", "passwd", "protocols", "services", "ssl/certs", "timezone",
)  # fmt: skip
DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
TEMPORARY, HOME = "/tmp", "/tmp/home"
PASSED_DATA = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "TIKTOKEN_CACHE_DIR")  # folders that may be read, where set
DISK_LOOK_SHARE = 0.02  # of the time, spent looking at what it wrote
MIN_FREE_GIB = 0.5  # where it writes: below it the run is ended, whoever filled the disk


class Refused(ValueError):
    """No sandbox can be made here; the message says what to install or to change."""


@dataclass(frozen=True)
class Limits:
    """What all its processes together may use; None: as much as there is.

    The kernel holds cpu_s, and num_processes unless this user is root; Watch looks for the others, and for that.
    """

    memory_gib: float | None = (
        None  # without what it shares; its temporary folder and /dev/shm may hold half of it each
    )
    num_processes: int | None = None  # threads count too
    cpu_s: float | None = None  # of each process
    wall_s: float | None = None
    disk_gib: float | None = None  # in the writable folders
    num_files: int | None = None  # in the writable folders


def of_machine() -> Limits:
    """What an honest training run stays below, so that this machine survives one that is not."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return Limits(0.9 * memory_gib, num_processes=256 + 128 * (os.cpu_count() or 1), disk_gib=200.0, num_files=200_000)


def kind() -> str:
    """BUBBLEWRAP or NAMESPACES, whichever works here, by trying it once.  Refused: neither does."""
    found, why = _tried()
    if found is None:
        remedy = "apt-get install bubblewrap (dnf, pacman: the same name)"
        if shutil.which("bwrap"):
            remedy = "allow user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_nam"
            remedy += "espaces=10000; of a container: --security-opt seccomp=unconfined)"
        raise Refused(f"no sandbox can be made here ({why}): {remedy}, or read the code and add --trust")
    return found


@functools.cache
def _tried() -> tuple[str | None, str]:
    """-> (kind that works or None, what the last that does not said)."""
    why = "not Linux"
    for name in (BUBBLEWRAP, NAMESPACES) if sys.platform == "linux" else ():
        if name == BUBBLEWRAP and not shutil.which("bwrap"):
            continue
        words, env = command(["/bin/sh", "-c", ":"], {"PATH": os.environ.get("PATH", os.defpath)}, of=name)
        tried = subprocess.run(words, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if tried.returncode == 0:
            return name, ""
        why = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    return None, why


def command(
    words: Sequence[str],
    env: Mapping[str, str],
    readable: Iterable[Path | str] = (),
    writable: Iterable[Path | str] = (),
    limits: Limits | None = None,
    cwd: Path | str = "/",
    of: str | None = None,
) -> tuple[list[str], dict[str, str]]:
    """-> (words, env) that run this command in a sandbox.  Its exit code is the command's, of a signal 128 + number.

    readable, writable: files and folders that exist, by absolute paths, which they keep inside; a folder in a folder
    may have the other right.  env: of it the command gets environment.passed().  of: the kind, None: kind().
    Refused: none can be made here.
    """
    of, limits = of or kind(), limits or Limits()
    inside = environment.passed(env) | {"HOME": HOME, "TMPDIR": TEMPORARY, VARIABLE: NONE}
    inside = {name: value for name, value in inside.items() if not name.startswith("XDG_")}
    half = None if limits.memory_gib is None else int(limits.memory_gib * GIB / 2)
    found = {str(path): ("ro", str(path)) for path in SYSTEM if os.path.isdir(path) and not os.path.islink(path)}
    found |= {
        f"/etc/{name}": ("ro", os.path.realpath(f"/etc/{name}")) for name in ETC if os.path.exists(f"/etc/{name}")
    }
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    found |= {path: ("link", target) for path, target in links.items()}
    found |= {"/proc": ("proc", ""), "/dev": ("dev", ""), "/dev/shm": ("tmpfs", str(half or ""))}
    found |= {TEMPORARY: ("tmpfs", str(half or "")), HOME: ("dir", "")}
    found |= {path: ("device", path) for pattern in DEVICES for path in sorted(glob.glob(pattern))}
    given = [env[name] for name in PASSED_DATA if os.path.isdir(env.get(name, ""))]
    for right, paths in (("ro", [*given, *readable]), ("rw", writable)):
        found |= {os.path.abspath(path): (right, os.path.realpath(path)) for path in paths}
    mounts = [(what, source, path) for path, (what, source) in sorted(found.items(), key=lambda of: Path(of[0]).parts)]
    limited = [*_rlimits(limits), *words]
    if of == NAMESPACES:
        helper = str(Path(__file__).with_name("namespaces.py"))
        return [sys.executable, "-I", "-S", helper, json.dumps([mounts, str(cwd)]), *limited], inside
    return [*_bubblewrap(mounts), "--chdir", str(cwd), "--", *limited], inside


def _rlimits(limits: Limits) -> list[str]:
    given = {"nproc": limits.num_processes, "cpu": limits.cpu_s, "fsize": limits.disk_gib and limits.disk_gib * GIB}
    options = [f"--{name}={int(number)}" for name, number in given.items() if number is not None]
    return [shutil.which("prlimit") or "prlimit", "--core=0", *options, "--"]


@functools.cache
def _options() -> str:
    """The options of the bubblewrap that is installed: older ones lack some."""
    return subprocess.run(["bwrap", "--help"], capture_output=True, text=True).stdout


def _bubblewrap(mounts: Iterable[tuple[str, str, str]]) -> list[str]:
    words = [shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-all", "--cap-drop", "ALL", "--new-session"]
    words += ["--die-with-parent", "--hostname", "localhost"]  # a name that gloo finds
    words += ["--disable-userns"] * ("--disable-userns" in _options())
    options = {"ro": "--ro-bind", "rw": "--bind", "device": "--dev-bind", "link": "--symlink"}
    for what, source, path in mounts:
        if what == "tmpfs" and source and "--size" in _options():
            words += ["--size", source]
        words += [options[what], source, path] if what in options else [f"--{what}", path]
    # root of this machine could set it without any right, core_pattern among it, a program that the kernel runs
    return [*words, "--ro-bind", "/proc/sys", "/proc/sys", "--remount-ro", "/dev", "--remount-ro", "/"]


def of_python(python: str) -> list[str]:
    """Folders that an interpreter needs to be readable: its environment, and those that it is made from."""
    found, path = set[str](), os.path.abspath(python)
    while True:
        found.add(os.path.dirname(os.path.dirname(path)))
        if not os.path.islink(path):
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    whole = {"/", os.path.expanduser("~"), *SYSTEM}
    return sorted(folder for folder in found if folder not in whole and os.path.isdir(folder))


class Watch:
    """Whether what runs below a process keeps to its limits.

    pid: of the process that started the sandbox, or of an ancestor that starts nothing else; writable: as of command().
    """

    def __init__(self, pid: int, limits: Limits, writable: Iterable[Path | str]):
        self._pid, self._limits, self._writable = pid, limits, [os.path.realpath(path) for path in writable]
        self._began_s = time.monotonic()
        self._next_disk_s = 0.0

    def exceeded(self) -> str | None:
        """Which limit it has passed, as a sentence; None: none.  To be asked about twice a second."""
        limits, now_s = self._limits, time.monotonic()
        pids = processes.descendants(self._pid)
        num_tasks, memory_gib = _used(pids)
        if limits.num_processes is not None and num_tasks > limits.num_processes:
            return f"it had {num_tasks} processes and threads, and may have {limits.num_processes}"
        if limits.memory_gib is not None and memory_gib > limits.memory_gib:
            return f"it held {memory_gib:.1f} GiB of memory, and may hold {limits.memory_gib:.1f}"
        if limits.wall_s is not None and now_s - self._began_s > limits.wall_s:
            return f"it ran for {now_s - self._began_s:.0f} s, and may run for {limits.wall_s:g}"
        if now_s >= self._next_disk_s:
            why = self._exceeded_disk()
            self._next_disk_s = time.monotonic() + (time.monotonic() - now_s) / DISK_LOOK_SHARE
            return why
        return None

    def _exceeded_disk(self) -> str | None:
        limits, num_bytes, num_files = self._limits, 0, 0
        for folder in self._writable:
            with contextlib.suppress(OSError):
                disk = os.statvfs(folder)
                if disk.f_bavail * disk.f_frsize < MIN_FREE_GIB * GIB:
                    return f"where it writes less than {MIN_FREE_GIB:g} GiB were left"
            for size, number in _written(folder):
                num_bytes, num_files = num_bytes + size, num_files + number
                if limits.num_files is not None and num_files > limits.num_files:
                    return f"it wrote more than {limits.num_files} files"
        if limits.disk_gib is not None and num_bytes > limits.disk_gib * GIB:
            return f"it wrote {num_bytes / GIB:.1f} GiB, and may write {limits.disk_gib:.1f}"
        return None


def _used(pids: Iterable[int]) -> tuple[int, float]:
    """-> (processes and threads, GiB that they do not share)."""
    num_tasks, num_pages = 0, 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            num_tasks += int(processes.stat_fields(pid)[17])
            resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
            num_pages += int(resident) - int(shared)
    return num_tasks, num_pages * os.sysconf("SC_PAGE_SIZE") / GIB


def _written(path: str) -> Iterable[tuple[int, int]]:
    """(bytes on disk, 1) of each entry at and below path; links are not followed."""
    with contextlib.suppress(OSError):
        yield os.lstat(path).st_blocks * KIB // 2, 1
        folders = [path] if os.path.isdir(path) else []
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    yield entry.stat(follow_symlinks=False).st_blocks * KIB // 2, 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
