"""The settings that must be alike for times to be comparable: their names, in what rows differ, in words."""

import json
from collections.abc import Sequence

from bench.record.rows import Row

NAMES = {
    "gpus": "GPUs",
    "power_limits_w": "power limits (W)",
    "cpu_model": "CPU",
    "num_cpus": "CPU cores",
    "num_threads": "threads a process",
    "driver": "driver",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "torch": "torch",
    "timing_protocol": "timing protocol",
    "timed_steps": "timed steps",
    "instruments": "instruments",
    "train_data": "training data",
    "val_data": "validation data",
    "world_size": "world size",
    "beside": "runs at a time",
}
SINGULAR = {"cpu_model", "driver", "cuda", "nccl", "torch", "timing_protocol", "world_size"}  # differs; the rest differ
OF_A_SCRIPT = ("torch", "cuda", "nccl")  # a script has its own interpreter, and what that holds is its own choice


def of_rows(rows: Sequence[Row]) -> list[dict]:
    """The different settings among the rows, as bench/record/rows.py has them."""
    return [json.loads(text) for text in sorted({row["setting"] for row in rows})]


def differing(rows: Sequence[Row]) -> list[str]:
    """Keys of NAMES of which the rows know two values or more."""
    settings = of_rows(rows)
    known = {key: {json.dumps(one[key]) for one in settings if one.get(key) is not None} for key in NAMES}
    return [key for key, values in known.items() if len(values) > 1]


def words(rows: Sequence[Row], key: str) -> str:
    """The values that the rows have of one setting, for a person."""
    shown = []
    for text in sorted({json.dumps(one.get(key)) for one in of_rows(rows)}):
        value = json.loads(text)
        if isinstance(value, list):
            kinds = {str(item): value.count(item) for item in value}
            parts = [f"{num} x " * (num > 1) + (kind[:12] if len(kind) == 64 else kind) for kind, num in kinds.items()]
            value = ", ".join(parts) or "none"
        shown.append("unknown" if value is None else str(value))
    return " and ".join(shown)


def differ(keys: Sequence[str]) -> str:
    """Keys of NAMES -> "torch differs", "torch and GPUs differ"."""
    verb = "differs" if len(keys) == 1 and keys[0] in SINGULAR else "differ"
    return f"{' and '.join(NAMES[key] for key in keys)} {verb}"
