"""What used the memory?  ./run.sh memory SNAPSHOT.pickle | RUN ... [--out PATH] [--json]

Writes a page for each snapshot, beside it; the page opens offline.  Snapshots are written by
torch.cuda.memory._dump_snapshot and by the instrument memory_history; for a run, all of its snapshots are read.
The pickle is read as data and never executed.
"""

import itertools
import json
from pathlib import Path

from bench.analysis.memory import page, pickles
from bench.base import atomic
from bench.base.paths import shown, user_path
from bench.cli import arguments
from bench.record import named


def main(argv: list[str]) -> int:
    """Exit codes: 0 written, 2 usage error."""
    args = _parser().parse_args(argv)
    paths: list[Path] = []
    for name in args.snapshot:
        found = [[path] if path.is_file() else pickles.in_folder(path) for path in named.find([name])[0].holders]
        if not any(found):
            raise ValueError(f"{name}: no memory snapshot: record one on a GPU, instruments=[regions,memory_history]")
        paths += itertools.chain(*found)
    if args.out and len(paths) > 1:
        raise ValueError(f"--out {args.out}: there are {len(paths)} snapshots; name one of them")
    summaries = []
    for path in paths:
        snapshot = page.document_of_file(path)
        out = user_path(args.out) if args.out else path.with_suffix(".html")
        if not args.json:
            atomic.write_out(out, snapshot.html(), may_follow=bool(args.out))
            print(f"{shown(out)}\n{snapshot.terminal()}")
        summaries.append({"snapshot": shown(path), **snapshot.data})
    if args.json:
        print(json.dumps(summaries, indent=1))
    return 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh memory", main=main)
    parser.add_argument("snapshot", nargs="+", metavar="SNAPSHOT|RUN", help="a .pickle, or a run with snapshots")
    parser.add_argument("--out", metavar="PATH", help="path of the page, for a single snapshot")
    parser.flag("--json", help="print JSON instead of writing pages")
    parser.alone("--json", "--out")
    return parser
