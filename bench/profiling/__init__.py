"""torch's profiler under this harness' hands: one at a time, exact steps, files that can be shown to anybody.

from bench.profiling import ProfilingConfig, build_profiler, print_profiler_summary    KempnerForge's API
"""

from bench.profiling.kempner import ProfilingConfig, build_profiler, print_profiler_summary

__all__ = ["ProfilingConfig", "build_profiler", "print_profiler_summary"]
