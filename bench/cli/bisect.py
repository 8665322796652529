"""Which commit made it worse?  ./run.sh bisect GOOD BAD [--on step_avg_ms|val_loss] [n=5] [looks=3,5] [key=value]

GOOD and BAD are revisions.  First GOOD races BAD; if that shows BAD to be worse, git bisect picks commits between them,
and each races GOOD, as ./run.sh race does it: same seeds, one session, order planned.  A commit is bad when the 95 %
interval of its change lies above half of the change from GOOD to BAD, good when it lies below; else it is raced again
with twice the runs, and then skipped.  At the end the commit found races its parent.  The checkout stays as it is; the
races stay in results/races/.
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from bench.base.paths import REPO, results_root, user_path
from bench.base.text_table import counted
from bench.base.units import format_about_s
from bench.cli import arguments
from bench.launch import console, ready
from bench.launch.console import say
from bench.machine import git
from bench.machine.signals import Interrupted
from bench.plans.race import arm_process, plan, planning, runner, worktrees
from bench.plans.replay import bisect

DEFAULT_N = 5


def main(argv: list[str]) -> int:
    """Exit codes: 0 one commit was found, 1 several are left or BAD is not shown to be worse, 2 usage error, 75 the
    machine is busy: run it again later, or with --anyway."""
    args = _parser().parse_intermixed_args(argv)
    with console.output(args.quiet, args.json):
        try:
            outcome = _Search(args).run()
        except Interrupted as error:
            say("bisect", f"{error}; the next search starts from the beginning", always=True)
            return 1
    if args.json:
        print(json.dumps(outcome, indent=1))
    return 0 if len(outcome["commits"]) == 1 else 1


class _Search:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._root = plan.root_of_script(args.settings)  # the repository of a script
        self._repo = user_path(self._root or REPO)
        self._good, self._bad = (worktrees.commit_of(self._repo, rev) for rev in (args.good, args.bad))
        bisect.check_order(self._repo, self._good, self._bad)
        self._settings = [word for word in args.settings if not word.startswith("n=")]
        request = plan.parse_request(args.settings)
        if request["arms"]:
            raise ValueError("GOOD and the commits between are the arms: give settings for all, without A= and B=")
        self._n = request.get("n", DEFAULT_N)
        self._facts: dict[str, tuple[str, str]] = {}
        self._races: list[str] = []

    def run(self) -> dict[str, Any]:
        began_s = time.monotonic()
        whole = self._change(self._good, self._bad, self._n)
        self._race_s = time.monotonic() - began_s
        say("bisect", f"BAD against GOOD: {whole or 'cannot be compared'}", always=True)
        if whole is None or whole.low <= 0:
            remedy = f"more runs (n={2 * self._n}), or another pair"
            say("bisect", f"BAD is not shown to be worse than GOOD: {remedy}", always=True)
            return self._json(whole, [], {}, None)
        self._threshold = whole.value / 2
        self._say_most()
        ended = bisect.search(self._repo, self._good, self._bad, self._ask)
        effect = None
        if len(ended.commits) == 1:
            (commit,) = ended.commits
            if (before := bisect.parent(self._repo, commit)) is not None:
                is_raced = (self._known(before), self._known(commit)) == (bisect.GOOD, bisect.BAD)
                effect = whole if is_raced else self._change(before, commit, self._n)
            subject = bisect.subject(self._repo, commit)
            message = f"{commit[:12]} {subject}: {effect or 'cannot be compared'} against its parent"
            say("found", message, always=True)
            if effect is not None and effect.low <= 0:
                race = f"./run.sh race {commit[:12]}^ {commit[:12]} n={4 * self._n}"
                say("bisect", f"this race alone does not show it: confirm with {race} and your settings", always=True)
        else:
            for commit in ended.commits:
                say("left", f"{commit[:12]} {bisect.subject(self._repo, commit)}", always=True)
            say("bisect", "one of these: what lies between could not be decided; more runs (n=) may", always=True)
        return self._json(whole, ended.commits, ended.outcome_by_commit, effect)

    def _say_most(self) -> None:
        """Prints how many commits are raced at most: each race halves those that remain."""
        num = len(git.run(self._repo, "rev-list", f"{self._good}..{self._bad}").split())
        runs = f"{self._n} runs of each arm, or {2 * self._n} more if these do not decide"
        num_raced = math.ceil(math.log2(num))  # of the commits from GOOD to BAD, without GOOD
        most = counted(num_raced, "commit") if num_raced else "no further commit"
        least = f"; {format_about_s((num_raced + 1) * self._race_s)} or more" if num_raced else ""
        say("bisect", f"{counted(num - 1, 'commit')} between GOOD and BAD: about {most} to race, {runs}{least}")

    def _ask(self, commit: str) -> str:
        same = self._known(commit)
        if same:
            say("bisect", f"{commit[:12]} {same}: it trains by the code and settings of {same.upper()}", always=True)
            return same
        for n in (self._n, 2 * self._n):
            try:
                change = self._change(self._good, commit, n)
            except ValueError as error:
                say("bisect", f"{commit[:12]} skipped: {error}", always=True)
                return bisect.UNDECIDED
            mark = bisect.answer(change, self._threshold)
            if mark != bisect.UNDECIDED:
                break
            if n == self._n:
                threshold = f"{change.sign * self._threshold:+.2f} {change.unit}" if change else "the limit"
                decided = f"not shown above or below {threshold}"
                say("bisect", f"{commit[:12]}: {change}: {decided}; again, with {2 * n} runs of each arm")
        text = "skipped, undecided" if mark == bisect.UNDECIDED else mark
        subject = bisect.subject(self._repo, commit)
        say("bisect", f"{commit[:12]} {text}: {change or 'cannot be compared'}  {subject}", always=True)
        return mark

    def _known(self, commit: str) -> str | None:
        """Returns GOOD or BAD if the commit trains by the same code and settings; None if not, or if unknown."""
        with contextlib.suppress(ValueError):
            own = self._identity(commit)
            for mark, other in ((bisect.GOOD, self._good), (bisect.BAD, self._bad)):
                if own == self._identity(other):
                    return mark
        return None

    def _identity(self, commit: str) -> tuple[str, str]:
        if commit not in self._facts:
            overrides = [word for word in self._settings if word.partition("=")[0] not in plan.SETTINGS]
            if self._root:
                overrides += [f"script.root={self._root}", f"script.rev={commit}"]
                facts = arm_process.facts(REPO, overrides, results_root())
                self._facts[commit] = "", facts["source_sha256"]  # the config names the commit
                return self._facts[commit]
            with worktrees.checked_out(REPO, {worktrees.mark_of_process(REPO): commit}, "bisect-facts-") as paths:
                (path,) = paths.values()
                facts = arm_process.facts(path, overrides, results_root())
            self._facts[commit] = facts["config_id"], facts["source_sha256"]
        return self._facts[commit]

    def _change(self, a: str, b: str, n: int) -> bisect.Change | None:
        """Races B against A and returns B's change. Raises ValueError if one of them does not run."""
        race_arguments = [f"A.rev={a}", f"B.rev={b}", f"n={n}", *self._settings]
        results = results_root().absolute()
        folder = planning.begin(plan.parse_request(race_arguments), results, self._args.anyway)
        race = runner.go(folder, results, False, self._args.anyway, is_new=True)
        if race["status"] == "interrupted":
            raise Interrupted(race["why"])
        self._races.append(race["race_id"])
        return bisect.change_of(dict(race), self._args.on)

    def _json(
        self, whole: bisect.Change | None, commits: Sequence[str], outcome_by_commit: Any, effect: bisect.Change | None
    ) -> dict[str, Any]:
        changes = {"whole": whole and vars(whole), "effect": effect and vars(effect)}
        ends = {"on": self._args.on, "good": self._good, "bad": self._bad}
        return ends | changes | {"commits": commits, "asked": outcome_by_commit, "races": self._races}


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh bisect", main=main)
    parser.add_argument("good", metavar="GOOD", help="a revision that was good")
    parser.add_argument("bad", metavar="BAD", help="a later revision that is worse")
    settings_help = "settings of the runs, and n=, looks=, seed= of the races"
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help=settings_help)
    on_help = "what became worse; default %(default)s"
    parser.add_argument("--on", choices=tuple(bisect.MEASURES), default="step_avg_ms", help=on_help)
    parser.flag("--anyway", help=ready.ANYWAY)
    parser.forms("print the commit, its effect, what was asked and the races", says_more=True)
    return parser
