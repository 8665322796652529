"""Computes what users of a lab's queue have used and may use (queue/budgets.yaml), and whose turn it is."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from bench.base.reading import yaml_file
from bench.base.reading.damage import reading_record
from bench.config import typed
from bench.plans.queue import Entry, Outcome, Queue
from models.settings import NotNegative

LIMITS = ("gpu_hours", "usd")


@dataclass(kw_only=True)
class Limits:
    """What a user may spend in the days of Budgets; None: no limit."""

    gpu_hours: NotNegative | None = None
    usd: NotNegative | None = None


@dataclass(kw_only=True)
class Budgets(Limits):
    """The content of budgets.yaml: the limits of every user, and own limits of some."""

    days: NotNegative = 30.0
    users: dict[str, Limits] | None = None


def order(queue: Queue) -> list[Entry]:
    """Returns the waiting entries in the order of fair(), without those of users who have used up a budget.

    Raises ValueError if budgets.yaml is malformed.
    """
    had, limits = recent(queue), budgets(queue)
    within = [entry for entry in queue.waiting() if not over_budget(had, limits, entry.user)]
    return fair(within, queue.taken(), had)


def recent(queue: Queue) -> list[Outcome]:
    """Returns the outcomes of the last budgets().days days, and the usage so far of entries that agents have now."""
    since_s = datetime.now(UTC).timestamp() - 86400 * budgets(queue).days
    ended = [outcome for outcome in queue.outcomes() if outcome["ended_s"] > since_s]
    return [*ended, *map(queue.so_far, queue.taken())]


def budgets(queue: Queue) -> Budgets:
    """Returns the content of budgets.yaml. Raises ValueError if it is malformed."""
    path = queue.folder / "budgets.yaml"
    with reading_record(path):
        read = typed.build(Budgets, yaml_file.read(path) if path.exists() else {})
    read.users = {str(name): limits for name, limits in (read.users or {}).items()}  # a user without a name is a number
    return read


def fair(waiting: Iterable[Entry], taken: Iterable[Entry], recent: Iterable[Outcome]) -> list[Entry]:
    """Sorts entries by their users' GPUs in use, then by the GPU-hours that they have had; a user's own entries by age.

    A command without a GPU counts as one.
    """
    at_work, hours = Counter[str](), dict[str, float]()
    for entry in taken:
        at_work[entry.user] += max(1, entry.num_gpus)
    for outcome in recent:
        hours[outcome["user"]] = hours.get(outcome["user"], 0.0) + max(1, outcome["num_gpus"]) * outcome["hours"]
    return sorted(waiting, key=lambda outcome: (at_work[outcome.user], hours.get(outcome.user, 0.0), outcome.id))


def spent(outcomes: Iterable[Outcome], user: str) -> dict[str, float]:
    """Returns what a user has used, by the names of LIMITS; a lower bound if is_at_least()."""
    own = [outcome for outcome in outcomes if outcome["user"] == user]
    gpu_hours = sum(outcome["num_gpus"] * outcome["hours"] for outcome in own)
    return {"gpu_hours": gpu_hours, "usd": sum(outcome["usd"] or 0.0 for outcome in own)}


def is_at_least(outcomes: Iterable[Outcome], user: str) -> bool:
    """Returns whether a user may have used more than spent(): an agent was lost, or is still at work."""
    return any(outcome.get("at_least", False) for outcome in outcomes if outcome["user"] == user)


def over_budget(recent: Sequence[Outcome], budgets: Budgets, user: str) -> str | None:
    """Returns the budget that a user has used up, as a sentence; None if some is left, or there is none."""
    for name, used in spent(recent, user).items():
        own = getattr((budgets.users or {}).get(user), name, None)
        limit = getattr(budgets, name) if own is None else own
        if limit is not None and used >= limit:
            at_least = "at least " * is_at_least(recent, user)
            return f"{user} has used {at_least}{used:.4g} of {limit:g} {name} in {budgets.days:g} days"
    return None
