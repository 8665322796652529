"""What a user names -> accounts: of its traces, else of its record; with the passport of the machine that made them."""

from collections.abc import Sequence
from pathlib import Path

from bench.analysis.explain import account, from_record, recorded
from bench.analysis.trace import categories, load
from bench.analysis.trace.source import NoTrace
from bench.machine.passport import figures, kept
from bench.record import run_folder


def of_paths(
    title: str,
    paths: Sequence[Path],
    rules: tuple[categories.Rule, ...] = categories.RULES,
    include_last_step: bool = False,
    passport: Path | None = None,
) -> dict[str, dict]:
    """Paths of one job -> {title: answer of account.of_ranks()}, one for each window of its traces.

    A run without a trace is explained by its record.  passport: a file, in place of the one that fits the run.
    Raises NoTrace, a ValueError: nothing was recorded.
    """
    run = paths[0] if len(paths) == 1 and (paths[0] / "run.json").is_file() else None
    try:
        files = [file for path in paths for file in load.find(path)]
    except NoTrace:
        if run is None:
            raise
        return {title: from_record.of(run, passport)}
    windows, answers = load.by_window(files), {}
    facts = run_folder.read(run) if run else None

    def measured_of(rank: int, device: str | None) -> figures.Ceilings | None:
        if passport is not None:
            return kept.of_file(passport, device)
        return kept.of_run(facts, rank) if facts else None

    for name, ranks in windows.items():
        if run:
            recorded.add(ranks, run)
        label = title + (f", window {name}" if len(windows) > 1 else "")
        answers[label] = account.of_ranks(ranks, rules, include_last_step, measured_of)
    return answers


def has_trace(paths: Sequence[Path]) -> bool:
    """Whether all of these have traces."""
    try:
        return all(load.find(path) for path in paths)
    except NoTrace:
        return False


def are_of_one_job(files: Sequence[Path]) -> bool:
    """Whether trace files say of themselves that they are different ranks."""
    ranks = [load.load(path).rank for path in files]
    return None not in ranks and len(set(ranks)) == len(ranks)
