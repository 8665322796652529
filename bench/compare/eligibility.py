"""Decides from the rows of two groups of runs (bench/record/rows.py) whether these may be compared.

Known differences are refused; what is unknown, as in imported logs, gets a flag and is never assumed to be equal.  A
row's setting holds what must agree for times to be comparable: hardware, software, data and timing protocol.
"""

import functools
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from bench.base import stats, utc
from bench.base.text_table import counted, some
from bench.record.rows import Row, metric_of
from bench.record.validity import BUSY

NOT_INTERLEAVED = {"order-unknown", "order-confounded", "runs-overlap"}  # flags that rule out a firm verdict
KEPT_BUSY = "other programs kept the machine busy"  # how the reason begins if they did so beside one arm
SESSION_GAP_S = 12 * 3600.0  # arms further apart were not raced in one session (assumed)
BESIDE, BROKEN = '"beside":', '"broken_time":'  # keys in the JSON of a row's setting
OF_SCRIPTS = "script"  # data source of a script that brings its own data, which no record describes
CHANGE_LOSSES = ("train_data", "world_size", "torch", "cuda", "gpus")  # the first two by more than rounding
MAX_SCORES_TIMES = 2  # most validations of a run with a budget against the other arm's: a faster one has some more
MAX_LUCKY = 1  # runs that have more, as on a machine that was slow once
MAX_EARLIER_FRAC = 0.15  # largest distance from 1/2 of the share of pairs in which A's run came first (assumed)
SETTINGS = {  # {setting that must agree for times to be comparable: its displayed name}
    "gpus": "GPUs",
    "power_limits_w": "power limits (W)",
    "cpu_model": "CPU",
    "num_cpus": "CPU cores",
    "num_threads": "threads a process",
    "driver": "driver",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "torch": "torch",
    "timing_protocol": "timing protocol",
    "timed_steps": "timed steps",
    "instruments": "instruments",
    "train_data": "training data",
    "val_data": "validation data",
    "world_size": "world size",
    "compile_flags": "flags of torch.compile",
    "beside": "runs at a time",
    "broken_time": "breaks of the clock",
}
SINGULAR = {"cpu_model", "driver", "cuda", "nccl", "torch", "timing_protocol", "world_size"}  # names with "differs"
OF_ANY = ("compile_flags",)  # settings that are part of what is raced; a track may forbid them
OF_A_SCRIPT = ("torch", "cuda", "nccl")  # a script chooses its interpreter, so these are part of what is raced


AMOUNTS: tuple[tuple[Literal["num_steps", "batch_tokens"], str, str], ...] = (  # (column, name, unit)
    ("num_steps", "steps", "steps"),
    ("batch_tokens", "tokens", "tokens per step"),
)
TIME_BUDGET = '"time_s"'  # in Row.budget
Rows = Sequence[Row]
Findings = Iterator[tuple[str, str]]  # (a key of judge()'s kinds, the sentence or flag) for each finding of a rule


class Answer(NamedTuple):
    refusals: list[str]  # sentences; if there are none, the times may be compared
    remarks: list[str]  # sentences about what is unknown
    flags: list[str]  # keys of bench/compare/wording.py FLAGS
    loss_refusals: list[str]  # those refusals that apply to losses too
    loss_remarks: list[str]  # sentences about differences that may change losses


def is_complete(row: Row) -> bool:
    """Returns whether the run completed and is not invalid, so that its loss may be compared."""
    return row["status"] == "complete" and row["validity"] != "invalid"


def is_timed(row: Row) -> bool:
    """Returns whether the run is complete and has a training time."""
    return is_complete(row) and (row["train_s"] or 0) > 0


def times_s(rows: Rows) -> list[float]:
    """Returns the training times in s of the runs that have one."""
    return [row["train_s"] for row in rows if row["train_s"] is not None]


