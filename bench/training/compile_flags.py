"""What a contestant changed of torch.compile: torch._inductor.config, torch._dynamo.config, options and mode.

modded-nanogpt's rule 3 forbids such flags; which of them a track allows is its rules' compile_flags.  Compared with
torch's defaults whenever inductor compiles a graph, so that a flag set for a while is seen too, and at the end of the
process.  Standard library alone, as script_worker.py runs it beside another torch; it imports nothing of torch.
"""

from __future__ import annotations

import fnmatch
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

CONFIGS = {"inductor": "torch._inductor.config", "dynamo": "torch._dynamo.config"}
WRAPPER = "_TorchCompileInductorWrapper"  # torch.compile's backend "inductor", with the options that it was given
# read by torch where it is imported, and its defaults from then on; not those of caches, logs and worker processes
VARIABLES = ("TORCHINDUCTOR_*", "TORCHDYNAMO_*", "TORCH_COMPILE_*")
OF_NO_KERNEL = ("*CACHE*", "*LOG*", "*DEBUG*", "*TRACE*", "*THREADS*", "*WORKER*", "*PROFILE*")
# what torch.compile(dynamic=...) sets while it traces: no flag of the contestant's
OF_DYNAMIC = ("dynamo.automatic_dynamic_shapes", "dynamo.assume_static_by_default")
MAX_CHARS = 80  # of a value that is no number and no short text
UNSET = object()  # torch marks what is not set by a plain object, too

_seen: dict[str, Any] = {}


def changed() -> dict[str, Any]:
    """{"inductor.coordinate_descent_tuning": True, "compile.max_autotune": True, "env.TORCHINDUCTOR_...": "1"}.

    Values that differ from torch's defaults, now or at an earlier compilation; a key's first name says where it was
    set.  {} where torch is as it comes, or was not imported.
    """
    for place, module_name in CONFIGS.items():
        module = sys.modules.get(module_name)
        for name, entry in getattr(module, "_config", {}).items():
            value, default = _value_and_default(module, name, entry)
            if value is not default and value != default and f"{place}.{name}" not in OF_DYNAMIC:
                _seen.setdefault(f"{place}.{name}", _plain(value))
    for name, text in os.environ.items():
        if _matches(name, VARIABLES) and not _matches(name, OF_NO_KERNEL):
            _seen.setdefault(f"env.{name}", text[:MAX_CHARS])
    return dict(sorted(_seen.items()))


def watch() -> None:
    """Start to note flags in this process.  Call it before anything is compiled; torch may be imported later."""
    after_import("torch", _watch)


def after_import(name: str, call: Callable[[Any], object]) -> None:
    """Calls call(the module) as soon as this process has imported it: now, or later."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, call))


def _watch(torch: Any) -> None:
    wrapper = getattr(torch, WRAPPER, None)
    if wrapper is None or getattr(wrapper, "notes_flags", False):
        return
    make, compile_graph = wrapper.__init__, wrapper.__call__

    def noted_make(self: Any, *args: Any, **more: Any) -> None:
        make(self, *args, **more)
        for name, value in (getattr(self, "config", None) or {}).items():
            _seen.setdefault(f"compile.{name}", _plain(value))

    def noted_call(self: Any, *args: Any, **more: Any) -> Any:
        changed()
        return compile_graph(self, *args, **more)

    wrapper.__init__, wrapper.__call__, wrapper.notes_flags = noted_make, noted_call, True


def _value_and_default(module: Any, name: str, entry: Any) -> tuple[Any, Any]:
    """(value, default) of an entry of a config module, bypassing its accessor, which warns and copies defaults."""
    if not hasattr(entry, "default"):  # before torch 2.6 plain values, and their defaults beside them
        return entry, getattr(module, "_default", {}).get(name, entry)
    if getattr(entry, "alias", None):  # it is listed under its own name
        return entry.default, entry.default
    own = getattr(entry, "user_override", UNSET)
    if hasattr(own, "get") and hasattr(own, "reset"):  # a ContextVar in later versions: of each thread
        own = own.get()
    given = (getattr(entry, "env_value_force", UNSET), own, getattr(entry, "env_value_default", UNSET))
    return next((value for value in given if type(value) is not object), entry.default), entry.default


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)[:MAX_CHARS]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, call: Callable[[Any], object]):
        self._name, self._call = name, call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            self._call(module)

        spec.loader.exec_module = executed
        return spec
