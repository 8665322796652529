"""Ranges that overlap -> segments that do not: at each moment one range has the time."""

import heapq


def owners(start, end, layer, low, high):
    """Ranges (integer ns, sequences of one length) -> [(begin, end, index of the range or -1)], which tile [low, high].

    Of those that run at a moment the lowest layer has it, among them the one that began first.  -1: none runs.
    """
    coming = sorted((max(start[num], low), num) for num in range(len(start)) if end[num] > low and start[num] < high)
    running, segments, moment, at = [], [], low, 0
    while moment < high:
        while at < len(coming) and coming[at][0] <= moment:
            num = coming[at][1]
            heapq.heappush(running, (layer[num], start[num], num))
            at += 1
        while running and end[running[0][2]] <= moment:
            heapq.heappop(running)
        until = coming[at][0] if at < len(coming) else high
        owner = running[0][2] if running else -1
        until = min(until, high, end[owner] if running else high)
        if segments and segments[-1][2] == owner:
            segments[-1] = (segments[-1][0], until, owner)
        else:
            segments.append((moment, until, owner))
        moment = until
    return segments
