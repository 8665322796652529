"""Judges a record's pull request, as a page for a maintainer to paste into its thread.  ./run.sh pr FOLDER

The logs of the pull request are grouped by the code that they embed.  The baseline is the group whose folder or file
name says so, or whose code is that of an earlier record.  The rules are the track's (track.rules.pull_request), each
answered by the check of the same name in bench/claims/rules/pull_requests.py.
"""

import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from bench.base import stats
from bench.base.text_table import counted, some
from bench.claims.rules import pull_requests
from bench.claims.rules.pull_requests import FAIL, NOT_SHOWN, PASS, READER, Answer, Log, PullRequest, Side
from bench.compare import eligibility, target, wording
from bench.record import clock_lines
from bench.record.importers.modded_nanogpt import SCRIPT
from bench.record.rows import Row, row_of
from bench.report import verdicts
from bench.web.document import Block, Bullets, Document, Lines, Section, Table, Verdict, code

BASELINE = re.compile(r"baseline|master|(?:^|[-_/.])(?:base|main|prior|old|control|comparison)(?:$|[-_/.\d])", re.I)
OWN = re.compile(r"this|candidate|(?:^|[-_/])(?:ours|pr|new|record)(?:$|[-_/.\d])", re.I)
MAX_LINES, MAX_N = 12, 100
BY_SOURCE = {"streams", "flags"}  # rules that hold by the source
SHORT = {"streams": "data pipelines", "flags": "compile flags", "diff_size": "readability"}  # names in a verdict


# ---- which logs belong to which side


def sides_of(
    logs: Sequence[Log],
    known_names: Mapping[str, str],
    own_keys: Collection[str],
    wants: Callable[[Row], bool],
    candidate: str,
    base: str,
) -> tuple[Side, list[Side], list[Side], str]:
    """Groups logs: (candidate, baselines with the likeliest first, other sides, sentence about rival candidates or "").

    known_names: {code_key: name of an earlier record}.  own_keys: code keys of the pull request's script.  wants:
    whether a row has the track's hardware.  candidate, base: names of sides or globs of paths, or "".  Raises
    ValueError if there is no candidate, or nothing matches a name or a glob.
    """
    kinds, groups = [_kind_of(log) for log in logs], dict[_Kind, list[Log]]()
    folders, names = [kind.folder for kind in dict.fromkeys(kinds)], dict[_Kind, str]()
    for log, kind in zip(logs, kinds, strict=True):
        stem = PurePath(log.path).stem if folders.count(kind.folder) > 1 else ""
        names.setdefault(kind, "/".join(part for part in (kind.folder, stem) if part not in ("", ".")) or "logs")
        fits = (glob for glob in (candidate, base) if glob and (glob == names[kind] or PurePath(log.path).match(glob)))
        groups.setdefault(next(map(_Kind, fits), kind), []).append(log)
    sides = {}
    for kind, group in groups.items():
        once = eligibility.index_of_runs([row_of(log.record) for log in group])
        name = kind.given or names[kind]
        sides[kind] = Side(name, [group[number] for number in once], known_names.get(group[0].code_key, ""))
    for glob in filter(None, (candidate, base)):
        if _Kind(glob) not in sides:
            raise ValueError(f"{glob}: no complete log of the pull request fits it: give a glob such as 'this_pr/*'")

    def likeliness(kind: _Kind) -> dict[str, Any]:
        """Returns {reason to be the candidate: value, larger if likelier}, the weightiest reason first."""
        parts = re.split(r"(\d+)", sides[kind].name)
        return {
            "its hardware": wants(sides[kind].rows[0]),
            "the code of the pull request's script": kind.code_key in own_keys,
            "its name": any(OWN.search(log.path) for log in sides[kind].logs),
            "its number of runs": len(sides[kind].logs),
            "nothing but the order of the names": [(int(p), "") if p.isdecimal() else (-1, p) for p in parts],
        }

    bases = [kind for kind in sides if not kind.given and (kind.is_base or sides[kind].known_as)]
    own = [kind for kind in sides if kind not in bases and kind.given != (base or None)]
    if not own and (base or any(kind.is_base for kind in bases)):  # a record's code, submitted once more
        own, bases = [kind for kind in bases if not kind.is_base], [kind for kind in bases if kind.is_base]
    if not own:
        reasons = [f"{side.name} has the code of {side.known_as}" for side in sides.values() if side.known_as]
        reasons += [f"{side.name} is named like one" for side in sides.values() if not side.known_as]
        why = f"every log is a baseline's ({some(reasons, 4)})"
        raise ValueError(f"{why}: --candidate GLOB names the pull request's own")
    own.sort(key=lambda kind: list(likeliness(kind).values()), reverse=True)
    chosen = _Kind(candidate) if candidate else own[0]
    same = [kind for kind, side in sides.items() if kind != chosen and _is_same(side, sides[chosen])]
    # bad runs, perhaps, of which only the folder says otherwise
    moved = [sides.pop(kind) for kind in same if not (base or candidate)]
    sides[chosen].logs.extend(log for side in moved for log in side.logs)
    own, bases = ([kind for kind in kinds if kind in sides] for kinds in (own, bases))
    rivals = [shlex.join(["--candidate", sides[kind].name]) for kind in own[1:]]
    choice = f"{sides[chosen].name} has the code of record {sides[chosen].known_as}." if sides[chosen].known_as else ""
    if rivals and not candidate:
        pairs = zip(likeliness(own[0]).items(), likeliness(own[1]).values(), strict=True)
        why = next((reason for (reason, value), other in pairs if value != other), "")
        choice = f"{len(own)} groups of logs could be the candidate: {sides[chosen].name} was chosen by {why}, and "
        choice += f"{some(rivals, 6, ' or ')} judges another."
    if moved:
        as_base = [side.name for side in moved]
        choice += f" {some(as_base)} has the candidate's code: its runs are counted as such"
        choice += f"; --baseline {as_base[0]} takes them for a baseline's."
    device = sides[chosen].rows[0]["device"]
    bases = [_Kind(base)] if base else [kind for kind in bases if kind.device == device]
    named = {kind: "baseline" in sides[kind].name.lower() for kind in bases}
    bases.sort(key=lambda kind: (not sides[kind].known_as, -kind.steps, not named[kind], -len(sides[kind].logs)))
    others = [side for kind, side in sides.items() if kind != chosen and kind not in bases]
    return sides[chosen], [sides[kind] for kind in bases], others, choice


