"""KempnerForge's window: one segment of steps on every rank, and rank 0's summary.md beside the traces.

The tables that KempnerForge prints go into the rank's log, the thirteen figures into the record.
"""

from bench.config import windows
from bench.training.instruments.trace import Trace


class Window(Trace):
    @staticmethod
    def profiler_windows(settings: dict):
        window = windows.kempner_window(settings)
        return [window] if window else []

    def _plan(self, settings):
        self._classifier = settings["classifier"]
        self._traces = self.context.folder / "traces" / (settings["trace_dir"] or "")
        return self.profiler_windows(settings), self._traces

    def summary(self) -> dict:
        from bench.training.profiling.kempner import print_profiler_summary

        windows = super().summary()
        for shot in self.shots:
            if shot.saved is not None and shot.recording is not None and self.context.rank == 0:
                shown = self._traces.relative_to(self.context.folder).as_posix()
                figures = print_profiler_summary(shot.recording.profile, self._traces, self._classifier, shown)
                of_window = windows[shot.window.name]
                of_window |= {"classifier": self._classifier, "breakdown": figures}
                of_window["files"].append(f"{shown}/summary.md")
        return windows


INSTRUMENT = Window
