"""Overrides -> Config: Hydra lives here and in no other room.

Only the launcher composes; workers read the plain yaml it wrote.  Every mistake a user can make in an override
becomes a ValueError that says what, the value, and what to try.
"""

import difflib
import re

from bench.config import memory_windows, profiler_windows, schema
from bench.paths import CONF

PATH_KEYS = ("data.train_glob", "data.val_glob")
GROUPS = ("model", "model/size", "data", "optim", "goal", "hardware", "instruments", "profile", "track", "experiment")


def choices(group):
    """Names that group= may take, sorted."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def quoted(override):
    """A path may hold ~, spaces, brackets and quotes, which Hydra's grammar reads as its own: quote it for the user."""
    key, _, value = override.partition("=")
    if key not in PATH_KEYS or value in ("", "null") or value[0] in "'\"":
        return override
    return f"{key}='" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def spelled(words):
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


def compose(overrides, machine=None):
    """list[str] -> Config as asked, not resolved.  machine (a schema.Machine) chooses the track where none is named."""
    overrides = [quoted(refuse_add_or_delete(override)) for override in overrides]
    if (
        machine
        and machine.num_gpus
        and not _names(overrides, "track")
        and not {"hardware=cpu", "hardware.device=cpu"} & set(overrides)
    ):
        overrides = ["track=gpt2_small", *overrides]
    composed = _hydra_compose(overrides)
    _check_instruments(composed["instruments"])
    _check_track(composed["track"])
    return schema.build(schema.Config, composed)


def deviations(config):
    """What a run changes of the things its track fixes, as 'key: value instead of value'."""
    track = config.track
    if not track.fixed:
        return []
    model = schema.to_dict(config)
    plain = _hydra_compose([f"track={track.name}"])
    found = []
    for key, value in _leaves(model):
        if any(key == fixed or key.startswith(fixed + ".") for fixed in [*track.fixed, "track"]):
            rule = schema.get(plain, key)
            if rule != value and key != "data.vocab_size":  # vocab_size is derived from the data
                found.append(f"{key}: {value} instead of {rule}")
    return found


def sweep(overrides):
    """['model=a,b', 'seed=0,1'] -> every combination, in order, as lists of plain overrides."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    overrides = [quoted(refuse_add_or_delete(override)) for override in overrides]
    if not overrides:
        raise ValueError("there is nothing to sweep: give values, e.g. -m seed=0,1,2")
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except (OverrideParseException, ValueError) as error:
        raise ValueError(f"cannot read the sweep {' '.join(overrides)}: {_first_line(error)}") from None
    return [list(job) for batch in batches for job in batch]


def refuse_add_or_delete(override):
    if override[:1] in "+~":
        raise ValueError(
            f"{override}: settings are neither added nor deleted: write key=value, or key=null to leave one out"
        )
    if override.startswith("hydra"):
        raise ValueError(f"{override}: Hydra only composes here; folders and launching are this program's own")
    if "=" not in override:
        raise ValueError(f"{override!r} is no override: write key=value, e.g. seed=3 or model=modern")
    return override


def _hydra_compose(overrides):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="schema", node=schema.Config)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            node = hydra_compose(config_name="config", overrides=list(overrides))
        return OmegaConf.to_container(node, resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(_explain(error, overrides)) from None


def _explain(error, overrides):
    """Hydra's and OmegaConf's words -> what, the value, what to try."""
    if str(error).startswith("Error merging override") and error.__cause__ is not None:
        error = error.__cause__  # where OmegaConf says what is wrong with the value
    text = str(error)
    for override in overrides:
        if f"'{override}'" in text and "Ambiguous value" in text:
            return f"{override}: several values are a sweep: add -m"
    for override in overrides:
        key, _, value = override.partition("=")
        if key in GROUPS:
            values = [part.strip() for part in value.strip("[]").split(",")]
            for name in values:
                if (
                    name not in choices(key)
                    and name != "null"
                    and re.search(rf"Could not (find|load) '{re.escape(key)}/", text)
                ):
                    return f"{key}={value}: there is no {key} {name!r}; {_did_you_mean(name, choices(key))}choose from {', '.join(choices(key))}"
    unknown = re.search(r"Key '([^']+)' (?:is )?not in|Could not override '([^']+)'", text)
    where = re.search(r"full_key: (\S+)", text)
    for override in overrides:
        key, _, value = override.partition("=")
        full = where.group(1) if where else (unknown.group(1) or unknown.group(2)) if unknown else None
        if full and (key == full or key.split(".")[-1] == full or full.endswith("." + key)):
            if unknown or "not in" in text:
                return f"unknown setting {override}: {_did_you_mean(key, known_keys())}`./run.sh run --cfg job` shows every setting"
            return f"{override}: " + (
                "give a list, in brackets: [...]" if "DictConfig with ListConfig" in text else _first_line(error)
            )
    return f"{' '.join(overrides)}: {_first_line(error)}"


def known_keys():
    """Every dotted key and group, for suggestions."""
    config = schema.to_dict(schema.Config())
    return [key for key, _ in _leaves(config)] + list(GROUPS)


def _leaves(values, path=""):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def _did_you_mean(word, known):
    near = difflib.get_close_matches(word, known, n=1) or [
        key for key in known if key.split(".")[-1] == word.split(".")[-1]
    ]
    return f"did you mean {near[0]}? " if near else ""


def _first_line(error):
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _names(overrides, group):
    return any(override.split("=")[0] == group for override in overrides)


def _check_track(track):
    """A track's rules are those of its file: all a run may choose is how often it is repeated."""
    if track["name"] not in choices("track"):
        raise ValueError(
            f"track.name={track['name']}: there is no such track; choose from {', '.join(choices('track'))}"
        )
    rules = _hydra_compose([f"track={track['name']}"])["track"]
    for key in rules:
        if key != "repeats" and track[key] != rules[key]:
            raise ValueError(
                f"track.{key}={track[key]}: track {track['name']} says {rules[key]}; other rules are another file in conf/track/"
            )


def _check_instruments(instruments):
    """The yaml of an instrument is its schema: the same settings of the same types, and nothing else."""
    import yaml

    for name, settings in instruments.items():
        path = CONF / "instruments" / f"{name}.yaml"
        if not path.exists():
            raise ValueError(
                f"instruments.{name}: there is no such instrument; choose from {', '.join(choices('instruments'))}"
            )
        known = yaml.safe_load(path.read_text())[name]
        if not isinstance(settings, dict):
            raise ValueError(
                f"instruments.{name}={settings}: it takes settings, {', '.join(known) or 'of which it has none'}"
            )
        for key, value in settings.items():
            if key not in known:
                raise ValueError(
                    f"unknown setting instruments.{name}.{key}={value}: {name} has {', '.join(known) or 'no settings'}"
                )
            if known[key] is not None and value is not None and not _is_like(known[key], value):
                raise ValueError(f"instruments.{name}.{key}={value!r}: it must be a {type(known[key]).__name__}")
            if key.endswith("_ms") and (value is None or value < 0):
                raise ValueError(f"instruments.{name}.{key}={value}: give a number of milliseconds, 0 or more")
        for key in known:  # an experiment may name some of them only; the record names all
            settings.setdefault(key, known[key])
    profiler_windows.check(instruments)
    memory_windows.check(instruments)


def _is_like(known, value):
    """Whether value has the type that the yaml's own has; a whole number is a float too, and true is no number."""
    if isinstance(value, bool) or isinstance(known, bool):
        return type(value) is type(known)
    return isinstance(value, (int, float) if isinstance(known, float) else type(known))
