"""torch's profiler, run by this harness: one at a time, on exact steps, with files that hold no private path."""
