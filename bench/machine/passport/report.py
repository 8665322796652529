"""A passport beside earlier ones of the same devices and other devices of its machine, and as text."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.base import paths, text_table
from bench.base.units import format_s
from bench.machine.passport.figures import LOWER_IS_BETTER, Figure
from bench.machine.passport.kept import CANNOT, NO_TIME, Passport
from bench.machine.preflight import MAX_FOREIGN_CPU_CORES

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


def as_text(passport: Passport, path: Path, changes: Sequence[dict], slow: Sequence[dict]) -> str:
    """changes, slow: of judged; path: where it is kept."""
    return "\n".join(_lines(passport, path, changes, slow))


def _lines(passport, path, changes, slow):
    devices = passport["devices"]
    for device in devices:
        facts = [f"{name} {value}" for name, value in device.get("under_load", {}).items() if value is not None]
        yield f"{passport['device']}{device['index']}: {device['name']}; under load {', '.join(facts) or 'unknown'}"
    yield ""
    yield text_table.render(*_table(passport, changes))
    yield ""
    foreign_cores = passport.get("foreign_cpu_cores") or 0.0
    if foreign_cores > MAX_FOREIGN_CPU_CORES:
        yield f"warn: other programs used {foreign_cores:.2f} cores: end them and measure again"
    yield from _omitted(passport["omitted"])
    yield from _changed_lines(changes)
    yield from _slow(slow, len(devices))
    yield f"measured in {format_s(passport['took_s'])}, kept in {paths.shown(path)}"


def _table(passport, changes):
    change_of = {(line["device"], line["what"]): line for line in changes}
    rows = []
    for device in [*passport["devices"], {"index": None, "figures": passport["collectives"]}]:
        for figure in device["figures"]:
            change = change_of.get((device["index"], figure["what"]))
            who = "all" if device["index"] is None else str(device["index"])
            spread = f"{_number(figure['low'])} to {_number(figure['high'])}"
            rows.append([who, figure["what"], _number(figure["value"]), figure["unit"], spread, _change(change)])
    return (
        ("device", "what", "median", "unit", "10th to 90th", "change"),
        rows,
        (False, False, True, False, False, True),
    )


def _number(value):
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _change(line):
    return "" if line is None else f"{line['change_pct']:+.1f} %{' *' if line['beyond_spread'] else ''}"


def _omitted(omitted):
    for why in (NO_TIME, CANNOT):
        names = [line.removesuffix(f": {why}") for line in omitted if line.endswith(why)]
        if names:
            some = f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            yield f"not measured, {why}: {text_table.counted(len(names), 'figure')}: {some}"


def _changed_lines(changes):
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


def _slow(slow, num_devices):
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
