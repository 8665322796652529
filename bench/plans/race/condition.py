"""Measures the machine's condition before and after a race: the figures of the passport that the race uses, in seconds.

    RACE/machine.json: {"measurements": [{"when": "before" or "after", "passport": Passport, "faults": [sentence]}]}

Measured are the passport's (bench/machine/passports.py) clock under load, largest copy, first launch, products of the
arms' precisions, and largest message of each collective. A fault is a figure outside the samples of earlier
measurements of the same device, passports and other races, that is worse by WORSE_PCT or more; on a GPU also one that
its peers surpass; after the race, also one that fell since it began.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from bench.base import atomic, text_table
from bench.base.reading import json_file
from bench.config import compose, resolve, schema
from bench.launch.console import say
from bench.machine import environment, gpus, passports
from bench.plans.passport import session
from bench.record import race_folder

FILE = "machine.json"
MODES = ("auto", "off", "flag", "refuse")  # auto: flag if an arm runs on a GPU, else off
LIMIT_S = {"cuda": 20.0, "cpu": 5.0}  # time for measuring, without the start of processes
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}  # the dtype assumed if a program reports none
WORSE_PCT = 3.0  # as passports.PEER_FRAC: healthy devices differ by less


class Measurement(TypedDict):
    """One measurement. faults: what was found, a sentence each."""

    when: str
    passport: passports.Passport
    faults: list[str]


class Measurements(TypedDict):
    """The content of RACE/machine.json, in the order of measuring."""

    measurements: list[Measurement]


def measure(folder: Path, results: Path, arms: Mapping[str, Mapping[str, Any]], mode: str, when: str) -> None:
    """Measures the condition, writes it into folder and reports faults; does nothing if the mode does not require it.

    mode: of MODES; when: before or after. Raises ValueError for faults before the race if the mode is refuse.
    """
    machine = schema.Machine(len(gpus.visible()), environment.usable_cpus())
    if mode == "off" or mode == "auto" and not machine.num_gpus:  # known without composing the arms' configs
        return
    hardware = [setup for arm in arms.values() if (setup := _hardware(arm, machine)) is not None]
    if not hardware or mode == "auto" and all(setup.device != "cuda" for setup in hardware):
        return
    first = next((setup for setup in hardware if setup.device == "cuda"), hardware[0])
    precisions = {setup.dtype or DTYPE[setup.device] for setup in hardware} | {"tf32" for arm in hardware if arm.tf32}
    try:
        env = environment.environment()
        passport = session.measure(first, env, lambda line: None, LIMIT_S[first.device], sorted(precisions))
    except session.NotMeasured as error:
        say("warn", f"the machine's condition {when} the race was not measured: {error}", always=True)
        return
    past = of(folder)
    history = passports.every()
    for path in (results / race_folder.FOLDER).glob(f"*/{FILE}"):
        with contextlib.suppress(ValueError):  # damaged files are skipped
            history += [measured["passport"] for measured in of(path.parent) if path.parent != folder]
    faults = list(_faults(passport, sorted(history, key=lambda passport: passport["at"])))
    faults += [fault for fault in _faults(passport, [earlier["passport"] for earlier in past]) if fault not in faults]
    new = Measurement(when=when, passport=passport, faults=faults)
    atomic.write_json(folder / FILE, {"measurements": [*past, new]})
    for fault in faults:
        say("warn", f"{when} the race, {fault}", always=True)
    if faults and mode == "refuse" and when == "before":
        raise ValueError(f"the machine has changed: {faults[0]}: repair it, or race with --machine=flag")


def of(folder: Path) -> list[Measurement]:
    """Returns the measurements of a race; [] if it made none."""
    path = folder / FILE
    return cast(Measurements, json_file.read(path, Measurements))["measurements"] if path.is_file() else []


def faults_of(folder: Path) -> list[str]:
    """Returns the faults found before and after a race, as sentences."""
    return [f"{measured['when']} the race, {fault}" for measured in of(folder) for fault in measured["faults"]]


def _hardware(arm: Mapping[str, Any], machine: schema.Machine) -> schema.HardwareConfig | None:
    """Returns an arm's hardware as today's code resolves it; None if it does not know a setting of the revision."""
    try:
        hardware = compose.compose(list(arm.get("overrides") or ()), machine).hardware
        resolve.resolve_hardware(hardware, machine)
    except ValueError:
        return None
    return hardware


def _faults(passport: passports.Passport, earlier: Sequence[passports.Passport]) -> Iterator[str]:
    names = {device["index"]: device["name"] for device in passport["devices"]}
    for line in passports.changes(passport, earlier):
        if line["is_worse"] and line["beyond_spread"] and abs(line["change_pct"]) >= WORSE_PCT:
            device = "" if line["device"] is None else f" of device {line['device']} ({names[line['device']]})"
            before = text_table.counted(line["num_earlier"], "earlier measurement")
            now = f"{line['now']:.4g} {line['unit']}, {line['before']:.4g} in {before}"
            yield f"{line['what']}{device} is {abs(line['change_pct']):.1f} % worse than it was: {now}"
    for line in passports.slower_than_peers(passport):
        peers = f"{line['value']:.4g} {line['unit']}, the others' median {line['peers']:.4g}"
        yield f"{line['what']} of device {line['device']} is {line['slower_pct']:.1f} % below its peers: {peers}"
