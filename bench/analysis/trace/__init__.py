"""Kineto traces: what they say, without torch."""
