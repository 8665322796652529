"""Where each value of a run comes from, and its config with that and every setting's meaning: for `--cfg job`."""

import textwrap
from pathlib import Path

import yaml

from bench.base.paths import CONF, project_folder
from bench.config import compose, meanings, schema
from bench.config.groups import LISTS, path_of
from bench.config.typed import MISSING

WIDTH = 120


class Origins:
    """Where the values of a run come from."""

    def __init__(self, overrides: list[str], machine: schema.Machine | None = None):
        self._typed, self._files = compose.origins(overrides, machine)

    def of(self, key: str) -> tuple[str, str] | None:
        """(the override or the file that sets it, the file's comment on it); None: nothing does, it is the default."""
        for typed, word in self._typed.items():
            if key == typed or key.startswith(f"{typed}."):
                return f"{word} on the command line", ""
        for group, name in self._files:
            path = path_of(group, name)
            inner = _within(path, group.replace("/", "."), key)
            comments = meanings.of_file(path)[1]
            if inner in comments:
                return shown(path), "" if group in LISTS else comments[inner]
        return None


def _within(path, place, key):
    """The key as a yaml at that place writes it, or at its own @package; None for one that it cannot set."""
    first = path.read_text().partition("\n")[0]
    if first.startswith("# @package "):
        place = first.split()[-1].replace("_global_", "")
    prefix = f"{place}." if place else ""
    return key.removeprefix(prefix) if key.startswith(prefix) else None


def shown(path: Path) -> str:
    """conf/optim/adamw.yaml, of this program or of the user's project; the whole path of a yaml that lies elsewhere."""
    homes = [folder for folder in (CONF.parent, project_folder()) if path.is_relative_to(folder)]
    return path.relative_to(homes[0]).as_posix() if homes else str(path)


def commented(config: schema.Config, origins: Origins) -> str:
    """The config as YAML; each setting has its meaning, what it may be, and where its value is from, as a comment."""
    known, of_groups = meanings.settings(), meanings.groups()

    def comment(key):
        if key in of_groups:
            return of_groups[key]
        if key not in known:
            return ""  # of the user's own class
        setting, origin = known[key], origins.of(key)
        facts = [setting.unit, setting.allowed, origin[0] if origin else "default"]
        if origin and setting.default not in (MISSING, None):
            facts.append(f"default {setting.default}")
        return f"{setting.meaning} [{'; '.join(filter(None, facts))}]"

    return "".join(f"{line}\n" for line in _lines(schema.to_dict(config), "", comment))


def _lines(values, path, comment):
    """Nested values -> lines of YAML; a comment beside its line where it fits, else above it."""
    indent = "  " * path.count(".")
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        first, *others = [f"{key}:"] if nested else yaml.safe_dump({key: value}, sort_keys=False).splitlines()
        words = comment(path + key)
        if len(indent) + len(first) + len(words) + 4 > WIDTH:
            yield from textwrap.wrap(words, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            words = ""
        yield f"{indent}{first}" + (f"  # {words}" if words else "")
        yield from (indent + line for line in others)
        if nested:
            yield from _lines(value, f"{path}{key}.", comment)
