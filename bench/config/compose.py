"""Overrides -> Config: Hydra lives here and in no other room.

Hydra composes the groups (model=, track=, ...); single settings are then put over that, each checked first.  Only the
launcher composes; workers read the plain yaml it wrote.  Every mistake in an override becomes a ValueError that says
what, the value, and what to try.
"""

import copy
import difflib
import functools
import re

import yaml

from bench.config import schema
from bench.config.groups import GROUPS, choices, own_folders, path_of
from bench.config.typed import fill_like, filled, leaves
from bench.paths import CONF

PATH_KEYS = ("data.train_glob", "data.val_glob", "script", "script.path", "script.python", "script.dialect")
PLAIN_PATHS = re.compile(r"[\w./,-]+")  # one, or several of a sweep, that the grammar reads as they are
FREE = ("model.args", "data.args")  # settings of the user's own class, which its __init__ knows
LISTS = ("instruments", "exporters")  # of names, each with the settings of its yaml
TRACK_OF_GPUS = "gpt2_small"  # where no track is named


def spelled(words: list[str]) -> list[str]:
    """The user's words with nanochat's --enable_profiling=True as what it means here, profile=stages."""
    spelled_out = []
    for word in words:
        key, _, value = word.partition("=")
        if key.lstrip("-").replace("-", "_") != "enable_profiling":
            spelled_out.append(word)
        elif value.lower() in ("", "true", "1"):
            other = [given for given in words if given.startswith("profile=") and given != "profile=stages"]
            if other:
                raise ValueError(f"{word}: it means profile=stages, and {other[0]} is given too: keep one of them")
            spelled_out.append("profile=stages")
        elif value.lower() not in ("false", "0"):
            raise ValueError(f"{word}: use True or False")
    return spelled_out


def compose(overrides: list[str], machine: schema.Machine | None = None) -> schema.Config:
    """Config as asked, not resolved.  machine chooses the track where none is named.  Raises ValueError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    groups, settings = {}, []
    for override in map(_parsed, overrides):
        key, value = override.key_or_group, override.value()
        if key in GROUPS and not isinstance(value, dict):
            _check_group(override)
            groups[key] = override.input_line
        else:
            settings.append(override)
    if "track" not in groups:
        if machine and machine.num_gpus and not {"hardware=cpu", "hardware.device=cpu"} & set(overrides):
            groups["track"] = f"track={TRACK_OF_GPUS}"
        elif "experiment" not in groups:  # which may choose its own
            groups["track"] = f"track={_default_track()}"
    composed = copy.deepcopy(_composed(tuple(sorted(groups.values())), own_folders()))
    for override in settings:
        _set(composed, override)
    try:
        composed = OmegaConf.to_container(OmegaConf.create(composed), resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{' '.join(overrides)}: {_first_line(error)}") from None
    for group in LISTS:
        _check_settings(group, composed[group])
    _check_track(composed["track"])
    _check_script(composed, overrides)
    return schema.build(schema.Config, composed)


def deviations(config: schema.Config) -> list[str]:
    """What a run changes of the things its track fixes, as 'key: value instead of value'."""
    track = config.track
    if not track.fixed:
        return []
    rules, found = dict(leaves(_of_track(track.name))), []
    for key, value in leaves(schema.to_dict(config)):
        if any(key == fixed or key.startswith(fixed + ".") for fixed in [*track.fixed, "track"]):
            rule = rules.get(key)
            if rule != value and key != "data.vocab_size":  # vocab_size is derived from the data
                found.append(f"{key}: {value} instead of {rule}")
    return found


def sweep(overrides: list[str]) -> list[list[str]]:
    """['model=a,b', 'seed=0,1'] -> every combination, in order, as lists of plain overrides."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    overrides = [_quoted(_refuse_add_or_delete(override)) for override in overrides]
    if not overrides:
        raise ValueError("there is nothing to sweep: give values, e.g. -m seed=0,1,2")
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except (OverrideParseException, ValueError) as error:
        raise ValueError(f"cannot read the sweep {' '.join(overrides)}: {_first_line(error)}") from None
    return [list(job) for batch in batches for job in batch]


# ---- one override


def _parsed(word):
    """An override as Hydra's parser reads it.  Raises ValueError for a word that is not an override, or is a sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        override = OverridesParser.create().parse_override(_quoted(_refuse_add_or_delete(word)))
    except OverrideParseException as error:
        raise ValueError(f"{word}: {_first_line(error)}") from None
    if override.is_sweep_override():
        raise ValueError(f"{word}: several values are a sweep: add -m")
    return override


def _quoted(override):
    """A path may hold ~, spaces, brackets and quotes, which Hydra's grammar reads as its own: quote it for the user."""
    key, _, value = override.partition("=")
    is_plain = key.startswith("script") and PLAIN_PATHS.fullmatch(value)
    if key not in PATH_KEYS or is_plain or value in ("", "null") or value[0] in "'\"":
        return override
    return f"{key}='" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _refuse_add_or_delete(override):
    if override[:1] in "+~":
        raise ValueError(
            f"{override}: settings are neither added nor deleted: write key=value, or key=null to switch it off"
        )
    if override.startswith("hydra"):
        raise ValueError(f"{override}: Hydra only composes here; folders and launching are this program's own")
    if "=" not in override:
        raise ValueError(f"{override!r} is not an override: write key=value, e.g. seed=3 or model=modern")
    return override


