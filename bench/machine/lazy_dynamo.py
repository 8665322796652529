"""torch._dynamo is not imported until something compiles: 1.3 of the 5 CPU seconds of a rank that trains for a moment.

torch.optim imports all of torch.compile at an optimizer's first call, only to keep it off: torch._dynamo.disable()
around some methods, graph_break() in each step; DistributedDataParallel, to ask how a compiled model is cut.  Without a
compiler at work all that does nothing, so a module that has these few stands in for it.  Who asks it for anything else,
as torch.compile does, gets the real one, from then on everywhere.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class StandIn(ModuleType):
    """torch._dynamo or a module of it, as long as nothing compiles.  known: what it has; all else has the real one."""

    def __init__(self, name: str, **known: Any):
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspect asks every module for its __file__
            raise AttributeError(name)
        if not is_imported():
            waiting = sys.modules.pop(NAME).waiting
            importlib.import_module(NAME)  # which puts itself into torch
            for call in waiting:
                call()
        return getattr(importlib.import_module(self.__name__), name)


def _stand_in() -> StandIn:
    """What torch.optim, DistributedDataParallel, the start of a process group and models/fp8.py call uncompiled."""

    def nothing(*args: Any, **more: Any) -> None:
        pass

    def assume_constant_result(fn: Any) -> Any:  # as the real one
        fn._dynamo_marked_constant = True
        return fn

    return StandIn(
        NAME,
        disable=lambda fn, recursive=True, **more: fn,
        graph_break=nothing,
        assume_constant_result=assume_constant_result,
        utils=StandIn(f"{NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),  # dynamo's default
        trace_rules=StandIn(f"{NAME}.trace_rules", clear_lru_cache=nothing),
        waiting=[],
    )


def install() -> None:
    """In this process, unless the real one is there already."""
    if NAME not in sys.modules:
        sys.modules[NAME] = _stand_in()
        if "torch" in sys.modules:
            vars(sys.modules["torch"])["_dynamo"] = sys.modules[NAME]


def is_imported() -> bool:
    """Whether anything in this process may have been compiled."""
    return NAME in sys.modules and not isinstance(sys.modules[NAME], StandIn)


def when_imported(call: Callable[[], None]) -> None:
    """Call it before anything is compiled: now, or when the real one takes the place of what stands in for it.

    Never where there is neither: another program's loop, which has not compiled anything yet.
    """
    if isinstance(sys.modules.get(NAME), StandIn):
        sys.modules[NAME].waiting.append(call)
    elif NAME in sys.modules:
        call()
