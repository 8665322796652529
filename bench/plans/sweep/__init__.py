"""Runs many points by one command: Hydra makes the points, and each becomes a run with its own record."""
