"""Makes an arm that can be raced from a submission, in a read-only copy.

optim.lr=0.002 optim=muon    changes settings of the champion
script=train.py              replaces the champion's script
mine/                        replaces the champion's folder: its script, and all code beside it
change.patch                 a diff of the champion's folder; of our own models, of models/, conf/model/ and conf/optim/
"""

import difflib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from bench.base.paths import REPO, user_path, working_folder
from bench.base.reading import plain_file
from bench.config import overrides, user_code
from bench.machine import git, sandbox
from bench.plans.race import worktrees
from bench.plans.referee.search import Arm

OF_OURS = ("model", "optim", "stages")
ALLOWED = (*OF_OURS, "script.args")  # settings that a submission may change
OF_PROGRAM = ("script=", "script.path=", "script.root=")
SANDBOX = "script.sandbox=true"
CONFINED = "hardware.sandbox=true"  # of an arm of our own models whose code was submitted
OF_RANKS = re.compile(r"models/(ladder/)?(?!(__init__|settings|stages)\.py)\w+\.py")  # files that no launcher imports
OF_A_FILE = re.compile(r"model\.arch=[^:${}]+\.py:\w+")  # a setting that names code which no launcher imports
CODE = ("models/", "conf/model/", "conf/optim/")  # paths of this repository that a diff may change
TRUST = "can be confined to a sandbox: read other code, and begin the search with --trust"
FILES = "files"
MAX_PATCH_BYTES = 2**22
REFS = "refs/speedrun/searches"


class Program(NamedTuple):
    """The script of an arm."""

    root: Path
    file: str  # relative to root; "" for a module or a command
    is_rooted: bool


def program_of(arm: Arm) -> Program | None:
    """Returns the script of an arm; None if it trains one of our models."""
    settings = dict(override.partition("=")[::2] for override in arm["overrides"])
    path, root = settings.get("script.path", settings.get("script")), settings.get("script.root")
    if path is None and root is None:
        return None
    if root is not None:
        return Program(user_path(root).absolute(), path or "", True)
    script = user_path(path or "").absolute()
    return Program(script.parent, script.name, False)


def frozen(arm: Arm, folder: Path) -> Arm:
    """Returns the arm with its program copied below folder, so that an edit of the original changes no champion."""
    program = program_of(arm)
    if program is None:
        return arm
    if any(override.startswith("script.rev=") for override in arm["overrides"]):
        raise ValueError("script.rev: a search starts from files: check the revision out, and give that folder")
    return _with_program(arm, program._replace(root=_copied(program, arm, folder)))


def is_code(arguments: Sequence[str]) -> bool:
    """Returns whether a submission is more than settings. model.arch=mine.py:Net is code too. Raises ValueError."""
    if any("=" not in argument or argument.startswith(OF_PROGRAM) for argument in arguments):
        return True
    waiting = [overrides.parsed(argument).value() for argument in arguments if argument.startswith(OF_OURS)]
    while waiting:
        value = waiting.pop()
        if user_code.is_import_path(value):  # also an interpolation with a resolver
            return True
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return False


