"""Exports records to other programs."""
