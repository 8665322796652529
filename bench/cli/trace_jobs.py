"""What ./run.sh analyze and ./run.sh explain share: their options, and whose traces are read together."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.analysis.trace import categories
from bench.base.paths import of_user
from bench.cli import arguments
from bench.record import named


def jobs(words: Iterable[str]) -> list[tuple[list[str], list[Path]]]:
    """(words, paths) of each job: all files are the ranks of one, each folder is one.  ValueError: unknown word."""
    files, folders = [], []
    for word in words:
        for path in named.find([word])[0].holders:
            (files if path.is_file() else folders).append((word, path))
    result = [files] * bool(files) + [[one] for one in folders]
    return [(list(dict.fromkeys(word for word, _ in job)), [path for _, path in job]) for job in result]


def answers(args: argparse.Namespace, of_job: Callable[[str, list[Path], list], dict[str, dict]]) -> dict[str, dict]:
    """of_job(title, paths, rules) -> {title: answer} of each job, together; printed where --json wants it."""
    rules, result = categories.load_rules(of_user(args.rules)) if args.rules else categories.RULES, {}
    for words, paths in jobs(args.path):
        result |= of_job(", ".join(words), paths, rules)
    if args.json:
        print(json.dumps(result if len(result) > 1 else next(iter(result.values())), indent=1))
    return result


def parser(verb: str, main: Callable) -> arguments.Parser:
    made = arguments.Parser(f"./run.sh {verb}", main=main)
    made.add_argument("path", nargs="+", metavar="RUN|TRACE")
    made.add_argument("--json", action="store_true", help="print JSON, for programs")
    rules_help = "yaml list of {category, pattern}: your own kernels' categories, tried first"
    made.add_argument("--rules", metavar="FILE", help=rules_help)
    last_help = "count the last ProfilerStep too: its kernels may be cut off"
    made.add_argument("--include-last-step", action="store_true", help=last_help)
    return made