def _check_group(override):
    word, group, value = override.input_line, override.key_or_group, override.value()
    if value is None:
        raise ValueError(f"{word}: omit it, or choose from {', '.join(choices(group))}")
    for name in value if isinstance(value, list) else [value]:
        if name in choices(group):
            continue
        if group == "instruments" and name in choices("exporters"):
            raise ValueError(f"{word}: {name} is an exporter, not an instrument: write exporters=[{name}]")
        near = _did_you_mean(str(name), choices(group))
        raise ValueError(f"{word}: there is no {group} {name!r}; {near}choose from {', '.join(choices(group))}")


def _set(values, override):
    """Put the value of one setting into the composed values, in place; a dict only over what it names."""
    word, key, value = override.input_line, override.key_or_group, override.value()
    key = "script.path" if key == "script" and not isinstance(value, dict) else key
    for free in FREE:
        if key.startswith(f"{free}."):
            for part in reversed(key.removeprefix(f"{free}.").split(".")):
                value = {part: value}
            key = free
    *path, last = key.split(".")
    section = values
    for part in path:
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict) or last not in section:
        near = _did_you_mean(key, [known for known, _ in leaves(values)] + list(GROUPS))
        raise ValueError(f"unknown setting {word}: {near}`./run.sh run --cfg job` shows every setting")
    group = key.replace(".", "/")
    if group in GROUPS and not isinstance(value, dict):
        raise ValueError(f"{word}: write {group}={value}; choose from {', '.join(choices(group))}")
    section[last] = _merged(section[last], value)


def _merged(old, new):
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def _did_you_mean(word, known):
    last = word.split(".")[-1]
    initials = "".join(part[:1] for part in last.split("_"))  # learning_rate: lr
    near = [key for key in known if key.split(".")[-1] in (last, initials)]
    near = near or difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _first_line(error):
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


# ---- the groups


@functools.cache
def _composed(groups, folders):
    """What Hydra makes of some group=name, with every setting that there is: a dict: copy it to change it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    GlobalHydra.instance().clear()
    own = [f"hydra.searchpath=[{','.join(map(_searched, folders))}]"] if folders else []
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            composed = hydra_compose(config_name="config", overrides=[*groups, *own])
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{' '.join(groups)}: {_first_line(error)}") from None
    composed = filled(schema.Config, OmegaConf.to_container(composed))
    for group in LISTS:
        _check_settings(group, composed[group])
    return composed


def _searched(folder):
    """A folder as an item of Hydra's searchpath."""
    return "'file://" + str(folder).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _default_track():
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    return next(one["track"] for one in defaults if "track" in one)


def _of_track(name):
    """The composed values of a run on the track that changes nothing."""
    return _composed((f"track={name}",), own_folders())


def _check_track(track):
    """A track's rules are those of its file: all a run may choose is how often it is repeated."""
    name = track["name"]
    if name not in choices("track"):
        raise ValueError(f"track.name={name}: unknown track; choose from {', '.join(choices('track'))}")
    for key, rule in _of_track(name)["track"].items():
        if key != "repeats" and track[key] != rule:
            remedy = "other rules are another file in conf/track/"
            raise ValueError(f"track.{key}={track[key]}: track {name} says {rule}; {remedy}")


def _check_script(composed, overrides):
    """Without a script there are no settings of one; with one, in place, no model and no optimizer of ours."""
    if composed["script"]["path"] is None:
        given = next((word for word in overrides if word.startswith("script.")), None)
        if given:
            raise ValueError(f"{given}: there is no script: give script=PATH/train_gpt.py too")
        composed["script"] = None
        return
    for word in overrides:
        if word.partition("=")[0].replace("/", ".").split(".")[0] in ("model", "optim"):
            raise ValueError(f"{word}: script={composed['script']['path']} has its own model and optimizer: remove it")
    composed["model"] = composed["optim"] = None


def _check_settings(group, chosen):
    """The yaml of an instrument or exporter is its schema; settings that are not named are added in place."""
    for name, settings in chosen.items():
        if name not in choices(group):
            names = ", ".join(choices(group))
            raise ValueError(f"{group}.{name}: unknown {group[:-1]}; choose from {names}")
        fill_like(_settings_of(path_of(group, name))[name], f"{group}.{name}", settings)


@functools.cache
def _settings_of(path):
    return yaml.safe_load(path.read_text())
