"""Copies runs and races to a folder that can be committed, sent and judged anywhere: a publication or a claim folder.

    <track>/<run_id>/ ...   records without logs, traces and memory snapshots        races/<race_id>/ ...
    ledger.jsonl            complete, for its hash chain      README.md   its author's text and a generated table

Publications are folders of results/published/.  Git tracks nothing else of results/ except results/README.md.

Every file needs a reason to be included, and none may contain a credential or identify this machine, in its content or
its name.  A refusal names the file, the line and the kind, never the credential.
"""

import functools
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from bench.base import atomic, credentials, escape, private
from bench.base.paths import PUBLISHED, REPO, published_root, shown
from bench.base.reading import plain_file
from bench.base.text_table import some
from bench.claims import claim as claims
from bench.config import typed
from bench.plans.race import state
from bench.record import certificates, ledger, named, race_folder, run_folder, verification
from bench.record.verification import LOCAL_ROLES
from bench.report import markdown_blocks
from models.settings import Range

RESERVED = (PUBLISHED, "site")  # scans skip the first; ./run.sh report results/published creates the second
NAMES = f"1 to 100 letters, digits and . _ - with a letter or digit first, and not {' or '.join(RESERVED)}"
is_name = re.compile(rf"(?!({'|'.join(RESERVED)})$)[A-Za-z0-9][A-Za-z0-9._-]{{0,99}}").fullmatch
Name = Annotated[str, Range(lambda name: bool(is_name(name)), NAMES)]
RACE_FILES = ("plan.json", "race.json", "race.md")
BY_ROLE = {
    "config": "the resolved config",
    "overrides": "the overrides as typed",
    "steps": "measured",
    "telemetry": "measured",
    "events": "measured",
    "environment": "the machine and its packages",
}
OF_INSTRUMENT = "written by an instrument, listed in the record"
REASONS = {
    "run.json": "the record, written by the referee",
    "summary.md": "generated from the record",
    certificates.FILE: "the outcome of its replays",
}
WHICH_CODE = ("code/commit.json", "code/diff.patch")
UNWRITTEN = "(to be written)"  # stands in a README for its author's own words
MAX_SHOWN = 5


@dataclass
class Content:
    """The runs and races to be copied, and their origin."""

    ledger: ledger.Ledger  # ledger of the results folder that they are in
    named_runs: list[str]  # "<track>/<run_id>"; runs of the races need not be listed
    race_ids: list[str]
    name: str  # name of the publication unless the user gives one
    texts: dict[str, str] | None = None  # {file name: text} of a claim folder, including README.md

    @property
    def results(self) -> Path:
        return self.ledger.results

    @functools.cached_property
    def runs(self) -> list[str]:
        """Names of all existing runs without duplicates, including the races' warm-up and interrupted runs."""
        names = list(self.named_runs)
        for race_id in self.race_ids:
            try:
                race = state.read(race_folder.of(self.results, race_id), self.results, self.ledger)
            except ValueError:  # the race is missing or not as planned: judge reports that
                continue
            for arm in race.plan["arms"]:
                names += race.runs(arm) + race.runs(arm, discarded=True) + race.interrupted(arm)
        return [name for name in dict.fromkeys(names) if (self.results / name / "run.json").is_file()]


@dataclass(frozen=True)
class Leaving:
    """A file to be included."""

    path: str  # relative to the results folder
    group: str  # name in the list: the path in its run's folder
    reason: str
    num_bytes: int


@dataclass(frozen=True)
class Gated:
    """The user's options for the check."""

    show: Callable[[list[Leaving]], object] = lambda leaving: None  # shows the list of files before they are written
    allowed: Sequence[str] = ()  # files that are included regardless of their content
    dry_run: bool = False  # show and check the files, but write nothing


def content_of(arguments: Sequence[str]) -> Content:
    """Returns the content of run folders or ids, or of one race.  Raises ValueError for no run or several ledgers."""
    if len(arguments) == 1 and (race := named.find(arguments)[0].race):
        return Content(ledger.read(race.parent.parent), [], [race.name], race.name)
    folders = [run.absolute() for run in named.runs(arguments)]
    book = ledger.read(claims.home(folders))
    names = [ledger.name_of(book.results, folder) for folder in folders]
    races = [(run_folder.read(folder).get("race") or {}).get("race_id") for folder in folders]
    first = re.sub(r"-s\d+(-m[0-9a-f]{6})?(-\d+)?$", "", min(folder.name for folder in folders))
    return Content(book, names, sorted({race for race in races if race is not None}), first)


