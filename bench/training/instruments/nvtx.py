"""NVTX ranges of steps, phases, build, warm-up and validation, which Nsight Systems and Nsight Compute show as rows.

It records nothing: it is for a profiler that the user starts around the run.  profile=nsys starts Nsight Systems.
"""

from bench.training.instruments.base import Context, Instrument


class Nvtx(Instrument):
    in_timed_region = (
        "It pushes and pops a range for each phase, which takes well below a microsecond if no profiler listens "
        "(assumed)."
    )

    def __init__(self, context: Context):
        super().__init__(context)
        if context.device_type != "cuda":
            raise RuntimeError("NVTX ranges are for a GPU's profilers, and this run trains on the CPU: no ranges")
        from torch.cuda import nvtx

        self._nvtx, self._depth = nvtx, 0

    def _push(self, name: str) -> None:
        self._nvtx.range_push(name)
        self._depth += 1

    def _pop(self, down_to: int = 0) -> None:
        while self._depth > down_to:
            self._nvtx.range_pop()
            self._depth -= 1

    def on_build_start(self) -> None:
        self._push("build")

    def on_warmup_start(self) -> None:
        self._pop()
        self._push("warmup")

    def on_run_start(self) -> None:
        self._pop()

    def on_step_start(self, step: int) -> None:
        self._push(f"step {step + 1}")

    def on_phase(self, name: str) -> None:
        self._pop(down_to=0 if name == "validation" else 1)
        self._push(name)

    def on_validation(self, steps_done: int, val_loss: float, train_s: float) -> None:
        self._pop()

    def on_step_end(self, step: int) -> None:
        self._pop()

    def close(self) -> None:
        self._pop()


INSTRUMENT = Nvtx
