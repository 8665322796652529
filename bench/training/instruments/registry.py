"""Optional measurements: one a file, one yaml each in conf/instruments/, loaded only when chosen.

A new instrument is a new file here with a class INSTRUMENT that extends base.Instrument, and a yaml of the same name.
One of the user's own is a yaml in their conf/instruments/ whose setting class is an import path
(bench/config/user_code.py).
"""

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from bench.config import user_code, windows
from bench.training.instruments import base


def kind(name: str, settings: Mapping = MappingProxyType({})) -> type[base.Instrument]:
    """The class of an instrument, without torch.  Raises ValueError for a name without a file, or a wrong class."""
    if user_code.CLASS in settings:
        where = f"instruments.{name}.{user_code.CLASS}"
        own = user_code.load(where, settings[user_code.CLASS])
        if not issubclass(own, base.Instrument):
            raise ValueError(
                f"{where}={settings[user_code.CLASS]}: it must extend bench.training.instruments.base.Instrument"
            )
        return own
    module = f"{__package__}.{name}"
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"instruments={name}: there is no bench/training/instruments/{name}.py")
    return importlib.import_module(module).INSTRUMENT


def check(chosen: dict[str, dict]) -> None:
    """{name: settings}, all of them.  Raises ValueError for what cannot run."""
    kinds = {name: kind(name, settings) for name, settings in chosen.items()}
    given = {name: _without_class(settings) for name, settings in chosen.items()}
    for name in chosen:
        kinds[name].check(given[name])
    windows.check_profilers({name: kinds[name].profiler_windows(given[name]) for name in chosen})


def flagging(chosen: Iterable[str] | Mapping[str, dict]) -> list[str]:
    """Those of the names, sorted, whose instrument flags steps: names alone, or {name: settings}.

    Of an old record's instrument, or of a user's own that is not here, nothing is known: its steps carry the flags.
    """
    return [name for name in sorted(chosen) if _flags_steps(name, chosen[name] if isinstance(chosen, Mapping) else {})]


def _flags_steps(name, settings):
    if user_code.CLASS not in (settings or {}):
        return importlib.util.find_spec(f"{__package__}.{name}") is not None and kind(name).flags_steps
    try:
        return kind(name, settings).flags_steps
    except ValueError:
        return False


def program(chosen: Mapping[str, Mapping], folder: Path, device_type: str) -> list[str]:
    """Words before each rank's command, of all instruments.  ValueError: base.Instrument.program()'s."""
    named = [(kind(name, settings), _without_class(settings)) for name, settings in chosen.items()]
    return [word for one, settings in named for word in one.program(settings, folder, device_type)]


def last_step(chosen: Mapping[str, Mapping]) -> int:
    """The step (the first is 1) after which none of the windows is open any more.  ValueError: there is no window."""
    last_steps = [kind(name, settings).last_step(_without_class(settings)) for name, settings in chosen.items()]
    if not any(last_steps):
        raise ValueError(
            "profile.stop_after_window=true: no chosen instrument has a window of steps: choose one, e.g. "
            "profile=modded, profile=window or profile=memory"
        )
    return max(step for step in last_steps if step is not None)


def _without_class(settings):
    return {key: value for key, value in settings.items() if key != user_code.CLASS}


def in_timed_region(chosen: Mapping[str, Mapping]) -> list[str]:
    """Names, sorted, of those that work while the clock runs: part of what makes times comparable.  As check()."""
    return sorted(name for name, settings in chosen.items() if kind(name, settings).is_in_timed_region())


def load(chosen: dict[str, dict], context: base.Context) -> tuple[list[base.Instrument], list[dict]]:
    """{name: settings} -> (instruments in that order, of each that could not be made its base.warning()).

    Raises ValueError for a name that has no file.
    """
    made, warnings = [], []
    for name, settings in chosen.items():
        made_of = kind(name, settings)
        try:
            made.append(made_of(context, **_without_class(settings)))
            made[-1].name = name
        except Exception as error:  # no sensor, no package, no permission: the run goes on without it
            warnings.append(base.warning(name, "start", error))
    return made, warnings
