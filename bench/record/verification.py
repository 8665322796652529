"""The rules that a record must keep: it follows its schema, and says of its folder what is there.

A rule is a function (folder, record) -> (passed, evidence); its name and docstring are what ./run.sh verify shows.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bench import private, reading
from bench.config import schema, stages
from bench.paths import REPO
from bench.record import run_folder, script_rules, shape, step_files
from bench.record.metrics import metrics

RELATIVE = 1e-9  # metrics are recomputed from the same floats; only the order of operations may differ
MAX_STEP_SUM_FRAC = 1.01  # of one rank's clock: a GPU's own clock measures its steps (assumed)
MAX_OF_MAXIMA_FRAC = 1.05  # of records that do not say each rank's steps: maxima over ranks add up to more than any
# Not in the first records: absent there, checked where recorded.
LATER_METRICS = {"num_flagged_steps", "mfu_at_clock", "mean_power_w"}
LATER_METRICS |= {"energy_j", "energy_j_per_step", "energy_j_per_token"}
# By ./run.sh analyze, report and replay: anyone can make them again.
DERIVED = ("analysis.json", "summary.md", "report.html", "certificate.json")
# Folders that git ignores: a clone lacks them as a whole
LOCAL_ROLES = ("log", "trace", "memory", "work", "checkpoint")


def report(folder: Path | str) -> dict:
    """{"run_id", "passed", "rules": [{"rule", "passed", "evidence"}]} of one run folder."""
    run = run_folder.read_raw(folder, checked=False)
    rules = [{"rule": name, "passed": passed, "evidence": evidence} for name, passed, evidence in check(folder, run)]
    return {"run_id": str(run["run_id"]), "passed": all(rule["passed"] for rule in rules), "rules": rules}


def check(folder: Path | str, run: dict) -> Iterator[tuple[str, bool, str]]:
    """A record as written, in its folder -> (rule, passed, evidence) of every rule, also after one that failed."""
    of_complete = RULES_OF_A_COMPLETE_SCRIPT if run.get("script") else RULES_OF_A_COMPLETE_RUN
    rules = RULES + (of_complete if run.get("status") == "complete" else [])
    if run.get("provenance") == "imported":
        rules = RULES_OF_AN_IMPORTED_RUN
    for name, passed, evidence in applied(rules, Path(folder), run):
        yield name, passed, private.redact(evidence, REPO)


def applied(rules: Iterable[Callable[..., tuple[bool, str]]], *args: object) -> Iterator[tuple[str, bool, str]]:
    """Functions of args -> (name, passed, evidence) of each, also after one that failed; an error is a failure."""
    for rule in rules:
        try:
            passed, evidence = rule(*args)
        except reading.BAD as error:
            passed, evidence = False, f"cannot be checked: {type(error).__name__}: {error}"
        yield rule.__name__.replace("_", " "), passed, evidence


def follows_the_schema(folder: Path, run: dict) -> tuple[bool, str]:
    """run.json is valid under bench/record/run.schema.json."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(shape.schema())
    errors = sorted(validator.iter_errors(run), key=lambda error: list(map(str, error.path)))
    if not errors:
        return True, f"schema version {run['schema_version']}"
    return False, "; ".join(f"{error.json_path}: {error.message[:120]}" for error in errors[:3])


def says_where_it_comes_from(folder: Path, run: dict) -> tuple[bool, str]:
    """An imported record names its log, the log's sha256 and what its step_avg meant."""
    facts = run.get("imported") or {}
    missing = [key for key in ("format", "file", "sha256", "run_of_file") if facts.get(key) is None]
    return not missing, f"lacks {', '.join(missing)}" if missing else f"run {facts['run_of_file']} of {facts['file']}"


def is_complete(folder: Path, run: dict) -> tuple[bool, str]:
    """The run went to its end."""
    shown = run_folder.effective(run)
    failure = f", {shown['failure']['kind']}" if shown["failure"] else ""
    return shown["status"] == "complete", f"status {shown['status']}{failure}"


def names_agree(folder: Path, run: dict) -> tuple[bool, str]:
    """Folder, record and config.yaml speak of the same run."""
    config, goal = schema.read(folder), run.get("goal") or {}
    pairs = {
        "folder": (folder.resolve().name, run["run_id"]),
        "name": (config.name, run["name"]),
        "seed": (config.seed, run["seed"]),
        "track": (config.track.name, run["track"]),
        "world_size": (config.hardware.num_processes, run["world_size"]),
        "target_val_loss": (config.goal.target_val_loss, goal.get("target_val_loss")),
        "target_gap_nats": (config.goal.target_gap_nats, goal.get("target_gap_nats")),
    }
    wrong = [
        f"{what}: {there!r}, but the record says {here!r}" for what, (there, here) in pairs.items() if there != here
    ]
    return not wrong, "; ".join(wrong) or ", ".join(pairs)


