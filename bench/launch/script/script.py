"""Turns a user's training program into a run: checks its settings, sets its environment, describes it in the record.

./run.sh run script=train_gpt.py      docs/scripts.md is the guide
./run.sh run script.root=nanochat script.module=scripts.base_train script.torchrun=false
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bench.base import credentials, private
from bench.base.metric import VAL_LOSS
from bench.base.paths import REPO, user_path
from bench.base.reading import plain_file
from bench.config import schema, user_code
from bench.data.sources.source import data_root
from bench.machine import code_state, git, sandbox
from bench.record import step_files

# columns of steps.csv that a metric of one's own would overwrite
RESERVED = {"run_id", *step_files.CORE_COLUMNS, *step_files.INT_COLUMNS, *step_files.OF_SCRIPTS}
RESERVED -= {VAL_LOSS.name, "train_loss"}
ANYTHING_ELSE = "script.root=DIR script.command='bash train.sh' starts anything else"
INSTRUMENTS = ("telemetry", "trace", "window")  # instruments that need nothing of a script but its lines
# {what chooses instruments: the choices that a script may have}
OUTSIDE = {"instruments": {*INSTRUMENTS}, "profile": {"modded", "null", "window"}}
DATA = "data/fineweb10B"
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SET_UP = ("setup.py", "conf.py", "conftest.py")  # which read documentation, and which no training run starts
DOCUMENTATION = (".md", ".rst")  # files that no program is expected to read, unless its source names them
TIMING_PROTOCOL = {
    "id": "script-1",
    "clock": "as the script prints it; the wall time at which each line came is taken by another process",
    "excluded": ["launch", "imports", "building", "compilation", "warm-up", "validation"],
    "in_timed_region": ["what the script times"],
    "step_ms": "differences of printed times, not synchronised with the device",
}
WALL_PROTOCOL = TIMING_PROTOCOL | {
    "id": "script-wall-1",
    "clock": "wall time at which the lines came, from the first to the last: the script prints no total of its own",
    "excluded": ["launch", "imports", "building", "compilation", "warm-up"],
    "in_timed_region": ["all that the script does between its first and last line, validation too"],
    "step_ms": "wall time between the lines of neighbouring steps",
}


@dataclass(frozen=True)
class Script:
    """A script that may be started."""

    typed: str  # what is started, as the user typed it
    own: str  # import path for user_code.sources(): PATH:__main__ or ROOT/./FILE:__main__
    module: str | None  # module that python -m starts
    command: tuple[str, ...] | None  # command of any program, may contain {seed}; None: Python starts the script
    torchrun: bool  # whether it gets torchrun's variables
    python: str  # the interpreter
    args: tuple[str, ...]  # may contain {seed}
    env: Mapping[str, str]
    dialect: str | Mapping[str, Any] | None  # a name, or script.lines; None: detected from the output
    dialect_file: str | None  # the yaml that script.lines are from, without private paths; None: from no yaml
    data: PurePosixPath  # folder of the shards, below its working folder
    raw_data: bool
    sandbox: bool
    copied: Mapping[str, Path] | None = None  # prepare.frozen()'s copies of its sources

    @functools.cached_property
    def sources(self) -> Mapping[str, Path]:
        return self.copied if self.copied is not None else user_code.sources([self.own])

    @property
    def root(self) -> Path:
        """The folder of its sources; the script is started in a copy of it."""
        return user_code.script_of(self.own)[0]

    @property
    def is_rooted(self) -> bool:
        """Whether script.root was given: then modules are imported from it too."""
        return user_code.script_of(self.own)[2]

    @property
    def file(self) -> str:
        """Path of the started file, relative to root; "" for a command that starts no file there."""
        return user_code.script_of(self.own)[1]

    @property
    def title(self) -> str:
        """Its name in the record: train_gpt.py, scripts.base_train, bash."""
        return self.module or PurePosixPath(self.file or (self.command or ("",))[0]).name

    @property
    def starts(self) -> list[str]:
        """The names of those of its sources that the settings start."""
        parts = set(re.findall(r"[\w./-]+", " ".join(self.command or ())))
        named = {os.path.normpath(part) for part in parts} | {f"{part.replace('.', '/')}.py" for part in parts}
        return [name for name in self.sources if name.removeprefix("script/") in {self.file, *named}]

    @functools.cached_property
    def sha256_by_name(self) -> dict[str, str]:
        """sha256 of every source, computed at the first access, which is before the run."""
        return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.sources.items()}

    def facts(self) -> dict[str, Any]:
        """Returns run.json["script"] as known before the run."""
        start: dict[str, Any] = {} if self.module is None else {"module": self.module}
        start |= {} if self.command is None else {"command": private.redact_all(list(self.command), REPO)}
        return start | {
            "file": self.file or self.title,
            "args": private.redact_all(list(self.args), REPO),
            "python": None if self.python == sys.executable else private.redact(self.python, REPO),
            "env": private.redact_all(dict(self.env), REPO),
            "data": str(self.data),
            "sha256_by_file": self.sha256_by_name,
            "no_part_of_the_identity": user_code.EXCLUDED_BELOW_ROOT if self.is_rooted else user_code.EXCLUDED,
        }


def from_config(config: schema.Config, overrides: list[str]) -> Script | None:
    """Returns the script that a composed config requests, or None; drops instruments that see only our own training.

    In config, in place, paths lose what is private, and variables that the shell gives get their values.  Raises
    ValueError for the user.
    """
    settings = config.script
    if settings is None:
        return None
    _set_instruments(config, overrides)
    given_root = None if settings.root is None else Path(os.path.normpath(user_path(settings.root).absolute()))
    typed, own = _started(settings)
    root, _, is_rooted = user_code.script_of(own)
    python = _python(settings.python, given_root, settings.rev)
    torchrun = settings.command is None if settings.torchrun is None else settings.torchrun
    if not torchrun:
        if (num := config.hardware.num_processes) not in (None, 1):
            raise ValueError(f"hardware.num_processes={num}: without torchrun it starts what it needs itself: omit it")
        config.hardware.num_processes = 1
    settings.env = {name: _value(name, value) for name, value in (settings.env or {}).items()} or None
    data = PurePosixPath(settings.data or DATA)
    dialect: str | Mapping[str, Any] | None = settings.dialect
    from bench.record.importers import dialects  # imports numpy, which launchers of our own runs do not need

    where, dialect_file = f"script.dialect={settings.dialect}", None
    if settings.lines is not None and settings.dialect is not None:
        raise ValueError(f"{where}: script.lines describe the lines too: keep one of them")
    if settings.dialect is not None and settings.dialect not in dialects.NAMES:  # its patterns belong to the settings
        path = str(user_path(settings.dialect).absolute())
        settings.lines, dialect_file = dialects.read_yaml(path, where), private.redact(path, REPO)
        settings.dialect = dialect_file
    if settings.lines is not None:
        dialect, where = settings.lines, where if dialect_file else "script.lines"
        dialects.reader_of(dialect)
    metric = config.goal.of.name
    if dialect is not None and config.goal.metric_pattern is None and metric not in dialects.metrics_of(dialect):
        why = f"lines of {where} have none"
        raise ValueError(f"goal.metric={metric}: {why}: give another metric, or goal.metric_pattern for it")
    if metric in RESERVED and config.goal.metric_pattern is not None:
        raise ValueError(f"goal.metric={metric}: steps.csv has such a column already: give another name")
    args, command = tuple(settings.args or ()), None if settings.command is None else tuple(settings.command)
    env, flags = settings.env or {}, (bool(settings.raw_data), bool(settings.sandbox))
    lines = dialect, dialect_file
    script = Script(typed, own, settings.module, command, torchrun, python, args, env, *lines, data, *flags)
    if not script.sources:
        remedy = "put a .sh there that starts it"
        raise ValueError(f"script.root={settings.root}: no source is in it, by which versions would differ: {remedy}")
    if script.sandbox:
        _check_sandbox(config, script)
    if is_rooted:
        settings.root = private.redact(str(given_root), REPO)
    if settings.path is not None:
        settings.path = script.file if is_rooted else private.redact(str(root / script.file), REPO)
    settings.torchrun = None if torchrun == (command is None) else torchrun  # the default has one config and id
    settings.python = None if settings.python is None else private.redact(python, REPO)
    # false is the default, which has one config and one id
    settings.raw_data, settings.sandbox = settings.raw_data or None, settings.sandbox or None
    return script


def _check_sandbox(config: schema.Config, script: Script) -> None:
    """Raises ValueError if no sandbox can be made here, or if it would let in more than the script's own files."""
    sandbox.kind()
    if config.hardware.nodes:
        raise ValueError(f"script.sandbox=true: it has no network, which hardware.nodes={config.hardware.nodes} needs")
    root = os.path.realpath(script.root)
    if os.path.realpath(os.path.expanduser("~")).startswith(root):
        raise ValueError(f"script.sandbox=true: all of {script.root} could be read: give the script its own folder")
    for path in script.sources.values():
        if not os.path.realpath(path).startswith(root + os.sep):
            raise ValueError(f"script.sandbox=true: {path} leads out of {script.root}: put a copy in its place")


