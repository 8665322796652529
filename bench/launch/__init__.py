"""Turns a checked config into a finished record: one fresh process group per run, watched to its end."""
