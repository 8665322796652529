"""A referee for a search: it races every change, and keeps only what is shown to be better.

    ./run.sh referee start track=cpu_nano budget=1h       set the champion by settings of run, and calibrate
    ./run.sh referee submit optim.lr=0.002 --note "..."   or change.patch, a folder, script=train.py
    ./run.sh referee status | log | end
    ./run.sh referee replay                               make every decision again, from the records alone
    ./run.sh referee demo                                 a scripted agent improves a script for ten minutes
    ./run.sh referee serve | mcp                          for other programs: JSON lines on a socket, an MCP server

A submission that cannot be raced is refused at once and costs nothing.  The others race the champion on fresh seeds,
round by round, until the gain that the search looks for is likely or unlikely.  A promising one is raced again on new
seeds, and becomes the champion if that confirms it.  However many changes are tried, the expected fraction of false
keeps is at most alpha.  After a crash, ./run.sh referee start continues.
"""

import argparse
import json
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.base import text_table
from bench.base.paths import results_root, shown, user_path
from bench.base.stats import ALPHA
from bench.base.units import seconds_of
from bench.cli import arguments
from bench.launch import console
from bench.launch.console import say
from bench.machine.signals import Interrupted
from bench.plans.race import state as race_state
from bench.plans.referee import agent, deciding, page, refereeing, serving
from bench.plans.referee import search as searches
from bench.plans.referee.search import Search
from bench.record import race_folder

DEMO = ["track=free", "hardware=cpu", "data=pysource", "script.torchrun=false", "script.args=--seed={seed}"]
DEMO += ["goal.val_tokens=8192", "goal.target_val_loss=4.0", "on=time", "budget=10m"]
NUMBERS = ("alpha", "effect", "price")
OURS = ("budget", "champion", "on", *NUMBERS)
MAX_WHY_CHARS = 80  # characters of a sentence in the table of submissions


def main(argv: list[str]) -> int:
    """Exit codes: 0 done (submit: kept), 1 not kept, interrupted, or a replay that differs, 2 usage error."""
    args = _parser().parse_intermixed_args(argv)
    args.out = sys.stdout  # for the answer; with --json the rest goes to standard error
    results = results_root().absolute()
    if args.action not in ("demo", "start", "submit") and args.words:
        args.search = args.search or args.words[0]
    try:
        with console.output(not args.show, args.json):
            verbs = {"start": _start, "submit": _submit, "demo": _demo, "replay": _replay}
            verbs |= {"serve": _serve, "mcp": _serve}
            return verbs.get(args.action, _show)(args, results)
    except Interrupted as error:
        signal = str(error).removeprefix("interrupted (").partition(")")[0]  # without the remedy of a race alone
        say("referee", f"interrupted ({signal}): ./run.sh referee start goes on", always=True)
        return 1


def _start(args: argparse.Namespace, results: Path) -> int:
    if args.words:
        say("referee", "the champion's settings are being checked", always=True)  # seconds, on a busy machine a minute
        search = refereeing.begin(results, *_settings(args))
    else:
        search = searches.read(searches.find(results, args.search))
        if search.has_ended:
            raise ValueError(f"{search.name}: has ended: ./run.sh referee start track=... budget=... begins another")
    search = refereeing.work(_calibrated(search))
    page.write(search)
    _print(args, search, [])
    return 0


def _calibrated(search: Search) -> Search:
    """Returns the search as it is when its champion has raced itself."""
    if search.calibration is None:
        about = f"in {2 * (refereeing.CALIBRATION_ROUNDS + 1)} runs, which count in the budget"
        say("referee", f"{search.name}: the champion races itself to measure the noise, {about}", always=True)
    with searches.locked(search.folder):
        search = refereeing.calibrate(searches.read(search.folder))
    calibration = search.calibration
    assert calibration is not None
    seen = refereeing.sight(search, 3600.0 / calibration["devices"])
    looked = f"looks for {search.shown(calibration['effect'])} or more"
    say("referee", f"it can show {search.shown(seen)} in a device-hour, and {looked}", always=True)
    return search