def _is_same(side: Side, other: Side) -> bool:
    """Whether two sides have one code, on such GPUs and with that torch."""
    about = [(each.logs[0].code_key, each.rows[0]["device"], each.rows[0]["torch"]) for each in (side, other)]
    return about[0] == about[1] and bool(side.logs[0].code_key)


class _Kind(NamedTuple):
    """The facts that the logs of one side share."""

    given: str  # the user's name or glob, or ""
    folder: str = ""
    is_base: bool = False  # named like a baseline
    code_key: str = ""
    device: str | None = None
    steps: int = 0


def _kind_of(log: Log) -> _Kind:
    device, steps = row_of(log.record)["device"], (log.record["imported"] or {}).get("declared_steps") or 0
    folder, is_base = str(PurePath(log.path).parent), bool(BASELINE.search(log.path))
    return _Kind("", folder, is_base, log.code_key, device, steps)


# ---- the page


def document_of(pull: PullRequest) -> Document:
    """Returns the page: verdict, rules, what is missing, numbers, runs, statements outside the clock, source."""
    rules = pull.track.rules.pull_request
    answers = {name: pull_requests.CHECKS[name](pull) for name in rules}
    if answers.get("systems_waiver", (FAIL, ""))[0] == READER:  # the rule may be waived
        answers["mean_loss"] = (READER, answers["mean_loss"][1])
    if answers.get("mean_loss", ("", ""))[0] == NOT_SHOWN:
        answers.pop("systems_waiver", None)
    for name in BY_SOURCE & answers.keys() if _unproven(pull) else ():
        if answers[name][0] == PASS:
            answers[name] = READER, f"{answers[name][1]}, if the logs are of this source"
    blocks: list[Block] = [
        Table(("rule", "answer", "evidence"), [[rules[name], *answer] for name, answer in answers.items()]),
        Section("Missing, and what supplies it", [Bullets(missing(pull, answers))]),
        *([verdicts.numbers(pull.compared["arms"][0], {pull.candidate.name: pull.compared})] if pull.compared else []),
        Section("Runs", [_runs(pull), Lines(_notes(pull), is_soft=True)]),
        Section("Outside the clock, by the source", outside(pull)),
        _source(pull),
    ]
    data = {
        "candidate": pull.candidate.name,
        "choice": pull.choice or None,
        "script": pull.candidate.script or None,
        "baseline": pull.baseline and pull.baseline.name,
        "answers": {name: list(answer) for name, answer in answers.items()},
        "judge": pull.judged,
        "compared": pull.compared,
    }
    return Document(f"{pull.name}: judged from its logs", [_verdict(pull, answers)], blocks, data)


