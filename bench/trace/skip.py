"""Events of categories that nobody wants, taken out of a chunk undecoded: half of the time of a large file.

It knows the layout in which Kineto writes; of another one everything is decoded.  As in source.py, the bytes between
two events cannot stand inside a string.
"""

import re

BETWEEN = re.compile(rb'\},\s*\{\s*"ph": "')
FLOWS = tuple(b'%c", "id"' % letter for letter in b"sft")  # arrows
ANOTHER = b'"ph"'  # in what lies between two BETWEEN: an event that something else separates


class Skip:
    """skip(chunk) -> (the chunk without events of these categories, how many it lacks)."""

    def __init__(self, categories):
        self._unwanted = (*FLOWS, *(b'X", "cat": "%s"' % name.encode() for name in categories))
        self._between = None

    def __call__(self, chunk):
        if self._between is None:
            found = BETWEEN.search(chunk)
            if found is None:
                return chunk, 0
            self._between = found.group()
        first, *events = chunk.split(self._between)
        unwanted = self._unwanted
        kept = [event for event in events if not event.startswith(unwanted)]
        if len(kept) == len(events):
            return chunk, 0
        if chunk.count(ANOTHER) > len(events) + first.count(ANOTHER):
            kept = [event for event in events if not event.startswith(unwanted) or ANOTHER in event]
        is_last_kept = kept and kept[-1] is events[-1]
        end = b"" if is_last_kept else b"}"  # all but the chunk's last event lack theirs
        return self._between.join([first, *kept]) + end, len(events) - len(kept)
