"""Tab completion.  source <(./run.sh completion bash)      (or zsh; fish: ./run.sh completion fish | source)

Completes commands, their options, settings with their values, and ids of runs and races, as they are when Tab is
pressed: the shell asks the program with --line.
"""

import os
import re
from collections.abc import Iterator

from bench.base.paths import INSTALLED, results_root
from bench.cli import arguments
from bench.cli.main import CHECKOUT_VERBS, VERBS, module_of

SHELLS = {
    "bash": """\
_speedrun() {
  local line=${COMP_LINE:0:COMP_POINT}
  mapfile -t COMPREPLY < <("$1" completion --line "$line" 2>/dev/null)
  local word=${line##* }
  [[ $word == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}") # bash ends a word at "="
  [[ ${COMPREPLY[*]} == *= ]] && compopt -o nospace
}
complete -o default -F _speedrun NAMES
""",
    "zsh": """\
#compdef NAMES
_speedrun() {
  local -a found
  found=("${(@f)$(${(Q)words[1]} completion --line "$LBUFFER" 2>/dev/null)}")
  compadd -Q -S '' -- ${(M)found:#*=}
  compadd -Q -- ${found:#*=}
  (( ${#found} )) || _files
}
compdef _speedrun NAMES
""",
    "fish": """\
function __speedrun
  set -l words (commandline -opc)
  $words[1] completion --line (commandline -cp) 2>/dev/null
end
for name in NAMES
  complete -c $name -a '(__speedrun)'
  complete -c $name -f -n '__speedrun | string match -q "?*"' # files where nothing else fits
end
""",
}
OF_SETTINGS = ("run", "speedrun", "race", "study", "ladder", "calibrate", "doctor")
ARM = re.compile(r"[A-Z]\w*=['\"]?")  # an arm before a setting: B=optim=muon
PLAIN = re.compile(r"[\w./:=,@%+-]*")  # what a shell takes as it is: what a candidate adds to the typed word
FOLDER = re.compile(r"\d{8}T\d{6}Z-.+|sweep-\w+|study-.+")


def main(argv: list[str]) -> int:
    """Exit codes: 0 printed, 2 usage error."""
    args = _parser().parse_args(argv)
    if args.line is not None:
        print("\n".join(candidates(args.line)))
    elif args.shell:
        print(SHELLS[args.shell].replace("NAMES", "speedrun" if INSTALLED else "run.sh"), end="")
    else:
        raise ValueError(f"name the shell: {', '.join(SHELLS)}")
    return 0


def candidates(line: str) -> list[str]:
    """Returns what may replace the last word of a command line that ends at the cursor, sorted."""
    _, *before, word = line.split(" ")
    if not before:
        candidates = {*VERBS, *(() if INSTALLED else CHECKOUT_VERBS), "--help", "--version"}
        return sorted(name for name in candidates if name.startswith(word))
    verb = before[0]
    if verb not in VERBS:
        return []
    parser = module_of(verb)._parser()
    action = parser._option_string_actions.get(before[-1])
    if action and action.nargs != 0 and action.choices:
        candidates = set(map(str, action.choices))
    elif word.startswith("-"):
        candidates = {option for action in parser._actions for option in action.option_strings}
    else:
        positional = next((action for action in parser._actions if not action.option_strings), None)
        candidates = set(positional.choices or () if positional else ())
        candidates |= set() if verb in OF_SETTINGS and before[-1][:2] != "--" else set(_ids())
    if verb in OF_SETTINGS and not word.startswith("-"):
        arm = match[0] if (match := ARM.match(word)) else ""
        candidates |= {arm + setting for setting in _settings(word.removeprefix(arm))}
    return sorted(name for name in candidates if name.startswith(word) and PLAIN.fullmatch(name[len(word) :]))


def _settings(word: str) -> Iterator[str]:
    """Yields completions of a setting: group=CHOICE, key= of the other settings, or a setting's values after the =."""
    from bench.config import groups, meanings

    key, equals, _ = word.partition("=")
    if key in groups.GROUPS:
        yield from (f"{key}={choice}" for choice in groups.choices(key))
    elif equals:
        allowed = meanings.settings()[key].allowed if key in meanings.settings() else "a word"
        is_free = re.match("an? ", allowed)  # such as "a number", not a list such as "on, off or manual, or null"
        values = () if is_free else re.split(",? or |, ", allowed)
        yield from (f"{key}={value}" for value in values)
    else:
        yield from (f"{key}=" for key in (*groups.GROUPS, *meanings.settings()))


def _ids() -> Iterator[str]:
    """Yields the ids of the runs, races and sweeps of the results folder."""
    root = results_root()
    folders = [root, *(path for path in root.glob("*") if path.is_dir() and not path.name.startswith("."))]
    for folder in folders:
        yield from (name for name in os.listdir(folder) if FOLDER.fullmatch(name)) if folder.is_dir() else ()


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh completion", main=main)
    parser.add_argument("shell", nargs="?", choices=SHELLS)
    parser.add_argument("--line", metavar="TEXT", help="print what completes this command line, as the shells ask it")
    return parser
