"""Runs the arms of a race as processes: asks an arm's own code for its facts, and runs it in a new process group.

An arm is overrides and, if it names a revision, all code of that revision in a worktree: conf/, models/ and bench/. All
arms are started alike, with this Python, data folder and results folder.
"""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from bench.base import credentials
from bench.base.paths import CHECKOUT, REPO, working_folder
from bench.config import identity, schema, user_code
from bench.machine import code_copy, code_state, sandbox
from bench.machine.processes import child, die_with_parent, has_ended
from bench.machine.signals import raise_interrupted
from bench.record import race_folder, run_folder
from bench.record.rows import row_of

if TYPE_CHECKING:
    from bench.launch.prepare import Job

ANSWER_END_S = 5.0  # for a process that is asked for facts, from SIGTERM to SIGKILL
END_WITHIN_S = 30.0  # the launcher ends its workers, then finishes the record
TAIL_LINES = 15
TICK_S = 0.5
# The names of this file in all revisions, the newest first.
FACTS_MODULES = ("bench.plans.race.arm_process", "bench.race.arm_process", "bench.racers")
OF_LOSSES = ("model", "data", "optim", "stages")  # sections of a config; also goal.num_steps, where schedules end
Confined = Callable[[Sequence[str], Mapping[str, str]], tuple[list[str], dict[str, str]]]  # like sandbox.command()
MANY = "-"  # instead of an arm's overrides: read those of several arms from standard input


def environment(results: Path | str) -> dict[str, str]:
    """Returns variables of every arm's process. Folders are absolute, because worktrees lie elsewhere."""
    from bench.data.sources.source import data_root

    return os.environ | {
        "SPEEDRUN_RESULTS": str(Path(results).absolute()),
        "SPEEDRUN_DATA": str(data_root().absolute()),
        "SPEEDRUN_CWD": working_folder(),
        CHECKOUT: str(REPO),  # for an arm that runs from a copy of the checkout
        user_code.OUTPUT: user_code.outputs(),
    }


def facts_of_arms(arms: Mapping[str, tuple[Path, Sequence[str]]], results: Path | str) -> dict[str, dict[str, Any]]:
    """Returns {arm: facts()} of {arm: (folder of its code, overrides)}; arms of this checkout share one process.

    Raises ValueError for a refusal, with the arm's name before it.
    """
    own = [name for name, (folder, _) in arms.items() if folder == REPO or code_copy.is_copy(folder)]
    facts_of: dict[str, dict[str, Any]] = {}
    if own[1:]:
        facts_of |= zip(own, facts_of_own(arms[own[0]][0], [arms[name][1] for name in own], results), strict=True)
    for name, (folder, overrides) in arms.items():
        try:
            if name not in facts_of:
                facts_of[name] = facts(folder, overrides, results)
            if refusal := facts_of[name].get("refused"):
                raise ValueError(refusal)
            # Older revisions do not report which settings are credentials.
            typed = [override.partition("=")[0] for override in overrides if credentials.find(override)]
            if hidden := facts_of[name].get("redacted") or typed:
                raise ValueError(f"{hidden[0]} looks like a credential, and plans are recorded: log in (wandb login)")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return facts_of


def facts_of_own(folder: Path, arms: Sequence[Sequence[str]], results: Path | str) -> list[dict[str, Any]]:
    """Returns facts() of each arm, or {"refused": why}, from one process of this checkout or its copy."""
    return cast(list[dict[str, Any]], ask(folder, [MANY], environment(results), json.dumps(arms)))


def facts(folder: Path | str, overrides: Sequence[str], results: Path | str) -> dict[str, Any]:
    """Returns print_facts() of the code in this folder. Raises ValueError if it refuses the overrides."""
    if (printed := ask(folder, overrides, environment(results))) is None:
        raise ValueError("that revision's harness has no races yet: choose a later one")
    return cast(dict[str, Any], printed)


def ask(
    folder: Path | str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    stdin: str | None = None,
    confined: Confined | None = None,
) -> Any:
    """Returns the answer of print_facts() of the code in this folder; None if that code is too old to have it.

    stdin: text for its standard input; confined wraps the command in a sandbox. Raises ValueError for a refusal.
    """
    module = next((name for name in FACTS_MODULES if Path(folder, f"{name.replace('.', '/')}.py").exists()), None)
    if module is None:
        return None
    command = [sys.executable, "-m", module, *arguments]
    command, env = confined(command, env) if confined else (command, env)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=die_with_parent
    ) as process:
        try:
            out, errors = process.communicate(stdin)
        except BaseException:
            if not confined:
                process.terminate()  # so that it removes its temporary files
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ANSWER_END_S)
            process.kill()
            raise
    if process.returncode:
        raise ValueError(errors.strip().removeprefix("race: ") or f"exit code {process.returncode}")
    return json.loads(out.splitlines()[-1])