def _verdict(pull: PullRequest, answers: Mapping[str, Answer]) -> Verdict:
    names: dict[str, list[str]] = {PASS: [], FAIL: [], NOT_SHOWN: [], READER: []}
    for name, (mark, _) in answers.items():
        names[mark].append(SHORT.get(name, name.replace("_", " ")))
    subject = f"{counted(len(pull.candidate.logs), 'run')} of {pull.candidate.name}"
    time = (pull.compared or {}).get("time") or {}
    if pull.baseline and time.get("change_pct") is not None:
        gain, is_more = pull_requests.gain_of(pull), pull_requests.gain_of(pull).startswith("-")
        way = ("faster than", "slower than") if pull.is_same_pr else ("below", "above")
        subject += f", {gain.removeprefix('-')} {way[is_more]} {pull.baseline.name}"
    options = some([shlex.join(["--script", script]) for script in pull.scripts], 6, " or ")
    about = f"The logs of {pull.candidate.name} embed no code, and {len(pull.scripts)} scripts lie beside them"
    which = f"{about}: {options} names the one that made them." if pull.scripts else ""
    notes = [sentence for sentence in (pull.choice, which, _unproven(pull)) if sentence]
    if time.get("drift_pct") and time["ci95_pct"]:
        notes.append(f"The runs were not interleaved: {time['drift_pct']:.2g} % is added to the interval of time.")
    if names[FAIL]:
        return Verdict(f"{subject}: not met: {', '.join(names[FAIL])}", "refused", notes=notes)
    if names[NOT_SHOWN]:
        return Verdict(f"{subject}: not shown: {', '.join(names[NOT_SHOWN])}", "not_shown", notes=notes)
    undecided = f"; a reader must decide: {', '.join(names[READER])}" if names[READER] else ""
    return Verdict(f"{subject}: the rules that logs can answer are met{undecided}", "meets_the_rules", notes=notes)


def _unproven(pull: PullRequest) -> str:
    """Returns a sentence about the scripts that were taken because they lie beside logs without code, or ""."""
    return " ".join(
        f"The logs of {side.name} embed no code, so its source is taken from {side.script} beside them: the logs do "
        "not prove that this script made them."
        for side in (pull.candidate, pull.baseline)
        if side and side.script
    )


def missing(pull: PullRequest, answers: Mapping[str, Answer]) -> list[str]:
    """Returns sentences on what would answer the open rules, with the commands for it."""
    remedies, command = [], f"./run.sh pr {pull.arguments}"
    if answers.get("same_hardware", (PASS,))[0] != PASS or ((pull.compared or {}).get("time") or {}).get("drift_pct"):
        remedies.append(f"an interleaved race of both on one node: {command} --rerun FOLDER")
    if answers.get("mean_loss", (PASS,))[0] in (NOT_SHOWN, READER) and answers.get("systems_waiver", ("",))[0] != PASS:
        losses, goal = pull.candidate.losses, pull_requests.goal_of(pull)
        needed = needed_runs(losses, goal, pull.track.p_value)
        supply = f"about {needed} runs of this mean and spread: {command} --rerun FOLDER -- n={needed}"
        is_above = goal is not None and stats.mean(losses) >= goal
        no_supply = "the mean is above the target" if is_above else f"{MAX_N} runs of this spread would not show it"
        remedies.append(f"p < {pull.track.p_value:g} of the mean val_loss: {supply if needed else no_supply}")
    failed = [f'"{rule["rule"]}" does not hold: {rule["evidence"]}' for rule in pull.judged if rule["passed"] is False]
    remedies += [f"judge would refuse it: {pull_requests.shortly(why) if len(why) > 300 else why}" for why in failed]
    if not pull.candidate.logs[0].sources:
        have = "" if pull.candidate.sources or pull.scripts else "; until then --script FILE names it"
        remedies.append(f"the source, in the logs: let the script write itself there, as train_gpt.py does{have}")
    if pull.candidate.sources and pull.baseline and pull.baseline.sources:
        race = f"{command} --rerun FOLDER --go"
        remedies.append(f"what runs outside the clock, in seconds: {race}, then ./run.sh audit RACE --only clock")
    return remedies


