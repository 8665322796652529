"""A script's ranks in a sandbox (script.sandbox=true): what they see of this machine, and what comes back of them.

Their run's folder, as they see it, is another one, FOLDER/.sandbox.tmp, in which nothing lies but what they write; only
work/ and the pipes into which they print are the run's.  So no record and no ledger is there to be read or changed.
Once they have ended, NOTES that are regular files are moved to where the launcher reads them.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.base import atomic
from bench.base.reading import plain_file
from bench.launch.prepare import Job
from bench.launch.script import work_folder
from bench.machine import processes, sandbox
from bench.record import race_folder, run_folder
from bench.training import line_sampler

NOTES = re.compile(
    r"\.[\w-]+\.(facts|opened|profiled|raw)\.tmp|logs/(rank\d+\.failure\.json|flight_rank\d+)|memory/oom_rank\d+\.pickle"
)


class Confined:
    """folder: of a run of a job with a script; work_folder.make() has been there when command() is called."""

    def __init__(self, folder: Path, job: Job, pipes: Sequence[str]):
        assert job.script is not None
        self._folder, self._job, self._script, self._pipes = folder.absolute(), job, job.script, pipes
        self.notes = self._folder / ".sandbox.tmp"
        self.kind = sandbox.kind()
        self._limits = sandbox.of_machine(job.config.hardware.wall_timeout_s)
        self._watch: sandbox.Watch | None = None

    def command(self, words: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """As of sandbox.command(), for the ranks."""
        work = self._folder / work_folder.WORK
        launch = atomic.read_json(self._folder / run_folder.LAUNCH) | {"launcher_pid": None, "shards": {}}
        (self.notes / "logs").mkdir(parents=True)
        (self.notes / run_folder.LAUNCH).write_text(json.dumps(launch))
        writable = {self._folder: self.notes, work: work} | {Path(pipe): Path(pipe) for pipe in self._pipes}
        if samples := env.get(line_sampler.VARIABLE):
            writable[Path(samples)] = Path(samples)
        env = dict(env)
        for name in race_folder.COMPILED:  # anybody else's would be read outside a sandbox too
            cache = Path(env.pop(name, ""))
            if race_folder.CACHES in cache.parts:
                cache.mkdir(parents=True, exist_ok=True)
                writable[cache], env[name] = cache, str(cache)
        readable = {self._job.code, *work_folder.linked(self._script, work)}
        for python in (sys.executable, self._script.python):
            readable.update(map(Path, sandbox.of_python(python)))
        return sandbox.command(words, env, readable, writable, self._limits, self._job.code, self.kind)

    def watch(self, guard_pid: int) -> None:
        """The ranks run below this process."""
        self._guard_pid, self._watch = guard_pid, sandbox.Watch(guard_pid, self._limits, self._folder)

    def exceeded(self) -> str | None:
        """Which limit the ranks have passed, as a sentence: then they have been killed.  None: none."""
        why = self._watch.exceeded() if self._watch else None
        if why:
            processes.signal_all(processes.children(self._guard_pid), signal.SIGKILL)
        return why

    def collect(self) -> None:
        """What the ranks noted, to where the launcher reads it.  They have ended."""
        for entry in plain_file.entries_below(self.notes) if self.notes.is_dir() else ():
            name = os.path.relpath(entry.path, self.notes)
            if NOTES.fullmatch(name) and entry.is_file(follow_symlinks=False):
                (self._folder / name).parent.mkdir(exist_ok=True)
                os.replace(entry.path, self._folder / name)
        subprocess.run(["rm", "-rf", "--", self.notes], stderr=subprocess.DEVNULL)  # however deep: rmtree recurses
