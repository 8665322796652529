"""Cases of parametrized tests."""

import pytest


def slow(*case):
    """A case that runs only with --all, or where its file is named: a variant of one that always runs."""
    return pytest.param(*case, marks=pytest.mark.slow)
