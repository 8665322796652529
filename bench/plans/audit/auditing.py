"""Audits a record: untimed runs of the same contestant on counterfactual data, and what follows from them.

Audit runs lie in results/.audits/, with a separate ledger, each marked as an audit in its record, so that none counts
as a run of the track; the first of a script has its look. audit.json beside the audited record says how it ended. To
show what a script does outside its clock it runs once more, sampled a hundred times a second: audit_clock.json.
"""

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from bench.base import atomic, private, utc
from bench.base.paths import REPO, results_root, variables
from bench.base.reading.damage import Damaged
from bench.data.sources import datasets
from bench.data.sources.source import data_root
from bench.launch import after_race, launcher
from bench.launch.prepare import Job, prepare
from bench.plans import locks
from bench.plans.audit import counterfactual, final_weights
from bench.plans.audit.counterfactual import NotPossible
from bench.plans.race import state
from bench.plans.replay import rebuilding, recorded
from bench.plans.replay.recorded import Recorded
from bench.record import certificates, failures, ledger, off_clock, printed_times, run_folder, step_files
from bench.record.certificates import AUDITS_FOLDER, DOUBTED, FAILED, NOT_POSSIBLE, PASSED
from bench.record.shape import Facts
from bench.training import line_sampler

CLOCK, CLOCK_FILE = "clock", "audit_clock.json"
SCRATCH = ".audit."  # how the folders of an audit's data begin, among those of all data
LEFT_OUT = (
    *("seed=", "exporters", "checkpoint", "resume=", "profile"),
    *("script=", "script.path=", "script.root=", "+script"),
)
Run = dict[str, Any]  # a complete record, of which no section is None
Say = Callable[[str, str], None]


def audit(folder: Path, kinds: Sequence[str], say: Say, is_trusted: bool = False) -> certificates.Audit:
    """Audits a complete run, in all ways that it allows if kinds is empty. Writes audit.json and returns its content.

    is_trusted: also if a record from elsewhere names the code. Raises ValueError if it cannot be audited.
    """
    record = recorded.read(folder)
    refuse(record)
    _refuse_strangers(record, is_trusted)
    run, job = record.run, job_of(record, say)
    audits = list[Any]()
    before = certificates.read_audit(folder) if kinds else None  # what they do not test is still known
    contestant = {"config_id": run["config_id"], "source_sha256": run["code"]["source_sha256"]}
    for kind in kinds or counterfactual.KINDS + (() if job.script else (final_weights.KIND,)):
        has_run = any(audit.get("run") for audit in audits)
        looks = job.script is not None and "look=off" not in job.overrides and not has_run
        try:
            audits.append({"kind": kind} | _audit_of(kind, folder, job.with_look(looks), run, say))
        except NotPossible as error:
            audits.append({"kind": kind, "outcome": NOT_POSSIBLE, "why": str(error), "run": None})
        say("audit", f"{kind.replace('_', ' ')}: {audits[-1]['outcome'].upper()}: {audits[-1]['why']}")
    if before and contestant.items() <= before.items():
        audits += [audit for audit in before["audits"] if audit["kind"] not in kinds]
    audited: certificates.Audit = {
        "run": f"{run['track']}/{run['run_id']}",
        "config_id": run["config_id"],
        "source_sha256": run["code"]["source_sha256"],
        "at": utc.now(),
        "claimed_nats": run["metrics"]["val_loss"],
        "outcome": outcome_of([verdict["outcome"] for verdict in audits]),
        "unnoticed_nats": min(
            (verdict["unnoticed_nats"] for verdict in audits if "unnoticed_nats" in verdict), default=None
        ),
        "audits": audits,
    }
    atomic.write_json(folder / certificates.AUDIT_FILE, audited)
    return audited


