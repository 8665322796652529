"""Presents a recording of memory as a Document: who held the GPU's memory, when, what for, how full its segments are.

A text shows the largest holders, a page everything, --json the bytes.  Without a GPU, a resident set is shown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.analysis.memory import lives, pickles
from bench.analysis.memory.lives import BEFORE, NO_STACK, USES, Lives, Sites, Timeline, Uses, held_at, held_by
from bench.base.units import GIB, MIB, format_bytes
from bench.web.chart import chart, mark_of, series_of
from bench.web.document import Block, Chart, Document, Lines, Picture, Section, Table, Verbatim, Verdict
from bench.web.page import tiles

MAX_ROWS = 50
NUM_SUMMARY_ROWS = 10
NUM_SHOWN = 8  # rows of a table in a text
MAX_STACKS = 20
NUM_SITES = 6  # places with an area each; all others share one
MAX_POINTS = 1600  # moments in a chart; each is drawn as a step of two points
OF_PROCESS = "resident set of the process: without a GPU, torch keeps no history of allocations"
Point = tuple[int, dict[Any, int], int, int]  # of lives.sampled()


def document_of_file(path: Path) -> Document:
    """Presents a snapshot's pickle, or samples of a resident set.  Raises ValueError for any other file."""
    title = f"{path.stem.removesuffix('.rss')}: memory"
    if not path.name.endswith(pickles.RSS_SUFFIX):
        return document_of_snapshot(pickles.load(path), title)
    samples = pickles.load_rss(path)
    rss_bytes, marks = samples["rss_bytes"], samples["marks"]
    largest, end = format_bytes(max(rss_bytes)), format_bytes(rss_bytes[-1])
    rows = [(name, f"{at_ms:.3f}", _mib(size)) for (_, name), at_ms, size in zip(marks, _ms(marks), rss_bytes)]
    table = Table(("mark", "ms", "resident set, MiB"), rows, (False, True, True))
    facts = {
        "what": OF_PROCESS,
        "num_samples": len(rss_bytes),
        "peak_bytes": max(rss_bytes),
        "end_bytes": rss_bytes[-1],
    }
    verdict = Verdict(f"{OF_PROCESS}; largest {largest}, at the end {end}", "")
    blocks: list[Block] = [Chart(_rss_chart(samples, "rss")), Section("Marks", [table], False, True)]
    return Document(title, [verdict], blocks, facts)


def summary(path: Path, id: str) -> list[Block]:
    """Returns the same as blocks for another page.  id: the prefix of the ids of its charts."""
    if path.name.endswith(pickles.RSS_SUFFIX):
        return [Lines([OF_PROCESS + "."], is_soft=True), Chart(_rss_chart(pickles.load_rss(path), id))]
    blocks: list[Block] = []
    for device in _devices(pickles.load(path), Sites()):
        specs = _draw_places(device.held, id)
        blocks += [_tiles(device), *map(Chart, specs), *_uses(device, f"{id}-use"), *_by_phase(device.held)]
        blocks.append(_places(device.held, NUM_SUMMARY_ROWS))
    return blocks


def document_of_snapshot(snapshot: dict[str, Any], title: str) -> Document:
    """Presents a snapshot as pickles.load() or pickles.checked() returns it."""
    about, sites = lives.about(snapshot), Sites()
    devices = list(_devices(snapshot, sites))
    source = str(about.get("what") or "CUDA memory as torch's allocator saw it")
    shown = {key: value for key, value in about.items() if isinstance(value, (str, int, float))}
    facts = ", ".join(_fact(str(key), value) for key, value in shown.items() if key not in ("what", "marks"))
    verdicts = [_verdict(device) for device in devices]
    if not devices:
        verdicts = [Verdict("The snapshot is empty: nothing was allocated, and no history was recorded.", "")]
    blocks: list[Block] = []
    for device in devices:
        blocks += _device(device, sites, f", device {device.number}" if len(devices) > 1 else "")
    settings = snapshot.get("allocator_settings")
    if isinstance(settings, dict):
        rows = [(str(key), str(value)) for key, value in settings.items()]
        folded = Section(f"{len(rows)} settings", [Table((), rows)], is_folded=True)
        blocks.append(Section("Settings of the allocator", [folded], is_page_only=True))
    about_page = [source, facts] if facts else [source]
    return Document(title, verdicts, blocks, {"devices": [device.facts for device in devices]}, about=about_page)


