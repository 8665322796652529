"""./run.sh [verb] [...], which is  python -m bench [verb] [...]: finds a verb's module, reports a user's mistake."""

import contextlib
import errno
import gc
import importlib
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import cast

from bench.base import escape, paths
from bench.base.reading import plain_file
from bench.config import groups

NEW_OBJECTS = 100_000  # new objects between garbage collections, instead of Python's 700: commands leave little garbage
GROUPS = {  # {purpose: {verb: what it does}}
    "measure": {
        "run": "train once, or sweep with -m",
        "speedrun": "all of a track: data, checks, repeats, table and verdict",
        "race": "which version is faster, or better? planned, interleaved, judged",
        "study": "which optimizer or model is better, tuned with equal budgets?",
        "referee": "keep a search honest: race every change, keep what is shown to be better",
        "ladder": "what did each record of the speedrun gain?",
        "bisect": "which commit made it slower, or worse?",
        "history": "how did the speed of a repository change over its commits?",
        "calibrate": "the smallest difference that this machine can show",
        "submit": "put a command into the lab's queue",
        "agent": "run the lab's queue on this machine",
    },
    "judge": {
        "compare": "is B faster than A? of runs, races or logs that exist",
        "judge": "does a claim hold by the rules of its track?",
        "pr": "judge a record's pull request: Markdown for its thread",
        "audit": "is a reported loss honest? rerun on random and held-out tokens",
        "replay": "rerun a record from its own folder: is it reproduced?",
        "verify": "is a run folder consistent with its own record?",
    },
    "look": {
        "table": "list results as a table",
        "sql": "query results with SQL; every setting is a column",
        "report": "a run, a race, a sweep or all results as a page",
        "explain": "why a step takes so long, and what could be saved",
        "analyze": "traces of any PyTorch program: time, kernels, gaps, ranks",
        "project": "how long would a step take on N GPUs?",
        "memory": "a memory snapshot as a page",
    },
    "share": {
        "collect": "bring the results of several machines together",
        "publish": "copy runs, a race or a claim to results/published/, for git",
        "import": "logs of modded-nanogpt, nanochat, nanogpt and others as runs",
        "export": "records as csv, parquet, MLPerf log lines or a modded-nanogpt log",
        "dashboard": "records to TensorBoard, Weights & Biases or MLflow",
    },
    "set up": {
        "init": "make this folder a project, with a model, an optimizer and a track",
        "data": "fetch, make or show data",
        "doctor": "is this machine ready to benchmark, and how fast is it?",
        "completion": "tab completion: source <(./run.sh completion bash)",
    },
}
VERBS = [verb for verbs in GROUPS.values() for verb in verbs]
CHECKOUT_VERBS = {  # verbs that run.sh itself handles
    "test": "the tests: ./run.sh test [--all] [pytest arguments]",
    "lint": "style and types of the code, as CI checks them",
}
SENT = ("--md", "--json", "--csv")  # options for output that is sent to others
# names of errors of the operating system about a file, printed as one line without a traceback
NOT_OURS = {"EACCES", "EPERM", "EROFS", "EISDIR", "ENOTDIR", "EEXIST", "EINVAL", "ENXIO"}
NOT_OURS |= {"ENOSPC", "EDQUOT", "EIO", "ENAMETOOLONG", "ELOOP", "EFBIG"}
INTRODUCED = ("run", "speedrun", "race", "study", "referee", "ladder", "calibrate")  # first print the user's folders
# commands that ranks which torchrun or srun started cannot run together
SEVERAL_RUNS = ("speedrun", "race", "study", "referee", "ladder", "calibrate", "doctor")
SUBMITTED = ("run", "speedrun", "race", "ladder", "calibrate", "doctor")  # commands that cluster=slurm submits as a job
QUEUED = SUBMITTED[:-1]  # commands that ./run.sh submit accepts
JUDGING = ("compare", "judge", "pr", "verify", "publish", "export")  # refuse a file that changes between two reads
# commands that leave records or files, and so succeed even if their output cannot be written
LASTING = {*INTRODUCED, "bisect", "submit", "agent", "audit", "replay", "collect", "publish", "import", "dashboard"}
LASTING |= {"init", "data"}
# commands that only print: those that begin like this, help and version, and any command with one of ANSWERS
ANSWERING = ("data show", "referee status", "referee log")
ANSWERS = ("-h", "--help", "-V", "--version", "--cfg", "--info", "--dry-run", "--list", "--check", "--look")
HELP = """usage: ./run.sh COMMAND [...]

{verbs}

To begin: ./run.sh run track=free experiment=smoke (5 s), then ./run.sh race A= B=optim=muon n=3 (docs/start.md).
./run.sh COMMAND --help explains a command, ./run.sh run --help optim.lr a setting, run --help optim a group of them;
./run.sh run --help lists models, data, tracks and the other groups.  Settings alone (./run.sh seed=3) start a run.
--config-dir DIR, with any command, adds models, tracks and so on from a folder of yours (docs/own.md);
--config-name NAME (-cn) starts a run from NAME.yaml in that folder instead of conf/config.yaml (docs/race.md).
./run.sh --version prints version, commit, Python and torch.
Exit codes: 0 success, 1 a check failed or a target was missed, 2 usage error or not comparable,
75 the machine is busy: the same command may succeed later."""


