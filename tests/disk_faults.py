"""SQLite's way: a command whose n-th file operation fails, or whose process is killed, and what may never be so then.

    with Workshop(folder) as shop:
        shop.count(RUN)                     -> the operations of the whole command, [(number, process, what, path)]
        shop.fault(RUN, 17, "enospc")       -> Outcome: .wrong is [] or sentences
        shop.kill(RUN, chance)              -> the same with SIGKILL of one of its processes at a random moment

Every place gets a project of its own: results/ with one complete run, which publish copies.  disk_faults.c says what an
operation is and how it fails; each process of a command inherits it, and they share one counter.
"""

import contextlib
import hashlib
import json
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

import real_runs

from bench.record import artifacts, failures, ledger, run_folder, verification

SOURCE = Path(__file__).with_suffix(".c")
WRITES = ("write", "pwrite", "writev", "sendfile", "copy_file_range")
KINDS = ("enospc", "full", "eio", "short", "crash", "torn")
TINY = [
    "track=free",
    "model.num_layers=1",
    "model.width=32",
    "model.num_heads=1",
    "goal.val_tokens=4096",
    "hardware=cpu",
]
TINY += ["goal.num_steps=6", "goal.val_every_steps=3", "hardware.num_threads=1", "hardware.stall_timeout_s=30"]
LOG = "".join(f"iter {step}: loss {5 - step / 9:.4f}, time 12.00ms, mfu 1.00%\n" for step in range(9))
LIMIT_S = 600.0  # of a command on a busy machine, where a race of six tiny runs took 300: beyond it, it hangs
GONE_S = 45.0
SAID_COMPLETE = re.compile(r"^\s+run  complete:", re.M)
FROM_OUTSIDE = ("launcher_killed", "agent_killed", "rank_killed", "interrupted")  # kinds of failure by a SIGKILL


@dataclass(frozen=True)
class Scenario:
    """A command, and the one that a user types next."""

    name: str
    words: tuple[str, ...]
    again: tuple[str, ...]
    num_runs: int = 0  # that it trains
    quick: tuple[str, ...] | None = None  # in the place of `again` at three places of four: it trains nothing


OF_SWEEP, OF_IMPORT = ("run", "-m", *TINY, "seed=0,1", "--anyway"), ("import", "nanogpt", "nanogpt.log")
OF_RACE = ("race", "A=", "B=optim.beta2=0.9", "n=2", *TINY, "--anyway")
RUN = Scenario("run", ("run", *TINY), ("run", *TINY, "seed=7"), 1, OF_IMPORT)
SWEEP = Scenario("sweep", OF_SWEEP, OF_SWEEP, 2)
RACE = Scenario("race", OF_RACE, ("race", "--resume", "--anyway"), 6)
IMPORT = Scenario("import", OF_IMPORT, OF_IMPORT)
PUBLISH = Scenario(
    "publish", ("publish", "results/free", "--name", "mine"), ("publish", "results/free", "--name", "again")
)
SCENARIOS = {one.name: one for one in (RUN, SWEEP, RACE, IMPORT, PUBLISH)}


@dataclass
class Outcome:
    """Of one place."""

    place: str  # "run, operation 17, enospc: write /free/.../steps.csv"
    code: int
    out: str
    num_records: int = 0
    wrong: list[str] = field(default_factory=list)
    hit: bool = True  # whether the operation was reached, or a process was there to be killed


def compiler():
    """None where there is none."""
    return shutil.which("cc") or shutil.which("gcc")


