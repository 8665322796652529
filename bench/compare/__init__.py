"""Compares runs A and B: whether they may be compared, what differs, by how much, and the verdict."""
