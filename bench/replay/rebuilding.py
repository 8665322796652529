"""What a record needs to be run again, whether this machine has it, and a checkout that holds exactly its code.

The code is the record's commit with its difference and its untracked sources, in a worktree; a user's own classes and a
training script come from the record's code/.  Nothing is taken from the working tree.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from bench.data.shards import CheckFailed
from bench.data.sources import datasets
from bench.machine import git, processes
from bench.machine.check import Check
from bench.paths import REPO
from bench.race import worktrees
from bench.reading import plain_file, yaml_file
from bench.reading.damage import Damaged
from bench.record import run_folder, verification

THE_RECORD = "record"  # the name of the check of it
# Settings that a run leaves to the machine: a replay asks for those that the record ran with.
OF_THE_MACHINE = ("device", "num_processes", "num_threads", "dtype", "compile", "micro_batch_seqs")


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


def hardware_of(recorded: Recorded) -> SimpleNamespace:
    """The record's hardware group, as bench/machine/environment.py reads it."""
    hardware = recorded.config["hardware"]
    of_node = hardware["num_processes"] // (hardware.get("nodes") or 1)
    return SimpleNamespace(**hardware, ranks_of_node=of_node)


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


MADE = ("pysource", "markov")  # sources that this machine can make again


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
