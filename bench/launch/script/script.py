"""Somebody's own training program as a run: its settings, checked; the environment it gets; what its record says.

./run.sh run script=train_gpt.py      docs/scripts.md is the guide
./run.sh run script.root=nanochat script.module=scripts.base_train script.torchrun=false
"""

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
from bench.base.paths import REPO, user_path
from bench.config import schema, user_code
from bench.data.sources.source import data_root
from bench.machine import git, sandbox

INSTRUMENTS = ("telemetry", "trace", "window")  # those that need nothing of a script but its lines
DATA = "data/fineweb10B"
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

    typed: str  # what is started, as the user gave it
    own: str  # as user_code.sources() reads it: PATH:__main__, ROOT/./FILE:__main__
    module: str | None  # as python -m starts it
    command: tuple[str, ...] | None  # any program, with {seed} in it; None: Python starts the script
    torchrun: bool  # whether it gets torchrun's environment
    python: str  # the interpreter
    args: tuple[str, ...]  # with {seed} in it
    env: Mapping[str, str]
    dialect: str | None  # a name, or the path of a yaml; None: found in what is printed
    data: PurePosixPath  # below its working folder
    raw_data: bool
    sandbox: bool
    copied: Mapping[str, Path] | None = None  # prepare.frozen()'s copies of its sources

    @functools.cached_property
    def sources(self) -> Mapping[str, Path]:
        return self.copied if self.copied is not None else user_code.sources([self.own])

    @property
    def root(self) -> Path:
        """The folder of its sources, which it is started in a copy of."""
        return user_code.script_of(self.own)[0]

    @property
    def is_rooted(self) -> bool:
        """Whether the root was given: then modules are imported from it too."""
        return user_code.script_of(self.own)[2]

    @property
    def file(self) -> str:
        """The name of what is started, from root; "" of a command that starts no file there."""
        return user_code.script_of(self.own)[1]

    @property
    def title(self) -> str:
        """What a record calls it: train_gpt.py, scripts.base_train, bash."""
        return self.module or PurePosixPath(self.file or (self.command or ("",))[0]).name

    @property
    def starts(self) -> list[str]:
        """Those of its sources that are started, as far as the settings say."""
        words = set(re.findall(r"[\w./-]+", " ".join(self.command or ())))
        named = {os.path.normpath(word) for word in words} | {f"{word.replace('.', '/')}.py" for word in words}
        return [name for name in self.sources if name.removeprefix("script/") in {self.file, *named}]

    @functools.cached_property
    def sha256_by_name(self) -> dict[str, str]:
        """Hash of every source's bytes, taken at the first call, which is before the run."""
        return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.sources.items()}

    def facts(self) -> dict[str, Any]:
        """What run.json["script"] says before the run."""
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
    """The script that a composed config asks for, None without one; instruments that only see our own are dropped.

    In config, in place, paths lose what is private, and variables that the shell gives get their value.  Raises
    ValueError for the user.
    """
    settings = config.script
    if settings is None:
        return None
    _set_instruments(config, overrides)
    given_root = None if settings.root is None else Path(os.path.normpath(user_path(settings.root).absolute()))
    typed, own = _started(settings)
    root, _, is_rooted = user_code.script_of(own)
    python = _python(settings.python, given_root)
    torchrun = settings.command is None if settings.torchrun is None else settings.torchrun
    if not torchrun:
        if config.hardware.num_processes not in (None, 1):
            remedy = "it starts what it needs itself: remove it, or let torchrun start them"
            raise ValueError(f"hardware.num_processes={config.hardware.num_processes}: without torchrun {remedy}")
        config.hardware.num_processes = 1
    settings.env = {name: _value(name, value) for name, value in (settings.env or {}).items()} or None
    data = PurePosixPath(settings.data or DATA)
    if data.is_absolute() or ".." in data.parts or not data.name:
        raise ValueError(f"script.data={settings.data}: give a folder below the script's own, e.g. {DATA}")
    dialect = settings.dialect
    from bench.record.importers import dialects  # numpy, which a launcher of our own runs does not need

    if dialect is not None and dialect not in dialects.NAMES:
        dialect = str(user_path(dialect).absolute())
        dialects.read_yaml(dialect, f"script.dialect={settings.dialect}")
        settings.dialect = private.redact(dialect, REPO)
    metric = config.goal.of.name
    if dialect is not None and config.goal.metric_pattern is None and metric not in dialects.metrics_of(dialect):
        why = f"lines of script.dialect={settings.dialect} have none"
        raise ValueError(f"goal.metric={metric}: {why}: give another metric, or goal.metric_pattern for it")
    args, command = tuple(settings.args or ()), None if settings.command is None else tuple(settings.command)
    env, flags = settings.env or {}, (bool(settings.raw_data), bool(settings.sandbox))
    script = Script(typed, own, settings.module, command, torchrun, python, args, env, dialect, data, *flags)
    if script.sandbox:
        _check_sandbox(config, script)
    if is_rooted:
        settings.root = private.redact(str(given_root), REPO)
    if settings.path is not None:
        settings.path = script.file if is_rooted else private.redact(str(root / script.file), REPO)
    settings.torchrun = None if torchrun == (command is None) else torchrun  # the default is one config with one id
    settings.python = None if settings.python is None else private.redact(python, REPO)
    # false is the default: one config with one id
    settings.raw_data, settings.sandbox = settings.raw_data or None, settings.sandbox or None
    return script


