"""Compares runs that exist: speedrun.compare()."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.api import plotting
from bench.api.answers import Answer
from bench.api.tables import Named, names_of
from bench.compare import comparison, selection
from bench.compare import verdict as compare_verdict
from bench.record import named
from bench.report import verdicts
from bench.web.document import Document

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")


class Comparison(Answer):
    """A comparison with A.  against: {candidate: its facts}; with several, the other properties raise ValueError."""

    def __init__(self, arms: Sequence[selection.Arm], compared: Sequence[tuple[str, compare_verdict.Comparison]]):
        self.arms = arms
        self.against = dict(compared)
        comparisons = [{"names": [arms[0].name, name]} | facts for name, facts in compared]
        self._options = verdicts.Options(patch=True, why=True)
        short = verdicts.document_of(arms, [*self.against.values()])
        super().__init__(short, comparisons[0] if len(comparisons) == 1 else comparisons)

    @property
    def verdict(self) -> str:
        """faster, slower, better, worse, equivalent, inconclusive, not_interleaved or not_comparable."""
        return only(self.against)["verdict"]

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        return only(self.against)["words"]

    @property
    def change_pct(self) -> float | None:
        """Change of the geometric mean of train_s in percent; negative means faster.  None if an arm has no time."""
        return only(self.against)["time"]["change_pct"]

    @property
    def ci95_pct(self) -> list[float] | None:
        """The 95 % interval of change_pct, [low, high]; None for too few runs."""
        return only(self.against)["time"]["ci95_pct"]

    @property
    def change_of_loss(self) -> float | None:
        """Change of the mean of the goal's metric, in its unit (val_loss: nats per token); None if an arm has none."""
        return only(self.against)["val_loss"]["change"]

    def plot(self) -> "Figure":
        """Plot the changes with their 95 % intervals, and the arms' curves.  Needs matplotlib."""
        names = [arm.name for arm in self.arms]
        return plotting.figure(self._page().charts, verdicts.panels(self.against, names))

    def _page(self) -> Document:
        return self.document(Path(), self._options)

    def document(self, at: Path | None = None, options: verdicts.Options = verdicts.SHORT) -> Document:
        """Return the answer with the parts in options.  at: the page's folder; None omits what only a page shows."""
        return verdicts.document_of(self.arms, [*self.against.values()], at, options)


def compare(
    *arms: Named,
    on: str | None = None,
    margin_nats: float | None = None,
    target_val_loss: float | None = None,
    force: bool = False,
    diagnose: bool = True,
    on_error: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare arms, the baseline first: is B faster, or better, than A?  A race alone stands for all its arms.

    Each arm is a name as ./run.sh compare takes it, a Run, Runs, or a list of these.
    on: the question, time, loss, time_to_target or steps_to_target; None: that of the race's plan, else time.
    margin_nats: the largest rise of the goal's metric that counts as not worse, in its unit.  target_val_loss: the
    target of that metric; None: the runs' own.  force: numbers, but no verdict, even if the arms are not comparable.
    diagnose: also find where the time went.  on_error(message): called for each record that is omitted; None: it is
    printed to standard error.  Raises ValueError if nothing can be compared, or a race has not ended.
    """
    check_nats("margin_nats", margin_nats)
    check_nats("target_val_loss", target_val_loss)
    report = on_error or (lambda message: named.report_excluded("compare", message))
    sides = [names_of(arm) for arm in arms]
    if not sides:
        raise ValueError("compare() has no arms: give two, the baseline first, or a race")
    arguments = [argument for side in sides for argument in (selection.SEPARATOR, *side)][1:]
    if all(len(side) == 1 for side in sides):
        arguments = [name for (name,) in sides]
    chosen = selection.arms_from_words(arguments, report)
    for arm in chosen:
        for race_id in selection.open_races(arm):  # interim looks must be recorded in the ledger
            raise ValueError(
                f"{arm.name}: holds runs of the race {race_id}, which has not ended: ./run.sh race --look {race_id} "
                f"shows them, and the ledger keeps the look; --abandon {race_id} ends it without a verdict"
            )
    options: dict[str, Any] = {"force": force, "target_val_loss": target_val_loss, "loss_margin_nats": margin_nats}
    options |= {"on": on} if on else {}
    compared = comparison.compare_arms(chosen, diagnose=diagnose, **options)
    for message in dict.fromkeys(message for arm in chosen for message in arm.damaged.values()):
        report(f"the steps of a run: {message}")
    return Comparison(chosen, compared)


def only(against: Mapping[str, T]) -> T:
    """Returns the facts of the only candidate.  Raises ValueError if there are several."""
    if len(against) > 1:
        raise ValueError(f"{len(against)} candidates, {', '.join(against)}: read .against[NAME], a dict for each")
    return next(iter(against.values()))


def check_nats(name: str, value: float | None) -> None:
    """Raises ValueError unless the value is None or a finite number of 0 or more, as losses and their margins are."""
    if value is not None and not 0 <= value < float("inf"):
        raise ValueError(f"{name} {value:g}: use a number of 0 or more")
