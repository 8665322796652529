"""The rules that ./run.sh verify applies to a record: it follows its schema and agrees with the files in its folder.

A rule is a function (files, record) -> (passed, evidence), whose name and docstring ./run.sh verify --help prints.
"""

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bench.base import metric, private
from bench.base.paths import REPO
from bench.base.reading import damage, json_file, plain_file
from bench.config import identity, schema, stages
from bench.record import outside_clock, printed_times, run_folder, shape, step_files, validity
from bench.record.metrics import metrics, step_past_budget
from bench.record.shape import Record, Section

Passed = TypeVar("Passed", bool, bool | None)  # None: the rule does not apply
RELATIVE = 1e-9  # metrics are recomputed from the same floats; only the order of operations may differ
# Metrics that the first records lack; checked in records that have them.
LATER_METRICS = {"num_flagged_steps", "mfu_at_clock", "mean_power_w", "num_scores"}
LATER_METRICS |= {"energy_j", "energy_j_per_step", "energy_j_per_token"}
# Files that ./run.sh analyze, report, replay, audit, memory and dashboard write, and can write again.
DERIVED = re.compile(
    r"analysis\.json|summary\.md|report\.html|certificate\.json|audit\.json"
    r"|(memory|traces)/.*\.html|(plots|dashboards)/.*",
    re.S,
)
# Roles of folders that git ignores, so that a clone lacks them as a whole
LOCAL_ROLES = ("log", "trace", "memory", "work", "checkpoint")
MAX_STEP_SUM_FRAC = 1.01  # sum of a rank's steps / its time: a GPU measures its steps with its own clock (assumed)
MAX_OF_MAXIMA_FRAC = 1.05  # the same for records without each rank's steps: sums of maxima exceed each rank's sum


class RunFiles:
    """The files of a run folder, read once, when a rule first needs them.

    A file that is missing or damaged raises an error in every rule that needs it.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    @functools.cached_property
    def config(self) -> schema.Config:
        """config.yaml.  Raises ValueError, as schema.recorded() does."""
        return schema.recorded(self.folder)

    @functools.cached_property
    def steps(self) -> list[step_files.StepRow]:
        """Rows of steps.csv, [] without the file.  Raises ValueError, as step_files.read() does."""
        return step_files.read(self.folder)


def report(folder: Path | str) -> Section:
    """Verifies a run folder.  Returns {"run_id", "passed", "rules": [{"rule", "passed", "evidence"}]}."""
    run = run_folder.read_raw(folder, checked=False)
    rules = [{"rule": name, "passed": passed, "evidence": evidence} for name, passed, evidence in check(folder, run)]
    return {"run_id": str(run["run_id"]), "passed": all(rule["passed"] for rule in rules), "rules": rules}


def check(folder: Path | str, run: Record) -> Iterator[tuple[str, bool, str]]:
    """Applies all rules to a record as written.  Yields (rule, passed, evidence), also after a failure."""
    complete_rules = RULES_OF_A_COMPLETE_SCRIPT if run.get("script") else RULES_OF_A_COMPLETE_RUN
    rules = RULES + (complete_rules if run.get("status") == "complete" else [])
    if run.get("provenance") == "imported":
        rules = RULES_OF_AN_IMPORTED_RUN
    for name, passed, evidence in applied(rules, RunFiles(folder), run):
        yield name, passed, private.redact(evidence, REPO)


def applied(
    rules: Iterable[Callable[..., tuple[Passed, str]]], *args: object
) -> Iterator[tuple[str, Passed | bool, str]]:
    """Calls rules with args.  Yields (name, passed, evidence), also after a failure; an exception is a failure."""
    for rule in rules:
        try:
            passed, evidence = rule(*args)
        except damage.BAD as error:
            passed, evidence = False, f"cannot be checked: {type(error).__name__}: {error}"
        yield rule.__name__.replace("_", " "), passed, evidence


def follows_the_schema(files: RunFiles, run: Record) -> tuple[bool, str]:
    """run.json is valid under bench/record/run.schema.json."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(shape.schema())
    errors = sorted(validator.iter_errors(run), key=lambda error: list(map(str, error.path)))
    if not errors:
        return True, f"schema version {run['schema_version']}"
    return False, "; ".join(f"{error.json_path}: {error.message[:120]}" for error in errors[:3])


