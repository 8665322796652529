"""Replays a record: rebuilds it from itself alone, compares it step by step, and certifies the outcome."""
