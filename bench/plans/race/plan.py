"""The plan of a race: arms, number of runs, order, looks, alpha, margins and rules, fixed before its first run.

The functions perform no I/O: they turn the words after ./run.sh race into a dict. The plan's hash goes into the ledger
before the first run starts, so that a later change of the plan is noticed.
"""

import hashlib
import json
import random
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from bench.base.metric import VAL_LOSS
from bench.base.stats import ALPHA
from bench.compare.eligibility import AMOUNTS
from bench.compare.questions import QUESTIONS
from bench.compare.target import MARGIN_PCT
from bench.config import typed
from bench.record import race_folder

SCHEMA_VERSION = 1
N = 5  # default number of runs per arm; a track may require more of a record
MAX_N = 10_000  # runs per arm that a plan may list
MAX_ATTEMPTS = 3
BLOCKS = (1, -1, -1, 1), (1, 1, -1, -1)  # rounds of a block: a random order of the arms, or its reverse
RULES = {
    "failed": "a run that fails keeps its slot: it was started, has no time, and is not repeated",
    "interrupted": f"a slot whose run was interrupted, or ended by its machine (a killed agent, a full or broken disk, "
    f"a removed folder), is run again, {MAX_ATTEMPTS} times at most; "
    "all attempts stay in the ledger",
    "excluded": "only runs that the machine disturbed, by their record and never by their time, from all arms alike",
    "pairs": "a round is one run of each arm, back to back; arms are compared within blocks of two rounds, on log run "
    "time, beside a linear trend; of fewer than four complete rounds, run against run (Welch)",
    "outliers": "no run leaves for its time: what is further from the blocks and the trend than 2 robust standard "
    "deviations counts as if it were there (Huber); in a race that looks after every round all count in full",
    "early_stop": "at a look before the last, every verdict must be faster, slower, better, worse or equivalent; "
    "several looks share alpha, a look after every round (sequential) is by a test that is valid at each of them",
    "max_attempts": MAX_ATTEMPTS,
}
AUTO = re.compile(r"auto:(\d+)-(\d+)")
FEWEST_COMPILATIONS = 3  # of an arm on a GPU: fewer show little of how compilations differ
PLAIN = re.compile(r"[\w./-]+")
DEFAULTS: dict[str, Any] = {"name": "race", "track": None, "looks": None, "alpha": ALPHA, "session_id": None}
DEFAULTS |= {"margin": None, "metric": VAL_LOSS, "equivalence_margin_pct": MARGIN_PCT}
DEFAULTS |= {"first_seed": 0, "seed_given": False, "order_seed": 0}
DEFAULTS |= {"on": "time", "why_on": None, "sequential": None, "compilations": 1}
OTHER_WORDS = dict.fromkeys(("reps", "repeats", "runs", "rounds"), "n")


def _num_runs(text: str) -> str | int:
    """Reads n=.  Raises ValueError for what is neither a number nor auto:3-20, or more than MAX_N."""
    typed.checked("n", int(text.removeprefix("auto:").rpartition("-")[2]), Annotated[int, typed.between(0, MAX_N)])
    return text if AUTO.fullmatch(text) else int(text)


# {word: (key in the plan, parser, what it must be)}
SETTINGS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "n": ("n", _num_runs, f"a number of runs up to {MAX_N:,}, or auto:3-20"),
    "compilations": ("compilations", int, "a number of fresh compilations of each arm"),
    "looks": ("looks", lambda text: [int(part) for part in text.split(",")], "numbers of runs, 3,5"),
    "alpha": ("alpha", float, "a number"),
    "margin": ("margin", float, "a number in the unit of the goal's metric"),
    "seed": ("first_seed", int, "a number"),
    "name": ("name", lambda text: typed.checked("name", text, typed.Name), f"a name of {typed.allowed(typed.Name)}"),
    "on": ("on", lambda text: {name: name for name in QUESTIONS}[text], f"one of {', '.join(QUESTIONS)}"),
}
QUESTIONS_OF_TRACK = {
    "time": ("time", "time_to_target"),
    "steps": ("steps_to_target",),
    "metric": ("loss",),
}  # {what a track judges: questions that answer it}
Facts = Mapping[str, Mapping[str, Any]]


