"""The ranks that this process starts itself, without torch's agent: begun, watched, ended together."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.base.paths import CODE
from bench.machine import processes
from bench.machine.signals import held

WAKE_AFTER_S = 1.0  # after a rank has failed
KILL_AFTER_S = 8.0  # so late that bench/record/failures.py takes the kill for the launcher's own


class RankProcesses:
    """words: the program; env: of all; of_rank: {rank: the variables of that rank alone}; log: for what is printed
    before a rank has a log; code: the folder that they import from.

    Begun by the main thread: a child is to end with its parent, and the kernel takes a thread for one.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        of_rank: Mapping[int, Mapping[str, str]],
        log,
        code: Path = CODE,
    ):
        self._code = code
        with held():  # no signal leaves a rank that nobody knows
            self._left = {rank: self._begun(words, {**env, **own}, log) for rank, own in of_rank.items()}
        self._asked_s = None  # when they were asked to end
        self._woken = False

    def _begun(self, words, env, log):
        return subprocess.Popen(
            words,
            cwd=self._code,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )

    @property
    def are_left(self) -> bool:
        return bool(self._left)

    @property
    def pids(self) -> set[int]:
        """Of those that ended() has not named yet."""
        return {process.pid for process in self._left.values()}

    def wait(self, within_s: float) -> None:
        """Until one more has ended, at most so long; asleep, so that training has the cores."""
        processes.one_has_ended([process.pid for process in self._left.values()], within_s)

    def ended(self) -> list[tuple[int, int]]:
        """[(rank, exit code)] of those that have ended since the last call; a negative code is a signal's number."""
        self._press()
        result = [(rank, process.poll()) for rank, process in self._left.items()]
        result = [(rank, code) for rank, code in result if code is not None]
        for rank, _ in result:
            del self._left[rank]
        return result

    def stop(self) -> None:
        """Tell all that are left to end; ended() presses them.

        A stopped process gets no signal: it is woken, so that it leaves its stack; what has not ended then is killed.
        """
        if self._asked_s is None:
            self._asked_s = time.monotonic()
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all that are left at once, whatever they do."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """End what is left, and wait for it."""
        self.stop()
        while self._left:
            self.wait(0.1)
            self.ended()

    def _press(self):
        since_s = 0.0 if self._asked_s is None else time.monotonic() - self._asked_s
        if since_s > WAKE_AFTER_S and not self._woken:
            self._woken = True
            self._signal(signal.SIGCONT)
        if since_s > KILL_AFTER_S:
            self.kill()

    def _signal(self, number):
        for process in self._left.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