def config_id_is_that_of_the_config(folder: Path, run: dict) -> tuple[bool, str]:
    """config_id is the hash of config.yaml, as today or when it was written."""
    found = schema.config_ids(schema.read(folder))
    return run["config_id"] in found, f"config.yaml gives {' or '.join(found)}, the record says {run['config_id']}"


def artifacts_are_unchanged(folder: Path, run: dict) -> tuple[bool, str]:
    """Every file listed is there with its size and sha256 (folders that git ignores may be missing as a whole)."""
    tops = {artifact["path"].partition("/")[0] for artifact in run["artifacts"] if artifact["role"] in LOCAL_ROLES}
    absent = sorted(top for top in tops if not (folder / top).exists())
    here = [artifact for artifact in run["artifacts"] if artifact["path"].partition("/")[0] not in absent]
    wrong = [change for artifact in here if (change := _change(folder, artifact))]
    note = f"; not here, as in a clone: {', '.join(absent)}" if absent else ""
    return not wrong, "; ".join(wrong) or f"{len(here)} files{note}"


def _change(folder, artifact):
    """What is wrong with the file, or None."""
    path = folder / artifact["path"]
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"{artifact['path']} lies outside the folder"
    if not path.is_file():
        return f"{artifact['path']} is missing"
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if path.stat().st_size != artifact["num_bytes"]:
        return f"{artifact['path']} has {path.stat().st_size} bytes instead of {artifact['num_bytes']}"
    return None if sha256 == artifact["sha256"] else f"{artifact['path']} has another sha256"


def nothing_is_unrecorded(folder: Path, run: dict) -> tuple[bool, str]:
    """No file lies in the folder that the record does not list, but what is made of the record afterwards."""
    listed = {artifact["path"] for artifact in run["artifacts"]}
    needed = {"config.yaml", "steps.csv"} if run["status"] == "complete" else {"config.yaml"}  # it may have had no step
    missing = needed - listed
    unlisted = [path for path in run_folder.files(folder) if path not in listed and not _is_derived(path)]
    words = [f"{path} is not listed" for path in unlisted + sorted(missing)]
    return not words, "; ".join(words) or f"{len(listed)} listed"


def _is_derived(path):
    page = path.startswith(("memory/", "traces/")) and path.endswith(".html")  # ./run.sh memory
    return path in DERIVED or page or path.startswith(("plots/", "dashboards/"))


def steps_are_without_gaps(folder: Path, run: dict) -> tuple[bool, str]:
    """steps.csv has the rows 0 to num_steps, each once, and a time and a loss for every step."""
    rows = step_files.read(folder, strict=True)
    found, num_steps = [row["step"] for row in rows], run["metrics"]["num_steps"]
    if found != list(range(num_steps + 1)):
        lacking = sorted(set(range(num_steps + 1)) - set(found))[:5]
        last = found[-1] if found else None
        return False, f"{len(found)} rows, last {last}, num_steps {num_steps}, lacking {lacking}"
    holes = [row["step"] for row in rows[1:] if row["step_ms"] is None or row["train_loss"] is None]
    return not holes, f"no time or loss for steps {holes[:5]}" if holes else f"rows 0 to {num_steps}"


def steps_are_those_of_the_goal(folder: Path, run: dict) -> tuple[bool, str]:
    """The run made the configured number of steps, or fewer only where it may stop at its target and reached it."""
    goal, num_steps = schema.read(folder).goal, run["metrics"]["num_steps"]
    early = goal.stop_at_target and run["metrics"]["target_reached"] is True and num_steps < goal.num_steps
    return num_steps == goal.num_steps or early, f"{num_steps} of {goal.num_steps}{', target reached' * early}"


def tokens_are_counted(folder: Path, run: dict) -> tuple[bool, str]:
    """tokens is step * batch_tokens in every row, as configured; with stages, the sum of the steps' own."""
    config, measured = schema.read(folder), run["measured"]
    batch_tokens, configured = measured["batch_tokens"], stages.mean_batch_tokens(config)
    if batch_tokens != configured:
        return False, f"batch_tokens {batch_tokens}, config.yaml says {configured}"
    if bool(config.stages) != bool(measured.get("stages")):
        return False, "stages are in one of config.yaml and the record alone"
    rows = step_files.read(folder)
    wrong = [row["step"] for row in rows if row["tokens"] != stages.num_tokens(config, row["step"])]
    return not wrong, f"wrong at steps {wrong[:5]}" if wrong else f"{batch_tokens} a step"