def _fact(key: str, value: object) -> str:
    """Returns a fact as text: ("free_bytes", 2048) -> "free 2.0 KiB"."""
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{key.removesuffix('_bytes')} {format_bytes(value)}"
    return f"{key.replace('_', ' ')} {value}"


# ---- a device


@dataclass(frozen=True)
class _Device:
    number: int
    lives: Lives
    held: Timeline  # by place
    full: dict[str, int]  # lives.segment_totals
    judged: Uses
    by_use: Timeline

    @property
    def facts(self) -> dict[str, Any]:
        """The device's part of the --json answer."""
        held = self.held
        return {
            "device": self.number,
            "num_events": self.lives.num_entries,
            "peak_bytes": held.peak_bytes,
            "end_bytes": held.end_bytes,
            "unexplained_bytes": held.unexplained_bytes,
            "places_at_peak": [{"place": place, "bytes": size} for place, size in by_size(held.at_peak)],
            "uses_at_peak": dict(by_size(self.by_use.at_peak)),
            "segments": {key if key == "num_segments" else f"{key}_bytes": size for key, size in self.full.items()},
            "ooms": [{"size_bytes": oom["size"], "device_free_bytes": oom["device_free"]} for oom in self.lives.ooms],
        }


def _devices(snapshot: dict[str, Any], sites: Sites) -> Iterator[_Device]:
    for number in lives.devices(snapshot):
        device_lives = lives.from_snapshot(snapshot, number)
        judged, full = Uses(device_lives), lives.segment_totals(snapshot, number)
        held = held_by(device_lives, lives.by_place(sites))
        yield _Device(number, device_lives, held, full, judged, held_by(device_lives, judged.of))


def _verdict(device: _Device) -> Verdict:
    sizes = device.held.peak_bytes, device.full["reserved"], device.full["in_gaps"]
    largest, reserved, gaps = map(format_bytes, sizes)
    events = f"{device.lives.num_entries:,} events"
    return Verdict(f"device {device.number}: largest {largest}, reserved {reserved}, lost to gaps {gaps}, {events}", "")


def _device(device: _Device, sites: Sites, end: str) -> Iterator[Block]:
    held = device.held
    drawn: list[Block] = [_tiles(device), *_ooms(device), *map(Chart, _draw_places(held, "memory")), *_by_phase(held)]
    yield Section("What was held" + end, drawn, is_page_only=not device.lives.ooms)
    yield Section("What it was for" + end, _uses(device, "memory-use"), is_page_only=True)
    holders: list[Block] = [_places(held), _notes(held), _stacks(held, sites)]
    yield Section("Who held it" + end, holders)
    if device.full["num_segments"]:
        yield Section("How full the memory is" + end, [_fullness(device.full)], is_page_only=True)


def _tiles(device: _Device) -> Block:
    held, full = device.held, device.full
    sizes = {"largest": held.peak_bytes, "at the beginning": sum(held.initial.values()), "at the end": held.end_bytes}
    if full["num_segments"]:
        sizes |= {"reserved at the end": full["reserved"], "lost to gaps": full["in_gaps"]}
    facts = [(name, format_bytes(size)) for name, size in sizes.items()]
    return Picture(tiles([*facts, ("events", f"{device.lives.num_entries:,}")]))


def _ooms(device: _Device) -> Iterator[Block]:
    """Yields the allocations that failed, and whether gaps were the reason."""
    full = device.full
    for oom in device.lives.ooms:
        message = f"Out of memory: {format_bytes(oom['size'])} were asked for"
        if isinstance(oom["device_free"], int):
            message += f", {format_bytes(oom['device_free'])} were free on the GPU"
        if full["num_segments"]:
            free, largest = format_bytes(full["free"]), format_bytes(full["largest_free"])
            message += f"; of what the allocator holds, {free} are free, {largest} of them in one piece"
            if full["free"] >= oom["size"] > full["largest_free"]:
                message += ". It is in pieces too small: try PYTORCH_ALLOC_CONF=expandable_segments:True"
        yield Lines([message + "."])
        if oom["stack"]:
            yield Section("asked by", [Verbatim("\n".join(oom["stack"]))], is_folded=True, is_page_only=True)


