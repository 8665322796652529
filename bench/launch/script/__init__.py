"""Runs a user's training script: prepares it, watches it from outside and turns its output into a record."""
