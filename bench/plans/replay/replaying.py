"""Replays a record and judges it: from a run folder to its certificate, and the same again for a judge.

A judge trusts no certificate. It computes the outcome again from replays that this machine made: runs of
results/replays that its ledger has from start to end, unchanged since, which pass `verify`, ran the record's code,
settings and data, and have different step times. A certificate that came with a record is only a claim.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bench.config import groups
from bench.machine import code_state, environment, leases, processes, sandbox
from bench.machine.preflight import Check
from bench.plans.replay import certificate, outcomes, rebuilding, recorded, repeats
from bench.plans.replay.certificate import Field
from bench.plans.replay.outcomes import Outcome
from bench.plans.replay.recorded import Recorded
from bench.record import certificates, ledger, run_folder, step_files, verification
from bench.record.certificates import Certificate
from bench.record.rows import row_of
from bench.record.shape import Record

OWN_CONF = ".conf"  # in the folder of a user's own classes: yamls that stand for theirs
# Kinds of failure (bench/record/failures.py) that come from the machine's state, not from what the record holds.
OF_THE_MACHINE = ("out_of_memory", "disk_full", "disk_error", "rank_killed", "agent_killed", "launcher_killed")
FRESH_SEED = 1000  # added to the record's seed, because its repeats have the next ones
Say = Callable[[str, str], None]


@dataclass(frozen=True)
class Options:
    """The options of ./run.sh replay."""

    times: int | None = None  # runs of fresh seeds; None: one of the record's own seed
    keep_env: bool = False  # keep this shell's variables instead of the record's
    show: bool = False  # print the output of the runs
    trust: bool = False  # run code of somebody else's record as this user, without a sandbox


def foreseen(record: Recorded) -> tuple[list[Check], list[Field]]:
    """Returns, before any work, the checks of what is needed here, and the fields in which the environment differs."""
    current = environment.summary(environment.environment(), record.hardware)
    return recorded.checks(record), certificate.differences(record.run["environment"], current)


def replay(record: Recorded, checks: list[Check], options: Options, say: Say) -> Certificate:
    """Runs the record again, writes the certificate beside it and its replays, and returns it. checks are foreseen()'s.

    If `verify` refuses the record, its certificate is returned but not written. A record that brings code and is not in
    this machine's ledger runs in a sandbox, unless options trust it. Raises ValueError if there is no sandbox, and an
    error for which is_of_machine() is true if the machine was busy.
    """
    rebuilding.refuse_interpolations(record)
    brought, kind = [] if options.trust else rebuilding.strangers_code(record), None
    if brought:
        try:
            kind = sandbox.kind()
        except sandbox.Refused as error:
            problem = f"{record.name}: brings code ({', '.join(brought)}) and is not in this machine's ledger"
            raise ValueError(f"{problem}, and {error}; or read that code, and add --trust to run it as you") from None
        say("sandbox", f"{kind}, no network: not in this machine's ledger, the record brings {', '.join(brought)}")
    missing = [check for check in checks if check.status == "fail"]
    replayed: list[Recorded] = []
    try:
        if missing:
            raise ValueError("; ".join(f"{check.name}: {check.found}" for check in missing))
        replayed += _runs(record, options, say, bool(brought))
    except ValueError as error:
        if is_of_machine(error):
            raise
        certified, replayed = certificate.impossible(record, str(error)), []
    else:
        certified = judged(record, replayed)
        certified["sandbox"] = kind
    if not is_refused(checks):
        certificate.write(certified, [record.folder, *(run.folder for run in replayed)])
    return certified


def is_of_machine(error: Exception) -> bool:
    """Returns whether a replay failed because of the machine's state, not the record's: no certificate may say so."""
    return isinstance(error, leases.Busy) or processes.shortage(str(error)) is not None


def is_refused(checks: list[Check]) -> bool:
    """Returns whether `verify` refuses the record, so that it gets no certificate."""
    return any(check.name == recorded.THE_RECORD and check.status == "fail" for check in checks)


def _runs(record: Recorded, options: Options, say: Say, is_confined: bool) -> Iterator[Recorded]:
    """Yields the replays, one after the other. Raises ValueError if the code is not the record's, or a run failed."""
    seed = record.run["seed"]
    with rebuilding.checkout(record) as tree:
        rebuilding.refuse_other_code(record, tree)
        env = rebuilding.variables_at(tree, None if options.keep_env else record.environment["variables"])
        overrides = rebuilding.overrides_of(record, tree, is_confined)
        if groups.VARIABLE not in os.environ and (own := rebuilding.own_choices(record, tree.code)):
            say("settings", f"{', '.join(own)}: not in the code's conf/: taken from config.yaml; or name --config-dir")
            env[groups.VARIABLE] = str(tree.own / OWN_CONF)
            overrides = rebuilding.without_choices(record, overrides, tree.code, tree.own / OWN_CONF)
        confined = rebuilding.Sandbox(record, tree, recorded.has_data(record)) if is_confined else None
        _agree(record, rebuilding.identity(tree.code, [*overrides, f"seed={seed}"], env, confined))

        def trained(seed: int, which: str, perturbation: Mapping[str, str]) -> Recorded:
            say("replay", f"{which}, seed {seed}, of code {record.run['code']['commit'][:8]}")
            with rebuilding.alone(say):
                run_with = [*overrides, f"seed={seed}"], env | dict(perturbation)
                folder = rebuilding.train(tree.code, *run_with, record.name, options.show, confined)
            run: Any = run_folder.read(folder)
            if run["status"] != "complete":
                failure = run["failure"] or {"kind": None, "message": run["status"]}
                kind = leases.Busy if failure["kind"] in OF_THE_MACHINE else ValueError
                raise kind(f"its replay {run['run_id']} is {run['status']}: {failure['message']}")
            fresh = recorded.read(folder)
            agree(record, fresh)
            return fresh

        if options.times:
            for number, fresh_seed in enumerate(fresh_seeds(record, options.times), 1):
                yield trained(fresh_seed, f"run {number} of {options.times}", {})
            return
        replayed = [trained(seed, "run 1", {})]
        yield replayed[0]
        while next_run := further(record, replayed):
            why, perturbation = next_run
            replayed.append(trained(seed, f"run {len(replayed) + 1}, {why}", perturbation))
            yield replayed[-1]


