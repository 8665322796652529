"""./run.sh dashboard RUN ... --to tensorboard,wandb,mlflow      finished runs into dashboards of other programs

With exporters=[tensorboard] a run is exported as soon as its record is complete; this does the same for any record.
Settings are those of the run, else those of conf/exporters/NAME.yaml; --set KEY=VALUE changes one.
"""

import contextlib
import json
import sys

from bench.cli import arguments
from bench.record import named
from bench.record.exporters import dashboards


def main(argv):
    """Exit codes: 0 exported, 1 some export failed, 2 wrong use."""
    args = _parser().parse_args(argv)
    names = args.to.split(",")
    for name in names:
        if name not in dashboards.names():
            near = arguments.guess(name, dashboards.names())
            raise ValueError(f"--to {name}: {near}choose from {', '.join(dashboards.names())}")
        if sentence := dashboards.missing(name):
            raise ValueError(f"--to {name}: {sentence}")
    done = []
    for folder in named.runs(args.run):
        for name in names:
            export = _export(dashboards.read(folder), name, args.set)
            done.append(export)
            facts = f"{name}: {', '.join(f'{key} {value}' for key, value in (export['facts'] or {}).items())}"
            if not args.json:
                words = f"no export to {name}: {export['error']}" if export["error"] else facts
                print(f"{export['run_id']}: {words}", flush=True)
    if args.json:
        print(json.dumps(done, indent=1))
    return 0 if all(export["error"] is None for export in done) else 1


def _export(exported, name, changes):
    """-> what --json prints of one run and one exporter."""
    of_run = {"run_id": exported.run["run_id"], "exporter": name}
    settings = dashboards.settings_of(exported.run, name, changes)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # their packages print what they like
            facts = dashboards.EXPORT[name](exported, settings)
    except ValueError:
        raise
    except Exception as error:  # their packages raise what they like
        words = f"{type(error).__name__}: {error}"
        dashboards.note(exported.folder, name, words)
        return of_run | {"error": words, "facts": None}
    dashboards.note(exported.folder, name, **facts)
    return of_run | {"error": None, "facts": facts}


def _parser():
    parser = arguments.Parser("./run.sh dashboard", main=main)
    parser.add_argument("run", nargs="+", metavar="RUN", help="run, race or folder of many; (part of) an id will do")
    parser.add_argument("--to", required=True, metavar="NAMES", help=", ".join(dashboards.names()))
    set_help = "a setting of the exporter, e.g. project=mine"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=set_help)
    parser.add_argument("--json", action="store_true", help="print run_id, exporter, error and facts of each as JSON")
    return parser