def _uses(device: _Device, id: str) -> list[Block]:
    if not device.lives.all:
        return []
    has_marks = device.judged.has_marks
    how = "the recording's phases" if has_marks else "the stacks alone, as the recording marks no phases"
    note = f"Judged from where each piece was asked for and in which phase it was freed, by {how}."
    blocks: list[Block] = []
    if (held := device.by_use).changes:
        about = ", ".join(f"{use} {format_bytes(size)}" for use, size in by_size(held.at_peak))
        _, areas, _, common = _drawn(held, USES, id)
        about = f"at the largest moment {about}"
        blocks.append(Chart(chart(f"{id}-{held.lives.device}", "What memory was for", about, series=areas, **common)))
    return [*blocks, Lines([note], is_soft=True)]


def _by_phase(held: Timeline) -> list[Block]:
    """Returns a table of the first, largest and last bytes between consecutive marks; [] without marks."""
    edges, times_us = held.lives.marks_us, held.lives.times_us
    if not edges or times_us is None:
        return []
    ends_us = [time_us for time_us, _ in edges[1:]] + [float("inf")]
    changes = sorted([(times_us[entry], size) for entry, _, size in held.changes], key=lambda change: change[0])
    total = sum(held.initial.values()) + sum(size for time_us, size in changes if time_us < edges[0][0])
    number = sum(time_us < edges[0][0] for time_us, _ in changes)
    rows = []
    for (_, name), end_us in zip(edges, ends_us):
        first = largest = total
        while number < len(changes) and changes[number][0] < end_us:
            total += changes[number][1]
            largest = max(largest, total)
            number += 1
        if name:
            rows.append([name, *map(_mib, (first, largest, total))])
    heads = ("from this mark to the next", "begin, MiB", "largest, MiB", "end, MiB")
    return [Table(heads, rows[:MAX_ROWS], (False, True, True, True), "Marks of the recording")]


def _places(held: Timeline, max_rows: int = MAX_ROWS) -> Table:
    """Returns a table of the places that held memory at the peak or allocated some, the largest first."""
    end = held_at(held, held.lives.num_entries)
    requests = {place: held.allocated.get(place, (0, 0)) for place in {*held.at_peak, *held.allocated}}
    rows = []
    for place in sorted(requests, key=lambda place: (-held.at_peak.get(place, 0), -requests[place][1], place))[
        :max_rows
    ]:
        size, (count, requested_bytes) = held.at_peak.get(place, 0), requests[place]
        share = f"{100 * size / held.peak_bytes:.1f}" if held.peak_bytes else None
        rows.append([place, _mib(size), share, _mib(end.get(place, 0)), str(count), _mib(requested_bytes)])
    heads = ("place", "at the largest moment, MiB", "%", "at the end, MiB", "allocations", "asked for in all, MiB")
    limit_note = f", the first {max_rows} of {len(requests)}" if len(requests) > max_rows else ""
    right = [False] + [True] * (len(heads) - 1)
    return Table(heads, rows, right, "Places in the code" + limit_note, NUM_SHOWN, "; --json has all")


def _notes(held: Timeline) -> Lines:
    seen, notes = {*held.at_peak, *held.allocated}, []
    if BEFORE in seen:
        notes.append(f"“{BEFORE}”: allocated earlier, without a stack.")
    if NO_STACK in seen:
        notes.append(f"“{NO_STACK}”: not called from Python, as in autograd's thread, in a GPU's backward pass.")
    if held.unexplained_bytes:
        differ = f"Trace and final blocks differ by {format_bytes(held.unexplained_bytes)}"
        notes.append(f"{differ}: the snapshot is incomplete, so the times are not exact.")
    return Lines(notes, is_soft=True)


def _stacks(held: Timeline, sites: Sites) -> Section:
    largest = sorted({*held.at_peak, *held.allocated}, key=lambda place: -held.at_peak.get(place, 0))[:MAX_STACKS]
    stacks = [
        Section(place, [Verbatim("\n".join(sites.stacks[place]))], is_folded=True)
        for place in largest
        if place in sites.stacks
    ]
    return Section("How each place was reached, the innermost call first", stacks, is_page_only=True)


