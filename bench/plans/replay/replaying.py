"""A record, run again and judged: the way from a run folder to its certificate; and the same way again for a judge.

A judge believes nothing in a certificate: its outcome is computed again from replays that this machine made, runs of
results/replays that its ledger has from start to end, unchanged since, which pass `verify`, ran the record's code,
settings and data, and have step times of their own.  A certificate that came with a record is its bearer's claim.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.machine import code_state, environment
from bench.machine.preflight import Check
from bench.plans.replay import certificate, outcomes, rebuilding, repeats, running
from bench.plans.replay.certificate import Certificate, Field
from bench.plans.replay.rebuilding import Recorded
from bench.record import certificates, ledger, run_folder, step_files, verification
from bench.record.rows import row_of

FRESH_SEED = 1000  # added to the record's: its repeats have the next ones


@dataclass(frozen=True)
class Asked:
    """What the user wants of a replay."""

    times: int | None = None  # runs of fresh seeds; None: one of the record's own seed
    keep_env: bool = False  # this shell's variables, not the record's
    show: bool = False  # pass on what the runs print
    trust: bool = False  # run the code that somebody else's record brings


def foreseen(recorded: Recorded) -> tuple[list[Check], list[Field]]:
    """Before any work: what is missing here, and where this machine's environment is not the record's."""
    whole = environment.environment()
    here = environment.summary(whole, rebuilding.hardware_of(recorded)) | {"variables": certificate.variables(whole)}
    fields = certificate.differences(certificate.environment_of(recorded), here)
    return rebuilding.checks(recorded), [field for field in fields if field.name != "variables"]


def replay(recorded: Recorded, checks: list[Check], asked: Asked, say: Callable[[str, str], None]) -> Certificate:
    """Run it again and write the certificate beside it and its replays.  checks: of foreseen().

    A record that `verify` refuses gets none: its certificate is returned, and not written.  ValueError: it brings
    code, is not in this machine's ledger, and asked does not trust it.
    """
    if not asked.trust:
        rebuilding.refuse_strangers_code(recorded)
    missing = [check for check in checks if check.status == "fail"]
    if missing:
        made = certificate.impossible(recorded, "; ".join(f"{check.name}: {check.found}" for check in missing))
        return made if is_refused(checks) else _written(made, [recorded.folder])
    replayed: list[Recorded] = []
    try:
        for one in _runs(recorded, asked, say):
            replayed.append(one)
    except ValueError as error:
        return _written(certificate.impossible(recorded, str(error)), [recorded.folder])
    return _written(judged(recorded, replayed), [recorded.folder, *(one.folder for one in replayed)])


def is_refused(checks: list[Check]) -> bool:
    """Whether `verify` refuses the record, so that it gets no certificate."""
    return any(check.name == rebuilding.THE_RECORD and check.status == "fail" for check in checks)


def _written(made, folders):
    certificate.write(made, folders)
    return made


def _runs(recorded, asked, say) -> Iterator[Recorded]:
    """The replays, one after the other.  ValueError: the code here is not the record's, or a run failed."""
    variables = None if asked.keep_env else certificate.variables(certificate.machine_of(recorded))
    with rebuilding.checkout(recorded) as made:
        rebuilding.refuse_other_code(recorded, made)
        env = running.environment(made, variables)
        words = rebuilding.words(recorded, made.own)
        _agree(recorded, running.identity(made.code, [*words, f"seed={recorded.run['seed']}"], env))

        def trained(seed, which, perturbation=()):
            say("replay", f"{which}, seed {seed}, of code {recorded.run['code']['commit'][:8]}")
            with running.alone(say):
                folder = running.run(
                    made.code, [*words, f"seed={seed}"], env | dict(perturbation), recorded.name, asked.show
                )
            run = run_folder.read(folder)
            if run["status"] != "complete":
                why = (run["failure"] or {}).get("message") or run["status"]
                raise ValueError(f"its replay {run['run_id']} is {run['status']}: {why}")
            fresh = rebuilding.read(folder)
            agree(recorded, fresh)
            return fresh

        if asked.times:
            for number, seed in enumerate(fresh_seeds(recorded, asked.times), 1):
                yield trained(seed, f"run {number} of {asked.times}")
            return
        seed = recorded.run["seed"]
        replayed = [trained(seed, "run 1")]
        yield replayed[0]
        while more := further(recorded, replayed):
            why, perturbation = more
            replayed.append(trained(seed, f"run {len(replayed) + 1}, {why}", perturbation))
            yield replayed[-1]


