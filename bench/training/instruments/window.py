"""KempnerForge's window: one segment of steps on every rank, and rank 0's summary.md beside the traces.

The tables that KempnerForge prints go into rank 0's log, and the thirteen figures into the record.
"""

from typing import Any

from bench.config.window_settings import kempner_window
from bench.config.windows import ProfilerWindow
from bench.training.instruments.base import Context
from bench.training.instruments.trace import Trace


class Window(Trace):
    keeps_profiles = True

    @staticmethod
    def profiler_windows(settings: dict[str, Any]) -> list[ProfilerWindow]:
        window = kempner_window(settings)
        return [window] if window else []

    def __init__(self, context: Context, **settings: Any):
        super().__init__(context, **settings)
        self._classifier = settings["classifier"]

    def summary(self) -> dict[str, Any]:
        from bench.training.profiling.kempner import print_profiler_summary

        summaries = super().summary()
        for shot in self.shots:
            if shot.saved is not None and shot.recording is not None and self.context.rank == 0:
                profile, shown = shot.recording.profile, self._shown(self._folder)
                facts = summaries[shot.window.name]
                facts["classifier"] = self._classifier
                facts["breakdown"] = print_profiler_summary(profile, self._folder, self._classifier, shown)
                facts["files"].append(f"{shown}/summary.md")
        return summaries


INSTRUMENT = Window