def publish(content: Content, name: str | None, table: Callable[[list[str]], int], gated: Gated | None = None) -> Path:
    """Publishes the content and returns its new folder, results/published/NAME.

    name: None for content.name.  table: bench.cli.table.main.  Raises ValueError, and writes nothing, if the name is
    invalid or taken, a run or a race has not ended, a file may not be published, or the disk is full.
    """
    name = name or content.name
    if content.results.resolve().is_relative_to(published_root().resolve()):
        raise ValueError(f"{shown(content.results)}: is published already: git add it")
    typed.checked("--name", name, Name)
    folder = published_root() / name
    if os.path.lexists(folder):
        raise ValueError(f"{shown(folder)}: is there already, and is not overwritten: give another --name")
    _refuse_unfinished(content)

    def texts(copied: Path) -> dict[str, str]:
        if content.texts is not None:
            return content.texts
        printed = markdown_blocks.printed(shlex.join(["table", "--md", str(copied)]), table)
        command = shlex.join(["table", "--md", f"results/{PUBLISHED}/{name}"])
        parts = [f"# {name}", f"What these runs show: {UNWRITTEN}", f"By: {UNWRITTEN}"]
        races = [(escape.markdown(race_id), quote(race_id)) for race_id in content.race_ids]
        parts += [f"- [race {race}](races/{path}/race.md)" for race, path in races]
        links = "\n".join(certificate_links(content.results, content.runs))
        parts += [markdown_blocks.block(command, printed), *[links] * bool(links)]
        return {"README.md": "\n\n".join(parts) + "\n"}

    atomic.remove_left(folder.parent, ".*.tmp")
    copy(content, folder, texts, gated or Gated())
    return folder


def certificate_links(results: Path, names: Sequence[str]) -> list[str]:
    """Returns a line of Markdown with the outcome of the replay for each replayed run.  names: "<track>/<run_id>"."""
    sentences = ((name, certificates.sentence(results / name)) for name in names)
    links = ((escape.markdown(name), quote(name), escape.markdown(text)) for name, text in sentences if text)
    return [f"- [certificate of {name}]({path}/{certificates.FILE}): {text}" for name, path, text in links]


def _refuse_unfinished(content: Content) -> None:
    for name in content.runs:
        if run_folder.read(content.results / name)["status"] == "running":
            raise ValueError(f"{name}: status=running: wait for its end, then publish it")
    for race_id in content.race_ids:
        folder = race_folder.of(content.results, race_id)
        if folder.is_dir():
            race_folder.vouched(folder)


