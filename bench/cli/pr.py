"""Judge a record's pull request.  ./run.sh pr FOLDER|NUMBER [--clone DIR] [--rerun DIR [--go] [-- SETTING...]]

FOLDER holds the logs of a pull request, in the form that modded-nanogpt asks for, and the script if you have it.  Of
several groups of logs, those that embed the script are judged.  If logs embed no code, the script beside them is taken
as their source, which the answer calls unproven; --script chooses among several.  NUMBER is a pull request in the clone
that --clone names, which must have refs/pull/NUMBER/head or the merged commit.  The answer is Markdown for the thread:
the verdict, each rule of the track with its evidence, what is missing and the command that supplies it, the numbers,
the runs, what runs outside the clock, and what changed in the source.

The baseline is taken from the pull request itself (logs whose path says so, or whose code is that of an earlier
record), else from the record before it, beside FOLDER or in the clone.  --candidate and --baseline choose the logs.
--rerun DIR writes both sources and prints the race that decides on this machine, and --go starts it.  After -- follow
SETTINGs of ./run.sh race (n=10 track=...).  The sources run in a sandbox, unless script.sandbox=false is one of them.
"""

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bench.base import atomic, private
from bench.base.paths import REPO, brief, shown, user_path
from bench.base.reading import plain_file
from bench.base.text_table import counted
from bench.claims import claim as claims
from bench.claims import pull_request
from bench.claims.rules import pull_requests, rulebook
from bench.claims.rules.pull_requests import Log, PullRequest, Side
from bench.cli import arguments
from bench.compare import comparison
from bench.config import groups
from bench.machine import git
from bench.record import metrics, run_folder
from bench.record.importers import dialects, modded_nanogpt, records
from bench.record.importers.modded_nanogpt import SCRIPT
from bench.record.rows import Row

NUM_EARLIER = 12  # earlier records whose code may be the baseline's
SUFFIX = ".txt"


def main(argv: list[str]) -> int:
    """Exit codes: 0 the rules that logs can answer are met, 1 one is not met or not shown, 2 usage error."""
    argv, settings = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    args = _parser().parse_args(argv)
    if (args.go or settings) and not args.rerun:
        raise ValueError(f"{'--go' if args.go else settings[0]}: it needs --rerun DIR, a folder for the sources")
    with tempfile.TemporaryDirectory(prefix="speedrun-pr-") as scratch:
        folder, name = _folder(args, Path(scratch))
        pull = _read(args, folder, name, Path(scratch))
    kept = [word for word in argv if word not in ("--json", "--out", args.out)]
    kept = [brief(word) if private.redact(word, REPO) == word else word for word in kept]
    pull.arguments = private.redact(shlex.join(kept), REPO)
    document = pull_request.document_of(pull)
    if args.out:
        atomic.write_out(user_path(args.out), document.markdown() + "\n", "--out")
        print(shown(user_path(args.out)))
    elif not args.rerun:
        print(document.json() if args.json else document.markdown())
    if args.rerun:
        given = {word.partition("=")[0] for word in settings}
        overrides = _written(pull, user_path(args.rerun), folder) + (settings or [f"n={pull.track.repeats}"])
        defaults = {"track": pull.candidate.logs[0].record["track"], "script.sandbox": "true"}
        overrides += [f"{key}={value}" for key, value in defaults.items() if key not in given]
        if pull.choice:
            print(pull.choice, file=sys.stderr)
        print(shlex.join(["./run.sh", "race", *overrides]))
        if args.go:
            from bench.cli import race

            return race.main(overrides)
    return 0 if document.verdicts[0].word == "meets_the_rules" else 1


