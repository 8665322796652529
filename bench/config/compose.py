"""Composes overrides to a Config with Hydra; overrides.py has their grammar, multirun.py the sweeps.

Hydra composes the groups (model=, track=, ...). It searches conf/, then the user's folders (bench/config/groups.py),
then hydra.searchpath; its parts are used as hydra.main uses them. Single settings are checked and set on top of that.
Only the launcher composes; workers read the plain yaml that it wrote. Every mistake in an override becomes a ValueError
that names what is wrong, the value, and what to try.
"""

import contextlib
import copy
import functools
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

import models
from bench.base.paths import CODE, CONF
from bench.base.reading import plain_file
from bench.config import groups, meanings, schema, user_code
from bench.config.groups import (
    GROUPS,
    LISTS,
    PRIMARY,
    choices,
    config_name,
    default_track,
    did_you_mean,
    known,
    own_folders,
    path_of,
)
from bench.config.overrides import WORDS_KEYS, one_line, parsed, with_schedule
from bench.config.typed import MISSING, check_names, fill_like, filled, leaves
from models import ladder, optimizers

JOB_NAME = "speedrun"
VERSION_BASE = "1.3"
PLUGINS = {  # {a choice of Hydra's: the package that must be installed for it}
    "hydra/launcher/submitit_slurm": "hydra-submitit-launcher",
    "hydra/launcher/submitit_local": "hydra-submitit-launcher",
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/launcher/ray": "hydra-ray-launcher",
    "hydra/sweeper/optuna": "optuna",
    "hydra/sweeper/ax": "hydra-ax-sweeper",
    "hydra/sweeper/nevergrad": "hydra-nevergrad-sweeper",
}
OURS = str(CODE / "bench" / "plans" / "plugins")  # holds the package hydra_plugins, where Hydra looks
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
FREE = ("model.args", "data.args")  # settings of the user's own class: its __init__ checks them
Values = dict[str, Any]  # nested settings, as Hydra composed them
NO_SCHEDULE = (
    "the optimizer's yaml chooses no learning rate schedule: begin it with `defaults: [schedule: trapezoid, _self_]`"
)
TRACK_OF_GPUS = "gpt2_small"  # the track of a machine with GPUs if none is named


def compose(overrides: list[str], machine: schema.Machine | None = None) -> schema.Config:
    """Returns the unresolved config of these overrides. machine chooses the default track. Raises ValueError."""
    from omegaconf import OmegaConf

    groups, lists, settings = _split(overrides, machine)
    composed = _with_lists(groups, lists)
    for override in settings:
        _set(composed, override)
    if "${" in str(composed):  # few configs interpolate, and resolving all values takes longer than the rest
        with refusals(overrides):
            composed = OmegaConf.to_container(OmegaConf.create(composed), resolve=True)
    for group in LISTS:
        _check_settings(group, composed[group])
    _check_track(composed["track"])
    _check_script(composed, overrides)
    if composed["optim"] and composed["optim"]["schedule"].get("name", MISSING) == MISSING:
        raise ValueError(f"optim.schedule.name is not set: {NO_SCHEDULE}")
    config = schema.build(schema.Config, composed)
    arch = config.model.arch if config.model else None
    if arch is not None and not user_code.is_import_path(arch):
        own = "or your own, my_model.py:MyModel"
        known("model.arch", arch, [*filter(models.find, choices("model")), *ladder.CLASSES, own])
    return config


def origins(overrides: list[str], machine: schema.Machine | None) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Returns {key: the override that sets it} and [(group, name)] of the run's yamls, of which earlier ones win."""
    groups, lists, settings = _split(overrides, machine)
    chosen = _whole(groups, own_folders(), config_name()).hydra.runtime.choices
    composed = _with_lists(groups, lists)
    roots = list(dict.fromkeys(group.split("/")[0] for group in GROUPS))  # in config.yaml's order: later roots win
    files = []
    for group in sorted(GROUPS, key=lambda group: (-roots.index(group.split("/")[0]), group.count("/"))):
        names = composed[group] if group in LISTS else [chosen.get(group)]
        files += [(group, choice) for name in names if name for choice in _with_bases(group, name)]
        if group == "experiment":  # the root's own values win over all groups but this
            files.append(("", config_name()))
    return {override.key_or_group: override.input_line for override in settings}, files


def app(loader: Callable[[Any], Any] | None = None) -> Any:
    """Returns a new Hydra object. loader makes its ConfigLoader from a search path; None uses Hydra's own."""
    if OURS not in sys.path:
        sys.path.append(OURS)
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.global_hydra import GlobalHydra

    version.setbase(VERSION_BASE)
    searched = create_config_search_path(str(CONF))
    for folder in groups.own_folders():
        searched.prepend("user", f"file://{folder}", anchor="schema")
    GlobalHydra.instance().clear()
    hydra = Hydra(JOB_NAME, (loader or ConfigLoaderImpl)(searched))
    GlobalHydra.instance().initialize(hydra)
    return hydra