def parse_request(arguments: Iterable[str]) -> dict[str, Any]:
    """Returns {"arms": {name: {"overrides", "rev"}}, and the given settings}. Raises ValueError for a wrong word.

    HEAD~1 HEAD is short for A.rev=HEAD~1 B.rev=HEAD.
    """
    arms: dict[str, dict[str, Any]] = {}
    arguments = _with_revisions(list(arguments))
    pythons, common, settings = dict[str, list[str]](), list[str](), dict[str, Any]()
    for argument in arguments:
        key, _, value = argument.partition("=")
        name, dot, part = key.partition(".")
        setting = OTHER_WORDS.get(key.lower(), key.lower())
        if key in SETTINGS:
            settings[SETTINGS[key][0]] = _setting(key, value)
        elif setting in SETTINGS and value and "=" not in value:
            raise ValueError(f"{argument}: write {setting}={value} for {SETTINGS[setting][2]}")
        elif race_folder.ARM.fullmatch(name) and part == "python":
            pythons[name] = [f"script.python={value}"]
        elif race_folder.ARM.fullmatch(name) and (not dot or part == "rev"):
            arm = arms.setdefault(name, {"overrides": [], "rev": None})
            try:
                arm.update({"rev": value} if dot else {"overrides": shlex.split(value)})
            except ValueError as error:
                raise ValueError(f"{argument}: {error}") from None
        elif race_folder.ARM.fullmatch(name):  # else B.goal.num_steps=40 would be read as a setting of all arms
            whole = " ".join([*(arms[name]["overrides"] if name in arms else ()), f"{part}={value}"])
            raise ValueError(f"{argument}: all settings of an arm go into one word: write {name}='{whole}'")
        elif len(name) == 1 and not part:
            raise ValueError(f"{argument}: an arm's name begins with a capital letter: write {name.upper()}='{value}'")
        else:
            common.append(argument)
    if unknown := sorted(pythons.keys() - arms.keys()):
        raise ValueError(f"{unknown[0]}.python: the race has no arm {unknown[0]}: write {unknown[0]}='script=...' too")
    for name, arm in arms.items():
        arm["overrides"] = [*common, *arm["overrides"], *pythons.get(name, [])]
        if arm["rev"] and (root := root_of_script(arm["overrides"])):  # a revision of the script's repository
            own = [argument for argument in arm["overrides"] if not argument.startswith("script.root=")]
            rev = arm["rev"] if PLAIN.fullmatch(arm["rev"]) else f"'{arm['rev']}'"  # quoted for Hydra
            arm |= {"overrides": [*own, f"script.root={root}", f"script.rev={rev}"], "rev": None}
        if seeds := [argument for argument in arm["overrides"] if argument.startswith("seed=")]:
            raise ValueError(f"{name}={seeds[0]}: the race sets the seeds: write seed=N beside the arms to begin at N")
    if sequential := AUTO.fullmatch(str(settings.get("n"))):
        first, last = map(int, sequential.groups())
        settings |= {"n": last, "sequential": {"first": first, "last": last}}
    return {"arms": arms, **settings}


def refuse_choice(arguments: Iterable[str], kind: str) -> None:
    """Raises ValueError for on= and n=auto, which a study and a ladder do not take."""
    if chosen := [argument for argument in arguments if argument.startswith(("on=", "n=auto:"))]:
        raise ValueError(f"{chosen[0]}: a {kind} has its own question, and no n=auto: omit it, or give n={N}")


