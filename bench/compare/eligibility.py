"""May these two groups of runs be compared at all?  Rows in (bench/record/rows.py), reasons and marks out.

What is known to differ is refused; what is unknown, as in imported logs, is marked and never taken for equal.
"""

from collections.abc import Sequence
from typing import NamedTuple

from bench.base import stats
from bench.base.terminal.text_table import counted, some
from bench.compare import order, settings
from bench.record.rows import Row

SESSION_GAP_S = 12 * 3600.0  # arms that lie further apart were not raced in one session (assumed)
BESIDE = '"beside":'  # in a row's setting
OF_SCRIPTS = "script"  # the source of data that a script brought itself, which no record describes
CHANGE_LOSSES = ("train_data", "world_size", "torch", "cuda", "gpus")  # by more than rounding: the first two


class Answer(NamedTuple):
    refusals: list  # sentences; with none of them the times may be compared
    remarks: list  # sentences: what is unknown
    flags: list  # words
    loss_refusals: list  # of the refusals those that losses are not compared for either
    loss_remarks: list  # sentences: what differs and may change losses


def is_timed(row: Row) -> bool:
    """Whether the run has a time that may count."""
    return row["status"] == "complete" and row["validity"] != "invalid" and (row["train_s"] or 0) > 0


def judge(a_rows: Sequence[Row], b_rows: Sequence[Row], names: Sequence[str] = ("A", "B")) -> Answer:
    """Rows of all started runs of both arms -> Answer.  names: what the sentences call the arms."""
    a, b = [row for row in a_rows if is_timed(row)], [row for row in b_rows if is_timed(row)]
    refusals, remarks, flags, of_losses, loss_remarks = answer = Answer([], [], [], [], [])
    for name, timed, rows in zip(names, (a, b), (a_rows, b_rows), strict=True):
        if not timed:
            refusals.append(f"{name} has no complete run with a time among {len(rows)}")
    if refusals:
        return answer._replace(loss_refusals=refusals)
    kinds = {"refusal": [refusals, of_losses], "of time": [refusals], "remark": [remarks], "flag": [flags]}
    kinds["of losses"] = [loss_remarks]
    for rule in (_arms, _code, _disturbed, _validated, _trusted, _setting, _session, _finish_line):
        for kind, word in rule(a, b, names):
            for words in kinds[kind]:
                words.append(word)
    if min(len(a), len(b)) > 1:  # one run a side has no order to speak of, and no verdict
        flags += {None: ["order-unknown"], False: ["order-confounded"], True: []}[order.are_interleaved(a, b)]
    return answer._replace(flags=list(dict.fromkeys(flags)))


def _arms(a, b, names):
    """An arm is repeats of one config, and no run is in both."""
    both = {identity(row) for row in a} & {identity(row) for row in b}
    if both:
        first = min(row["run_id"] for row in a if identity(row) in both)
        yield "refusal", f"{counted(len(both), 'run')} in both arms: {first}"
    for name, rows in zip(names, (a, b), strict=True):
        configs = _known(row["config_id"] for row in rows)
        if len(configs) > 1:
            yield "refusal", f"{name} mixes {len(configs)} configs ({_some(configs)}): an arm is repeats of one config"
    if any(row["num_deviations"] for row in a + b):
        yield "flag", "open-division"


def _code(a, b, names):
    """Hashes of one identity version say whether the code that is raced is the same; hashes of two say nothing."""
    for name, rows in zip(names, (a, b), strict=True):
        by_version = {}
        for row in rows:
            if row["source_sha256"] is not None:
                by_version.setdefault(row["identity_version"], set()).add(row["source_sha256"])
        if len(set().union(*by_version.values())) > 1:
            yield "flag", "mixed-code"
        if any(len(sources) > 1 for sources in by_version.values()):
            yield "remark", f"{name} mixes runs of different code"
    versions = _known(row["identity_version"] for row in a + b)
    if len(versions) > 1:
        words = f"the code was identified in {len(versions)} ways (identity versions {_some(versions)})"
        yield "remark", f"{words}: whether it is the same is unknown"


def identity(row: Row) -> str:
    """What makes two rows one run: its id, or for a log its content, because logs are copied under other names."""
    return row["log_id"] or row["run_id"]


def index_of_runs(rows: Sequence[Row]) -> list[int]:
    """Indices of rows, in order, each run once: of several files of one run the one that knows most, or the first."""
    by_run = {}
    for number, row in enumerate(rows):
        by_run.setdefault(identity(row), []).append(number)

    def num_known(number):
        return sum(value is not None for value in rows[number].values()) - rows[number]["setting"].count("null")

    return sorted(numbers[0] if len(numbers) == 1 else max(numbers, key=num_known) for numbers in by_run.values())


def _disturbed(a, b, names):
    for name, rows in zip(names, (a, b), strict=True):
        flagged = [row for row in rows if row["num_disturbed_steps"]]
        if flagged:
            runs = f"{counted(len(flagged), 'run')} of {name}"
            words = "with steps that an instrument disturbed (profiler, memory history): their times do not count"
            yield "of time", f"{runs} {words}; race again without it"
        beside = [row for row in rows if BESIDE in row["setting"]]
        if beside:
            words = "ran beside others of their sweep: their times do not count"
            yield "of time", f"{counted(len(beside), 'run')} of {name} {words}; race them alone: ./run.sh race"


