"""Checks and reads shards of tokens, and makes the same global batches for any number of processes."""
