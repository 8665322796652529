"""Evaluates a run's look after the race (bench/training/look.py): explains its traces and summarizes them in one line.

By then every number of the run has been measured, so a failure of the ranks in the look, or of the explanation, is only
a warning.  The explanation is that of ./run.sh explain, in traces/ops/look_account.txt and .json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.base.units import format_ms
from bench.record.shape import Section

ACCOUNT = "traces/ops/look_account"
NUM_LINES = 5
NO_KERNELS = "its traces hold no kernel (CUPTI saw none, as in WSL), so not where the time of the GPU goes"
OF_THE_RUN = ("bad_data", "folder_removed")  # kinds of failures that concern the run before the look


def spared(measured: Section, failure: Section | None) -> Section | None:
    """Returns the failure of a run, or None if it came in the look, whose status in measured then says so."""
    look = measured.get("look")
    if look is None or look["status"] != "begun" or (failure is not None and failure["kind"] in OF_THE_RUN):
        return failure
    look["status"] = "not finished"
    why = "its result could not be written" if failure is None else failure["message"]
    if failure is not None and failure["kind"] == "interrupted":
        look["interrupted_by"] = failure["signal"]
    measured.setdefault("warnings", []).append(warning(f"it ended early, when all was measured: {why}"))
    return None


def explain(folder: Path, run: Section) -> None:
    """Adds to run["look"] where time can be saved next, and writes the explanation beside the traces."""
    look = run["look"]
    if look["status"] != "recorded":
        return
    try:
        from bench.analysis.explain import document, explained  # numpy, which a launcher needs for nothing else

        accounts = explained.explain_paths(run["run_id"], [folder])
        (account,) = accounts.values()
        text = document.from_accounts(accounts).terminal()
        atomic.write_text(folder / f"{ACCOUNT}.txt", text + "\n", durable=False)
        atomic.write_json(folder / f"{ACCOUNT}.json", account, durable=False)
        files = *look["files"], f"{ACCOUNT}.txt", f"{ACCOUNT}.json"
        look["files"] = [file for file in files if (folder / file).is_file()]  # pages stay in a sandbox
        look["step_ms"] = account["step_ms"]
        if run["environment"]["gpus"] and account["of"] == "host":  # what the host does beside a GPU costs no time
            run["warnings"].append(warning(NO_KERNELS))
            return
        look["next"] = [
            {"place": document.evidence(line)} | {key: line[key] for key in ("gain_ms", "gain_pct", "advice")}
            for line in account["next"][:NUM_LINES]
        ]
    except Exception as error:
        run["warnings"].append(warning(f"its traces could not be explained ({type(error).__name__}: {error})"))


def line(run: Mapping[str, Any]) -> str | None:
    """Returns a line about where time can be saved next, or None if the run has no explained look."""
    look = run.get("look") or {}
    if not look.get("next"):
        return None
    first = look["next"][0]
    gain = f"at most {format_ms(first['gain_ms'])} of {format_ms(look['step_ms'])} in a profiled step"
    return f"largest possible gain: {gain}, {first['place']}; ./run.sh explain {run['run_id']} shows all"


def warning(error: str) -> Section:
    return {"rank": None, "instrument": "look", "edge": "after the race", "error": error}