def further(record: Recorded, replayed: list[Recorded]) -> tuple[str, Mapping[str, str]] | None:
    """Returns (why, variables) of a further replay that would settle more; None if none would."""
    outcome = outcome_of(record, replayed)
    if outcome.needs == outcomes.PERTURBED:
        untried = outcomes.perturbations(record.run["hardware"].get("dtype") or "float32")[len(replayed) - 1 :]
        if untried:
            return "at another instruction set, to measure what rounding does to this run", untried[0]
    if outcome.needs == outcomes.TWIN and len(replayed) < 3:
        return "as the first: is this run deterministic here?", {}
    if len(replayed) == 1 and time_of(record, replayed).word == repeats.UNDECIDED:
        return "as the first: does this machine take as long again?", {}
    return None


def fresh_seeds(record: Recorded, num_runs: int) -> list[int]:
    """Returns the seeds of repeats, which nobody can choose: consecutive ones from FRESH_SEED above the record's."""
    return [record.run["seed"] + FRESH_SEED + number for number in range(num_runs)]


# ---- what the replays show


def judged(record: Recorded, replayed: list[Recorded]) -> Certificate:
    """Returns the certificate of these replays, either of the record's own seed or of several fresh seeds."""
    if replayed[0].run["seed"] == record.run["seed"]:
        return certificate.from_replays(record, replayed, outcome_of(record, replayed), time_of(record, replayed))
    metrics, losses = record.run["metrics"], [run.run["metrics"]["val_loss"] for run in replayed]
    target = (record.run.get("goal") or {}).get("target_val_loss")
    judged_by = record.config["track"]["p_value"], metrics.get("target_reached")
    word, why, facts = repeats.judged_losses(metrics["val_loss"], losses, target, *judged_by)
    return certificate.from_replays(record, replayed, Outcome(word, why, facts=facts), _time(record, replayed))


def outcome_of(record: Recorded, replayed: list[Recorded]) -> Outcome:
    """Returns the outcome by the losses of one or more replays of the record's own seed."""
    first, twins, perturbed = _roles(replayed)
    rows = [[step_files.read(run.folder) for run in runs] for runs in ([record, first], twins, perturbed)]
    hardware = record.run["hardware"]
    fields = certificate.differences(record.environment, first.environment)
    conditions = outcomes.Conditions(
        is_same=certificate.decide_the_same_bits(record, first),
        dtype=hardware.get("dtype") or "float32",
        is_cpu=hardware.get("device") == "cpu",
        is_script=bool(record.run.get("script")),
        is_other_software=any(field.name in ("torch", "libraries") for field in fields),
    )
    return outcomes.from_losses(rows[0][0], rows[0][1], conditions, rows[1], rows[2])


def time_of(record: Recorded, replayed: list[Recorded]) -> repeats.Time:
    """Returns whether the time was reproduced, by the replays that ran as the record did."""
    first, twins, _ = _roles(replayed)
    return _time(record, [first, *twins])


def _time(record: Recorded, replayed: list[Recorded]) -> repeats.Time:
    first, *others = (row_of(cast(Record, run.run)) for run in (record, *replayed))
    return repeats.from_rows(first, others)


