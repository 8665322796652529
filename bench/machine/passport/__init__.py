"""Measurements of what a machine can reach: its passports, kept with their dates, and the ceilings they give."""