def _validated(a, b, names):
    """Where a program's clock runs on in validations, times say something if both arms validate equally often."""
    held = [sorted({(row["num_validating_steps"] or 0, row["num_steps"] or 1) for row in rows}) for rows in (a, b)]
    both = held[0] + held[1]
    if any(num for num, _ in both):
        nums = [some([f"{num} of {num_all}" for num, num_all in one]) for one in held]
        parts = " and ".join(f"{words} steps of {name}" for words, name in zip(nums, names, strict=True))
        words = f"times hold validations, for which the program's clock does not stop: {parts}"
        fracs = [num / num_all for num, num_all in both]
        if max(fracs) - min(fracs) > 1 / min(num_all for _, num_all in both):  # more than one validation at an end
            yield "of time", f"{words}: validate equally often"
        else:
            yield "remark", words


def _trusted(a, b, names):
    """What a script prints of itself is a claim: where what was observed contradicts it, it is not a measurement."""
    for name, rows in zip(names, (a, b), strict=True):
        doubted = [row["script_doubt"] for row in rows if row["script_doubt"]]
        if doubted:
            yield "refusal", f"{counted(len(doubted), 'run')} of {name} cannot be trusted: {doubted[0]}"


def _setting(a, b, names):
    """Hardware, software, protocol, data, world size: the facts behind comparability_id."""
    known = settings.of_rows(a + b)
    result = {
        key: f"{settings.differ([key])}: {settings.words(a, key)} in {names[0]}, {settings.words(b, key)} in {names[1]}"
        for key in settings.differing(a + b)
    }
    ids = _known(row["comparability_id"] for row in a + b)
    if len(ids) > 1 and not result:
        result = {None: f"comparability_id differs: {_some(ids)}"}
    if all(str(setting["timing_protocol"]).startswith("script-") for setting in known):
        own = [result.pop(key) for key in settings.OF_A_SCRIPT if key in result]
        yield from (("remark", f"{sentence}: part of what is raced") for sentence in own)
        yield from (("flag", "software-differs") for _ in own)
    yield from (("of time", sentence) for sentence in result.values())
    if of_losses := [key for key in CHANGE_LOSSES if key in result]:
        yield "of losses", f"{settings.differ(of_losses)}, which may change losses"
    if any(row["provenance"] == "imported" for row in a + b):
        yield "flag", "imported"
        asked = {key: name for key, name in settings.NAMES.items() if key in known[0]}
        if lacking := [name for key, name in asked.items() if any(one.get(key) is None for one in known)]:
            yield "remark", f"imported logs that do not say: {', '.join(lacking)}"
    if any(row["data"] == OF_SCRIPTS for row in a + b):
        yield "flag", "data-unknown"
        yield "remark", "the scripts brought data of their own: whether both read the same is not known"
    headlines = _known(row["headline"] for row in a + b)
    if headlines:
        yield "remark", f"the authors of some logs compare by {_some(headlines)}; here val_loss is compared"


def _session(a, b, names):
    sessions = _known(row["session_id"] for row in a + b)
    if len(sessions) > 1:
        words = f"{len(sessions)} sessions ({_some(sessions)}): the same code differs by up to 8 % between them"
        yield "of time", f"{words}; ./run.sh race measures both arms in one"
    if all(row["session_id"] is not None for row in a + b):
        return
    gap_s = order.gap_s(a, b)
    if gap_s is not None and gap_s > SESSION_GAP_S:
        apart = f"the arms lie {gap_s / 3600:.0f} hours apart"
        yield "of time", f"the session is unknown and {apart}: not raced in one session"
    else:
        yield "flag", "session-unknown"
        yield "remark", "the records do not say that both arms were raced in one session on one machine"


def _finish_line(a, b, names):
    """Run times mean something over the same steps of as many tokens, or over the way to the same target."""
    for column, of, unit in (("num_steps", "run", "steps"), ("batch_tokens", "step", "tokens")):
        amounts = [_known(row[column] for row in rows) for rows in (a, b)]
        if len(set.union(*amounts)) > 1:  # true of a run that has not begun, too
            ran = f"a {of} of {names[0]} is {_some(amounts[0])} {unit} and one of {names[1]} {_some(amounts[1])}"
            refusals = [("refusal", sentence) for sentence in _no_way_to_target((a, b), names, ran)]
            remark = f"{ran}: the times to the same target are compared, milliseconds a step are not"
            yield from refusals or [("flag", f"{unit}-differ"), ("remark", remark)]
            return


def _no_way_to_target(arms, names, ran):
    """Why runs of different amounts of training are not ways to one target: sentences."""
    both = [*arms[0], *arms[1]]
    (target, *others) = {row["target_val_loss"] for row in both}
    if others or target is None:
        why = "times over different amounts of training are not comparable"
        yield f"{ran}, and they have no common target: {why}"
        return
    if all(row["stop_at_target"] for row in both):
        if missed := [row["run_id"] for row in both if not row["target_reached"]]:
            yield f"{ran}, and {counted(len(missed), 'run')} did not reach the target {target:g}: {missed[0]}"
        return
    for name, rows in zip(names, arms, strict=True):
        steps = _known(row["num_steps"] for row in rows)
        if len(steps) > 1:
            yield f"{name} mixes runs of {_some(steps)} steps"
        losses = [row["val_loss"] for row in rows if row["val_loss"] is not None]
        if not losses or stats.mean(losses) > target:
            loss = f"{stats.mean(losses):.5f}" if losses else "unknown"
            yield f"{ran}, and {name}'s mean val_loss {loss} does not reach the target {target:g}"


def _known(values):
    return set(values) - {None}


def _some(values):
    return some(list(map(str, sorted(values))))
