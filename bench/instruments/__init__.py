"""Optional measurements: one a file, one yaml each in conf/instruments/, loaded only when chosen.

A new instrument is a new file here with a class INSTRUMENT that extends base.Instrument, and a yaml of the same name.
"""

import importlib
import importlib.util
from collections.abc import Iterable

from bench.config import profiler_windows
from bench.instruments import base


def kind(name: str) -> type[base.Instrument]:
    """The class of an instrument, without torch.  Raises ValueError for a name that has no file."""
    module = f"{__name__}.{name}"
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"instruments={name}: there is no bench/instruments/{name}.py")
    return importlib.import_module(module).INSTRUMENT


def check(chosen: dict[str, dict]) -> None:
    """{name: settings}, all of them.  Raises ValueError for what cannot run."""
    for name, settings in chosen.items():
        kind(name).check(settings)
    profiler_windows.check({name: kind(name).profiler_windows(settings) for name, settings in chosen.items()})


def flagging(names: Iterable[str]) -> list[str]:
    """Those of the names, sorted, whose instrument flags steps.  Of an old record's instrument nothing is known."""
    return [name for name in sorted(names) if importlib.util.find_spec(f"{__name__}.{name}") and kind(name).flags_steps]


def in_timed_region(names: Iterable[str]) -> list[str]:
    """Those of the names, sorted, whose instrument works while the clock runs: part of what makes times comparable."""
    return [name for name in sorted(names) if kind(name).is_in_timed_region()]


def load(chosen: dict[str, dict], context: base.Context) -> tuple[list[base.Instrument], list[dict]]:
    """{name: settings} -> (instruments in that order, warnings of those that could not be made: see base.warning()).

    Raises ValueError for a name that has no file.
    """
    made, warnings = [], []
    for name, settings in chosen.items():
        made_of = kind(name)
        try:
            made.append(made_of(context, **settings))
            made[-1].name = name
        except Exception as error:  # no sensor, no package, no permission: the run goes on without it
            warnings.append(base.warning(name, "start", error))
    return made, warnings
