"""The settings of run folders (config.yaml) as columns by dotted name, such as optim.lr; fast enough for 100,000 runs.

A run's config is kept as a tuple of JSON texts, one for each group ('{"optim.lr":0.003,...}').  Most runs share most
groups, so each text is parsed and stored once, and two runs differ only where their texts do.
"""

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from bench.base.reading import plain_file, yaml_file
from bench.config import schema

Config = tuple[str, ...]  # () where there is no config.yaml: a log of another harness

OF_THE_ROW = ("name", "seed")  # columns of every row already
SWITCHES = ("instruments", "exporters")  # groups whose settings' groups are on by being there
GROUPS = re.compile(r"^(?=[A-Za-z_])", re.M)  # a line that begins with a letter begins a group
GROUP = re.compile(r'{"(\w+)')  # its name, in its JSON text
ALIAS = re.compile(r"[&*]id\d{3}")  # the yaml of one group may name another's lines
# Settings that differ with what is shown anyway, or that follow from others: no column unless one is asked for
IMPLIED = re.compile(r"track\..*|exporters\b.*|.*_sha256|data\.(repo|revision)|hardware\.num_threads")
OF_OUR_LOOP = ("goal.num_steps", "goal.val_every_steps")  # say nothing of a script, which has its own
MAX_TEXTS, MAX_KEPT = 1000, 20_000  # whole configs and groups that are remembered while a folder is read


def read(folder: str) -> Config:
    """The config of a run folder; () if config.yaml is missing or damaged, which verify reports."""
    try:
        return parse(plain_file.text(f"{folder}/config.yaml", yaml_file.MAX_BYTES))
    except ValueError:
        return ()


def parse(text: str) -> Config:
    """What config.yaml says, of any version.  ValueError where it is not a yaml of settings."""
    before, _, after = text.partition("\nseed: ")  # seed has its own column: without it, repeats share one text
    _, _, rest = after.partition("\n")
    return _parse_cached(f"{before}\n{rest}")


@functools.lru_cache(maxsize=MAX_TEXTS)
def _parse_cached(text: str) -> Config:
    parts = [text] if ALIAS.search(text) else GROUPS.split(text)
    return tuple(itertools.chain.from_iterable(map(_texts, filter(str.strip, parts))))


@functools.lru_cache(maxsize=MAX_KEPT)
def _texts(part: str) -> Config:
    """Lines of one or more groups -> their JSON texts."""
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
    """(dotted key, value) of each setting in a group; what is enabled but has no settings is true."""
    if not isinstance(value, dict) or not value:
        yield key, True if value == {} else value
        return
    for name, inner in value.items():
        if key in SWITCHES and inner:
            yield f"{key}.{name}", True
        yield from _leaves(f"{key}.{name}", inner)


@functools.lru_cache(maxsize=MAX_KEPT)
def _parsed(text: str) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(text)
    return known


def settings(config: Iterable[str]) -> dict[str, Any]:
    """{dotted key: value} of all groups."""
    return {key: value for text in config for key, value in _parsed(text).items()}


def columns(config: Config) -> dict[str, Any]:
    """The settings() that have a meaning for the run; those of our loop have none for a script."""
    return _true_of(config, settings(config))


def group(config: Config, name: str) -> Mapping[str, Any]:
    """{dotted key: value} of one group, {} without it; to be read only."""
    return next((_parsed(text) for text in config if text.startswith(f'{{"{name}.')), {})


def keys(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every setting that one of the rows has, in the order of config.yaml."""
    texts = dict.fromkeys(itertools.chain.from_iterable(dict.fromkeys(row["config"] for row in rows)))
    return list(dict.fromkeys(key for text in texts for key in _parsed(text)))


def add(rows: Iterable[MutableMapping[str, Any]], names: Sequence[str]) -> None:
    """Adds these settings to each row as columns, None where it has no such setting."""
    groups = {name.partition(".")[0] for name in names}
    known: dict[Config, dict[str, Any]] = {}
    for row in rows:
        config = row["config"]
        if config not in known:
            texts = [text for text in config if (start := GROUP.match(text)) and start[1] in groups]
            known_here = _true_of(config, settings(texts))
            known[config] = {name: known_here.get(name) for name in names}
        row.update(known[config])


def _true_of(config: Config, settings_by_key: dict[str, Any]) -> dict[str, Any]:
    script = group(config, "script")
    if all(script.get(f"script.{key}") is None for key in schema.SCRIPT_STARTS):
        return settings_by_key
    return {key: value for key, value in settings_by_key.items() if key not in OF_OUR_LOOP}


def varied(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Settings in which rows with a config differ, in its order, without IMPLIED; of muon's own those of muon alone."""
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
    is_switch = {key: seen == {"true"} and counts[key] < len(configs) for key, seen in values.items()}
    differing = [key for key, seen in values.items() if len(seen) > 1 or is_switch[key]]
    return sorted((key for key in differing if not IMPLIED.fullmatch(key)), key=order.index)