def _read(args: argparse.Namespace, folder: Path, name: str, scratch: Path) -> PullRequest:
    """Returns the pull request of this folder, compared and judged."""
    tracks = (ours for theirs, ours in groups.UPSTREAM_TRACKS.items() if theirs in folder.parts)
    track = args.track or next(tracks, "gpt2_small")
    standard = claims.standard(track)
    if not standard.track.rules.pull_request:
        raise ValueError(f"{track}: it has no rules for pull requests: ./run.sh judge --track {track} judges its logs")
    logs, incomplete = _logs(folder, track, standard.goal.target_val_loss)
    if not logs:
        raise ValueError(f"{shown(folder)}: it holds no log of a complete run: a pull request brings logs ({SUFFIX})")
    own, is_own = _own_sources(folder, scratch)
    names = {tuple(log.sources) for log in logs if log.sources}
    own_keys = {modded_nanogpt.code_key({name: own.get(name, "") for name in file_names}) for file_names in names}
    earlier = list(_earlier(folder))
    known_names = {key: record.name for record, files in reversed(earlier) for key in [modded_nanogpt.code_key(files)]}
    rules = standard.track.rules

    def wants(row: Row) -> bool:
        return rules.gpu is None or row["device"] == f"{rules.num_gpus or 1} x {rules.gpu}"

    try:
        candidate, bases, others, choice = pull_request.sides_of(
            logs, known_names, own_keys, wants, args.candidate or "", args.baseline or ""
        )
    except ValueError as error:
        lacking = f"; {counted(len(incomplete), 'log')} hold no complete run" if incomplete else ""
        raise ValueError(f"{error}{lacking}") from None
    pull = PullRequest(
        name, standard.track, candidate, bases[0] if bases else None, bool(bases), others, len(incomplete)
    )
    pull.num_own_incomplete, pull.num_earlier = incomplete.count(candidate.logs[0].code_key or None), len(earlier)
    if pull.baseline is None and earlier:
        before, files = earlier[0]
        base_logs, _ = _logs(before, track, standard.goal.target_val_loss)
        base_logs = [log for log in base_logs if log.code_key == modded_nanogpt.code_key(files)]
        pull.baseline = Side(before.name, base_logs, before.name) if base_logs else None
    pull.choice = choice
    _take_scripts(pull, folder, scratch if folder.is_relative_to(scratch) else folder, args.script)
    if is_own and candidate.logs[0].sources:
        scripts = [{SCRIPT: files.get(SCRIPT, "").strip()} for files in (candidate.sources, own)]
        pull.script_differs = sum(map(sum, pull_requests.changed_lines(*scripts).values())) if scripts[1][SCRIPT] else 0
    for log in candidate.logs:
        records.write(log.record, log.steps, scratch / "runs")
    claim = claims.from_folders(list(run_folder.find_runs([scratch / "runs"])), track=track)
    pull.judged = rulebook.check(claim)
    pull.compared, *_ = [_compared(base, candidate) for base in [pull.baseline] if base] or [None]
    pull.controls = [(base, _compared(base, candidate)) for base in bases[1:]]
    return pull


def _compared(base: Side, candidate: Side) -> Any:
    compared = comparison.compare_arms([base.arm, candidate.arm], diagnose=False)[0][1]
    return {**compared, "arms": [base.name, candidate.name]}


def _logs(folder: Path, track: str, target_val_loss: float | None) -> tuple[list[Log], list[str | None]]:
    """Returns (the complete runs of the logs in a folder, the code key of each log without one, None without source).

    Raises ValueError for a link out of the folder: it may lead to a private file, which the answer would quote.
    """
    logs, incomplete, keys = list[Log](), list[str | None](), dict[str | None, str]()
    for entry in plain_file.entries_below(folder):
        if entry.is_symlink() and not _within(folder, [Path(entry.path)]):
            raise ValueError(f"{shown(Path(entry.path))}: is a link, but not to a file of its folder: remove it")
    for path, _ in dialects.files_of([folder]):
        runs, _ = dialects.read_file(path, part_of=folder.resolve())
        complete = [(run, steps) for run, steps in runs if run["status"] == "complete"]
        sources = modded_nanogpt.sources(path.read_bytes()) if runs else {}
        if runs and not complete:
            incomplete.append(modded_nanogpt.code_key(sources) if sources else None)
        for run, steps in complete:
            run["track"], run["goal"] = track, (run["goal"] or {}) | {"target_val_loss": target_val_loss}
            digest = run["code"]["source_sha256"]
            if digest not in keys:
                keys[digest] = modded_nanogpt.code_key(sources) if sources else ""
            run["code"]["source_sha256"] = keys[digest] or digest  # a literal seed does not change the code's identity
            run["metrics"] = metrics.metrics(run, steps)
            logs.append(Log(path.relative_to(folder.resolve()).as_posix(), run, steps, sources, keys[digest]))
    return logs, incomplete


def _own_sources(folder: Path, scratch: Path) -> tuple[dict[str, str], bool]:
    """Returns (the pull request's Python files, whether they are its own and not those of the checkout around it)."""
    script = next(iter(sorted(folder.rglob(SCRIPT))), None)
    is_own = script is not None or folder.is_relative_to(scratch)
    home = script.parent if script else folder.parents[2] if folder.parent.name in groups.UPSTREAM_TRACKS else folder
    paths = _within(home if home in folder.parents else folder, home.glob("*.py"))
    return {path.name: plain_file.text(path, errors="replace") for path in paths}, is_own


