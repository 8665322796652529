"""What a record needs to be run again, whether this machine has it, and a checkout that holds exactly its code.

The code is the record's commit with its difference and its untracked sources, in a worktree; a user's own classes and a
training script come from the record's code/.  Nothing is taken from the working tree.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from bench.base.credentials import LOGIN, SECRET
from bench.base.paths import REPO, results_root, shown
from bench.base.reading import plain_file, yaml_file
from bench.base.reading.damage import Damaged
from bench.data.shards import CheckFailed
from bench.data.sources import datasets
from bench.machine import code_state, git, processes
from bench.machine.preflight import Check
from bench.plans.race import worktrees
from bench.record import ledger, run_folder, verification

PLACEHOLDER = re.compile(f"{LOGIN}|{SECRET}")  # in overrides.yaml, of a credential
THE_RECORD = "record"  # the name of the check of it
# Settings that a run leaves to the machine: a replay asks for those that the record ran with.
OF_THE_MACHINE = ("device", "num_processes", "num_threads", "dtype", "compile", "micro_batch_seqs")
OWN = ("own", "script")  # folders of code/ with the user's own
CHANGED = "the record was changed or is incomplete"
MADE = ("pysource", "markov")  # sources that this machine can make again


@dataclass(frozen=True)
class Recorded:
    """A run folder as far as a replay reads it."""

    folder: Path
    run: dict  # run.json
    config: dict  # config.yaml, as it stands
    overrides: list[str]  # what the user asked for

    @property
    def name(self) -> str:
        """TRACK/RUN_ID."""
        return f"{self.run['track']}/{self.run['run_id']}"


def read(folder: Path) -> Recorded:
    """ValueError: it is imported, is not complete, or lacks a file."""
    run = run_folder.read(folder)
    if run.get("imported"):
        raise ValueError(f"{folder.name}: is imported from a log, which has no code, settings and data to run again")
    if run["status"] != "complete":
        raise ValueError(f"{folder.name}: its status is {run['status']}: only a complete run can be run again")
    config = yaml_file.read(folder / "config.yaml")
    path = folder / "overrides.yaml"
    overrides = yaml_file.parsed(plain_file.text(path, yaml_file.MAX_BYTES), path) or []
    return Recorded(folder, run, config, overrides)


def with_secrets(recorded: Recorded, values: Sequence[str]) -> Recorded:
    """The record with its credentials in its overrides again.  ValueError: it has others than there are values."""
    names = recorded.run.get("redacted") or []
    if len(names) != len(values):
        what = f"it was recorded without {', '.join(names)}" if names else "it lacks no setting"
        raise ValueError(f"{recorded.name}: {what}, and --fill gives {len(values)} of {len(names)} values")
    given, overrides = dict(zip(names, values, strict=True)), []
    for word in recorded.overrides:
        key = word.partition("=")[0].lstrip("+")
        shown = [name for name in given if name.startswith(key)] if PLACEHOLDER.search(word) else []
        texts = iter([given.pop(name) for name in shown])
        overrides.append(PLACEHOLDER.sub(lambda match, texts=texts: next(texts, match[0]), word))
    if given:
        where = "it came from a yaml that the record does not hold"
        raise ValueError(f"{recorded.name}: {', '.join(given)} was not typed on the command line: {where}")
    return dataclasses.replace(recorded, overrides=overrides)


def hardware_of(recorded: Recorded) -> SimpleNamespace:
    """The record's hardware group, as bench/machine/environment.py reads it."""
    hardware = recorded.config["hardware"]
    of_node = hardware["num_processes"] // (hardware.get("nodes") or 1)
    return SimpleNamespace(**hardware, ranks_of_node=of_node)


def unused(recorded: Recorded) -> set[str]:
    """Files that lay beside a script, are part of its identity and that it did not use: no record holds them."""
    script = recorded.run.get("script") or {}
    return set(script.get("sha256_by_file") or ()) - set(script["used"]) if script.get("used") else set()


