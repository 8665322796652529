"""Runs torch's profiler, one at a time and on exact steps, and writes files without private paths."""
