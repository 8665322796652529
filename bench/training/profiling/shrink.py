"""Events of a trace that is larger than allowed -> as many as have room: those of least use go first.

What no category names (thread names, marks) and annotations always stay.
"""

from collections import Counter

import msgspec

SEPARATOR = b",\n"
# From what is kept longest to what goes first.
KEPT_FIRST = (
    ("user_annotation", "gpu_user_annotation", "Trace"),
    ("kernel", "gpu_memcpy", "gpu_memset"),
    ("cpu_op",),
    ("cuda_runtime", "cuda_driver", "cuda_sync", "overhead"),
    ("ac2g", "fwdbwd", "async_cpu_to_gpu"),
    ("cpu_instant_event",),
    ("python_function",),
)


class _Event(msgspec.Struct):
    cat: str | None = None


def to(events, max_bytes):
    """[the JSON of each event] -> (those that fit into about max_bytes, in order, and {category: how many do not})."""
    decode = msgspec.json.Decoder(_Event).decode
    categories = [decode(event).cat for event in events]
    sizes = [memoryview(event).nbytes + len(SEPARATOR) for event in events]
    sums = Counter()
    for category, size in zip(categories, sizes):
        sums[category] += size
    budgets = _budgets(sums, max_bytes)
    kept, dropped = [], Counter()
    for event, category, size in zip(events, categories, sizes):
        if budgets.get(category, size) < size:
            budgets[category] = 0  # nothing after the first that has no room: what is kept is without holes
            dropped[category] += 1
            continue
        if category in budgets:
            budgets[category] -= size
        kept.append(event)
    return kept, dict(dropped)


def _budgets(sizes, max_bytes):
    """{category: bytes it may have}; what is not in it has no limit."""
    unlimited, *limited = KEPT_FIRST
    order = [category for group in limited for category in group if category in sizes]
    order += [category for category in sizes if category is not None and category not in (*unlimited, *order)]
    left = max_bytes - sum(size for category, size in sizes.items() if category not in order)
    budgets = {}
    for category in order:
        budgets[category] = max(0, min(sizes[category], left))
        left -= budgets[category]
    return budgets
