"""./run.sh memory SNAPSHOT.pickle | RUN ... [--out PATH] [--json]      what held the memory: a page for each snapshot

A snapshot is what torch.cuda.memory._dump_snapshot or the instrument memory_history wrote; of a run, all that it holds.
The page lies beside the snapshot and opens without a network.  The pickle is read as data, never run.
"""

import json
from pathlib import Path
from typing import Any

from bench.analysis.memory import lives, page, pickles, timeline, uses
from bench.analysis.memory.lives import Sites
from bench.base import atomic, text_table
from bench.base.paths import of_user, shown
from bench.base.units import MIB, format_bytes
from bench.cli import arguments
from bench.record import named

NUM_SHOWN = 8


def main(argv: list[str]) -> int:
    """Exit codes: 0 written, 2 wrong use."""
    args = _parser().parse_args(argv)
    paths = [path for word in args.snapshot for path in _snapshots(word)]
    if args.out and len(paths) > 1:
        raise ValueError(f"--out {args.out}: there are {len(paths)} snapshots; name one of them")
    if args.out and args.json:
        raise ValueError(f"--out {args.out} with --json: facts are printed: leave one of the two out")
    summaries = []
    for path in paths:
        facts, html = read(path)
        out = of_user(args.out) if args.out else path.with_suffix(".html")
        if not args.json:
            atomic.write_out(out, html)
            print(_words(shown(out), facts))
        summaries.append({"snapshot": shown(path), **facts})
    if args.json:
        print(json.dumps(summaries, indent=1))
    return 0


def read(path: Path) -> tuple[dict[str, Any], str]:
    """Path of a snapshot -> (its facts, its page)."""
    title = f"{path.stem.removesuffix('.rss')}: memory"
    if path.name.endswith(pickles.RSS_SUFFIX):
        samples = pickles.load_rss(path)
        return pickles.rss_facts(samples), pickles.rss_page(samples, title)
    snapshot = pickles.load(path)
    return facts_of(snapshot), page.of_snapshot(snapshot, title)


def facts_of(snapshot: dict[str, Any]) -> dict[str, Any]:
    """For programs: {"devices": [{"device", "peak_bytes", "places_at_peak", "segments", "ooms", ...}]}."""
    devices = []
    for device in lives.devices(snapshot):
        blocks = lives.of_device(snapshot, device)
        held = timeline.of(blocks, timeline.by_place(Sites()))
        sites = sorted(held.at_peak.items(), key=lambda one: -one[1])
        full = timeline.segment_totals(snapshot, device)
        facts: dict[str, Any] = {"device": device, "num_events": held.num_entries, "peak_bytes": held.peak_bytes}
        facts |= {"end_bytes": held.end_bytes, "unexplained_bytes": held.unexplained_bytes}
        facts["places_at_peak"] = [{"place": site, "bytes": size} for site, size in sites]
        facts |= uses.use_facts(blocks, page.marks_of(snapshot, blocks))
        facts["segments"] = {key if key == "num_segments" else f"{key}_bytes": value for key, value in full.items()}
        facts["ooms"] = [{"size_bytes": oom["size"], "device_free_bytes": oom["device_free"]} for oom in held.ooms]
        devices.append(facts)
    return {"devices": devices}


def _words(path: str, facts: dict[str, Any]) -> str:
    lines = [path]
    if "peak_bytes" in facts:
        lines.append(f"  {facts['what']}; largest {format_bytes(facts['peak_bytes'])}")
    for device in facts.get("devices", ()):
        reserved, gaps = (format_bytes(device["segments"][key]) for key in ("reserved_bytes", "in_gaps_bytes"))
        lines.append(
            f"  device {device['device']}: largest {format_bytes(device['peak_bytes'])}, reserved {reserved}, "
            f"lost to gaps {gaps}, {device['num_events']} events"
        )
        held = [(f"{site['bytes'] / MIB:12,.2f} MiB", site["place"]) for site in device["places_at_peak"][:NUM_SHOWN]]
        lines.append(text_table.render((), held, [True, False]))
    return "\n".join(lines)


def _snapshots(word: str) -> list[Path]:
    """A file, or runs or folders with snapshots in them -> their paths."""
    paths = []
    for path in named.find([word])[0].holders:
        paths += [path] if path.is_file() else pickles.in_folder(path)
    if not paths:
        remedy = "record one with instruments=[regions,memory_history], on a GPU"
        raise ValueError(f"{word}: it holds no memory snapshot; {remedy}")
    return paths


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh memory", main=main)
    parser.add_argument("snapshot", nargs="+", metavar="SNAPSHOT|RUN", help="a .pickle, or a run that holds some")
    parser.add_argument("--out", metavar="PATH", help="the page of one snapshot")
    parser.add_argument("--json", action="store_true", help="print the facts instead of writing pages")
    return parser