def _demo(args: argparse.Namespace, results: Path) -> int:
    """Runs a search by an agent without a model."""
    began_s = time.monotonic()
    typed_keys = {word.partition("=")[0] for word in args.words}
    args.words = [word for word in DEMO if word.partition("=")[0] not in typed_keys] + args.words
    arm, settings = _settings(args)
    with tempfile.TemporaryDirectory(prefix="speedrun-demo-") as folder:  # alone: the sandbox shows what is beside it
        script = shutil.copy(agent.EXAMPLE, folder)
        search = refereeing.begin(results, {**arm, "overrides": [f"script={script}", *arm["overrides"]]}, settings)
    search = _calibrated(search)
    with tempfile.TemporaryDirectory(prefix="speedrun-agent-") as folder:
        left_s = settings["budget_s"] - (time.monotonic() - began_s)
        search = agent.go(search, left_s, secrets.randbits(32), Path(folder))
    search = searches.append(search, "search_end", why=None)
    page.write(search)
    _print(args, search, [*search.submissions])
    return 0


def _settings(args: argparse.Namespace) -> tuple[searches.Arm, dict[str, Any]]:
    values = {key: value for key, _, value in (word.partition("=") for word in args.words) if key in OURS}
    overrides = [word for word in args.words if word.partition("=")[0] not in OURS]
    overrides += shlex.split(values.get("champion", ""))
    if "budget" not in values:
        raise ValueError("budget is not set: use e.g. ./run.sh referee start track=cpu_nano budget=1h")
    numbers = {key: _number(key, values[key], 0.5 if key == "alpha" else 99.0) for key in NUMBERS if key in values}
    settings = {"on": values.get("on"), "alpha": numbers.get("alpha", ALPHA), "effect": numbers.get("effect")}
    settings["is_effect_pct"] = "%" in values.get("effect", "")
    settings |= {"budget_s": seconds_of(values["budget"]), "price": numbers.get("price"), "trust": args.trust}
    return {"overrides": overrides, "rev": None}, settings


def _number(key: str, text: str, below: float) -> float:
    try:
        number = float(text.strip("%$ "))
    except ValueError:
        number = 0.0
    if not 0 < number < below:
        raise ValueError(f"{key}={text}: give a number above 0 and below {below:g}")
    return number


def _submit(args: argparse.Namespace, results: Path) -> int:
    search = searches.read(searches.find(results, args.search))
    search, number = refereeing.submit(search, args.words, args.author, args.note)
    search = refereeing.work(search, number)
    submission = search.submissions[number]
    page.write(search)
    if args.json:
        _print(args, search, [number])
    return 0 if submission.decided and submission.decided["decision"] == "keep" else 1


def _show(args: argparse.Namespace, results: Path) -> int:
    search = searches.read(searches.find(results, args.search))
    if args.action == "end" and not search.has_ended:
        with searches.locked(search.folder):
            search = searches.append(search, "search_end", why=None)
    page.write(search)
    _print(args, search, [*search.submissions] if args.action != "status" else [])
    return 0


def _serve(args: argparse.Namespace, results: Path) -> int:
    search = searches.read(searches.find(results, args.search))
    if args.action == "mcp":
        serving.serve_mcp(search)
        return 0
    socket = user_path(args.socket).absolute() if args.socket else search.folder / "socket"
    say("referee", f"{search.name}: answers on {socket}", always=True)
    serving.serve(search, socket)
    return 0


def _replay(args: argparse.Namespace, results: Path) -> int:
    search = searches.read(searches.find(results, args.search))
    faults = list(deciding.replay(search))
    for fault in faults:
        say("replay", fault, always=True)
    decided = [submission for submission in search.submissions.values() if submission.decided]
    say("replay", f"{len(decided)} decisions, {len(faults)} faults", always=True)
    return 1 if faults else 0


