"""Starts the ranks of a run: their environment, torchrun, and the guard, which ends whatever they leave behind.

torchrun (torch.distributed.run) starts several ranks, and the ranks of one node among several.  A single rank is
started directly, because torchrun would import torch, 1.3 s of a core, and then have nothing to do.  Either is a child
of the guard (guard.py), the ancestor of every process that the run starts.
"""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from bench.base.paths import CHECKOUT, CODE, REPO, working_folder
from bench.base.reading import plain_file
from bench.config.schema import HardwareConfig
from bench.launch import guard
from bench.machine import processes, sandbox
from bench.machine.signals import held
from bench.training import flight_recorder

WORKER = (sys.executable, "-m", "bench.training.worker")
NODES_KEY = "SPEEDRUN_NODES_KEY"  # the secret that all launchers of a run share; ranks do not get it
IN_RUN = "SPEEDRUN_IN_RUN"  # set for ranks, which may not start a run themselves
LOG, LEFT = "agent.log", ".torchrun.tmp"  # output of torchrun, and of a rank before it has a log; torchrun's files
LOOPBACK, LOOPBACK_S = "127.0.0.1", 3.0
MONITOR_S = 0.5  # interval at which torchrun checks its ranks
TORCHRUN_GRACE_S = 5  # for the other ranks once one has failed, from SIGTERM to SIGKILL
SURVIVAL_S = 60  # the same if SIGTERM is a warning, after which ranks write a checkpoint and end
WARNED_BY = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"  # signals that torchrun then passes on to them
HUNG_S = 8.0  # delay after a rank's failure from which bench/record/failures.py attributes its end to the launcher
GUARD_S = guard.GRACE_S + 2 * guard.GONE_WITHIN_S + 10.0
FAILURE = re.compile(  # in torchrun's report: torch.distributed.elastic.multiprocessing.errors.ChildFailedError
    r"^  time      : (?P<time>\S+)\n.*\n  rank      : (?P<rank>\d+) .*\n  exitcode  : (?P<exit_code>-?\d+) ", re.M
)


class Confined(Protocol):
    """Puts a command into a sandbox."""

    notes: Path  # the folder that the ranks see as the run's folder

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Returns (argv, env) that run the command in the sandbox."""


class CannotStart(OSError):
    """No rank can be started; the message says why."""


def environment(hardware: HardwareConfig) -> dict[str, str]:
    """Returns the ranks' environment variables, which environment.json records.  hardware: resolved."""
    env = dict(os.environ) | {"SPEEDRUN_CWD": working_folder(), CHECKOUT: str(REPO)}
    env.pop(NODES_KEY, None)  # the launchers' own secret
    env["OMP_NUM_THREADS"] = str(hardware.num_threads)
    if hardware.device == "cpu":
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads beside a busy core: steps 10 to 90 times slower
        env["CUDA_VISIBLE_DEVICES"] = ""
        # Inductor's cache ignores this variable: code for 16 lanes, run with 8, gave NaN and wrong numbers (torch 2.13)
        if (capability := env.get("ATEN_CPU_CAPABILITY")) is not None:
            cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{capability}"
            env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    for name, value in flight_recorder.variables(hardware.num_processes or 1).items():
        env.setdefault(name, value)
    if hardware.deterministic:
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return env


@dataclass(frozen=True)
class Place:
    """The ranks that one launcher starts, among all of a run."""

    num_ranks: int
    world_size: int
    first_rank: int = 0
    local_rank: int = 0  # local rank of the first of them
    local_size: int | None = None  # number of ranks on its node; None: num_ranks
    node: int = 0
    num_nodes: int = 1
    master: tuple[str, int] | None = None  # address of torch's process group; None: that in the environment
    by_torchrun: bool = False
    is_bare: bool = False  # one process without torchrun's variables
    survives: bool = False  # signals that warn of the run's end do not end the ranks

    def command(self, program: Sequence[str], folder: Path) -> list[str]:
        """Returns the command to start; its last argument is the folder."""
        own = [*program, str(folder)]
        if not self.by_torchrun or self.master is None:
            return own
        where = [f"--nnodes={self.num_nodes}", f"--node-rank={self.node}", f"--nproc-per-node={self.num_ranks}"]
        where += [f"--master-addr={self.master[0]}", f"--master-port={self.master[1]}"]
        how = ["--max-restarts=0", "--rdzv-backend=static", f"--monitor-interval={MONITOR_S}"]
        how += [f"--log-dir={folder / LEFT}", "--no-python"]
        how += [f"--signals-to-handle={WARNED_BY}"] if self.survives else []
        return [sys.executable, "-m", "torch.distributed.run", *where, *how, *own]

    def variables(self) -> dict[str, str]:
        """Returns the variables that torchrun sets, for a rank that is started directly; without
        TORCHELASTIC_USE_AGENT_STORE, because there is no agent, and flight_recorder.variables()."""
        if self.by_torchrun or self.is_bare:
            return {}
        values: dict[str, int | str] = {
            "RANK": self.first_rank,
            "LOCAL_RANK": self.local_rank,
            "ROLE_RANK": self.first_rank,
        }
        values |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), self.world_size)
        values |= {"GROUP_RANK": self.node, "GROUP_WORLD_SIZE": self.num_nodes, "ROLE_NAME": "default"}
        if self.master:
            values |= {"MASTER_ADDR": self.master[0], "MASTER_PORT": self.master[1]}
            values |= {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
            values |= dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), 0)
        return {name: str(value) for name, value in values.items()}


