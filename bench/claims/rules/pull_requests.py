"""The rules of a record's pull request: a check for each name in track.rules.pull_request, with answer and evidence.

The checks use what judge and compare found, and the statements of the embedded sources that differ from the baseline's.
What no log can answer is left to a reader.
"""

import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any, cast

from bench.base import stats
from bench.base.text_table import counted, some
from bench.claims.rules import rulebook, source_flags
from bench.compare import comparison, eligibility, target, wording
from bench.compare.selection import Arm
from bench.config import schema
from bench.record import clock_lines, validity
from bench.record.importers.modded_nanogpt import SCRIPT
from bench.record.rows import Row, row_of
from bench.record.shape import Record
from bench.record.step_files import StepRow

PASS, FAIL, NOT_SHOWN, READER = "pass", "FAIL", "not shown", "reader"  # READER: a person must answer
VOCAB_SIZE = 50257  # of GPT-2's tokens, the data of every track that has such rules
MAX_CHARS = 100  # longest statement that is shown in full
Answer = tuple[str, str]  # (PASS, FAIL, NOT_SHOWN or READER, evidence)


@dataclass
class Log:
    """A complete run in a log."""

    path: str  # relative to the pull request's folder
    record: Record
    steps: list[StepRow]
    sources: dict[str, str]  # {file: text} of the sources that it embeds
    code_key: str  # modded_nanogpt.code_key(), or "" if it embeds no source


@dataclass
class Side:
    """Logs of one code on one kind of machine, in one folder."""

    name: str
    logs: list[Log]
    known_as: str = ""  # the earlier record with the same code, or ""
    script: str = ""  # the script beside logs that embed no code, as a path; it is not proven to be theirs
    beside: dict[str, str] = field(default_factory=dict)  # its sources, as Log.sources

    @property
    def rows(self) -> list[Row]:
        return [row_of(log.record) for log in self.logs]

    @property
    def losses(self) -> list[float]:
        return [row["val_loss"] for row in self.rows if row["val_loss"] is not None]

    @property
    def sources(self) -> dict[str, str]:
        return self.logs[0].sources or self.beside

    @property
    def arm(self) -> Arm:
        records = {log.record["run_id"]: {**log.record, "steps": log.steps} for log in self.logs}
        return Arm(self.name, self.rows, [None] * len(self.logs), cast(dict[str, dict[str, Any]], records))


@dataclass
class PullRequest:
    """A record's pull request: its logs by side, and what judge and compare found."""

    name: str
    track: schema.TrackConfig
    candidate: Side
    baseline: Side | None
    is_same_pr: bool  # whether the pull request contains the baseline's logs
    others: list[Side] = field(default_factory=list)
    num_incomplete: int = 0  # logs without a complete run
    num_own_incomplete: int = 0  # those of them that embed the candidate's code
    num_earlier: int = 0  # earlier records whose code was read
    script_differs: int = 0  # lines in which the pull request's script differs from the one that its logs embed
    judged: list[rulebook.Result] = field(default_factory=list)
    compared: Mapping[str, Any] | None = None  # bench.compare.verdict.Comparison; None without a baseline
    controls: list[tuple[Side, Mapping[str, Any]]] = field(default_factory=list)  # comparisons with other baselines
    choice: str = ""  # which other logs could be the candidate, or ""
    scripts: list[str] = field(default_factory=list)  # several beside candidate's logs that embed no code
    arguments: str = ""  # of this call, for the commands that are proposed

    @functools.cached_property
    def statements(self) -> tuple[list[clock_lines.Line], list[clock_lines.Line]] | None:
        """The statements of both scripts; None if a source is unknown, not Python, or without a clock."""
        sides = (self.candidate, self.baseline) if self.baseline else ()
        lines = [clock_lines.lines_of(side.sources[SCRIPT]) if side.sources else None for side in sides]
        return (lines[0], lines[1]) if len(lines) == 2 and lines[0] and lines[1] else None


