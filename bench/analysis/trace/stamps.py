"""Numbers as events have them -> int64 columns.  Stamps become nanoseconds, exactly.

Kineto writes microseconds with three decimals, and since the epoch they have 16 digits before them: a float would lose
the nanoseconds, so these are read as text, a column at a time.
"""

import msgspec
import numpy as np

LARGEST_US = 2**52
EXACT_BELOW = 2**42  # microseconds: below, a double keeps the nanoseconds exact
NO_NUMBER = -1
BAD = np.iinfo(np.int64).min  # what is not a moment
DECIMALS = 3
MAX_DIGITS = 18  # that fit into 64 bits


def nanoseconds(values):
    """Microseconds as numbers or text -> int64 nanoseconds, exactly; what is not a number becomes BAD."""
    kinds = set(map(type, values))
    if kinds == {msgspec.Raw}:
        return _exact(values)
    if kinds == {int} and max(values) < LARGEST_US and min(values) > -LARGEST_US:
        return np.array(values, np.int64) * 1000
    if kinds <= {int, float}:
        result = _floats(values)
        good = np.abs(result) < LARGEST_US  # and not nan
        return np.where(good, np.rint(np.where(good, result, 0) * 1000), BAD).astype(np.int64)
    return np.array([_one_ns(value) for value in values], np.int64)


def _exact(values):
    """Stamps as JSON text -> int64 nanoseconds; those that all have as many digits, as Kineto's, at once."""
    texts = np.array([bytes(value) for value in values])
    width = texts.dtype.itemsize
    digits = texts.view(np.uint8).reshape(len(texts), width)
    if DECIMALS + 1 < width <= MAX_DIGITS + 1 and (digits[:, -DECIMALS - 1] == ord(".")).all():
        digits = np.delete(digits, width - DECIMALS - 1, axis=1) - ord("0")  # what is not a digit wraps to over 9
        if digits.max() <= 9:
            return digits.astype(np.int64) @ 10 ** np.arange(width - 2, -1, -1)
    return np.array([_one_ns(value) for value in values], np.int64)


def _floats(values):
    try:
        return np.array(values, np.float64)
    except OverflowError:  # a whole number of hundreds of digits: not a moment
        return np.array([value if abs(value) < LARGEST_US else np.nan for value in values], np.float64)


def _one_ns(value):
    if value is None:
        return int(BAD)  # a moment is not a range, and a range without its start cannot be placed
    text = bytes(value).decode("ascii", "replace") if isinstance(value, msgspec.Raw) else str(value)
    text = text.strip('" ')
    whole, _, decimals = text.partition(".")
    try:
        if whole.lstrip("-").isdigit() and (decimals or "0").isdigit():
            ns = int(whole) * 1000 + (-1 if whole.startswith("-") else 1) * round(int((decimals + "0000")[:4]) / 10)
        else:
            ns = round(float(text) * 1000)
        return ns if abs(ns) < 2**62 else int(BAD)
    except (ValueError, OverflowError):
        return int(BAD)


def whole(value, otherwise=None):
    """A number however it is written -> int; NO_NUMBER if it is not one."""
    for candidate in (value, otherwise):
        if type(candidate) is int:
            return candidate
        try:
            return int(candidate)
        except (TypeError, ValueError, OverflowError):
            pass
        try:
            return int(float(candidate))  # "7.0"
        except (TypeError, ValueError, OverflowError):
            continue
    return NO_NUMBER


def integers(values):
    """Numbers however they are written -> int64; what is not a number, or does not fit, becomes NO_NUMBER."""
    try:
        if set(map(type, values)) == {int}:
            return np.array(values, np.int64)
    except OverflowError:
        pass
    result = [value if type(value) is int else NO_NUMBER if value is None else whole(value) for value in values]
    return np.array([value if -(2**63) <= value < 2**63 else NO_NUMBER for value in result], np.int64)
