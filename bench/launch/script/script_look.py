"""The look at a script after its race: runs it once more, untimed, until torch's profiler has recorded a few steps.

The process of the race cannot train on: the loop is the script's own, and after its last line its process groups are
destroyed and its loaders exhausted.  The second run has the same seed, data and settings, and a separate folder inside
the run's.  It ends once each rank has written its trace.  Everything else that it prints and writes is discarded.

The profiler records the first steps after SETTLED_STEPS that have no validation among them.  A script prints a line
every so many steps, and between two lines nothing is known about it, so the profiler begins and ends at lines.
"""

import dataclasses
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.base import atomic, private
from bench.config.schema import LookConfig, ProfileConfig
from bench.launch import after_race, initial_record, ranks
from bench.launch.prepare import Job
from bench.launch.script import script_run, trace_files
from bench.record.shape import Section
from bench.training.instruments.registry import LOOK, look_instruments
from bench.training.profiling import allocations
from bench.training.profiling.files import write_tables

FOLDER = f".{LOOK}.tmp"
SETTLED_STEPS = 10  # steps at the beginning: compilation, and those that modded-nanogpt's clocks used to exclude
MAX_STEPS = 50  # at most, in the trace (assumed): more would make it too large
TICK_S = 0.2


def window(config: LookConfig, lines: Sequence[str], edges: Sequence[tuple[str, int]]) -> tuple[int, int, int] | None:
    """Returns (warmup_steps, first_step, last_step) according to what the script printed, None if no lines fit.

    edges: trace_files.edges() of its dialect.  A line may end several steps; last_step is the first of those that the
    last line ends, and all of them are recorded.
    """
    began, validated = list[int](), set[int]()  # steps that began after a line; those that hold a validation
    for text in lines:
        step = trace_files.step_done(text, edges)
        if step is not None and (not began or step + 1 > began[-1]):
            began.append(step + 1)
        if began and "val" in text:
            validated.add(began[-1])
    for before, first in pairwise(began):
        ends = [step for step in began if step >= first + config.active_steps]
        if first <= SETTLED_STEPS or not ends or ends[0] - before > MAX_STEPS:
            continue
        if not any(before <= step < ends[0] for step in validated):
            return first - before, first, max(step for step in began if step < ends[0])
    return None


class ScriptLook:
    """The look at the run of a job in its folder; watched: that run, whose watched.look it sets."""

    def __init__(self, folder: Path, job: Job, watched: script_run.Watched):
        self._folder, self._inside, self._job = folder, folder / FOLDER, job
        self._look: Section = {"status": "begun", "began_s": time.monotonic()}
        self._printed, watched.look = watched.printed, self._look
        self.warnings: list[Section] = []

    def steps(self, env: Mapping[str, str], run: Section, most_s: float) -> Iterator[None]:
        """Runs the script; yields now and then.  env: of its ranks; run: its record so far; most_s: time limit."""
        job, edges = self._job, trace_files.edges(self._job.script.dialect if self._job.script else None)
        chosen = window(job.config.look, self._printed, edges)
        if chosen is None:
            return self.failed(
                f"it printed no {job.config.look.active_steps} steps in a row without a validation, after step "
                f"{SETTLED_STEPS} and within {MAX_STEPS}"
            )
        warmup_steps, first_step, last_step = chosen
        look = dataclasses.replace(
            job.config.look, warmup_steps=warmup_steps, active_steps=last_step - first_step + 1, enabled=False
        )
        instruments = {"trace": look_instruments(look, first_step, "cpu")["trace"]}
        profile = ProfileConfig(stop_after_window=True)
        config = dataclasses.replace(job.config, look=look, instruments=instruments, profile=profile, exporters={})
        job = dataclasses.replace(job, config=config)
        assert job.script is not None
        self._inside.mkdir()
        watched = script_run.Watched(self._inside, job)
        initial_record.write_inputs(self._inside, job, {}, time.monotonic(), run["code"], watched.pipes)
        num_ranks, is_bare = config.hardware.num_processes or 1, not job.script.torchrun
        confined = watched.confined
        with (
            ranks.Guard(self._inside, job.code, is_member=True) as guard,
            watched.watching(),
            ranks.started(guard, num_ranks, self._inside, env, watched.program, is_bare, confined=confined) as group,
        ):
            until_s = time.monotonic() + most_s
            while not group.has_ended(TICK_S) and not watched.has_seen_its_windows() and time.monotonic() < until_s:
                watched.tick()
                yield
        if confined:
            confined.collect()
        self._keep(config.instruments, num_ranks, [first_step, last_step])
        shutil.rmtree(self._inside, ignore_errors=True)

    def failed(self, why: str) -> None:
        self._look |= {"status": "not recorded", "look_s": time.monotonic() - self._look["began_s"]}
        self.warnings.append(after_race.warning(why))

    def _keep(self, instruments: Mapping[str, Section], num_ranks: int, steps: list[int]) -> None:
        """Moves the traces into the run's folder, with a table of operators for each."""
        facts = trace_files.conclude(self._inside, instruments, num_ranks, [])["trace"][LOOK]
        if facts["status"] != "recorded":
            log = self._inside / "logs" / "rank0.log"
            end = log.read_text(errors="replace").strip().rpartition("\n")[2] if log.exists() else "nothing"
            return self.failed(f"its second run left no trace; its last output was: {private.excerpt(end, 200)}")
        for folder in ("traces", "memory"):
            (self._folder / folder).mkdir(exist_ok=True)
        files = []
        for name in facts["files"]:
            path = (self._inside / "traces" / name).replace(self._folder / "traces" / name)
            stem = name.partition(".")[0]
            about = f"{self._folder.name}: memory while steps {steps[0]} to {steps[1]} were recorded, in a second run."
            html, _ = allocations.page_of_trace(path, f"{stem}: memory", about)
            page = self._folder / "memory" / f"{stem}.html"
            atomic.write_text(page, html, durable=False)
            written = [path, *write_tables(path, stem, window=LOOK, steps=steps), page]
            files += [file.relative_to(self._folder).as_posix() for file in written]
        rank_facts: list[dict[str, Any]] = [facts[f"rank{rank}"] for rank in range(num_ranks) if f"rank{rank}" in facts]
        dropped: Counter[str] = sum((Counter(rank["dropped"]) for rank in rank_facts), Counter())
        self._look |= {
            "status": "recorded",
            "steps": steps,
            "num_events": sum(rank["num_events"] for rank in rank_facts),
            "dropped": dict(dropped),
            "look_s": time.monotonic() - self._look["began_s"],
            "files": files,
        }
