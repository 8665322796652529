"""What cost time inside runs: stalls, their causes, late ranks, what changed between two sets of runs."""
