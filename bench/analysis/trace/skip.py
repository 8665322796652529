"""Events that nobody wants, taken out of a chunk undecoded: half of the time of a large file.

It knows the layout in which Kineto writes; of another one everything is decoded.  As in source.py, the bytes between
two events cannot stand inside a string.
"""

import re

import numpy as np

BETWEEN = re.compile(rb'\},\s*\{\s*"ph": "')
FLOWS = tuple(b'%c", "id"' % letter for letter in b"sft")  # arrows
ANOTHER = b'"ph"'  # in what lies between two BETWEEN: an event that something else separates
QUERIES = ("Event", "Occupancy", "Func", "StreamIs", "StreamGet", "StreamWaitEvent", "Get", "DeviceGet")
QUERIES = tuple(f"cuda{name}" for name in (*QUERIES, "ThreadExchange", "PeekAtLastError", "PointerGet"))
STARTS_OBJECT = np.isin(np.arange(256), list(b' \t\r\n"'))  # a byte that may follow a {; in names another one does


class Skip:
    """skip(chunk) -> (the chunk without events of these categories, how many it lacks).

    Nor has it CUDA's QUERIES (names that begin so): calls that start nothing on the device.
    """

    def __init__(self, categories):
        unwanted = [f'X", "cat": "{name}"' for name in categories]
        unwanted += [f'X", "cat": "cuda_runtime", "name": "{name}' for name in QUERIES]
        self._unwanted = (*FLOWS, *map(str.encode, unwanted))
        self._between = None

    def __call__(self, chunk):
        if self._between is None:
            result = BETWEEN.search(chunk)
            if result is None:
                return chunk, 0
            self._between = result.group()
        first, *events = chunk.split(self._between)
        unwanted = self._unwanted
        kept = [event for event in events if not event.startswith(unwanted)]
        if len(kept) == len(events):
            return chunk, 0
        if _num_objects(chunk) > len(events) + _num_objects(first):
            kept = [event for event in events if not event.startswith(unwanted) or ANOTHER in event]
        is_last_kept = kept and kept[-1] is events[-1]
        end = b"" if is_last_kept else b"}"  # all but the chunk's last event lack theirs
        return self._between.join([first, *kept]) + end, len(events) - len(kept)


def _num_objects(data):
    """How many objects begin in it that are no value of a key, as "args": {...} is: no fewer than its events."""
    bytes_ = np.frombuffer(data, np.uint8)
    at = np.flatnonzero(bytes_ == ord("{"))
    before = bytes_[at - 1]
    is_value = (before == ord(":")) | ((before == ord(" ")) & (bytes_[at - 2] == ord(":")))
    after = np.minimum(at[~is_value] + 1, len(bytes_) - 1)
    return int(STARTS_OBJECT[bytes_[after]].sum()) if len(bytes_) else 0
