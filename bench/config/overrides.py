"""The user's words -> overrides, one by one or as the points of a sweep, in Hydra's grammar.

Every slip becomes a ValueError that says what, the value, and what to try.
"""

import itertools
import re

from bench.config.groups import GROUPS, choices

PATH_KEYS = ("data.train_glob", "data.val_glob")
NOISE = re.compile(r" expecting {.*}|Config search path:.*", re.DOTALL)  # a grammar's symbols, Hydra's own folders
HIDDEN_SECOND = re.compile(r"\s+([A-Za-z_][\w./]*=.*)")  # another setting within one word


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


def parsed(word: str):
    """An override as Hydra's parser reads it.  Raises ValueError for a word that is not an override, or is a sweep."""
    override = _parsed(word)
    if override.is_sweep_override():
        first, second = (f"{override.key_or_group}={value}" for value in _two_values(override))
        in_a_race = (
            f"; a race gives each value an arm: A={first} B={second}" if word.partition("=")[0] != "seed" else ""
        )
        raise ValueError(f"{word}: several values are a sweep, which ./run.sh run -m makes{in_a_race}")
    return override


def sweep(words: list[str]) -> list[list[str]]:
    """['model=a,b', 'seed=0,1'] -> every combination, in order, as lists of plain overrides.  Raises ValueError."""
    if not words:
        raise ValueError("there is nothing to sweep: give values, e.g. -m seed=0,1,2")
    return [list(point) for point in itertools.product(*map(_points, words))]


def _points(word):
    """Of one word: itself, or a word for each of its values."""
    override = _parsed(word)
    if not override.is_sweep_override():
        return [word]
    key = override.key_or_group
    if override.is_interval_sweep():
        remedy = f"name the values, {key}=0.001,0.002, or give a step, {key}=range(0.001,0.003,0.001)"
        raise ValueError(f"{word}: an interval has no end of values, and nothing searches in it here: {remedy}")
    pattern = override.value()
    if not hasattr(pattern, "filter"):
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    if key not in GROUPS:
        raise ValueError(f"{word}: {key} is no group: glob(...) chooses from the files of one, as model=glob(*) does")
    names = pattern.filter(choices(key))
    if not names:
        raise ValueError(f"{word}: it matches none of {', '.join(choices(key))}")
    return [f"{key}={name}" for name in names]


def _parsed(word):
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    _refuse(word)
    try:
        return OverridesParser.create().parse_override(_quoted(word))
    except HydraException as error:
        second = HIDDEN_SECOND.search(word)
        if second:
            first = word[: second.start()]
            raise ValueError(f"{word!r}: these are two settings in one word: write {first} {second[1]}") from None
        raise ValueError(f"{word}: {one_line(error)}; quote a value with spaces or signs: key='\"a value\"'") from None


def _two_values(override):
    if override.is_discrete_sweep() and not hasattr(override.value(), "filter"):
        return [*itertools.islice(override.sweep_string_iterator(), 2), "..."][:2]
    return "...", "..."


def _quoted(override):
    """A path may hold ~, spaces, brackets and quotes, which Hydra's grammar reads as its own: quote it for the user."""
    key, _, value = override.partition("=")
    if key not in PATH_KEYS or value in ("", "null") or value[0] in "'\"":
        return override
    return f"{key}='" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _refuse(override):
    if override[:1] in "+~":
        raise ValueError(
            f"{override}: settings are neither added nor deleted: write key=value, or key=null to switch it off"
        )
    if override.startswith("hydra"):
        raise ValueError(f"{override}: Hydra only composes here; folders and launching are this program's own")
    if override in ("-m", "--multirun"):
        raise ValueError(f"{override}: only ./run.sh run sweeps")
    if override.startswith("-") and "=" in override:
        raise ValueError(f"{override}: settings have no dashes: write {override.lstrip('-')}")
    if "=" not in override:
        raise ValueError(f"{override!r} is not an override: write key=value, e.g. seed=3 or model=modern")
    return override


def one_line(error: Exception) -> str:
    """All that an error says, its lines joined, without noise; its type where it says nothing."""
    lines = [line.strip() for line in NOISE.sub("", str(error)).splitlines() if line.strip(" ^")]
    return (
        " ".join(
            line + ("," if number + 1 < len(lines) and line[-1] not in ".,:;" else "")
            for number, line in enumerate(lines)
        )
        or type(error).__name__
    )
