"""./run.sh dashboard RUN ... --to tensorboard,wandb,mlflow      finished runs into dashboards of other programs

With exporters=[tensorboard] a run is exported as soon as its record is complete; this does the same for any record.
Settings are those of the run, else those of conf/exporters/NAME.yaml; --set KEY=VALUE changes one.
"""

import argparse
import importlib

from bench.cli import arguments
from bench.exporters import dashboards, reading
from bench.record import named


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
    outcomes = [_export(reading.read(folder), name, args.set) for folder in named.runs(args.run) for name in names]
    return 0 if all(outcomes) else 1


def _export(exported, name, changes):
    """Whether it succeeded."""
    settings = dashboards.settings_of(exported.run, name, changes)
    try:
        facts = importlib.import_module(f"bench.exporters.{name}").export(exported, settings)
    except ValueError:
        raise
    except Exception as error:  # their packages raise what they like
        dashboards.note(exported.folder, name, f"{type(error).__name__}: {error}")
        print(f"{exported.run['run_id']}: no export to {name}: {type(error).__name__}: {error}")
        return False
    dashboards.note(exported.folder, name, **facts)
    print(f"{exported.run['run_id']}: {name}: {', '.join(f'{key} {value}' for key, value in facts.items())}")
    return True


def _parser():
    parser = arguments.Parser(
        prog="./run.sh dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="run, race or folder of many; (part of) an id will do")
    parser.add_argument("--to", required=True, metavar="NAMES", help=", ".join(dashboards.names()))
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the exporter, e.g. project=mine"
    )
    return parser
