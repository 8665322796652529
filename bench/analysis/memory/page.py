"""A snapshot -> one page that needs nothing else: who held the GPU's memory, when, and how full its segments are."""

from bench.analysis.memory import charts, lives, timeline
from bench.analysis.memory.lives import BEFORE, NO_STACK, Sites
from bench.analysis.memory.uses import use_section
from bench.base.units import MIB, format_bytes
from bench.web.page import REPORT_STYLES, Safe, details, figure, join, page, section, soft, table, tag, tiles

MAX_ROWS = 50
NUM_SUMMARY_ROWS = 10
MAX_STACKS = 20


def of_snapshot(snapshot: dict, title: str) -> str:
    """Snapshot as load() gives it, or any of its shape; title: words -> html."""
    sites, about = Sites(), _about(snapshot)
    result = _lives(snapshot)
    specs = []
    what = about.get("what") or "CUDA memory as torch's allocator saw it"
    body = [tag("h1", title), soft(str(what)), _recorded(about)]
    for one in result:
        held, marks = timeline.of(one, timeline.by_place(sites)), _marks(about, one)
        drawn, uses = charts.charts(held, marks), use_section(one, marks, "memory-use")
        body += _device(snapshot, held, about, drawn, uses, sites, len(result) > 1)
        specs += drawn + uses.charts
    if not result:
        body.append(tag("p", "The snapshot is empty: nothing was allocated, and no history was recorded."))
    body.append(_settings(snapshot))
    return page(title, *body, data={"charts": specs}, styles=REPORT_STYLES)


def summary(snapshot: dict, id: str) -> tuple[list[dict], Safe]:
    """Snapshot, prefix of the charts' ids -> (chart specs, html of what was held and who held it), a part of a page."""
    about, specs, parts = _about(snapshot), [], []
    for one in _lives(snapshot):
        held, marks = timeline.of(one, timeline.by_place(Sites())), _marks(about, one)
        drawn, uses = charts.charts(held, marks, id), use_section(one, marks, f"{id}-use")
        specs += drawn + uses.charts
        parts += [_tiles(held, timeline.segment_totals(snapshot, held.device)), *map(figure, drawn), uses.markup]
        parts += [_by_phase(held, about), _sites(held, NUM_SUMMARY_ROWS)]
    return specs, join(parts)


def _lives(snapshot):
    return [lives.of_device(snapshot, device) for device in lives.devices(snapshot)]


def _about(snapshot):
    return snapshot["speedrun"] if isinstance(snapshot.get("speedrun"), dict) else {}


def _recorded(about):
    plain = {key: value for key, value in about.items() if isinstance(value, (str, int, float))}
    words = [_fact(str(key), value) for key, value in plain.items() if key not in ("what", "marks")]
    return soft(", ".join(words)) if words else Safe("")


def _fact(key, value):
    """("free_bytes", 2048) -> "free 2.0 KiB"."""
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{key.removesuffix('_bytes')} {format_bytes(value)}"
    return f"{key.replace('_', ' ')} {value}"


def _device(snapshot, held, about, specs, uses, sites, several):
    full = timeline.segment_totals(snapshot, held.device)
    end = f", device {held.device}" if several else ""
    figures = [figure(spec) for spec in specs]
    yield section("What was held" + end, _tiles(held, full), *_ooms(held, full), *figures, _by_phase(held, about))
    yield section("What it was for" + end, uses.markup) if uses.markup else Safe("")
    yield section("Who held it" + end, _sites(held), _notes(held), _stacks(held, sites))
    if full["num_segments"]:
        yield section("How full the memory is" + end, _fullness(full), charts.segment_map(snapshot, held.device))


def _tiles(held, full):
    sizes = {"largest": held.peak_bytes, "at the beginning": sum(held.initial.values()), "at the end": held.end_bytes}
    if full["num_segments"]:
        sizes |= {"reserved at the end": full["reserved"], "lost to gaps": full["in_gaps"]}
    return tiles([*((name, format_bytes(size)) for name, size in sizes.items()), ("events", f"{held.num_entries:,}")])


def _ooms(held, full):
    """What was asked for in vain, and whether it was gaps that prevented it."""
    for oom in held.ooms:
        words = f"Out of memory: {format_bytes(oom['size'])} were asked for"
        if isinstance(oom["device_free"], int):
            words += f", {format_bytes(oom['device_free'])} were free on the GPU"
        if full["num_segments"]:
            free, largest = format_bytes(full["free"]), format_bytes(full["largest_free"])
            words += f"; of what the allocator holds, {free} are free, {largest} of them in one piece"
            if full["free"] >= oom["size"] > full["largest_free"]:
                words += ". It is in pieces too small: try PYTORCH_ALLOC_CONF=expandable_segments:True"
        stack = details("asked by", tag("pre", "\n".join(oom["stack"]))) if oom["stack"] else ""
        yield tag("div", tag("p", words + ".", class_="bad"), stack)


