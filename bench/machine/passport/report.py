"""Compares a passport with earlier ones of the same devices and with similar devices, and formats it as text."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.base import paths, text_table
from bench.base.units import format_s
from bench.machine.passport.kept import CANNOT, LOWER_IS_BETTER, NO_TIME, Figure, Passport
from bench.machine.preflight import MAX_FOREIGN_CPU_CORES

Line = dict[str, Any]
NUM_EARLIER = 5  # the newest ones, with the range of whose samples a figure is compared
PEER_FRAC = 0.03  # limit below the median of its peers: healthy GPUs of one model differ by a few percent at most


def changes(passport: Passport, earlier: Sequence[Passport]) -> list[Line]:
    """Returns [{"device", "what", "unit", "before", "now", "change_pct", "num_earlier", "beyond_spread", "is_worse"}]
    for figures that an earlier passport of the same device has too; device: its index, None for a collective.

    before: the median of the NUM_EARLIER newest.  beyond_spread: the samples, 10th to 90th percentile, lie wholly
    outside the range of those earlier ones.
    """
    lines: list[Line] = []
    for device in passport["devices"]:
        past = [other["figures"] for old in earlier for other in old["devices"] if other["id"] == device["id"]]
        lines += _changes(device["index"], device["figures"], past)
    ids = {device["id"] for device in passport["devices"]}
    same_box = [old["collectives"] for old in earlier if {device["id"] for device in old["devices"]} == ids]
    return lines + _changes(None, passport["collectives"], same_box)


def _changes(index: int | None, figures: Sequence[Figure], earlier: Sequence[Sequence[Figure]]) -> list[Line]:
    lines: list[Line] = []
    for figure in figures:
        same = (figure["what"], figure["unit"])
        old = [past for group in earlier for past in group if (past["what"], past["unit"]) == same][-NUM_EARLIER:]
        before = statistics.median(past["value"] for past in old) if old else None
        if not before:
            continue
        low, high = (min(past["low"] for past in old), max(past["high"] for past in old))
        rises = figure["value"] > before
        lines.append(
            {"device": index, "what": figure["what"], "unit": figure["unit"], "before": before, "now": figure["value"]}
            | {"change_pct": 100 * (figure["value"] / before - 1), "num_earlier": len(old)}
            | {"beyond_spread": figure["low"] > high or figure["high"] < low}
            | {"is_worse": rises == (figure["kind"] in LOWER_IS_BETTER)}
        )
    return lines


def slower_than_peers(passport: Passport) -> list[Line]:
    """Returns [{"device", "id", "what", "value", "unit", "peers", "slower_pct"}], the largest first, of figures more
    than PEER_FRAC worse than the median of the other devices of the same name.  Launches are not compared."""
    lines: list[Line] = []
    for device in passport["devices"]:
        peers = [peer for peer in passport["devices"] if peer is not device and peer["name"] == device["name"]]
        by_what = {figure["what"]: figure for figure in device["figures"]}
        for what, figure in by_what.items():
            values = [other["value"] for peer in peers for other in peer["figures"] if other["what"] == what]
            if not values or figure["kind"] in LOWER_IS_BETTER:
                continue  # the time of a launch depends on the host
            median = statistics.median(values)
            if figure["value"] < (1 - PEER_FRAC) * median:
                line = {"device": device["index"], "id": device["id"], "what": what, "value": figure["value"]}
                slower_pct = 100 * (1 - figure["value"] / median)
                lines.append(line | {"unit": figure["unit"], "peers": median, "slower_pct": slower_pct})
    return sorted(lines, key=lambda line: -line["slower_pct"])


def as_text(passport: Passport, path: Path, changes: Sequence[Line], slow: Sequence[Line]) -> str:
    """Returns the passport as text.  changes, slow: from changes() and slower_than_peers(); path: where it is kept."""
    return "\n".join(_lines(passport, path, changes, slow))


def _lines(passport: Passport, path: Path, changes: Sequence[Line], slow: Sequence[Line]) -> Iterator[str]:
    devices = passport["devices"]
    for device in devices:
        facts = [f"{name} {value}" for name, value in device.get("under_load", {}).items() if value is not None]
        yield f"{passport['device']}{device['index']}: {device['name']}; under load {', '.join(facts) or 'unknown'}"
    yield ""
    yield _table(passport, changes)
    yield ""
    foreign_cores = passport.get("foreign_cpu_cores") or 0.0
    if foreign_cores > MAX_FOREIGN_CPU_CORES:
        yield f"warn: other programs used {foreign_cores:.2f} cores: end them and measure again"
    for why in (NO_TIME, CANNOT):
        names = [line.removesuffix(f": {why}") for line in passport["omitted"] if line.endswith(why)]
        if names:
            shown = f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            yield f"not measured, {why}: {text_table.counted(len(names), 'figure')}: {shown}"
    yield from _changed_lines(changes)
    yield from _slow(slow, len(devices))
    yield f"measured in {format_s(passport['took_s'])}, kept in {paths.shown(path)}"


def _table(passport: Passport, changes: Sequence[Line]) -> str:
    change_of = {(line["device"], line["what"]): line for line in changes}
    rows = []
    figures_by_device: list[tuple[int | None, list[Figure]]] = [
        (device["index"], device["figures"]) for device in passport["devices"]
    ]
    for index, figures in [*figures_by_device, (None, passport["collectives"])]:
        for figure in figures:
            line = change_of.get((index, figure["what"]))
            change = f"{line['change_pct']:+.1f} %{' *' if line['beyond_spread'] else ''}" if line else ""
            spread = f"{_number(figure['low'])} to {_number(figure['high'])}"
            who = "all" if index is None else str(index)
            rows.append([who, figure["what"], _number(figure["value"]), figure["unit"], spread, change])
    header = ("device", "what", "median", "unit", "10th to 90th", "change")
    return text_table.render(header, rows, (False, False, True, False, False, True))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _changed_lines(changes: Sequence[Line]) -> Iterator[str]:
    if not changes:
        yield "no earlier passport of this machine: the next one is compared with this one"
        return
    beyond = [line for line in changes if line["beyond_spread"]]
    worse = sum(line["is_worse"] for line in beyond)
    most = max(line["num_earlier"] for line in changes)
    compared = f"compared with {text_table.counted(most, 'earlier passport')}"
    if not beyond:
        yield f"{compared}: no figure is beyond the spread of its samples"
        return
    yield f"{compared}: {len(beyond)} of {len(changes)} figures beyond the spread (*), {worse} of them worse"


def _slow(slow: Sequence[Line], num_devices: int) -> Iterator[str]:
    for index in dict.fromkeys(line["device"] for line in slow):
        mine = [line for line in slow if line["device"] == index]
        first = mine[0]
        yield (
            f"warn: GPU {index} is slower than its peers: {first['what']} {first['slower_pct']:.1f} % below their "
            f"median, and {text_table.counted(len(mine) - 1, 'figure')} more: look at its temperature, power limit and "
            "slot, or leave it out with CUDA_VISIBLE_DEVICES"
        )
    if num_devices > 1 and not slow:
        yield "no GPU is slower than its peers"
