"""The harness from Python: `import speedrun`.  docs/reference/python.md has an example of each function.

    runs = speedrun.load("results/*/*-s?")                                # run folders, globs, parts of run ids
    speedrun.compare(runs[:4], runs[4:]).verdict                          # "faster"
    speedrun.project(runs[0], gpus=8).interval_ms                         # None: nothing like it was checked

Every answer prints as its command prints it, shows as a page in a notebook, and has to_dict(), to_markdown(),
to_html() and plot().  ValueError names a user's mistake and the remedy, as on the command line.

What is named here follows semantic versioning: it is removed or changed only with a new major version (before 1.0 a
minor one) and a line in the changelog.  Other modules may change in any version.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bench import __version__

if TYPE_CHECKING:
    from bench.api.answers import Answer
    from bench.api.comparing import Comparison, compare
    from bench.api.judging import Judgement, judge
    from bench.api.queries import sql
    from bench.api.racing import Race, race
    from bench.api.runs import Run, Runs, load
    from bench.api.tables import Table, table
    from bench.api.traces import Account, Projection, Trace, explain, project, trace

__all__ = [
    "Account", "Answer", "Comparison", "Judgement", "Projection", "Race", "Run", "Runs", "Table", "Trace",
    "__version__", "compare", "explain", "judge", "load", "project", "race", "sql", "table", "trace",
]  # fmt: skip
_MODULES = {  # {name: its module}, imported when the name is first used, as a command needs only one of them
    **dict.fromkeys(("Comparison", "compare"), "comparing"),
    **dict.fromkeys(("Judgement", "judge"), "judging"),
    **dict.fromkeys(("Race", "race"), "racing"),
    **dict.fromkeys(("Run", "Runs", "load"), "runs"),
    **dict.fromkeys(("Table", "table"), "tables"),
    **dict.fromkeys(("Account", "Projection", "Trace", "explain", "project", "trace"), "traces"),
    "Answer": "answers",
    "sql": "queries",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module speedrun has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"bench.api.{_MODULES[name]}"), name)
