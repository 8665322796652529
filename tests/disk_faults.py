"""Fault injection as SQLite does it: makes the n-th file operation of a command fail, or kills one of its processes.

    with Workshop(folder) as shop:
        shop.count(RUN)                     -> the operations of the whole command, [(number, process, what, path)]
        shop.fault(RUN, 17, "enospc")       -> Outcome: .wrong is [] or sentences
        shop.kill(RUN, chance)              -> the same after SIGKILL of one of its processes at a random time
        shop.kill(PAIR, chance, "worker")   -> the same, but one of its ranks is killed

Each fault gets a fresh project: results/ with one complete run, which publish copies, and for `resume` a race that was
interrupted before its last run.  disk_faults.c defines what an operation is and how it fails; the processes of a
command inherit it and share one counter.  disk_faults_judge.py checks the outcome.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import disk_faults_judge
import fork_server
import real_runs
from disk_faults_scenarios import LIMIT_S, LOG, OF_RACE, RACE, RESUME, SCRIPT, TINY

from bench.record import ledger, run_folder

SOURCE = Path(__file__).with_suffix(".c")
WRITES = ("write", "pwrite", "writev", "sendfile", "copy_file_range")
KINDS = ("enospc", "full", "eio", "short", "crash", "torn")


@dataclass
class Outcome:
    """The outcome of one fault."""

    place: str  # "run, operation 17, enospc: write /free/.../steps.csv"
    code: int
    out: str
    num_records: int = 0
    wrong: list[str] = field(default_factory=list)
    hit: bool = True  # whether the operation was reached, or there was a process to kill


def compiler():
    """Returns the path of a C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc")


def library(folder):
    """Compiles disk_faults.c in the folder and returns the library's path."""
    path = Path(folder) / "disk_faults.so"
    subprocess.run([compiler(), "-shared", "-fPIC", "-O2", "-o", str(path), str(SOURCE), "-ldl"], check=True)
    return path


def operations(state):
    """Returns the operations in a command's log: [(number, process, call, path)]."""
    path = Path(f"{state}.log")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    rows = [line.split("\t") for line in lines]
    return [(int(number), _short(who), call, where) for number, who, call, where in rows]


