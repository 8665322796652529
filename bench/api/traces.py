"""Explains and analyses traces: speedrun.explain() and speedrun.trace()."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bench.analysis.explain import account
from bench.analysis.explain import document as explain_document
from bench.analysis.explain.explained import Options, explain_paths, explain_record, first_traced, has_trace
from bench.analysis.projection import document
from bench.analysis.projection.projected import Scaling
from bench.analysis.trace import analysis, categories, load
from bench.api import plotting
from bench.api.answers import Answer
from bench.api.tables import Named, names_for
from bench.base import stats
from bench.base.paths import user_path
from bench.base.text_table import some
from bench.base.units import ms_from_s
from bench.compare import selection
from bench.record import named, race_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Job = tuple[str, list[Path]]  # a title, and trace files or folders


class Account(Answer):
    """Where a step's time goes: parts that add up to the measured step, and the largest possible savings."""

    @property
    def step_ms(self) -> float:
        """The step's milliseconds.  Raises ValueError for a difference or several windows: use to_dict()."""
        return float(self._account["step_ms"])

    @property
    def parts(self) -> list[dict[str, Any]]:
        """A dict for each part, {"part": ..., "ms": ..., ...}; the parts add up to step_ms.  Raises as step_ms."""
        return list(self._account["parts"])

    @property
    def _account(self) -> dict[str, Any]:
        if not isinstance(self._data, dict) or "step_ms" not in self._data:
            raise ValueError(f"{self._document.title}: it is not the account of one step: read to_dict()")
        return self._data

    def plot(self) -> "Figure":
        """Plot the parts of the step, or how they differ between two, as bars.  Needs matplotlib."""
        if isinstance(self._data, dict) and "change_ms" in self._data:
            changes = [(row["part"], row["change_ms"]) for row in self._data["parts"]]
            return plotting.bars("What changed in a step", changes, "ms per step, B - A")
        return plotting.bars("Where the step goes", [(line["part"], line["ms"]) for line in self.parts], "ms per step")


def explain(
    *what: Named,
    rules: Sequence[categories.Rule] = categories.RULES,
    include_last_step: bool = False,
    passport: str | Path | None = None,
    annotated: str | Path | None = None,
    captured: Sequence[str | Path] = (),
) -> Account:
    """Explain why a step takes so long, from a run or traces, or what changed between two: ./run.sh explain.

    what: runs, Kineto traces (files of the ranks of one job) or folders of them; of a race of two arms, or of two arms,
    RACE:A and RACE:B, the first run of each that has a trace.  rules, include_last_step: as of trace().  passport: a
    file of measured limits; None: that kept for the run's machine.  annotated: a folder in which to write the traces
    again with the account as tracks; None: nowhere.  captured: traces of the captures of CUDA graphs, which say what
    the graphs' kernels are.
    Raises ValueError if there is nothing to explain.
    """
    names = _arms_of_race(names_for("explain", what))
    machine = user_path(passport) if passport else None
    annotated = user_path(annotated) if annotated else None
    chosen = _jobs_to_explain(names)
    options = Options(tuple(rules), include_last_step, machine, tuple(map(user_path, captured)))
    if len(chosen) == 2:
        if annotated:
            raise ValueError("--perfetto annotates the traces of one job: name one run, or the traces of one run")
        (a_title, a), (b_title, b) = (_side(job, chosen, options) for job in chosen)
        difference = account.difference(a, b) | {"race_step_ms": _race_step_ms(names)}
        return Account(explain_document.from_differences({f"{a_title} -> {b_title}": difference}))
    accounts: dict[str, dict[str, Any]] = {}
    for title, paths in chosen:
        accounts |= explain_paths(title, paths, options, annotated)
    return Account(explain_document.from_accounts(accounts))


def _arms_of_race(names: list[str]) -> list[str]:
    """Returns RACE:A and RACE:B, the baseline first, for a race of two arms, else the names."""
    meant = named.find(names) if len(names) == 1 else []
    if len(meant) == 1 and meant[0].race and not meant[0].arm:
        race = race_folder.read(meant[0].race)
        arms = [f"{names[0]}:{arm}" for arm in sorted(race["arms"], key=lambda arm: arm != race.get("baseline"))]
        if len(arms) > 2:
            raise ValueError(f"{names[0]}: it has {len(arms)} arms: name two of them, {arms[0]} {arms[1]}")
        return arms
    return names


def _jobs_to_explain(names: list[str]) -> list[Job]:
    """Returns jobs(), except that two names are A and B if one is an arm of a race, or both are files of one rank."""
    if len(names) == 2 and any(named.find([name])[0].arm for name in names):
        return [job for name in names for job in _jobs_of_side(name)]
    found = jobs(names)
    if len(names) == 2 and len(found) == 1 and len(found[0][1]) == 2:
        files = found[0][1]
        if all(path.is_file() for path in files) and not load.are_of_one_job(files):
            return [(name, [path]) for name, path in zip(names, files)]
    return found


def _jobs_of_side(name: str) -> list[Job]:
    """Returns, for an arm of a race, its first run with a trace, else jobs().  Raises ValueError if no run has one."""
    match = named.find([name])[0]
    if not match.arm or not match.race:
        return jobs([name])
    (arm,) = selection.arm_from_each([name])
    folder = first_traced([*arm.warm_ups, *filter(None, arm.folders)])
    if folder is None:
        shows = f"`./run.sh compare {match.race.name} --why` shows where the time went"
        raise ValueError(f"{name}: no run of this arm has a profiled step: race again with look=on; {shows}")
    return [(name, [folder])]