def judge(a_rows: Rows, b_rows: Rows, names: Sequence[str] = ("A", "B"), on: str | None = None) -> Answer:
    """Judges the rows of all started runs of both arms.

    names: what the sentences call the arms; on: the question, a key of questions.QUESTIONS, None if it is not known.
    """
    a, b = [row for row in a_rows if is_timed(row)], [row for row in b_rows if is_timed(row)]
    refusals, remarks, flags, loss_refusals, loss_remarks = answer = Answer([], [], [], [], [])
    for name, timed, rows in zip(names, (a, b), (a_rows, b_rows), strict=True):
        if not timed:
            refusals.append(f"{name} has no complete run with a time among {len(rows)}")
    if refusals:
        return answer._replace(loss_refusals=refusals)
    kinds = {"refusal": [refusals, loss_refusals], "budget": [refusals], "remark": [remarks], "flag": [flags]}
    is_loss_of_time = any(TIME_BUDGET in (row.get("budget") or "") for row in a + b)  # it is what the time reaches
    kinds |= {"loss": [loss_remarks], "time": [refusals, *([loss_refusals] if is_loss_of_time else [])]}
    finish_line = functools.partial(_finish_line, on=on)
    for rule in (_arms, _code, _disturbed, _validated, _trusted, _setting, _session, finish_line):
        for kind, finding in rule(a, b, names):
            for findings in kinds[kind]:
                findings.append(finding)
    if min(len(a), len(b)) > 1:  # with one run a side there is no order to check, and no verdict
        flags += {None: ["order-unknown"], False: ["order-confounded"], True: []}[_are_interleaved(a, b)]
        flags += ["runs-overlap"] * ("session-unknown" in flags and _overlap(a, b))
    return answer._replace(flags=list(dict.fromkeys(flags)))


def _arms(a: list[Row], b: list[Row], names: Sequence[str]) -> Findings:
    """Checks that each arm consists of repeats of one config, and that no run is in both."""
    both = {identity(row) for row in a} & {identity(row) for row in b}
    if both:
        first = min(row["run_id"] for row in a if identity(row) in both)
        yield "refusal", f"{counted(len(both), 'run')} in both arms: {first}"
    for name, rows in zip(names, (a, b), strict=True):
        configs = _distinct(row["config_id"] for row in rows)
        if len(configs) > 1:
            yield "refusal", f"{name} mixes {len(configs)} configs ({_join(configs)}): an arm is repeats of one config"
    if any(row["num_deviations"] for row in a + b):
        yield "flag", "open-division"


def _code(a: list[Row], b: list[Row], names: Sequence[str]) -> Findings:
    """Checks that the code within an arm is the same; only hashes of one identity version can be compared."""
    for name, rows in zip(names, (a, b), strict=True):
        by_version: dict[int | None, set[str]] = {}
        for row in rows:
            if row["source_sha256"] is not None:
                by_version.setdefault(row["identity_version"], set()).add(row["source_sha256"])
        if len(set().union(*by_version.values())) > 1:
            yield "flag", "mixed-code"
        if any(len(sources) > 1 for sources in by_version.values()):
            yield "remark", f"{name} mixes runs of different code"
    versions = _distinct(row["identity_version"] for row in a + b)
    if len(versions) > 1:
        remark = f"the code was identified in {len(versions)} ways (identity versions {_join(versions)})"
        yield "remark", f"{remark}: whether it is the same is unknown"