def says_where_it_comes_from(files: RunFiles, run: Record) -> tuple[bool, str]:
    """An imported record names the format, file and sha256 of its log, and the number of the run in it."""
    facts = run.get("imported") or {}
    missing = [key for key in ("format", "file", "sha256", "run_of_file") if facts.get(key) is None]
    return not missing, f"lacks {', '.join(missing)}" if missing else f"run {facts['run_of_file']} of {facts['file']}"


def is_complete(files: RunFiles, run: Record) -> tuple[bool, str]:
    """The run completed."""
    shown = run_folder.effective(run, files.folder)
    why = f", {failure['kind']}" if (failure := shown["failure"]) else ""
    return shown["status"] == "complete", f"status {shown['status']}{why}"


def names_agree(files: RunFiles, run: Record) -> tuple[bool, str]:
    """Folder, record, config.yaml and environment.json, which a script could overwrite, describe the same run."""
    config, goal = files.config, run.get("goal") or {}
    pairs = {
        "folder": (files.folder.resolve().name, run["run_id"]),
        "name": (config.name, run["name"]),
        "seed": (config.seed, run["seed"]),
        "track": (config.track.name, run["track"]),
        "world_size": (config.hardware.num_processes, run["world_size"]),
        "target_val_loss": (config.goal.target_val_loss, goal.get("target_val_loss")),
        "target_gap_nats": (config.goal.target_gap_nats, goal.get("target_gap_nats")),
    }
    unequal = [(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]
    wrong = [f"{name}: {found!r}, but the record says {recorded!r}" for name, found, recorded in unequal]
    path = files.folder / "environment.json"
    env = json_file.read(path) if path.exists() and not run.get("segments") else {}
    others = [key for key, fact in run["environment"].items() if key != "gpus" and env.get(key, fact) != fact]
    gpus = run["environment"].get("gpus") or []
    of_machine = env.get("gpus", gpus) or ()  # environment.json has every GPU, with more facts
    uuids = {gpu.get("uuid_hash") for gpu in of_machine}
    others += ["gpus"] * any(gpu.get("uuid_hash") not in uuids for gpu in gpus)
    wrong += [f"environment.json: another {key}" for key in others]
    return not wrong, "; ".join(wrong) or ", ".join(pairs)


def config_id_is_that_of_the_config(files: RunFiles, run: Record) -> tuple[bool, str]:
    """config_id is the hash of config.yaml, as computed today or when the record was written."""
    ids = identity.config_ids(files.config)
    return run["config_id"] in ids, f"config.yaml gives {' or '.join(ids)}, the record says {run['config_id']}"


def artifacts_are_unchanged(files: RunFiles, run: Record) -> tuple[bool, str]:
    """Every listed file exists, with the recorded size and sha256 (whole folders that git ignores may be missing)."""
    tops = {artifact["path"].partition("/")[0] for artifact in run["artifacts"] if artifact["role"] in LOCAL_ROLES}
    absent = sorted(top for top in tops if not (files.folder / top).exists())
    present = [artifact for artifact in run["artifacts"] if artifact["path"].partition("/")[0] not in absent]
    wrong = [change for artifact in present if (change := change_of(files.folder, artifact))]
    note = f"; not here, as in a clone: {', '.join(absent)}" if absent else ""
    return not wrong, "; ".join(wrong) or f"{len(present)} files{note}"


def change_of(folder: Path, artifact: Section) -> str | None:
    """Returns how a file differs from what the record says of it, or None."""
    path = folder / artifact["path"]
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # the latter in Python 3.11 and 3.12
        return f"{artifact['path']} is a loop of links"
    if not is_inside:
        return f"{artifact['path']} lies outside the folder"
    if not path.is_file():
        return f"{artifact['path']} is missing"
    try:
        with open(path, "rb", opener=plain_file.open_now) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != artifact["num_bytes"]:
                return f"{artifact['path']} has {num_bytes} bytes instead of {artifact['num_bytes']}"
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{artifact['path']} cannot be read ({error.strerror})"
    return None if sha256 == artifact["sha256"] else f"{artifact['path']} has another sha256"


def nothing_is_unrecorded(files: RunFiles, run: Record) -> tuple[bool, str]:
    """The record lists every file in the folder, except those that are made from the record afterwards."""
    listed = {artifact["path"] for artifact in run["artifacts"]}
    needed = {"config.yaml", "steps.csv"} if run["status"] == "complete" else {"config.yaml"}  # others may lack steps
    missing = needed - listed
    not_kept = tuple(run.get("not_kept") or ())
    paths = [path for path in run_folder.files(files.folder) if path not in listed and not DERIVED.fullmatch(path)]
    entries = plain_file.entries_below(files.folder)
    linked = [os.path.relpath(entry, files.folder) for entry in entries if entry.is_symlink() and not entry.is_file()]
    linked = [path for path in linked if not DERIVED.fullmatch(path)]  # W&B makes one
    names = map(plain_file.name_in_utf8, paths)
    unlisted = [name for name in names if not any(name == of or name.startswith(f"{of}/") for of in not_kept)]
    sentences = [f"{path} is not listed" for path in unlisted + sorted(missing)]
    sentences += [f"{path} is a link and no part of the record" for path in linked]
    lost = f", {len(not_kept)} could not be kept" if not_kept else ""
    return not sentences, "; ".join(sentences) or f"{len(listed)} listed{lost}"


def metrics_follow_from_the_facts(files: RunFiles, run: Record) -> tuple[bool, str]:
    """Every derived number is what bench/record/metrics.py computes from the raw ones."""
    computed, recorded = metrics(run, files.steps), run["metrics"]
    if not recorded and run["status"] != "complete":
        return True, "none recorded, the run did not complete"
    wrong = [
        f"{name}: {computed.get(name)}, recorded {recorded.get(name)}"
        for name in computed | recorded
        if name in recorded or name not in LATER_METRICS
        if not _same(computed.get(name), recorded.get(name))
    ]
    return not wrong, "; ".join(wrong) or f"{len(computed)} numbers"


def validity_is_honest(files: RunFiles, run: Record) -> tuple[bool, str]:
    """A run that is invalid by the rules, for example as its loss is below the data's floor, is recorded as invalid."""
    ruled, reasons = validity.validity(run)
    honest = ruled != "invalid" or run["validity"] == "invalid"
    return honest, f"recorded {run['validity']}, ruled {ruled}{': ' if reasons else ''}{'; '.join(reasons)}"


def _same(computed: Any, recorded: Any, abs_tol: float = 0.0) -> bool:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (computed, recorded)):
        return math.isclose(computed, recorded, rel_tol=RELATIVE, abs_tol=abs_tol)
    return computed == recorded and type(computed) is type(recorded)