def audit_clock(folder: Path, say: Say, is_trusted: bool = False) -> off_clock.Account:
    """Runs a script again and samples it. Raises ValueError if it is no script, cannot run again, or failed."""
    record = recorded.read(folder)
    run = record.run
    if not run.get("script"):
        raise ValueError(f"{folder.name}: it is not a script's run, and a model is timed by the harness's own loop")
    refuse(record, own_data_too=True)
    _refuse_strangers(record, is_trusted)
    job = job_of(record, say)
    assert job.script is not None
    about = {"run": f"{run['track']}/{run['run_id']}", "kind": CLOCK}
    scratch = Path(tempfile.mkdtemp(prefix="speedrun-samples-"))
    try:
        audited = _launched(job.with_look(False), about, {line_sampler.VARIABLE: scratch})
        if audited["status"] != "complete":
            raise ValueError(f"{folder.name}: the audit run ended as {audited['status']}: {audited['failure']}")
        samples = scratch / line_sampler.FILE
        lines = samples.read_text().splitlines() if samples.exists() else []
    finally:
        shutil.rmtree(scratch)
    stamps_ns = [(line.t_ns, line.is_val) for line in printed_times.events(step_files.read(audited["folder"]))]
    sources = {
        name.removeprefix("script/"): path.read_text(errors="replace") for name, path in job.script.sources.items()
    }
    try:
        account = off_clock.account(lines, job.script.file, sources, stamps_ns, audited["metrics"]["train_s"])
    except ValueError as error:
        raise ValueError(f"{folder.name}: {error}") from None
    atomic.write_json(folder / CLOCK_FILE, account)
    return account


def _launched(job: Job, about: Mapping[str, Any], folders: Mapping[str, Path]) -> Run:
    """Returns the record of an audit run. folders: {variable that the run sees: the folder that it names}."""
    folders = {"SPEEDRUN_RESULTS": results_root() / AUDITS_FOLDER, **folders}
    with variables({name: str(path.absolute()) for name, path in folders.items()}):
        return launcher.launch(job, ["audit", about["run"].rpartition("/")[2]], plan={"audit": about})


def outcome_of(outcomes: Sequence[str]) -> str:
    """Returns FAILED if one of the outcomes is, NOT_POSSIBLE if all are, PASSED if the others are, else DOUBTED."""
    if FAILED in outcomes:
        return FAILED
    if all(outcome == NOT_POSSIBLE for outcome in outcomes):
        return NOT_POSSIBLE
    return PASSED if all(outcome in (PASSED, NOT_POSSIBLE) for outcome in outcomes) else DOUBTED


def refuse(record: Recorded, own_data_too: bool = False) -> None:
    """Raises ValueError if the run cannot be audited. own_data_too: accept scripts that bring their own data."""
    run, why = record.run, None
    if run.get("audit"):
        why = f"is itself an audit run: audit {run['audit']['run']} instead"
    elif run["data"]["source"] == "script" and not own_data_too:
        why = "cannot be audited: it brings its own data, which an audit cannot replace"
    elif run["hardware"].get("nodes"):
        why = "cannot be audited: it ran on several nodes; audit a run on one node"
    if why is not None:
        raise ValueError(f"{record.folder.name}: {why}")


def _refuse_strangers(record: Recorded, is_trusted: bool) -> None:
    rebuilding.refuse_interpolations(record)
    if not is_trusted and rebuilding.names_code(record) and not rebuilding.is_ours_by_ledger(record):
        why = "this machine's ledger does not have it, and its settings name code, which an audit runs as you"
        raise ValueError(f"{record.folder.name}: {why}: read that code, then add --trust")


def job_of(record: Recorded, say: Say) -> Job:
    """Returns the run as a job of today. Raises ValueError if its settings or code are not here."""
    run, hardware = record.run, record.run["hardware"]
    overrides = [value for value in record.overrides if not value.lstrip("+~").startswith(LEFT_OUT)]
    overrides += [f"seed={run['seed']}", f"hardware.device={hardware['device']}"]
    overrides += [f"hardware.num_processes={hardware['num_processes']}"]
    overrides = list(dict.fromkeys(overrides))
    if run.get("script"):
        for key in ("path", "root"):
            if value := record.config["script"].get(key):
                is_inside = value.startswith("./")  # inside the checkout
                overrides.append(f"script.{key}={REPO / value[2:] if is_inside else os.path.expanduser(value)}")
    job = prepare(overrides, say=lambda text: say("data", text))
    if job.script:
        differing = job.script.sha256_by_name != run["script"]["sha256_by_file"]
    else:
        differing = job.source_sha256 != run["code"]["source_sha256"]
    if differing or job.config_id != run["config_id"]:
        problem = f"the {'sources' if differing else 'settings'} here differ from the record's"
        raise ValueError(f"{record.folder.name}: {problem}: check out what the run used, then audit it")
    from bench.launch.script import opened_files  # imports numpy, which a judge does not need

    if changed := next(opened_files.changed_since(run, job), None):
        raise ValueError(f"{record.folder.name}: {changed} is not as the run read it: race again, then audit that")
    return job