def _fullness(full: dict[str, int]) -> Table:
    gaps = f"between used blocks, the largest {format_bytes(full['largest_gap'])}: only what fits can use them"
    rows = [
        ("used", full["used"], "asked for by tensors that are alive"),
        ("rounding", full["rounding"], "lost inside blocks, which have fixed sizes"),
        ("waiting", full["waiting"], "freed, but another stream still uses it"),
        ("free, in gaps", full["in_gaps"], gaps),
        ("free, whole segments", full["free"] - full["in_gaps"], "torch.cuda.empty_cache() would free them"),
        ("reserved", full["reserved"], f"{full['num_segments']} segments that cudaMalloc gave"),
    ]
    reserved = full["reserved"] or 1
    cells = [(name, _mib(size), f"{100 * size / reserved:.1f}", why) for name, size, why in rows]
    return Table(("", "MiB", "%", ""), cells, (False, True, True, False), "At the end")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.2f}"


# ---- charts


def _draw_places(held: Timeline, id: str) -> list[dict[str, Any]]:
    """Returns charts of who held how much memory, and of used and reserved memory; [] if nothing changed."""
    if not held.changes and not held.lives.reserved_changes:
        return []
    places = [place for place, _ in by_size(held.at_peak)[:NUM_SITES]]
    note = "; dashed lines are the marks of the table below" if held.lives.marks else ""
    about = f"largest {format_bytes(held.peak_bytes)}{note}"
    points, areas, scale, common = _drawn(held, places, id)
    specs = [chart(f"{id}-held-{held.lives.device}", "Who held memory", about, series=areas, **common)]
    if any(reserved for *_, reserved in points):
        both = [series_of("used", [used / scale for _, _, used, _ in points], "line")]
        both += [series_of("reserved by the allocator", [reserved / scale for *_, reserved in points], "line")]
        between = "what lies between them is rounding, gaps and cache"
        specs.append(chart(f"{id}-reserved-{held.lives.device}", "Used and reserved", between, series=both, **common))
    return specs


def _drawn(
    held: Timeline, names: Sequence[str], id: str
) -> tuple[list[Point], list[dict[str, Any]], int, dict[str, Any]]:
    """Returns (points of lives.sampled(), an area for each name, bytes per unit of y, what a device's charts share).

    Held bytes stay the same until they change, so each point is preceded by one with the values before it.
    """
    device_lives, points = held.lives, list[Point]()
    for point in lives.sampled(held, names, MAX_POINTS):
        if points and point[0] > points[-1][0]:
            points.append((point[0], *points[-1][1:]))
        points.append(point)
    is_large = max(held.peak_bytes, *(reserved for *_, reserved in points)) >= 4 * GIB
    scale = GIB if is_large else MIB
    shown = [(name, name) for name in names] + [(None, lives.OTHER)] * any(sizes[None] for _, sizes, _, _ in points)
    areas = [series_of(label, [sizes[name] / scale for _, sizes, _, _ in points], "area") for name, label in shown]
    lines = [mark_of(where, label, "validation") for where, label in device_lives.marks]
    lines += [mark_of(device_lives.x[oom["entry"]], "out of memory", "stall") for oom in device_lives.ooms]
    common = {
        "x_label": "event" if device_lives.times_us is None else "ms since the recording's first event",
        "y_label": "GiB" if is_large else "MiB",
        "x": [device_lives.x[entry] for entry, *_ in points],
        "marks": lines,
        "sync": f"{id}-{device_lives.device}",
    }
    return points, areas, scale, common


def by_size(sizes: dict[str, int]) -> list[tuple[str, int]]:
    """Returns (name, bytes) of what holds memory, the largest first."""
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda item: -item[1])


# ---- a resident set


def _rss_chart(samples: pickles.Samples, id: str) -> dict[str, Any]:
    marks, rss_bytes, x_ms = samples["marks"], samples["rss_bytes"], _ms(samples["marks"])
    series = [series_of("resident set", [size / MIB for size in rss_bytes], "line")]
    lines = [mark_of(at_ms, name, "validation") for at_ms, (_, name) in zip(x_ms, marks) if name.startswith("step")]
    caption = f"largest {format_bytes(max(rss_bytes))}, at the end {format_bytes(rss_bytes[-1])}"
    return chart(id, "Resident set", caption, "ms since the first mark", "MiB", x_ms, series, lines)


def _ms(marks: Sequence[tuple[float, str]]) -> list[float]:
    return [(time_us - marks[0][0]) / 1e3 for time_us, _ in marks]
