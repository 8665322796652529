"""All instruments of a run as one: who is called at which edge, what they answer, what is recorded of a failure."""

import json
from collections.abc import Iterable
from typing import Any

from bench.training.instruments.base import Instrument

RUN_COLUMNS = {"step", "flags", "tokens", "lr", "train_loss", "val_loss", "step_ms", "t_ns"}


class InstrumentSet:
    """All instruments as one.  One that raises is dropped, with a warning in the record; the run goes on.

    essential has the same methods and is not an instrument but part of the run (bench/training/step_log.py): its
    exceptions are raised.
    """

    EDGES = tuple(name for name in vars(Instrument) if name.startswith("on_"))

    def __init__(self, instruments: Iterable[Instrument] = (), essential: Any = None, warnings: Iterable[dict] = ()):
        self.instruments = list(instruments)
        self.warnings = list(warnings)  # {"instrument", "edge", "error"}
        self._dropped = []  # what they flagged before stays flagged
        self.attach(essential)

    def attach(self, essential: Any) -> None:
        """From here on essential is called too."""
        self._essential = essential
        self._bind()

    def _bind(self):
        """Each edge calls only the instruments that define it: the others cost nothing per step."""
        for edge in self.EDGES:
            empty = getattr(Instrument, edge)
            calls = [getattr(one, edge) for one in self.instruments if getattr(type(one), edge) is not empty]
            setattr(self, edge, self._guarded(edge, getattr(self._essential, edge, None), calls))

    def _guarded(self, edge, essential, calls):
        """The run's own marks enclose those of the instruments: what they cost in a step is in its step_ms."""
        first = essential if edge != "on_step_end" else None
        last = essential if edge == "on_step_end" else None

        def call_all(*args):
            if first is not None:
                first(*args)
            for call in calls:
                try:
                    call(*args)
                except Exception as error:
                    self._drop(call.__self__, edge, error)
            if last is not None:
                last(*args)

        return call_all

    def _drop(self, instrument, edge, error):
        self.warnings.append(warning(instrument.name, edge, error))
        self.instruments = [one for one in self.instruments if one is not instrument]
        self._dropped.append(instrument)
        self._bind()
        self._close(instrument)

    def collect(self, what: str) -> dict[str, Any]:
        """what: columns, flags, summary, doubts or warnings -> {instrument name: its answer}.

        An instrument that raises, or whose answer the record cannot hold, has a warning instead.
        """
        answers, taken = {}, set(RUN_COLUMNS)
        for instrument in self.instruments + (self._dropped if what == "flags" else []):
            try:
                answer = _checked(what, getattr(instrument, what)(), taken)
            except Exception as error:
                self.warnings.append(warning(instrument.name, what, error))
                continue
            answers[instrument.name] = answer
            if what == "columns":
                taken.update(answer)
        if what == "flags":
            for instrument in self.instruments:
                instrument.context.flagged.update(*answers.values())
        return answers

    def collect_warnings(self) -> None:
        """What instruments warn of by themselves joins the warnings."""
        for name, sentences in self.collect("warnings").items():
            self.warnings += [{"instrument": name, "edge": "run", "error": sentence} for sentence in sentences]

    def merge(self, by_rank: list[dict[str, dict]]) -> dict[str, dict]:
        """[{name: summary} of each rank] -> {name: merged summary}; where merging raises, rank 0's and a warning."""
        known = {instrument.name: instrument for instrument in self.instruments + self._dropped}
        merged = {}
        for name in dict.fromkeys(name for summaries in by_rank for name in summaries):
            of_ranks = [summaries.get(name) or {} for summaries in by_rank]
            merged[name] = of_ranks[0]
            try:
                if name in known:
                    merged[name] = _checked("merge", known[name].merge(of_ranks))
            except Exception as error:
                self.warnings.append(warning(name, "merge", error))
        return {name: summary for name, summary in merged.items() if summary}

    def close(self) -> None:
        for instrument in self.instruments:
            self._close(instrument)

    def _close(self, instrument):
        try:
            instrument.close()
        except Exception as error:
            self.warnings.append(warning(instrument.name, "close", error))


def warning(name: str, edge: str, error: Exception) -> dict[str, str]:
    """What is recorded of an instrument that failed: at which edge, with which exception."""
    return {"instrument": name, "edge": edge, "error": f"{type(error).__name__}: {error}"}


def _checked(what, answer, taken=()):
    """The answer, if it is finite numbers and words, and none of its columns is taken.  Or TypeError, ValueError."""
    sentences = what in ("doubts", "warnings")
    _expect(answer, list if sentences else dict, f"{what}()")
    json.dumps(answer, allow_nan=False)
    if sentences:
        for sentence in answer:
            _expect(sentence, str, f"an entry of {what}()")
    elif what == "flags":
        _check_rows(answer, str, "flags()")
    elif what == "columns":
        for name, rows in answer.items():
            if name in taken:
                raise ValueError(f"columns() gave {name}, which the run or another instrument writes already")
            _expect(rows, dict, f"columns()[{name!r}]")
            _check_rows(rows, (int, float, type(None)), f"columns()[{name!r}]")
    return answer


def _check_rows(rows, kinds, where):
    for row, value in rows.items():
        _expect(row, int, f"a row of {where}")
        _expect(value, kinds, f"{where}[{row}]")


def _expect(value, kinds, where):
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise TypeError(f"{where} gave a {type(value).__name__}, not a {wanted}")