def _with_revisions(arguments: list[str]) -> list[str]:
    """Returns the words with an arm for each revision: HEAD~1 HEAD -> A.rev=HEAD~1 B.rev=HEAD."""
    revisions = [argument for argument in arguments if "=" not in argument]
    others = [argument for argument in arguments if "=" in argument]
    own = any(race_folder.ARM.fullmatch(argument.partition("=")[0].partition(".")[0]) for argument in others)
    if revisions and (own or len(revisions) < 2):
        why = "write key=value, or A=... for an arm of the race; two revisions alone are arms too: HEAD~1 HEAD"
        raise ValueError(f"{revisions[0]!r}: {why}")
    letters = [chr(ord("A") + number) if number < 26 else f"R{number}" for number in range(len(revisions))]
    return [*others, *(f"{name}.rev={rev}" for name, rev in zip(letters, revisions, strict=True))]


def root_of_script(overrides: Iterable[str]) -> str | None:
    """Returns the repository whose revisions these settings are raced at: a script's script.root, else the user's
    folder; None without a script, for the harness's."""
    settings = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    is_script = any(settings.get(key) for key in ("script", "script.path", "script.module", "script.command"))
    return settings.get("script.root") or ("." if is_script else None)


def _setting(key: str, value: str) -> Any:
    _, read, expected = SETTINGS[key]
    try:
        return read(value)
    except (ValueError, KeyError):
        raise ValueError(f"{key}={value}: it must be {expected}") from None