def needed_runs(losses: Sequence[float], goal: float | None, p_value: float) -> int | None:
    """Returns how many runs of this mean and sd a t test needs, or None if none up to MAX_N are enough."""
    sd = stats.sd(losses)
    if goal is None or sd is None or (gap := goal - stats.mean(losses)) <= 0:
        return None
    sizes = range(max(2, len(losses) + 1), MAX_N + 1)
    return next((n for n in sizes if gap * math.sqrt(n) >= stats.student_t_quantile(1 - p_value, n - 1) * sd), None)


def outside(pull: PullRequest) -> list[Block]:
    """Returns the statements outside the clock that the baseline does not have there."""
    if pull.statements is None:
        return [Lines(["not known: the source of a side is not known, or keeps no clock of its own"], is_soft=True)]
    new = clock_lines.newly_untimed(*pull.statements)
    if not new:
        return [Lines(["nothing that the baseline does not do there as well"])]
    same: dict[tuple[bool, str, str, str], list[int]] = {}
    for line, was_timed in new:
        same.setdefault((not was_timed, line.phase, line.definition, line.text), []).append(line.number)
    rows = [
        [
            *(some(list(map(str, numbers)), 3), phase),
            "new or changed" if is_new else "MOVED out of the timed region",
            *(definition, code(pull_requests.shortly(text))),
        ]
        for (is_new, phase, definition, text), numbers in sorted(same.items(), key=lambda item: (item[0][0], item[1]))
    ]
    heads = ("line", "runs", "against the baseline", "in", "statement")
    moved = sum(not is_new for is_new, *_ in same)
    head = f"{counted(len(same), 'statement')} that the baseline does not have there; it has {moved} inside its clock"
    return [Lines([head]), Table(heads, rows, [True, False, False, False, False], "", MAX_LINES, " statements")]


def _runs(pull: PullRequest) -> Table:
    sides = [("this", pull.candidate)] + ([("baseline", pull.baseline)] if pull.baseline else [])
    sides += [("not judged", side) for side in pull.others] + [("baseline too", side) for side, _ in pull.controls]
    rows = []
    for role, side in sides:
        first, times = side.rows[0], [row["train_s"] for row in side.rows if row["train_s"] is not None]
        test = target.loss_test(side.losses, pull_requests.goal_of(pull), pull.track.p_value)
        seeds = [str(row["seed"]) for row in side.rows if row["seed"] is not None]
        environment = side.logs[0].record["environment"]
        rows.append(
            [
                *(role, side.name, str(len(side.logs)), str(first["num_steps"] or "")),
                f"{stats.mean(times):.2f}" if times else None,
                *(f"{test['mean']:.5f}" if test["mean"] is not None else None, wording.p_text(test["p"])),
                some(seeds, 3) if seeds else "not printed",
                *(first["device"], environment.get("torch"), side.logs[0].code_key[:8]),
            ]
        )
    heads = ("", "logs", "n", "steps", "mean train, s", "mean val_loss", "p", "seeds", "GPUs", "torch", "code")
    return Table(heads, rows, [False, False, True, True, True, True, True, False, False, False, False])


def _notes(pull: PullRequest) -> list[str]:
    passed = [rule["passed"] for rule in pull.judged]
    unknown = f"{passed.count(None)} are not known from logs or do not apply"
    notes = [f"judge: {passed.count(True)} rules hold, {passed.count(False)} fail, {unknown}"]
    if pull.num_incomplete:
        notes.append(f"{counted(pull.num_incomplete, 'log')} without a complete run, in no number")
    if pull.script_differs:
        differing = counted(pull.script_differs, "line")
        notes.append(f"the pull request's script differs from the one that its logs embed by {differing}")
    if pull.baseline and not pull.baseline.known_as and pull.num_earlier:
        notes.append(f"the baseline's code is in the logs of none of the {pull.num_earlier} records before")
    return notes


def _source(pull: PullRequest) -> Section:
    rows = [[name, f"+{added}", f"-{removed}"] for name, (added, removed) in pull_requests.changes_of(pull).items()]
    own, theirs = pull.statements or ([], [])
    unchanged = {(line.definition, line.text) for line in theirs}
    changed = sorted({line.definition for line in own if (line.definition, line.text) not in unchanged} - {""})
    touched = [Lines([f"changed in {SCRIPT}: {some(changed, 20)}"])] if changed else []
    shown: list[Block] = [Table(("file", "added", "removed"), rows, [False, True, True]), *touched] if rows else []
    return Section("Source, against the baseline's", shown)