def _print(args: argparse.Namespace, search: Search, numbers: list[int]) -> None:
    if search.doubt:
        say("referee", search.doubt, always=True)
    chosen = [search.submissions[number] for number in numbers]
    left_s = max(0.0, search.settings["budget_s"] - search.spent_s)
    replayed = deciding.replayed(search, search.kept[-1]) if search.kept else None
    state: dict[str, Any] = {
        "search": search.name,
        "ended": search.has_ended,
        "champion": search.champion,
        "champion_replayed": replayed,
        "kept": [submission.number for submission in search.kept],
        "open": [submission.number for submission in search.open],
        "num_submissions": len(search.submissions),
        "budget_left_s": left_s,
        "doubt": search.doubt,
    }
    if args.json:
        submissions = [deciding.answer(search, submission) for submission in chosen]
        output = submissions[0] if args.action == "submit" else state | {"submissions": submissions}
        print(json.dumps(output, indent=1), file=args.out)
        return
    kept = f"{len(search.kept)} kept of {len(search.submissions)}, {len(search.open)} open"
    kept = kept if search.submissions else "nothing has been submitted yet"
    if search.calibration is None and (folder := deciding.folder_of(search, "calibration")):
        slots = race_state.read(folder, search.results).slots
        kept += f", {sum(slot.is_done for slot in slots)} of {len(slots)} runs of the calibration done"
    ended = " (ended)" * search.has_ended
    print(f"{search.name}{ended}: {kept}, {left_s:.0f} s of the budget left")
    print(f"page: {shown(search.folder / page.NAME)}")
    replay = "" if replayed is None else f" ({replayed})"
    print(f"champion: {race_folder.describe(search.champion)}{replay}")
    if rows := [_row(search, submission) for submission in chosen]:
        heads = ["", "decision", "gain", "spent", "submitted", "why"]
        print(text_table.render(heads, rows, [True, False, True, True, False, False]))


def _row(search: Search, submission: searches.Submission) -> list[str]:
    decided = submission.decided
    gain = decided.get("gain") if decided else None
    about = text_table.middle(page.without_folders(submission.about), 40)
    note = f": {text_table.middle(submission.note, 40)}" * bool(submission.note)
    author = f", by {submission.author}" * bool(submission.author)
    return [
        str(submission.number),
        decided["decision"] if decided else "open",
        "" if gain is None else search.shown(gain),
        f"{decided['spent_s']:.0f} s" if decided else "",
        about + note + author,
        "; ".join(text_table.middle(reason, MAX_WHY_CHARS) for reason in deciding.reasons(search, submission)),
    ]


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh referee", main=main)
    actions = ("demo", "start", "submit", "status", "log", "end", "replay", "serve", "mcp")
    parser.add_argument("action", choices=actions, metavar="ACTION", help=", ".join(actions))
    help_text = "start: budget=8h, champion='SETTINGS' or settings as run takes them; effect=0.5%% (the gain looked "
    help_text += "for; default: what this machine can show), alpha=0.05, on=time, loss or time_to_target, price=2.5 "
    help_text += "(dollars per device-hour).  submit: a diff, a folder, script=PATH or key=value.  Others: its name"
    parser.add_argument("words", nargs="*", default=[], metavar="WORD", help=help_text)
    parser.add_argument("--search", metavar="NAME", help="which search; default: the newest")
    parser.add_argument("--socket", metavar="PATH", help="path of the socket that serve makes; default: SEARCH/socket")
    parser.add_argument("--author", default="", help="name of the submitter, kept in the journal")
    parser.add_argument("--note", default="", help="what the submission is about")
    parser.flag("--trust", help="race code without a sandbox, where this kernel allows none")
    parser.flag("--show", help="print the progress of the runs")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON; all else to standard error")
    return parser
