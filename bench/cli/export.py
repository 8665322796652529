"""Write records for other programs.  ./run.sh export RUN|FOLDER... --to FORM      ./run.sh dashboard RUN... --to NAMES

    ./run.sh export RUN|FOLDER... --to csv|parquet|mllog|modded-nanogpt [--steps] [--out PATH]
    ./run.sh export RUN|FOLDER... --to postgres --out URL [--steps]
    ./run.sh dashboard RUN ... --to tensorboard,wandb,mlflow

csv and parquet have a row per run, or with --steps per step.  mllog is MLPerf's ":::MLLOG {json}" lines.
modded-nanogpt is a log of one run in the format of its records; importing it gives the same numbers.
Without --out everything except parquet is printed.  postgres fills the tables runs and, with --steps, steps of the
database at URL (postgresql://HOST/DATABASE, as for psql), and replaces the rows of these runs.

dashboard sends any finished record to a dashboard, as exporters=[tensorboard] does at the end of a run.  Settings are
those of conf/exporters/NAME.yaml, and --set KEY=VALUE changes one; those that the record names are not used.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.base.paths import shown, user_path
from bench.base.text_table import some
from bench.cli import arguments
from bench.record import named
from bench.record.exporters import dashboards, formats, postgres

POSTGRES = "postgres"
FORMS = ("csv", "parquet", "mllog", "modded-nanogpt", POSTGRES)


class Forms(tuple[str, ...]):
    """The values of --to: a form of a file, or dashboards separated by commas."""

    def __contains__(self, word: object) -> bool:
        return word in FORMS or all(name in dashboards.names() for name in str(word).split(","))


def main(argv: list[str]) -> int:
    """Exit codes: 0 written or exported, 1 some export to a dashboard failed, 2 usage error."""
    args = _parser().parse_args(argv)
    forms = args.to.split(",")
    if len(forms) > 1 or args.to not in FORMS:
        return _to_dashboards(forms, args)
    if args.set or args.json:
        option = f"--set {args.set[0]}" if args.set else "--json"
        raise ValueError(f"{option} with --to {args.to}: it is for {', '.join(dashboards.names())}: omit it")
    if args.to == POSTGRES:
        return _to_postgres(args)
    folders = named.runs(args.run)
    out = args.out and user_path(args.out)
    if args.steps and args.to not in ("csv", "parquet"):
        raise ValueError(f"--steps with --to {args.to}: it is for csv, parquet and postgres: omit it")
    if args.to == "parquet":
        if out is None:
            raise ValueError("--to parquet: the format is binary: name a file with --out FILE.parquet")
        formats.write_parquet(formats.rows_of(folders, args.steps), out)
        print(shown(out))
    elif out is None:
        sys.stdout.write(_text(args.to, folders, args.steps))
    else:
        atomic.write_out(out, _text(args.to, folders, args.steps))
        print(shown(out))
    return 0


def _text(form: str, folders: Sequence[Path], with_steps: bool) -> str:
    if form == "csv":
        return formats.as_csv(formats.rows_of(folders, with_steps))
    if form == "mllog":
        return "".join(formats.export_each(folders, formats.mllog))
    if len(folders) != 1:
        raise ValueError(f"--to modded-nanogpt: a log holds one run, and {len(folders)} are named: name one")
    return formats.export_each(folders, formats.modded_nanogpt_log)[0]


def _to_postgres(args: argparse.Namespace) -> int:
    if not args.out:
        raise ValueError("--to postgres: name the database with --out postgresql://HOST/DATABASE")
    folders = named.runs(args.run)
    steps = formats.rows_of(folders, with_steps=True) if args.steps else None
    exported, left_out = postgres.export(args.out, named.store_of(args.run), steps)
    print(exported)
    if left_out:
        named.report_excluded("export", f"{some(left_out)}: PostgreSQL has no columns with such names")
    return 0


def _to_dashboards(names: Sequence[str], args: argparse.Namespace) -> int:
    for name in names:
        if sentence := dashboards.missing(name):
            raise ValueError(f"--to {name}: {sentence}")
    if args.steps or args.out:
        option = "--steps" if args.steps else f"--out {args.out}"
        raise ValueError(f"{option} with --to {args.to}: it is for {', '.join(FORMS)}: omit it")
    done = []
    for folder in named.runs(args.run):
        for name in names:
            export = _export(dashboards.read(folder), name, args.set)
            done.append(export)
            facts = f"{name}: {', '.join(f'{key} {value}' for key, value in (export['facts'] or {}).items())}"
            if not args.json:
                outcome = f"no export to {name}: {export['error']}" if export["error"] else facts
                print(f"{export['run_id']}: {outcome}", flush=True)
    if args.json:
        print(json.dumps(done, indent=1))
    return 0 if all(export["error"] is None for export in done) else 1


def _export(exported: dashboards.Exported, name: str, changes: Sequence[str]) -> dict[str, Any]:
    """Returns what --json prints for a run and an exporter."""
    export = {"run_id": exported.run["run_id"], "exporter": name}
    settings = dashboards.settings_of(name, changes)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # exporters' packages may print anything
            facts = dashboards.EXPORT[name](exported, settings)
    except ValueError:
        raise
    except Exception as error:  # exporters' packages may raise anything
        return export | {"error": f"{type(error).__name__}: {error}", "facts": None}
    return export | {"error": None, "facts": facts}


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh export", main=main)
    parser.add_argument("run", nargs="+", metavar="RUN", help="run folders, run ids, races, or folders of runs")
    names = f"{', '.join(FORMS)}; or dashboards, commas between: {', '.join(dashboards.names())}"
    forms = Forms((*FORMS, *dashboards.names()))
    parser.add_argument("--to", required=True, metavar="FORM", choices=forms, help=names)
    parser.flag("--steps", help="csv, parquet: one line per step instead of per run; postgres: the table steps as well")
    parser.add_argument("--out", metavar="PATH", help="the file to write, or for postgres the URL of the database")
    set_help = "a setting of the dashboard's exporter, e.g. project=mine"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=set_help)
    parser.flag("--json", help="for dashboards: run_id, exporter, error and facts of each")
    return parser
