"""Finds the instruments that a config chooses, checks their settings, and makes them.

A new instrument is a new file here with a class INSTRUMENT that extends base.Instrument, and a yaml of the same name.
A user's instrument is a yaml in their conf/instruments/ whose setting `class` is an import path
(bench/config/user_code.py).
"""

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.base.paths import CONF
from bench.base.reading import yaml_file
from bench.config import user_code, windows
from bench.config.schema import LookConfig
from bench.training.instruments import base

Chosen = Mapping[str, Mapping[str, Any]]  # a config's instruments: {name: settings}

LOOK = "look"  # name of the window that look.py profiles once the race is over
# size of its trace before compression, which shrinks it about 15 times: under 50 MB a rank (assumed for GPU traces)
MAX_TRACE_MIB = 600.0
MAX_MEMORY_ENTRIES = 100_000  # in a GPU's memory history; a step of models/modern.py at 124M makes a few thousand


def kind(name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> type[base.Instrument]:
    """Returns an instrument's class, without torch.  Raises ValueError for a name without a file, or a wrong class."""
    if user_code.CLASS in settings:
        where = f"instruments.{name}.{user_code.CLASS}"
        own: type[base.Instrument] = user_code.load(where, settings[user_code.CLASS], base.Instrument)
        return own
    module = f"{__package__}.{name}"
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"instruments={name}: there is no bench/training/instruments/{name}.py")
    instrument: type[base.Instrument] = importlib.import_module(module).INSTRUMENT
    return instrument


def _each(chosen: Chosen) -> Iterator[tuple[str, type[base.Instrument], dict[str, Any]]]:
    """Yields (name, class, settings without `class`) for each instrument.  Raises what kind() raises."""
    for name, settings in chosen.items():
        yield name, kind(name, settings), {key: value for key, value in settings.items() if key != user_code.CLASS}


def check(chosen: Chosen) -> None:
    """Raises ValueError if an instrument's settings are invalid, or if two profilers would run at once."""
    instruments = list(_each(chosen))
    for _, instrument, settings in instruments:
        instrument.check(settings)
    windows.check_profilers({name: instrument.profiler_windows(settings) for name, instrument, settings in instruments})


def flagging(chosen: Iterable[str] | Chosen) -> list[str]:
    """Returns the names, sorted, of the instruments that flag steps; chosen holds names, or {name: settings}.

    An unknown name (from an old record, or a user's instrument) is omitted; its flags are in the record's steps.
    """

    def flags_steps(name: str, settings: Mapping[str, Any]) -> bool:
        try:
            return kind(name, settings).flags_steps
        except ValueError:
            return False

    settings_of = chosen if isinstance(chosen, Mapping) else dict.fromkeys(chosen, {})
    return [name for name in sorted(settings_of) if flags_steps(name, settings_of[name] or {})]


def program(chosen: Chosen, folder: Path, device_type: str) -> list[str]:
    """Returns the arguments that all instruments put before each rank's command: base.Instrument.program()."""
    return [
        text for _, instrument, settings in _each(chosen) for text in instrument.program(settings, folder, device_type)
    ]


def profiling(chosen: Chosen, device_type: str) -> list[str]:
    """Returns the instruments that profile, or wrap ranks in a profiling program; no second profiler can run then."""
    return [
        name
        for name, instrument, settings in _each(chosen)
        if instrument.profiler_windows(settings) != [] or instrument.program(settings, Path(), device_type)
    ]


def last_step(chosen: Chosen) -> int:
    """Returns the step (the first is 1) at which the last window ends.  Raises ValueError if there is no window."""
    last_steps = [instrument.last_step(settings) for _, instrument, settings in _each(chosen)]
    if not any(last_steps):
        remedy = "choose one, e.g. profile=modded, profile=window or profile=memory"
        raise ValueError(f"profile.stop_after_window=true: no chosen instrument has a window of steps: {remedy}")
    return max(step for step in last_steps if step is not None)


def in_timed_region(chosen: Chosen) -> list[str]:
    """Returns the sorted names of instruments that work while the clock runs; runs compare only if these match."""
    return sorted(name for name, settings in chosen.items() if kind(name, settings).is_in_timed_region())


def load(chosen: Chosen, context: base.Context) -> tuple[list[base.Instrument], list[dict[str, str]]]:
    """Returns (the instruments in order, base.warning() of each that failed to start).  Raises what kind() raises."""
    instruments, warnings = [], []
    for name, instrument, settings in _each(chosen):
        try:
            instruments.append(instrument(context, **settings))
            instruments[-1].name = name
        except Exception as error:  # no sensor, no package, no permission: the run goes on without it
            warnings.append(base.warning(name, "start", error))
    return instruments, warnings


def look_instruments(config: LookConfig, first_step: int, device_type: str) -> dict[str, dict[str, Any]]:
    """Returns {instrument: settings} for the profiled window after a race; first_step counts from 1."""
    window = {"name": LOOK, "first_step": first_step, "active_steps": config.active_steps}
    recorded = {"record_shapes": True, "profile_memory": True, "with_stack": True, "max_mib": MAX_TRACE_MIB}
    instruments = {"trace": _defaults("trace") | window | recorded | {"warmup_steps": config.warmup_steps}}
    if device_type == "cuda":
        instruments["memory_history"] = _defaults("memory_history") | window | {"max_entries": MAX_MEMORY_ENTRIES}
    return instruments


def _defaults(instrument: str) -> dict[str, Any]:
    """Returns all settings of an instrument, as its yaml has them."""
    settings: dict[str, Any] = yaml_file.read(CONF / "instruments" / f"{instrument}.yaml")[instrument]
    return settings
