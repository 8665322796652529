"""Telemetry of a run's devices: sampled in a separate process, and joined to the run's times afterwards."""
