"""Send records to TensorBoard, Weights & Biases or MLflow.  ./run.sh dashboard RUN... --to NAME[,NAME...]

Any finished record can be sent, as exporters=[tensorboard] does at the end of a run.  Settings are those of
conf/exporters/NAME.yaml, and --set KEY=VALUE changes one; those that the record names are not used.
"""

import contextlib
import itertools
import json
import sys
from typing import Any

from bench.cli import arguments
from bench.record import named
from bench.record.exporters import dashboards


class Names(tuple[str, ...]):
    """The values of --to: names of dashboards, separated by commas."""

    def __contains__(self, value: object) -> bool:
        return set(str(value).split(",")) <= {*self}


def main(argv: list[str]) -> int:
    """Exit codes: 0 sent, 1 a dashboard could not be written, 2 usage error."""
    args = _parser().parse_args(argv)
    names = args.to.split(",")
    for name in names:
        if sentence := dashboards.missing(name):
            raise ValueError(f"--to {name}: {sentence}")
    settings = {name: dashboards.settings_of(name, args.set) for name in names}
    exports: list[dict[str, Any]] = []
    for folder, name in itertools.product(named.runs(args.run), names):
        exported, error, facts = dashboards.read(folder), None, None
        try:
            with contextlib.redirect_stdout(sys.stderr):  # exporters' packages may print anything
                facts = dashboards.EXPORT[name](exported, settings[name])
        except ValueError:
            raise
        except Exception as failed:  # exporters' packages may raise anything
            error = f"{type(failed).__name__}: {failed}"
        exports.append({"run_id": exported.run["run_id"], "exporter": name, "error": error, "facts": facts})
        if not args.json:
            details = ", ".join(f"{key} {value}" for key, value in (facts or {}).items())
            outcome = f"no export to {name}: {error}" if error else f"{name}: {details}"
            print(f"{exported.run['run_id']}: {outcome}", flush=True)
    if args.json:
        print(json.dumps(exports, indent=1))
    return 0 if all(export["error"] is None for export in exports) else 1


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh dashboard", main=main)
    parser.add_argument("run", nargs="+", metavar="RUN", help="run folders, run ids, races, or folders of runs")
    names = Names(dashboards.names())
    to_help = f"{', '.join(names)}; several with commas between"
    parser.add_argument("--to", required=True, metavar="NAME", choices=names, help=to_help)
    set_help = "a setting of the exporter, e.g. project=mine; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=set_help)
    parser.flag("--json", help="print run_id, exporter, error and facts of each")
    return parser
