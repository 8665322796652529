"""Nsight Systems over chosen steps: each rank runs under `nsys profile`, with the capture range open in those alone.

Each rank gives a report, traces/NAME_rankN.nsys-rep, with NVTX ranges of steps and phases.  The options are those of
the Nsight Systems User Guide, "Profiling from the CLI".  This has run on no GPU yet, nor with a real nsys: tests pin
the command line and the order of the calls.
"""

import shutil
from pathlib import Path
from typing import Any

from bench.config import window_settings, windows
from bench.training.instruments.base import Context
from bench.training.instruments.nvtx import Nvtx

PROGRAM = "nsys"
REMEDY = (
    "install Nsight Systems' command line (apt install nsight-systems-cli, or developer.nvidia.com/nsight-systems) and "
    "put nsys on PATH; profile=modded needs nothing"
)


class Nsys(Nvtx):
    in_timed_region = (
        "Nsight Systems captures its steps, which are flagged and do not count. In the other steps it sets NVTX ranges."
    )
    flags_steps = True

    @staticmethod
    def check(settings: dict[str, Any]) -> None:
        window_settings.build(window_settings.Nsys, "instruments.nsys", settings)

    @staticmethod
    def profiler_windows(settings: dict[str, Any]) -> None:
        return None  # nsys uses CUPTI as torch's profiler does: a run can have one of them

    @staticmethod
    def last_step(settings: dict[str, Any]) -> int | None:
        return _window(settings).last_step

    @staticmethod
    def program(settings: dict[str, Any], folder: Path, device_type: str) -> list[str]:
        if device_type != "cuda":
            raise ValueError(f"profile=nsys on hardware.device={device_type}: its range is CUDA's: use profile=modded")
        if shutil.which(PROGRAM) is None:
            raise ValueError(f"profile=nsys: there is no program {PROGRAM} here: {REMEDY}")
        return [
            PROGRAM,
            "profile",
            f"--trace={','.join(settings['trace'])}",
            "--sample=none",  # sampling CPU stacks needs privileges
            "--cpuctxsw=none",
            "--capture-range=cudaProfilerApi",
            "--capture-range-end=stop",  # stops the capture, not the run
            "--force-overwrite=true",
            f"--output={folder}/traces/{settings['name']}_rank%q{{RANK}}",  # nsys expands the variable
        ]

    def __init__(self, context: Context, **settings: Any):
        super().__init__(context)
        import torch.cuda.profiler

        self._cuda, self._window, self._is_open = torch.cuda, _window(settings), False
        self._rows: list[int] = []

    def on_step_start(self, step: int) -> None:
        row = step + 1
        if row == self._window.first_step and self._window.has(self.context.rank):
            self._cuda.synchronize()  # keeps the previous step's kernels out of the capture
            self._cuda.profiler.start()
            self._is_open = True
            self.context.say(f"nsys: capture range open from step {row}")
        super().on_step_start(step)

    def on_step_end(self, step: int) -> None:
        super().on_step_end(step)
        if self._is_open:
            self._rows.append(step + 1)
            if step + 1 == self._window.last_step:
                self._end()

    def _end(self) -> None:
        if self._is_open:
            self._cuda.synchronize()
            self._cuda.profiler.stop()
            self._is_open = False

    def on_run_end(self) -> None:
        self._end()

    def flags(self) -> dict[int, str]:
        """Flags, on every rank, the window's steps and the one after it: ranks wait for those that record."""
        rows = range(self._window.first_step, min(self._window.last_step + 1, self.context.num_steps) + 1)
        return dict.fromkeys(rows, windows.FLAG)

    def summary(self) -> dict[str, Any]:
        """Returns {"status", "steps_asked", "steps", "file"}; nsys writes the file later, when the rank has ended."""
        requested = [self._window.first_step, self._window.last_step]
        if not self._rows:
            status = "not reached" if self._window.has(self.context.rank) else "not this rank"
            return {"status": status, "steps_asked": requested}
        status = "captured" if self._rows[-1] == self._window.last_step else "cut short"
        file = f"traces/{self._window.name}_rank{self.context.rank}.nsys-rep"
        return {"status": status, "steps_asked": requested, "steps": [self._rows[0], self._rows[-1]], "file": file}

    def close(self) -> None:
        super().close()
        self._end()


def _window(settings: dict[str, Any]) -> windows.Window:
    steps = {key: settings[key] for key in ("name", "first_step", "active_steps")}
    return windows.Window(**steps, ranks=window_settings.ranks_of(settings["ranks"]))


INSTRUMENT = Nsys
