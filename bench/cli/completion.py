"""Completion of verbs, options, config groups and their choices.  source <(./run.sh completion bash)

Completes run.sh in a checkout, and speedrun where it is installed.  The choices are those at the time of printing.
"""

import argparse
import importlib
from typing import Any

from bench.base.paths import INSTALLED
from bench.cli import arguments
from bench.cli.main import CHECKOUT_VERBS, VERBS

OVERRIDING = ("run", "speedrun", "calibrate", "doctor")  # verbs whose arguments are Hydra overrides
# bash ends a word at "=", so that of model=gpt2 the part behind it is what is completed
BASH = """
_speedrun_overrides() {
  local word=${COMP_LINE:0:COMP_POINT}
  word=${word##* }
  if [[ $word == *=* ]]; then compgen -W "%s" -- "$word" | sed "s/^[^=]*=//"; else compgen -W "%s" -- "$word"; fi
}
"""


def main(argv: list[str]) -> int:
    """Exit codes: 0 printed, 2 usage error."""
    args = _parser().parse_args(argv)
    import shtab

    candidates = " ".join(_overrides())
    print(shtab.complete(_whole(shtab), shell=args.shell, preamble={"bash": BASH % (candidates, candidates)}))
    return 0


def _whole(shtab: Any) -> argparse.ArgumentParser:
    """One parser of all verbs, for shtab to read."""
    whole = argparse.ArgumentParser(prog="speedrun" if INSTALLED else "run.sh")
    whole.add_argument("--version", action="store_true", help="the version and its environment")
    verbs = whole.add_subparsers()
    overrides = {"bash": "_speedrun_overrides", "zsh": f"({' '.join(_overrides())})"}
    for verb, (module, about) in VERBS.items():
        parser = importlib.import_module(f"bench.cli.{module}")._parser()
        child = verbs.add_parser(verb, help=about, parents=[parser], add_help=False)
        actions: list[Any] = child._actions  # shtab reads an attribute that argparse has not
        for action in actions:
            if not action.option_strings and not action.choices:
                action.complete = overrides if verb in OVERRIDING else shtab.FILE
    for verb, about in ({} if INSTALLED else CHECKOUT_VERBS).items():
        verbs.add_parser(verb, help=about)
    return whole


def _overrides() -> list[str]:
    from bench.config import groups

    return [f"{group}={choice}" for group in groups.GROUPS for choice in groups.choices(group)]


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh completion", main=main)
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser
