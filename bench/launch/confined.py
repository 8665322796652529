"""The ranks of a run in a sandbox: what they see of this machine, and which of their files the launcher takes.

The ranks see another folder, FOLDER/.sandbox.tmp, as the run's.  It has copies of the run's inputs and otherwise what
they write there, so they can neither read nor change a record or a ledger.  Of code they see the copies that they run.
Once they have ended, regular files with known names are moved to where the launcher reads them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.base import atomic
from bench.base.paths import CHECKOUT
from bench.base.reading import plain_file
from bench.launch.prepare import Job
from bench.machine import processes, sandbox
from bench.record import race_folder, run_folder


class Confined:
    """The ranks of one of our models in a sandbox (hardware.sandbox=true); script_run.py has those of a script.

    Of the validation shards they can read only what the run validates on.  folder: of the run; pipes: the launcher's,
    into which the ranks write.
    """

    INPUTS: tuple[str, ...] = ("config.yaml", "run.json", "events.jsonl")
    NOTES = re.compile(  # no pages: a browser would run what ranks write there
        r"steps\.csv|events\.jsonl|telemetry\.csv|checkpoint/weights\.safetensors"
        r"|\.(result|progress|rank\d+\.opened)\.tmp"
        r"|logs/(rank\d+\.(log|(failure|flight)\.json)|flight_rank\d+|gpus\.log)"
        r"|traces/([\w-]+/)?[\w.-]+\.(json|json\.gz|txt|md|pickle)|memory/[\w.-]+\.(rss\.json|pickle)"
    )

    def __init__(self, folder: Path, job: Job, pipes: Sequence[str]):
        self._folder, self._job, self._pipes = folder.absolute(), job, pipes
        self.notes = self._folder / ".sandbox.tmp"
        self.kind = sandbox.kind()
        self._limits = sandbox.machine_limits(job.config.hardware.wall_timeout_s)
        self._watch: sandbox.Watch | None = None

    def _shards(self) -> dict[str, list[Path]]:
        """Returns {split: files of its tokens} that the ranks read."""
        from bench.launch.script import work_folder  # imports numpy, which other launchers do not need

        train, val = (
            [shard.path.resolve() for shard in shards] for shards in (self._job.dataset.train, self._job.dataset.val)
        )
        if not self._job.dataset.is_audit:
            val = work_folder.without_held_out(
                self._job.dataset.val, self._job.config.goal.val_tokens + 1, is_padded=False
            )
        return {"train": train, "val": val}

    def _readable(self) -> list[Path | str]:
        return [self._job.own_folder] if self._job.own_folder else []

    def _writable(self, env: Mapping[str, str]) -> dict[Path, Path]:
        return {}

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Returns sandbox.command() for the ranks."""
        shards, env = self._shards(), {**env, CHECKOUT: str(self._job.code)}
        named = {split: list(map(str, paths)) for split, paths in shards.items()}
        launch = atomic.read_json(self._folder / run_folder.LAUNCH) | {"launcher_pid": None, "shards": named}
        (self.notes / "logs").mkdir(parents=True)
        for name in self.INPUTS:
            shutil.copyfile(self._folder / name, self.notes / name)
        (self.notes / run_folder.LAUNCH).write_text(json.dumps(launch))
        writable = {self._folder: self.notes, **self._writable(env)} | {Path(pipe): Path(pipe) for pipe in self._pipes}
        for name in race_folder.COMPILED:  # not a cache that processes outside a sandbox read too
            cache, ours = Path(env.pop(name, "")), os.environ.get(name)  # a script's own could be any folder
            if race_folder.CACHES in cache.parts and ours and cache == Path(ours):
                cache.mkdir(parents=True, exist_ok=True)
                writable[cache], env[name] = cache, str(cache)
        readable = [self._job.code, *sum(shards.values(), []), *self._readable(), *sandbox.python_files(sys.executable)]
        return sandbox.command(argv, env, readable, writable, self._limits, self._job.code, self.kind)

    def watch(self, guard_pid: int) -> None:
        """Starts to check the limits of the ranks, which run below this process."""
        self._guard_pid, self._watch = guard_pid, sandbox.Watch(guard_pid, self._limits, self._folder)

    def exceeded(self) -> str | None:
        """Returns a sentence about the limit that the ranks exceeded, for which they have been killed, or None."""
        why = self._watch.exceeded() if self._watch else None
        if why:
            processes.signal_all(processes.children(self._guard_pid), signal.SIGKILL)
        return why

    def collect(self) -> None:
        """Moves the ranks' notes to where the launcher reads them.  The ranks must have ended."""
        for entry in plain_file.entries_below(self.notes) if self.notes.is_dir() else ():
            name = os.path.relpath(entry.path, self.notes)
            if self.NOTES.fullmatch(name) and entry.is_file(follow_symlinks=False):
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(entry.path, self._folder / name)
        subprocess.run(["rm", "-rf", "--", self.notes], stderr=subprocess.DEVNULL)  # however deep: rmtree recurses
