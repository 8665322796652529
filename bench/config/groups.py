"""Finds the yamls that a group can choose from: conf/ of this program, then the user's folders.

A user's folders are conf/ in the current folder, as `./run.sh init` makes it (it holds speedrun.yaml), the folder that
--config-dir names, and those of installed packages with the entry point ENTRY_POINTS. They have the same groups as
conf/: model/mine.yaml is model=mine. A name in two folders is refused.
"""

import difflib
import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from bench.base.paths import CONF, MARK, own_conf, shown, user_path

# fmt: off
GROUPS = (
    "model", "model/size", "data", "optim", "optim/schedule", "goal", "hardware", "instruments", "exporters", "look",
    "profile", "track", "experiment",
)
# fmt: on
LISTS = ("instruments", "exporters")  # groups of which a run has several choices, each with the settings of its yaml
OF_HYDRA = ("hydra/launcher", "hydra/sweeper")  # Hydra's groups, which a user's folder may also have
VARIABLE = "SPEEDRUN_CONFIG_DIR"  # --config-dir, also of the runs that this process starts
NAME_VARIABLE = "SPEEDRUN_CONFIG_NAME"  # --config-name, likewise
# {folder of modded-nanogpt's records/: the track in conf/ that has its data, target and rule}
UPSTREAM_TRACKS = {"track_1_short": "gpt2_small", "track_2_medium": "gpt2_medium", "track_3_optimization": "steps"}
# {what people type: the name here, which is not spelled like it}
MEANT = {"gpu": "cuda", "train": "run", "benchmark": "race", "--parallel": "--jobs", "--n_jobs": "--jobs"}
MEANT |= {"--format": "--json", "--fast": "--quick", "--verbose": "--why", "--output": "--out"}
NEAR = 0.65  # least difflib ratio of a suggestion: --fast and --passport have 0.63, rnu and run 0.67
PRIMARY = "config"  # conf/config.yaml, the default root config
ENTRY_POINTS = "speedrun.conf"  # an entry point name = "my_package.conf" names a package's folder


def choices(group: str) -> list[str]:
    """Returns the names that group= accepts, sorted."""
    return sorted(_files()[group])


def path_of(group: str, name: str) -> Path:
    """Returns the yaml of a choice, or of a root config if group is "". Raises KeyError if there is none."""
    return _files()[group][name] if group else _roots()[name]


def values_of(group: str, name: str) -> dict[str, Any]:
    """Returns a choice's own values and those of the choices that its yaml is based on, without composing a run."""
    import yaml

    own, values = yaml.safe_load(path_of(group, name).read_text()), dict[str, Any]()
    for base in own.pop("defaults", ()):
        if base in choices(group):
            values = merged(values, values_of(group, base))
    return merged(values, own)


def merged(old: Any, new: Any) -> Any:
    """Returns the new value; of two dicts, the old one with what the new one has."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: merged(old.get(key), value) for key, value in new.items()}


def config_name() -> str:
    """Returns the root config of runs: --config-name, or PRIMARY. Raises ValueError if there is none of that name."""
    name = os.environ.get(NAME_VARIABLE, PRIMARY).removesuffix(".yaml")
    return str(known("--config-name", name, sorted(_roots())))


def _roots() -> dict[str, Path]:
    """Returns {name: path} of the yamls outside all groups. Of two with one name, this program's wins."""
    paths = [path for folder in (*reversed(own_folders()), CONF) for path in folder.glob("*.yaml")]
    return {path.stem: path for path in paths if path.name != MARK}


def own_folders() -> tuple[Path, ...]:
    """Returns the user's folders, without conf/. Raises ValueError if a named one does not exist or has no group."""
    named = os.environ.get(VARIABLE)
    return _own_folders(own_conf(), user_path(named).absolute() if named else None)


def as_typed() -> list[str]:
    """Returns --config-dir and --config-name as the user typed them, for a record's command; [] without them."""
    options = {"--config-dir": os.environ.get(VARIABLE), "--config-name": os.environ.get(NAME_VARIABLE)}
    return [word for option, value in options.items() if value for word in (option, value)]