def losses_are_finite(folder: Path, run: dict) -> tuple[bool, str]:
    """Every loss is a number, and the last row has been validated."""
    rows = step_files.read(folder)
    losses = [(row["step"], row[name]) for row in rows for name in ("train_loss", "val_loss") if row[name] is not None]
    wrong = [step for step, loss in losses if not math.isfinite(loss)]
    if wrong:
        return False, f"not finite at steps {wrong[:5]}"
    return rows[-1]["val_loss"] is not None, f"{len(losses)} losses, the last val_loss {rows[-1]['val_loss']}"


def metrics_follow_from_the_facts(folder: Path, run: dict) -> tuple[bool, str]:
    """Every derived number is what bench/record/metrics.py computes from the raw ones."""
    found, recorded = metrics(run, step_files.read(folder)), run["metrics"]
    if not recorded and run["status"] != "complete":
        return True, "none recorded, the run did not complete"
    wrong = [
        f"{name}: {found.get(name)}, recorded {recorded.get(name)}"
        for name in found | recorded
        if name in recorded or name not in LATER_METRICS
        if not _same(found.get(name), recorded.get(name))
    ]
    return not wrong, "; ".join(wrong) or f"{len(found)} numbers"


def steps_fit_into_the_time(folder: Path, run: dict) -> tuple[bool, str]:
    """Each rank's steps add up to no more than its training time, and step_ms is the slowest rank's."""
    # Maxima over ranks may add up to more: on a busy machine another rank is the slowest at each step.
    rows, by_rank = step_files.read(folder), step_files.read_by_rank(folder).get("step_ms")
    if not by_rank:
        num_untimed = run["measured"].get("num_untimed_steps") or 0  # of a script, whose clock starts again after them
        sum_s = sum(row["step_ms"] or 0.0 for row in rows if row["step"] > num_untimed) / 1e3
        limit_s = (MAX_STEP_SUM_FRAC if run["world_size"] == 1 else MAX_OF_MAXIMA_FRAC) * run["metrics"]["train_s"]
        return sum_s <= limit_s, f"they add up to {sum_s:.4f} s, the limit is {limit_s:.4f} s"
    for rank, (of_rank, train_s) in enumerate(zip(by_rank, run["measured"]["train_s_by_rank"], strict=True)):
        sum_s, limit_s = sum(of_rank.values()) / 1e3, MAX_STEP_SUM_FRAC * train_s
        if sum_s > limit_s:
            return False, f"those of rank {rank} add up to {sum_s:.4f} s, the limit is {limit_s:.4f} s"
    wrong = [row["step"] for row in rows if row["step_ms"] is not None and not _is_slowest(row, by_rank)]
    return not wrong, f"not the slowest rank's at steps {wrong[:5]}" if wrong else f"on each of {len(by_rank)} ranks"


def _is_slowest(row, by_rank):
    """To the microsecond that steps_by_rank.csv keeps."""
    times = [of_rank[row["step"]] for of_rank in by_rank if row["step"] in of_rank]
    return not times or abs(row["step_ms"] - max(times)) < 0.001


def times_fit_into_the_wall_time(folder: Path, run: dict) -> tuple[bool, str]:
    """Training and validation together took no longer than the whole run."""
    measured, train_s = run["measured"], run["metrics"]["train_s"]
    inside_s = train_s + (measured.get("validation_s") or 0.0)
    return train_s > 0 and inside_s <= measured["wall_s"], f"{inside_s:.3f} s of {measured['wall_s']:.3f} s"


def validity_is_honest(folder: Path, run: dict) -> tuple[bool, str]:
    """A run that the rules call invalid (a loss below the data's floor, say) is recorded as invalid."""
    from bench.record import validity

    ruled, reasons = validity.validity(run)
    honest = ruled != "invalid" or run["validity"] == "invalid"
    return honest, f"recorded {run['validity']}, ruled {ruled}{': ' if reasons else ''}{'; '.join(reasons)}"


RULES = [
    follows_the_schema,
    is_complete,
    names_agree,
    config_id_is_that_of_the_config,
    artifacts_are_unchanged,
    nothing_is_unrecorded,
    metrics_follow_from_the_facts,
    validity_is_honest,
]
# Of a foreign log only what it contains can be checked: there is no config, no code and no data.
RULES_OF_AN_IMPORTED_RUN = [
    says_where_it_comes_from,
    artifacts_are_unchanged,
    metrics_follow_from_the_facts,
    validity_is_honest,
]
RULES_OF_A_COMPLETE_RUN = [
    steps_are_without_gaps,
    steps_are_those_of_the_goal,
    tokens_are_counted,
    losses_are_finite,
    steps_fit_into_the_time,
    times_fit_into_the_wall_time,
]
RULES_OF_A_COMPLETE_SCRIPT = [*script_rules.RULES, steps_fit_into_the_time]


def _same(one, other):
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
    return math.isclose(one, other, rel_tol=RELATIVE) if numbers else one == other and type(one) is type(other)
