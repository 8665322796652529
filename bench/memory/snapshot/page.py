"""A snapshot -> one page that needs nothing else: who held the GPU's memory, when, and how full its segments are."""

from bench.memory.snapshot import charts as picture
from bench.memory.snapshot import segments, timeline
from bench.memory.snapshot.sites import BEFORE, NO_STACK, Sites
from bench.units import MIB, format_bytes
from bench.web.page import Safe, figure, join, page, section, table, tag

MAX_ROWS = 50
NUM_SUMMARY_ROWS = 10
MAX_STACKS = 20


def of_snapshot(snapshot, title):
    """Snapshot as load() gives it, or any of its shape; title: words -> html."""
    sites = Sites()
    about = snapshot.get("speedrun") if isinstance(snapshot.get("speedrun"), dict) else {}
    found = [timeline.of_device(snapshot, device, sites) for device in timeline.devices(snapshot)]
    charts = {one.device: picture.charts(one, _marks(about, one)) for one in found}
    what = about.get("what") or "CUDA memory as torch's allocator saw it"
    body = [tag("h1", title), tag("p", str(what), class_="soft"), _recorded(about)]
    for one in found:
        body += _device(snapshot, one, about, charts[one.device], sites, len(found) > 1)
    if not found:
        body.append(tag("p", "The snapshot is empty: nothing was allocated, and no history was recorded."))
    body.append(_settings(snapshot))
    return page(title, *body, data={"charts": [chart for of_one in charts.values() for chart in of_one]})


def summary(snapshot, id):
    """Snapshot, a word for the charts' ids -> (chart specs, html of what was held and who held it), to be a part of a page."""
    sites = Sites()
    about = snapshot.get("speedrun") if isinstance(snapshot.get("speedrun"), dict) else {}
    charts, parts = [], []
    for found in [timeline.of_device(snapshot, device, sites) for device in timeline.devices(snapshot)]:
        drawn = picture.charts(found, _marks(about, found), id)
        charts += drawn
        parts += [
            _tiles(found, segments.of_device(snapshot, found.device)),
            *(figure(chart) for chart in drawn),
            _by_phase(found, about),
            _places(found, NUM_SUMMARY_ROWS),
        ]
    return charts, join(parts)


def _recorded(about):
    words = [
        _fact(str(key), value)
        for key, value in about.items()
        if key not in ("what", "marks") and isinstance(value, (str, int, float))
    ]
    return tag("p", ", ".join(words), class_="soft") if words else Safe("")


def _fact(key, value):
    """("free_bytes", 2048) -> "free 2.0 KiB"."""
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{key.removesuffix('_bytes')} {format_bytes(value)}"
    return f"{key.replace('_', ' ')} {value}"


def _device(snapshot, found, about, charts, sites, several):
    full = segments.of_device(snapshot, found.device)
    end = f", device {found.device}" if several else ""
    yield section(
        "What was held" + end,
        _tiles(found, full),
        *_oom(found, full),
        *(figure(chart) for chart in charts),
        _by_phase(found, about),
    )
    yield section("Who held it" + end, _places(found), _notes(found), _stacks(found, sites))
    if full["num_segments"]:
        yield section("How full the memory is" + end, _fullness(full), picture.segment_map(snapshot, found.device))


def _tiles(found, full):
    facts = [
        ("largest", found.peak_bytes),
        ("at the beginning", sum(found.initial.values())),
        ("at the end", found.end_bytes),
    ]
    facts += (
        [("reserved at the end", full["reserved"]), ("lost to gaps", full["in_gaps"])] if full["num_segments"] else []
    )
    tiles = [tag("div", tag("dt", name), tag("dd", format_bytes(value))) for name, value in facts]
    tiles.append(tag("div", tag("dt", "events"), tag("dd", f"{found.num_entries:,}")))
    return tag("dl", *tiles, class_="tiles")


def _oom(found, full):
    """What was asked for in vain, and whether it was gaps that stood in the way."""
    for oom in found.ooms:
        words = f"Out of memory: {format_bytes(oom['size'])} were asked for"
        if isinstance(oom["device_free"], int):
            words += f", {format_bytes(oom['device_free'])} were free on the GPU"
        if full["num_segments"]:
            words += f"; of what the allocator holds, {format_bytes(full['free'])} are free, {format_bytes(full['largest_free'])} of them in one piece"
            if full["free"] >= oom["size"] > full["largest_free"]:
                words += ". It is in pieces too small: try PYTORCH_ALLOC_CONF=expandable_segments:True"
        stack = tag("details", tag("summary", "asked by"), tag("pre", "\n".join(oom["stack"]))) if oom["stack"] else ""
        yield tag("div", tag("p", words + ".", class_="bad"), stack)