def _set_instruments(config: schema.Config, overrides: list[str]) -> None:
    for override in overrides:
        key, _, value = override.partition("=")
        names = {name.strip() for name in value.strip("[]").split(",") if name.strip()}
        if names - OUTSIDE.get(key, names):
            raise ValueError(f"{override}: a script is measured from outside: use {' or '.join(sorted(OUTSIDE[key]))}")
    config.instruments = {name: settings for name, settings in config.instruments.items() if name in INSTRUMENTS}


def _started(settings: schema.ScriptConfig) -> tuple[str, str]:
    """Returns what is started as the user typed it, and Script.own.  Raises ValueError if it is not there."""
    if settings.root is None:
        rooted = {key: getattr(settings, key) for key in ("rev", "module", "command")}
        if needing := [f"script.{key}={value}" for key, value in rooted.items() if value is not None]:
            raise ValueError(f"{needing[0]}: give script.root=DIR, the folder in which its author starts it")
        typed = str(settings.path)
        path = user_path(typed)
        problem = "is not a regular file" if path.exists() else "there is no such file"
        problem = "is not a Python program" if path.is_file() else problem
        if not path.is_file() or path.suffix not in (".py", ""):
            raise ValueError(f"script={typed}: {problem}: give a .py file; {ANYTHING_ELSE}")
        return typed, f"{typed}{user_code.SCRIPT_MAIN}"
    root = Path(os.path.normpath(user_path(settings.root).absolute()))
    if not root.is_dir():
        raise ValueError(f"script.root={settings.root}: there is no such folder: give the program's repository")
    where = settings.root
    if settings.rev is not None:
        root, settings.rev = checked_out(root, settings.rev)
        where = str(root)
    if settings.command is not None:
        typed, names = " ".join(settings.command), [os.path.normpath(settings.command[0])]
        if not (root / names[0]).is_file():
            names = [""]  # such as bash or make, found on PATH
            if shutil.which(settings.command[0]) is None:
                raise ValueError(f"script.command={typed}: neither a file in {settings.root} nor a program on PATH")
    elif settings.module is not None:
        typed, stem = settings.module, settings.module.replace(".", "/")
        names = [f"{stem}.py", f"{stem}/__main__.py"]
    else:
        typed = settings.path or ""
        names = [os.path.relpath(os.path.normpath(root / os.path.expanduser(typed)), root)]
    name = next((name for name in names if not name or (root / name).is_file()), None)
    if name is None or name.startswith(".."):
        given = f"script{'.module' * bool(settings.module)}={typed}: script.root={settings.root}"
        raise ValueError(f"{given} has no file {names[0]}: give one that is there, by its path in script.root")
    return typed, f"{where}{user_code.WITHIN}{name}{user_code.SCRIPT_MAIN}"


