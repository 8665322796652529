"""Runs a rank of a user's unmodified training script.  bench/launch/ranks.py starts it as  PYTHON THIS_FILE FOLDER

PYTHON may be another interpreter than the harness's, with another torch, so this file needs only the standard library
of Python 3.8 and does not import torch.  FOLDER/.launch.tmp says what to run.  Everything that the script prints goes
into a pipe to the launcher, which timestamps each line: no clock of this process is trusted.  The files that the script
opens and how it ended are written to FOLDER/.rankN.*.tmp and logs/rankN.failure.json.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import json
import os
import pickle
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

STARTED_S = time.monotonic()
HERE = os.path.dirname(os.path.abspath(__file__))
OUT_OF_MEMORY = re.compile("OutOfMemoryError|out of memory|can't allocate memory|ALLOC_FAILED", re.I)
NO_GPU = re.compile("cuda|nvidia|nccl|no gpu|active drivers", re.I)


def main(folder: str) -> None:
    rank = int(os.environ.get("RANK", 0))
    with open(os.path.join(folder, ".launch.tmp")) as file:
        launch = json.load(file)
    end_with_agent(launch["launcher_pid"])
    script = launch["script"]
    redirect(script["pipes"][rank])
    faulthandler.enable(all_threads=True)
    flags = runpy.run_path(os.path.join(HERE, "compile_flags.py"))

    def end(number: int, frame: object) -> None:  # called by faulthandler, which chains to the earlier handler
        write_facts(os.path.join(folder, f".rank{rank}.facts.tmp"), rank, flags["changed"])
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)  # a rank that is ended leaves its stacks
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        os.environ[name] = os.path.join(folder, "logs", "flight_rank")
    os.chdir(script["work"])
    watch = runpy.run_path(os.path.join(HERE, "open_watch.py"))["watch"]
    watch(os.path.join(folder, f".rank{rank}.opened.tmp"), [HERE])
    if script["profile"]:
        profiler = os.path.join(HERE, "script_profiler.py")
        runpy.run_path(profiler)["install"](folder, rank, script["profile"], flags["after_import"])
    flags["watch"]()
    end_sampling = sampling(script["work"], launch["launcher_pid"], rank)
    exit_code = 0
    try:
        run(script)
    except BaseException as error:
        exit_code = write_failure(folder, rank, error)
    write_facts(os.path.join(folder, f".rank{rank}.facts.tmp"), rank, flags["changed"])
    if not exit_code:
        # as the interpreter does at its end: waits for threads, then calls exit functions
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    end_sampling()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the script has closed it
            stream.flush()
    os._exit(exit_code)  # DDP over gloo aborts in its static destructors in about 1 exit of 20


def sampling(work: str, launcher_pid: int | None, rank: int) -> Callable[[], None]:
    """Starts sampling rank 0 if an audit of the clock asks for it; returns the function that ends it."""
    sampler = runpy.run_path(os.path.join(HERE, "line_sampler.py"))
    folder = os.environ.pop(sampler["VARIABLE"], None)
    if folder is None or rank:
        return lambda: None
    end: Callable[[], None] = sampler["start"](os.path.join(folder, sampler["FILE"]), work, launcher_pid)
    return end


def run(script: dict[str, Any]) -> None:
    """Runs a script as `python PATH ARGS` or `python -m MODULE ARGS` in its working folder, or runs a command there.

    sys.argv has its path relative to that folder, as torchrun would pass it.
    """
    sys.dont_write_bytecode = True  # new files beside the script are kept as its outputs
    path, module, work = script["path"], script["module"], script["work"]
    if script["imports_work"]:  # takes precedence over an installed copy of the package, in child processes too
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [work, os.environ.get("PYTHONPATH")]))
        sys.path.insert(1, work)
    if script["command"]:
        command = [*script["command"], *script["args"]]
        exit_code = subprocess.call(command, stdin=subprocess.DEVNULL)
        if exit_code < 0:  # ended by a signal
            raise SystemExit(f"{command[0]} was ended by {signal.Signals(-exit_code).name}")
        sys.exit(exit_code)
    sys.argv[:] = [path, *script["args"]]
    sys.path[0] = work if module else os.path.dirname(os.path.abspath(path))
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(path, run_name="__main__")


def redirect(pipe: str) -> None:
    """Redirects stdout and stderr, those of child processes too, into the pipe; each line is written immediately."""
    fd = os.open(pipe, os.O_WRONLY)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def end_with_agent(launcher_pid: int | None) -> None:
    """Makes the kernel kill this process when its agent ends; the run's guard (bench/launch/guard.py) ends processes
    that the script has started.  launcher_pid is None in a sandbox, where the launcher is not visible."""
    agent_pid = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h
    try:
        with contextlib.suppress(PermissionError):  # the launcher runs as another user
            if launcher_pid is not None:
                os.kill(launcher_pid, 0)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != agent_pid:  # the agent ended in the meantime
        os._exit(1)


# ---- how it ended


def write_failure(folder: str, rank: int, error: BaseException) -> int:
    """Writes the record of a failure and prints its traceback, but none of sys.exit(3); returns the exit code."""
    code = error.code if isinstance(error, SystemExit) else 1
    if code in (None, 0):
        return 0
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        message = f"the script ended with exit code {code}" if isinstance(code, int) else str(code)
    where = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, KeyError) and where.filename in ("<frozen os>", os.__file__):
        message += ": the script needs this environment variable, and does not get it"
    kind = kind_of(error, message)
    if kind == "out_of_memory":
        write_snapshot(folder, rank)
    failure = {"kind": kind, "rank": rank, "step": None, "signal": None, "exit_code": None}
    if kind == "no_gpu":
        version = getattr(sys.modules["torch"], "__version__", "")
        message = f"the script asks for a GPU, and torch {version} sees none: {message}"
    failure.update(message=message[:2000], failed_at_s=time.monotonic(), traceback=traceback.format_exc())
    try:
        write(os.path.join(folder, "logs", f"rank{rank}.failure.json"), failure)
    except OSError:
        os.unlink(os.path.join(folder, ".reserve"))  # the disk is full: this file matters more
        write(os.path.join(folder, "logs", f"rank{rank}.failure.json"), failure)
    if not (isinstance(error, SystemExit) and isinstance(code, int)):
        traceback.print_exc()
    return code if isinstance(code, int) else 1


def write_snapshot(folder: str, rank: int) -> None:
    """Writes a snapshot of what held the GPU's memory; the error keeps the script's frames and so its tensors alive.

    It has no stacks, which torch would have had to record from the start.
    """
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return
        snapshot = torch.cuda.memory._snapshot()
        os.makedirs(os.path.join(folder, "memory"), exist_ok=True)
        with open(os.path.join(folder, "memory", f"oom_rank{rank}.pickle"), "wb") as file:
            pickle.dump(snapshot, file)
    except Exception:  # the failure itself matters more
        traceback.print_exc()


def kind_of(error: BaseException, message: str) -> str:
    """Returns the kind of failure; no_gpu if the message, or a bare assertion, names CUDA and torch sees no GPU."""
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(message):
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    named = message if str(error) else str(traceback.extract_tb(error.__traceback__)[-1].line)
    with contextlib.suppress(KeyError, AttributeError):  # torch is not imported, or only in part
        if NO_GPU.search(named) and not sys.modules["torch"].cuda.is_available():
            return "no_gpu"
    is_collective = "torch" in type(error).__module__ or isinstance(error, RuntimeError)
    return "collective_timeout" if is_collective and re.search("timed out|timeout", message, re.I) else "exception"


def write_facts(path: str, rank: int, compile_flags: Callable[[], dict[str, Any]]) -> None:
    """Writes what only this process knows: its torch, changed compiler flags, packages (rank 0) and memory."""
    facts: dict[str, Any] = {"python": sys.version.split()[0], "started_s": STARTED_S, "peak_rss_gib": peak_rss_gib()}
    try:
        facts["torch"] = torch_facts()
        facts["peak_mem_gib"] = torch_peaks()
        facts["compile_flags"] = compile_flags()
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    if rank == 0:
        from importlib import metadata

        facts["packages"] = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    with contextlib.suppress(OSError):
        if not os.path.islink(os.path.dirname(path)):  # the script may have put a link in the folder's place
            write(path, facts)


def write(path: str, facts: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(facts, file)


def torch_facts() -> dict[str, Any]:
    """Returns the facts of bench/machine/environment.py; {} if the script has not imported torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    cuda = torch.version.cuda
    nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else None
    cpu = getattr(torch.backends, "cpu", None)  # since torch 2.0
    return {
        "torch": torch.__version__,
        "cuda": cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "cpu_capability": cpu.get_cpu_capability() if cpu else None,
    }


def torch_peaks() -> dict[str, float]:
    """Returns peaks of this rank's GPU memory in GiB, since the script last reset them; {} without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    gib = 2.0**30
    return {"allocated": torch.cuda.max_memory_allocated() / gib, "reserved": torch.cuda.max_memory_reserved() / gib}


def peak_rss_gib() -> float | None:
    """Returns the largest resident set of this process, or of a descendant that was waited for."""
    children_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2.0**20
    try:
        with open("/proc/self/status", errors="replace") as file:
            own_gib = next(int(line.split()[1]) / 2.0**20 for line in file if line.startswith("VmHWM:"))
            return max(own_gib, children_gib)
    except (OSError, StopIteration):
        return None


if __name__ == "__main__":
    main(sys.argv[1])