def seeds_for(results: Path, run: Facts) -> dict[str, int]:
    """Returns {kind: the seed of its audit of this contestant}: that of one of its runs in the same race, or in none.

    Which one follows from the hashes of these runs, which nobody knows before the last of them has ended, and from a
    secret of this user: so a contestant cannot be honest with the audited seed alone, nobody can choose runs for which
    it comes out well, and an audit that is interrupted draws no other one.  results: the folder that has the runs.
    """
    mine, race_id = _contestant(run), (run.get("race") or {}).get("race_id")
    ends: dict[str, int] = {}  # {hash of a run: its seed}
    for name, entry in ledger.read(results).runs.items():
        start, end = entry["start"], entry["end"]
        race: Mapping[str, Any] = start["race"] or {}
        is_counted = end is not None and end["status"] == "complete" and not race.get("discarded")
        is_its_own = (start["config_id"], start["source_sha256"], race.get("race_id")) == (*mine, race_id)
        sha256 = end.get("run_json_sha256") if end and is_counted and is_its_own else None
        if sha256 and sha256 == ledger.sha256_of(results / name / "run.json"):
            ends[sha256] = start["seed"] or 0
    seeds, anchor = sorted({*ends.values()} or {run["seed"]}), " ".join(sorted(ends))

    def draw(kind: str) -> int:
        return int(private.secret_hash(f"{kind} {anchor}"), 16) % len(seeds)

    return {kind: seeds[draw(kind)] for kind in counterfactual.KINDS}


def _contestant(run: Facts) -> tuple[str, str]:
    return run["config_id"], run["code"]["source_sha256"]


def _audit_of(kind: str, folder: Path, job: Job, run: Run, say: Say) -> dict[str, Any]:
    """Returns {"outcome", "why", "run", ...} of one audit; that of the final weights has no run."""
    if kind == final_weights.KIND:
        say("audit", f"{kind}: evaluate the final weights of run {run['run_id']} in new processes")
        return final_weights.verdict(folder, run, job)
    say("audit", f"{kind.replace('_', ' ')}: run {run['run_id']} on other data, untimed")
    audited_name, root = f"{run['track']}/{run['run_id']}", results_root() / AUDITS_FOLDER
    config = dataclasses.replace(job.config, seed=seeds_for(folder.parents[1], run)[kind])
    facts, audited = run_on_other_data(kind, dataclasses.replace(job, config=config), audited_name, root)
    if line := after_race.line(audited):
        say("look", line)
    name, failure = f"{audited['track']}/{audited['run_id']}", audited["failure"] or {}
    if audited["status"] != "complete":
        why = f"the audit run ended as {audited['status']}: {failure.get('message')}"
        return {"outcome": DOUBTED, "why": why, "run": name}
    nats = list(step_files.validations(audited["folder"]).values())
    return counterfactual.verdict(kind, facts, run["metrics"]["val_loss"], nats) | {"run": name}


