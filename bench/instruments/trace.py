"""Chosen steps under torch.profiler: Chrome traces and op tables in traces/, one of each per window and rank.

Which steps: conf/instruments/trace.yaml.  How it is done: bench/profiling/windows.py.
"""

from bench.config import profiler_windows
from bench.instruments.base import Instrument


class Trace(Instrument):
    flags_steps = True
    profiler_windows = staticmethod(profiler_windows.windows_of)

    def __init__(self, context, **settings):
        from bench.profiling.windows import Windows

        super().__init__(context)
        self.windows = Windows(context, *self._plan(settings))

    def _plan(self, settings):
        """Settings -> (windows, folder of their traces)."""
        return self.profiler_windows(settings), self.context.folder / "traces"

    def on_run_start(self):
        self.windows.on_run_start()

    def on_step_start(self, step):
        self.windows.on_step_start(step)

    def on_phase(self, name):
        self.windows.on_phase(name)

    def on_step_end(self, step):
        self.windows.on_step_end(step)

    def on_validation(self, steps_done, val_loss, train_s):
        self.windows.on_validation()

    def on_run_end(self):
        self.windows.on_run_end()

    def on_failure(self, error):
        self.windows.on_failure()

    def flags(self):
        return self.windows.flags()

    def summary(self):
        return self.windows.summary()

    def merge(self, summaries):
        from bench.profiling.windows import merged

        return merged(summaries)

    def close(self):
        self.windows.close()


INSTRUMENT = Trace
