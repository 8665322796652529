"""torch._dynamo is not imported until something compiles: 1.3 of the 5 CPU seconds of a rank that trains for a moment.

torch.optim imports all of torch.compile at an optimizer's first call, only to keep it off: torch._dynamo.disable()
around some methods, graph_break() in each step.  Without a compiler at work both do nothing, so a module that has these
two stands in for it.  Who asks it for anything else, as torch.compile does, gets the real one, from then on everywhere.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

NAME = "torch._dynamo"


class StandIn(ModuleType):
    """torch._dynamo as long as nothing compiles."""

    def __init__(self):
        super().__init__(NAME)
        self.waiting = []

    @staticmethod
    def disable(fn, recursive=True, **more):
        return fn

    @staticmethod
    def graph_break(*args, **more):
        pass

    def __getattr__(self, name):
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            importlib.import_module(NAME)  # which puts itself into torch
            for call in self.waiting:
                call()
        return getattr(sys.modules[NAME], name)


def install() -> None:
    """In this process, unless the real one is there already."""
    if NAME not in sys.modules:
        sys.modules[NAME] = StandIn()
        if "torch" in sys.modules:
            sys.modules["torch"]._dynamo = sys.modules[NAME]


def is_imported() -> bool:
    """Whether anything in this process may have been compiled."""
    return NAME in sys.modules and not isinstance(sys.modules[NAME], StandIn)


def when_imported(call: Callable[[], None]) -> None:
    """Call it before anything is compiled: now, or when the real one takes the place of what stands in for it."""
    install()
    if is_imported():
        call()
    else:
        sys.modules[NAME].waiting.append(call)