def checked_out(root: Path, rev: str) -> tuple[Path, str]:
    """Returns (folder with the files of root at this revision, full commit).  Raises ValueError if it is unknown.

    The folder has the commit's tracked files.  It lies in the data folder, is read by every run of the commit, and
    links to what git does not track, such as prepared data.
    """
    where = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:8]  # other folders of this name have other files
    known = git.commit_of(root, rev)
    commit = known or rev
    folder = data_root() / user_code.REVISIONS / f"{root.name}-{commit}-{where}"
    # git forgets the commits of a deleted branch, also in the middle of a race; their files stay in the folder
    if known is None and not (COMMIT.fullmatch(rev) and folder.is_dir()):
        raise ValueError(f"script.rev={rev}: {root}: no git repository there has it: git log --oneline lists some")
    try:
        inner = git.run(root, "rev-parse", "--show-prefix").strip()  # root may be below the top of its repository
        is_there = git.ask(root, "rev-parse", "--verify", "--quiet", f"{commit}:{inner}") is not None
        if not is_there and not folder.is_dir():
            raise ValueError(f"script.rev={rev}: the folder {root} is not in this commit: commit it, or give another")
        if is_there:
            _export(root, f"{commit}:{inner}", folder)
        others = git.run(root, "ls-files", "--others", "--directory", "-z").split("\0")
    except git.Failed as error:
        raise ValueError(f"script.rev={rev}: {error}") from None
    links = {folder / name.rstrip("/"): root / name.rstrip("/") for name in filter(None, others)}
    for path in folder.rglob("*"):  # a file that was untracked before is tracked now, or gone
        if path not in links and _is_link_to(path, root / path.relative_to(folder)):
            path.unlink()
    for link, path in links.items():
        if not os.path.lexists(link) and not link.name.endswith(user_code.SUFFIXES) and user_code.is_linked(path):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return folder, commit