def _within(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """Returns the files among paths, sorted, without those that a link leads to from outside of a folder."""
    files = (path for path in paths if path.is_file())
    return sorted(path for path in files if path.resolve().is_relative_to(folder.resolve()))


def _take_scripts(pull: PullRequest, folder: Path, root: Path, named: str | None) -> None:
    """Takes the script beside logs that embed no code: train_gpt.py, or the only one in the nearest folder up to root.

    named: the user's name of the candidate's, below folder or not, or None.  A baseline must have a folder of its own.
    Raises ValueError if the named script is not a file, or the logs embed their code.
    """
    script = next((path for path in (folder / named, user_path(named)) if path.is_file()), None) if named else None
    if named and (script is None or pull.candidate.logs[0].sources):
        why = f"the logs of {pull.candidate.name} embed their code: leave it out"
        why = why if script else f"no such file, neither below {shown(folder)} nor from here"
        raise ValueError(f"--script {named}: {why}")
    for side in (pull.candidate, pull.baseline):
        if side is None or side.logs[0].sources:
            continue
        homes = [path for path in (folder / side.logs[0].path).parents if path.is_relative_to(root)]
        if side is pull.baseline:
            homes = [path for path in homes[:1] if path != (folder / pull.candidate.logs[0].path).parent]
        scripts = next((files_here for home in homes if (files_here := sorted(home.glob("*.py")))), [])
        scripts = [path for path in scripts if path.name == SCRIPT] or scripts
        scripts = [script] if script and side is pull.candidate else scripts
        names = [path.relative_to(root).as_posix() if path.is_relative_to(root) else shown(path) for path in scripts]
        if len(scripts) == 1:
            text = plain_file.text(scripts[0], errors="replace")
            modules = re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.M)
            files = _within(scripts[0].parent, (scripts[0].parent / f"{module}.py" for module in modules))
            side.script, side.beside = names[0], {SCRIPT: text}
            side.beside |= {path.name: plain_file.text(path, errors="replace") for path in files}
        elif side is pull.candidate:
            pull.scripts = names