def _marks(about, found):
    """[(x, label)] of the edges that were recorded within the trace."""
    if found.times_us is None or not found.times_us:
        return []
    return [((time_us - found.times_us[0]) / 1e3, name) for time_us, name in _edges(about)]


def _edges(about):
    marks = about.get("marks")
    plain = marks if isinstance(marks, list) else ()
    return [
        (mark[0], str(mark[1]))
        for mark in plain
        if isinstance(mark, (list, tuple)) and len(mark) == 2 and isinstance(mark[0], (int, float))
    ]


def _by_phase(found, about):
    """Largest and final bytes between one edge and the next."""
    edges = _edges(about)
    if not edges or found.times_us is None:
        return Safe("")
    rows, total, number = [], sum(found.initial.values()), 0
    changes = sorted(found.changes, key=lambda change: found.times_us[change[0]])
    while number < len(changes) and found.times_us[changes[number][0]] < edges[0][0]:
        total += changes[number][2]
        number += 1
    for (_, name), end_us in zip(edges, [edge[0] for edge in edges[1:]] + [float("inf")]):
        first = largest = total
        while number < len(changes) and found.times_us[changes[number][0]] < end_us:
            total += changes[number][2]
            largest = max(largest, total)
            number += 1
        if name:
            rows.append([name, *(_mib(value) for value in (first, largest, total))])
    return table(
        ("from this mark to the next", "begin, MiB", "largest, MiB", "end, MiB"),
        rows[:MAX_ROWS],
        caption="Marks of the recording",
    )


def _places(found, max_rows=MAX_ROWS):
    """Everybody who held something at the peak or asked for something, who held most first."""
    end = timeline.held_at(found, found.num_entries)
    names = sorted(
        {*found.at_peak, *found.allocated},
        key=lambda place: (-found.at_peak.get(place, 0), -found.allocated.get(place, (0, 0))[1], place),
    )
    rows = []
    for place in names[:max_rows]:
        held, (count, asked) = found.at_peak.get(place, 0), found.allocated.get(place, (0, 0))
        share = round(100 * held / found.peak_bytes, 1) if found.peak_bytes else None
        rows.append([place, _mib(held), share, _mib(end.get(place, 0)), count, _mib(asked)])
    head = ("place", "at the largest moment, MiB", "%", "at the end, MiB", "allocations", "asked for in all, MiB")
    more = f", the first {max_rows} of {len(names)}" if len(names) > max_rows else ""
    return table(head, rows, caption="Places in the code" + more)


def _notes(found):
    seen = {*found.at_peak, *found.allocated}
    notes = [f"“{BEFORE}”: it was there already, and no stack was kept."] if BEFORE in seen else []
    if NO_STACK in seen:
        notes.append(
            f"“{NO_STACK}”: nobody in Python asked, as in the thread of autograd that runs the backward pass of a GPU."
        )
    if found.unexplained_bytes:
        notes.append(
            f"Trace and final blocks differ by {format_bytes(found.unexplained_bytes)}: the snapshot is not whole, take the times with care."
        )
    return join([tag("p", note, class_="soft") for note in notes])


def _stacks(found, sites):
    first = sorted({*found.at_peak, *found.allocated}, key=lambda place: -found.at_peak.get(place, 0))[:MAX_STACKS]
    stacks = [
        tag("details", tag("summary", place), tag("pre", "\n".join(sites.stacks[place])))
        for place in first
        if place in sites.stacks
    ]
    return join([tag("p", "How each place was reached, the innermost call first:"), *stacks]) if stacks else Safe("")


def _fullness(full):
    rows = [
        ["used", full["used"], "asked for by tensors that are alive"],
        ["rounding", full["rounding"], "lost inside of blocks, which come in sizes"],
        ["waiting", full["waiting"], "freed, but another stream is not done with it"],
        [
            "free, in gaps",
            full["in_gaps"],
            f"between used blocks, the largest {format_bytes(full['largest_gap'])}: only what fits can use them",
        ],
        ["free, whole segments", full["free"] - full["in_gaps"], "torch.cuda.empty_cache() would give them back"],
        ["reserved", full["reserved"], f"{full['num_segments']} segments that cudaMalloc gave"],
    ]
    share = full["reserved"] or 1
    return table(
        ("", "MiB", "%", ""),
        [[name, _mib(size), round(100 * size / share, 1), why] for name, size, why in rows],
        caption="At the end",
    )


def _settings(snapshot):
    settings = snapshot.get("allocator_settings")
    if not isinstance(settings, dict):
        return Safe("")
    rows = [[str(key), str(value)] for key, value in settings.items()]
    return section(
        "Settings of the allocator", tag("details", tag("summary", f"{len(rows)} settings"), table((), rows))
    )


def _mib(num_bytes):
    return round(num_bytes / MIB, 2)
