"""A record of a script -> what it does outside its clock: the same script once more, sampled a hundred times a second.

The run lies in results/.audits/ like other audits; audit_clock.json beside the audited record keeps what was found.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

from bench.base import atomic
from bench.base.paths import results_root, variables
from bench.launch import launcher
from bench.plans.audit import auditing
from bench.record import off_clock, printed_times, run_folder, step_files
from bench.record.certificates import AUDITS_FOLDER
from bench.training import line_sampler

FILE = "audit_clock.json"
KIND = "clock"


def audit(folder: Path, say: Callable[[str, str], None]) -> off_clock.Account:
    """Run the contestant again and sample it.  ValueError: it is no script, cannot run again, or failed."""
    run = cast(auditing.Run, run_folder.read(folder))
    if not run.get("script"):
        raise ValueError(f"{folder.name}: is no script's: the harness's own loop keeps the clock of a model")
    auditing.refuse(folder, run, own_data_too=True)
    job = auditing.job_of(folder, run, say)
    assert job.script is not None
    about = {"run": f"{run['track']}/{run['run_id']}", "kind": KIND}
    made = Path(tempfile.mkdtemp(prefix="speedrun-samples-"))
    try:
        folders = {"SPEEDRUN_RESULTS": results_root() / AUDITS_FOLDER, line_sampler.VARIABLE: made}
        with variables({name: str(path.absolute()) for name, path in folders.items()}):
            audited = launcher.launch(job.with_look(False), ["audit", run["run_id"]], plan={"audit": about})
        if audited["status"] != "complete":
            raise ValueError(f"{folder.name}: the audit run ended as {audited['status']}: {audited['failure']}")
        samples = made / line_sampler.FILE
        lines = samples.read_text().splitlines() if samples.exists() else []
    finally:
        shutil.rmtree(made)
    rows = step_files.read(audited["folder"])
    stamps_ns = [(line.t_ns, line.is_val) for line in printed_times.events(rows)]
    sources = {
        name.removeprefix("script/"): path.read_text(errors="replace") for name, path in job.script.sources.items()
    }
    try:
        found = off_clock.account(lines, job.script.file, sources, stamps_ns, audited["metrics"]["train_s"])
    except ValueError as error:
        raise ValueError(f"{folder.name}: {error}") from None
    atomic.write_json(folder / FILE, found)
    return found
