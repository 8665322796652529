"""Measures a passport: one process per GPU, or two on a CPU, in under three minutes."""
