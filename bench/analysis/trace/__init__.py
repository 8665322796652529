"""Analyses Kineto traces, without importing torch."""
