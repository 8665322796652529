"""The rules that a record must keep: it follows its schema, and says of its folder what is there.

A rule is a function (files, record) -> (passed, evidence); its name and docstring are what ./run.sh verify shows.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bench.base import private
from bench.base.paths import REPO
from bench.base.reading import damage
from bench.config import schema
from bench.record import run_folder, shape, step_rules, validity
from bench.record.metrics import metrics
from bench.record.shape import Record, Section
from bench.record.step_rules import RunFiles

Passed = TypeVar("Passed", bool, bool | None)  # None: the rule does not apply
RELATIVE = 1e-9  # metrics are recomputed from the same floats; only the order of operations may differ
# Not in the first records: absent there, checked where recorded.
LATER_METRICS = {"num_flagged_steps", "mfu_at_clock", "mean_power_w"}
LATER_METRICS |= {"energy_j", "energy_j_per_step", "energy_j_per_token"}
# By ./run.sh analyze, report, replay, audit, memory and dashboard: anyone can make them again.
DERIVED = re.compile(
    r"analysis\.json|summary\.md|report\.html|certificate\.json|audit\.json"
    r"|(memory|traces)/.*\.html|(plots|dashboards)/.*",
    re.S,
)
# Folders that git ignores: a clone lacks them as a whole
LOCAL_ROLES = ("log", "trace", "memory", "work", "checkpoint")


def report(folder: Path | str) -> Section:
    """{"run_id", "passed", "rules": [{"rule", "passed", "evidence"}]} of one run folder."""
    run = run_folder.read_raw(folder, checked=False)
    rules = [{"rule": name, "passed": passed, "evidence": evidence} for name, passed, evidence in check(folder, run)]
    return {"run_id": str(run["run_id"]), "passed": all(rule["passed"] for rule in rules), "rules": rules}


def check(folder: Path | str, run: Record) -> Iterator[tuple[str, bool, str]]:
    """A record as written, in its folder -> (rule, passed, evidence) of every rule, also after one that failed."""
    of_complete = RULES_OF_A_COMPLETE_SCRIPT if run.get("script") else RULES_OF_A_COMPLETE_RUN
    rules = RULES + (of_complete if run.get("status") == "complete" else [])
    if run.get("provenance") == "imported":
        rules = RULES_OF_AN_IMPORTED_RUN
    for name, passed, evidence in applied(rules, RunFiles(folder), run):
        yield name, passed, private.redact(evidence, REPO)


def applied(
    rules: Iterable[Callable[..., tuple[Passed, str]]], *args: object
) -> Iterator[tuple[str, Passed | bool, str]]:
    """Functions of args -> (name, passed, evidence) of each, also after one that failed; an error is a failure."""
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
    """An imported record names its log, the log's sha256 and what its step_avg meant."""
    facts = run.get("imported") or {}
    missing = [key for key in ("format", "file", "sha256", "run_of_file") if facts.get(key) is None]
    return not missing, f"lacks {', '.join(missing)}" if missing else f"run {facts['run_of_file']} of {facts['file']}"


def is_complete(files: RunFiles, run: Record) -> tuple[bool, str]:
    """The run went to its end."""
    shown = run_folder.effective(run)
    why = f", {failure['kind']}" if (failure := shown["failure"]) else ""
    return shown["status"] == "complete", f"status {shown['status']}{why}"


def names_agree(files: RunFiles, run: Record) -> tuple[bool, str]:
    """Folder, record and config.yaml speak of the same run."""
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
    wrong = [
        f"{what}: {there!r}, but the record says {here!r}" for what, (there, here) in pairs.items() if there != here
    ]
    return not wrong, "; ".join(wrong) or ", ".join(pairs)


def config_id_is_that_of_the_config(files: RunFiles, run: Record) -> tuple[bool, str]:
    """config_id is the hash of config.yaml, as today or when it was written."""
    ids = schema.config_ids(files.config)
    return run["config_id"] in ids, f"config.yaml gives {' or '.join(ids)}, the record says {run['config_id']}"


def artifacts_are_unchanged(files: RunFiles, run: Record) -> tuple[bool, str]:
    """Every file listed is there with its size and sha256 (folders that git ignores may be missing as a whole)."""
    tops = {artifact["path"].partition("/")[0] for artifact in run["artifacts"] if artifact["role"] in LOCAL_ROLES}
    absent = sorted(top for top in tops if not (files.folder / top).exists())
    here = [artifact for artifact in run["artifacts"] if artifact["path"].partition("/")[0] not in absent]
    wrong = [change for artifact in here if (change := _change(files.folder, artifact))]
    note = f"; not here, as in a clone: {', '.join(absent)}" if absent else ""
    return not wrong, "; ".join(wrong) or f"{len(here)} files{note}"


def _change(folder: Path, artifact: Section) -> str | None:
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


def nothing_is_unrecorded(files: RunFiles, run: Record) -> tuple[bool, str]:
    """No file lies in the folder that the record does not list, but what is made of the record afterwards."""
    listed = {artifact["path"] for artifact in run["artifacts"]}
    needed = {"config.yaml", "steps.csv"} if run["status"] == "complete" else {"config.yaml"}  # it may have had no step
    missing = needed - listed
    unlisted = [path for path in run_folder.files(files.folder) if path not in listed and not DERIVED.fullmatch(path)]
    sentences = [f"{path} is not listed" for path in unlisted + sorted(missing)]
    return not sentences, "; ".join(sentences) or f"{len(listed)} listed"


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
    """A run that the rules call invalid (a loss below the data's floor, say) is recorded as invalid."""
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
RULES_OF_A_COMPLETE_RUN = step_rules.RULES
RULES_OF_A_COMPLETE_SCRIPT = [*step_rules.SCRIPT_RULES, step_rules.steps_fit_into_the_time]


def _same(one: Any, other: Any) -> bool:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
    return math.isclose(one, other, rel_tol=RELATIVE) if numbers else one == other and type(one) is type(other)
