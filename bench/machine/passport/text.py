"""A passport, its changes and its peers -> words for a terminal."""

from collections.abc import Sequence
from pathlib import Path

from bench.base import paths
from bench.base.terminal import text_table
from bench.base.units import format_s
from bench.machine.check_host import MAX_FOREIGN_CPU_CORES
from bench.machine.passport.kept import CANNOT, NO_TIME, Passport


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
    yield from _changes(changes)
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


def _changes(changes):
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