def further(recorded: Recorded, replayed: list[Recorded]) -> tuple[str, Mapping[str, str]] | None:
    """(why, variables) of the replay that would say more; None: these say all that can be said."""
    outcome = outcome_of(recorded, replayed)
    if outcome.needs == outcomes.PERTURBED:
        left = outcomes.perturbations(recorded.run["hardware"].get("dtype") or "float32")
        number = len(replayed) - 1
        if number < len(left):
            return "at another instruction set, to measure what rounding does to this run", left[number]
    if outcome.needs == outcomes.TWIN and len(replayed) < 3:
        return "as the first: is this run deterministic here?", {}
    if len(replayed) == 1 and repeats.needs_twin(time_of(recorded, replayed)):
        return "as the first: does this machine take as long again?", {}
    return None


def fresh_seeds(recorded: Recorded, num_runs: int) -> list[int]:
    """Nobody chooses them: the record's own and FRESH_SEED more, and the next ones."""
    return [recorded.run["seed"] + FRESH_SEED + number for number in range(num_runs)]


def recomputed(folder: Path) -> Certificate:
    """The certificate that this machine's replays of a run give today.  ValueError says why there is none."""
    recorded = rebuilding.read(folder)
    made_here = certificates.entries(recorded.name, certificates.losses_sha256(recorded.run))
    if not made_here:
        raise ValueError(f"{_claim_of(folder)}: ./run.sh replay {folder.name}")
    root = certificates.replays_root()
    book = ledger.read(root)
    if book.faults:
        raise ValueError(f"the ledger of this machine's replays is not intact: {book.faults[0]}")
    names = made_here[-1].get("replays") or []
    replayed = [_read_replay(book, name) for name in names]
    if not replayed:
        raise ValueError(f"its last replay here names no run: ./run.sh replay {folder.name}")
    for one in replayed:
        agree(recorded, one)
        _is_no_copy(recorded, one)
    _has_the_right_seeds(recorded, replayed)
    return judged(recorded, replayed)


def _claim_of(folder):
    """What the file beside the record says, in words that do not believe it."""
    try:
        found = certificates.read(folder)
    except ValueError as error:
        return f"its certificate was not written by ./run.sh replay ({error}), and no replay was made here"
    if found is None:
        return "has no certificate, and no replay of it was made here"
    return f"its certificate claims '{found['outcome']}', which was not checked: no replay of it was made here"


def _read_replay(book, name) -> Recorded:
    """A replay of this machine.  ValueError: it is not there as the ledger has it."""
    entry, folder = book.runs.get(name), book.results / name
    if entry is None or entry["end"] is None:
        raise ValueError(f"its replay {name} is not in the ledger of this machine's replays, from start to end")
    if not (folder / "run.json").is_file():
        raise ValueError(f"its replay {name} no longer exists: replay it again")
    if ledger.sha256_of(folder / "run.json") != entry["end"]["run_json_sha256"]:
        raise ValueError(f"its replay {name} was changed after it ran")
    failed = [rule for rule in verification.report(folder)["rules"] if not rule["passed"]]
    if failed:
        raise ValueError(f"its replay {name} fails ./run.sh verify, {failed[0]['rule']}: {failed[0]['evidence']}")
    return rebuilding.read(folder)


def _is_no_copy(recorded, replayed):
    """Two runs never take the same time at each step, to the last digit."""
    steps_ms = [step_files.read_columns(one.folder, ["step_ms"])["step_ms"] for one in (recorded, replayed)]
    is_timed = any(value is not None for value in steps_ms[0])
    if is_timed and steps_ms[0] == steps_ms[1] or recorded.name == replayed.name:
        raise ValueError(f"its replay {replayed.name} is a copy: every step time is the record's")


def _has_the_right_seeds(recorded, replayed):
    """The record's own, or the fresh ones that nobody chooses."""
    seeds, own = [one.run["seed"] for one in replayed], recorded.run["seed"]
    if seeds not in ([own] * len(seeds), fresh_seeds(recorded, len(seeds))):
        raise ValueError(f"its replays have seeds {', '.join(map(str, seeds))}, which ./run.sh replay does not choose")


def judged(recorded: Recorded, replayed: list[Recorded]) -> Certificate:
    """What these replays show of the record: some of its own seed, or several of fresh seeds."""
    if replayed[0].run["seed"] != recorded.run["seed"]:
        time = repeats.of_rows(row_of(recorded.run), [row_of(one.run) for one in replayed])
        return certificate.of_several(recorded, replayed, *_of_fresh_seeds(recorded, replayed), time)
    return certificate.of_one(recorded, replayed, outcome_of(recorded, replayed), time_of(recorded, replayed))


