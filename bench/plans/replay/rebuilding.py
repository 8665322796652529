"""Rebuilds exactly a record's code in a checkout, and runs its settings there once, recorded among the replays.

The code is the record's commit with its difference and its untracked sources, in a worktree; a user's own classes and a
training script come from the record's code/. Nothing is taken from the working tree.
"""

import contextlib
import errno
import functools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from bench.base import atomic, private
from bench.base.paths import REPO, results_root
from bench.base.reading import plain_file
from bench.base.units import MIB, format_bytes
from bench.config import groups
from bench.data.sources.source import data_root
from bench.machine import code_state, environment, git, processes, sandbox
from bench.machine.signals import Interrupted
from bench.plans import locks
from bench.plans.race import arm_process, worktrees
from bench.plans.replay.recorded import VARIABLES, Recorded
from bench.record import configs, ledger, race_folder, run_folder
from bench.record.certificates import replays_root

# Settings that a run leaves to the machine: a replay sets those that the record ran with.
OF_THE_MACHINE = ("device", "num_processes", "num_threads", "dtype", "compile", "micro_batch_seqs")
OWN = ("own", "script")  # folders of code/ with the user's own code
CHANGED = "the record was changed or is incomplete"
LOCK = ".replay.lock"
IMPORT_PATH = re.compile(r"\S+:\w+")  # as bench/config/user_code.py has it, within all settings
MAX_MADE_BYTES = 64 * MIB  # of a replay in a sandbox beyond twice what it takes on the disk, which may compress
LINES = "dialect.yaml"  # the patterns of a script's lines, which a yaml of its author described
RECORDED = "recorded"  # the choice of each group whose yaml is written from a record's config.yaml
NOT_REPEATED = ("seed=", "exporters", "script.rev=", "checkpoint", "resume=", "hardware.sandbox=")  # overrides
OF_THE_RUN = ("name", "seed", "exporters", "checkpoint", "resume")  # parts of config.yaml that a replay does not repeat
GLOBAL = "# @package _global_\n"  # begins the yaml of a track and of an experiment


@dataclass(frozen=True)
class Checkout:
    code: Path  # the harness as it was
    own: Path  # a folder with the user's own classes and script
    temp: Path  # the temporary folder of what runs there: torch's agent, in old code, leaves a folder per run


@contextlib.contextmanager
def checkout(recorded: Recorded) -> Iterator[Checkout]:
    """Yields the record's code within the block. Raises ValueError for a link there or a patch that does not fit."""
    code, kept, mark = recorded.run["code"], code_state.kept(recorded.folder), _mark_of_process()
    name = f"replay-{recorded.run['run_id']}-{mark}"
    temporary = functools.partial(tempfile.TemporaryDirectory, prefix=f"speedrun-replay-{mark}-")
    with worktrees.checked_out(REPO, {name: code["commit"]}) as paths, temporary() as own, temporary() as temp:
        for source, target in ((kept / "untracked", paths[name]), (kept / "own", own), (kept / "script", own)):
            _copy(source, Path(os.path.realpath(target)), recorded.name)
        if code["diff_sha256"]:
            try:
                git.run(paths[name], "apply", "--binary", "--whitespace=nowarn", "-", stdin=recorded.patch())
            except git.Failed as error:
                raise ValueError(f"{recorded.name}: code/diff.patch does not apply to its commit: {error}") from None
        if lines := (recorded.config.get("script") or {}).get("lines"):
            (Path(temp) / LINES).write_text(yaml.safe_dump(lines))
        yield Checkout(paths[name], Path(own), Path(temp))


def _copy(source: Path, target: Path, name: str) -> None:
    """Copies the files below a folder of a record's code/. Raises ValueError if one would be written through a link."""
    for entry in plain_file.entries_below(source) if source.is_dir() else ():
        path = target / os.path.relpath(entry.path, source)
        try:
            if path.resolve() != path:  # the commit, which may be a stranger's, has a link there
                raise OSError(errno.ELOOP, "a link is there")
            if not entry.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(entry.path, path)
        except (OSError, RuntimeError) as error:  # the latter for a loop of links in Python 3.11 and 3.12
            why = getattr(error, "strerror", None) or error
            shown = os.path.relpath(path, target)
            raise ValueError(f"{name}: {shown} could not be put into its commit: {why}") from None


def _mark_of_process() -> str:
    """Returns a part of the names of this replay's folders: two may run at once. Removes the folders of killed ones."""
    for path in Path(tempfile.gettempdir()).glob("speedrun-replay-*"):
        if worktrees.is_left(path.name):
            shutil.rmtree(path, ignore_errors=True)
    return worktrees.mark_of_process(REPO)


