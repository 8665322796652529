"""Runs the verbs of tests/inputs.py on records of which one input is damaged or malicious.

with World(folder) as world:
    world.opened(verb)                         -> {input: how often it was opened}
    world.changed(verb, name, kind, phase)     -> (exit code, sentences on faults), or None without such an input
    world.shown(output, name, field)           -> (whether EVIL in that field is in the output, sentences on faults)
"""

import collections
import contextlib
import functools
import io
import json
import operator
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path

import claimed
import fuzzing
import kept_records
import pytest
import snapshots
import traces
import yaml
from inputs import EVIL, KINDS, MEDIA, OF_RECORDS, PRIVATE, READS, VERDICTS, WRITES
from test_referee import Tries, begun

from bench.base import escape, paths
from bench.base.reading import plain_file
from bench.claims import publication
from bench.cli.main import JUDGING
from bench.cli.main import main as bench
from bench.machine.signals import Interrupted
from bench.plans.referee import refereeing
from bench.record import named, verification

WITHIN_CPU_S = 30  # of a command: processor time, which the load of the machine does not change
WITHIN_S = 900  # of a command that waits, or starts runs on a busy machine
SECRET = "correct horse battery"  # in a private file of the user, to which a stranger's record links
OTHERS = {"a.log": "LOG", "trace.json": "TRACE", "memory.pickle": "SNAPSHOT"}