def _check_sandbox(config: schema.Config, script: Script) -> None:
    """ValueError: none can be made here, or it would let in more than the script's own."""
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
    for word in overrides:
        key, _, value = word.partition("=")
        names = [name.strip() for name in value.strip("[]").split(",") if name.strip()]
        if key == "instruments" and not set(names) <= set(INSTRUMENTS):
            remedy = f"choose from {', '.join(INSTRUMENTS)}, or none: instruments=[]"
            raise ValueError(f"{word}: a script is measured from outside, where this cannot work: {remedy}")
        if key == "profile" and value not in ("null", "window", "modded"):
            raise ValueError(f"{word}: a script is measured from outside: use profile=window or profile=modded")
    config.instruments = {name: settings for name, settings in config.instruments.items() if name in INSTRUMENTS}


def _started(settings: schema.ScriptConfig) -> tuple[str, str]:
    """-> what is started as the user gave it, and Script.own.  ValueError: it is not there."""
    if settings.root is None:
        if settings.rev is not None:
            raise ValueError(f"script.rev={settings.rev}: give script.root=DIR, the program's repository")
        if settings.path is None:
            what = "module" if settings.module else "command"
            raise ValueError(f"script.{what}: give script.root=DIR, the folder in which its author starts it")
        path = user_path(settings.path)
        if not path.is_file():
            remedy = "give the training script, e.g. train_gpt.py"
            raise ValueError(f"script={settings.path}: there is no such file: {remedy}")
        if path.suffix not in (".py", ""):
            remedy = "give a .py file; script.root=DIR script.command='bash train.sh' starts anything else"
            raise ValueError(f"script={settings.path}: is not a Python program: {remedy}")
        return settings.path, f"{settings.path}{user_code.SCRIPT_MAIN}"
    root = Path(os.path.normpath(user_path(settings.root).absolute()))
    if not root.is_dir():
        raise ValueError(f"script.root={settings.root}: there is no such folder: give the program's repository")
    where = settings.root
    if settings.rev is not None:
        root, settings.rev = checked_out(root, settings.rev)
        where = str(root)
    if settings.command is not None:
        if not settings.command:
            raise ValueError("script.command: it is empty: give a program, as script.command='bash train.sh'")
        typed, names = " ".join(settings.command), [os.path.normpath(settings.command[0])]
        if not (root / names[0]).is_file():
            names = [""]  # bash, make: found by PATH
            if shutil.which(settings.command[0]) is None:
                remedy = f"is neither a file in {settings.root} nor a program on PATH"
                raise ValueError(f"script.command={typed}: {settings.command[0]} {remedy}")
    elif settings.module is not None:
        typed, stem = settings.module, settings.module.replace(".", "/")
        names = [f"{stem}.py", f"{stem}/__main__.py"]
    else:
        typed = settings.path or ""
        names = [os.path.relpath(os.path.normpath(root / os.path.expanduser(typed)), root)]
    name = next((name for name in names if not name or (root / name).is_file()), None)
    if name is None or name.startswith(".."):
        what, where = ("script.module", "there") if settings.module else ("script", "there, from where its path counts")
        raise ValueError(
            f"{what}={typed}: script.root={settings.root} has no file {names[0]}: give one that is {where}"
        )
    return typed, f"{where}{user_code.WITHIN}{name}{user_code.SCRIPT_MAIN}"