def refuse_other_code(recorded: Recorded, tree: Checkout) -> None:
    """Raises ValueError if the checkout is not the code that run.json names, by our own hash, before any of it runs."""
    code = recorded.run["code"]
    if code_state.identity_version(code) != code_state.IDENTITY_VERSION:
        return
    for name, wanted in (code.get("files") or {}).items():
        top, _, rest = name.partition("/")
        path = tree.own / rest if top in OWN else tree.code / name
        if name in recorded.unused:
            continue
        if not path.is_file() or code_state.file_sha256(path)[:12] != wanted:
            raise ValueError(f"{name}, as the record holds it, is not the file that run.json names: {CHANGED}")


def strangers_code(recorded: Recorded) -> list[str]:
    """Returns the parts of a record that bring code to run here; [] if this machine's ledger has the record."""
    code, kept = recorded.run["code"], recorded.folder / "code"
    is_ours = git.ask(REPO, "merge-base", "--is-ancestor", str(code["commit"]), "HEAD") is not None
    brought = ["code/diff.patch"] * bool(code["diff_sha256"]) + ["code/untracked/"] * bool(code.get("untracked"))
    brought += [f"code/{name}/" for name in OWN if (kept / name).is_dir()]
    brought += [f"commit {str(code['commit'])[:12]}, which HEAD does not contain"] * (not is_ours)
    brought += ["settings that name code"] * names_code(recorded)
    return [] if is_ours_by_ledger(recorded) else brought


def names_code(recorded: Recorded) -> bool:
    """Returns whether a record's settings name a script or a class that is not the harness's."""
    settings = configs.settings(configs.read(str(recorded.folder)))  # own yamls may have named code as well
    has_script = any(value is not None for key, value in settings.items() if key.split(".")[0] == "script")
    is_named = any(":" in text or "script" in text for text in recorded.overrides)
    within = json.dumps([*settings.values()], separators=("\n", "\n"), default=str, ensure_ascii=False)  # also in lists
    return has_script or is_named or bool(IMPORT_PATH.search(within))


def is_ours_by_ledger(recorded: Recorded) -> bool:
    """Returns whether this machine's own ledger, without what was collected, has the record, unchanged."""
    entry = ledger.runs_of(ledger.read(results_root()).own_lines).get(recorded.name)
    end = entry and entry["end"]
    return end is not None and not ledger.is_changed(recorded.folder, end)


def refuse_interpolations(recorded: Recorded) -> None:
    """Raises ValueError if a stranger's settings refer to something of this machine, such as ${oc.env:USER}: what they
    stand for would be written beside the record."""
    settings = configs.settings(configs.read(str(recorded.folder)))
    name, texts = recorded.name, [*recorded.overrides, *map(str, settings.values())]
    if (named := next((text for text in texts if "${" in text), None)) and not is_ours_by_ledger(recorded):
        raise ValueError(f"{name}: {named[:100]} refers to this machine, whose ledger does not have the record")


