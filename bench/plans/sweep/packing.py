"""Runs of a sweep at the same time, each on cores or a GPU that no other run of the sweep may use.

They still slow each other down, so each record has run.json["beside"], which makes it suspect: its losses count, its
times do not, until `./run.sh race --from-sweep ID` repeats the best alone.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from bench.base.paths import REPO, working_folder
from bench.config import schema, typed
from bench.launch.console import say
from bench.launch.series import Series
from bench.machine import environment as environment_facts
from bench.machine import gpus, leases, meters, processes
from bench.machine.signals import raise_interrupted
from bench.record import sweep
from models.settings import Range

TOPOLOGY = Path("/sys/devices/system/cpu")
TICK_S = 0.2
END_WITHIN_S = 30.0  # the run's launcher ends its workers, then finishes the record
Parallel = Annotated[
    str, Range(lambda text: re.fullmatch(r"auto|0*[1-9]\d*", text), "auto, or a whole number of 1 or more")
]
OPTION = "--beside"  # option of ./run.sh run: a Slot as JSON

Core = tuple[int, ...]  # logical CPUs of a physical core, or of several
Place = tuple[gpus.Device | None, Core]


@dataclass(frozen=True)
class Slot:
    """The cores and the GPU that one of several concurrent runs may use."""

    slot: int  # number of the slot, from 0
    num_slots: int
    cores: tuple[int, ...]  # logical CPUs, numbered as the machine does
    gpu: str | None = None  # as CUDA_VISIBLE_DEVICES names it; None: a run on a CPU
    memory_gib: float | None = None  # the GPU's memory
    gpu_number: int | None = None  # its number among those that CUDA shows this process

    def machine(self) -> schema.Machine:
        """Returns the machine as a run at this slot sees it."""
        return schema.Machine(int(self.gpu is not None), len(self.cores), self.memory_gib)

    def fact(self) -> dict[str, Any]:
        """Returns run.json["beside"], with the GPU's number, because no record holds a UUID."""
        kept = {key: value for key, value in asdict(self).items() if key not in ("memory_gib", "gpu_number")}
        return kept | {"cores": list(self.cores), "gpu": None if self.gpu_number is None else str(self.gpu_number)}

    def __str__(self) -> str:
        cores = f"cores {','.join(map(str, self.cores))}"
        return cores if self.gpu is None else f"GPU {self.gpu_number}, {cores}"


def slots(parallel: int | str, on_cpu: bool) -> list[Slot]:
    """Returns one slot for each concurrent run. Raises ValueError if the machine has too few.

    A slot has a free GPU (bench/machine/leases.py), with its share of the cores near it, or cores alone; physical cores
    are not divided between slots. parallel: hydra.launcher.parallel, "auto" for as many as there are free GPUs, or
    cores if on_cpu.
    """
    typed.checked("hydra.launcher.parallel", str(parallel), Parallel | None)
    num_wanted = None if parallel == "auto" else int(parallel)
    cores = physical_cores(meters.usable_cpus())
    devices = [] if on_cpu else gpus.devices()
    places = _gpu_places(devices, cores, num_wanted) if devices else _core_places(cores, num_wanted)
    number = num_wanted or len(places)
    if not 1 <= number <= len(places):
        num_cpus = sum(map(len, cores))
        has = f"{len(devices)} GPU(s), {len(places)} of them free, and {num_cpus} cores"
        has = has if devices else f"{num_cpus} cores"
        raise ValueError(
            f"hydra.launcher.parallel={parallel}: this machine has {has}, and no two runs share one: "
            f"use hydra.launcher.parallel={max(1, len(places))}"
        )
    return [
        Slot(slot, number, near, *((device.name, device.memory_gib, device.number) if device else ()))
        for slot, (device, near) in enumerate(places[:number])
    ]


