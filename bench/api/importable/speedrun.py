"""The module of `import speedrun`, in a checkout and in the wheel: it has the names of bench/api.

This folder is on the path of a checkout's .venv, and of an environment with `pip install -e .`; the wheel installs this
file beside its package.
"""

import importlib
import sys
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2].parent  # only meaningful in a checkout
if Path(__file__).resolve().parent == _CHECKOUT / "bench" / "api" / "importable":
    sys.path.append(str(_CHECKOUT))  # last, so that a user's own module called bench is still found first
    _bench = importlib.import_module("bench")
    if not Path(str(_bench.__file__)).is_relative_to(_CHECKOUT):
        remedy = "its name is that of the harness's package: rename it, or start Python in another folder"
        raise ImportError(f"{_bench.__file__}: {remedy}")
    _api = importlib.import_module("bench.api")
else:
    _api = importlib.import_module("speedrun_bench.api")
__doc__, __all__ = _api.__doc__, _api.__all__


def __getattr__(name):
    return getattr(_api, name)


def __dir__():  # for tab completion, as names are imported when they are first used
    return __all__
