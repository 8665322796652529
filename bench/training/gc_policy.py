"""Python's garbage collector during a run: which policy acts, hardware.gc, and what the record says of it.

A full collection of a training process takes 0.1 to 0.5 s and stops every thread, so speedruns tame it: modded-nanogpt
collects before its clock starts, nanochat also freezes and switches it off, torchtitan runs generation 1 every 50
steps.
"""

import gc

# hardware.gc -> timing_protocol.garbage_collection; None is "freeze", the words of bench/training/clock.py
WORDS = {
    "on": "collected before the start, left on",
    "off": "collected and frozen before the start, then off",
    "manual": "collected and frozen before the start, then off but for generation 1 every {every_steps} steps, timed",
}
GENERATION = 1  # of manual: what survived one collection and is young still; all that was frozen stays untouched


def protocol(policy: str | None, every_steps: int | None) -> dict[str, str]:
    """What changes in the timing protocol of a record: nothing for the default."""
    return {} if policy is None else {"garbage_collection": WORDS[policy].format(every_steps=every_steps)}


class GcPolicy:
    """before_training(); each_step() at the end of every step, in its time; after_training()."""

    def __init__(self, policy: str | None = None, every_steps: int | None = None):
        self._policy, self._every_steps = policy, every_steps
        self._steps_done = 0

    @property
    def checks(self):
        """What is to be called at the end of each step: nothing unless the policy collects by hand."""
        return (self.each_step,) if self._policy == "manual" else ()

    def before_training(self):
        gc.collect()
        if self._policy != "on":
            gc.freeze()
        if self._policy in ("off", "manual"):
            gc.disable()

    def each_step(self):
        self._steps_done += 1
        if self._steps_done % self._every_steps == 0:
            gc.collect(GENERATION)

    def after_training(self):
        gc.enable()  # what is frozen stays frozen
