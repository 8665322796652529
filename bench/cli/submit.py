"""Put a command into the lab's queue.  ./run.sh submit [--gpus N] VERB WORDS...      ./run.sh submit --list

    ./run.sh submit --gpus 8 race A= B=optim=muon n=5
    ./run.sh submit run track=cpu_nano seed=3

VERB is run, speedrun, race, ladder or calibrate.  An agent (./run.sh agent) on any machine with that many free GPUs
takes the command and runs it on these GPUs only.  The records go to the results folder that all machines share.
"""

import itertools
import shlex
from typing import Annotated

from bench.base import atomic, escape, text_table
from bench.base.paths import results_root, shown
from bench.cli import arguments
from bench.cli.main import QUEUED, module_of
from bench.config.groups import did_you_mean
from bench.config.typed import between
from bench.launch.console import say
from bench.machine import gpus
from bench.plans import shares
from bench.plans.agent import end_cancelled
from bench.plans.queue import FOLDER, Queue

GpusOfAMachine = Annotated[int, between(0, 64)]  # 64: more than any has (assumed)
COLUMNS = ("id", "user", "gpus", "state", "command")


def main(argv: list[str]) -> int:
    """Exit codes: 0 submitted, listed or removed, 2 usage error."""
    at = next((number for number, word in enumerate(argv) if word in QUEUED), len(argv))
    args, command = _parser().parse_args(argv[:at]), argv[at:]
    queue = Queue(results_root() / FOLDER)
    if args.list:
        _list(queue, args.json)
        return 0
    if args.cancel:
        entry = queue.cancel(args.cancel)
        if all(item.id != entry.id for item in queue.taken()):  # it was waiting; the agent of a running entry ends it
            end_cancelled(queue, entry)
        return 0
    verb, *arguments = command or args.command or [""]
    if verb not in QUEUED:
        raise ValueError(f"{verb or 'no command'}: {did_you_mean(verb, QUEUED)}choose from {', '.join(QUEUED)}")
    for word, following in itertools.pairwise([*arguments, "-"]):
        is_of_race = word[2:] and any(option.startswith(word) for option in ("--resume", "--look", "--abandon"))
        if verb == "race" and is_of_race and following.startswith("-"):
            raise ValueError(f"{word}: the latest race may be another one by then: name the race, {word} RACE")
    module_of(verb).check(arguments)
    id = queue.submit([verb, *arguments], args.gpus)
    say("queue", f"{id}, log {shown(queue.folder / 'logs' / f'{id}.log')}", always=True)
    if args.gpus > (here := len(gpus.devices())):
        say("queue", f"it waits for an agent on a machine with {args.gpus} GPUs: this one has {here}", always=True)
    for entry in queue.waiting():
        if entry.id == id and (why := shares.over_budget(shares.recent(queue), shares.budgets(queue), entry.user)):
            say("queue", f"it waits: {why}", always=True)
    return 0


def _list(queue: Queue, as_json: bool) -> None:
    """Prints what waits, in the order in which it will be taken, what runs, and what each user has had."""
    ahead = shares.order(queue)
    kept = [entry for entry in queue.waiting() if entry not in ahead]
    for why in queue.unreadable():
        say("queue", escape.line(f"skipped: {why}"), always=True)
    taken = queue.taken()
    ending = [entry for entry in taken if queue.cancelled(entry)]
    silent = [entry for entry in queue.silent(at_once=True) if entry not in ending]
    running = [entry for entry in taken if entry not in (*ending, *silent)]
    states = [(running, "runs"), (silent, "agent silent"), (ending, "being cancelled")]
    states += [(ahead, "waits"), (kept, "over budget")]
    cells = [(item.id, item.user, item.num_gpus, state, item.command) for group, state in states for item in group]
    recent = shares.recent(queue)
    users = sorted({item["user"] for item in recent})
    if as_json:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in cells]
        had = {user: shares.spent(recent, user) | {"at_least": shares.is_at_least(recent, user)} for user in users}
        print(atomic.json_text({"entries": rows, "spent": had}, indent=1))
        return
    texts = [(id, user, str(gpus), state, escape.line(shlex.join(command))) for id, user, gpus, state, command in cells]
    print(text_table.render(COLUMNS, texts) if texts else "the queue is empty")
    if users:
        bound = {user: "at least " * shares.is_at_least(recent, user) for user in users}
        spent_rows = [(user, *(f"{bound[user]}{x:.4g}" for x in shares.spent(recent, user).values())) for user in users]
        print("\n" + text_table.render((f"in {shares.budgets(queue).days:g} days", *shares.LIMITS), spent_rows))


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh submit", main=main)
    help_text = "how many GPUs the command needs and gets; default 0, on a CPU"
    parser.number("--gpus", GpusOfAMachine, default=0, metavar="N", help=help_text)
    parser.flag("--list", help="show what runs, what waits and in which order, and what each user has used")
    parser.flag("--json", help="with --list: the same as JSON")
    parser.needs("--json", "--list")
    parser.add_argument("--cancel", metavar="ID", help="remove an entry that waits, or end one that runs")
    parser.add_argument("command", nargs="*", metavar="VERB ...", help="as after ./run.sh")
    return parser