def _roles(replayed: list[Recorded]) -> tuple[Recorded, list[Recorded], list[Recorded]]:
    """Returns (the first replay, those like it, those at another instruction set)."""
    first, *others = replayed
    twins = [run for run in others if certificate.decide_the_same_bits(first, run)]
    return first, twins, [run for run in others if run not in twins]


# ---- for a judge


def recomputed(folder: Path) -> Certificate:
    """Returns the certificate that this machine's replays of a run give today. Raises ValueError if there are none."""
    record = recorded.read(folder)
    made_here = certificates.entries(record.name, certificates.losses_sha256(record.run))
    if not made_here:
        raise ValueError(f"{_claimed(folder)}, and no replay of it was made here: ./run.sh replay {folder.name}")
    book = ledger.read(certificates.replays_root())
    if book.faults:
        raise ValueError(f"the ledger of this machine's replays is not intact: {book.faults[0]}")
    # seeds that are fresh say less than the record's own, whose replay they must not replace
    own = record.run["seed"]
    own_seed = [line for line in made_here if {own} == {run_folder.seed_of(name) for name in line.get("replays") or ()}]
    replayed = [_read_replay(book, name) for name in (own_seed or made_here)[-1].get("replays") or []]
    for run in replayed:
        agree(record, run)
        steps_ms, ours_ms = (step_files.read_columns(of.folder, ["step_ms"])["step_ms"] for of in (record, run))
        # two runs never take the same time at each step, to the last digit
        if any(value is not None for value in steps_ms) and steps_ms == ours_ms or record.name == run.name:
            raise ValueError(f"its replay {run.name} is a copy: every step time is the record's")
    seeds = [run.run["seed"] for run in replayed]
    if not seeds or seeds not in ([own] * len(seeds), fresh_seeds(record, len(seeds))):
        raise ValueError(f"its replays have the seeds {seeds}, which ./run.sh replay does not choose: replay it again")
    return judged(record, replayed)


def _claimed(folder: Path) -> str:
    """Returns what a run's certificate is worth if no replay was made here."""
    try:
        claimed = certificates.read(folder)
    except ValueError as error:
        return f"its certificate was not written by ./run.sh replay ({error})"
    return f"its certificate claims '{claimed['outcome']}', which was not checked" if claimed else "has no certificate"


def _read_replay(book: ledger.Ledger, name: str) -> Recorded:
    """Reads a replay of this machine. Raises ValueError if it is not as the ledger has it, or fails verify."""
    entry, folder = book.runs.get(name), book.results / name
    if entry is None or entry["end"] is None or ledger.is_changed(folder, entry["end"]):
        raise ValueError(f"its replay {name} is not as the ledger of replays has it: replay the record again")
    if failed := [rule for rule in verification.report(folder)["rules"] if not rule["passed"]]:
        raise ValueError(f"its replay {name} fails ./run.sh verify, {failed[0]['rule']}: {failed[0]['evidence']}")
    return recorded.read(folder)


def agree(record: Recorded, replayed: Recorded) -> None:
    """Raises ValueError if the replay did not run the record's code, settings and data."""
    theirs, ours = record.run, replayed.run
    _agree(record, {"config_id": ours["config_id"], "source_sha256": ours["code"]["source_sha256"]})
    if record.unused:  # a script did not use some files beside it: all others must be the same
        differing = code_state.differing_files(theirs["code"], ours["code"])
        others = [name for name in differing or () if name not in record.unused]
        if differing is None or others:
            raise ValueError(f"the code that the record holds is not what run.json names: {', '.join(others[:3])}")
    if theirs.get("script"):  # a script's config_id includes its path, so compare the rest
        elsewhere = dict.fromkeys(("path", "root", "rev", "dialect", "sandbox"))
        configs = [
            run.config | {"name": None, "script": run.config["script"] | elsewhere} for run in (record, replayed)
        ]
        if groups := [group for group in configs[0] if configs[0][group] != configs[1].get(group)]:
            raise ValueError(f"the record's settings give another {', '.join(groups)} than its config.yaml")
    for split in ("train", "val"):
        if [shard["sha256"] for shard in theirs["data"][split]] != [shard["sha256"] for shard in ours["data"][split]]:
            raise ValueError(f"the {split} shards here are not those of the record: another sha256")


def _agree(record: Recorded, ids: Mapping[str, str] | None) -> None:
    """Raises ValueError if the code gave other ids than the record's. ids None: it could not give any."""
    if ids is None:
        return
    wanted = {"config_id": record.run["config_id"], "source_sha256": record.run["code"]["source_sha256"]}
    if record.run.get("script"):  # the script lies elsewhere now, and its path is hashed
        del wanted["config_id"]
    if record.unused:  # these files are not here, and the hash includes them
        del wanted["source_sha256"]
    for key, value in wanted.items():
        if ids[key] != value:
            raise ValueError(f"the record gives {key} {ids[key][:12]}, its run.json {value[:12]}: {rebuilding.CHANGED}")