@contextlib.contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Context that yields a port of this machine that no other program gets meanwhile.

    The port is bound, but nobody listens, so torchrun's or rank 0's store, which also sets SO_REUSEADDR (as all of
    torch's stores do), can bind it too.  This is Linux's rule; elsewhere the port is released and most likely stays
    free.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
        port = reserved.getsockname()[1]
        if sys.platform != "linux":
            reserved.close()
        yield port


class Guard:
    """Context with a guard process, which ends all processes of a run when it is left or when this process is killed.

    folder: the run's folder, whose record the guard finishes if this process is killed; code: the folder from which the
    guard imports; is_member: another process makes the record.
    """

    def __init__(self, folder: Path, code: Path = CODE, is_member: bool = False):
        self._command = [sys.executable, "-m", "bench.launch.guard", str(folder), *(["member"] if is_member else [])]
        self._code = code
        self._answer: bytes | None = None
        self.left: list[int] = []  # pids that the kernel keeps, in a driver or at a dead disk; known at the end
        self.exit_code: int | None = None  # of the started program, or of the guard if that ended first
        self.was_killed = False  # whether the guard was killed before it reported how the program ended
        self.strays: list[str] = []  # processes that it left then and that were ended: "NAME (process PID)"
        self._adopting = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._end_strays = self._adopting.enter_context(processes.strays())
        with held():  # a signal between fork and here would leave a child without an owner
            self._process = subprocess.Popen(
                self._command,
                cwd=self._code,
                env=os.environ | {CHECKOUT: str(REPO)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # the launcher handles Ctrl-C and a closed terminal
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        with held():
            if exc_info[0] is None:  # else the guard finishes the record, if it is unfinished
                self._tell(guard.GOODBYE)
            self._process.communicate()
        self._adopting.close()

    @property
    def pid(self) -> int:
        """The process id of the guard, which is the ancestor of the run's processes."""
        return self._process.pid

    def start(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, survives: bool = False, wrappers: int = 0
    ) -> None:
        """Starts a program.  log: the file for its output; survives: a signal to the guard does not end it; wrappers:
        as in guard.py."""
        order: dict[str, Any] = {"words": list(command), "env": dict(env), "log": str(log.absolute())}
        order |= {"survives": survives, "wrappers": wrappers}
        self._tell(json.dumps(order).encode() + b"\n")

    def has_ended(self, within_s: float) -> bool:
        """Waits at most within_s; returns whether the program and everything that it left behind have ended."""
        out = self._process.stdout
        assert out is not None
        if self._answer is None and select.select([out], [], [], within_s)[0]:
            answer = out.readline()
            if answer and not answer.startswith(b"{"):
                return False  # of a sitecustomize that prints
            self._answer = answer
            if self._answer:
                ending = json.loads(self._answer)
                self.exit_code, self.left = ending["exit_code"], ending["left"]
            else:  # it was killed, and the kernel ended its child
                self.was_killed, self.exit_code = True, self._process.wait()
                self.strays = self._end_strays()
        return self._answer is not None

    def stop(self) -> None:
        """Orders the run's processes to end; has_ended() waits for that."""
        self._tell(guard.STOP)

    def cpu_s(self) -> dict[int, float]:
        """Returns {pid: CPU seconds so far} of the run's processes."""
        return processes.cpu_s(processes.descendants(self.pid))

    def _tell(self, order: bytes) -> None:
        self._process.send_signal(signal.SIGCONT)  # continues a guard that somebody has stopped
        with contextlib.suppress(BrokenPipeError, ValueError):  # the guard has ended, or the pipe is closed
            assert self._process.stdin is not None
            self._process.stdin.write(order)


class Group:
    """Context in which the ranks of a place run below a guard; they are ended when it is left.

    failures: [{"rank", "exit_code", "failed_at_s"}] of the ranks that failed first, after has_ended().
    """

    failure: dict[str, Any] | None = None  # as Leader.failure; ranks of this machine report their own

    def __init__(
        self,
        guarded: Guard,
        place: Place,
        folder: Path,
        env: Mapping[str, str],
        program: Sequence[str] = WORKER,
        log: str = LOG,
        confined: Confined | None = None,
    ):
        self._guard, self._place, self._folder, self._log = guarded, place, folder, folder / "logs" / log
        self._command, self._env = place.command(program, folder), {**env, **place.variables(), IN_RUN: "1"}
        if place.by_torchrun:  # torchrun takes options from PET_ variables, such as restarts
            self._env = {name: value for name, value in self._env.items() if not name.startswith("PET_")}
            grace_s = SURVIVAL_S if place.survives else TORCHRUN_GRACE_S  # within HUNG_S, or torchrun's report is lost
            self._env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace_s)
        self._notes, self._wrappers = folder, 0
        if confined:
            self._command, self._env = confined.command(self._command, self._env)
            self._notes, self._wrappers = confined.notes, sandbox.WRAPPERS
        self._failed_s: float | None = None
        self.failures: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._guard.start(self._command, self._env, self._log, self._place.survives, self._wrappers)
        return self

    def __exit__(self, *exc_info: object) -> None:
        with held():
            if not self.has_ended(0.0):
                self._guard.stop()
                self.has_ended(GUARD_S)

    def has_ended(self, within_s: float) -> bool:
        """Waits at most within_s; returns whether all ranks and everything that they left behind have ended.

        A rank that hangs after it has written its failure, for example in a library's destructors, is ended too.
        """
        if self._failed_s is None and any((self._notes / "logs").glob("rank*.failure.json")):
            self._failed_s = time.monotonic()
        if self._failed_s is not None and time.monotonic() - self._failed_s > HUNG_S:
            self._guard.stop()
        has_ended = self._guard.has_ended(within_s)
        if has_ended and self.exit_code() and not self.failures:
            self.failures = self._failures()
        return has_ended

    def ends(self) -> list[tuple[int, int]]:
        """Returns [(rank, exit code)] of the ranks that failed first, of the group's first rank if that is unknown."""
        if not self.exit_code():
            return []
        ends = [(failed["rank"], failed["exit_code"]) for failed in self.failures]
        return ends or [(self._place.first_rank, self.exit_code())]

    def stop(self) -> None:
        """Orders all ranks to end; has_ended() waits for that."""
        self._guard.stop()

    def exit_code(self) -> int:
        """Returns 0 if all ranks ended well.  Call it after has_ended()."""
        return 1 if self._guard.exit_code is None else self._guard.exit_code

    def _failures(self) -> list[dict[str, Any]]:
        if self._guard.was_killed:
            return []
        if not self._place.by_torchrun:
            rank, exit_code = self._place.first_rank, self.exit_code()
            has_begun = (self._folder / "logs" / f"rank{rank}.log").exists()
            failed = {"rank": rank, "exit_code": exit_code, "failed_at_s": time.monotonic()}
            return [failed] if has_begun or exit_code < 0 else []
        text = plain_file.text_or_empty(self._log, plain_file.MAX_LINES_BYTES)
        return failures_of_report(text, time.time() - time.monotonic())


@contextlib.contextmanager
def started(
    guarded: Guard,
    num_ranks: int,
    folder: Path,
    env: Mapping[str, str],
    program: Sequence[str] = WORKER,
    is_bare: bool = False,
    survives: bool = False,
    confined: Confined | None = None,
) -> Iterator[Group]:
    """Context that yields the ranks of a run on this machine alone.  is_bare, survives: as in Place; confined: None
    outside a sandbox.

    Raises CannotStart if no rank can be started, for example because this machine cannot reach its own loopback
    address, which torch would try for minutes without a better message.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=LOOPBACK_S).close()
    except OSError as error:
        why = error.strerror or error
        raise CannotStart(error.errno, f"{LOOPBACK} cannot be reached, where ranks meet: {why}") from None
    with reserved_port(LOOPBACK) as port:
        how = {"by_torchrun": num_ranks > 1, "is_bare": is_bare, "survives": survives}
        place = Place(num_ranks, num_ranks, master=(LOOPBACK, port), **how)
        with Group(guarded, place, folder, env, program, confined=confined) as group:
            yield group


def failures_of_report(text: str, monotonic_s: float) -> list[dict[str, Any]]:
    """Parses torchrun's last output, which has whole seconds, into [{"rank", "exit_code", "failed_at_s"}].

    monotonic_s: seconds since the epoch at which time.monotonic() was 0.
    """
    failed = []
    for match in FAILURE.finditer(text):
        at_s = time.mktime(time.strptime(match["time"], "%Y-%m-%d_%H:%M:%S"))
        rank, exit_code = int(match["rank"]), int(match["exit_code"])
        failed.append({"rank": rank, "exit_code": exit_code, "failed_at_s": at_s - monotonic_s})
    return failed
