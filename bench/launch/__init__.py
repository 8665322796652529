"""A checked config to a finished record: one fresh process group a run, watched to its end."""