# ---- its steps


def steps_are_without_gaps(files: RunFiles, run: Record) -> tuple[bool, str]:
    """steps.csv has the rows 0 to num_steps, each once, and a time and a loss for every step."""
    rows = step_files.read(files.folder, strict=True)
    steps, num_steps = [row["step"] for row in rows], run["metrics"]["num_steps"]
    if steps != list(range(num_steps + 1)):
        lacking = sorted(set(range(num_steps + 1)) - set(steps))[:5]
        last = steps[-1] if steps else None
        return False, f"{len(steps)} rows, last {last}, num_steps {num_steps}, lacking {lacking}"
    holes = [row["step"] for row in rows[1:] if row["step_ms"] is None or row["train_loss"] is None]
    return not holes, f"no time or loss for steps {holes[:5]}" if holes else f"rows 0 to {num_steps}"


def steps_are_those_of_the_goal(files: RunFiles, run: Record) -> tuple[bool, str]:
    """The run made the configured number of steps, or fewer because it reached its target or spent its budget."""
    goal, num_steps = files.config.goal, run["metrics"]["num_steps"]
    early = goal.stop_at_target and run["metrics"]["target_reached"] is True and num_steps < goal.num_steps
    is_spent = bool(goal.time_budget_s or goal.flop_budget) and 0 < num_steps < goal.num_steps
    why = ", target reached" * early + ", its budget was spent" * is_spent
    return num_steps == goal.num_steps or early or is_spent, f"{num_steps} of {goal.num_steps}{why}"


def tokens_are_counted(files: RunFiles, run: Record) -> tuple[bool, str]:
    """tokens is step * batch_tokens, as configured, in every row; with stages, the sum over the steps."""
    config, measured = files.config, run["measured"]
    batch_tokens, configured = measured["batch_tokens"], stages.mean_batch_tokens(config)
    if batch_tokens != configured:
        return False, f"batch_tokens {batch_tokens}, config.yaml says {configured}"
    if bool(config.stages) != bool(measured.get("stages")):
        return False, "stages are in one of config.yaml and the record alone"
    rows = files.steps
    wrong = [row["step"] for row in rows if row["tokens"] != stages.num_tokens(config, row["step"])]
    return not wrong, f"wrong at steps {wrong[:5]}" if wrong else f"{batch_tokens} a step"


