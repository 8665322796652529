"""Tokens: shards checked and read, the same global batches for any number of processes."""
