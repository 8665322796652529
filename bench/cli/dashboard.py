"""./run.sh dashboard RUN ... --to tensorboard,wandb,mlflow      finished runs into other people's dashboards

Chosen as instruments (instruments=[regions,tensorboard]) a race is exported as soon as its record is complete; this does the
same for any record.  Settings are those of the run, else those of conf/instruments/NAME.yaml; KEY=VALUE changes one.
"""

import argparse
import importlib

import yaml

from bench import paths
from bench.exporters import reading
from bench.exporters.dashboards import PACKAGES, note, require
from bench.record import named

CONF = paths.CONF / "instruments"


def main(argv):
    """Exit codes: 0 exported, 1 some export failed, 2 wrong use."""
    args = _parser().parse_args(argv)
    names = args.to.split(",")
    for name in names:
        if name not in PACKAGES:
            raise ValueError(f"--to {name}: choose from {', '.join(PACKAGES)}")
        try:
            require(name)
        except ImportError as error:
            raise ValueError(f"--to {name}: {error}") from None
    ended_well = True
    for folder in named.runs(args.run):
        exported = reading.read(folder)
        for name in names:
            ended_well &= _export(exported, name, args.set)
    return 0 if ended_well else 1


def _export(exported, name, changes):
    settings = settings_of(exported.run, name, changes)
    try:
        facts = importlib.import_module(f"bench.exporters.{name}").export(exported, settings)
    except ValueError:
        raise
    except Exception as error:  # their packages raise what they like
        note(exported.folder, name, f"{type(error).__name__}: {error}")
        print(f"{exported.run['run_id']}: no export to {name}: {type(error).__name__}: {error}")
        return False
    note(exported.folder, name, **facts)
    print(f"{exported.run['run_id']}: {name}: {', '.join(f'{key} {value}' for key, value in facts.items())}")
    return True


def settings_of(run, name, changes=()):
    """Settings of an exporter: its yaml's, the run's own, and KEY=VALUE words.  ValueError for a key that it has not."""
    settings = yaml.safe_load((CONF / f"{name}.yaml").read_text())[name] | ((run["instruments"] or {}).get(name) or {})
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or key not in settings:
            raise ValueError(f"--set {change}: {name} has {', '.join(settings) or 'no settings'}; write KEY=VALUE")
        settings[key] = yaml.safe_load(value)
    return settings


def _parser():
    parser = argparse.ArgumentParser(
        prog="./run.sh dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run folder, part of a run id, or a folder of many")
    parser.add_argument("--to", required=True, metavar="NAMES", help=", ".join(PACKAGES))
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the exporter, e.g. project=mine"
    )
    return parser