def streams(pull: PullRequest) -> Answer:
    """Checks that the statements that name the data pipeline are the baseline's."""
    if pull.statements is None:
        return READER, "the source of a side is not known, or keeps no clock of its own"
    patterns, (own, theirs) = pull.track.rules.data_names, pull.statements
    unchanged = {(line.definition, line.text) for line in theirs}
    new = [line for line in own if (line.definition, line.text) not in unchanged and _names_any(line, patterns)]
    gone = {(line.definition, line.text) for line in theirs if _names_any(line, patterns)}
    gone -= {(line.definition, line.text) for line in own}
    if not new and not gone:
        return PASS, f"no statement that names the data pipeline ({some(patterns, 3)}) differs from the baseline's"
    lines = [f"line {line.number}: {shortly(line.text)}" for line in new] or [shortly(text) for _, text in gone]
    num = counted(len(new) + len(gone), "statement")
    return READER, f"{num} that name the data pipeline differ: {some(lines, 3, '; ')}"


def mean_loss(pull: PullRequest) -> Answer:
    """Checks that the mean val_loss is below the target by the track's test, and the runs repeat one code."""
    results = {rule["rule"]: rule for rule in pull.judged}
    target_rule = results["the target is reached"]
    least = pull.track.rules.implausible_val_loss or -math.inf
    losses = pull.candidate.losses
    if any(loss < least for loss in losses):
        return FAIL, target_rule["evidence"]
    if (target.loss_test(losses, goal_of(pull), pull.track.p_value)["p"] or 0.0) > 1 - pull.track.p_value:
        return FAIL, f"mean val_loss {stats.mean(losses):.4f} (n={len(losses)}) is above the target {goal_of(pull):g}"
    starts_nats = _starts_nats(pull.candidate)
    if trained := [nats for nats in starts_nats if nats is not None and validity.is_trained(nats, VOCAB_SIZE)]:
        return FAIL, validity.start_doubt(min(trained), VOCAB_SIZE)
    is_unseen = None in starts_nats and pull.baseline is not None and None not in _starts_nats(pull.baseline)
    unseen = "; a log has no val_loss of step 0, which the baseline's have: was it trained before?" * is_unseen
    if pull.num_own_incomplete:
        unseen += f"; {counted(pull.num_own_incomplete, 'run')} of its code did not end, or not with a number: why?"
    ids = [run and run.losses_id for run in comparison.losses_of(pull.candidate.arm)]
    if (num := len(target.independent(pull.candidate.rows, ids))) < len(losses):
        unseen += f"; {len(losses)} runs count as {num}, as some have equal training losses: why?"
    code_key = pull.candidate.logs[0].code_key
    if apart := [side.name for side in pull.others if code_key and side.logs[0].code_key == code_key]:
        unseen += f"; {some(apart)} has its code too, on other GPUs or with another torch: why does it not count?"
    folder = PurePath(pull.candidate.logs[0].path).parent
    bare = [side for side in pull.others if code_key and not side.logs[0].code_key]
    if beside := [side.name for side in bare if PurePath(side.logs[0].path).parent == folder]:
        unseen += f"; {some(beside)}, in its folder, embeds no code: whose runs are these?"
    shares_code = results["the runs share config and code"]
    if target_rule["passed"] and shares_code["passed"] is False:
        return NOT_SHOWN, f"{target_rule['evidence']}; but the runs are no repeats: {shares_code['evidence']}"
    return ((READER if unseen else PASS) if target_rule["passed"] else NOT_SHOWN), target_rule["evidence"] + unseen


def _starts_nats(side: Side) -> list[float | None]:
    """Returns the val_loss of step 0 in each log, or None where it has none."""
    rows = [next(iter(log.steps), {"step": None}) for log in side.logs]
    return [row.get("val_loss") if row["step"] == 0 else None for row in rows]


def systems_waiver(pull: PullRequest) -> Answer:
    """Checks, if rule 2 is not shown, whether the waiver for changes to systems alone could apply."""
    mark, _ = mean_loss(pull)
    if mark != NOT_SHOWN:
        return (FAIL, "such losses are not waived") if mark == FAIL else (PASS, "not needed")
    loss, steps = (pull.compared or {}).get("val_loss") or {}, (pull.compared or {}).get("steps")
    if not loss.get("ci95") or not steps:
        return NOT_SHOWN, "there is no baseline whose losses and steps could be compared"
    if steps[0] != steps[1] or None in steps:
        return FAIL, f"{steps[1]} steps, the baseline {steps[0]}: the ML was touched"
    interval = wording.interval(loss["ci95"], 5, " nats")
    person = "a person must say that the change is of systems alone"
    if loss["ci95"][0] > 0:
        return FAIL, f"its losses are higher than the baseline's: {interval}"
    return READER, f"equal steps, and losses within {interval} of the baseline's: {person}"


