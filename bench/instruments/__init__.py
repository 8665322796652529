"""Optional measurements: one a file, one yaml each in conf/instruments/, loaded only when chosen.

A new instrument is a new file here with a class INSTRUMENT that extends base.Instrument, and a yaml of the same name.
"""

import importlib


def load(chosen, context):
    """{name: settings} -> instruments in that order.  Raises ValueError for a name that has no file."""
    made = []
    for name, settings in chosen.items():
        module = f"{__name__}.{name}"
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise ValueError(f"instruments={name}: there is no bench/instruments/{name}.py") from None
        made.append(found.INSTRUMENT(context, **(settings or {})))
        made[-1].name = name
    return made