def losses_are_finite(files: RunFiles, run: Record) -> tuple[bool, str]:
    """Every loss is a number, and the last row has been validated."""
    rows = files.steps
    its = metric.from_goal(run.get("goal")).name
    names = dict.fromkeys(("train_loss", "val_loss", its))
    losses = [(row["step"], row[name]) for row in rows for name in names if row.get(name) is not None]
    wrong = [step for step, loss in losses if not math.isfinite(loss)]
    if wrong:
        return False, f"not finite at steps {wrong[:5]}"
    return rows[-1].get(its) is not None, f"{len(losses)} losses, the last {its} {rows[-1].get(its)}"


def steps_fit_into_the_time(files: RunFiles, run: Record) -> tuple[bool, str]:
    """Each rank's steps add up to no more than its training time, and step_ms is the slowest rank's."""
    # Maxima over ranks may add up to more, as on a busy machine the slowest rank differs from step to step.
    rows, by_rank = files.steps, step_files.read_by_rank(files.folder).get("step_ms")
    if not by_rank:
        num_untimed = run["measured"].get("num_untimed_steps") or 0  # the clock of a script is restarted after them
        sum_s = sum(row["step_ms"] or 0.0 for row in rows if row["step"] > num_untimed) / 1e3
        limit_s = (MAX_STEP_SUM_FRAC if run["world_size"] == 1 else MAX_OF_MAXIMA_FRAC) * run["metrics"]["train_s"]
        return sum_s <= limit_s, f"they add up to {sum_s:.4f} s, the limit is {limit_s:.4f} s"
    for rank, (rank_ms, train_s) in enumerate(zip(by_rank, run["measured"]["train_s_by_rank"], strict=True)):
        sum_s, limit_s = sum(rank_ms.values()) / 1e3, MAX_STEP_SUM_FRAC * train_s
        if sum_s > limit_s:
            return False, f"those of rank {rank} add up to {sum_s:.4f} s, the limit is {limit_s:.4f} s"
    wrong = []
    for row in rows:
        times_ms = [rank_ms[row["step"]] for rank_ms in by_rank if row["step"] in rank_ms]
        # steps_by_rank.csv is rounded to microseconds
        if row["step_ms"] is not None and times_ms and abs(row["step_ms"] - max(times_ms)) >= 0.001:
            wrong.append(row["step"])
    return not wrong, f"not the slowest rank's at steps {wrong[:5]}" if wrong else f"on each of {len(by_rank)} ranks"


def times_fit_into_the_wall_time(files: RunFiles, run: Record) -> tuple[bool, str]:
    """Training and validation together took no longer than the whole run."""
    measured, train_s = run["measured"], run["metrics"]["train_s"]
    inside_s = train_s + (measured.get("validation_s") or 0.0)
    return train_s > 0 and inside_s <= measured["wall_s"], f"{inside_s:.3f} s of {measured['wall_s']:.3f} s"


def the_clock_of_the_launcher_agrees(files: RunFiles, run: Record) -> tuple[bool, str]:
    """The record has every doubt that the launcher's clock raises; records until November 2026 have no such clock."""
    clock = (run.get("referee") or {}).get("clock")
    if clock is None:
        return True, "an older record, without a launcher's clock"
    claimed_s, by_rank = clock["claimed_train_s"], run["measured"]["train_s_by_rank"]
    if claimed_s != by_rank[0]:
        return False, f"held against {claimed_s} s, and rank 0 counts {by_rank[0]} s"
    recorded = {doubt["doubt"] for doubt in run.get("doubts", ())}
    missing = [doubt for _, doubt in outside_clock.doubts(clock, validity.is_busy(run)) if doubt not in recorded]
    seen = clock["unknown"] or f"{clock['outside_train_s']:.3f} s of training outside, {claimed_s:.3f} s claimed"
    return not missing, "; ".join(f"not recorded: {doubt}" for doubt in missing) or seen


# ---- the steps of a script, which has its own model, batch and number of steps: only what was observed is checked


def steps_are_those_that_the_script_printed(files: RunFiles, run: Record) -> tuple[bool, str]:
    """The rows are in order and have the times at which their lines arrived; a script may make any number of steps."""
    rows = step_files.read(files.folder, strict=True)
    silent = [row["step"] for row in rows if row["line_t_ns"] is None and row["val_line_t_ns"] is None]
    last, num_steps = rows[-1]["step"], run["metrics"]["num_steps"]
    if silent or last != num_steps:
        return False, f"no line of steps {silent[:5]}" if silent else f"the last row is {last}, num_steps {num_steps}"
    return True, f"{len(rows)} rows of {num_steps} steps"