@contextlib.contextmanager
def refusals(arguments: list[str]) -> Iterator[None]:
    """Turns Hydra's errors about the arguments into a ValueError of one line within the block."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except UnicodeDecodeError as error:
        yamls = (path for folder in groups.own_folders() for path in sorted(Path(folder).rglob("*.yaml")))
        broken = next((path for path in yamls if "\ufffd" in plain_file.text_or_empty(path)), "a yaml")
        raise ValueError(f"{broken}: byte {error.start} is not UTF-8: save it as UTF-8") from None
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        text = one_line(error)
        if "HydraConfig was not set" in text:
            key = text.partition("full_key: ")[2].partition(",")[0]
            text = f"{key}: ${{hydra:...}} has no value yet when settings are composed: write the value"
        for choice, package in PLUGINS.items():
            if f"'{choice}'" in text:
                text = f"{'='.join(choice.rsplit('/', 1))} is not installed here: pip install {package} (docs/race.md)"
        if "Could not override 'optim/schedule'" in text:
            text = f"optim/schedule: {NO_SCHEDULE}"
        if "Could not override 'model/size'" in text:
            text += " A model's yaml needs it: defaults: [size: nano, _self_], as in conf/model/gpt2.yaml"
        raise ValueError(f"{' '.join(arguments)}: {text}" if arguments else text) from None


def _with_bases(group: str, name: str) -> Iterator[str]:
    """Yields a choice, then the choices that its yaml is based on, as experiment r09 is on r08."""
    yield name
    for base in (yaml.safe_load(path_of(group, name).read_text()) or {}).get("defaults", ()):
        if isinstance(base, str) and base in choices(group):
            yield from _with_bases(group, base)


def group_overrides(overrides: list[str], machine: schema.Machine | None = None) -> list[str]:
    """Returns the overrides that choose groups, which Hydra composes; adds the default track if none is chosen."""
    return list(_split(overrides, machine)[0])


def stored_sweep(overrides: list[str]) -> tuple[str | None, list[str]]:
    """Returns (hydra.mode of the chosen yamls or None, overrides of the sweep stored in them). MULTIRUN means -m."""
    groups, _, _ = _split(overrides, None)
    hydra = _whole(groups, own_folders(), config_name()).hydra
    return hydra.mode and hydra.mode.name, stored_overrides(hydra)


def stored_overrides(hydra: Any) -> list[str]:
    """Returns the overrides in hydra.sweeper.params of Hydra's node."""
    return [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]


def _split(overrides: list[str], machine: schema.Machine | None) -> tuple[tuple[str, ...], list[Any], list[Any]]:
    """Returns the overrides that choose groups (sorted, a default track added), change a list, or set one setting."""
    groups, lists, settings = {}, [], []
    for override in map(parsed, with_schedule(overrides)):
        key, value = override.key_or_group, override.value()
        if override.is_add() or override.is_delete():
            lists.append(override)
        elif key in GROUPS and not isinstance(value, dict):
            _check_group(override)
            groups[key] = override.input_line
        else:
            settings.append(override)
    if "track" not in groups:
        if machine and machine.num_gpus and not {"hardware=cpu", "hardware.device=cpu"} & set(overrides):
            groups["track"] = f"track={TRACK_OF_GPUS}"
        elif "experiment" not in groups and config_name() == PRIMARY:  # these may choose their own
            groups["track"] = f"track={default_track()}"
    return tuple(sorted(groups.values())), lists, settings


def _with_lists(groups: tuple[str, ...], lists: list[Any]) -> Values:
    """Returns a copy of what the groups compose, with the lists changed: +instruments=NAME, ~instruments=[NAME,...]."""
    composed = copy.deepcopy(_composed(groups, own_folders(), config_name()))
    for override in lists:
        word, group, names = override.input_line, override.key_or_group, override.value()
        _check_group(override)
        for name in names if isinstance(names, list) else [names]:
            if override.is_add():
                composed[group].setdefault(name, copy.deepcopy(_settings_of(path_of(group, name))[name]))
            elif composed[group].pop(name, None) is None:
                raise ValueError(f"{word}: the run has no {name}: it has {', '.join(composed[group]) or 'none'}")
    return composed


def _check_group(override: Any) -> None:
    word, group, value = override.input_line, override.key_or_group, override.value()
    for name in value if isinstance(value, list) else [value]:
        if name in choices(group):
            continue
        near, kind = did_you_mean(str(name), choices(group)), group[:-1] if group in LISTS else group
        if name is None:
            near = "omit it, or "
        if group == "instruments" and name in choices("exporters"):
            near = f"it is an exporter, not an instrument: write exporters=[{name}], or "
        if group == "model" and name in ladder.CLASSES:
            near = f"it is a rung of the ladder: write experiment={name}, or model.arch={name} for its model alone; "
        if group == "experiment" and re.fullmatch(r"r\d\d", str(name)):
            near = "not every record is a rung of the ladder (docs/reference/ladder.md); "
        own = "; docs/own.md says how to add yours" if group in ("model", "optim", "data", "track") else ""
        raise ValueError(f"{word}: there is no {kind} {name!r}; {near}choose from {', '.join(choices(group))}{own}")