def checked_out(root: Path, rev: str) -> tuple[Path, str]:
    """-> (folder with the files of root at this revision, full commit).  ValueError: there is no such revision.

    The commit's tracked files lie in the data folder, read by every run of it, with links to what git does not know:
    prepared data.
    """
    commit = git.ask(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}")
    if commit is None:
        raise ValueError(f"script.rev={rev}: {root}: no git repository there has it: git log --oneline lists some")
    commit = commit.strip()
    folder = data_root() / "revisions" / f"{root.name}-{commit[:12]}"
    try:
        inner = git.run(root, "rev-parse", "--show-prefix").strip()  # root may lie below its repository's top
        if not folder.is_dir():
            _export(root, f"{commit}:{inner}", folder)
        others = git.run(root, "ls-files", "--others", "--directory", "-z").split("\0")
    except git.Failed as error:
        raise ValueError(f"script.rev={rev}: {error}") from None
    for name in filter(None, others):
        link = folder / name.rstrip("/")
        if not os.path.lexists(link) and not name.endswith(user_code.SUFFIXES) and user_code.is_linked(root / name):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(root / name.rstrip("/"))
    return folder, commit


def _export(root: Path, tree: str, folder: Path) -> None:
    """Whole or not at all, also where two processes make it at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".made."))
    try:
        index = str(made / ".index.tmp")
        git.run(root, "read-tree", tree, GIT_INDEX_FILE=index)
        git.run(root, "checkout-index", "--all", f"--prefix={made / 'files'}/", GIT_INDEX_FILE=index)
        if not folder.is_dir():
            (made / "files").rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _python(word: str | None, root: Path | None) -> str:
    """The interpreter, absolute; a link of a virtual environment stays one."""
    if word is None:
        project_python = root and root / ".venv" / "bin" / "python"  # as uv makes it
        return str(project_python) if project_python and project_python.exists() else sys.executable
    found = shutil.which(os.path.expanduser(word)) or shutil.which(str(user_path(word)))
    if found is None:
        raise ValueError(f"script.python={word}: there is no such interpreter: give e.g. ~/other/.venv/bin/python")
    return str(Path(found).absolute())


def _value(name: str, value: object) -> str:
    if value is not None:
        return str(value)
    if credentials.VARIABLE.search(name):
        raise ValueError(f"script.env.{name}=null: the record would keep it, and it looks like a secret: remove it")
    if name not in os.environ:
        raise ValueError(f"script.env.{name}=null: the shell has no such variable: give its value, {name}: VALUE")
    return os.environ[name]


def dumped(script: Script, work: Path, seed: int, pipes: list[str], profile: dict[str, Any] | None) -> dict[str, Any]:
    """What bench/training/script_worker.py reads of the launch file."""

    def filled(words: Sequence[str]) -> list[str]:
        return [word.replace("{seed}", str(seed)) for word in words]

    return {
        "path": str(work / script.file),
        "module": script.module,
        "command": script.command and filled(script.command),
        "args": filled(script.args),
        "work": str(work),
        "imports_work": script.is_rooted,
        "beside": str(script.root),
        "pipes": pipes,
        "profile": profile,
    }
