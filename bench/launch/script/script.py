"""Somebody's own training script as a run: its settings, checked; the environment it gets; what its record says.

./run.sh run script=train_gpt.py      docs/SCRIPTS.md is the guide
"""

import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bench.base import credentials, private
from bench.base.paths import REPO, of_user
from bench.config import schema, user_code

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

    typed: str  # its path as the user gave it
    path: Path
    python: str  # the interpreter
    args: tuple[str, ...]  # with {seed} in it
    env: Mapping[str, str]
    dialect: str | None  # a name, or the path of a yaml; None: found in what is printed
    data: PurePosixPath  # below its working folder
    raw_data: bool
    copied: Mapping[str, Path] | None = None  # prepare.frozen()'s copies of its sources

    @functools.cached_property
    def sources(self) -> Mapping[str, Path]:
        return self.copied if self.copied is not None else user_code.script_sources(self.path)

    @property
    def main(self) -> Path:
        """The script itself among its sources."""
        return self.sources[f"script/{self.path.name}"]

    @functools.cached_property
    def sha256_by_name(self) -> dict[str, str]:
        """Hash of every source's bytes, taken at the first call, which is before the run."""
        return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.sources.items()}

    def facts(self) -> dict[str, Any]:
        """What run.json["script"] says before the run."""
        return {
            "file": self.path.name,
            "args": private.redact_all(list(self.args), REPO),
            "python": None if self.python == sys.executable else private.redact(self.python, REPO),
            "env": private.redact_all(dict(self.env), REPO),
            "data": str(self.data),
            "sha256_by_file": self.sha256_by_name,
            "no_part_of_the_identity": user_code.EXCLUDED,
        }


def of(config: schema.Config, overrides: list[str]) -> Script | None:
    """The script that a composed config asks for, None without one; instruments that only see our own are dropped.

    In config, in place, paths lose what is private, and variables that the shell gives get their value.  Raises
    ValueError for the user.
    """
    settings = config.script
    if settings is None or settings.path is None:
        return None
    _set_instruments(config, overrides)
    path, python = Path(os.path.normpath(of_user(settings.path).absolute())), _python(settings.python)
    if not path.is_file():
        raise ValueError(f"script={settings.path}: there is no such file: give the training script, e.g. train_gpt.py")
    settings.env = {name: _value(name, value) for name, value in (settings.env or {}).items()} or None
    data = PurePosixPath(settings.data or DATA)
    if data.is_absolute() or ".." in data.parts or not data.name:
        raise ValueError(f"script.data={settings.data}: give a folder below the script's own, e.g. {DATA}")
    dialect = settings.dialect
    from bench.record.importers import dialects  # numpy, which a launcher of our own runs does not need

    if dialect is not None and dialect not in dialects.NAMES:
        dialect = str(of_user(dialect).absolute())
        dialects.read_yaml(dialect, f"script.dialect={settings.dialect}")
        settings.dialect = private.redact(dialect, REPO)
    args = tuple(settings.args or ())
    script = Script(settings.path, path, python, args, settings.env or {}, dialect, data, bool(settings.raw_data))
    settings.path = private.redact(str(path), REPO)
    settings.python = None if settings.python is None else private.redact(python, REPO)
    settings.raw_data = settings.raw_data or None  # false is the default: one config with one id
    return script


def _set_instruments(config: schema.Config, overrides: list[str]) -> None:
    for word in overrides:
        key, _, value = word.partition("=")
        names = [name.strip() for name in value.strip("[]").split(",") if name.strip()]
        if key == "instruments" and not set(names) <= set(INSTRUMENTS):
            remedy = f"choose from {', '.join(INSTRUMENTS)}, or none: instruments=[]"
            raise ValueError(f"{word}: a script is measured from outside, where those do not see: {remedy}")
        if key == "profile" and value not in ("null", "window", "modded"):
            raise ValueError(f"{word}: a script is measured from outside: use profile=window or profile=modded")
    config.instruments = {name: settings for name, settings in config.instruments.items() if name in INSTRUMENTS}


def _python(word: str | None) -> str:
    """The interpreter, absolute; a link of a virtual environment stays one."""
    if word is None:
        return sys.executable
    found = shutil.which(os.path.expanduser(word)) or shutil.which(str(of_user(word)))
    if found is None:
        raise ValueError(f"script.python={word}: there is no such interpreter: give e.g. ~/other/.venv/bin/python")
    return str(Path(found).absolute())


def _value(name: str, value: object) -> str:
    if value is not None:
        return str(value)
    if credentials.VARIABLE.search(name):
        raise ValueError(f"script.env.{name}=null: the record keeps it, and it looks like a secret")
    if name not in os.environ:
        raise ValueError(f"script.env.{name}=null: the shell has no such variable: give its value, {name}: VALUE")
    return os.environ[name]


def dumped(script: Script, work: Path, seed: int, pipes: list[str], profile: dict[str, Any] | None) -> dict[str, Any]:
    """What bench/training/script_worker.py reads of the launch file."""
    return {
        "path": str(work / script.path.name),
        "args": [arg.replace("{seed}", str(seed)) for arg in script.args],
        "work": str(work),
        "beside": str(script.path.parent),
        "pipes": pipes,
        "profile": profile,
    }