def printed_times_are_accounted_for(files: RunFiles, run: Record) -> tuple[bool, str]:
    """The time that passed and that the script counted follow from the rows; the record has every resulting doubt."""
    rows, measured = files.steps, run["measured"]
    if run["timing_protocol"]["id"] != "script-1":
        return True, "the wall time of the lines is the time: nothing is claimed"
    times = printed_times.PrintedTimes(rows, measured["num_untimed_steps"])
    account: Section = {**times.account()}
    wrong = [
        f"{name}: {value}, recorded {measured.get(name)}"
        for name, value in account.items()
        if not _same(value, measured.get(name), abs_tol=RELATIVE)
    ]
    reported = {doubt["doubt"] for doubt in run.get("doubts", ())}
    outside = (run.get("referee") or {})["clock"]
    doubts, disturbances = times.doubts(outside)
    due = [*doubts, *disturbances, *(doubt for _, doubt in outside_clock.doubts(outside, validity.is_busy(run)))]
    wrong += [f"not recorded: {doubt}" for doubt in due if doubt not in reported]
    return not wrong, "; ".join(wrong) or f"{account['uncounted_s'] or 0:.3f} s uncounted"


def the_last_step_was_validated(files: RunFiles, run: Record) -> tuple[bool, str]:
    """The last validation is at the last step, or one before it as in nanoGPT, or the record doubts the run.

    A script that was ended at its budget could not validate at its end.
    """
    its = metric.from_goal(run.get("goal")).name
    last = max(row["step"] for row in files.steps if row.get(its) is not None)
    evidence, past = f"step {last} of {run['metrics']['num_steps']}", step_past_budget(run, files.steps)
    if past is not None and "ended_at_step" in (run.get("script") or {}):
        return True, f"{evidence}, which was ended as step {past} was past its budget"
    is_at_end = last >= run["metrics"]["num_steps"] - 1 or _is_doubted(run)
    return is_at_end, evidence if is_at_end else f"{evidence}: let it end at a step that it validates"


def the_source_is_kept(files: RunFiles, run: Record) -> tuple[bool, str]:
    """code/ has every source file that the script used, byte for byte as it ran."""
    script: Section = run.get("script") or {}
    used: Collection[str] = script["used"]
    kept = (hashlib.sha256(plain_file.content(files.folder / "code" / name)).hexdigest() for name in used)
    pairs = zip(used, kept, strict=True)
    wrong = [n for n, sha256 in pairs if not n.startswith("script/") or sha256 != script["sha256_by_file"][n]]
    is_whole = f"script/{script['file']}" in used or "command" in script
    return not wrong and is_whole, ", ".join(wrong) or f"{len(used)} files"


def the_claimed_time_fits_into_the_wall_time(files: RunFiles, run: Record) -> tuple[bool, str]:
    """The training time that the script prints is not longer than the whole run, or the record doubts it."""
    train_s, wall_s = run["metrics"]["train_s"], run["measured"]["wall_s"]
    return 0 < train_s <= wall_s or _is_doubted(run), f"{train_s:.3f} s of {wall_s:.3f} s"


def _is_doubted(run: Record) -> bool:
    return any(doubt.get("instrument") == "script" for doubt in run.get("doubts", ()))


RULES = [
    follows_the_schema, is_complete, names_agree, config_id_is_that_of_the_config, artifacts_are_unchanged,
    nothing_is_unrecorded, metrics_follow_from_the_facts, validity_is_honest,
]  # fmt: skip
# Of an imported log only its content can be checked: there is no config, code or data.
RULES_OF_AN_IMPORTED_RUN = [
    says_where_it_comes_from, artifacts_are_unchanged, metrics_follow_from_the_facts, validity_is_honest,
]  # fmt: skip
RULES_OF_A_COMPLETE_RUN = [
    steps_are_without_gaps, steps_are_those_of_the_goal, tokens_are_counted, losses_are_finite,
    steps_fit_into_the_time, times_fit_into_the_wall_time, the_clock_of_the_launcher_agrees,
]  # fmt: skip
RULES_OF_A_COMPLETE_SCRIPT = [
    steps_are_those_that_the_script_printed, printed_times_are_accounted_for, the_last_step_was_validated,
    the_source_is_kept, the_claimed_time_fits_into_the_wall_time, steps_fit_into_the_time,
]  # fmt: skip