def _earlier(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yields (folder, the sources that its first log embeds) of the records before this one, if they are beside it.

    modded-nanogpt names their folders by date.
    """
    if folder.parent.name not in groups.UPSTREAM_TRACKS:
        return
    before = [path for path in folder.parent.iterdir() if path.is_dir() and not path.is_symlink()]
    before = [path for path in before if path.name < folder.name]
    for path in sorted(before, reverse=True)[:NUM_EARLIER]:
        logs = _within(path, path.rglob(f"*{SUFFIX}"))
        logs = [log for log in logs if not pull_request.BASELINE.search(str(log.relative_to(path)))]
        files = next((files for log in logs if (files := modded_nanogpt.sources(log.read_bytes()))), None)
        if files:
            yield path, files


def _written(pull: PullRequest, into: Path, folder: Path) -> list[str]:
    """Writes the sources of both sides below a folder.  Returns the arms of the race."""
    if pull.baseline is None:
        raise ValueError("--rerun: there is no baseline: --baseline GLOB names its logs, --clone DIR the records")
    arms = []
    for arm, side in (("Baseline", pull.baseline), ("Candidate", pull.candidate)):
        if not side.sources:
            raise ValueError(f"--rerun: {side.name}: its logs embed no source that could be run, nor is a script known")
        home = into / arm.lower()
        for name, text in side.sources.items():
            if (path := home / PurePosixPath(name).name).exists() and path.read_text() != text:
                raise ValueError(f"{shown(path)}: is there already, with other contents: name another folder")
            home.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, text)
        arms.append(f"{arm}=script={home / SCRIPT}")
    return arms


# ---- a pull request of a clone


def _folder(args: argparse.Namespace, scratch: Path) -> tuple[Path, str]:
    """Returns (the folder of the logs, the name of the pull request)."""
    if not args.what.isdigit() or user_path(args.what).is_dir():
        path = user_path(args.what).resolve()
        if not path.is_dir():
            raise ValueError(f"{args.what}: no such folder; give the folder of the logs, or a number with --clone DIR")
        return path, path.name
    if not args.clone:
        fetch = f"git fetch origin pull/{args.what}/head:refs/pull/{args.what}/head"
        raise ValueError(f"{args.what}: --clone DIR names a clone that has this pull request ({fetch})")
    return _exported(user_path(args.clone), args.what, scratch), f"Pull request {args.what}"


def _exported(clone: Path, number: str, scratch: Path) -> Path:
    """Writes a pull request's record and the first logs of earlier records to scratch. Returns the record's folder."""
    ref = f"refs/pull/{number}/head"
    head = git.ask(clone, "rev-parse", "--verify", "-q", ref)
    merged = git.ask(clone, "log", "--all", "-n1", "--format=%H", "--fixed-strings", f"--grep=(#{number})")
    tip = (head or merged or "").strip()
    if not tip:
        raise ValueError(f"--clone {shown(clone)}: has no #{number}: git fetch origin pull/{number}/head:{ref} there")
    later = git.ask(clone, "rev-list", "--reverse", "--ancestry-path", "--first-parent", f"{tip}..HEAD") or ""
    merge = later.partition("\n")[0]  # the commit that merged it, or ""
    main_line = git.ask(clone, "merge-base", tip, f"{merge}^1" if merge else "HEAD") if head else None
    base = main_line.strip() if main_line and main_line.strip() != tip else f"{tip}^"
    try:
        only = ("--name-only", "--no-renames", "--diff-filter=A")
        added = _lines(clone, "diff", *only, base, tip, "--", "records")
        parts = [PurePosixPath(name).parts for name in added if name.endswith(SUFFIX)]
        parts = [part[: 4 if part[2] == "results" else 3] for part in parts if len(part) > 3]  # results: of track 3
        folders = sorted({"/".join(part) for part in parts}, key=lambda name: -sum(name in path for path in added))
        if not folders:
            raise ValueError(f"{number}: it adds no log ({SUFFIX}) below records/: give the folder of its logs")
        listed = _lines(clone, "ls-tree", "-r", "--name-only", base, f"{folders[0].rpartition('/')[0]}/")
        logs = {
            "/".join(PurePosixPath(name).parts[:3]): name
            for name in reversed(listed)
            if name.endswith(SUFFIX) and not pull_request.BASELINE.search(name)
        }
        before = [name for name in sorted(logs, reverse=True) if name < folders[0]][:NUM_EARLIER]
        scripts = [name for name in _lines(clone, "ls-tree", "--name-only", tip) if name.endswith(".py")]
        _write_tree(clone, tip, [folders[0], *scripts], scratch)
        _write_tree(clone, base, before[:1] + [logs[name] for name in before[1:]], scratch)
    except git.Failed as error:
        raise ValueError(f"--clone {shown(clone)}: {error}") from None
    return scratch / folders[0]


def _lines(clone: Path, *arguments: str) -> list[str]:
    """Returns what git lists, with names that are not ASCII as they are."""
    return [line for line in git.run(clone, "-c", "core.quotePath=false", *arguments).split("\n") if line]


def _write_tree(clone: Path, commit: str, paths: Iterable[str], into: Path) -> None:
    for line in _lines(clone, "ls-tree", "-r", commit, "--", *paths):
        (_, kind, digest), name = line.partition("\t")[0].split(), line.partition("\t")[2]
        if kind != "blob" or not name.endswith((SUFFIX, ".py", ".log")):
            continue
        path = into / name
        if not path.resolve().is_relative_to(into.resolve()):
            raise ValueError(f"{name}: leads out of its folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(git.run(clone, "cat-file", "blob", digest, errors="replace"))


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh pr", main=main)
    parser.add_argument("what", metavar="FOLDER|NUMBER", help="the folder of its logs, or its number in --clone")
    parser.add_argument("--clone", metavar="DIR", help="a clone of the project; nothing is fetched")
    parser.add_argument("--track", metavar="NAME", choices=groups.choices("track"), help="default: by FOLDER's path")
    parser.add_argument("--candidate", metavar="GLOB", help="the logs that are judged, below FOLDER: 'this_pr/*'")
    parser.add_argument("--baseline", metavar="GLOB", help="the logs of the baseline, below FOLDER")
    parser.add_argument("--script", metavar="FILE", help="the script of the candidate's logs, if they embed none")
    parser.add_argument("--rerun", metavar="DIR", help="write both sources there and print the race that decides")
    parser.flag("--go", help="with --rerun: start that race here")
    parser.add_argument("--out", metavar="FILE", help="write the Markdown there instead")
    parser.flag("--json", help="an object instead of Markdown")
    return parser
