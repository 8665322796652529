"""What `./run.sh run --help KEY` prints: a setting, or a group of them, as the words beside it make them."""

import json
import shutil
import textwrap

from bench.config import cluster, compose, explain, meanings, schema, typed
from bench.config.typed import MISSING
from bench.launch.prepare import this_machine

MAX_WIDTH = 120


def asked_for(argv: list[str]) -> str | None:
    """The words of a verb that takes key=value -> text, where there is a KEY beside --help; else None."""
    keys = [word for word in argv if "=" not in word and not word.startswith("-")]
    if not {"-h", "--help"} & set(argv) or not keys:
        return None
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    return "\n\n".join(help_of(key, overrides) for key in keys)


def help_of(word: str, overrides: list[str]) -> str:
    """A setting's or group's key, or the last part of it -> text.  Raises ValueError for a word that is neither."""
    result = _found(word, [*meanings.settings(), *meanings.groups(), *compose.GROUPS])
    now = _Composition(overrides)
    return "\n\n".join(
        _of_group(key, now) if key not in meanings.settings() else _of_setting(key, now) for key in result
    )


def _found(word, known):
    """The keys that a word names: itself, or all that end in it."""
    wanted = word.replace("/", ".")
    keys = list(dict.fromkeys(key.replace("/", ".") for key in known))
    result = [wanted] if wanted in keys else [key for key in keys if key.endswith(f".{wanted}")]
    if result:
        return result
    guess = compose.did_you_mean(wanted, keys)
    raise ValueError(f"--help {word}: there is no such setting or group; {guess}groups are {', '.join(compose.GROUPS)}")


class _Composition:
    """What the words beside --help make, and what they would make with a choice added."""

    def __init__(self, overrides):
        self.words, (self._of_cluster, of_run) = overrides, cluster.split(overrides)
        self.config = schema.to_dict(compose.compose(of_run, this_machine()))
        self.config["cluster"] = cluster.as_dict(self._of_cluster)
        self._origins = None

    def with_choice(self, choice):
        """The same with an optimizer, schedule, instrument or exporter more."""
        group, _, name = choice.partition("=")
        if group in compose.LISTS:
            choice = f"{group}=[{','.join([*self.config[group], name.strip('[]')])}]"
        return _Composition([*self.words, choice])

    def value(self, key):
        """MISSING for a setting that this run does not have."""
        try:
            return typed.get(self.config, key)
        except KeyError:
            return MISSING

    def origin(self, key):
        """ ", from conf/...: why", or that it is the default."""
        if key.startswith("cluster."):
            typed = [word for word in self._of_cluster if word.startswith(f"{key}=")]
            return f"from {typed[-1]} on the command line" if typed else "the default"
        self._origins = self._origins or explain.Origins(cluster.split(self.words)[1], this_machine())
        result = self._origins.of(key)
        if result is None:
            return "the default"
        return f"from {result[0]}" + (f": {result[1]}" if result[1] else "")


def _of_setting(key, now):
    setting = meanings.settings()[key]
    value, lacks = now.value(key), ""
    if value == MISSING:
        lacks = f"not a setting of this run; with {setting.brought_by[0]} it is "
        now = now.with_choice(setting.brought_by[0])
        value = now.value(key)
    rows = {
        "use": setting.allowed,
        "unit": setting.unit,
        "default": "none, a file of conf/ gives it" if setting.default == MISSING else _yaml(setting.default),
        "only with": " or ".join(setting.brought_by),
        "now": f"{lacks}{_yaml(value)}, {now.origin(key)}",
    }
    lines = [_wrapped(f"{name:<11}{text}", 2, 13) for name, text in rows.items() if text]
    return "\n".join([key, _wrapped(setting.meaning, 2, 2), *lines])


def _of_group(key, now):
    about, group = meanings.groups().get(key, ""), key.replace(".", "/")
    lines = [_wrapped(f"{key}: {about}" if about else key, 0, 2)]
    if group in compose.GROUPS:
        names = compose.choices(group)
        words = [f"{group}=[{name}]" if group in compose.LISTS else f"{group}={name}" for name in names]
        width = max(map(len, words)) + 2
        for name, word in zip(names, words):
            about = meanings.about(group, name).split(". ")[0].rstrip(".")
            lines.append(_wrapped(f"{word:<{width}}{about}", 2, width + 2))
    inside = [one for one in meanings.settings() if one.startswith(f"{key}.")]
    if key in compose.LISTS:  # those of the others are shown with their name: --help trace
        inside = [one for one in inside if now.value(one) != MISSING]
    if inside:
        lines += ["", "settings, as this run has them (./run.sh run --help KEY says more of one):"]
    for one in inside:
        setting, value = meanings.settings()[one], now.value(one)
        shown = f", only with {' or '.join(setting.brought_by)}" if value == MISSING else f" = {_yaml(value)}"
        lines.append(_wrapped(one + shown, 2, 6))
        lines.append(_wrapped(f"{setting.meaning} [{setting.allowed}]", 6, 6))
    return "\n".join(lines)


def _yaml(value):
    """As one types it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _wrapped(text, first, later):
    width = min(MAX_WIDTH, shutil.get_terminal_size().columns)
    return textwrap.fill(text, max(width, 60), initial_indent=" " * first, subsequent_indent=" " * later)