def default_track() -> str:
    """Returns the track that conf/config.yaml chooses."""
    import yaml

    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    return str(next(default["track"] for default in defaults if "track" in default))


def known(setting: str, name: Any, names: Collection[str]) -> Any:
    """Returns the name that a setting has. Raises ValueError if it is none of the names to choose from."""
    if name not in names:
        remedy = f"{did_you_mean(str(name), names)}choose from {', '.join(names)}"
        raise ValueError(f"{setting}={name}: there is none of that name; {remedy}")
    return name


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Returns "did you mean KEY? " for a known setting, option or command like the word; "" if there is none."""
    last = word.split(".")[-1]
    initials = "".join(part[:1] for part in last.split("_"))  # learning_rate -> lr
    near = [key for key in names if key.split(".")[-1] in (last, initials, MEANT.get(word))]
    near = near or [key for key in names if f"_{last}_" in f"_{key.split('.')[-1]}_"]  # steps -> num_steps
    near = near or difflib.get_close_matches(word, names, n=1, cutoff=NEAR)
    near = near or [key for key in names if word and key.startswith(word)]
    return f"did you mean {near[0]}? " if near else ""


def introduction() -> str | None:
    """Returns a line that tells a person which of their folders are used and what they add; None without any."""
    lines = []
    for folder in own_folders():
        added = [f"{group}={name}" for group in GROUPS for name in _names(folder, group)]
        lines.append(f"{shown(folder)}/ adds {', '.join(added) or 'nothing yet'}")
    return "; ".join(lines) or None


def _files() -> dict[str, dict[str, Path]]:
    return _by_group((CONF, *own_folders()))


@functools.cache
def _by_group(folders: tuple[Path, ...]) -> dict[str, dict[str, Path]]:
    """Returns {group: {name: path}}. Raises ValueError if two folders have the same name."""
    paths: dict[str, dict[str, Path]] = {group: {} for group in GROUPS}
    for folder, group in itertools.product(folders, GROUPS):
        for name in _names(folder, group):
            path = folder / group / f"{name}.yaml"
            if (other := paths[group].setdefault(name, path)) != path:
                raise ValueError(f"{group}={name} is in two folders, {other} and {path}: rename yours")
    return paths


def _names(folder: Path, group: str) -> list[str]:
    return sorted(path.stem for path in (folder / group).glob("[!.]*.yaml") if path.is_file())


@functools.cache
def _own_folders(conf: Path | None, named: Path | None) -> tuple[Path, ...]:
    folders = [] if conf is None else [conf]
    if named is not None:
        if not any(_names(named, group) for group in (*GROUPS, *OF_HYDRA, ".")):
            why = f"it has none of the groups {', '.join(GROUPS)}: add model/mine.yaml"
            raise ValueError(f"--config-dir {named}: {why if named.is_dir() else 'there is no folder of that name'}")
        folders.append(named)
    folders += _installed()
    return tuple(dict.fromkeys(folders))


@functools.cache
def _installed() -> list[Path]:
    """Returns the configuration folders of installed packages, without importing the packages."""
    files = [file for folder in sys.path for file in Path(folder).glob("*.dist-info/entry_points.txt")]
    if not any(f"[{ENTRY_POINTS}]" in file.read_text(errors="replace") for file in files):
        return []  # ten times faster than importlib.metadata
    from importlib import metadata

    installed = []
    for point in sorted(metadata.entry_points(group=ENTRY_POINTS)):
        top, *rest = point.value.split(".")
        spec = importlib.util.find_spec(top)
        folders = [Path(start, *rest) for start in (spec and spec.submodule_search_locations) or ()]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            why = f"{point.name} = {point.value} is not a folder of an installed package"
            raise ValueError(f"entry point {ENTRY_POINTS}: {why}")
        installed.append(folder)
    return installed