def run_on_other_data(kind: str, job: Job, name: str, results: Path) -> tuple[dict[str, Any], Run]:
    """Runs the job once on data of this kind. Returns (facts of the data, the record in results, an audit of name).

    Raises NotPossible, and KeyboardInterrupt with the number of the signal after an interrupt.
    """
    seed = random.SystemRandom().getrandbits(63)
    eos_token, root = datasets.chosen(job.config.data).eos_token, data_root()
    root.mkdir(parents=True, exist_ok=True)
    with scratch_folder(root) as scratch:
        val_tokens = job.config.goal.val_tokens
        dataset, facts = counterfactual.make(kind, job.dataset, val_tokens, eos_token, scratch, seed)
        about = {"run": name, "kind": kind, "seed": seed, **facts}
        folders = {"SPEEDRUN_RESULTS": results, "SPEEDRUN_DATA": scratch}
        run = _launched(dataclasses.replace(job, dataset=dataset), about, folders)
    if failures.is_interrupt(run["failure"]):
        raise KeyboardInterrupt(signal.Signals[failures.interrupted_by(run) or "SIGINT"])
    return facts, run


@contextlib.contextmanager
def scratch_folder(root: Path) -> Iterator[Path]:
    """Context that yields a folder for an audit's data. Removes those of audits that were killed."""
    for left in root.glob(f"{SCRATCH}*"):
        if not locks.holder(left / state.LOCK):
            atomic.remove_left(root, left.name)
    with tempfile.TemporaryDirectory(dir=root, prefix=SCRATCH) as name:
        folder = Path(name)
        with locks.held(folder / state.LOCK, "audits"):
            yield folder


def outcomes_here(results: Path, run: Facts, seed_by_kind: Mapping[str, int] | None = None) -> dict[str, set[str]]:
    """Returns {kind: outcomes} of all audits of a contestant whose runs are in this machine's own ledger of audits.

    results: this machine's results folder; run: a record of the contestant; seed_by_kind: seeds_for() it, as an audit
    with another seed only counts if it FAILED; None: with any.  What the runs show is judged again, because anybody can
    write the audit.json beside a record.  An audit run that was removed or changed since counts as FAILED.
    """
    outcomes: dict[str, set[str]] = {}
    for name, entry in ledger.runs_of(ledger.read(results / AUDITS_FOLDER).own_lines).items():
        start, end, folder = entry["start"], entry["end"], results / AUDITS_FOLDER / name
        is_its_own = (start["config_id"], start["source_sha256"]) == _contestant(run)
        if not is_its_own or end is None or end["status"] == "aborted":
            continue
        kind, outcome = f"{name} (removed or changed)", FAILED
        with contextlib.suppress(Damaged, OSError):
            if not ledger.is_changed(folder, end):
                rerun, nats = cast(Run, run_folder.read(folder)), list(step_files.validations(folder).values())
                facts, claimed_nats = rerun["audit"], run["metrics"]["val_loss"] or 0.0
                kind, outcome = facts["kind"], DOUBTED
                if rerun["status"] == "complete" and kind in counterfactual.KINDS:
                    outcome = counterfactual.verdict(kind, facts, claimed_nats, nats)["outcome"]
                if outcome == PASSED and seed_by_kind and rerun["seed"] != seed_by_kind[kind]:
                    continue
        outcomes.setdefault(kind, set()).add(outcome)
    return outcomes


def passed_here(results: Path, run: Facts, kinds: Sequence[str] = (), runs: Path | None = None) -> bool:
    """Whether a contestant has passed an audit of each of these kinds on this machine, and failed none.

    results, run: see outcomes_here().  runs: the folder that has its runs, if another one.  kinds: with any seed; by
    default, with those of seeds_for(), all that the run's data allow.
    """
    outcomes = outcomes_here(results, run, None if kinds else seeds_for(runs or results, run))
    num_tokens = sum(file["num_tokens"] for file in run["data"]["val"])
    kinds = kinds or counterfactual.possible(num_tokens, run["goal"]["val_tokens"])
    has_failed = any(FAILED in outcome for outcome in outcomes.values())
    return not has_failed and all(PASSED in outcomes.get(kind, ()) for kind in kinds)


def contestants(folders: Sequence[Path]) -> list[Path]:
    """Returns the last run of each config and code: the others are the same contestant."""
    by_kind = {}
    for folder in folders:
        run = run_folder.read(folder)
        by_kind[run["config_id"], (run.get("code") or {}).get("source_sha256")] = folder
    return list(by_kind.values())
