"""Reads the settings of run folders (config.yaml) as columns by dotted name, such as optim.lr, even for 100,000 runs.

A run's config is kept as a tuple of JSON texts, one for each group ('{"optim.lr":0.003,...}').  Most runs share most
groups, so each text is parsed and stored once, and two runs differ only where their texts do.
"""

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from bench.base.reading import json_file, plain_file, yaml_file
from bench.config import schema

Config = tuple[str, ...]  # () without a config.yaml, as for a log of another harness

OF_THE_ROW = ("name", "seed")  # settings that every row has as columns already
SWITCHES = ("instruments", "exporters")  # a member of these groups is enabled if it is present
GROUPS = re.compile(r"^(?=[A-Za-z_])", re.M)  # a line that begins with a letter begins a group
GROUP = re.compile(r'{"(\w+)')  # the name of a group, in its JSON text
ALIAS = re.compile(r"[&*]id\d{3}")  # with aliases, the yaml of one group refers to lines of another
# Settings that follow from other settings or from columns that are always shown: columns only on request
IMPLIED = re.compile(r"track\..*|exporters\b.*|.*_sha256|data\.(repo|revision)|hardware\.num_threads")
OF_OUR_LOOP = ("goal.num_steps", "goal.val_every_steps")  # without effect on scripts, which have their own loop
MAX_TEXTS, MAX_KEPT = 1000, 20_000  # numbers of whole configs and of groups that are cached


def read(folder: str) -> Config:
    """Returns the config of a run folder; () if config.yaml is missing or damaged, which verify reports."""
    try:
        return parse(yaml_file.recorded_text(f"{folder}/config.yaml"))
    except ValueError:
        return ()


def parse(text: str) -> Config:
    """Returns the config in the text of a config.yaml of any version.  Raises ValueError if it holds no settings."""
    before, _, after = text.partition("\nseed: ")  # repeats share one text without the seed, which has its own column
    _, _, rest = after.partition("\n")
    return _parse_cached(f"{before}\n{rest}")


@functools.lru_cache(maxsize=MAX_TEXTS)
def _parse_cached(text: str) -> Config:
    parts = [text] if ALIAS.search(text) else GROUPS.split(text)
    return tuple(itertools.chain.from_iterable(map(_texts, filter(str.strip, parts))))


@functools.lru_cache(maxsize=MAX_KEPT)
def _texts(part: str) -> Config:
    """Returns the JSON texts of one or more groups, given as lines of yaml."""
    if part.startswith(("name:", "seed:")) and part.count("\n") < 2:
        return ()
    values = yaml_file.parsed(part, "config.yaml")
    if not isinstance(values, dict):
        raise ValueError("it holds no settings")
    values = schema.upgraded(values)
    return tuple(
        json.dumps(dict(_leaves(name, value)), separators=(",", ":"), default=str)
        for name, value in values.items()
        if name not in OF_THE_ROW and not (name in SWITCHES and not value)
    )


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of each setting in a group; the value is True for what is enabled without settings."""
    if not isinstance(value, dict) or not value:
        yield key, True if value == {} else value
        return
    for name, inner in value.items():
        if key in SWITCHES and inner:
            yield f"{key}.{name}", True
        yield from _leaves(f"{key}.{name}", inner)


@functools.lru_cache(maxsize=MAX_KEPT)
def _parsed(text: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(text)
    return config


def settings(config: Iterable[str]) -> dict[str, Any]:
    """Returns {dotted key: value} of the settings in these groups."""
    return {key: value for text in config for key, value in _parsed(text).items()}


def columns(config: Config) -> dict[str, Any]:
    """Returns {dotted key: value} of the settings that affect the run; for a script, those of our loop do not."""
    return _true_of(config, settings(config))


def group(config: Config, name: str) -> Mapping[str, Any]:
    """Returns {dotted key: value} of one group, {} without it.  Do not modify it: it is cached."""
    return next((_parsed(text) for text in config if text.startswith(f'{{"{name}.')), {})


def keys(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the settings that any of the rows has, in the order of config.yaml."""
    texts = dict.fromkeys(itertools.chain.from_iterable(dict.fromkeys(row["config"] for row in rows)))
    return list(dict.fromkeys(key for text in texts for key in _parsed(text)))


def add(rows: Iterable[MutableMapping[str, Any]], names: Sequence[str]) -> None:
    """Adds settings to the rows as columns; the value is None in a row without that setting."""
    groups = {name.partition(".")[0] for name in names}
    cache: dict[Config, dict[str, Any]] = {}
    for row in rows:
        config = row["config"]
        if config not in cache:
            texts = [text for text in config if (start := GROUP.match(text)) and start[1] in groups]
            values = _true_of(config, settings(texts))
            cache[config] = {name: values.get(name) for name in names}
        row.update(cache[config])


def as_typed(folder: Path) -> list[str]:
    """Returns the settings with which a run was started, as they were typed.  Raises Damaged."""
    path = folder / "overrides.yaml"
    typed = yaml_file.parsed(plain_file.text(path, yaml_file.MAX_BYTES), path) or []
    overrides: list[str] = json_file.check_kind(typed, list[str], path)
    return overrides


def _true_of(config: Config, settings_by_key: dict[str, Any]) -> dict[str, Any]:
    script = group(config, "script")
    if all(script.get(f"script.{key}") is None for key in schema.SCRIPT_STARTS):
        return settings_by_key
    return {key: value for key, value in settings_by_key.items() if key not in OF_OUR_LOOP}


def varied(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the settings in which rows that have them differ, in the order of config.yaml, except IMPLIED ones."""
    configs = [config for config in dict.fromkeys(row["config"] for row in rows) if config]
    if len(configs) < 2:
        return []
    shared = set.intersection(*map(set, configs))
    values: dict[str, set[Any]] = {}
    counts: Counter[str] = Counter()
    for config in configs:
        for key, value in _true_of(config, settings(text for text in config if text not in shared)).items():
            values.setdefault(key, set()).add(value if type(value) in (str, float) else json.dumps(value))
            counts[key] += 1
    order = keys({"config": config} for config in configs)
    switched = {key for key, num in counts.items() if key.startswith("instruments.") and num < len(configs)}
    differing = [key for key, seen in values.items() if len(seen) > 1 or (key in switched and seen == {"true"})]
    return sorted((key for key in differing if not IMPLIED.fullmatch(key)), key=order.index)