def copy(content: Content, folder: Path, texts: Callable[[Path], dict[str, str]], gated: Gated) -> None:
    """Copies the content to a new or empty folder, completely or not at all.  texts(copy) returns {file name: text}.

    Raises ValueError if the folder cannot be written or a file may not be published.
    """
    folder, leaving = folder.absolute(), [*_files(content)]
    gated.show(leaving)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for file in leaving:
            if (content.results / file.path).is_symlink():  # in somebody else's folder it may lead to a private file
                raise ValueError(f"{file.path}: is a link, which is not published: put the file itself there")
            (temporary / file.path).parent.mkdir(parents=True, exist_ok=True)
            copied = plain_file.content(content.results / file.path, plain_file.MAX_LINES_BYTES)
            (temporary / file.path).write_bytes(copied)
        for name in content.runs:  # checks the copies, because the originals may have changed since
            files, run = verification.RunFiles(temporary / name), run_folder.read_raw(temporary / name)
            is_whole, why = verification.artifacts_are_unchanged(files, run)
            if not is_whole:
                raise ValueError(f"{name}: {why}: restore it; ./run.sh verify says what else is wrong with the record")
        for name, text in (generated := texts(temporary)).items():
            (temporary / name).write_text(text)
        search_files(temporary, [*(file.path for file in leaving), *generated], gated.allowed)
        if not gated.dry_run:
            os.rename(temporary, folder)  # fails if folder has content by now
    except OSError as error:
        remedy = "give another name" if os.path.lexists(folder) else "free space, or make it writable"
        raise ValueError(f"{folder}: cannot be written ({error.strerror}): {remedy}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _files(content: Content) -> Iterator[Leaving]:
    for name in content.runs:
        yield from files_of_run(content.results, name)
    races = race_folder.FOLDER
    groups = {f"{races}/{race_id}/{file}": f"{races}/.../{file}" for race_id in content.race_ids for file in RACE_FILES}
    for path, group in (groups | {ledger.NAME: ledger.NAME}).items():
        if (content.results / path).is_file():
            reason = "every run that was started" if path == ledger.NAME else "the race, written by the referee"
            yield Leaving(path, group, reason, (content.results / path).stat().st_size)


def files_of_run(results: Path, name: str) -> Iterator[Leaving]:
    """Yields run.json, the files that it lists and those of every run, without local files and generated pages.

    Raises ValueError if there is no reason to include a file of its code/.
    """
    folder = results / name
    run = run_folder.read_raw(folder)
    listed, reasons = {artifact["path"] for artifact in run["artifacts"]}, _reasons_of(folder, run)
    for path in (*run_folder.files(folder), "run.json"):
        role = run_folder.ROLES.get(run_folder.OF_NODE.sub("", path.partition("/")[0]))
        is_inside = (folder / path).resolve().is_relative_to(folder.resolve())  # False for a link to elsewhere
        # a complete record lists all of its files, and code that it does not list is refused below
        is_of_run = role == "code" or (role and run["status"] != "complete")
        is_part = is_of_run or path in listed or path in (certificates.FILE, "run.json")
        if role in LOCAL_ROLES or not is_part or not is_inside:
            continue
        reason = BY_ROLE.get(role or "") or reasons.get(path) or (OF_INSTRUMENT if role is None else None)
        if reason is None:
            raise ValueError(f"{name}/{path}: the record does not say that the run used it: run again, if it is old")
        yield Leaving(f"{name}/{path}", path, reason, (folder / path).stat().st_size)


def _reasons_of(folder: Path, run: Mapping[str, Any]) -> dict[str, str]:
    """Returns {path in the run's folder: reason to include it} for files whose role does not give the reason."""
    code = run.get("code") or {}
    reasons = dict.fromkeys(WHICH_CODE, "which code ran") | REASONS
    reasons |= {f"code/{name}": "imported by the run" for name in code.get("files") or () if name.startswith("own/")}
    used = (run.get("script") or {}).get("used") or {}
    reasons |= {f"code/{name}": f"of the script: {why}" for name, why in used.items()}
    raced, is_older = code.get("files") or {}, "untracked_excluded" not in code
    for name in code.get("untracked") or ():
        if not is_older or name in raced or (name.startswith("conf/") and name.endswith(".yaml")):
            reasons[f"code/untracked/{name}"] = "used by the run, not in git"
    return reasons


def listing(leaving: Iterable[Leaving]) -> list[str]:
    """Returns lines to print: each kind of file with its total bytes, number of runs and reason."""
    groups: dict[tuple[str, str], list[int]] = {}
    for file in leaving:
        groups.setdefault((file.group, file.reason), []).append(file.num_bytes)
    width = max((len(group) for group, _ in groups), default=0)
    return [
        f"{group:<{width}}  {sum(sizes):>11,} bytes{f' in {len(sizes)} runs' if len(sizes) > 1 else ''}  {reason}"
        for (group, reason), sizes in groups.items()
    ]


def search_files(folder: Path, paths: Iterable[str], allowed: Sequence[str] = ()) -> None:
    """Raises ValueError if a file in folder contains a credential or identifies this machine.

    allowed: paths, or their ends, that the user has checked; these files are not searched.
    """
    refused: list[str] = []
    for path in paths:
        if not any(path == name or path.endswith(f"/{name}") for name in allowed):
            text = plain_file.text(folder / path, plain_file.MAX_LINES_BYTES, errors="replace")
            text = text.replace("\0", "")  # UTF-16, as PowerShell writes it, has one beside each letter
            refused += dict.fromkeys(_faults(path, text))
    if refused:
        remedy = "run again without it and publish that run, or pass --allow FILE once you have checked it"
        raise ValueError(f"{some(refused, MAX_SHOWN, separator='; ')}: nothing was written: {remedy}")


def _faults(path: str, text: str) -> Iterator[str]:
    """Yields sentences on what is wrong with a file, which do not repeat the credential or name."""
    shown = private.redact(path, REPO, user="")
    if shown != path:
        yield f"{shown}: the name of the file holds a credential or names this machine"
    for credential in credentials.find(text):
        yield f"{shown}, line {text.count(chr(10), 0, credential.start) + 1}: holds {credential.kind}"
    clean = credentials.redacted(text)
    redacted = private.redact(clean, REPO, user="")  # user="": the user's name may be an ordinary word
    if redacted != clean:
        lines = zip(clean.split("\n"), redacted.split("\n"), strict=True)
        number = next(number for number, (before, after) in enumerate(lines, 1) if before != after)
        yield f"{shown}, line {number}: names this machine's repository, home or host"