def main(argv: list[str]) -> int:
    """Runs a command -> its exit code, or 1 if it only prints and its output could not be written.

    A ValueError is the user's mistake and becomes one line; any other exception is ours and keeps its traceback.
    """
    typed = os.environ.pop("SPEEDRUN_TYPED", "")  # not for the runs that it starts
    with escape.doors(renamed=_renaming(typed, argv)) as out:
        try:
            code = _go(argv)
        except SystemExit as ended:  # argparse raises it after printing the help
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):  # raised by the user's code that a launcher loads
                print(escape.line(ended.code), file=sys.stderr)
    if out.error is None or out.error.errno == errno.EPIPE:  # the reader has closed the pipe
        return code
    print(f"standard output: {out.error.strerror}: the rest was not printed", file=sys.stderr)
    return code or int(_only_answers(argv))


def _renaming(typed: str, argv: list[str]) -> Callable[[str], str] | None:
    """Returns what replaces ./run.sh in messages by what its reader has to type; None in the checkout itself.

    typed: the path of run.sh as it was typed.  What is sent to others, as through a pipe, keeps ./run.sh.
    """
    if paths.INSTALLED:
        return escape.installed
    is_sent = {*SENT} & {*argv} or (argv[:1] == ["pr"] and not sys.stdout.isatty())  # Markdown for the thread
    if not typed or Path(paths.working_folder()).resolve() == paths.REPO or is_sent:
        return None
    return lambda text: text.replace("./run.sh", shlex.quote(typed))


def _only_answers(argv: list[str]) -> bool:
    """Returns whether a command only prints."""
    begins = {*argv[:1], " ".join(argv[:2])}
    if not argv or begins & {"help", "version", *ANSWERING} or any(word.startswith(ANSWERS) for word in argv):
        return True
    return argv[0] in VERBS and argv[0] not in LASTING  # settings without a verb start a run


