"""A passport against earlier ones of the same devices, and against the other devices in its box."""

import statistics
from collections.abc import Sequence

from bench.machine.passport.figures import LOWER_IS_BETTER, Figure
from bench.machine.passport.kept import Passport

NUM_EARLIER = 5  # the newest of them: their samples' range is what a figure is held against
PEER_FRAC = 0.03  # below the median of its peers: healthy GPUs of one model differ by a few percent at most


def changes(passport: Passport, earlier: Sequence[Passport]) -> list[dict]:
    """[{"device", "what", "unit", "before", "now", "change_pct", "num_earlier", "beyond_spread", "is_worse"}]: figures
    that an earlier passport of the same device has too; device: its index, None of a collective.

    before: the median of the NUM_EARLIER newest.  beyond_spread: the samples, 10th to 90th percentile, lie wholly
    outside the range of those earlier ones.
    """
    lines = []
    for device in passport["devices"]:
        of_device = [one["figures"] for old in earlier for one in old["devices"] if one["id"] == device["id"]]
        lines += _changes(device["index"], device["figures"], of_device)
    ids = {device["id"] for device in passport["devices"]}
    same_box = [old["collectives"] for old in earlier if {device["id"] for device in old["devices"]} == ids]
    return lines + _changes(None, passport["collectives"], same_box)


def _changes(index, figures, earlier):
    lines = []
    for figure in figures:
        old = [
            one for some in earlier for one in some if one["what"] == figure["what"] and one["unit"] == figure["unit"]
        ]
        old = old[-NUM_EARLIER:]
        before = statistics.median(one["value"] for one in old) if old else None
        if not before:
            continue
        low, high = min(one["low"] for one in old), max(one["high"] for one in old)
        rises = figure["value"] > before
        lines.append(
            {"device": index, "what": figure["what"], "unit": figure["unit"], "before": before, "now": figure["value"]}
            | {"change_pct": 100 * (figure["value"] / before - 1), "num_earlier": len(old)}
            | {"beyond_spread": figure["low"] > high or figure["high"] < low}
            | {"is_worse": rises == (figure["kind"] in LOWER_IS_BETTER)}
        )
    return lines


def slower_than_peers(passport: Passport) -> list[dict]:
    """[{"device", "id", "what", "value", "peers", "slower_pct"}], the largest first: devices of which a figure is more
    than PEER_FRAC worse than the median of the others of the same name.  Empty for one device, and of launches."""
    lines = []
    for device in passport["devices"]:
        peers = [one for one in passport["devices"] if one is not device and one["name"] == device["name"]]
        by_what = {figure["what"]: figure for figure in device["figures"]}
        for what, figure in by_what.items():
            values = [value for one in peers if (value := _value(one["figures"], what)) is not None]
            if not values or figure["kind"] in LOWER_IS_BETTER:
                continue  # the time of a launch is the host's
            median = statistics.median(values)
            if figure["value"] < (1 - PEER_FRAC) * median:
                line = {"device": device["index"], "id": device["id"], "what": what, "value": figure["value"]}
                slower_pct = 100 * (1 - figure["value"] / median)
                lines.append(line | {"unit": figure["unit"], "peers": median, "slower_pct": slower_pct})
    return sorted(lines, key=lambda line: -line["slower_pct"])


def _value(figures: Sequence[Figure], what: str) -> float | None:
    return next((figure["value"] for figure in figures if figure["what"] == what), None)
