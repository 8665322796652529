"""The rules that the complete record of a user's script must keep, instead of those on our own training.

A script has its own model, batch and number of steps: instead of those it is held to what was seen of it.  As in
verification.py a rule is a function (files, record) -> (passed, evidence).
"""

import hashlib
import math

from bench.base.reading import plain_file
from bench.record import outside_clock, printed_times, step_files
from bench.record.run_files import RunFiles

RELATIVE = 1e-9


def steps_are_those_that_the_script_printed(files: RunFiles, run: dict) -> tuple[bool, str]:
    """Rows in order, each with the time at which its line came; how many steps a script makes is its own choice."""
    rows = step_files.read(files.folder, strict=True)
    silent = [row["step"] for row in rows if row["line_t_ns"] is None and row["val_line_t_ns"] is None]
    last, num_steps = rows[-1]["step"], run["metrics"]["num_steps"]
    if silent or last != num_steps:
        return False, f"no line of steps {silent[:5]}" if silent else f"the last row is {last}, num_steps {num_steps}"
    return True, f"{len(rows)} rows of {num_steps} steps"


def printed_times_are_accounted_for(files: RunFiles, run: dict) -> tuple[bool, str]:
    """What passed and what the script counted follow from the rows, and the record has every doubt that they give."""
    rows, measured = files.steps, run["measured"]
    if run["timing_protocol"]["id"] != "script-1":
        return True, "the wall time of the lines is the time: nothing is claimed"
    result = printed_times.account(rows, measured["num_untimed_steps"])
    wrong = [
        f"{name}: {value}, recorded {measured.get(name)}"
        for name, value in result.items()
        if not _same(value, measured.get(name))
    ]
    reported = {doubt["doubt"] for doubt in run.get("doubts", ())}
    outside = (run.get("referee") or {}).get("clock")
    due = printed_times.doubts(rows, measured["num_untimed_steps"], outside)
    if outside:
        due += [doubt for _, doubt in outside_clock.doubts(outside)]
        due += printed_times.disturbances(rows, measured["num_untimed_steps"], outside)
    wrong += [f"not recorded: {doubt}" for doubt in due if doubt not in reported]
    return not wrong, "; ".join(wrong) or f"{result['uncounted_s'] or 0:.3f} s uncounted"


def the_last_step_was_validated(files: RunFiles, run: dict) -> tuple[bool, str]:
    """The last validation is of the last step, or before it (nanoGPT counts one iteration more); or it is doubted."""
    last = max(row["step"] for row in files.steps if row["val_loss"] is not None)
    evidence = f"step {last} of {run['metrics']['num_steps']}"
    return last >= run["metrics"]["num_steps"] - 1 or _is_doubted(run), evidence


def the_source_is_kept(files: RunFiles, run: dict) -> tuple[bool, str]:
    """code/ has every source that the script used, byte for byte as it ran; in older records every source beside it."""
    whole = run["script"]["sha256_by_file"]
    used = run["script"].get("used", whole)
    sha256_by_file = {name: whole[name] for name in used}
    wrong = [
        name
        for name, sha256 in sha256_by_file.items()
        if hashlib.sha256(plain_file.content(files.folder / "code" / name)).hexdigest() != sha256
    ]
    is_whole = f"script/{run['script']['file']}" in used
    return not wrong and is_whole, ", ".join(wrong) or f"{len(sha256_by_file)} files"


def the_claimed_time_fits_into_the_wall_time(files: RunFiles, run: dict) -> tuple[bool, str]:
    """What the script says that its training took is no longer than the whole run; or the record doubts it."""
    train_s, wall_s = run["metrics"]["train_s"], run["measured"]["wall_s"]
    return 0 < train_s <= wall_s or _is_doubted(run), f"{train_s:.3f} s of {wall_s:.3f} s"


def _is_doubted(run):
    return any(doubt.get("instrument") == "script" for doubt in run.get("doubts", ()))


def _same(one, other):
    return one is other or None not in (one, other) and math.isclose(one, other, rel_tol=RELATIVE, abs_tol=RELATIVE)


RULES = [
    steps_are_those_that_the_script_printed,
    printed_times_are_accounted_for,
    the_last_step_was_validated,
    the_source_is_kept,
    the_claimed_time_fits_into_the_wall_time,
]