def content_sha256(root: Path) -> str:
    """Returns a hash of all files in a folder of checked_out(), except documentation: of links, where they lead, and of
    Python sources, what remains without comments and docstrings.

    Documentation counts that a Python source names which is none of SET_UP.
    """
    digest, paths = hashlib.sha256(), sorted(path for path in root.rglob("*") if path.is_symlink() or path.is_file())
    sources = {path: path.read_bytes() for path in paths if path.suffix == ".py" and not path.is_symlink()}
    for path in paths:
        is_documentation = not path.is_symlink() and path.name.lower().endswith(DOCUMENTATION)
        readers = (text for at, text in sources.items() if at.name not in SET_UP)
        if not is_documentation or any(os.fsencode(path.name) in text for text in readers):
            content = os.fsencode(os.readlink(path)) if path.is_symlink() else sources.get(path) or path.read_bytes()
            content = code_state.normalised(content) if path in sources else content
            digest.update(os.fsencode(path.relative_to(root)) + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _export(root: Path, tree: str, folder: Path) -> None:
    """Makes the folder have the files of a tree, and links to root, alone: an earlier run may have changed others.

    It is replaced at once, also if two processes do so.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".made."))
    try:
        objects = git.run(root, "rev-parse", "--path-format=absolute", "--git-path", "objects").strip()
        ask = functools.partial(git.run, temporary, GIT_OBJECT_DIRECTORY=objects, GIT_WORK_TREE=str(folder))
        # a repository of its own: root's settings may name programs, such as filters
        git.run(temporary, "init", "-q", GIT_DEFAULT_HASH="sha256" if len(tree.partition(":")[0]) == 64 else "sha1")
        ask("read-tree", tree)
        if folder.is_dir():
            changed = ask("diff", "--name-only", "-z")
            others = filter(None, ask("ls-files", "--others", "-z").split("\0"))
            strangers = [name for name in others if not _is_link_to(folder / name, root / name)]
            if not changed and not strangers:
                return
            folder.rename(temporary / "before")
        ask("checkout-index", "--all", f"--prefix={temporary / 'files'}/", GIT_WORK_TREE=str(temporary))
        with contextlib.suppress(OSError):  # another process was faster
            (temporary / "files").rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_link_to(link: Path, target: Path) -> bool:
    return link.is_symlink() and Path(os.readlink(link)) == target


def _python(typed: str | None, root: Path | None, rev: str | None) -> str:
    """Returns the absolute path of the interpreter; a link of a virtual environment is not resolved."""
    if typed is None:
        project_python = root and root / ".venv" / "bin" / "python"  # as uv creates it
        if root is None or project_python is None or not project_python.exists():
            return sys.executable
        if rev and git.ask(root, "ls-files", "--", ".venv", ":!.venv/.gitignore"):  # it would choose that of others
            raise ValueError(f"{root}/.venv is part of its repository: give an interpreter that is not, script.python=")
        return str(project_python)
    path = shutil.which(os.path.expanduser(typed)) or shutil.which(str(user_path(typed)))
    if path is None:
        raise ValueError(f"script.python={typed}: there is no such interpreter: give e.g. ~/other/.venv/bin/python")
    return str(Path(path).absolute())


def _value(name: str, value: object) -> str:
    if value is not None:
        return str(value)
    if credentials.VARIABLE.search(name):
        raise ValueError(f"script.env.{name}=null: the record would keep it, and it looks like a secret: remove it")
    if name not in os.environ:
        raise ValueError(f"script.env.{name}=null: the shell has no such variable: give its value, {name}: VALUE")
    if plain_file.name_in_utf8(os.environ[name]) != os.environ[name]:
        raise ValueError(f"script.env.{name}=null: its value is not UTF-8, and no record can hold it: give another one")
    return os.environ[name]


def dumped(script: Script, work: Path, seed: int, pipes: list[str], profile: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the part of the launch file that bench/training/script_worker.py reads."""

    def filled(arguments: Sequence[str]) -> list[str]:
        return [argument.replace("{seed}", str(seed)) for argument in arguments]

    return {
        "path": str(work / script.file),
        "module": script.module,
        "command": script.command and filled(script.command),
        "args": filled(script.args),
        "work": str(work),
        "imports_work": script.is_rooted,
        "pipes": pipes,
        "profile": profile,
    }