def _race_step_ms(names: Sequence[str]) -> list[float] | None:
    """Returns the mean time of a step in two arms of one race, or None if they are not that or lack times."""
    meant = [named.find([name])[0] for name in names]
    if len(meant) != 2 or not all(match.arm for match in meant) or meant[0].race != meant[1].race:
        return None
    arms = [selection.arm_from_each([name])[0] for name in names]
    timed = [[(row["train_s"], row["num_steps"]) for row in arm.rows] for arm in arms]
    times_ms = [[ms_from_s(train_s) / steps for train_s, steps in arm if train_s and steps] for arm in timed]
    return [stats.mean(arm_ms) for arm_ms in times_ms] if all(times_ms) else None


def _side(job: Job, of: Sequence[Job], options: Options) -> tuple[str, dict[str, Any]]:
    """Returns a side's title and account: of its first window, or of a run's record if the other has no trace."""
    title, paths = job
    is_run = len(paths) == 1 and (paths[0] / "run.json").is_file()
    if is_run and not all(has_trace(files) for _, files in of):
        return title, explain_record(paths[0], options.passport)
    return next(iter(explain_paths(title, paths, options).items()))


class Trace(Answer):
    """The analysis of traces; for several, to_dict() returns {name: analysis}."""

    @classmethod
    def of(cls, reports: Mapping[str, dict[str, Any]]) -> Self:
        from bench.report import trace_page

        return cls(trace_page.document(reports), next(iter(reports.values())) if len(reports) == 1 else dict(reports))


def trace(*paths: Named, rules: Sequence[categories.Rule] = categories.RULES, include_last_step: bool = False) -> Trace:
    """Analyze Kineto traces of any PyTorch program: ./run.sh analyze.  Writes nothing.

    paths: runs, trace files (the ranks of one job), folders of them.  rules: categories of kernels, the first that fits
    counts.  include_last_step: count the last ProfilerStep too, whose kernels may be cut off.
    Raises ValueError if there is no trace.
    """
    reports: dict[str, dict[str, Any]] = {}
    for title, job in jobs(names_for("trace", paths)):
        reports |= titled(title, analyses(job, rules, include_last_step))
    return Trace.of(reports)


def analyses(
    paths: Iterable[Path], rules: Sequence[categories.Rule], include_last_step: bool
) -> dict[str | None, dict[str, Any]]:
    """Returns {window: analysis} of the traces of one job; a single window is None."""
    files = [file for path in paths for file in load.find(path)]
    return analysis.analyze_files(files, tuple(rules), include_last_step)


def titled(title: str, windows: Mapping[str | None, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns {title: analysis}; if there are several windows, titles include the window."""
    return {title + (f", window {name}" if len(windows) > 1 else ""): facts for name, facts in windows.items()}


def jobs(names: Iterable[str]) -> list[Job]:
    """Groups traces: all files are ranks of one job, each folder is a job.  Raises ValueError for an unknown name."""
    files: list[tuple[str, Path]] = []
    folders: list[tuple[str, Path]] = []
    for name in names:
        paths = named.find([name])[0].holders
        files += [(name, path) for path in paths if path.is_file()]
        folders += [(name if len(paths) == 1 else path.name, path) for path in paths if not path.is_file()]
    grouped = [files] * bool(files) + [[folder] for folder in folders]
    return [(some(list(dict.fromkeys(name for name, _ in job))), [path for _, path in job]) for job in grouped]


class Projection(Answer):
    """The projected time of a step on more GPUs than were measured, with an interval if one was ever checked."""

    @property
    def step_ms(self) -> float:
        """The projected milliseconds of a step."""
        return float(self.to_dict()["step_ms"])

    @property
    def interval_ms(self) -> tuple[float, float] | None:
        """The interval of step_ms, (low, high) in ms; None if no similar projection was ever checked."""
        facts: dict[str, Any] = self.to_dict()
        return (facts["low_ms"], facts["high_ms"]) if facts["checked"] else None


def project(
    *what: Named,
    gpus: int,
    nodes: int = 1,
    link: str | None = None,
    scaling: Scaling | None = None,
    usd_per_gpu_hour: float | None = None,
) -> Projection:
    """Project a step of a run, or of the traces of the ranks of one job, to gpus GPUs on nodes nodes in total.

    link: nvlink4, "nvlink4,ib400" with several nodes, another name of ./run.sh project --help, or a file with tables of
    nccl-tests or a passport; None: nvlink4 for GPUs.  scaling: "strong" keeps the batch (the default for runs), "weak"
    keeps each GPU's work (for traces).  usd_per_gpu_hour: also project the cost of a run; None: no cost.
    Raises ValueError, with the reason, if nothing can be projected.
    """
    found = jobs(names_for("project", what))
    if len(found) != 1:
        raise ValueError(f"{len(found)} jobs: name one run, or the traces of the ranks of one job")
    ((title, paths),) = found
    is_run = len(paths) == 1 and (paths[0] / "run.json").is_file()
    if is_run:
        return Projection(document.from_run(paths[0], gpus, nodes, link, scaling or "strong", usd_per_gpu_hour))
    if usd_per_gpu_hour is not None:
        raise ValueError("--usd-per-gpu-hour: a trace does not say how many steps there are to pay for; name the run")
    if scaling == "strong":
        raise ValueError("--scaling strong: a trace does not say which work is divided; project the run's record")
    return Projection(document.from_traces(title, paths, gpus, nodes, link or document.LINK))