def outcome_of(recorded: Recorded, replayed: list[Recorded]) -> outcomes.Outcome:
    """What the losses of one or more replays of the record's own seed show."""
    first, twins, perturbed = _roles(replayed)
    rows = [[step_files.read(run.folder) for run in runs] for runs in ([recorded, first], twins, perturbed)]
    hardware = recorded.run["hardware"]
    fields = certificate.differences(certificate.environment_of(recorded), certificate.environment_of(first))
    conditions = outcomes.Conditions(
        is_same=_is_same(recorded, first),
        dtype=hardware.get("dtype") or "float32",
        is_cpu=hardware.get("device") == "cpu",
        is_script=bool(recorded.run.get("script")),
        is_other_software=any(field.name in ("torch", "libraries") for field in fields),
    )
    return outcomes.of_losses(*rows[0], conditions, *rows[1:])


def time_of(recorded: Recorded, replayed: list[Recorded]) -> repeats.Time:
    """Whether the time came again, by the replays that ran as the record did."""
    first, twins, _ = _roles(replayed)
    return repeats.of_rows(row_of(recorded.run), [row_of(one.run) for one in (first, *twins)])


def _roles(replayed):
    """-> (the first, those like it, those at another instruction set)."""
    first, *others = replayed
    twins = [run for run in others if _is_same(first, run)]
    return first, twins, [run for run in others if run not in twins]


def _is_same(one, other):
    """Whether machine and software are known to be the same, in all that decides bits."""
    ours, theirs = certificate.environment_of(one), certificate.environment_of(other)
    session_ids = certificate.session_ids(one, other)
    return not one.run.get("nodes") and certificate.decide_the_same_bits(ours, theirs, session_ids)


def _of_fresh_seeds(recorded, replayed):
    """-> (word, sentence, numbers)."""
    track, metrics = recorded.config["track"], recorded.run["metrics"]
    losses = [one.run["metrics"]["val_loss"] for one in replayed]
    target = (recorded.run.get("goal") or {}).get("target_val_loss")
    return repeats.judged_losses(metrics["val_loss"], losses, target, track["p_value"], metrics.get("target_reached"))


def agree(recorded: Recorded, replayed: Recorded) -> None:
    """ValueError: the replay is not one of the record's code, settings and data."""
    _agree(recorded, {"config_id": replayed.run["config_id"], "source_sha256": replayed.run["code"]["source_sha256"]})
    _same_used_code(recorded, replayed.run)
    _same_settings(recorded, replayed)
    _same_data(recorded, replayed)


def _agree(recorded, result):
    """The code and the settings are the record's; result: None where they could not be asked for."""
    if result is None:
        return
    wanted = {"config_id": recorded.run["config_id"], "source_sha256": recorded.run["code"]["source_sha256"]}
    if recorded.run.get("script"):  # which lies elsewhere now: its path is hashed
        del wanted["config_id"]
    if rebuilding.unused(recorded):  # which are not here: their hashes are part of the whole
        del wanted["source_sha256"]
    for key, value in wanted.items():
        if result[key] != value:
            what = "settings" if key == "config_id" else "code"
            raise ValueError(
                f"the {what} that the record holds give {key} {result[key][:12]}, and run.json says {value[:12]}: "
                f"{rebuilding.CHANGED}"
            )


def _same_used_code(recorded, run):
    """Of a script that did not use all that lay beside it: every file but those is the same."""
    differing = code_state.differing_files(recorded.run["code"], run["code"])
    others = [name for name in differing or () if name not in rebuilding.unused(recorded)]
    if rebuilding.unused(recorded) and (differing is None or others):
        raise ValueError(f"the code that the record holds is not the one that run.json names: {', '.join(others[:3])}")


def _same_settings(recorded, replayed):
    """Of a script, whose config_id cannot say so."""
    if not recorded.run.get("script"):
        return
    theirs, ours = (
        one.config | {"name": None, "script": one.config["script"] | {"path": None}} for one in (recorded, replayed)
    )
    differing = [group for group in theirs if theirs[group] != ours.get(group)]
    if differing:
        raise ValueError(f"the settings that the record holds give another {', '.join(differing)} than its config.yaml")


def _same_data(recorded, replayed):
    for split in ("train", "val"):
        theirs, ours = ([shard["sha256"] for shard in one.run["data"][split]] for one in (recorded, replayed))
        if theirs != ours:
            raise ValueError(f"the {split} shards here are not those of the record: another sha256")