def _set(values: Values, override: Any) -> None:
    """Sets one setting in the composed values, in place. A dict replaces only the keys that it names."""
    word, key, value = override.input_line, override.key_or_group, override.value()
    key = "script.path" if key == "script" and not isinstance(value, dict) else key
    if key in WORDS_KEYS and isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{word}: {error}") from None
    for free in FREE:
        if key == free and isinstance(value, dict) and not all(isinstance(name, str) for name in value):
            raise ValueError(f"{word}: the names of {free} must be text")
        if key.startswith(f"{free}."):
            for part in reversed(key.removeprefix(f"{free}.").split(".")):
                value = {part: value}
            key = free
    *path, last = key.split(".")
    section: Any = values
    for part in path:
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict) or last not in section:
        settings = meanings.settings()
        if key in settings:
            have = " or ".join(settings[key].brought_by)
            raise ValueError(f"{word}: this run has no such setting; only runs with {have} have it")
        near = did_you_mean(key, [name for name, _ in leaves(values)] + list(GROUPS))
        if path == ["optim"] and isinstance(section, dict) and user_code.is_import_path(str(section.get("name"))):
            check_names(optimizers.Config, {last: value, **section}, "optim.")
        if path and isinstance(section, dict) and f" {'.'.join(path)}." not in near:
            near = f"{'.'.join(path)} has {', '.join(section)}; {near}"
        remedy = "`./run.sh run --cfg job` shows every setting, with its meaning"
        raise ValueError(f"unknown setting {word}: {near}{remedy}")
    group = key.replace(".", "/")
    if group in GROUPS and not isinstance(value, dict):
        raise ValueError(f"{word}: write {group}={value}; choose from {', '.join(choices(group))}")
    section[last] = groups.merged(section[last], value)


@functools.cache
def _whole(groups: tuple[str, ...], folders: tuple[Path, ...], name: str) -> Any:
    """Returns what Hydra composes of the groups, with its own node. folders and name are part of the cache's key."""
    from hydra.types import RunMode

    with refusals(list(groups)):
        return app().compose_config(name, list(groups), RunMode.RUN, from_shell=False)


@functools.cache
def _composed(groups: tuple[str, ...], folders: tuple[Path, ...], name: str) -> Values:
    """Returns the composed config with every setting that exists, as a cached dict: copy it to change it."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(_whole(groups, folders, name))
    del plain["hydra"]
    composed = filled(schema.Config, plain)
    for group in LISTS:
        _check_settings(group, composed[group])
    return composed


def track_values(name: str) -> Values:
    """Returns the composed values of a run that changes nothing of the track."""
    return _composed((f"track={name}",), own_folders(), PRIMARY)


def _check_track(track: Values) -> None:
    """Raises ValueError if a run changes a rule of its track's file other than repeats."""
    name = track["name"]
    for key, rule in track_values(known("track.name", name, choices("track")))["track"].items():
        if key != "repeats" and track[key] != rule:
            change = f"track.{key}={track[key]}: track {name} says {rule}"
            raise ValueError(f"{change}; other rules are another file in conf/track/")


def _check_script(composed: Values, overrides: list[str]) -> None:
    """Refuses script settings without a script, and a model or an optimizer of ours with one."""
    started = [key for key in schema.SCRIPT_STARTS if composed["script"][key] is not None]
    if not started:
        setting = next((word for word in overrides if word.startswith("script.")), None)
        if setting:
            others = "or script.root=DIR with script.module=NAME or script.command='WORDS'"
            raise ValueError(f"{setting}: there is no script: give script=PATH/train_gpt.py, {others}")
        composed["script"] = None
        return
    if started[1:]:
        raise ValueError(f"script.{' and script.'.join(started)} each say what to start: keep one of them")
    program = f"script{'' if started[0] == 'path' else '.' + started[0]}={composed['script'][started[0]]}"
    ours = [word for word in overrides if re.match(r"(model|optim)[=./]", word)]
    ours += ["checkpoint.save=true"] if (composed["checkpoint"] or {}).get("save") else []
    if ours:
        raise ValueError(f"{ours[0]}: {program} has its own model and optimizer, and saves its weights: remove it")
    composed["model"] = composed["optim"] = None


def _check_settings(group: str, chosen: Values) -> None:
    """Checks instruments or exporters against their yamls, which are their schemas; adds missing settings in place."""
    for name, settings in chosen.items():
        path = path_of(group, known(group, name, choices(group)))
        fill_like(_settings_of(path)[name], f"{group}.{name}", settings)


@functools.cache
def _settings_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text())