class Sandbox:
    """Runs a stranger's code, including its launcher: it sees this code, its data and git's objects, and writes to a
    separate results folder, from which adopted() takes the run."""

    def __init__(self, recorded: Recorded, tree: Checkout, has_data: bool):
        self._recorded, self._tree, self._limits = recorded, tree, sandbox.machine_limits()
        self._watch, self.exceeded = sandbox.Watch(os.getpid(), self._limits, tree.temp), ""
        self.results = tree.temp / "results"
        own_git = Path((tree.code / ".git").read_text().strip().removeprefix("gitdir: "))
        repository = (own_git.parent.parent / name for name in ("HEAD", "objects", "refs", "packed-refs"))  # no config
        self._readable = [path for path in (tree.code, tree.own, own_git, *repository, data_root()) if path.exists()]
        self._readable += map(Path, sandbox.python_files(sys.executable))
        self.variables = {"SPEEDRUN_RESULTS": str(self.results)}
        if not has_data:  # the run makes its data
            self.variables["SPEEDRUN_DATA"] = str(tree.temp / "data")

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Returns the command and its variables in the sandbox, as sandbox.command() does."""
        tree, env = self._tree, {**env, **self.variables}
        return sandbox.command(argv, env, self._readable, {tree.temp: tree.temp}, self._limits, tree.code)

    def tick(self) -> None:
        """Kills the processes if they have exceeded a limit."""
        if why := self._watch.exceeded():
            self.exceeded = why
            processes.signal_all(processes.children(), signal.SIGKILL)

    def adopted(self, folder: Path) -> Path:
        """Copies the run in this folder into results/replays and its ledger. Raises ValueError if it is not a run."""
        into = replays_root() / self._recorded.run["track"] / folder.name
        if not run_folder.read(folder) or not race_folder.NAME.fullmatch(folder.name) or into.exists():
            raise ValueError(f"{self._recorded.name}: its replay left a folder that is no run's: {folder.name!r}")
        files = [entry for entry in plain_file.entries_below(folder) if entry.is_file(follow_symlinks=False)]
        facts = [entry.stat(follow_symlinks=False) for entry in files]
        on_disk = sum({(each.st_dev, each.st_ino): 512 * each.st_blocks for each in facts}.values())
        if (num_bytes := sum(each.st_size for each in facts)) > MAX_MADE_BYTES + 2 * on_disk:
            sizes = f"{format_bytes(num_bytes)} of files that take {format_bytes(on_disk)} on the disk"
            raise ValueError(f"{self._recorded.name}: its replay left {sizes}, by holes or links: not copied")
        try:
            for entry in files:
                target = into / os.path.relpath(entry.path, folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(entry.path, target, follow_symlinks=False)
        except OSError:  # the disk is full: half of a run would stay
            shutil.rmtree(into, ignore_errors=True)
            raise
        run = cast(Any, run_folder.read(into))
        run["ledger_sha256"] = ledger.started(replays_root(), into, run)
        atomic.write_json(into / "run.json", run)
        ledger.ended(replays_root(), into, run)
        return into


class _Quoting(yaml.SafeDumper):
    """Quotes text such as 1e-4, which Hydra would read as a number."""


def _text(dumper: _Quoting, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if text[:1] in "+-.0123456789" else None)


_Quoting.add_representer(str, _text)


def overrides_of(recorded: Recorded, tree: Checkout, is_confined: bool = False) -> list[str]:
    """Returns the overrides of the replay except its seed: the record's, and what its machine had chosen for it.

    is_confined: the replay as a whole runs in a sandbox, in which a script cannot have another one.
    """
    hardware, kept, own_keys = recorded.config["hardware"], list[str](), set[str]()
    script = recorded.config.get("script") or {}
    for override in recorded.overrides:
        key, is_set, value = override.partition("=")
        own_keys.add(key.lstrip("+~"))
        is_script = key.lstrip("+") in ("script", "script.path") and not script.get("root")
        if is_set and is_script and value not in ("null", ""):
            override = f"script={tree.own / Path(value).name}"
        elif is_set and key == "script.root":
            override = f"script.root={tree.own}"
        elif key.lstrip("+") == "script.dialect" and script.get("lines"):
            override = f"script.dialect={tree.temp / LINES}"
        elif is_confined and key.lstrip("+~") == "script.sandbox":
            continue
        if not override.lstrip("+~").startswith(NOT_REPEATED):
            kept.append(override)
    kept += ["script.sandbox=null"] * bool(is_confined and script.get("sandbox"))
    pinned: dict[str, Any] = {f"hardware.{key}": hardware.get(key) for key in OF_THE_MACHINE}
    pinned = {key: value for key, value in pinned.items() if value is not None and key not in own_keys}
    if recorded.run.get("script"):
        pinned = {"hardware.num_processes": hardware["num_processes"], "hardware.device": hardware["device"]}
    return kept + [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in pinned.items()]


def own_choices(recorded: Recorded, code: Path) -> list[str]:
    """Returns what the record chose of yamls that its code does not have, such as model=mine of a project's conf/."""
    chosen = ["--config-name"] if "--config-name" in (recorded.run.get("command") or ()) else []
    for override in recorded.overrides:
        key, _, value = override.lstrip("+").partition("=")
        folder = code / "conf" / key
        if key in groups.GROUPS and folder.is_dir() and not value.startswith("{"):
            names = re.findall(r"[\w.-]+", value)
            chosen += [override for name in names if name != "null" and not (folder / f"{name}.yaml").is_file()]
    return chosen


