"""Finds the commit that made it worse: git bisect, with a race against the good commit as its test.

Each commit that git picks races the good one. Its change, with its 95 % interval, is compared with half of the change
from the good to the bad commit: an interval above that is bad, one below it is good, one that contains it is raced
again with twice the runs, and then skipped. A commit whose raced code is that of the good or the bad one is not raced.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compare import wording
from bench.machine import git
from bench.plans.race import worktrees
from bench.record import race_folder

MEASURES = {  # {value of --on: (part of a verdict, its change, its 95 % interval)}; the loss is the goal's metric
    "step_avg_ms": ("time", "change_pct", "ci95_pct"),
    "val_loss": ("val_loss", "change", "ci95"),
}
GOOD, BAD, UNDECIDED = "good", "bad", "skip"  # the words of git bisect
FIRST_BAD = "is the first bad commit"


@dataclass(frozen=True)
class Change:
    """The change from the good commit to another one; larger is worse.  Printed, it has the sign of the metric."""

    value: float
    low: float
    high: float
    unit: str
    race_id: str | None = None
    sign: int = 1  # -1 for a metric of which higher is better

    def __str__(self) -> str:
        digits = 2 if self.unit == "%" else 4
        low, high = sorted((self.sign * self.low, self.sign * self.high))
        return f"{self.sign * self.value:+.{digits}f} {self.unit} [{low:+.{digits}f}, {high:+.{digits}f}]"


def change_of(race: Mapping[str, Any], measure: str) -> Change | None:
    """Returns how much worse B is than A by race.json; None if the two could not be compared."""
    part, change, interval = MEASURES[measure]
    comparison = race_folder.verdicts_of(race).get("B") or {}
    numbers: dict[str, Any] = comparison.get(part) or {}
    if numbers.get(interval) is None or (part == "time" and not comparison.get("comparable")):
        return None
    metric = wording.metric_of(numbers) if part == "val_loss" else None
    sign, unit = (metric.sign, metric.unit or metric.name) if metric else (1, "%")
    low, high = sorted(sign * edge for edge in numbers[interval])
    return Change(sign * numbers[change], low, high, unit, race.get("race_id"), sign)


def answer(change: Change | None, threshold: float) -> str:
    """Returns GOOD, BAD or UNDECIDED for a commit's change against the good one."""
    if change is None or change.low <= threshold <= change.high:
        return UNDECIDED
    return BAD if change.low > threshold else GOOD


@dataclass(frozen=True)
class Ended:
    """The outcome of a search."""

    commits: list[str]  # the first bad commit; several if undecided ones lie between
    outcome_by_commit: dict[str, str]  # {commit: GOOD, BAD or UNDECIDED} of every commit that was tested


def check_order(repo: Path, good: str, bad: str) -> None:
    """Raises ValueError if good is not an ancestor of bad."""
    if git.ask(repo, "merge-base", "--is-ancestor", good, bad) is None:
        raise ValueError(f"{good[:12]} is not an ancestor of {bad[:12]}: name an older commit that was good")


def search(repo: Path, good: str, bad: str, ask: Callable[[str], str]) -> Ended:
    """Bisects by ask(commit), which returns GOOD, BAD or UNDECIDED, until one commit, or only undecided ones, remain.

    It runs in a worktree with its own git bisect: the user's checkout, and a bisect of theirs, stay as they are.
    """
    answers: dict[str, str] = {}
    name = worktrees.mark_of_process(repo)
    with worktrees.checked_out(repo, {name: bad}, "bisect-") as paths:
        folder = paths[name]
        try:
            output = git.run(folder, "bisect", "start", "--no-checkout", bad, good)
            while FIRST_BAD not in output:
                commit = (git.ask(folder, "rev-parse", "--verify", "--quiet", "BISECT_HEAD") or "").strip()
                if not commit or commit in answers:
                    break
                answers[commit] = ask(commit)
                try:
                    output = git.run(folder, "bisect", answers[commit])
                except git.Failed:  # only skipped commits are left: git ends with an error
                    break
            good_refs = git.run(folder, "for-each-ref", "--format=%(objectname)", "refs/bisect/good-*").split()
            remaining = git.run(folder, "rev-list", "refs/bisect/bad", "--not", *good_refs).split()
        finally:
            git.ask(folder, "bisect", "reset")
    return Ended(remaining, answers)


def subject(repo: Path, commit: str) -> str:
    """Returns the first line of a commit's message."""
    return git.run(repo, "log", "-1", "--format=%s", commit).strip()


def parent(repo: Path, commit: str) -> str | None:
    """Returns the commit's parent; None for the first commit."""
    before = git.ask(repo, "rev-parse", "--verify", "--quiet", f"{commit}^")
    return before.strip() if before else None