def _go(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP.format(verbs="\n".join(_help_of_verbs())))
        return 0
    if argv[0] in ("--version", "-V", "version"):
        print(version_text())
        return 0
    verb, rest = (argv[0], argv[1:]) if argv[0] in VERBS else ("run", argv)
    if rest is argv and "=" not in argv[0] and not argv[0].startswith("-"):
        guess = groups.did_you_mean(argv[0], [*VERBS, *(() if paths.INSTALLED else CHECKOUT_VERBS)])
        print(f"{argv[0]}: unknown command; {guess}./run.sh --help lists them; a setting is KEY=VALUE", file=sys.stderr)
        return 2
    module = module_of(verb)
    try:
        if verb in SUBMITTED and not {"-h", "--help"} & set(rest):
            from bench.launch import cluster

            if want := cluster.request_from(rest):
                if not any(word.startswith(("--cfg", "--info", "--dry-run")) for word in rest):
                    module.check(_use_config(want.arguments))
                    return cluster.go(verb, want)
                rest = want.arguments
        if verb in SEVERAL_RUNS and not {"-h", "--help"} & set(rest):
            from bench.launch.nodes import joining

            joining.refuse(verb, rest)
        rest = _use_config(rest)
        if verb in INTRODUCED and not {"-h", "--help", "--race", "-q", "--quiet"} & set(rest):
            from bench.record import ledger, line_count

            lost = line_count.lost(paths.results_root() / ledger.NAME)
            for topic, message in (("conf", groups.introduction()), ("ledger", lost)):
                if message:
                    print(f"{topic:>8}  {message}", file=sys.stderr)
        with plain_file.unchanging() if verb in JUDGING else contextlib.nullcontext():
            return cast(int, module.main(rest))
    except ValueError as error:
        if _received:
            raise
        from bench.base import credentials  # the message shows what was typed, and may end up in a log

        print(f"{verb}: {credentials.redacted(str(error))}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:  # of getcwd() or tempfile
            print(f"{verb}: {error.strerror}: go to a folder that is there, and free space", file=sys.stderr)
            return 2
        from bench.machine import processes

        if error.errno in processes.SHORTAGES:
            short = f"this machine has no free processes, memory or open files ({errno.errorcode[error.errno]})"
            print(f"{verb}: {error.strerror}: {short}: run the same command again", file=sys.stderr)
            return os.EX_TEMPFAIL
        if errno.errorcode.get(error.errno or 0) not in NOT_OURS or not isinstance(error.filename, str):
            raise
        print(f"{verb}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def module_of(verb: str) -> ModuleType:
    """Imports and returns a verb's module in bench/cli/."""
    return importlib.import_module(f"bench.cli.{'import_logs' if verb == 'import' else verb}")


def _help_of_verbs() -> Iterator[str]:
    """Yields the lines of the help: the verbs by purpose, with what each does."""
    for purpose, verbs in GROUPS.items():
        yield f"{purpose}:"
        checkout = {} if paths.INSTALLED or purpose != "set up" else CHECKOUT_VERBS
        yield from (f"  {verb:<11} {summary}" for verb, summary in (verbs | checkout).items())


class _Ended(KeyboardInterrupt):
    """Raised by a signal, whose number is its argument.  After a plain KeyboardInterrupt Python ends as by SIGINT."""


_received: list[int] = []  # the signals so far: libraries turn what a handler raises into errors of their own


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise _Ended(number)


def _use_config(argv: list[str]) -> list[str]:
    """Sets --config-dir DIR and --config-name NAME for this process and its children. Returns the other arguments."""
    wanted = {"--config-dir": (groups.VARIABLE, "name a folder that holds groups of your own, such as model/mine.yaml")}
    wanted["--config-name"] = wanted["-cn"] = (groups.NAME_VARIABLE, "name a yaml, as config of conf/config.yaml")
    rest = []
    waiting = iter(argv)
    for word in waiting:
        name, equals, value = word.partition("=")
        if name not in wanted:
            rest.append(word)
            continue
        variable, remedy = wanted[name]
        value = value if equals else next(waiting, "")
        if not value:
            raise ValueError(f"{name}: {remedy}")
        os.environ[variable] = value
    groups.own_folders(), groups.config_name()  # raises ValueError here, whatever the verb
    return rest


def version_text() -> str:
    """Returns version, commit, Python and torch as one line."""
    from importlib import metadata
    from platform import python_version

    from bench import __version__
    from bench.machine import git

    commit = None
    with contextlib.suppress(OSError):
        commit = git.ask(paths.REPO, "rev-parse", "--short", "HEAD")
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    suffix = f" ({commit.strip()})" if commit else ""
    return f"speedrun {__version__}{suffix}, Python {python_version()}, torch {torch}"


def run() -> None:
    """Runs main() and exits with its exit code."""
    gc.set_threshold(NEW_OBJECTS)
    escape.open_closed()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a starter that blocked all would leave SIGKILL alone
    sys.excepthook = lambda *error: escape.Door(sys.stderr).writelines(traceback.format_exception(*error))
    try:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and "&" set it
                signal.signal(number, _end)  # within the try, as it may raise at once
        code = main(sys.argv[1:])
    except BaseException as error:
        if not _received and not isinstance(error, KeyboardInterrupt):
            raise
        ended_by = signal.Signals([*_received, *error.args, signal.SIGINT][0])
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"interrupted by {ended_by.name}", file=sys.stderr)
        code = 128 + ended_by
    sys.exit(code)
