"""Reads a run folder for a replay, and checks whether all that a replay needs is on this machine."""

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.base.credentials import LOGIN, SECRET
from bench.base.paths import REPO
from bench.base.reading import json_file, plain_file, yaml_file
from bench.base.reading.damage import Damaged
from bench.data.shards import CheckFailed
from bench.data.sources import datasets
from bench.machine import code_state, git, preflight
from bench.machine.preflight import Check
from bench.record import configs, run_folder, verification

PLACEHOLDER = re.compile(f"{LOGIN}|{SECRET}")  # stands for a credential in overrides.yaml
THE_RECORD = "record"  # the name of the check of the record itself
MADE = ("pysource", "markov")  # sources whose data this machine can make again
# Variables that reach arithmetic.  By name, because others of these libraries write files (MKL_VERBOSE_OUTPUT_FILE) or
# load them (OMP_TOOL_LIBRARIES), and a record may be a stranger's.  The launcher sets OMP_NUM_THREADS itself.
VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR",
    "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_DYNAMIC", "OMP_SCHEDULE",
    "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """The parts of a run folder that a replay reads."""

    folder: Path
    run: dict[str, Any]  # run.json
    config: dict[str, Any]  # config.yaml, unchanged
    overrides: list[str]  # what the user typed

    @property
    def name(self) -> str:
        """TRACK/RUN_ID."""
        return f"{self.run['track']}/{self.run['run_id']}"

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        """The environment of run.json, with "variables", those that reach arithmetic."""
        path = self.folder / "environment.json"
        return self.run["environment"] | {"variables": variables(json_file.read(path) if path.is_file() else {})}

    @property
    def hardware(self) -> SimpleNamespace:
        """The record's hardware group, as bench/machine/environment.py reads it."""
        hardware = self.config["hardware"]
        return SimpleNamespace(**hardware, ranks_of_node=hardware["num_processes"] // (hardware.get("nodes") or 1))

    @property
    def unused(self) -> set[str]:
        """Files beside a script that are part of its identity but that it did not use: no record holds them."""
        script = self.run.get("script") or {}
        return set(script.get("sha256_by_file") or ()) - set(script["used"]) if script.get("used") else set()

    def patch(self) -> bytes | None:
        """Returns the difference of the code from its commit; None if it is missing."""
        try:
            return bytes(plain_file.content(code_state.kept(self.folder) / "diff.patch"))
        except Damaged:
            return None

    def is_of_session(self, other: "Recorded") -> bool:
        """Returns whether both ran in one session: one boot, one software image."""
        session_id = self.run.get("session_id")
        return session_id is not None and session_id == other.run.get("session_id")


def variables(environment: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables of environment.json that reach arithmetic."""
    shell_variables = environment.get("env", {}).items()
    return {name: value for name, value in shell_variables if name in VARIABLES}


def read(folder: Path) -> Recorded:
    """Reads a run folder. Raises ValueError if it is imported, is not complete, or lacks a file."""
    run: Any = run_folder.read(folder)
    if run.get("imported"):
        raise ValueError(f"{folder.name}: it was imported from a log, without code, settings and data to run again")
    if run["status"] != "complete":
        raise ValueError(f"{folder.name}: its status is {run['status']}: only a complete run can be run again")
    return Recorded(folder, run, yaml_file.recorded(folder / "config.yaml"), configs.as_typed(folder))


def with_secrets(recorded: Recorded, values: Sequence[str]) -> Recorded:
    """Returns the record with credentials put back into its overrides. Raises ValueError if their number differs."""
    names = recorded.run.get("redacted") or []
    if len(names) != len(values):
        lacking = f"it was recorded without {', '.join(names)}" if names else "it lacks no setting"
        raise ValueError(f"{recorded.name}: {lacking}, and --fill gives {len(values)} of {len(names)} values")
    remaining, overrides = dict(zip(names, values, strict=True)), []
    for text in recorded.overrides:
        key = text.partition("=")[0].lstrip("+")
        hidden = [name for name in remaining if name.startswith(key)] if PLACEHOLDER.search(text) else []
        texts = iter([remaining.pop(name) for name in hidden])
        overrides.append(PLACEHOLDER.sub(lambda match, texts=texts: next(texts, match[0]), text))  # type: ignore[misc]
    if remaining:
        raise ValueError(f"{recorded.name}: {', '.join(remaining)} came from a yaml, which the record does not hold")
    return dataclasses.replace(recorded, overrides=overrides)


# ---- checks of what a replay needs


def checks(recorded: Recorded) -> list[Check]:
    """Checks that everything that a replay needs is here; `found` says what is missing if the status is fail."""
    every: tuple[Callable[[Recorded], Check], ...] = (_record, _commit, _patch, _untracked, _devices, _data)
    return [check(recorded) for check in every]


def _record(recorded: Recorded) -> Check:
    """Checks the record with `verify`. A record that fails is not run again: a certificate of it would mean nothing."""
    rules = verification.report(recorded.folder)["rules"]
    failed = [rule for rule in rules if not rule["passed"]]
    if failed:
        found = f"./run.sh verify fails, {failed[0]['rule']}: {failed[0]['evidence']}"
        return Check(THE_RECORD, "fail", found, "a copy that is unchanged")
    return Check(THE_RECORD, "ok", f"verify: all {len(rules)} rules passed")


def _commit(recorded: Recorded) -> Check:
    commit = recorded.run["code"]["commit"]
    if commit is None:
        return Check("commit", "fail", "the record names none: it ran outside git", "nothing: its code is not known")
    if git.ask(REPO, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        if failure := code_state.git_failure():  # git is not installed, or refuses another user's repository
            known = preflight.git(failure, REPO)
            return Check("commit", "fail", known.found, known.remedy)
        remedy = f"git fetch origin {commit}, in the repository that the run was made in"
        return Check("commit", "fail", f"{commit[:12]} is not in this repository", remedy)
    return Check("commit", "ok", commit[:12])


def _patch(recorded: Recorded) -> Check:
    wanted = recorded.run["code"]["diff_sha256"]
    if wanted is None:
        return Check("patch", "ok", "none")
    patch = recorded.patch()
    if patch is None or hashlib.sha256(patch).hexdigest() != wanted:
        fault = "is missing" if patch is None else "is not the one that run.json names"
        return Check("patch", "fail", f"code/diff.patch {fault}", "a copy of the record that is unchanged")
    return Check("patch", "ok", f"code/diff.patch, {len(patch)} bytes")


def _untracked(recorded: Recorded) -> Check:
    names = recorded.run["code"]["untracked"] or []
    missing = [name for name in names if not (recorded.folder / "code" / "untracked" / name).is_file()]
    if missing:
        missing_text = f"the record does not hold {', '.join(missing[:3])}" + " and more" * (len(missing) > 3)
        return Check("sources", "fail", missing_text, "nothing: git did not know these sources, each above 1 MiB")
    return Check("sources", "ok", f"{len(names)} sources" if names else "none")


def _devices(recorded: Recorded) -> Check:
    hardware = recorded.config["hardware"]
    if hardware["device"] == "cpu":
        return Check("devices", "ok", "a CPU")
    from bench.machine import gpus  # NVML

    num_here, num_wanted = len(gpus.nvml_facts()["gpus"]), hardware["num_processes"]
    if num_here < num_wanted:
        found = f"it ran on {num_wanted} GPUs, and {num_here or 'none'} are here"
        return Check("devices", "fail", found, "replay it on a machine that has them")
    return Check("devices", "ok", f"{num_here} GPUs")


def has_data(recorded: Recorded) -> bool:
    """Returns whether its data are here, and need not be made."""
    with contextlib.suppress(CheckFailed):
        datasets.recorded(recorded.run["data"], say=lambda text: None)
        return True
    return False


def _data(recorded: Recorded) -> Check:
    data = recorded.run["data"]
    try:
        shards = datasets.recorded(data, say=lambda text: None)
    except CheckFailed as error:
        if "is not there" in str(error) and data["source"] in MADE:
            return Check("data", "ok", f"{data['source']} is made again, and must give the same bytes")
        return Check("data", "fail", str(error), f"./run.sh data fetch {data['source']}")
    return Check("data", "ok", f"{sum(map(len, shards.values()))} shards with the record's sha256")