def print_facts(overrides: Sequence[str]) -> int:
    """Checks all that can be checked before a run, and prints what a plan needs of an arm as JSON. Returns the exit
    code. With MANY alone, reads a list of arms' overrides as JSON and prints a list; {"refused": why} stands for a
    refusal."""
    if list(overrides) == [MANY]:
        print(json.dumps(_all_facts(json.load(sys.stdin))))
        return 0
    (facts,) = _all_facts([overrides])
    if facts.get("refused"):
        print(f"race: {facts['refused']}", file=sys.stderr)
        return 2
    print(json.dumps(facts))
    return 0


def _all_facts(arms: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Returns the facts of several arms of this code; loads torch and samples the machine's load only once."""
    from bench.launch import initial_record, own_model, ready
    from bench.launch.prepare import prepare
    from bench.launch.script.script import content_sha256
    from bench.machine import environment as machine
    from bench.machine import preflight
    from bench.training.instruments import registry

    jobs, refused = {}, {}
    for number, overrides in enumerate(arms):
        try:
            job = prepare(list(overrides), say=lambda text: print(text, file=sys.stderr), check_own=False)
            if disturbing := registry.flagging(job.config.instruments):
                raise ValueError(f"instruments.{disturbing[0]}: it disturbs the times of steps: race without it")
            _ = job.own_sources  # raises for a name that no record can have
            jobs[number] = job
        except ValueError as error:
            refused[number] = str(error)
    own = [number for number, job in jobs.items() if job.script is None]
    whys = own_model.refusals([jobs[number].config for number in own])
    refused |= {number: why for number, why in zip(own, whys, strict=True) if why}
    env, foreign_cores = machine.environment(), preflight.sample_foreign_cores(ready.SAMPLE_S)
    facts = [{"refused": refused.get(number)} for number in range(len(arms))]
    for number in jobs.keys() - refused.keys():
        job = jobs[number]
        run = initial_record.record_of(job, env, command=())
        arm = {key: run[key] for key in ("name", "config_id", "track", "deviations", "session_id")}
        arm |= {key: run["code"][key] for key in ("source_sha256", "commit", "dirty")} | identity.shape(job.config)
        arm |= {"own": job.own} if job.own else {}
        if job.script is not None and not job.script.sandbox and job.script.python != sys.executable:
            arm["python"] = job.script.python
        if job.config.goal.stop_at_target and not job.script:
            arm["ends_every_steps"] = job.config.goal.val_every_steps
        if job.script is not None and job.config.script is not None and job.config.script.rev is not None:
            script = dataclasses.replace(job.config.script, rev=None)
            config_id = identity.config_id(dataclasses.replace(job.config, script=script))
            arm["without_rev"] = [config_id, content_sha256(job.script.root)]
        arm |= {"redacted": run["redacted"]} if "redacted" in run else {}
        checks = [asdict(check) for check in ready.checks(job, env, foreign_cores)]
        hardware = job.config.hardware
        arm |= {"device": hardware.device}
        arm |= {"num_gpus": hardware.ranks_of_node} if hardware.device == "cuda" else {}
        arm |= {"num_nodes": hardware.nodes} if hardware.nodes else {}
        settings = schema.to_dict(job.config)
        (settings["model"] or {}).pop("activation_checkpointing", None)  # it changes losses only by rounding
        changes_losses = {name: settings[name] for name in OF_LOSSES} | {"schedule": settings["goal"]["num_steps"]}
        arm |= {"row": _best_row(job, run), "changes_losses": changes_losses}
        facts[number] = arm | {"preflight": checks}
    return facts


def _best_row(job: "Job", run: Any) -> dict[str, Any]:
    """Returns the row (bench/record/rows.py) that the run will have if it ends well, as far as that is known before it.

    run: the record that it begins with.
    """
    goal, row = job.config.goal, row_of(run)
    hoped = {"status": "complete", "validity": "valid", "train_s": 1.0, "num_disturbed_steps": 0}
    hoped |= {"target_reached": True, "score": row["target"]}
    num_steps = None if goal.stop_at_target else goal.num_steps
    return row | hoped | {"num_steps": num_steps, "batch_tokens": job.batch_tokens}


def source_sha256(folder: Path | str, own: Iterable[str] = ()) -> str:
    """Returns the identity of the code in this folder, including the user's own classes of these import paths."""
    return code_state.source_sha256(folder, own=user_code.sources(own))


def changed_files(folder: Path | str, own: Iterable[str], run: Any) -> list[str]:
    """Returns the files of the identity that differ from those in a run's record (or None), if that is known."""
    files = {path: sha256[:12] for path, sha256 in code_state.raced_files(folder, user_code.sources(own)).items()}
    now: Any = {"identity_version": code_state.IDENTITY_VERSION, "files": files}
    return code_state.differing_files(now, run["code"]) or [] if run else []


def start(
    folder: Path,
    overrides: Sequence[str],
    results: Path | str,
    tag: Mapping[str, Any],
    own: Iterable[str] = (),
    show: bool = False,
    tick: Callable[[], object] = lambda: None,
) -> str:
    """Runs an arm once. Returns the last printed lines. tag: for run.json["race"]; own: import paths of all arms' own
    code; show, tick: as in run_to_end().

    If its tag has a compilation, it shares the compilers' caches only with other runs of that compilation.
    """
    race = race_folder.of(results, tag["race_id"])
    folders = {os.path.realpath(user_code.script_of(path)[0]) for path in own if path.endswith(user_code.SCRIPT_MAIN)}
    env = environment(results) | {race_folder.ARMS: os.pathsep.join(sorted(folders))}
    if "compilation" in tag:
        cache = caches(race) / f"{tag['arm']}-{tag['compilation']}"
        cache = cache.with_name(f"{tag['arm']}-warm-up") if tag["discarded"] else cache
        env |= {name: str((cache / part).absolute()) for name, part in race_folder.COMPILED.items()}
    return run_to_end(folder, ["--race", json.dumps(tag), *overrides], env, show, tick=tick)


def pythons_of(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the paths of the interpreters of scripts, without those that only a sandbox may start."""
    return [arm["python"] for arm in arms.values() if arm.get("python")]


def caches(race: Path) -> Path:
    """Returns the folder of the compilers' caches of a race, which exists until it ends; git ignores the name."""
    return race / race_folder.CACHES


def run_to_end(
    folder: Path,
    overrides: Sequence[str],
    env: Mapping[str, str],
    show: bool = False,
    out: TextIO | None = None,
    tick: Callable[[], object] = lambda: None,
    confined: Confined | None = None,
    program: Sequence[str] = ("bench", "run"),
) -> str:
    """Runs ./run.sh run WORDS by the code in this folder, until its record is written. Returns the last printed lines.

    show: print to the file out (None: this terminal), and return "". tick() is called twice a second meanwhile.
    confined: as in ask(); program: what python -m starts instead of bench run. Raises Interrupted on a signal, after
    the run has been ended and recorded.
    """
    command = [sys.executable, "-m", *program, *overrides]
    command, env = confined(command, env) if confined else (command, env)
    with tempfile.TemporaryFile() as hidden:
        to: Any = out if show else hidden
        wrappers = sandbox.WRAPPERS if confined else 0
        with raise_interrupted() as signals, child(command, folder, env, to, END_WITHIN_S, wrappers) as process:
            while not has_ended(process.pid, TICK_S):
                signals.check()
                tick()
            process.wait()
        hidden.seek(0)
        tail = hidden.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        if process.returncode < 0:
            ended = f"its launcher was ended by {signal.Signals(-process.returncode).name} from outside"
            tail.append(f"{ended}: look into the kernel log (dmesg) for its out-of-memory killer")
        elif process.returncode == os.EX_TEMPFAIL:
            tail.insert(0, f"its launcher ended with exit code {os.EX_TEMPFAIL}: {os.strerror(errno.EAGAIN)}")
        return "\n".join(tail)


def record_of(results: Path | str, run: str) -> Any:
    """Returns the record (Record) of "<track>/<run_id>", or None if it was never written."""
    try:
        return run_folder.read(Path(results) / run)
    except ValueError:
        return None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(print_facts(sys.argv[1:]))
