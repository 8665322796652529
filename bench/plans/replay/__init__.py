"""A record run again: rebuilt from itself alone, compared step by step, and certified."""