class World:
    """A race, an open race, a search, a claim folder and logs, made once and copied to folder/here for each verb."""

    def __init__(self, folder):
        self.made, self.here, self.private = (Path(folder) / name for name in ("made", "here", "private"))
        self.private.write_text(f"note: {SECRET}\n")
        self._patch, self._listener = pytest.MonkeyPatch(), None
        self._reopened = []  # files that were opened since an input was changed

    def __enter__(self):
        patch = self._patch
        patch.setenv("XDG_STATE_HOME", str(self.here / "state"))
        patch.setenv("SPEEDRUN_CWD", str(self.here))
        for module in (paths, publication, named):
            patch.setattr(module, "REPO", self.here)
        for trains in ("_audit_run", "_short_run"):  # runs of other processes, which read nothing of what is here
            patch.setattr(refereeing, trains, lambda *args: None)
        patch.setattr(os, "fsync", lambda fd: None)  # no step loses power
        self.here.mkdir(parents=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            self._make()
        shutil.copytree(self.here, self.made, symlinks=True)
        open_now = plain_file.open_now

        def noted(path, flags):
            opened = open_now(path, flags)
            self._reopened.append(path)
            return opened

        patch.setattr(plain_file, "open_now", noted)
        sys.addaudithook(lambda event, args: self._listener and self._listener(event, args))
        return self

    def __exit__(self, *exc_info):
        self._patch.undo()
        self._listener = None

    def _make(self):
        race = claimed.Results(self.here / "results").kept_race(self._patch)
        kept_records.add(self.here / "results", 9)
        for name in ("README.md", "results/README.md"):
            (self.here / name).write_text("# Mine\n")
        assert bench(["judge", f"{race}:B", "--claim", str(self.here / "claim")]) == 0
        run = min(self.here.glob("results/cpu_nano/*"))
        traces.write(
            self.here / "trace.json",
            [traces.event("user_annotation", "ProfilerStep#1", 0, 100), *traces.launched("gemm", 20, 50, 10, 1)],
        )
        (self.here / "memory.pickle").write_bytes(pickle.dumps(snapshots.training()))
        assert bench(["export", str(run), "--to", "modded-nanogpt", "--out", str(self.here / "a.log")]) == 0
        self._racers("open", hurt={5: "interrupt"}).install(self._patch)
        assert bench(["race", "A=", "B=optim.beta2=0.99", "n=3"]) == 1
        tries = self._racers("search")
        tries.install(self._patch)
        begun(tries)

    def _racers(self, home, **options):
        results, is_search = claimed.Results(self.here / home), home == "search"
        times = lambda arm, seed: 10 - 0.5 * (arm == "B")  # noqa: E731
        racers = Tries(results.folder) if is_search else claimed.Racers(results, times, **options)
        racers.pages = True  # to watch what a verb reads and writes for pages too
        return racers

    # ---- one command

    def _arguments(self, verb, command=None):
        home = self.here / READS[verb].home
        race = next(iter(home.glob("races/*")), home)
        kept = {"QUERY": "SELECT * FROM runs", "NAME": race.name, "OUT": self.here / "out", "RACE:B": f"{race}:B"}
        kept |= {"RUN": self._run(verb), "RACE": race, "RESULTS": home, "CLAIM": self.here / "claim"}
        kept |= {name: self.here / file for file, name in OTHERS.items()}
        return [str(kept.get(argument, argument)) for argument in (command or READS[verb].command).split()]

    def _run(self, verb):
        """Returns the second run of arm B, which is no warm-up and is listed, compared and judged."""
        return sorted((self.here / READS[verb].home).glob("cpu_nano/*"))[3]

    def path(self, verb, name):
        """Returns the path of an input such as "RUN/run.json"."""
        kind, _, rest = name.partition("/")
        home = self.here / READS[verb].home
        folder = {"RUN": lambda: self._run(verb), "RACE": lambda: next(home.glob("races/*")), "RESULTS": lambda: home}
        folder |= {"CLAIM": lambda: self.here / "claim", "CWD": lambda: self.here}
        folder |= {name: lambda file=file: self.here / file for file, name in OTHERS.items()}
        folder["SEARCH"] = lambda: next(home.glob("searches/[!.]*"))
        folder["STATE"] = lambda: next((self.here / "state").rglob("*.json"))
        return folder[kind]() / rest if rest and kind != "STATE" else folder[kind]()

    def name(self, path):
        """Returns the input at a path; None for a verb's temporary files, folders, and files outside this world."""
        with contextlib.suppress(ValueError):
            parts = Path(path).relative_to(self.here).parts
            place = parts[0] if parts else ""
            if place in ("results", "open", "search", "claim") and not any(part.endswith(".tmp") for part in parts):
                for kind, folder in (("RUN", "cpu_nano"), ("RACE", "races"), ("SEARCH", "searches")):
                    if parts[1:2] == (folder,) and len(parts) > 3 and parts[3] == "checks":
                        return f"RUN/{'/'.join(parts[7:])}" if len(parts) > 7 else None  # run made by a check
                    if parts[1:2] == (folder,) and len(parts) > 3:
                        return f"{kind}/{'/'.join(parts[3:])}"
                top = {"claim": "CLAIM"}.get(place, "RESULTS")
                return f"{top}/{'/'.join(parts[1:])}" if len(parts) == 2 and "." in parts[1] else None
            return ({"state": "STATE/count.json", "README.md": "CWD/README.md"} | OTHERS).get(place)
        return None

    def restored(self, verb):
        """Restores the world as it was made, without results that the verb does not use."""
        shutil.rmtree(self.here, ignore_errors=True)
        others = {"results", "open", "search", "claim"} - {READS[verb].home}
        unused = lambda folder, names: others if Path(folder) == self.made else ()  # noqa: E731
        shutil.copytree(self.made, self.here, symlinks=True, ignore=unused)

    def call(self, verb, listener=None, command=None):
        """Calls a verb, or a command if given.  Returns (exit code, None if it hung or raised; stdout; all output)."""
        out, err, code = io.StringIO(), io.StringIO(), 2
        home = READS[verb].home
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            if home in ("results", "claim"):
                patch.setenv("SPEEDRUN_RESULTS", str(self.here / "results"))
            else:
                racers = self._racers(home)
                racers.results.clock, racers.results.now = _Clock(), claimed.at(100)
                racers.install(patch)
            patch.delenv("SPEEDRUN_RESULTS", raising=False) if verb == "publish" else None
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            before = [signal.signal(number, _late) for number in (signal.SIGALRM, signal.SIGPROF)]
            signal.alarm(WITHIN_S)
            signal.setitimer(signal.ITIMER_PROF, WITHIN_CPU_S)
            self._listener = listener
            try:
                code = bench(self._arguments(verb, command))
            except (Late, Exception) as error:
                code = None
                late = f"over {WITHIN_S} s, or {WITHIN_CPU_S} s of processor time"
                print(late if isinstance(error, Late) else f"Traceback: {error!r}", file=err)
            except (SystemExit, KeyboardInterrupt, Interrupted):
                code = 2
            finally:
                self._listener = None
                signal.alarm(0)
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.signal(signal.SIGALRM, before[0])
                signal.signal(signal.SIGPROF, before[1])
        return code, out.getvalue(), out.getvalue() + err.getvalue()

    def opened(self, verb):
        """Returns {input: how often an undisturbed verb opened it}; with several runs, the maximum."""
        self.restored(verb)
        times = collections.Counter()
        code, _, text = self.call(verb, _opens(lambda path: times.update([path])))
        assert code in (0, 1, 2) and "Traceback" not in text, text
        most = {}
        for path, count in times.items():
            if name := self.name(path):
                most[name] = max(most.get(name, 0), count)
        return most

    def changed(self, verb, name, kind, phase):
        """Calls a verb of which one input is replaced; returns (exit code, sentences on faults).

        Returns None if there is no such input in this world.
        """
        self.restored(verb)
        self._reopened.clear()
        try:
            path = self.path(verb, name)
        except StopIteration:
            return None
        kept, times = self.here / "elsewhere", []  # times: "read" for each open of the input, and "changed"

        def change():
            listener, self._listener = self._listener, None  # do not count the files opened here
            if path.exists():
                shutil.copy(path, kept)
                path.unlink()
            else:
                kept.write_text("{}")
            KINDS[kind](path, self)
            self._listener = listener
            times.append("changed")
            self._reopened.clear()

        def heard(opened):
            is_input = os.path.abspath(opened) == str(path)
            if times and "changed" not in times:
                change()
            times.extend(["read"] * is_input)

        was_there = path.exists()
        if phase == "before":
            change()
        elif not was_there:
            return None
        before = kept.read_bytes() if kept.exists() and phase == "before" else None
        code, _, text = self.call(verb, _opens(heard) if phase == "while" else None)
        is_other = was_there and kind != "a link to what it was"
        wrong = [*_of_answer(code, text)]
        if before is not None and kept.read_bytes() != before:
            wrong.append("it wrote through a link")
        if is_other and code == 0 and verb in VERDICTS and name in OF_RECORDS and phase == "before":
            wrong.append("a verdict on a record that is not as it was recorded")
        is_judging = READS[verb].command.split()[0] in JUDGING and not plain_file.LIVE.search(str(path))
        if is_other and is_judging and "changed" in times and phase == "while" and str(path) in self._reopened:
            wrong.append(f"read, changed, and read again (exit code {code})")
        if kind == PRIVATE and "/" in name:  # others are files that the user names
            files = [path for path in self.here.rglob("*") if path.is_file() and not path.is_symlink()]
            shown = [path.name for path in files if SECRET.encode() in path.read_bytes()]
            wrong += [f"a private file is shown in {place}" for place in [*shown, *["the answer"] * (SECRET in text)]]
        return code, [*wrong, *self._written(verb, code)]

    def _written(self, verb, code):
        """Yields faults of the runs that a verb wrote: rules of verify that fail."""
        folders = {"publish": self.here / "results/published/mine", "collect": self.here / "out"}
        folders |= {"judge --claim": self.here / "out", "race --resume": self.here / "open"}
        folder = folders.get(verb)
        if code != 0 or folder is None:
            return
        for run in folder.glob("*/2*/run.json"):
            if verb != "race --resume":
                failed = [rule for rule in verification.report(run.parent)["rules"] if not rule["passed"]]
                yield from (f"{run.parent.name} was written: {rule['rule']}: {rule['evidence']}" for rule in failed)

    # ---- outputs

    def places(self, output):
        """Returns (file, field) of the texts in a record that this output may show."""
        verb = WRITES[output][0]
        self.restored(verb)
        names = [name for name in ("RUN/run.json", "RUN/config.yaml", "RACE/race.json") if name in READS[verb].reads]
        return [(name, field) for name in names for field in _fields(self.path(verb, name))]

    def shown(self, output, name, field):
        """Makes an output with EVIL in a field; returns (whether it is in the output, sentences on its effects)."""
        verb, command, medium = WRITES[output]
        self.restored(verb)
        path = self.path(verb, name)
        is_json = path.suffix == ".json"
        facts = json.loads(path.read_text()) if is_json else yaml.safe_load(path.read_text())
        facts = fuzzing.with_value(facts, field, EVIL)
        path.write_text(json.dumps(facts) if is_json else yaml.safe_dump(facts, sort_keys=False))
        code, out, text = self.call(verb, command=command)
        wrong = [*_of_answer(code, text)]
        files = list(self.here.rglob("*.html")) if medium == "HTML" else []
        files += [self.here / "out/README.md"] if output == "judge --claim" else []
        for content in [path.read_text() for path in files if path.exists()] or [out]:
            out = content if "evil" in content else out
            wrong += MEDIA[medium](content)
        return "evil" in out, wrong


def _fields(path):
    """Returns the paths of the texts in a JSON or YAML file, but only the first of each list."""
    facts = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    places = fuzzing.paths_of(facts)
    return [place for place in places if isinstance(functools.reduce(operator.getitem, place, facts), str)]


def _of_answer(code, text):
    """Yields faults that no command may have."""
    if code not in (0, 1, 2):
        yield f"exit code {code}: {text[-400:]}"
    if "Traceback" in text:
        yield text[-400:]
    if match := escape.CONTROL.search(text):
        yield f"{match[0]!r} on the terminal"


class _Clock:
    """Counts the minutes of runs that continue in a copy, beyond those of earlier runs."""

    minute = 200

    def __next__(self):
        self.minute += 1
        return self.minute


class Late(BaseException):
    pass


def _late(number, frame):
    raise Late


def _opens(heard):
    """Returns an audit hook that calls heard(path) for each file that is opened for reading."""
    last = None

    def listener(event, args):
        nonlocal last
        if event == "sqlite3.connect":
            heard(str(args[0]).removeprefix("file:").partition("?")[0])
        if event != "open" or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        path, mode, flags = os.fsdecode(args[0]), args[1], args[2]
        is_same, last = mode is None and path == last, path if mode else None  # open() with an opener: two events
        if not is_same and not (isinstance(flags, int) and flags & os.O_ACCMODE) and not os.path.isdir(path):
            heard(path)

    return listener
