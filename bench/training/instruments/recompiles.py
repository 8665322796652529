"""Compilations by torch.compile in the timed region, where none is expected: function, reason, milliseconds, step.

torch._dynamo's callbacks enclose each compilation (of a frame, of a backward compiled late, of a CUDA graph), and its
counters count graph breaks, which happen only while it compiles.  A run that compiles nothing pays nothing.
"""

import time
from pathlib import Path
from typing import Any

from bench.base import private
from bench.base.paths import REPO
from bench.machine import lazy_dynamo
from bench.training.instruments.base import Context, Instrument

MAX_REASON_CHARS = 300


class Recompiles(Instrument):
    in_timed_region = (
        "It remembers the running step, and reads the clock before and after each compilation, of which there "
        "should be none."
    )

    def __init__(self, context: Context):
        super().__init__(context)
        self._handler: Any = None  # torch._dynamo's callback handler, once dynamo is imported
        self._is_closed = False
        self._row: int | None = None
        self._began_ns: int | None = None
        self._new: list[tuple[int, int, int | None, str | None, Any]] = []  # began_ns, ns, row, trigger, compile id
        self._all: list[dict[str, Any]] = []  # facts of all compilations, as emitted
        self._breaks: dict[str, int] = {}  # {reason: graph breaks so far}
        self._num_graph_breaks: int | None = None  # graph breaks before training; None: torch.compile was not used
        self._num_new_breaks = 0

    def on_run_start(self) -> None:
        lazy_dynamo.when_imported(self._listen)

    def _listen(self) -> None:
        if self._is_closed:
            return
        from torch._dynamo.callback import callback_handler

        self._handler = callback_handler
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        self._breaks = self._graph_breaks()
        self._num_graph_breaks = sum(self._breaks.values())

    def on_step_start(self, step: int) -> None:
        self._row = step + 1

    def on_step_end(self, step: int) -> None:
        self._row = None
        if self._new:
            self._emit()

    def on_run_end(self) -> None:
        self.close()
        self._emit()

    def _start(self, args: Any = None) -> None:
        self._began_ns = time.perf_counter_ns()

    def _end(self, args: Any = None) -> None:
        if self._began_ns is not None:
            trigger = getattr(args, "callback_trigger", None)
            ns = time.perf_counter_ns() - self._began_ns
            compile_id = getattr(args, "compile_id", None)
            self._new.append((self._began_ns, ns, self._row, getattr(trigger, "name", None), compile_id))

    def _emit(self) -> None:
        """Emits the events, after the compilation; in a step without one this costs about a microsecond."""
        for began_ns, ns, row, trigger, compile_id in self._new:
            facts = {"ms": ns / 1e6, "step": row, "trigger": (trigger or "unknown").lower(), **_about(compile_id)}
            self._all.append(facts)
            self.context.emit("recompile", t_ns=began_ns, **facts)
        if self._new:
            breaks = self._graph_breaks()
            for reason, count in breaks.items():
                new = count - self._breaks.get(reason, 0)
                if new:
                    self._num_new_breaks += new
                    self.context.emit("graph_break", step=self._new[-1][2], count=new, reason=_short(reason))
            self._breaks = breaks
        self._new = []

    @staticmethod
    def _graph_breaks() -> dict[str, int]:
        from torch._dynamo.utils import counters

        return dict(counters["graph_break"])

    def summary(self) -> dict[str, Any]:
        """Returns this rank's counts; graph breaks in the warm-up slow every step, later ones cost a compilation."""
        return {
            "num_recompiles": len(self._all),
            "recompile_ms": sum(facts["ms"] for facts in self._all),
            "num_graph_breaks": self._num_new_breaks,
            "num_graph_breaks_before": self._num_graph_breaks,
        }

    def doubts(self) -> list[str]:
        """Doubts a run with compilations in the timed region: the warm-up should have met every graph."""
        if not self._all:
            return []
        first = self._all[0]
        reason = f", {first['reason']}" if first["reason"] else ""
        event = f"step {first['step']}, {first['function'] or first['trigger']}{reason}"
        ms = sum(facts["ms"] for facts in self._all)
        return [f"torch.compile worked {len(self._all)} time(s), {ms:.1f} ms, in the timed region: first {event}"]

    def close(self) -> None:
        self._is_closed = True
        if self._handler is not None:
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._end)
            self._handler = None


def _about(compile_id: Any) -> dict[str, str | None]:
    """Returns {"function", "reason"} of a compilation from torch's list of the last 64; None for what it lacks."""
    from torch._dynamo import utils

    facts: dict[str, str | None] = {"function": None, "reason": None}
    for metrics in getattr(utils, "get_compilation_metrics", list)():
        if compile_id is not None and getattr(metrics, "compile_id", None) == compile_id:
            name, file, line = (getattr(metrics, key, None) for key in ("co_name", "co_filename", "co_firstlineno"))
            facts["function"] = f"{name} ({Path(file).name}:{line})" if name and file else name or facts["function"]
            facts["reason"] = _short(getattr(metrics, "recompile_reason", None)) or facts["reason"]
    return facts


def _short(reason: str | None) -> str | None:
    """Returns the reason on one line, without private paths; None if there is none."""
    return " ".join(private.redact(str(reason), REPO).split())[:MAX_REASON_CHARS] if reason else None


INSTRUMENT = Recompiles
