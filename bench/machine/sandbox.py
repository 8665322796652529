"""Runs an untrusted program: it sees the system and what it is given, and can change only its own files.

    words, env = sandbox.command(["python", "train.py"], env, readable=[code], writable={work: work}, cwd=work)
    watch = sandbox.Watch(process.pid, limits, work)      then about twice a second: why = watch.exceeded()

Inside there is no network except its own loopback, no other process, no home folder and no key of the kernel's
keyrings.  The file system has SYSTEM and ETC, read-only, what the program is given, and a temporary folder in memory.
When its first process ends, the kernel ends all others, daemons too.  GPU devices are passed on, which has not been
tried on a GPU.

It uses bubblewrap if that is installed and works, else namespaces.py; neither works if the kernel lets no user create
namespaces.  The boundary is the Linux kernel: this is not a virtual machine.
"""

import contextlib
import functools
import glob
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.base.reading import plain_file
from bench.base.units import GIB, KIB
from bench.machine import environment, processes

BUBBLEWRAP, NAMESPACES = "bubblewrap", "namespaces"
WRAPPERS = 2  # processes of either kind between the command and the process that starts it
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/sys")
ETC = (  # what programs look up in /etc; passwords, keys and the configuration of services stay outside
    "alternatives", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
    "mime.types", "nccl.conf", "nsswitch.conf", "OpenCL", "passwd", "protocols", "services", "ssl/certs", "timezone",
)  # fmt: skip
DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
TEMPORARY, SHARED, HOME = "/tmp", "/dev/shm", "/tmp/home"
PASSED_DATA = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "TIKTOKEN_CACHE_DIR")  # variables whose folders may be read
OF_ENVIRONMENT = ("bin", "include", "lib", "lib64", "pyvenv.cfg")  # what a Python reads of its environment's folder
DISK_LOOK_SHARE = 0.02  # share of the time for measuring what it has written
MEMORY_SHARE, MAX_DISK_GIB, MAX_FILES = 0.9, 200.0, 200_000  # for machine_limits() (assumed)
MIN_FREE_GIB = 0.5  # left on the disk that it writes to, and in the machine's memory
MIN_FREE_FILES = 1000
RSS_SHMEM = re.compile(r"^RssShmem:\s+(\d+) kB$", re.MULTILINE)


class Refused(ValueError):
    """No sandbox can be created here; the message says what to install or change."""


@dataclass(frozen=True)
class Limits:
    """What all its processes together may use; None: no limit.

    The kernel enforces cpu_s for each process, disk_gib for each file, and num_processes unless this user is root, for
    whom only NAMESPACES enforces about that, from Linux 6.14 on.  Watch checks the others, and num_processes too.
    """

    memory_gib: float | None = None  # includes its files in memory or, if more, the shared memory of one process
    num_processes: int | None = None  # includes threads
    cpu_s: float | None = None
    disk_gib: float | None = None
    num_files: int | None = None


def machine_limits(wall_s: float | None = None) -> Limits:
    """Returns limits that an honest training run does not reach, so that this machine survives a dishonest one.

    wall_s: how long it may take; None: no limit.
    """
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    num_cpus = os.cpu_count() or 1
    cpu_s = None if wall_s is None else wall_s * num_cpus
    return Limits(MEMORY_SHARE * memory_gib, 256 + 128 * num_cpus, cpu_s, MAX_DISK_GIB, MAX_FILES)


def kind() -> str:
    """Returns BUBBLEWRAP or NAMESPACES, whichever works here.  Raises Refused if neither does."""
    usable, why = _tried()
    if usable is None:
        remedy = "apt-get install bubblewrap (dnf, pacman: the same name)"
        if shutil.which("bwrap"):
            remedy = "allow user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_nam"
            remedy += "espaces=10000; of a container: --security-opt seccomp=unconfined)"
        raise Refused(f"no sandbox can be made here ({why}): {remedy}")
    return usable


