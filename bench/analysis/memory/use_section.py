"""The part of a page that says what memory was for, over time, and which modules held it at the fullest moment."""

from typing import NamedTuple

from bench.analysis.memory import charts, modules, timeline, uses
from bench.analysis.memory.lives import Lives
from bench.base.units import MIB, format_bytes
from bench.web import lanes
from bench.web.page import Safe, figure, join, soft

NUM_MODULES = 12
COLOURS = {use: f"series-{number}" for number, use in enumerate(uses.USES)}  # as the chart has them


class UseSection(NamedTuple):
    """charts: specs whose slots stand in markup; "" where nothing was recorded."""

    charts: list[dict]
    markup: Safe


def of(lives: Lives, marks: list[tuple[float, str]], id: str) -> UseSection:
    """marks: [(ms since the first entry, phase)] of the recording; id: of the charts."""
    if not lives.found:
        return UseSection([], Safe(""))
    judged = uses.Uses(lives, _edges(lives, marks))
    held = timeline.of(lives, judged.of)
    about = ", ".join(f"{use} {format_bytes(size)}" for use, size in _by_size(held.at_peak))
    specs = charts.of_names(held, uses.USES, marks, id, "What memory was for", f"at the largest moment {about}")
    how = "the recording's phases" if judged.has_marks else "the stacks alone, as the recording marks no phases"
    words = soft(f"Judged from where each piece was asked for and in which phase it was freed, by {how}.")
    return UseSection(specs, join([*map(figure, specs), _by_module(lives, judged).markup, words]))


def facts(lives: Lives, marks: list[tuple[float, str]]) -> dict:
    """For programs: {"uses_at_peak": {use: bytes}, "modules_at_peak": {module: bytes}}."""
    judged = uses.Uses(lives, _edges(lives, marks))
    by_use, by_module = (timeline.of(lives, name_of) for name_of in (judged.of, modules.of))
    return {"uses_at_peak": dict(_by_size(by_use.at_peak)), "modules_at_peak": dict(_by_size(by_module.at_peak))}


def _edges(lives, marks):
    """[(entry, phase)]: the first entry at or after each mark."""
    if lives.times_us is None:
        return []
    x_ms, edges, entry = charts.axis(lives)[0], [], 0
    for at_ms, name in sorted(marks, key=lambda mark: mark[0]):
        while entry < len(x_ms) and x_ms[entry] < at_ms:
            entry += 1
        edges.append((entry, name))
    return edges


def _by_module(lives, judged):
    """At the fullest moment, each module's bytes by use."""
    both = timeline.of(lives, lambda life: (modules.of(life), judged.of(life)))
    by_module = {}
    for (module, use), size in both.at_peak.items():
        by_module.setdefault(module, {})[use] = size
    drawn = []
    for module, sizes in sorted(by_module.items(), key=lambda one: -sum(one[1].values()))[:NUM_MODULES]:
        known = [(use, sizes[use]) for use in uses.USES if use in sizes]
        parts = [(size / MIB, COLOURS[use], f"{use} {format_bytes(size)}") for use, size in known]
        words = ", ".join(f"{use} {format_bytes(size)}" for use, size in _by_size(sizes))
        drawn.append(lanes.Lane(module, words, lanes.stacked(parts)))
    names = [(COLOURS[use], use) for use in uses.USES if any(use in sizes for sizes in by_module.values())]
    more = f"the largest {NUM_MODULES} of {len(by_module)}; " if len(by_module) > NUM_MODULES else ""
    about = f"{more}whose forward, or whose construction, asked"
    return lanes.Panel("modules", "By nn.Module at the largest moment", about, "MiB", drawn, names)


def _by_size(sizes):
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda one: -one[1])