class Workshop:
    """A folder with the shim, data, and a project that is copied for each fault."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.library, self.state = library(self.folder), self.folder / "state"
        self.base, self.project = self.folder / "base", self.folder / "project"
        self._before_last = self.folder / "before_last"  # project with a race interrupted before its last run
        self.num_judged = 0
        self.statuses_before = {}  # {name of a run folder: status} before the last command
        self.lasts_s = {}  # {command: s that it takes undisturbed}

    def __enter__(self):
        self._preloaded = fork_server.preloaded(self.library)
        self._preloaded.__enter__()
        (self.base / "conf").mkdir(parents=True)
        (self.base / "conf" / "speedrun.yaml").write_text("# a project\n")
        (self.base / "nanogpt.log").write_text(LOG)
        (self.base / "train.py").write_text(SCRIPT)
        (self.base / "results").mkdir()
        done = self.command(self.base, ("run", *TINY, "seed=3"))
        assert done.returncode == 0, done.stdout
        return self

    def __exit__(self, *exc_info):
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._preloaded.__exit__(*exc_info)

    # ---- one command

    def count(self, scenario):
        """Returns the operations of an undisturbed command, and records its time in lasts_s."""
        self._begin(scenario)
        began_s = time.monotonic()
        done = self._ended(self._start(self.project, scenario.command, self._faulty(0, "")))
        assert done.returncode == 0, done.stdout
        self.lasts_s[scenario.name] = time.monotonic() - began_s
        return operations(self.state)

    def fault(self, scenario, number, kind):
        """Runs a command whose operation `number` fails in this way.  Returns an Outcome with all that is wrong."""
        self._begin(scenario)
        done = self._ended(self._start(self.project, scenario.command, self._faulty(number, kind)))
        hits = [line for line in operations(self.state) if line[0] == number]
        where = f"{hits[0][2]} {hits[0][3]} by {hits[0][1]}" if hits else "was not reached"
        outcome = Outcome(f"{scenario.name}, operation {number}, {kind}: {where}", done.returncode, done.stdout)
        outcome.hit = bool(hits)
        return disk_faults_judge.judged(self, scenario, outcome, is_kill=kind in ("crash", "torn"))

    def kill(self, scenario, chance, role=""):
        """Runs a command and sends SIGKILL to a random one of its processes at a random time.

        role: only processes with this in their name, and only after the first of them has started.
        """
        if scenario.name not in self.lasts_s:
            self.count(scenario)
        self._begin(scenario)
        began_s = time.monotonic()
        process = self._start(self.project, scenario.command, self._faulty(0, ""))
        while role and process.poll() is None and not self._in_role(role):
            time.sleep(0.01)
        passed_s = time.monotonic() - began_s
        moment_s = chance.uniform(passed_s, max(passed_s, self.lasts_s[scenario.name]))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moment_s - passed_s)
        victims = self._in_role(role)
        command = "was over"
        if victims:
            victim = chance.choice(victims)
            command = self.command_of(victim)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        done = self._ended(process)
        outcome = Outcome(f"{scenario.name}, SIGKILL after {moment_s:.1f} s: {command}", done.returncode, done.stdout)
        outcome.hit = bool(victims)
        return disk_faults_judge.judged(self, scenario, outcome, is_kill=True)

    def alive(self):
        """Returns the ids of all processes that a command started and that have not ended."""
        mark, pids = f"DISK_FAULT_STATE={self.state}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and mark in path.read_bytes().split(b"\0"):
                    pids.append(int(path.parent.name))
        return sorted(pids)

    def _in_role(self, role):
        return [pid for pid in self.alive() if role in self.command_of(pid)]

    def command_of(self, pid):
        """Returns a short name of a process."""
        try:
            return _short(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " "))
        except OSError:
            return "a process that has just ended"

    def _begin(self, scenario):
        if scenario is RESUME and not self._before_last.exists():
            self._race_to_its_last_run()
        os.environ["XDG_STATE_HOME"] = str(self.folder / "machine")  # the ledger's line count is reset with it
        for folder in (self.project, self.folder / "machine"):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._before_last if scenario is RESUME else self.base, self.project)
        before = {path.name: run_folder.read(path)["status"] for path in real_runs.folders(self.project / "results")}
        self.statuses_before = before
        self.state.write_bytes(bytes(16))
        Path(f"{self.state}.log").unlink(missing_ok=True)

    def _race_to_its_last_run(self):
        self._begin(RACE)
        process = self._start(self.project, OF_RACE)
        while self._num_ends() < RACE.num_runs and process.poll() is None:  # includes the end of the base's run
            time.sleep(0.01)
        process.terminate()
        done = self._ended(process)
        assert done.returncode == 1, done.stdout
        shutil.copytree(self.project, self._before_last)

    def _num_ends(self):
        return sum(line["event"] == "end" for line in ledger.read(self.project / "results").lines)

    def _faulty(self, number, kind):
        below = {"DISK_FAULT_BELOW": str(self.project / "results"), "DISK_FAULT_STATE": str(self.state)}
        return below | {"LD_PRELOAD": str(self.library), "DISK_FAULT_AT": str(number), "DISK_FAULT_KIND": kind}

    def _environment(self, project):
        env = os.environ | {"SPEEDRUN_CWD": str(project), "SPEEDRUN_DATA": str(self.folder / "data")}
        env.pop("SPEEDRUN_RESULTS", None)
        return env | {"OMP_WAIT_POLICY": "PASSIVE"}

    def _start(self, project, arguments, variables=None):
        with open(self.folder / "out", "wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "bench", *arguments],
                cwd=real_runs.REPO,
                env=self._environment(project) | (variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self, project, arguments):
        """Runs an undisturbed command, with stdout and stderr together."""
        return subprocess.run(
            [sys.executable, "-m", "bench", *arguments],
            cwd=real_runs.REPO,
            env=self._environment(project),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )

    def _ended(self, process):
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            process.wait()
        out = (self.folder / "out").read_text(errors="replace")
        return subprocess.CompletedProcess(process.args, process.returncode, out)


def _short(command):
    """Shortens "python -m bench.launch.guard /a/b ..." to "bench.launch.guard"."""
    match = re.search(r"-m (\S+( run| race| import| publish)?)", command)
    return match[1] if match else command[:60]


def every_place(operation):
    """Yields (number, kind) for each way in which this operation can fail."""
    number, _, call, _ = operation
    for kind in KINDS:
        if call in ("unlink", "rmdir", "ftruncate") and kind in ("enospc", "full"):
            continue  # these free space
        if call in WRITES or kind not in ("short", "torn"):
            yield number, kind


def places(operations, chance, num_places):
    """Yields (number, kind) for a random sample of operations, each with a random fault that can happen to it."""
    for operation in chance.sample(operations, min(num_places, len(operations))):
        yield chance.choice(list(every_place(operation)))


def sample():
    """Returns the random generator of the faults that the tests try, seeded with SPEEDRUN_FAULTS_SEED if it is set."""
    return random.Random(os.environ.get("SPEEDRUN_FAULTS_SEED", "a word"))