def _disturbed(a: list[Row], b: list[Row], names: Sequence[str]) -> Findings:
    for name, rows in zip(names, (a, b), strict=True):
        causes = {
            "with steps that an instrument disturbed (profiler, memory history): {}; race again without it": [
                bool(row["num_disturbed_steps"]) for row in rows
            ],
            "ran beside others of their sweep: {}; race them alone: ./run.sh race": [
                BESIDE in row["setting"] for row in rows
            ],
            "trained in segments or with checkpoints in between: {}; race them without checkpoint.every_min": [
                BROKEN in row["setting"] for row in rows
            ],
        }
        for cause, holds in causes.items():
            if any(holds):
                yield "time", f"{counted(sum(holds), 'run')} of {name} {cause.format('their times do not count')}"
    busy = [[doubt for row in rows for doubt in row["machine_doubts"] if doubt.startswith(BUSY)] for rows in (a, b)]
    for arm, other in ((0, 1), (1, 0)):
        num, num_other, num_busy = len((a, b)[arm]), len((a, b)[other]), len(busy[arm])
        if num_busy > max(1, num - 2) and len(busy[other]) <= min(num_other // 2, num_other - 2):
            runs = f"{num_busy} of {num} runs of {names[arm]} and {len(busy[other])} of {num_other} of {names[other]}"
            why = f"{KEPT_BUSY} in {runs}: {max(busy[arm])}"
            again = "race again when they have ended" + ", with n=5 or more, of which some may be disturbed" * (num < 4)
            yield "time", f"{why}; load that is mostly beside one arm biases the race: {again}"


def _validated(a: list[Row], b: list[Row], names: Sequence[str]) -> Findings:
    """Checks that both arms validate equally often if the program's clock does not stop for validations."""
    held = [sorted({(row["num_validating_steps"] or 0, row["num_steps"] or 1) for row in rows}) for rows in (a, b)]
    both = held[0] + held[1]
    if any(num for num, _ in both):
        nums = [some([f"{num} of {num_all}" for num, num_all in pairs]) for pairs in held]
        parts = " and ".join(f"{steps} steps of {name}" for steps, name in zip(nums, names, strict=True))
        remark = f"times include validations, as the program's clock does not stop for them: {parts}"
        fracs = [num / num_all for num, num_all in both]
        if max(fracs) - min(fracs) > 1 / min(num_all for _, num_all in both):  # more than one validation at an end
            yield "time", f"{remark}: validate equally often"
        else:
            yield "remark", remark


def _trusted(a: list[Row], b: list[Row], names: Sequence[str]) -> Findings:
    """Refuses runs whose script printed times or losses that contradict what was observed."""
    for name, rows in zip(names, (a, b), strict=True):
        doubted = [row["script_doubt"] for row in rows if row["script_doubt"]]
        if doubted:
            yield "refusal", f"{counted(len(doubted), 'run')} of {name} cannot be trusted: {doubted[0]}"


def _setting(a: list[Row], b: list[Row], names: Sequence[str]) -> Findings:
    """Compares the facts behind comparability_id: hardware, software, protocol, data and world size."""
    settings = settings_of(a + b)
    differing = {
        key: f"{settings_differ([key])}: {setting_text(a, key)} in {names[0]}, {setting_text(b, key)} in {names[1]}"
        for key in differing_settings(a + b)
    }
    ids = _distinct(row["comparability_id"] for row in a + b)
    if len(ids) > 1 and not differing:
        differing = {"": f"comparability_id differs: {_join(ids)}"}
    yield from (("remark", f"{differing.pop(key)}: part of what is raced") for key in OF_ANY if key in differing)
    if all(str(setting["timing_protocol"]).startswith("script-") for setting in settings):
        own = [differing.pop(key) for key in OF_A_SCRIPT if key in differing]
        yield from (("remark", f"{sentence}: part of what is raced") for sentence in own)
        yield from (("flag", "software-differs") for _ in own)
    yield from (("time", sentence) for sentence in differing.values())
    if loss_settings := [key for key in CHANGE_LOSSES if key in differing]:
        yield "loss", f"{settings_differ(loss_settings)}, which may change losses"
    if any(row["provenance"] == "imported" for row in a + b):
        yield "flag", "imported"
        expected = {key: name for key, name in SETTINGS.items() if key in settings[0]}
        if lacking := [name for key, name in expected.items() if any(setting.get(key) is None for setting in settings)]:
            yield "remark", f"imported logs that do not say: {', '.join(lacking)}"
    if any(row["data"] == OF_SCRIPTS for row in a + b):
        yield "flag", "data-unknown"
        yield "remark", "the scripts brought data of their own: whether both read the same data is unknown"
    headlines = _distinct(row["headline"] for row in a + b)
    if headlines:
        compared = metric_of(a).name
        if headlines != {compared}:
            yield "remark", f"the authors of some logs compare by {_join(headlines)}; here {compared} is compared"


def _session(a: list[Row], b: list[Row], names: Sequence[str]) -> Findings:
    sessions = _distinct(row["session_id"] for row in a + b)
    if len(sessions) > 1:
        sentence = f"{len(sessions)} sessions ({_join(sessions)}): the same code differs by up to 8 % between them"
        yield "time", f"{sentence}; ./run.sh race measures both arms in one"
    if all(row["session_id"] is not None for row in a + b):
        return
    apart_s = _gap_s(a, b)
    if apart_s is not None and apart_s > SESSION_GAP_S:
        apart = f"the arms lie {apart_s / 3600:.0f} hours apart"
        yield "time", f"the session is unknown and {apart}: not raced in one session"
    else:
        yield "flag", "session-unknown"
        yield "remark", "the records do not say that both arms were raced in one session on one machine"


def _finish_line(a: list[Row], b: list[Row], names: Sequence[str], on: str | None) -> Findings:
    """Checks that run times cover equal steps of equally many tokens, or the way to the same target.

    Of losses at the end, the question "loss", only those after equal steps can be compared.
    """
    budgets = sorted({row.get("budget") or "" for row in a + b})
    if any(budgets):
        if len(budgets) > 1:
            yield "refusal", f"the budgets differ ({_join(budget or 'none' for budget in budgets)}): give all the same"
        else:
            yield "budget", f"all runs have a budget of {budgets[0]}: what they reach in it is compared (on=loss)"
        return
    for column, name, unit in AMOUNTS:
        amounts = [_distinct(row[column] for row in rows) for rows in (a, b)]
        if len(set.union(*amounts)) > 1:  # also used for runs that have not begun
            ran = f"{names[0]} takes {_join(amounts[0])} {unit} and {names[1]} {_join(amounts[1])}"
            refusals = [("refusal", sentence) for sentence in _no_way_to_target((a, b), names, ran)]
            if on == "loss":
                why = f"{ran}: losses after different amounts of training are not comparable"
                refusals = refusals or [("refusal", why)]
            remark = f"{ran}: times to the shared target are compared, not milliseconds per step"
            yield from refusals or [("flag", f"{name}-differ"), ("remark", remark)]
            return


def unequal_luck(a: Rows, b: Rows, names: Sequence[str]) -> Iterator[str]:
    """Yields why the best of each run's validations may differ by luck: one arm validates more often in its budget."""
    counts = [[num for row in rows if (num := row.get("num_scores"))] for rows in (a, b)]
    for name, nums, other, others in zip(names, counts, reversed(names), reversed(counts)):
        typical = statistics.median(others or [0])
        lucky = [num for num in nums if others and num > MAX_SCORES_TIMES * typical]
        if len(lucky) > (MAX_LUCKY if min(map(len, counts)) > 2 else 0):
            often = f"{counted(len(lucky), 'run')} of {name} validate up to {max(lucky)} times within the budget"
            why = "the best counts, and of more it is better by luck: validate alike"
            yield f"{often}, and {other} {typical:g} times: {why}"


def _no_way_to_target(arms: tuple[Rows, Rows], names: Sequence[str], ran: str) -> Iterator[str]:
    """Yields the reasons why runs of different lengths do not all lead to one target."""
    both = [*arms[0], *arms[1]]
    (target, *others), metric = {row["target"] for row in both}, metric_of(both)
    if others or target is None:
        why = "times over different amounts of training are not comparable"
        yield f"{ran}, and they have no shared target loss: {why}"
        return
    if all(row["stop_at_target"] for row in both):
        if missed := [row["run_id"] for row in both if not row["target_reached"]]:
            yield f"{ran}, and {counted(len(missed), 'run')} did not reach the target {target:g}: {missed[0]}"
        return
    for name, rows in zip(names, arms, strict=True):
        steps = _distinct(row["num_steps"] for row in rows)
        if len(steps) > 1:
            yield f"{name} mixes runs of {_join(steps)} steps"
        scores = [row["score"] for row in rows if row["score"] is not None]
        if not scores or not metric.reaches(stats.mean(scores), target):
            mean = f"{stats.mean(scores):.5f}" if scores else "unknown"
            yield f"{ran}, and {name}'s mean {metric.name} {mean} does not reach the target {target:g}"


def identity(row: Row) -> str:
    """Returns the id of a run, or the hash of a log's content, because logs are copied under other names."""
    return row["log_id"] or row["run_id"]


def index_of_runs(rows: Sequence[Row]) -> list[int]:
    """Returns the indices of the rows with each run once: the row with the most known values, or the first."""
    by_run: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        by_run.setdefault(identity(row), []).append(number)

    def num_known(number: int) -> int:
        return sum(value is not None for value in rows[number].values()) - rows[number]["setting"].count("null")

    return sorted(numbers[0] if len(numbers) == 1 else max(numbers, key=num_known) for numbers in by_run.values())


def settings_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the distinct settings among the rows, as bench/record/rows.py defines them."""
    return [json.loads(text) for text in sorted({row["setting"] for row in rows})]


def differing_settings(rows: Sequence[Row]) -> list[str]:
    """Returns the keys of SETTINGS that have two or more known values among the rows."""
    settings = settings_of(rows)
    distinct = {
        key: {json.dumps(setting[key]) for setting in settings if setting.get(key) is not None} for key in SETTINGS
    }
    return [key for key, values in distinct.items() if len(values) > 1]


def setting_text(rows: Sequence[Row], key: str) -> str:
    """Returns the rows' values of a setting as text."""
    shown = []
    for text in sorted({json.dumps(setting.get(key)) for setting in settings_of(rows)}):
        value = json.loads(text)
        if isinstance(value, dict):
            value = ", ".join(f"{name}={item}" for name, item in value.items()) or "none"
        elif isinstance(value, list):
            kinds = {str(item): value.count(item) for item in value}
            parts = [f"{num} x " * (num > 1) + (kind[:12] if len(kind) == 64 else kind) for kind, num in kinds.items()]
            value = ", ".join(parts) or "none"
        shown.append("unknown" if value is None else str(value))
    return " and ".join(shown)


def settings_differ(keys: Sequence[str]) -> str:
    """Returns "torch differs" or "torch and GPUs differ" for keys of SETTINGS."""
    verb = "differs" if len(keys) == 1 and keys[0] in SINGULAR else "differ"
    return f"{' and '.join(SETTINGS[key] for key in keys)} {verb}"


def _are_interleaved(a_rows: Rows, b_rows: Rows) -> bool | None:
    """Returns whether drift of the machine would affect both arms alike, or None if a start is unknown.

    In order of starts, the arm must change at least as often as the smaller arm has runs (A B B A A B: 3 times), and A
    must be first in about half of all pairs of an A and a B.  Strict alternation (A B A B ...), which is off by
    1 / (2 n), always passes.
    """
    starts = [(row["started_at"], arm) for arm, rows in (("A", a_rows), ("B", b_rows)) for row in rows]
    if any(started_at is None for started_at, _ in starts):
        return None
    arms = [arm for _, arm in sorted(starts)]
    num_changes = sum(arm != other for arm, other in zip(arms, arms[1:], strict=False))
    num_a_first, num_a = 0, 0
    for arm in arms:
        num_a += arm == "A"
        num_a_first += num_a if arm == "B" else 0
    earlier_frac = num_a_first / (len(a_rows) * len(b_rows))
    allowed_frac = max(MAX_EARLIER_FRAC, (1 / len(a_rows) + 1 / len(b_rows)) / 4)
    return num_changes >= min(len(a_rows), len(b_rows)) and abs(earlier_frac - 0.5) <= allowed_frac + 1e-9


def _overlap(a: Rows, b: Rows) -> bool:
    """Returns whether a run began before the previous one had ended, so that two machines ran them."""
    runs = sorted((utc.seconds(row["started_at"]), row["train_s"] or 0.0) for row in [*a, *b] if row["started_at"])
    return any(start_s + train_s > next_s for (start_s, train_s), (next_s, _) in itertools.pairwise(runs))


def _gap_s(a: Rows, b: Rows) -> float | None:
    """Returns the s from the earlier arm's last start to the later arm's first, or None if a start is unknown."""
    spans = []
    for rows in (a, b):
        starts = [row["started_at"] for row in rows]
        seconds = [utc.seconds(start) for start in starts if start is not None]
        if len(seconds) < len(starts):
            return None
        spans.append((min(seconds), max(seconds)))
    (first, second) = sorted(spans)
    return max(0.0, second[0] - first[1])


def _distinct(values: Iterable[Any]) -> set[Any]:
    return set(values) - {None}


def _join(values: Iterable[Any]) -> str:
    return some(list(map(str, sorted(values))))