def physical_cores(usable: Iterable[int]) -> list[Core]:
    """Groups logical CPUs by physical core, in order: hyper-threads of one core stay together."""
    cores: dict[str, Core] = {}
    for cpu in sorted(usable):
        siblings = environment_facts.text_of(TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        cores[siblings] = (*cores.get(siblings, ()), cpu)
    return sorted(cores.values())


def _core_places(cores: Sequence[Core], num_wanted: int | None) -> list[Place]:
    """Divides the cores into equal shares: num_wanted, at most as many as there are physical cores."""
    number = min(num_wanted or len(cores), len(cores))
    cores_each = len(cores) // number
    return [(None, sum(cores[slot * cores_each : (slot + 1) * cores_each], ())) for slot in range(number)]


def _gpu_places(devices: Sequence[gpus.Device], cores: Sequence[Core], num_wanted: int | None) -> list[Place]:
    """Returns at most num_wanted GPUs that could be leased, idle ones first, each with its cores.

    A GPU's share is the same in every sweep: of the physical cores near it, as many as each other GPU near them gets.
    """
    groups: dict[frozenset[Core], list[gpus.Device]] = {}
    for device in devices:
        near = [core for core in cores if device.cpus.issuperset(core)] or cores
        groups.setdefault(frozenset(near), []).append(device)
    shares, used_cores = dict[int, Core](), set[Core]()
    for near_cores, members in sorted(groups.items(), key=lambda group: len(group[0])):
        spare = sorted(near_cores - used_cores)
        cores_each = max(1, len(spare) // len(members))  # if there are fewer cores than GPUs, the last GPUs get none
        for place, device in enumerate(members):
            own = spare[place * cores_each : (place + 1) * cores_each]
            used_cores.update(own)
            shares[device.number] = sum(own, ())
    places: list[Place] = []
    for device in sorted(devices, key=lambda device: (device.num_processes or 0, device.number)):
        if len(places) == num_wanted:
            break
        if not shares[device.number]:
            continue
        if why := leases.lease_device(device):
            say("sweep", f"GPU {device.number} is left out: {why}")
        else:
            places.append((device, shares[device.number]))
    return places


def pin(slot: Slot) -> None:
    """Restricts this process and all that it starts to the slot's cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, slot.cores)


def slot_of(values: Mapping[str, Any]) -> Slot:
    """Returns a Slot from its JSON object."""
    return Slot(**{**values, "cores": tuple(values["cores"])})


def environment(slot: Slot) -> dict[str, str]:
    """Returns the variables of a process at a slot."""
    env = os.environ | {"SPEEDRUN_CWD": working_folder()}
    return env | {"CUDA_VISIBLE_DEVICES": slot.gpu} if slot.gpu is not None else env


@dataclass(eq=False)
class _Running:
    """A run under way."""

    number: int  # index of its point
    slot: Slot
    process: subprocess.Popen[bytes]
    files: contextlib.ExitStack  # closes its output and ends it
    log: Path  # its output
    answer: Path  # the file in which it writes its record's folder
    began_s: float


def run_all(
    points: Mapping[int, list[str]],
    where: Sequence[Slot],
    logs: Path,
    facts: dict[str, Any],
    series: Series,
    is_all: bool,
) -> Iterator[tuple[int, str | None, str]]:
    """Runs every point, one per slot at a time. Yields (index, record's folder or None, last lines of output).

    points: overrides by index; logs: a folder for the runs' output; facts: passed to each process, with its slot;
    series: of these runs, and none begins that would end after its budget; is_all: whether these are all runs of the
    sweep. Raises Interrupted after the runs under way have ended.
    """
    was_known = series.left_s() is not None or not is_all
    logs.mkdir(parents=True, exist_ok=True)
    todo, free = list(points), list(where)
    running: list[_Running] = []

    with raise_interrupted() as signals, contextlib.ExitStack() as all_of_them:
        while running or (todo and series.fits()):
            signals.check()
            while free and todo and series.fits():
                number, slot = todo.pop(0), free.pop(0)
                overrides = sweep.its_own(points[number], points.values())
                say("run", f"{len(points) - len(todo)} of {len(points)} on {slot}: {overrides}")
                files = all_of_them.enter_context(contextlib.ExitStack())
                log, answer = logs / f"{number}.log", logs / f"{number}.folder"
                out = files.enter_context(open(log, "wb"))
                request = json.dumps(asdict(slot) | facts | {"answer": str(answer)})
                program = [sys.executable, "-m", "bench", "run", *points[number], "--quiet", OPTION, request]
                process = files.enter_context(processes.child(program, REPO, environment(slot), out, END_WITHIN_S))
                running.append(_Running(number, slot, process, files, log, answer, time.monotonic()))
            for ended in [run for run in running if run.process.poll() is not None]:
                running.remove(ended)
                ended.files.close()
                series.end(spent_s=time.monotonic() - ended.began_s)
                if todo and not was_known:
                    was_known = True
                    say("plan", f"to go: {series.forecast()}")
                free.append(ended.slot)
                folder = ended.answer.read_text() if ended.answer.exists() else None
                ended.answer.unlink(missing_ok=True)
                yield ended.number, folder, "\n".join(ended.log.read_text(errors="replace").splitlines()[-5:])
            time.sleep(TICK_S)
