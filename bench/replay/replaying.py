"""A record, run again and judged: the way from a run folder to its certificate."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.machine import code_state, environment
from bench.machine.check import Check
from bench.record import run_folder, step_files
from bench.replay import certificate, environments, outcomes, rebuilding, repeats, running
from bench.replay.certificate import Certificate
from bench.replay.environments import Field
from bench.replay.rebuilding import Recorded

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
    here = environment.summary(whole, rebuilding.hardware_of(recorded)) | {"variables": environments.variables(whole)}
    recorded_variables = environments.variables(certificate.environment_of(recorded))
    fields = environments.differences(recorded.run["environment"] | {"variables": recorded_variables}, here)
    return rebuilding.checks(recorded), [field for field in fields if field.name != "variables"]


def replay(recorded: Recorded, checks: list[Check], asked: Asked, say: Callable[[str, str], None]) -> Certificate:
    """Run it again and write the certificate beside it and its replays.  checks: of foreseen().

    ValueError: it brings code, is not in this machine's ledger, and asked does not trust it.
    """
    if not asked.trust:
        rebuilding.refuse_strangers_code(recorded)
    missing = [check for check in checks if check.status == "fail"]
    if missing:
        words = "; ".join(f"{check.name}: {check.found}" for check in missing)
        return _written(certificate.impossible(recorded, words), [recorded.folder])
    replayed: list[Recorded] = []
    try:
        for one in _runs(recorded, asked, say):
            replayed.append(one)
    except ValueError as error:
        return _written(certificate.impossible(recorded, str(error)), [recorded.folder])
    result = _one(recorded, replayed[0]) if asked.times is None else _several(recorded, replayed)
    return _written(result, [recorded.folder, *(one.folder for one in replayed)])


def _written(result, folders):
    certificate.write(result, folders)
    return result


def _runs(recorded, asked, say) -> Iterator[Recorded]:
    """The replays, one after the other.  ValueError: the code here is not the record's, or a run failed."""
    variables = None if asked.keep_env else environments.variables(certificate.environment_of(recorded))
    seed = recorded.run["seed"]
    seeds = [seed] if asked.times is None else [seed + FRESH_SEED + number for number in range(asked.times)]
    with rebuilding.checkout(recorded) as made:
        rebuilding.refuse_other_code(recorded, made)
        env = running.environment(made, variables)
        words = rebuilding.words(recorded, made.own)
        _agree(recorded, running.identity(made.code, [*words, f"seed={seed}"], env))
        for number, seed in enumerate(seeds, 1):
            say("replay", f"run {number} of {len(seeds)}, seed {seed}, of code {recorded.run['code']['commit'][:8]}")
            folder = running.run(made.code, [*words, f"seed={seed}"], env, recorded.name, asked.show)
            run = run_folder.read(folder)
            if run["status"] != "complete":
                why = (run["failure"] or {}).get("message") or run["status"]
                raise ValueError(f"its replay {run['run_id']} is {run['status']}: {why}")
            result = rebuilding.read(folder)
            _agree(recorded, {"config_id": run["config_id"], "source_sha256": run["code"]["source_sha256"]})
            _same_used_code(recorded, run)
            _same_settings(recorded, result)
            _same_data(recorded, result)
            yield result


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


def _one(recorded, replayed):
    dtype = recorded.run["hardware"].get("dtype") or "float32"
    rows = [step_files.read(one.folder) for one in (recorded, replayed)]
    return certificate.of_one(recorded, replayed, outcomes.of_losses(*rows, dtype))


def _several(recorded, replayed):
    track, metrics = recorded.config["track"], recorded.run["metrics"]
    losses = [one.run["metrics"]["val_loss"] for one in replayed]
    target = (recorded.run.get("goal") or {}).get("target_val_loss")
    word, why, facts = repeats.judged(
        metrics["val_loss"], losses, target, track["p_value"], metrics.get("target_reached")
    )
    comparable = len({one.run["comparability_id"] for one in (recorded, *replayed)}) == 1
    comparable &= len({one.run["session_id"] for one in (recorded, *replayed)}) == 1
    times_s = [one.run["metrics"]["train_s"] for one in replayed]
    of_time, time_facts = repeats.time_facts(metrics["train_s"], times_s, comparable)
    return certificate.of_several(recorded, replayed, word, f"{why}; {of_time}", facts | time_facts)
