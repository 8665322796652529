"""Delays the import of torch._dynamo until something compiles: it takes 1.3 of the 5 CPU seconds of a very short rank.

torch.optim imports all of torch.compile at an optimizer's first call, only to keep it off: torch._dynamo.disable()
around some methods, graph_break() in each step; DistributedDataParallel does, to ask how a compiled model is split.
Without a compiler at work this has no effect, so a module with these few functions stands in for it.  Code that needs
anything else of it, such as torch.compile, gets the real module, which from then on is used everywhere.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class StandIn(ModuleType):
    """Stands in for torch._dynamo or a module of it.  known: its attributes; any other one loads the real module."""

    def __init__(self, name: str, **attributes: Any):
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspect reads every module's __file__
            raise AttributeError(name)
        if not is_imported():
            waiting = sys.modules.pop(NAME).waiting
            importlib.import_module(NAME)  # it also sets torch._dynamo
            for call in waiting:
                call()
        return getattr(importlib.import_module(self.__name__), name)


def install() -> None:
    """Installs the stand-in in this process, unless the real module is loaded already.

    It has what torch.optim, DistributedDataParallel, a process group's start and models/ladder/fp8_head.py call
    uncompiled.
    """
    if NAME in sys.modules:
        return

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def assume_constant_result(fn: Any) -> Any:  # as the real one does
        fn._dynamo_marked_constant = True
        return fn

    sys.modules[NAME] = StandIn(
        NAME,
        disable=lambda fn, recursive=True, **kwargs: fn,
        graph_break=nothing,
        assume_constant_result=assume_constant_result,
        utils=StandIn(f"{NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),  # dynamo's default
        trace_rules=StandIn(f"{NAME}.trace_rules", clear_lru_cache=nothing),
        waiting=[],
    )
    if "torch" in sys.modules:
        vars(sys.modules["torch"])["_dynamo"] = sys.modules[NAME]


def is_imported() -> bool:
    """Whether the real module is loaded, so that anything in this process may have been compiled."""
    return NAME in sys.modules and not isinstance(sys.modules[NAME], StandIn)


def when_imported(call: Callable[[], None]) -> None:
    """Calls call() before anything is compiled: now, or when the real module replaces the stand-in.

    Never calls it if there is neither: in another program's loop, which has not compiled anything yet.
    """
    if isinstance(sys.modules.get(NAME), StandIn):
        sys.modules[NAME].waiting.append(call)
    elif NAME in sys.modules:
        call()
