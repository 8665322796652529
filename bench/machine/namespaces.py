"""A sandbox of Linux namespaces, for machines without bubblewrap:  python -I -S THIS_FILE MOUNTS WORD...

MOUNTS: JSON from sandbox.py, [[[what, source, path], ...], working folder, most processes or null], parents first; or
null: WORD... is then bubblewrap, which creates the namespaces itself, and only refuse_calls() runs before it.  Needs
only the standard library.  Exits with the command's exit code, 128 plus the number for a signal, or 125 after a line on
standard error if no sandbox can be created.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import socket
import struct
import sys

# linux/sched.h: mount, cgroup, UTS, IPC, user, PID and network namespaces
ALL = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH, AT_RECURSIVE, AT_FDCWD = 2, 0x8000, -100
PDEATHSIG, CAPBSET_DROP, NO_NEW_PRIVS = 1, 24, 38  # of linux/prctl.h
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
LAST_CAPABILITY = 63
IS_X86 = os.uname().machine == "x86_64"  # else arm64
AUDIT_ARCH, SECCOMP, SOCKET = (0xC000003E, 317, 41) if IS_X86 else (0xC00000B7, 277, 198)
# add_key, request_key, keyctl; shmget, whose memory belongs to no process; io_uring_setup; ptrace, for debuggers;
# openat2, whose mode no filter sees: programs do without it, as on an older kernel
REFUSED_CALLS = (248, 249, 250, 29, 425, 101, 437) if IS_X86 else (217, 218, 219, 194, 425, 117, 437)
# {chmod, fchmod, fchmodat, fchmodat2: which of its arguments is the mode}
MODE_CALLS = {90: 1, 91: 1, 268: 2, 452: 2} if IS_X86 else {52: 1, 53: 2, 452: 2}
# {open, openat; creat, mknod, mknodat: which is the mode}; the flags of the first two come before it
OPENING_CALLS, CREATING_CALLS = ({2: 2, 257: 3}, {85: 1, 133: 1, 259: 2}) if IS_X86 else ({56: 3}, {33: 2})
CREATES = os.O_CREAT | 0o20000000  # or __O_TMPFILE: without either the mode means nothing
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)  # confined by a network namespace
PIVOT_ROOT, MOUNT_SETATTR = 155 if IS_X86 else 41, 442
STAGE, ROOT, OLD = "/tmp", "/new", "/old"  # STAGE: any existing folder; the others are inside it while mounts are made
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
OF_KERNEL = ("sys", "sysrq-trigger", "irq", "bus")  # in /proc, where the machine's root may write without capabilities
FAILED = 125
INSIDE = "SANDBOXED_"  # begins the name of a variable that only the command gets, such as LD_PRELOAD
# Since Linux 6.14 each PID namespace has its own /proc/sys/kernel/pid_max; before, there is one per machine.
HAS_OWN_PIDS = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 14)
LEAST_PIDS = 302  # the least that the kernel accepts, plus one

libc = ctypes.CDLL(None, use_errno=True)


def main(mounts: list[tuple[str, str, str]], folder: str, num_processes: int | None, argv: list[str]) -> int:
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", ALL)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    socket.sethostname("localhost")  # gloo can resolve this name
    _loopback()
    first = os.fork()
    if first:
        return _exit_code(os.waitpid(first, 0)[1])
    _call("prctl", PDEATHSIG, 9, 0, 0, 0)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    _mount("tmpfs", STAGE, MS_NOSUID | MS_NODEV)
    os.mkdir(STAGE + OLD)
    os.mkdir(STAGE + ROOT)
    _call("syscall", PIVOT_ROOT, STAGE.encode(), (STAGE + OLD).encode())
    _mount("tmpfs", ROOT, MS_NOSUID | MS_NODEV, "mode=755")
    for kind, source, path in mounts:
        _add(kind, source, path)
    os.chdir(ROOT)
    _call("syscall", PIVOT_ROOT, b".", b".")  # the old root covers the new one until it is unmounted
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/")
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # no nested ones, in which a program would have all capabilities again
    if num_processes is not None and HAS_OWN_PIDS:  # for root, whom RLIMIT_NPROC does not limit
        with open("/proc/sys/kernel/pid_max", "w") as file:
            file.write(str(max(num_processes, LEAST_PIDS)))
    for path in [f"/proc/{name}" for name in OF_KERNEL] + [path for kind, _, path in mounts if kind == "ro"]:
        if os.path.exists(path):
            if path.startswith("/proc/"):
                _call("mount", path.encode(), path.encode(), None, MS_BIND, None)
            _read_only(path, AT_RECURSIVE)
    _read_only("/dev", 0)
    _read_only("/", 0)
    os.chdir(folder)
    _drop()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.execvpe(argv[0], argv, _inside())
    while True:  # the first process of a namespace inherits all orphans
        pid, status = os.wait()
        if pid == child:
            return _exit_code(status)


def _inside() -> dict[str, str]:
    """Returns the variables that the command gets, those of INSIDE by their own names."""
    return {name.removeprefix(INSIDE): value for name, value in os.environ.items()}


def _changes() -> int:
    """Returns a file descriptor from which bubblewrap reads these variables; other users see its command line."""
    words = [word for name in os.environ if name.startswith(INSIDE) for word in ("--unsetenv", name)]
    words += [word for name, value in _inside().items() for word in ("--setenv", name, value)]
    fd = os.memfd_create("variables", 0)  # which is passed on
    os.write(fd, b"".join(os.fsencode(word) + b"\0" for word in words))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _add(kind: str, source: str, path: str) -> None:
    target = ROOT + path
    is_file = kind == "link" or source.startswith("/") and not os.path.isdir(OLD + source)
    os.makedirs(os.path.dirname(target) if is_file else target, exist_ok=True)
    if kind == "link":
        os.symlink(source, target)
    elif kind in ("ro", "rw", "device"):
        _bind(source, target)
    elif kind == "tmpfs":
        _mount("tmpfs", target, MS_NOSUID | MS_NODEV, f"mode=1777,size={source}" if source else "mode=1777")
    elif kind == "proc":
        _mount("proc", target, MS_NOSUID | MS_NODEV | MS_NOEXEC)
    elif kind == "dev":
        _mount("tmpfs", target, MS_NOSUID, "mode=755")
        for name in DEVICES:
            _bind(f"/dev/{name}", f"{target}/{name}")
        for name, link in (("fd", "self/fd"), ("stdin", "self/fd/0"), ("stdout", "self/fd/1"), ("stderr", "self/fd/2")):
            os.symlink(f"/proc/{link}", f"{target}/{name}")
        os.mkdir(f"{target}/pts")
        _mount("devpts", f"{target}/pts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
        os.symlink("pts/ptmx", f"{target}/ptmx")


def _bind(source: str, target: str) -> None:
    if not os.path.isdir(OLD + source) and not os.path.exists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _call("mount", os.fsencode(OLD + source), os.fsencode(target), None, MS_BIND | MS_REC, None)


def _mount(file_system: str, target: str, flags: int, options: str = "") -> None:
    _call("mount", file_system.encode(), target.encode(), file_system.encode(), flags, options.encode())


def _read_only(path: str, flags: int) -> None:
    attributes = struct.pack("4Q", MS_RDONLY | MS_NOSUID, 0, 0, 0)  # struct mount_attr of linux/mount.h
    _call("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, len(attributes))


def _loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)


def _drop() -> None:
    """Drops all capabilities in these namespaces, too, and refuses calls."""
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # version 3 of linux/capability.h
    _call("capset", header, none)
    refuse_calls()


def refuse_calls() -> None:
    """Refuses what namespaces leave open: the user's keys (keyrings(7)), and sockets to the machine's host (vsock(7)).

    System V shared memory is refused because it outlives its processes and no limit counts it (sandbox.py), and
    io_uring because it creates sockets past this filter.  A chmod(2) to a set-user-ID or set-group-ID program does
    nothing, and none can be created: other users of the machine could run what it leaves in a results folder, with the
    rights of its owner.
    """
    load, equal, at_least, has_bit, ret, error = 0x20, 0x15, 0x35, 0x45, 0x06, 0x00050000  # linux/seccomp.h
    program = [  # (name of the line, operation, number, line to go to if it holds, and if not; "": the next one)
        ("", load, 4, "", ""), ("", equal, AUDIT_ARCH, "", "unknown"),
        ("", load, 0, "", ""), ("", at_least, 0x40000000, "unknown", ""),
        *(("", equal, number, "unknown", "") for number in REFUSED_CALLS),
        *(("", equal, number, f"mode {place}", "") for number, place in MODE_CALLS.items()),
        *(("", equal, number, f"flags {place}", "") for number, place in OPENING_CALLS.items()),
        *(("", equal, number, f"created {place}", "") for number, place in CREATING_CALLS.items()),
        ("", equal, SOCKET, "", "allowed"), ("", load, 16, "", ""),
        *(("", equal, family, "allowed", "") for family in FAMILIES),
        ("", ret, error | errno.EAFNOSUPPORT, "", ""),
        ("mode 1", load, 24, "", ""), ("", has_bit, 0o6000, "ignored", "allowed"),
        ("mode 2", load, 32, "", ""), ("", has_bit, 0o6000, "ignored", "allowed"),
        ("flags 2", load, 24, "", ""), ("", has_bit, CREATES, "created 2", "allowed"),
        ("flags 3", load, 32, "", ""), ("", has_bit, CREATES, "created 3", "allowed"),
        ("created 1", load, 24, "", ""), ("", has_bit, 0o6000, "forbidden", "allowed"),
        ("created 2", load, 32, "", ""), ("", has_bit, 0o6000, "forbidden", "allowed"),
        ("created 3", load, 40, "", ""), ("", has_bit, 0o6000, "forbidden", "allowed"),
        ("forbidden", ret, error | errno.EPERM, "", ""),
        ("unknown", ret, error | errno.ENOSYS, "", ""),
        ("ignored", ret, error, "", ""), ("allowed", ret, 0x7FFF0000, "", ""),
    ]  # fmt: skip
    places = {name: place for place, (name, *_) in enumerate(program)}
    lines = []
    for place, (_, operation, number, *targets) in enumerate(program, 1):  # jumps count from the next line
        yes, no = (places[target] - place if target else 0 for target in targets)
        lines.append(struct.pack("HBBI", operation, yes, no, number))
    code = ctypes.create_string_buffer(b"".join(lines))
    _call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW: no slowdown besides the filter itself
    _call("syscall", SECCOMP, 1, 4, struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))


def _call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    try:
        if (request := json.loads(sys.argv[1])) is None:
            refuse_calls()
            os.execv(sys.argv[2], [sys.argv[2], "--args", str(_changes()), *sys.argv[3:]])
        mounts, folder, num_processes = request
        code = main(mounts, folder, num_processes, sys.argv[2:])
    except OSError as error:
        print(f"no sandbox: {error}", file=sys.stderr)
        code = FAILED
    os._exit(code)
