"""Runs of somebody's own training script: prepared, watched from outside, made into a record."""
