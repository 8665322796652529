"""Runs of a user's training script: prepared, watched from outside, made into a record."""