def flags(pull: PullRequest) -> Answer:
    """Checks that no flag of inductor or torch.compile is set that neither the track allows nor the baseline sets.

    A source can set flags in more ways than can be read from it, so only a flag that is found decides.
    """
    allowed = pull.track.rules.compile_flags or ["*"]
    if "*" in allowed:
        return PASS, "the track allows all"
    if not pull.candidate.sources:
        return READER, "its logs embed no source"
    base = (source_flags.flags_of(pull.baseline.sources) if pull.baseline else None) or source_flags.Found({}, {})
    own = source_flags.flags_of(pull.candidate.sources)
    if own is None:
        return READER, "its source is not Python that this program can parse"
    not_allowed = {name: line for name, line in own.flags.items() if not any(fnmatchcase(name, a) for a in allowed)}
    if unexpected := [f"{name} (line {line})" for name, line in not_allowed.items() if name not in base.flags]:
        return FAIL, f"its source sets {some(unexpected, 4)}"
    kept = f"; {some(sorted(not_allowed), 3)} as the baseline does" if not_allowed else ""
    new = [f"{text[:MAX_CHARS]} (line {line})" for text, line in own.statements.items() if text not in base.statements]
    look = f"; not in the baseline: {some(new, 2, '; ')}" if new else ""
    return READER, f"no {'other ' * bool(own.flags)}flag is found in its source{kept}{look}; a rerun shows what is set"


def same_hardware(pull: PullRequest) -> Answer:
    """Checks that the candidate is faster than the baseline on the same node."""
    if pull.compared is None:
        return NOT_SHOWN, "there are no logs of a baseline"
    time = pull.compared["time"]
    if time["change_pct"] is None:
        means_s = _means_s(pull)
        printed = "{:.2f} s to {:.2f} s as printed".format(*means_s) if means_s else "no times"
        return NOT_SHOWN, f"{printed}, not comparable: {'; '.join(pull.compared['reasons'][:2])}"
    means = " to ".join(f"{mean_s:.2f} s" for mean_s in time["mean_s"])
    change = f"{means}, {time['change_pct']:+.2f} %"
    if not pull.is_same_pr:
        return NOT_SHOWN, f"the baseline's logs are not of this pull request, so maybe of another machine: {change}"
    own = _edges_pct(time)
    if own is None:
        return NOT_SHOWN, f"{change}: one run of a side has no spread"
    change += f" (95 % interval {wording.interval(own, 2, ' %')}, {wording.p_sentence(time['p'])})"
    faster, slower = _other_baselines(pull)
    which = "; the logs do not say which is the record before: --baseline GLOB names it"
    if own[0] > 0 and slower:
        return NOT_SHOWN, f"slower than {pull.compared['arms'][0]}, {change}, but faster than {some(slower)}{which}"
    if own[0] > 0:
        return FAIL, f"it is slower than its baseline: {change}"
    if own[1] >= 0:
        return NOT_SHOWN, change
    change += f", the code of {pull.baseline.known_as}" if pull.baseline and pull.baseline.known_as else ""
    if time["drift_pct"]:
        change += f"; not interleaved, and sessions alone differ by up to {time['drift_pct']:.2g} %"
    if faster:
        return READER, f"{change}; but slower than {some(faster)}{which}"
    hardware = next(rule for rule in pull.judged if rule["rule"] == "the hardware is that of the track")
    if hardware["passed"] is False:
        return READER, f"{change}; but {hardware['evidence'].partition(': ')[2].partition('; ')[0]}"
    return PASS, change