def without_choices(recorded: Recorded, overrides: Sequence[str], code: Path, conf: Path) -> list[str]:
    """Returns overrides that need none of the user's own yamls: an experiment has all settings of config.yaml instead.

    code: the harness as it was; conf: the folder, to be used as --config-dir, in which the yamls are written.
    """

    def write(name: str, values: Mapping[str, Any], head: str = "") -> None:
        if ".." in Path(name).parts:  # names of somebody else's config.yaml
            raise ValueError(f"{recorded.name}: its config.yaml names a file outside of conf/: {name}")
        (conf / name).parent.mkdir(parents=True, exist_ok=True)
        (conf / name).write_text(head + yaml.dump(dict(values), Dumper=_Quoting, sort_keys=False))

    settings = {key: value for key, value in recorded.config.items() if value is not None and key not in OF_THE_RUN}
    settings["hardware"] = {key: value for key, value in settings["hardware"].items() if key != "sandbox"}
    instruments, track = settings.get("instruments") or {}, settings["track"]
    chosen: list[dict[str, Any]] = [{"override /instruments": list(instruments)}]
    for name in instruments:
        if not (code / "conf" / "instruments" / f"{name}.yaml").is_file():
            write(f"instruments/{name}.yaml", {name: instruments[name]})
    for group, part in (("model", {"size": "nano"}), ("optim", {"schedule": RECORDED})):  # a track may override it
        if values := settings.pop(group, None):
            write(f"{group}/{RECORDED}.yaml", {"defaults": [part, "_self_"], **values})
            chosen.append({f"override /{group}": RECORDED})
            if group == "optim":
                write(f"optim/schedule/{RECORDED}.yaml", values["schedule"])
    if not (code / "conf" / "track" / f"{track['name']}.yaml").is_file():
        write(f"track/{track['name']}.yaml", {"track": track}, GLOBAL)
    write(f"experiment/{RECORDED}.yaml", {"defaults": chosen, **settings}, GLOBAL)
    kept = [text for text in overrides if text.lstrip("+~").partition("=")[0] not in (*groups.GROUPS, "schedule")]
    return [f"track={track['name']}", f"experiment={RECORDED}", *kept]


def variables_at(tree: Checkout, recorded: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the variables of the replay's process: those of this one that environment.passed() lets through, with the
    record's in place of those that reach arithmetic.

    recorded: the record's variables that reach arithmetic; None: keep this shell's.
    """
    env = environment.passed(arm_process.environment(replays_root()))  # no tokens: the code may be a stranger's
    env |= {"SPEEDRUN_CWD": str(tree.own), "TMPDIR": str(tree.temp)}
    if recorded is None:
        return env
    shown = {name: value for name, value in recorded.items() if environment.is_shown_whole(value)}
    for name in (recorded.keys() - shown.keys()) & env.keys():  # environment.json shows only a part of its value
        if env[name] and environment.shown_value(private.redact(env[name], REPO)) == recorded[name]:
            shown[name] = env[name]
    return {name: value for name, value in env.items() if name not in VARIABLES} | shown


def alone(say: Callable[[str, str], None]) -> contextlib.AbstractContextManager[None]:
    """Context in which no other replay of this results folder trains: all are timed and find a new folder."""
    replays_root().mkdir(parents=True, exist_ok=True)
    waiting = "waiting for another replay in this results folder to end"
    return locks.held(replays_root() / LOCK, "replays", lambda holder: say("replay", f"{waiting} ({holder})"))


def train(
    code: Path,
    overrides: Sequence[str],
    env: Mapping[str, str],
    name: str,
    show: bool = True,
    confined: Sandbox | None = None,
) -> Path:
    """Trains once by this code and returns the new run folder. show: print its output on standard error.

    name: the record's, for messages; confined: None outside a sandbox. Raises ValueError if it did not start or left no
    record, and Interrupted after the run has been ended and recorded.
    """
    results = confined.results if confined else replays_root()

    def folders() -> set[Path]:
        return set(run_folder.find_runs([results])) if results.is_dir() else set()

    before = folders()
    if confined:
        try:
            tail = arm_process.run_to_end(code, overrides, env, show, sys.stderr, confined.tick, confined.command)
        except Interrupted:
            for folder in folders() - before:
                confined.adopted(folder)
            raise
        if confined.exceeded:
            raise ValueError(f"{name}: its replay was ended in the sandbox: {confined.exceeded}")
    else:
        tail = arm_process.run_to_end(code, overrides, env, show, sys.stderr)
    if not (new := sorted(folders() - before)):
        raise ValueError(f"{name}: its replay did not start:{' what it printed says why' * show}\n{tail}".rstrip())
    return confined.adopted(new[0]) if confined else new[0]


def identity(
    code: Path, overrides: Sequence[str], env: Mapping[str, str], confined: Sandbox | None
) -> dict[str, Any] | None:
    """Returns {"config_id", "source_sha256"} by the code in this folder; None if it is too old to report them, or an
    instrument of the run keeps it out of races. Raises ValueError for a refusal."""
    try:
        around = confined.command if confined else None
        return cast(dict[str, Any] | None, arm_process.ask(code, overrides, env, confined=around))
    except ValueError as error:
        refusal = re.split("^race: ", str(error), flags=re.M)[-1]
        if refusal.startswith("instruments."):
            return None
        raise ValueError(refusal) from None
