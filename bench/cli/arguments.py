"""argparse with this program's error messages: what is wrong, the value and what to try, in one line."""

import argparse
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from bench.config import groups, typed
from bench.config.groups import did_you_mean

Main = Callable[[list[str]], int]  # a verb's function: its arguments -> exit code

CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
UNKNOWN = "unrecognized arguments: "
LACKS = "the following arguments are required: "


class Parser(argparse.ArgumentParser):
    """Raises ValueError, which bench/cli/main.py prints, instead of exiting; descriptions keep their line breaks."""

    def __init__(self, prog: str, main: Main | None = None, **options: Any) -> None:
        """Ends the help with the docstring of main, the verb's function; its module's is the default description."""
        if main:
            options.setdefault("description", main.__globals__["__doc__"])
            parts = (options.get("epilog"), inspect.getdoc(main))
            options["epilog"] = "\n\n".join(filter(None, parts))
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, **options)
        self._kinds: dict[str, Any] = {}  # {option: the type of its number, as of a setting}
        self._pairs: list[tuple[str, str, bool]] = []  # (option, another, whether it needs the other or excludes it)
        self.add_argument("--config-dir", metavar="DIR", help="a folder of groups of your own, used beside conf/")

    def flag(self, *names: str, help: str) -> None:
        """Adds an option without a value, which is False unless given."""
        self.add_argument(*names, action="store_true", help=help)

    def forms(
        self, json: str, md: str = "", csv: str = "", says_more: bool = False
    ) -> argparse._MutuallyExclusiveGroup:
        """Adds the forms of an answer, each with its help, as exclusive options; a form whose help is "" is not added.

        says_more: the verb also prints other lines, by console.output(); --quiet drops them, and with --json they go to
        standard error. Returns the group.
        """
        if says_more:
            self.flag("-q", "--quiet", help="only warnings, failures and the result")
            json += "; everything else goes to standard error"
        forms = self.add_mutually_exclusive_group()
        for name, about in (("json", json), ("md", md), ("csv", csv)):
            if about:
                forms.add_argument(f"--{name}", action="store_true", help=about)
        return forms

    def number(self, name: str, kind: Any, **options: Any) -> None:
        """Adds an option for a number of a setting's type, such as NotNegative; typed.checked() refuses others."""
        self._kinds[name] = kind | None
        self.add_argument(name, type=typed.parts_of(kind)[0], **options)

    def alone(self, name: str, *others: str) -> None:
        """Has an option refused beside any of the others, where one of the two would have no effect."""
        self._pairs += [(other, name, False) for other in others]

    def needs(self, name: str, other: str) -> None:
        """Has an option refused without the other, where it would have no effect."""
        self._pairs.append((name, other, True))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Extends argparse's: checks numbers and pairs of options, and remembers the arguments for error().

        args None: the program's own.
        """
        self._given = sys.argv[1:] if args is None else list(args)
        parsed, rest = super().parse_known_args(args, namespace)
        values = {f"--{dest.replace('_', '-')}": value for dest, value in vars(parsed).items()}
        for name, kind in self._kinds.items():
            typed.checked(name, values[name], kind)
        given = {name for name, value in values.items() if value not in (None, False, [])}
        for name, other, is_needed in self._pairs:
            if name in given and (other in given) != is_needed:
                why = f"{name}: it needs {other}" if is_needed else f"{name} with {other}: they cannot be combined"
                raise ValueError(f"{why}: {'add it' if is_needed else 'use one of them'}, or see {self.prog} --help")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with argparse's message in this program's words."""
        raise ValueError(self._sentence(message))

    def _sentence(self, message: str) -> str:
        if message.startswith(LACKS) and (unknown := self._first_unknown()):  # perhaps the missing argument, misspelt
            return self._unknown(unknown)
        if choice := CHOICE.fullmatch(message):
            option, value, names = choice.groups()
            names = [name.strip(" '\"") for name in names.split(",")]
            return f"{option} {value}: {did_you_mean(value, names)}choose from {', '.join(names)}"
        if message.startswith(UNKNOWN):
            return self._unknown((message.removeprefix(UNKNOWN).split() or ["''"])[0])
        if "ignored explicit argument" in message:  # argparse reads -model=gpt2 as -m
            short = [word for word in self._given if re.match(r"-\w+[^=]*=", word)]
            return self._unknown(short[0]) if short else f"{message.split()[1]} it takes no value: omit that"
        return f"{message.removeprefix('argument ')}; {self.prog} --help says more"

    def _first_unknown(self) -> str | None:
        """Returns the first option on the command line that does not exist, even abbreviated; None if all exist."""
        options = tuple(self._option_string_actions)
        for word in self._given:
            name = word.partition("=")[0]
            if word.startswith("--") and name != "--" and not any(option.startswith(name) for option in options):
                return word
        return None

    def _unknown(self, word: str) -> str:
        key = word.lstrip("-").partition("=")[0]
        if word in ("-m", "--multirun"):
            return f"{word}: only ./run.sh run makes sweeps: omit it"
        is_named = re.search(rf"(?<![\w-]){re.escape(key)}=", self.format_help())  # in the verb's help: n=5
        if word.startswith("-") and (is_named or ("key=value" in self.format_usage() and _is_setting(key))):
            return f"{word}: settings are key=value, not flags: write {key}=VALUE"
        options = re.findall(r"--[a-z][\w-]+", self.format_help())
        if word.startswith("--html") and "--html" not in options:
            return f"{word}: ./run.sh report writes pages, of a run, a race, a sweep or all results"
        near = did_you_mean(word.partition("=")[0], options)
        if not word.startswith("-") and "--out" in options:
            near = f"what is written goes to --out {word}; "
        return f"{word}: there is no such option or argument; {near}{self.prog} --help says more"


def latest(parser: argparse.ArgumentParser, option: str, about: str) -> None:
    """Adds an option that may name a race: None without it, "" for the latest."""
    parser.add_argument(option, nargs="?", const="", metavar="RACE", help=about)


def count_up(done: int, total: int, unit: str) -> None:
    """Prints progress on one line of a terminal, such as "3 of 20 files"."""
    if sys.stderr.isatty():
        print(f"\r{done} of {total} {unit}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _is_setting(key: str) -> bool:
    from bench.config import meanings  # not loaded for --help

    return key in groups.GROUPS or any(setting == key or setting.endswith(f".{key}") for setting in meanings.settings())
