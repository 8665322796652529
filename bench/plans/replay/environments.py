"""The environment of a record and of its replay, field by field; and which of the differences can change losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What can change a loss, the likeliest cause first, and what to call it.  Fields of run.json["environment"].
CAUSES = {
    "torch": "another torch",
    "gpus": "other GPUs",
    "cpu_model": "another CPU",
    "cpu_details": "another CPU",
    "cpu_capability": "another instruction set of the CPU",
    "num_threads": "another number of threads, which adds in another order",
    "cuda": "another CUDA",
    "cudnn": "another cuDNN",
    "nccl": "another NCCL",
    "driver": "another driver",
    "libraries": "other numerical libraries",
    "python": "another Python",
}
LATER_FIELDS = ("cpu_details", "cpu_capability", "libraries")  # not in the first records
OF_GPUS = ("cuda", "cudnn", "nccl", "driver")  # unknown, and no cause, where no GPU computes
# The launcher decides on these anew, and the record says num_threads.
OWN_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
UNSAID = "nothing that the two environments say"
# Variables that reach arithmetic; the others say where things lie, or are the harness's own.
VARIABLES = ("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "OMP_", "OPENBLAS_", "CUBLAS_", "NVIDIA_TF32", "TORCH_ALLOW_TF32")


@dataclass(frozen=True)
class Field:
    """One fact of an environment that is not the same in the two."""

    name: str
    recorded: Any
    here: Any


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[Field]:
    """Two run.json["environment"], each with "variables": fields that differ, what can change losses first.

    A field that one of them does not know is not a difference: older records say less.
    """
    names = [*CAUSES, *sorted((recorded.keys() | here.keys()) - set(CAUSES) - {"memory_gib"})]
    fields = [Field(name, _plain(name, recorded.get(name)), _plain(name, here.get(name))) for name in names]
    return [field for field in fields if None not in (field.recorded, field.here) and field.recorded != field.here]


def _plain(name, value):
    """GPUs by name: a serial number and a power limit change no loss."""
    return [gpu["name"] for gpu in value] if name == "gpus" and value is not None else value


def variables(environment: Mapping[str, Any]) -> dict[str, str]:
    """environment.json -> its variables that reach arithmetic."""
    named = {name: value for name, value in environment.get("env", {}).items() if name.startswith(VARIABLES)}
    return {name: value for name, value in named.items() if name not in OWN_VARIABLES}


def kind(recorded: Mapping[str, Any], here: Mapping[str, Any], session_ids: tuple[str | None, str | None]) -> str:
    """Which machine the replay ran on: "same session", "same kind of machine", "other torch", "other machine"."""
    result = {field.name for field in differences(recorded, here)}
    if None not in session_ids and session_ids[0] == session_ids[1]:
        return "same session"
    if result & {"gpus", "cpu_model", "cpu_details", "cpu_capability", "num_cpus", "driver"}:
        return "other machine"
    return "other torch" if "torch" in result else "same kind of machine"


def decide_the_same_bits(
    recorded: Mapping[str, Any], here: Mapping[str, Any], session_ids: tuple[str | None, str | None]
) -> bool:
    """Whether machine and software are known to be the same in all that decides the bits of a loss.

    In one session (one boot, one software image) what a record does not say is the same too; elsewhere every cause of
    CAUSES must be recorded in both.  A CPU by its name alone is not known: virtual machines share one.
    """
    if {field.name for field in differences(recorded, here)} & {*CAUSES, "variables"}:
        return False
    if None not in session_ids and session_ids[0] == session_ids[1]:
        return True
    needed = [name for name in CAUSES if name not in OF_GPUS or here.get("gpus")]
    return all(one.get(name) is not None for one in (recorded, here) for name in needed)


def cause(fields: list[Field], unsaid: list[str], is_deterministic: bool) -> str:
    """The likeliest class of cause of a difference in losses that these environments name.

    unsaid: of CAUSES, what the record does not say.
    """
    named = [CAUSES[field.name] for field in fields if field.name in CAUSES]
    named += ["other settings of the numerical libraries"] * any(field.name == "variables" for field in fields)
    if named:
        return named[0]
    if unsaid:
        return f"{' or '.join(CAUSES[name] for name in unsaid)}: the record does not say"
    return UNSAID if is_deterministic else f"{UNSAID}; hardware.deterministic is off"


def unsaid(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Of CAUSES, what the record does not say: what is known here, and what older records have not."""
    return [
        name
        for name in CAUSES
        if recorded.get(name) is None and (here.get(name) not in (None, []) or name in LATER_FIELDS)
    ]
