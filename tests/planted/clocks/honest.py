"""A contestant that does nothing to its clock.  For tests/test_outside_clock.py, as all of this folder."""

from models.gpt2 import GPT2


class Mine(GPT2):
    """GPT-2 as it is."""
