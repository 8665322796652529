"""Finds a contestant's changes to torch.compile: torch._inductor.config, torch._dynamo.config, options and mode.

modded-nanogpt's rule 3 forbids such flags; a track's rules list those that it allows in compile_flags.  The settings
are compared with torch's defaults whenever inductor compiles a graph, so that a flag set for a while is seen too, and
at the end of the process.  Uses the standard library only and does not import torch, because script_worker.py runs this
file beside another torch.
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
WRAPPER = "_TorchCompileInductorWrapper"  # the "inductor" backend of torch.compile, with its options
# environment variables that torch reads when it is imported, and which become its defaults
VARIABLES = ("TORCHINDUCTOR_*", "TORCHDYNAMO_*", "TORCH_COMPILE_*")
# those of caches, logs and worker processes, which change no kernel
OF_NO_KERNEL = ("*CACHE*", "*LOG*", "*DEBUG*", "*TRACE*", "*THREADS*", "*WORKER*", "*PROFILE*")
# set by torch.compile(dynamic=...) while it traces, not by the contestant
OF_DYNAMIC = ("dynamo.automatic_dynamic_shapes", "dynamo.assume_static_by_default")
MAX_CHARS = 80  # recorded of a value that is not a number
UNSET = object()  # torch, too, marks unset values by a plain object

_seen: dict[str, Any] = {}


def changed() -> dict[str, Any]:
    """Returns the values that differ from torch's defaults, now or at an earlier compilation; {} if none does.

    For example {"inductor.coordinate_descent_tuning": True, "compile.max_autotune": True, "env.TORCHINDUCTOR_...": "1"}
    where the first part of a key says where the value was set.
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
    """Starts to note flags in this process.  Call it before anything is compiled; torch may be imported later."""
    after_import("torch", _watch)


def after_import(name: str, call: Callable[[Any], object]) -> None:
    """Calls call(module) as soon as this process has imported the named module: now, or later."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, call))


def _watch(torch: Any) -> None:
    wrapper = getattr(torch, WRAPPER, None)
    if wrapper is None or getattr(wrapper, "notes_flags", False):
        return
    make, compile_graph = wrapper.__init__, wrapper.__call__

    def noted_make(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for name, value in (getattr(self, "config", None) or {}).items():
            _seen.setdefault(f"compile.{name}", _plain(value))

    def noted_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        changed()
        return compile_graph(self, *args, **kwargs)

    wrapper.__init__, wrapper.__call__, wrapper.notes_flags = noted_make, noted_call, True


def _value_and_default(module: Any, name: str, entry: Any) -> tuple[Any, Any]:
    """Returns (value, default) of a config entry, bypassing its accessor, which warns and copies defaults."""
    if not hasattr(entry, "default"):  # before torch 2.6 entries were plain values, with their defaults beside them
        return entry, getattr(module, "_default", {}).get(name, entry)
    if getattr(entry, "alias", None):  # the entry that it stands for is listed, too
        return entry.default, entry.default
    own = getattr(entry, "user_override", UNSET)
    if hasattr(own, "get") and hasattr(own, "reset"):  # a ContextVar (per thread) in later versions
        own = own.get()
    candidates = (getattr(entry, "env_value_force", UNSET), own, getattr(entry, "env_value_default", UNSET))
    return next((value for value in candidates if type(value) is not object), entry.default), entry.default


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
