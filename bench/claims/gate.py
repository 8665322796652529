"""The gate through which files leave on purpose, publications and claim folders alike: why each goes, what is in it.

A file goes with a reason or not at all, and nothing goes that holds a credential or names this machine, in its bytes or
in its name.  Refusals name the file, the line and the kind, never the credential.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.base import credentials, private
from bench.base.paths import REPO
from bench.base.reading import plain_file
from bench.config import user_code
from bench.record import certificates, run_folder
from bench.record.verification import LOCAL_ROLES

BY_ROLE = {
    "config": "the resolved config",
    "overrides": "the overrides as typed",
    "steps": "measured",
    "telemetry": "measured",
    "events": "measured",
    "environment": "the machine and its packages",
}
OF_INSTRUMENT = "written by an instrument, listed in the record"
WHICH_CODE = ("code/commit.json", "code/diff.patch")
MAX_SHOWN = 5


@dataclass(frozen=True)
class Leaving:
    """A file that goes along."""

    path: str  # from the results folder on
    group: str  # what it is called in the list: its path in its run's folder
    reason: str
    num_bytes: int


def of_run(results: Path, name: str) -> Iterator[Leaving]:
    """run.json, what it lists and what every run has; not what stays on its machine, nor pages made from the record.

    ValueError: a file of its code/ has no reason.
    """
    folder = results / name
    run = run_folder.read_raw(folder)
    listed, reasons = {artifact["path"] for artifact in run["artifacts"]}, _reasons(folder, run)
    for path in (*run_folder.files(folder), "run.json"):
        role = run_folder.ROLES.get(run_folder.OF_NODE.sub("", path.partition("/")[0]))
        is_inside = (folder / path).resolve().is_relative_to(folder.resolve())  # no link leads elsewhere
        is_part = role or path in listed or path in (certificates.FILE, "run.json")
        if role in LOCAL_ROLES or not is_part or not is_inside:
            continue
        reason = BY_ROLE.get(role) or reasons.get(path) or (OF_INSTRUMENT if role is None else None)
        if reason is None:
            remedy = "older records keep unused files too: run again"
            raise ValueError(
                f"{name}/{path}: the record does not say that the run used it, so it is not included; {remedy}"
            )
        yield Leaving(f"{name}/{path}", path, reason, (folder / path).stat().st_size)


def _reasons(folder, run):
    """{path in the run's folder: why it goes} of what has no role that says so."""
    code = run.get("code") or {}
    result = dict.fromkeys(WHICH_CODE, "which code ran") | {"run.json": "the record, written by the referee"}
    result |= {certificates.FILE: "the outcome of its replays", "summary.md": "generated from the record"}
    result |= {f"code/{name}": "imported by the run" for name in code.get("files") or () if name.startswith("own/")}
    result |= {f"code/{name}": f"of the script: {why}" for name, why in _of_script(folder, run).items()}
    raced, is_older = code.get("files") or {}, "untracked_excluded" not in code
    for name in code.get("untracked") or ():
        if not is_older or name in raced or (name.startswith("conf/") and name.endswith(".yaml")):
            result[f"code/untracked/{name}"] = "used by the run, not in git"
    return result


def _of_script(folder, run):
    """{source of a script in code/: why}.  Of older records: programs, and what those name."""
    script = run.get("script") or {}
    if not script or "used" in script:
        return script.get("used") or {}
    kept = {
        name: folder / "code" / name
        for name in script.get("sha256_by_file") or ()
        if (folder / "code" / name).is_file()
    }
    programs = {name: "a program beside it" for name in kept if name.endswith(user_code.PROGRAMS)}
    main = kept.get(f"script/{script.get('file')}")
    return programs | (user_code.used_by_script(main, kept) if main else {})


def listed(leaving: Iterable[Leaving]) -> list[str]:
    """Lines for people: each kind of file once, in how many runs, its bytes together, its reason."""
    groups: dict[tuple[str, str], list[int]] = {}
    for one in leaving:
        groups.setdefault((one.group, one.reason), []).append(one.num_bytes)
    width = max((len(group) for group, _ in groups), default=0)
    return [
        f"{group:<{width}}  {sum(sizes):>11,} bytes{f' in {len(sizes)} runs' if len(sizes) > 1 else ''}  {reason}"
        for (group, reason), sizes in groups.items()
    ]


def search(folder: Path, paths: Iterable[str], allowed: Sequence[str] = ()) -> None:
    """Refuse files in folder that hold a credential or name this machine.  ValueError: which, where and what to do.

    allowed: paths, or their ends, that the user has looked at: they go whatever they hold.
    """
    refused = []
    for path in paths:
        if not any(path == one or path.endswith(f"/{one}") for one in allowed):
            text = plain_file.text(folder / path, plain_file.MAX_LINES_BYTES, errors="replace")
            refused += dict.fromkeys(_faults(path, text))
    if refused:
        more = f"; and {len(refused) - MAX_SHOWN} more" if len(refused) > MAX_SHOWN else ""
        remedy = "run again without it and publish that run, or pass --allow FILE once you have checked it"
        raise ValueError(f"{'; '.join(refused[:MAX_SHOWN])}{more}: nothing was written: {remedy}")


def _faults(path, text):
    """What is wrong with a file, in words that do not repeat it."""
    shown = private.redact(path, REPO, user="")
    if shown != path:
        yield f"{shown}: the name of the file holds a credential or names this machine"
    for one in credentials.found(text):
        yield f"{shown}, line {text.count(chr(10), 0, one.start) + 1}: holds {one.kind}"
    clean = credentials.redacted(text)
    redacted = private.redact(clean, REPO, user="")  # user="": their name in a path may be an ordinary word
    if redacted != clean:
        number = next(
            n for n, (a, b) in enumerate(zip(clean.split("\n"), redacted.split("\n"), strict=True), 1) if a != b
        )
        yield f"{shown}, line {number}: names this machine's repository, home or host"


Show = Callable[[list[Leaving]], object]  # of what is about to be written
