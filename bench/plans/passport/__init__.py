"""Measuring a passport: one process a GPU, or two on a CPU, in under three minutes."""