class Workshop:
    """A folder with the shim, data, and a project that every place copies."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.library, self.state = self.folder / "disk_faults.so", self.folder / "state"
        self.base, self.project = self.folder / "base", self.folder / "project"
        self._num_judged = 0
        self.lasts_s = {}  # command: seconds that it takes undisturbed

    def __enter__(self):
        words = [compiler(), "-shared", "-fPIC", "-O2", "-o", str(self.library), str(SOURCE), "-ldl"]
        subprocess.run(words, check=True)
        (self.base / "conf").mkdir(parents=True)
        (self.base / "conf" / "speedrun.yaml").write_text("# a project\n")
        (self.base / "nanogpt.log").write_text(LOG)
        (self.base / "results").mkdir()
        done = self._command(self.base, ("run", *TINY, "seed=3"))
        assert done.returncode == 0, done.stdout
        return self

    def __exit__(self, *exc_info):
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # ---- one command

    def count(self, scenario):
        """The operations of a command that nothing disturbs; .lasts_s says how long it took."""
        self._begin()
        began_s = time.monotonic()
        done = self._command(self.project, scenario.words, self._faulty(0, ""))
        assert done.returncode == 0, done.stdout
        self.lasts_s[scenario.name] = time.monotonic() - began_s
        return self._log()

    def fault(self, scenario, number, kind):
        """The command with its operation `number` failed in this way, and everything that is wrong afterwards."""
        self._begin()
        done = self._command(self.project, scenario.words, self._faulty(number, kind))
        hits = [line for line in self._log() if line[0] == number]
        where = f"{hits[0][2]} {hits[0][3]} by {hits[0][1]}" if hits else "was not reached"
        outcome = Outcome(f"{scenario.name}, operation {number}, {kind}: {where}", done.returncode, done.stdout)
        outcome.hit = bool(hits)
        return self._judged(scenario, outcome, is_kill=kind in ("crash", "torn"))

    def kill(self, scenario, chance):
        """The command with SIGKILL to one of its processes, drawn, at a moment, drawn."""
        if scenario.name not in self.lasts_s:
            self.count(scenario)
        self._begin()
        process = self._start(self.project, scenario.words, self._faulty(0, ""))
        moment_s = chance.uniform(0, self.lasts_s[scenario.name])
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moment_s)
        victims = self.alive()
        what = "was over"
        if victims:
            victim = chance.choice(victims)
            what = _words_of(victim)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        done = self._ended(process)
        outcome = Outcome(f"{scenario.name}, SIGKILL after {moment_s:.1f} s: {what}", done.returncode, done.stdout)
        outcome.hit = bool(victims)
        return self._judged(scenario, outcome, is_kill=True)

    def alive(self):
        """Process ids of all that a command started and that has not ended."""
        mark, found = f"DISK_FAULT_STATE={self.state}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return sorted(found)

    def _begin(self):
        shutil.rmtree(self.project, ignore_errors=True)
        shutil.copytree(self.base, self.project)
        self.state.write_bytes(bytes(16))
        Path(f"{self.state}.log").unlink(missing_ok=True)

    def _faulty(self, number, kind):
        below = {"DISK_FAULT_BELOW": str(self.project / "results"), "DISK_FAULT_STATE": str(self.state)}
        return below | {"LD_PRELOAD": str(self.library), "DISK_FAULT_AT": str(number), "DISK_FAULT_KIND": kind}

    def _start(self, project, words, more=None):
        env = os.environ | {"SPEEDRUN_CWD": str(project), "SPEEDRUN_DATA": str(self.folder / "data")} | (more or {})
        env.pop("SPEEDRUN_RESULTS", None)
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        with open(self.folder / "out", "wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "bench", *words],
                cwd=real_runs.REPO,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _command(self, project, words, more=None):
        return self._ended(self._start(project, words, more))

    def _ended(self, process):
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            process.wait()
        out = (self.folder / "out").read_text(errors="replace")
        return subprocess.CompletedProcess(process.args, process.returncode, out)

    def _log(self):
        path = Path(f"{self.state}.log")
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        found = [line.split("\t") for line in lines]
        return [(int(number), _short(who), what, where) for number, who, what, where in found]

    # ---- what may never be so

    def _judged(self, scenario, outcome, is_kill):
        results = self.project / "results"
        outcome.wrong += self._of_the_command(outcome, is_kill)
        before = _records(results, outcome.wrong)
        outcome.num_records = len(before)
        outcome.wrong += _of_records(before, outcome, scenario, is_kill)
        outcome.wrong += [
            f"ledger: {fault}" for fault in ledger.read(results).faults if "the last, is damaged" not in fault
        ]
        outcome.wrong += self._of_the_next(scenario, results, before)
        return outcome

    def _of_the_command(self, outcome, is_kill):
        if outcome.code == -signal.SIGABRT:
            yield f"not back after {LIMIT_S:.0f} s"
        elif outcome.code not in ((0, 1, 2, -9) if is_kill else (0, 1, 2)):
            yield f"exit code {outcome.code}"
        if "Traceback (most recent call last)" in outcome.out:
            yield f"a traceback: {outcome.out[-600:]}"
        until_s = time.monotonic() + GONE_S
        while (left := self.alive()) and time.monotonic() < until_s:
            time.sleep(0.1)
        if left:
            yield f"still alive after {GONE_S:.0f} s: {', '.join(map(_words_of, left))}"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _of_the_next(self, scenario, results, before):
        """The command that a user types next works, changes no record, and makes the ledger whole."""
        files = {folder: _hashes(folder) for folder, run in before.items() if run["status"] == "complete"}
        self._num_judged += 1
        again = scenario.quick if scenario.quick and self._num_judged % 4 else scenario.again
        if scenario is RACE:
            plans = list(results.glob("races/*/plan.json"))
            is_open = plans and not any("race_end" in line["event"] for line in ledger.read(results).lines)
            again = again if is_open else RUN.quick
        ledger.append(results, "look", race_id="none", started=0, planned=True)  # what a run does first
        done = self._command(self.project, again)
        if done.returncode:
            yield f"then {' '.join(again[:3])}: exit code {done.returncode}: {done.stdout[-600:]}"
        after_ = []
        after = _records(results, after_)
        yield from after_
        yield from (f"ledger afterwards: {fault}" for fault in ledger.read(results).faults)
        for folder, known in files.items():  # pages that are made of a record may come
            now = _hashes(folder) if folder in after else {}
            if changed := [path.name for path, sha256 in known.items() if now.get(path) != sha256]:
                yield f"{folder.name}: was complete, and the next command changed {', '.join(changed)}"
        table = self._command(self.project, ("table", str(results)))
        if table.returncode or "excluded" in table.stdout or "Traceback" in table.stdout:
            yield f"then table: exit code {table.returncode}: {table.stdout[-400:]}"


def _records(results, wrong):
    """{folder: record as it is shown}; what cannot be read is wrong."""
    found = {}
    for folder in real_runs.folders(results) + real_runs.folders(results / "published" / "mine"):
        try:
            found[folder] = run_folder.read(folder)
        except ValueError as error:
            wrong.append(f"unreadable: {error}")
    return found


def _of_records(records, outcome, scenario, is_kill):
    """Statuses are honest, and what was called complete is."""
    known = {line.get("run") for line in ledger.read(next(iter(records)).parents[1]).lines} if records else set()
    for folder, run in records.items():
        name = f"{folder.name} ({run['status']})"
        if run.get("provenance") == "imported":
            continue
        if f"{folder.parent.name}/{folder.name}" not in known:
            yield f"{name}: the ledger does not know it"
        if run["status"] == "running":
            yield f"{name}: is shown as running, and nothing is alive"
        elif run["status"] == "complete":
            failed = [rule for rule in verification.report(folder)["rules"] if not rule["passed"]]
            yield from (f"{name}: {rule['rule']}: {rule['evidence']}" for rule in failed)
        else:
            yield from _of_a_failure(folder, run, name, is_kill)
    num_complete = sum(run["status"] == "complete" and run.get("provenance") != "imported" for run in records.values())
    reported = len(SAID_COMPLETE.findall(outcome.out)) if scenario.num_runs else 0
    promised = scenario.num_runs if scenario.num_runs and outcome.code == 0 and scenario is not RACE else reported
    if num_complete - 1 < promised:
        yield f"{promised} runs were reported as complete, {num_complete - 1} are: a result was lost"
    if scenario is IMPORT and outcome.code == 0 and len(records) != 2:
        yield "import said that it wrote a record, which is not there"


def _of_a_failure(folder, run, name, is_kill):
    failure = run["failure"]
    if failure is None or failure["kind"] not in failures.HINTS or run["validity"] != "invalid":
        yield f"{name}: does not say what happened: {failure}"
    elif failure["kind"] in FROM_OUTSIDE and not is_kill:
        yield f"{name}: {failure['kind']}, and nobody killed anything: {failure['message']}"
    elif failure["kind"] in ("bad_setting", "bad_data", "not_causal", "out_of_memory", "interrupted"):
        yield f"{name}: {failure['kind']} is not what happened: {failure['message']}"
    written = real_runs.run_json(folder)
    if written["status"] == "running":
        return  # nobody was left to finish it
    if artifacts.listed(folder) != written["artifacts"]:
        yield f"{name}: its files are not those that it lists"
    if left := [path.name for path in folder.iterdir() if path.name.startswith(".")]:
        yield f"{name}: temporary files stayed: {left}"


def _hashes(folder):
    paths = [folder / "run.json", *(folder / name for name in artifacts.files(folder))]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _words_of(pid):
    try:
        return _short(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " "))
    except OSError:
        return "a process that has just ended"


def _short(words):
    """python -m bench.launch.agent /a/b 1 ... -> bench.launch.agent"""
    found = re.search(r"-m (\S+( run| race| import| publish)?)", words)
    return found[1] if found else words[:60]


def every_place(operation):
    """(number, kind) of each way in which this operation can fail."""
    number, _, what, _ = operation
    for kind in KINDS:
        if what in ("unlink", "rmdir", "ftruncate") and kind in ("enospc", "full"):
            continue  # these free space
        if what in WRITES or kind not in ("short", "torn"):
            yield number, kind


def places(operations, chance, num_places):
    """num_places of a command's operations, drawn, each with a fault that can happen to it."""
    for operation in chance.sample(operations, min(num_places, len(operations))):
        yield chance.choice(list(every_place(operation)))


def sample():
    """What draws the places that the tests try: the same everywhere, or those of SPEEDRUN_FAULTS_SEED=WORD."""
    return random.Random(os.environ.get("SPEEDRUN_FAULTS_SEED", "a word"))


def as_json(outcome):
    return json.dumps({"place": outcome.place, "code": outcome.code, "wrong": outcome.wrong})