def make(
    arms: Mapping[str, Any], n: int, made_at: str, ladder: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Returns the plan of arms {name: facts}, the baseline first. Raises ValueError for what cannot be planned.

    n counts the runs of each arm without its discarded warm-up; looks are numbers of runs, the last of them n.
    sequential, {"first", "last"}: a look after every round from the first on, by a verdict that is valid at each; with
    "stop" (bench/compare/searching.py) by the rules of a search, and "warm_ups" are the arms that have one. settings:
    as DEFAULTS; margin is in the unit of the goal's metric, None for the metric's own. ladder: what ./run.sh ladder
    stores of its rungs (bench/plans/ladder/request.py); None for other races, whose plans do not have it.
    """
    assert settings.keys() <= DEFAULTS.keys(), settings
    chosen = DEFAULTS | settings
    if sequential := chosen["sequential"]:
        first, looks = sequential["first"], chosen["looks"]
        if looks:
            raise ValueError(f"looks={','.join(map(str, looks))}: n=auto:{first}-{n} looks after every round: omit it")
        if not (1 if "stop" in sequential else 2) <= first < n:
            raise ValueError(f"n=auto:{first}-{n}: give a first look, 2 or more, and a larger last one: auto:3-20")
        chosen["looks"] = list(range(first, n + 1))
    else:
        chosen["looks"] = sorted({*(chosen["looks"] or ()), n})
    _check(list(arms), n, chosen)
    metric, margin = chosen.pop("metric"), chosen.pop("margin")
    margin = metric.margin or 0.0 if margin is None else margin
    if metric == VAL_LOSS:  # the key that plans have always had
        chosen |= {"loss_margin_nats": margin}
    else:
        chosen |= {"margin": margin, "metric": [metric.name, metric.unit, metric.direction]}
    plan = {"schema_version": SCHEMA_VERSION, "made_at": made_at, "baseline": next(iter(arms)), "n": n} | chosen
    plan |= {"arms": arms, "rules": RULES} | ({} if ladder is None else {"ladder": ladder})
    seeds = {key: chosen[key] for key in ("first_seed", "order_seed", "compilations")}
    plan["order"] = order(list(arms), n, **seeds, warm_ups=(chosen["sequential"] or {}).get("warm_ups"))
    stamp = made_at.replace("-", "").replace(":", "").split(".")[0].rstrip("Z")
    return {"race_id": f"{stamp}Z-{chosen['name']}-{sha256(plan)[:8]}", **plan}


def fewest_compilations(n: int, is_sequential: bool) -> int:
    """Returns the default number of fresh compilations of each arm on a GPU: n if a race may end at each round.

    Else FEWEST_COMPILATIONS, or the next number that divides n.
    """
    divisors = [number for number in range(FEWEST_COMPILATIONS, n) if n % number == 0]
    return n if is_sequential or not divisors else divisors[0]


def _check(arms: list[str], n: int, chosen: Mapping[str, Any]) -> None:
    looks, alpha, margin, first_seed = (chosen[key] for key in ("looks", "alpha", "margin", "first_seed"))
    usual = f"{VAL_LOSS.margin:g} nats of val_loss"
    m = chosen["compilations"]
    near = m * max(1, round(n / m)) if m > 0 else n
    give, least = "give numbers of runs from", 1 if "stop" in (chosen["sequential"] or {}) else 2
    if len(arms) < 2:
        raise ValueError(f"{', '.join(arms) or 'no arm'}: a race needs two arms or more: A=... B=...")
    for setting, value, fits, remedy in (
        ("n", n, n >= 2, f"one run has no spread: use 2 or more, usually {N}"),
        ("compilations", m, m > 0 and n % m == 0, f"n={n} does not divide into {m} equal groups: use n={near}"),
        ("looks", ",".join(map(str, looks)), looks[0] >= least and looks[-1] == n, f"{give} {least} to n={n}"),
        ("alpha", alpha, 0 < alpha < 0.5, f"use a probability below 0.5, usually {ALPHA:g}"),
        ("margin", margin, margin is None or margin > 0, f"use a number above 0, usually {usual}"),
        ("seed", first_seed, first_seed >= 0, "use 0 or more"),
    ):
        if not fits:
            raise ValueError(f"{setting}={value}: {remedy}")


def order(
    names: list[str],
    n: int,
    first_seed: int = 0,
    order_seed: int = 0,
    compilations: int = 1,
    warm_ups: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Returns [{"arm", "seed", "discarded", "compilation"}]: a warm-up per arm, then blocks of four rounds, the last of
    which may be cut short. compilation, from 0: which of its arm's equal groups of consecutive rounds a run is in.
    warm_ups: the arms that have one; None: all.

    A block is a random order s of the arms and its reverse r: s r r s or s s r r, by chance. So each arm of a pair is
    ahead of the other equally often, in odd and in even rounds: a linear drift, and with two arms a disturbance of
    every fourth run, affects both alike. The k-th runs of all arms are one round and share a seed, so that a change
    that leaves the losses alone shows bit for bit.
    """
    chance, rounds = random.Random(order_seed), list[list[str]]()
    while len(rounds) < n:
        arms, steps = chance.sample(names, len(names)), chance.choice(BLOCKS)
        rounds += [arms[::step] for step in (BLOCKS[0][:2] if n - len(rounds) == 2 else steps)]
    slots = [(arm, 0, True) for arm in chance.sample(names, len(names)) if warm_ups is None or arm in warm_ups]
    slots += [(arm, number, False) for number, arms in enumerate(rounds[:n]) for arm in arms]
    return [
        {"arm": arm, "seed": first_seed + number, "discarded": discarded, "compilation": number * compilations // n}
        for arm, number, discarded in slots
    ]


def sha256(plan: Mapping[str, Any]) -> str:
    """Returns the hash of the plan's canonical text: sorted keys, no spaces."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def look_after(plan: Mapping[str, Any], position: int) -> int | None:
    """Returns the planned look due when the run at this position has ended, as its number of runs per arm, or None."""
    started = dict.fromkeys(plan["arms"], 0)
    for slot in plan["order"][: position + 1]:
        started[slot["arm"]] += not slot["discarded"]
    fewest = min(started.values())
    is_due = fewest == max(started.values()) and fewest in plan["looks"] and not plan["order"][position]["discarded"]
    return fewest if is_due else None


def question_of(facts: Facts, judged: str) -> tuple[str, str]:
    """Returns (one of QUESTIONS, why) if on= names none. judged: what the track judges, time, steps or metric.

    facts: those of bench/plans/race/arm_process.py, the baseline first.
    """
    if judged == "steps":
        return "steps_to_target", "the track judges steps"
    if judged == "metric":
        return "loss", "the track judges its metric"
    if any((arm.get("row") or {}).get("budget") for arm in facts.values()):
        return "loss", "every run has the same budget"
    first, *others = [arm.get("changes_losses") or {} for arm in facts.values()]  # {}: an older revision
    differing = [name for name in first if any(changes and changes[name] != first[name] for changes in others)]
    has_target = not any(_lacks_target(facts))
    if unequal := next(_unequal(facts), None):
        return ("time_to_target" if has_target else "time"), unequal
    if not differing:
        one_code = len({arm["source_sha256"] for arm in facts.values()}) == 1
        return "time", "no setting that differs changes losses" if one_code else "the arms differ in code"
    why = f"the arms differ in {' and '.join(differing)}"
    if has_target and all(arm["row"]["stop_at_target"] for arm in facts.values()):
        return "time_to_target", f"{why}, and every run ends at the target"
    return "loss", why


def question_sentence(plan: Mapping[str, Any]) -> str:
    """Returns the question of a plan, and the reason for it if the user did not choose it."""
    on, why = plan["on"], plan["why_on"]
    other = "loss" if on == "time" else "time"
    return QUESTIONS[on] + (f", because {why}; on={other} compares {other} instead" if why else "")


def by_arms(deviations: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns {"A is", "A and B are", "all arms are": what these deviate in} of {arm: what it deviates in}."""
    by_arms: dict[str, list[str]] = {}
    for deviation in dict.fromkeys(text for texts in deviations.values() for text in texts):
        names = [name for name, texts in deviations.items() if deviation in texts]
        who = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
        by_arms.setdefault("all arms are" if len(names) == len(deviations) else who, []).append(deviation)
    return by_arms


def refuse_unanswerable(on: str, facts: Facts) -> None:
    """Raises ValueError for a question that these arms can never answer."""
    if on.endswith("to_target") and (lacking := next(_lacks_target(facts), None)):
        raise ValueError(f"on={on}: {lacking}: give goal.target_val_loss=LOSS beside the arms, or on=loss")
    has_budget = all((arm.get("row") or {}).get("budget") for arm in facts.values())
    if on == "loss" and not has_budget:
        if unequal := next(_unequal(facts), None):
            remedy = "give them the same, or goal.target_val_loss=LOSS and on=time_to_target"
            raise ValueError(f"on=loss: {unequal}, and losses are compared after equal training: {remedy}")
        if ends := [name for name, arm in facts.items() if (arm.get("row") or {}).get("stop_at_target")]:
            why = f"runs of {ends[0]} end at their target, whatever they could reach"
            raise ValueError(f"on=loss: {why}: give goal.stop_at_target=false, or on=time_to_target")


def refuse_unequal_ends(facts: Facts) -> None:
    """Raises ValueError if arms whose runs end at their target validate at different steps: the coarser ends later."""
    every = {name: arm["ends_every_steps"] for name, arm in facts.items() if arm.get("ends_every_steps")}
    if len(set(every.values())) > 1:
        grids = ", ".join(f"every {num_steps} steps in {name}" for name, num_steps in every.items())
        why = f"runs end at the first validation that reaches the target, and the arms validate {grids}"
        raise ValueError(f"{why}: give all the same goal.val_every_steps")


def _lacks_target(facts: Facts) -> Iterator[str]:
    """Yields why the arms have no target in common, or nothing."""
    targets = {name: (arm.get("row") or {}).get("target") for name, arm in facts.items()}
    for name, target in targets.items():
        if target is None:
            yield f"{name} has no target loss"
    if len(set(targets.values())) > 1:
        yield f"the arms have different targets ({', '.join(f'{loss} in {name}' for name, loss in targets.items())})"


def _unequal(facts: Facts) -> Iterator[str]:
    """Yields a sentence for each amount of training in which the arms differ. An unknown amount differs from none."""
    for column, _, unit in AMOUNTS:
        amounts = {name: (arm.get("row") or {}).get(column) for name, arm in facts.items()}
        if len({amount for amount in amounts.values() if amount is not None}) > 1:
            yield f"the arms take different numbers of {unit} ({', '.join(map(str, amounts.values()))})"
