"""Finds what cost time within runs: stalls and their causes, late ranks, and what changed between two sets of runs."""