def _other_baselines(pull: PullRequest) -> tuple[list[str], list[str]]:
    """Returns (faster, slower) groups of as many steps that could be the baseline instead, whose code is new."""
    if pull.baseline is None or pull.baseline.known_as:
        return [], []
    steps = pull.baseline.rows[0]["num_steps"]
    rivals = [(side.name, other["time"]) for side, other in pull.controls if side.rows[0]["num_steps"] == steps]
    intervals = [(name, edges) for name, time in rivals if (edges := _edges_pct(time))]
    return [name for name, edges in intervals if edges[0] > 0], [name for name, edges in intervals if edges[1] < 0]


def _edges_pct(time: Mapping[str, Any]) -> list[float] | None:
    """Returns the 95 % interval of the change in time, without what sessions alone cause; None without a spread."""
    edges, drift_pct = time["ci95_pct"], time["drift_pct"] or 0.0
    return edges and [edges[0] + drift_pct, edges[1] - drift_pct]


def diff_size(pull: PullRequest) -> Answer:
    """Reports how many lines the change adds and removes."""
    changes = changes_of(pull)
    if not changes:
        return READER, "the source of a side is not known"
    added, removed = (sum(counts[number] for counts in changes.values()) for number in (0, 1))
    return READER, f"+{added} -{removed} lines for {gain_of(pull)}"


def loss_buffer(pull: PullRequest) -> Answer:
    """Reports how far the mean is below the target, and how much of that the change spends."""
    loss, goal = (pull.compared or {}).get("val_loss") or {}, goal_of(pull)
    mean = stats.mean(pull.candidate.losses)
    if goal is None:
        return PASS, "the track has no target"
    distance = f"{abs(goal - mean):.5f} nats {'below' if mean <= goal else 'ABOVE'} {goal:g}"
    if loss.get("change") is None:
        return READER, f"{distance}; what the baseline leaves is not known"
    spent, edges = loss["change"], loss["ci95"]
    baseline_nats = goal - loss["mean"][0]
    distance += f", the baseline {abs(baseline_nats):.5f} {'below' if baseline_nats >= 0 else 'ABOVE'}"
    text = f"{distance}: {'spends' if spent > 0 else 'gains'} {abs(spent):.5f}"
    for side, other in pull.controls:
        time_pct, nats = other["time"]["change_pct"], other["val_loss"]["change"]
        if time_pct is not None and nats is not None:
            text += f"; against {side.name} {time_pct:+.2f} % at {nats:+.5f} nats"
    is_spent = edges is not None and edges[0] > 0 and spent > pull.track.rules.loss_buffer_nats / 2
    return (READER if is_spent or mean > goal else PASS), text


CHECKS: dict[str, Callable[[PullRequest], Answer]] = {
    check.__name__: check
    for check in (streams, mean_loss, systems_waiver, flags, same_hardware, diff_size, loss_buffer)
}


def changes_of(pull: PullRequest) -> dict[str, tuple[int, int]]:
    """Returns changed_lines() from the baseline's source to the candidate's; {} if one is unknown."""
    return changed_lines(pull.baseline.sources if pull.baseline else {}, pull.candidate.sources)


def changed_lines(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Returns {file: (lines added, lines removed)} from sources a to b; {} if one side has none."""
    counts = {}
    for name in sorted(a.keys() | b.keys()) if a and b else ():
        lines = list(difflib.unified_diff(a.get(name, "").splitlines(), b.get(name, "").splitlines(), lineterm="", n=0))
        if lines:
            counts[name] = (sum(line[0] == "+" for line in lines[2:]), sum(line[0] == "-" for line in lines[2:]))
    return counts


def _names_any(line: clock_lines.Line, patterns: Sequence[str]) -> bool:
    names = {line.definition, *re.findall(r"\w+", line.text)}
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def shortly(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"


def goal_of(pull: PullRequest) -> float | None:
    return pull.candidate.rows[0]["target"]


def _means_s(pull: PullRequest) -> tuple[float, float] | None:
    """Returns the mean times of baseline and candidate as their logs print them, or None if one is unknown."""
    sides = [eligibility.times_s(side.rows) for side in (pull.baseline, pull.candidate) if side]
    return (stats.mean(sides[0]), stats.mean(sides[1])) if len(sides) == 2 and all(sides) else None


def gain_of(pull: PullRequest) -> str:
    means_s = _means_s(pull)
    return f"{means_s[0] - means_s[1]:.2f} s" if means_s else "an unknown gain"