# ---- is everything here?


def checks(recorded: Recorded) -> list[Check]:
    """All that must be here before a replay starts; status fail: it is not, and found says what is missing."""
    return [
        _record(recorded),
        _commit(recorded.run["code"]),
        _difference(recorded),
        _untracked(recorded),
        _devices(recorded),
        _data(recorded),
    ]


def _record(recorded):
    """A record that `verify` refuses is not run again: there is nothing that a certificate could be of."""
    rules = verification.report(recorded.folder)["rules"]
    failed = [rule for rule in rules if not rule["passed"]]
    if failed:
        found = f"./run.sh verify fails, {failed[0]['rule']}: {failed[0]['evidence']}"
        return Check(THE_RECORD, "fail", found, "a copy that is unchanged")
    return Check(THE_RECORD, "ok", f"verify: all {len(rules)} rules passed")


def _commit(code):
    commit = code["commit"]
    if commit is None:
        return Check("commit", "fail", "the record names none: it ran outside git", "nothing: its code is not known")
    if git.ask(REPO, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        remedy = f"git fetch origin {commit}, in the repository that the run was made in"
        return Check("commit", "fail", f"{commit[:12]} is not in this repository", remedy)
    return Check("commit", "ok", commit[:12])


def _difference(recorded):
    wanted = recorded.run["code"]["diff_sha256"]
    if wanted is None:
        return Check("patch", "ok", "none")
    result = _patch(recorded)
    if result is None or hashlib.sha256(result).hexdigest() != wanted:
        what = "is missing" if result is None else "is not the one that run.json names"
        return Check("patch", "fail", f"code/diff.patch {what}", "a copy of the record that is unchanged")
    return Check("patch", "ok", f"code/diff.patch, {len(result)} bytes")


def _patch(recorded):
    try:
        return plain_file.content(recorded.folder / "code" / "diff.patch")
    except Damaged:
        return None


def _untracked(recorded):
    names = recorded.run["code"]["untracked"] or []
    kept = recorded.folder / "code" / "untracked"
    missing = [name for name in names if not (kept / name).is_file()]
    if missing:
        words = f"the record does not hold {', '.join(missing[:3])}" + " and more" * (len(missing) > 3)
        return Check("sources", "fail", words, "nothing: git did not know these sources, and each was above 1 MiB")
    return Check("sources", "ok", f"{len(names)} sources" if names else "none")


def _devices(recorded):
    hardware = recorded.config["hardware"]
    if hardware["device"] == "cpu":
        return Check("devices", "ok", "a CPU")
    from bench.machine import gpus  # NVML

    num_here, num_wanted = len(gpus.nvml_facts()["gpus"]), hardware["num_processes"]
    if num_here < num_wanted:
        result = f"it ran on {num_wanted} GPUs, and {num_here or 'none'} are here"
        return Check("devices", "fail", result, "replay it on a machine that has them")
    return Check("devices", "ok", f"{num_here} GPUs")


def _data(recorded):
    data = recorded.run["data"]
    try:
        result = datasets.recorded(data, say=lambda text: None)
    except CheckFailed as error:
        if "is not there" in str(error) and data["source"] in MADE:
            return Check("data", "ok", f"{data['source']} is made again, and must give the same bytes")
        return Check("data", "fail", str(error), f"./run.sh data fetch {data['source']}")
    return Check("data", "ok", f"{sum(map(len, result.values()))} shards with the record's sha256")


# ---- the checkout


@dataclass(frozen=True)
class Checkout:
    code: Path  # of the harness, as it was
    own: Path  # a folder with the user's own classes and script
    temp: Path  # the temporary folder of what runs there: torch's agent, which old code used, leaves a folder a run


def _worktree_name(run_id):
    """Of this process alone: two replays of one record may run at once.  What killed ones left behind is removed."""
    boot = (processes.boot_id_hash() or "unknown")[:8]
    left = [] if boot == "unknown" else worktrees.path_of(REPO, "").glob(f"replay-*-{boot}-*")
    for path in left:
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and processes.start_ticks(int(pid)) is None:
            worktrees.remove(REPO, path.name)
    return f"replay-{run_id}-{boot}-{os.getpid()}"


@contextlib.contextmanager
def checkout(recorded: Recorded) -> Iterator[Checkout]:
    """The record's code, for as long as the block lasts.  ValueError: the difference does not apply."""
    code, name = recorded.run["code"], _worktree_name(recorded.run["run_id"])
    temporary = tempfile.TemporaryDirectory
    with worktrees.of(REPO, {name: code["commit"]}) as paths, temporary() as own, temporary() as temp:
        if code["diff_sha256"]:
            try:
                git.run(paths[name], "apply", "--binary", "--whitespace=nowarn", "-", given=_patch(recorded))
            except git.Failed as error:
                raise ValueError(f"{recorded.name}: code/diff.patch does not apply to its commit: {error}") from None
        kept = recorded.folder / "code"
        for source, target in ((kept / "untracked", paths[name]), (kept / "own", own), (kept / "script", own)):
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
        yield Checkout(paths[name], Path(own), Path(temp))


def refuse_other_code(recorded: Recorded, made: Checkout) -> None:
    """ValueError where the checkout is not the code that run.json names, by our own hash: none of it has run yet."""
    code = recorded.run["code"]
    if code_state.identity_version(code) != code_state.IDENTITY_VERSION:
        return
    not_kept = unused(recorded)
    for name, wanted in (code.get("files") or {}).items():
        top, _, rest = name.partition("/")
        if name in not_kept:
            continue
        path = made.own / rest if top in OWN else made.code / name
        if not path.is_file() or code_state.file_sha256(path)[:12] != wanted:
            raise ValueError(f"{name}, as the record holds it, is not the file that run.json names: {CHANGED}")


def refuse_strangers_code(recorded: Recorded) -> None:
    """ValueError where the record brings code of its own and is none of this machine's: that code would run."""
    code, kept = recorded.run["code"], recorded.folder / "code"
    brought = ["code/diff.patch"] * bool(code["diff_sha256"]) + ["code/untracked/"] * bool(code.get("untracked"))
    brought += [f"code/{name}/" for name in OWN if (kept / name).is_dir()]
    end = (ledger.read(results_root()).runs.get(recorded.name) or {}).get("end")
    is_ours = end is not None and end["run_json_sha256"] == ledger.sha256_of(recorded.folder / "run.json")
    if brought and not is_ours:
        what = f"{recorded.name}: brings code that would run here as you ({', '.join(brought)})"
        raise ValueError(f"{what}, and is not in the ledger of {shown(results_root())}: read it, then add --trust")


def words(recorded: Recorded, own: Path) -> list[str]:
    """The overrides of the replay but its seed: the record's, and what the machine had then chosen for it."""
    hardware = recorded.config["hardware"]
    asked = {key.lstrip("+~").partition("=")[0] for key in recorded.overrides}
    pinned = {f"hardware.{key}": hardware.get(key) for key in OF_THE_MACHINE}
    pinned = {key: value for key, value in pinned.items() if value is not None and key not in asked}
    if recorded.run.get("script"):
        pinned = {"hardware.num_processes": hardware["num_processes"], "hardware.device": hardware["device"]}
    kept = [_of_kept_script(word, own) for word in recorded.overrides if not word.startswith("seed=")]
    kept = [word for word in kept if not word.startswith("exporters")]  # the replay is nobody's result
    return kept + [f"{key}={_value(value)}" for key, value in pinned.items()]


def _of_kept_script(word, own):
    key, is_set, value = word.partition("=")
    if is_set and key.lstrip("+") in ("script", "script.path") and value not in ("null", ""):
        return f"script={own / Path(value).name}"
    return word


def _value(value):
    return str(value).lower() if isinstance(value, bool) else str(value)