def stored(arguments: Sequence[str], champion: Arm, folder: Path, ref: str, trust: bool) -> Arm:
    """Returns the arm of a submission. Copies what its arguments name into folder. Raises ValueError.

    ref: the name below REFS that keeps the commit of a diff of this repository. trust: of the search; if it is false,
    code runs in a sandbox, and what would also run in a launcher is refused.
    """
    if not trust and program_of(champion) is None and is_code(arguments):
        for part in arguments:
            if "=" in part and is_code([part]) and not OF_A_FILE.fullmatch(part):
                raise ValueError(f"{part}: only the code of model.arch=FILE.py:CLASS {TRUST}")
        sandbox.kind()  # raises Refused if there is none
        arguments = [_of_copies(part, folder) if OF_A_FILE.fullmatch(part) else part for part in arguments]
        champion = {**champion, "overrides": list(dict.fromkeys([*champion["overrides"], CONFINED]))}
    if not arguments:
        raise ValueError("nothing was submitted: name a diff, a folder, script=PATH or key=value")
    typed, is_script = arguments[0], arguments[0].startswith(OF_PROGRAM[:2])
    if len(arguments) > 1 or "=" in typed and not is_script:
        return _arm_from_settings(arguments, champion)
    path = user_path(typed.partition("=")[2] if is_script else typed).absolute()
    if not path.is_file() and (is_script or not path.is_dir()):
        raise ValueError(f"{typed}: there is no such file or folder: submit script=PATH, a diff, a folder or key=value")
    if not is_script and path.is_file():
        return _arm_from_patch(path, champion, folder, ref)
    program = program_of(champion)
    if program is None:
        raise ValueError(f"{typed}: the champion is one of our models: submit key=value, or a diff of its code")
    if is_script:  # replaces the champion's script, beside its other files
        root = _copied(program, champion, folder, is_final=False)
        (root / program.file).unlink()
        shutil.copyfile(path, root / program.file)
        _make_read_only(root)
    else:
        if program.file and not (path / program.file).is_file():
            raise ValueError(f"{typed}: it has no {program.file}, which the champion starts: submit a folder that has")
        root = _copied(program._replace(root=path), champion, folder)
    return _with_program(champion, program._replace(root=root))


def _of_copies(setting: str, folder: Path) -> str:
    """Copies the file that model.arch names, and all that it imports beside it, so that an edit changes no champion.

    Returns the setting that names the copy, from the current folder, because a record keeps no private path.
    """
    path, _, name = setting.partition("=")[2].rpartition(":")
    main, files = user_path(path).absolute(), folder / FILES
    for source in user_code.sources([f"{path}:{name}"]).values():
        if source.is_symlink() or not source.is_relative_to(main.parent):
            raise ValueError(f"{source.name}: is a link or not beside {main.name}: put the file itself there")
        (files / source.relative_to(main.parent)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, files / source.relative_to(main.parent))
    _make_read_only(files)
    return f"model.arch={os.path.relpath(files / main.name, working_folder())}:{name}"


def _arm_from_settings(settings: Sequence[str], champion: Arm) -> Arm:
    for override in settings:
        key, equals, _ = override.partition("=")
        if not equals or not any(key == name or key.startswith((f"{name}.", f"{name}/")) for name in ALLOWED):
            raise ValueError(f"{override}: a submission can change only {', '.join(ALLOWED)}")
    keys = {override.partition("=")[0] for override in settings}
    kept = [override for override in champion["overrides"] if override.partition("=")[0] not in keys]
    return {**champion, "overrides": [*kept, *settings]}


def _arm_from_patch(path: Path, champion: Arm, folder: Path, ref: str) -> Arm:
    if path.stat().st_size > MAX_PATCH_BYTES:
        raise ValueError(f"{path.name}: a diff has at most {MAX_PATCH_BYTES:,} bytes: submit the folder")
    patch = plain_file.content(path)
    program = program_of(champion)
    try:
        if program is None:
            return {**champion, "rev": _commit_of(patch, champion, ref)}
        root = _copied(program, champion, folder, is_final=False)
        before = _links(root)
        git.run(root, "apply", "-", stdin=patch, GIT_CEILING_DIRECTORIES=str(root.parent))
        _refuse_links(root, before)
    except git.Failed as error:
        raise ValueError(f"{path.name}: it does not apply to the champion ({error}): make it from that") from None
    _make_read_only(root)
    return _with_program(champion, program._replace(root=root))


def _links(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_symlink()}


def _refuse_links(root: Path, others: Set[Path]) -> None:
    if added := sorted(_links(root) - others):
        raise ValueError(f"{added[0].relative_to(root)}: is a symbolic link: submit the file itself")


