"""The bytes of a log as lines, of which most are never made into objects of their own."""

import numpy as np

NEWLINE = 10


class Text:
    """Lines of bytes from 0 on, without their newlines: [number], .starts, .stops and .lengths (arrays, bytes)."""

    def __init__(self, data):
        self.data = data
        newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE)
        self.starts, self.stops = np.empty((2, len(newlines) + 1), int)
        self.starts[0], self.starts[1:] = 0, newlines + 1
        self.stops[-1], self.stops[:-1] = len(data), newlines
        self.lengths = self.stops - self.starts

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, number):
        return self.data[int(self.starts[number]) : int(self.stops[number])]

    def without(self, mask, start=0, stop=None):
        """The lines from start to before stop for which the mask (of all lines) is False, joined by newlines."""
        stop = len(self) if stop is None else stop
        part = mask[start:stop]
        if not len(part):
            return b""
        edges = [start, *(np.flatnonzero(part[1:] != part[:-1]) + start + 1).tolist(), stop]
        if part[0]:
            del edges[0]
        spans = zip(self.starts[edges[:-1:2]].tolist(), self.stops[[edge - 1 for edge in edges[1::2]]].tolist())
        return b"\n".join([self.data[begin:end] for begin, end in spans])