def marks_of(snapshot: dict, one: lives.Lives) -> list[tuple[float, str]]:
    """[(ms since the device's first entry, phase)] of the recording's own marks; [] for a foreign snapshot."""
    return _marks(_about(snapshot), one)


def _marks(about, held):
    if not held.times_us:
        return []
    return [((time_us - held.times_us[0]) / 1e3, name) for time_us, name in _edges(about)]


def _edges(about):
    """[(time_us, name)] of the recording's marks; others are skipped."""
    marks = about.get("marks")
    marks = marks if isinstance(marks, list) else ()
    pairs = [mark for mark in marks if isinstance(mark, (list, tuple)) and len(mark) == 2]
    return [(time_us, str(name)) for time_us, name in pairs if isinstance(time_us, (int, float))]


def _by_phase(held, about):
    """Largest and final bytes between one mark and the next."""
    edges = _edges(about)
    if not edges or held.times_us is None:
        return Safe("")
    ends_us = [time_us for time_us, _ in edges[1:]] + [float("inf")]
    changes = sorted([(held.times_us[entry], size) for entry, _, size in held.changes], key=lambda change: change[0])
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
            rows.append([name, *(_mib(value) for value in (first, largest, total))])
    head = ("from this mark to the next", "begin, MiB", "largest, MiB", "end, MiB")
    return table(head, rows[:MAX_ROWS], caption="Marks of the recording")


def _sites(held, max_rows=MAX_ROWS):
    """All that held something at the peak or asked for something, the largest first."""
    end = timeline.held_at(held, held.num_entries)
    asked = {site: held.allocated.get(site, (0, 0)) for site in {*held.at_peak, *held.allocated}}
    rows = []
    for site in sorted(asked, key=lambda site: (-held.at_peak.get(site, 0), -asked[site][1], site))[:max_rows]:
        size, (count, asked_bytes) = held.at_peak.get(site, 0), asked[site]
        share = round(100 * size / held.peak_bytes, 1) if held.peak_bytes else None
        rows.append([site, _mib(size), share, _mib(end.get(site, 0)), count, _mib(asked_bytes)])
    head = ("place", "at the largest moment, MiB", "%", "at the end, MiB", "allocations", "asked for in all, MiB")
    more = f", the first {max_rows} of {len(asked)}" if len(asked) > max_rows else ""
    return table(head, rows, caption="Places in the code" + more)


def _notes(held):
    seen, notes = {*held.at_peak, *held.allocated}, []
    if BEFORE in seen:
        notes.append(f"“{BEFORE}”: allocated earlier, without a stack.")
    if NO_STACK in seen:
        notes.append(
            f"“{NO_STACK}”: not called from Python, as in autograd's thread, which runs a GPU's backward pass."
        )
    if held.unexplained_bytes:
        differ = f"Trace and final blocks differ by {format_bytes(held.unexplained_bytes)}"
        notes.append(f"{differ}: the snapshot is incomplete, so the times are not exact.")
    return join([soft(note) for note in notes])


def _stacks(held, sites):
    first = sorted({*held.at_peak, *held.allocated}, key=lambda site: -held.at_peak.get(site, 0))[:MAX_STACKS]
    stacks = [details(site, tag("pre", "\n".join(sites.stacks[site]))) for site in first if site in sites.stacks]
    return join([tag("p", "How each place was reached, the innermost call first:"), *stacks]) if stacks else Safe("")


def _fullness(full):
    gaps = f"between used blocks, the largest {format_bytes(full['largest_gap'])}: only what fits can use them"
    rows = [
        ("used", full["used"], "asked for by tensors that are alive"),
        ("rounding", full["rounding"], "lost inside of blocks, which come in sizes"),
        ("waiting", full["waiting"], "freed, but another stream still uses it"),
        ("free, in gaps", full["in_gaps"], gaps),
        ("free, whole segments", full["free"] - full["in_gaps"], "torch.cuda.empty_cache() would free them"),
        ("reserved", full["reserved"], f"{full['num_segments']} segments that cudaMalloc gave"),
    ]
    share = full["reserved"] or 1
    cells = [[name, _mib(size), round(100 * size / share, 1), why] for name, size, why in rows]
    return table(("", "MiB", "%", ""), cells, caption="At the end")


def _settings(snapshot):
    settings = snapshot.get("allocator_settings")
    if not isinstance(settings, dict):
        return Safe("")
    rows = [[str(key), str(value)] for key, value in settings.items()]
    return section("Settings of the allocator", details(f"{len(rows)} settings", table((), rows)))


def _mib(num_bytes):
    return round(num_bytes / MIB, 2)