def _commit_of(patch: bytes, champion: Arm, ref: str) -> str:
    """Returns the commit that a diff makes of the champion's in this repository. Raises git.Failed, ValueError."""
    if champion["rev"] is None and git.run(REPO, "status", "--porcelain", "--", "bench", *CODE).strip():
        raise ValueError("bench/, models/ or conf/ have changes that are not committed: commit them, then submit diffs")
    base = worktrees.commit_of(REPO, champion["rev"] or "HEAD")
    with tempfile.TemporaryDirectory(prefix="speedrun-git-") as temporary:
        index = os.path.join(temporary, "index")
        git.run(REPO, "read-tree", base, GIT_INDEX_FILE=index)
        git.run(REPO, "apply", "--cached", "-", stdin=patch, GIT_INDEX_FILE=index)
        tree = git.run(REPO, "write-tree", GIT_INDEX_FILE=index).strip()
    changed = git.run(REPO, "diff-tree", "-r", "-z", "--no-renames", base, tree).split("\0")  # a moved file is two
    for facts, name in zip(changed[::2], changed[1::2], strict=False):
        if not name.startswith(CODE):
            raise ValueError(f"{name}: a diff can change only {', '.join(CODE)}: omit the rest")
        if facts.split()[1] not in ("000000", "100644", "100755"):
            raise ValueError(f"{name}: is a symbolic link: submit the file itself")
        if CONFINED in champion["overrides"] and not OF_RANKS.fullmatch(name):
            raise ValueError(f"{name}: only the Python files of models in models/ and models/ladder/ {TRUST}")
    who = "-c", "user.name=referee", "-c", "user.email=referee@localhost"
    commit = git.run(REPO, *who, "commit-tree", tree, "-p", base, "-m", f"submission {ref}").strip()
    git.run(REPO, "update-ref", f"{REFS}/{ref}", commit)
    return commit


def _with_program(arm: Arm, program: Program) -> Arm:
    rest = [override for override in arm["overrides"] if not override.startswith(OF_PROGRAM)]
    if program.is_rooted:
        settings = [f"script.root={program.root}", *([f"script={program.file}"] if program.file else [])]
    else:
        settings = [f"script={program.root / program.file}"]
    return {**arm, "overrides": [*settings, *rest]}


def _copied(program: Program, arm: Arm, folder: Path, is_final: bool = True) -> Path:
    """Copies the program's sources to FOLDER/files, links what else lies beside it, and returns that path.

    For an arm in a sandbox nothing is linked: it can read only its own sources and the track's data.
    """
    files = folder / FILES
    for name, path in _sources(program).items():
        target = files / name.removeprefix("script/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target, follow_symlinks=False)
    _refuse_links(files, set())
    for entry in () if SANDBOX in arm["overrides"] else os.scandir(program.root):
        if not os.path.lexists(files / entry.name) and user_code.is_linked(Path(entry.path)):
            (files / entry.name).symlink_to(Path(entry.path).resolve())
    if is_final:
        _make_read_only(files)
    return files


def _make_read_only(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink() and path.is_file():
            path.chmod(0o444)


def diff(before: Arm, after: Arm) -> str:
    """Returns the differences between two arms: settings, and the sources of a script or of our own models."""
    kept = set(before["overrides"]) & set(after["overrides"])
    old, new = (
        [f"{setting}\n" for setting in arm["overrides"] if setting not in kept and not setting.startswith(OF_PROGRAM)]
        for arm in (before, after)
    )
    lines = list(difflib.unified_diff(old, new, "settings", "settings"))
    programs = program_of(before), program_of(after)
    if programs[0] and programs[1] and programs[0] != programs[1]:
        texts = [
            {name: path.read_text(errors="replace") for name, path in _sources(program).items()}
            for program in programs
            if program
        ]
        for name in sorted({*texts[0], *texts[1]}):
            a, b = (text.get(name, "").splitlines(keepends=True) for text in texts)
            lines += difflib.unified_diff(a, b, f"a/{name}", f"b/{name}")
    if after["rev"] and after["rev"] != before["rev"]:
        lines.append(git.ask(REPO, "diff", before["rev"] or f"{after['rev']}^", after["rev"]) or "")
    return "".join(lines)


def _sources(program: Program) -> dict[str, Path]:
    return user_code.script_sources(program.root, program.file, program.is_rooted)
