"""Optional measurements: one a file, one yaml each in conf/instruments/, loaded only when chosen.

A new instrument is a new file here with a class INSTRUMENT that extends base.Instrument, and a yaml of the same name.
"""

import importlib
import importlib.util

from bench.instruments import base


def load(chosen, context):
    """{name: settings} -> (instruments in that order, warnings of those that could not be made).

    Raises ValueError for a name that has no file.
    """
    made, warnings = [], []
    for name, settings in chosen.items():
        module = f"{__name__}.{name}"
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"instruments={name}: there is no bench/instruments/{name}.py")
        try:
            made.append(importlib.import_module(module).INSTRUMENT(context, **settings))
            made[-1].name = name
        except Exception as error:  # no sensor, no package, no permission: the run goes on without it
            warnings.append(base.warning(name, "start", error))
    return made, warnings
