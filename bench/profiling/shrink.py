"""A trace that is larger than allowed -> one that is not: events of least use are left out first, the JSON stays whole.

libkineto writes an event as a block of lines from "  {" to "  }," inside "traceEvents"; nothing is parsed but its
category.  What no category names (thread names, marks) and annotations always stay.
"""

import os

TEXT, UNNAMED = object(), None  # lines around the events; events without a category
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


def to(path, max_bytes):
    """Rewrite path so that it has about max_bytes at most.  Returns {category: events left out}.

    A file that is not laid out as libkineto does stays as it is, with {"": 0}.
    """
    sizes = {}
    with open(path, "rb") as file:
        for category, text in _pieces(file):
            sizes[category] = sizes.get(category, 0) + len(text)
    if not set(sizes) - {TEXT, UNNAMED}:
        return {"": 0}
    budgets = _budgets(sizes, max_bytes)
    made = path.with_name(f"{path.name}.shrunk.tmp")
    try:
        with open(path, "rb") as source, open(made, "wb") as target:
            left_out = _copy(source, target, budgets)
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)
    return left_out


def _copy(source, target, budgets):
    """Pieces that have room, with commas between the events and none after the last."""
    left_out, among_events = {}, False
    for category, text in _pieces(source):
        if category is TEXT:
            target.write((b"\n" if among_events else b"") + text)
            among_events = False
            continue
        if budgets.get(category, len(text)) < len(text):
            budgets[category] = 0  # nothing after the first that has no room: what is kept is without holes
            left_out[category] = left_out.get(category, 0) + 1
            continue
        if category in budgets:
            budgets[category] -= len(text)
        target.write((b",\n" if among_events else b"") + text.rstrip(b",\n"))
        among_events = True
    return left_out


def _budgets(sizes, max_bytes):
    """{category: bytes it may have}; what is not in it has no limit."""
    always, *others = KEPT_FIRST
    known = [category for group in others for category in group]
    unheard_of = [category for category in sizes if category not in (TEXT, UNNAMED, *always, *known)]
    left = max_bytes - sum(size for category, size in sizes.items() if category in (TEXT, UNNAMED, *always))
    budgets = {}
    for category in [*(name for name in known if name in sizes), *unheard_of]:
        budgets[category] = max(0, min(sizes[category], left))
        left -= budgets[category]
    return budgets


def _pieces(file):
    """(category or UNNAMED, block) of each event, and (TEXT, line) of what stands around them, in order."""
    block, category = [], UNNAMED
    for line in file:
        if not block and line != b"  {\n":
            yield TEXT, line
            continue
        block.append(line)
        if category is UNNAMED and line.lstrip().startswith(b'"cat": "'):
            category = line.split(b'"')[3].decode(errors="replace")
        if line.startswith(b"  }"):
            yield category, b"".join(block)
            block, category = [], UNNAMED
    if block:
        yield TEXT, b"".join(block)
