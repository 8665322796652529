"""The command `speedrun` of a wheel, in which this file is speedrun_bench/__init__.py, beside bench/ and models/.

The two are on the path of this program's processes only: a user's own `import bench` or `import models` finds theirs.
In a program of the user's, `from speedrun_bench.compat import CUDATimer` is `from bench.training.compat import
CUDATimer` in a checkout, and `speedrun_bench.models` is `models`.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
SHORT = {"compat": "training.compat", "profiling": "training.profiling"}  # {imported name: place in bench/}


def main() -> None:
    """What ./run.sh is in a checkout."""
    os.environ["SPEEDRUN_CWD"] = os.getcwd()
    os.environ.pop("PYTHONSAFEPATH", None)  # our processes are started in the folder that they import from
    sys.path.insert(0, FOLDER)
    from bench.cli.main import run

    run()


class Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes speedrun_bench.NAME the module bench.NAME itself, under a second name."""

    _first_specs: dict[str, importlib.machinery.ModuleSpec | None] = {}  # specs of modules that are being imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != __name__ or not rest:
            return None
        top, dot, inner = rest.partition(".")
        origin = rest if top in ("bench", "models") else f"bench.{SHORT.get(top, top)}{dot}{inner}"
        return importlib.util.spec_from_loader(name, self, origin=origin)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        origin = str(spec.origin)
        top = origin.partition(".")[0]
        if FOLDER not in sys.path:
            sys.path.append(FOLDER)  # last, so that a user's module of that name comes first
        package = importlib.import_module(top)
        own = (FOLDER, getattr(sys.modules.get("bench.base.paths"), "CODE", FOLDER))  # in a run CODE is a copy
        if not (package.__file__ or "").startswith(tuple(map(str, own))):
            raise ImportError(f"{package.__file__}: {spec.name} needs the harness's module {top}: rename this one")
        module = importlib.import_module(origin)
        self._first_specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the spec that the import system has just replaced; the module was executed under its first name."""
        module.__spec__ = self._first_specs.pop(module.__spec__.name)  # type: ignore[union-attr]


sys.meta_path.insert(0, Packages())
