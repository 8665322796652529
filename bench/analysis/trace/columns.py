"""What every analysis does with columns of numbers.  An index of -1 means: no row."""

import numpy as np

US = 1000  # nanoseconds


def take(column, index, missing=-1):
    """column[index], and missing where the index is -1."""
    return np.where(index >= 0, column[np.maximum(index, 0)], missing) if len(column) else np.full(len(index), missing)


def index_of(keys, table):
    """Index of each key in a sorted table, of the first of equal ones; -1 where it is not in it."""
    if not len(table):
        return np.full(len(keys), -1)
    index = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[index] == keys, index, -1)


def groups(keys):
    """[(key, indices)] of equal keys, by key; the indices of each in order."""
    keys = np.asarray(keys)
    order = np.argsort(keys, kind="stable")
    different, first = np.unique(keys[order], return_index=True)
    return list(zip(different, np.split(order, first[1:]))) if len(keys) else []


def sums(index, size, values):
    """Integers added up by index -> int64 [size]; those of index -1 are not counted.  Exact: no float is involved."""
    total = np.zeros(size, np.int64)
    known = index >= 0
    np.add.at(total, index[known], values[known] if np.ndim(values) else values)
    return total