@functools.cache
def _tried() -> tuple[str | None, str]:
    """Returns (the first kind that works or None, the last line that a kind which does not work printed)."""
    why = "Linux only"
    for name in _kinds():
        if name == BUBBLEWRAP and not shutil.which("bwrap"):
            continue
        argv, env = command(["/bin/sh", "-c", ":"], {"PATH": os.environ.get("PATH", os.defpath)}, using=name)
        done = subprocess.run(argv, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return name, ""
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return None, why


def _kinds() -> tuple[str, ...]:
    """Returns the kinds in order of preference: see Limits."""
    if sys.platform != "linux":
        return ()
    from bench.machine import namespaces  # imports ctypes, which few launchers need

    return (NAMESPACES, BUBBLEWRAP) if os.geteuid() == 0 and namespaces.HAS_OWN_PIDS else (BUBBLEWRAP, NAMESPACES)


def command(
    argv: Sequence[str],
    env: Mapping[str, str],
    readable: Iterable[Path | str] = (),
    writable: Mapping[Path, Path] | None = None,
    limits: Limits | None = None,
    cwd: Path | str = "/",
    using: str | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Returns (argv, env) that run the command in a sandbox, with its exit code, or 128 + a signal's number.

    env: all variables that it gets, but with the sandbox's folders; environment.passed() removes tokens.  In what is
    returned, those that this process has not got as they are have other names until the command is started.
    readable: files and folders, which keep their absolute paths; writable: {absolute path inside: its source}, which
    may be in a readable folder, and vice versa.  using: the kind, None for kind(), which may raise Refused.
    """
    from bench.machine import namespaces

    using, limits = using or kind(), limits or Limits()
    half = "" if limits.memory_gib is None else str(int(limits.memory_gib * GIB / 2))
    by_path = {path: ("link", os.readlink(path)) for path in SYSTEM if os.path.islink(path)}
    by_path |= {path: ("ro", path) for path in SYSTEM if os.path.isdir(path) and not os.path.islink(path)}
    by_path |= {path: ("ro", os.path.realpath(path)) for name in ETC if os.path.exists(path := f"/etc/{name}")}
    by_path |= {"/proc": ("proc", ""), "/dev": ("dev", ""), SHARED: ("tmpfs", half)}
    by_path |= {TEMPORARY: ("tmpfs", half), HOME: ("dir", "")}
    by_path |= {path: ("device", path) for pattern in DEVICES for path in sorted(glob.glob(pattern))}
    readable_paths = [*readable, *filter(os.path.isdir, (os.environ.get(name, "") for name in PASSED_DATA))]
    whole = {os.path.realpath(path) for path in readable_paths}
    by_path |= {path: ("ro", path) for path in whole}
    for path in map(os.path.abspath, readable_paths):  # links; those inside readable folders exist already
        if not whole & {path, *map(str, Path(path).parents)}:
            by_path[path] = "link" if os.path.islink(path) and os.path.isfile(path) else "ro", os.path.realpath(path)
    for inside, source in (writable or {}).items():
        by_path[str(inside)] = "rw", os.path.realpath(source)
    mounts = [(mode, source, path) for path, (mode, source) in sorted(by_path.items(), key=lambda item: Path(item[0]))]
    argv = [*_rlimits(limits), *argv]
    env = {name: value for name, value in env.items() if not name.startswith("XDG_")}
    env |= {"HOME": HOME, "TMPDIR": TEMPORARY}
    # the loader of a program obeys LD_PRELOAD and its like, and the helper's runs outside of the sandbox
    is_ours = {name: name.startswith("SPEEDRUN") or os.environ.get(name) == value for name, value in env.items()}
    env = {name if is_ours[name] else f"{namespaces.INSIDE}{name}": value for name, value in env.items()}
    helper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("namespaces.py"))]
    if using == BUBBLEWRAP:
        return [*helper, "null", *_bubblewrap(mounts), "--chdir", str(cwd), "--", *argv], env
    return [*helper, json.dumps([mounts, str(cwd), limits.num_processes]), *argv], env


def _rlimits(limits: Limits) -> list[str]:
    values = {"nproc": limits.num_processes, "cpu": limits.cpu_s, "fsize": limits.disk_gib and limits.disk_gib * GIB}
    options = [f"--{name}={int(number)}" for name, number in values.items() if number is not None]
    return [shutil.which("prlimit") or "prlimit", "--core=0", *options, "--"]


@functools.cache
def _options() -> str:
    """Returns the help text of the installed bubblewrap: older ones lack some options."""
    return subprocess.run(["bwrap", "--help"], capture_output=True, text=True).stdout


def _bubblewrap(mounts: Iterable[tuple[str, str, str]]) -> list[str]:
    command = [shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-all", "--cap-drop", "ALL"]
    command += ["--new-session", "--die-with-parent", "--hostname", "localhost"]  # gloo can resolve this name
    command += ["--disable-userns"] * ("--disable-userns" in _options())
    options = {"ro": "--ro-bind", "rw": "--bind", "device": "--dev-bind", "link": "--symlink"}
    for kind, source, path in mounts:
        if kind == "tmpfs" and source and "--size" in _options():
            command += ["--size", source]
        command += [options[kind], source, path] if kind in options else [f"--{kind}", path]
    # the machine's root could write there without capabilities, for example core_pattern, which the kernel runs
    return [*command, "--ro-bind", "/proc/sys", "/proc/sys", "--remount-ro", "/dev", "--remount-ro", "/"]


def _of_environment(folder: str) -> set[str]:
    """Returns what a Python reads of its environment's folder, without links that lead out of it."""
    paths = {os.path.join(folder, name) for name in OF_ENVIRONMENT}
    return {path for path in paths if os.path.realpath(path).startswith(f"{os.path.realpath(folder)}/")}


def python_files(python: str) -> list[str]:
    """Returns what an interpreter reads: folders of its environment, that of its base, and links on the way.

    Such a link may lie in ~/.local/bin, whose neighbours hold keyrings, so only the link itself is passed on.  So is an
    interpreter whose folder has no standard library: a stranger's links may lead to one of the user's folders.
    """
    paths, path = set[str](), os.path.abspath(python)
    while os.path.islink(path):
        folder = os.path.dirname(os.path.dirname(path))
        if os.path.isfile(f"{folder}/pyvenv.cfg"):  # of which a user may have made a whole project's folder
            paths |= _of_environment(folder)
        elif not path.startswith(tuple(f"{system}/" for system in SYSTEM)):
            paths.add(path)
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    base = os.path.dirname(os.path.dirname(path))
    if os.path.isfile(f"{base}/pyvenv.cfg"):  # with a copy of the interpreter
        paths |= _of_environment(base)
    paths.add(base if any(Path(base).glob("lib*/*/os.py")) else path)
    whole = {"/", os.path.realpath(os.path.expanduser("~")), *map(os.path.realpath, SYSTEM)}
    return sorted(path for path in paths if os.path.exists(path) and os.path.realpath(path) not in whole)


class Watch:
    """Checks whether the processes below a process keep to their limits.

    pid: of the process that started the sandbox, or of an ancestor that starts nothing else; folder: all they write to.
    """

    def __init__(self, pid: int, limits: Limits, folder: Path):
        self._pid, self._limits, self._folder = pid, limits, folder
        self._next_disk_s, self._unseen = 0.0, dict[str, str]()  # folders that could not be read, at the last look

    def exceeded(self) -> str | None:
        """Returns a sentence about the limit that was exceeded, or None."""
        limits, now_s = self._limits, time.monotonic()
        num_tasks, memory_gib = _used(processes.descendants(self._pid))
        if limits.num_processes is not None and num_tasks > limits.num_processes:
            return f"it had {num_tasks} processes and threads, and may have {limits.num_processes}"
        if limits.memory_gib is not None and memory_gib > limits.memory_gib:
            return f"it held {memory_gib:.1f} GiB of memory, and may hold {limits.memory_gib:.1f}"
        if limits.memory_gib is not None and (environment.meminfo_gib("MemAvailable") or math.inf) < MIN_FREE_GIB:
            return f"less than {MIN_FREE_GIB:g} GiB of this machine's memory are left"
        if now_s < self._next_disk_s:
            return None
        why = self._exceeded_disk()
        self._next_disk_s = time.monotonic() + (time.monotonic() - now_s) / DISK_LOOK_SHARE
        return why

    def _exceeded_disk(self) -> str | None:
        limits, num_bytes, num_files = self._limits, 0, 0
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < MIN_FREE_GIB * GIB:
            return f"less than {MIN_FREE_GIB:g} GiB are left on the disk that it writes to"
        if disk.f_files and disk.f_favail < MIN_FREE_FILES:
            return f"fewer than {MIN_FREE_FILES} files can be made on the disk that it writes to"
        unseen: dict[str, str] = {}  # {folder that could not be read: why}
        for entry in plain_file.entries_below(self._folder, unseen.__setitem__):
            with contextlib.suppress(OSError):  # it no longer exists
                num_bytes, num_files = num_bytes + entry.stat(follow_symlinks=False).st_blocks * 512, num_files + 1
            if limits.num_files is not None and num_files > limits.num_files:
                return f"it wrote more than {limits.num_files} files"
        lasting, self._unseen = unseen.items() & self._unseen.items(), unseen
        if lasting:
            path, why = min(lasting)
            return f"files that it wrote cannot be counted, in {path[len(str(self._folder)) + 1 :][:200]}: {why}"
        if limits.disk_gib is not None and num_bytes > limits.disk_gib * GIB:
            return f"it wrote {num_bytes / GIB:.1f} GiB, and may write {limits.disk_gib:.1f}"
        return None


def _used(pids: Iterable[int]) -> tuple[int, float]:
    """Returns (processes and threads, GiB of memory not shared plus GiB of files in memory).

    Files in memory are those of their folders, and open ones that are in no folder (memfd_create(2)); or the most
    shared memory that one of the processes maps, if that is more.

    Not seen: shared memory written by processes that have ended, or of which several processes each have their own; an
    open file that waits in a socket.  Watch sees what all of this leaves of the machine's memory.  /proc/PID/maps names
    the former, but with it, a fork bomb of 40 processes in namespaces (two busy cores) was ended only after over 40 s,
    without it after 8 s: reading it seems to wait for processes that fork.
    """
    num_tasks, num_bytes, num_shared_bytes, page_bytes = 0, 0, 0, os.sysconf("SC_PAGE_SIZE")
    # {(file system, file of a memfd): bytes}, without the machine's own
    in_memory: dict[tuple[int, int | None], int] = {(os.stat(path).st_dev, None): 0 for path in (TEMPORARY, SHARED)}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            num_tasks += int(processes.stat_fields(pid)[17])
            resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
            num_bytes += (int(resident) - int(shared)) * page_bytes
            if mapped := RSS_SHMEM.search(Path(f"/proc/{pid}/status").read_text(errors="replace")):
                num_shared_bytes = max(num_shared_bytes, int(mapped[1]) * KIB)
            for path in (TEMPORARY, SHARED):
                inside = f"/proc/{pid}/root{path}"
                if (device := (os.stat(inside).st_dev, None)) not in in_memory:
                    disk = os.statvfs(inside)
                    in_memory[device] = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # the file has been closed
                    if os.readlink(f"/proc/{pid}/fd/{number}").startswith("/memfd:"):
                        held = os.stat(f"/proc/{pid}/fd/{number}")
                        in_memory[held.st_dev, held.st_ino] = held.st_blocks * 512
    return num_tasks, (num_bytes + max(num_shared_bytes, sum(in_memory.values()))) / GIB
