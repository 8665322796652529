"""Races: runs of several arms by a plan, interleaved, in one session."""
