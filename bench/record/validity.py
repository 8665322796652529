"""Decides whether a finished run is valid, suspect or invalid, and why.

./run.sh verify recomputes this from the record, including what follows from the referee's own loss
(bench/training/referee_loss.py; run.json["referee"]["loss"]).  docs/record.md has the arithmetic.
"""

import math
from collections.abc import Iterator

from bench.base import stats
from bench.record import outside_clock
from bench.record.shape import Facts, Section, world_sizes

NOT_COMPLETE = "the run did not complete"
FILES = "files"  # instrument of doubts about what a user's own model or optimizer read
BUSY = "other programs used"  # how the doubt about a busy machine begins
MAX_FOREIGN_CPU_CORES = 0.1  # load by other programs during a CPU run; above it, steps take visibly longer (assumed)
# By how much two ways of computing the mean loss of some thousand tokens may differ: (eager, compiled).  Measured in
# eager mode for every rung and model at tiny sizes: 1.4e-6 in both dtypes; for gpt2 compiled for a CPU: 4e-7 and 9e-6.
# A kernel that fuses the cap of the logits with the loss skips a rounding to bfloat16, of up to 0.06 for logits above
# 16: in a simulation of logits like those of a record, the mean changes by 1.5e-3.  GPUs are assumed, not measured.
BOUND_NATS = {"float32": (2e-5, 1e-4), "bfloat16": (1e-3, 3e-3)}
BELOW_ZERO = "val_loss {:.6f} is below 0, as no loss in nats per token is: name another metric as goal.metric"
START_FRAC = 0.95  # a loss at step 0 below this fraction of ln V was trained before the clock, or knows the data
# The loss of a held-out slice differs, as its text does.  Of cpu_nano's 130 batches of validation data, the mean of 1,
# 2, 4 and 8 held-out ones was at most 2.1, 3.0, 3.2 and 2.9 standard errors above the validation in 20,000 draws each.
HELD_OUT_SE = 6.0
HELD_OUT_FRAC = 0.05  # of the claimed loss, allowed in addition
HELD_OUT_BATCHES, HELD_OUT_TOKENS = 2, 2048  # with fewer, the check is skipped


def validity(run: Facts) -> tuple[str, list[str]]:
    """Returns ("valid", "suspect" or "invalid", reasons) for the record of a run that has ended."""
    if run["status"] != "complete":
        return "invalid", [NOT_COMPLETE]
    if audit := run.get("audit"):
        return "invalid", [f"it is an audit run of {audit['run']} on substituted data, not a measurement"]
    doubts = [doubt["doubt"] for doubt in run.get("doubts", ())]
    if why := _fault_of_code(run):
        return "invalid", [why, *doubts]
    val_loss, floor_nats = run["metrics"]["val_loss"], run["data"]["floor_nats"]
    sees, is_below = "the targets leak into the validation", False
    if None not in (floor_nats, val_loss) and val_loss < floor_nats:
        from bench.data.sources.markov import floor_slack_nats  # imports numpy, which other launchers do not need

        is_below = val_loss < floor_nats - floor_slack_nats(run["goal"]["val_tokens"])
    if is_below:
        return "invalid", [f"val_loss {val_loss:.6f} is below the data's floor {floor_nats:.6f}: {sees}"]
    if val_loss is not None and val_loss < 0:
        return "invalid", [BELOW_ZERO.format(val_loss), *doubts]
    implausible = (run.get("goal") or {}).get("implausible_val_loss")
    if implausible is not None and val_loss < implausible:
        reason = f"val_loss {val_loss:.6f} is below {implausible:g}, which nothing trained on this track can reach"
        return "invalid", [f"{reason}: {sees} (track.rules.implausible_val_loss)", *doubts]
    if run["metrics"].get("train_s") == 0 and run["metrics"]["num_steps"]:
        reason = f"its clock did not advance: {run['metrics']['num_steps']} steps in 0 s"
        return "invalid", [f"{reason}, so that no time of it was measured", *doubts]
    if wrong := [*_faults_of_model(run), *faults_of_run(run)[0]]:
        return "invalid", [*wrong, *doubts]
    doubts += contestant_doubts(run)
    if beside := run.get("beside"):
        others = beside["num_slots"] - 1
        reason = f"up to {others} other run{'s' * (others > 1)} of its sweep ran beside it"
        doubts.append(f"{reason}: its loss counts, its times are not those of a machine of its own")
    if why := broken_time(run):
        doubts.append(why)
    if is_busy(run):
        foreign = run["measured"]["foreign_cpu_cores"]
        named = [f"{program['name']} {program['cpu_cores']:.2f}" for program in run.get("foreign_programs") or ()]
        reason = f"{BUSY} {foreign:.2f} CPU cores during the run (limit {MAX_FOREIGN_CPU_CORES})"
        doubts.append(f"{reason}: {', '.join(named)}" if named else reason)
    elif run["hardware"]["device"] == "cpu" and run["measured"].get("foreign_cpu_cores") is None:
        doubts.append("how busy other programs kept the CPU is unknown: the system does not say")
    return ("suspect", doubts) if doubts else ("valid", [])


def broken_time(run: Facts) -> str | None:
    """Returns why the time of a complete run does not count: its ranks changed, or its track forbids interruptions."""
    if len(set(sizes := world_sizes(run))) > 1:
        return f"it was trained with {', then '.join(map(str, sizes))} ranks: its loss counts, its time does not"
    segments, num_checkpoints = run.get("segments") or (), run["measured"].get("num_checkpoints") or 0
    if (run.get("goal") or {}).get("may_resume") or not (segments or num_checkpoints):
        return None
    reason = f"its clock paused for {num_checkpoints} checkpoints"
    if segments:
        reason = f"it was trained in {len(segments)} segments"
    return f"{reason}: its loss counts, its time is not one without a break (track.rules.may_resume)"


def is_busy(run: Facts) -> bool:
    """Whether other programs used so much of the CPU that the time of a CPU run does not count."""
    foreign = run["measured"].get("foreign_cpu_cores")
    return run["hardware"]["device"] == "cpu" and foreign is not None and round(foreign, 2) > MAX_FOREIGN_CPU_CORES


def contestant_doubts(run: Facts) -> list[str]:
    """Returns the referee's findings about the contestant that make a complete run suspect."""
    causal, evaluation = _checks(run)
    start = (run.get("referee") or {}).get("causality", {}).get("start", {})
    whys = {check["why"]: when for check, when in ((causal, "the run"), (start, "the warm-up")) if check.get("why")}
    unchecked = "whether the model sees what it must predict could not be checked"
    doubts = [f"{unchecked} at the end of {when}: {why}" for why, when in whys.items() if run.get("track") != "free"]
    if evaluation.get("why"):
        doubts.append(f"whether evaluation changes the model could not be checked: {evaluation['why']}")
    if evaluation.get("changed"):
        changed = ", ".join(evaluation["changed"])
        doubts.append(f"evaluating the model changes state that outlives it: {changed}")
    return [*faults_of_run(run)[1], *doubts]


def referee_findings(run: Facts) -> list[str]:
    """Returns all findings of the referee about a complete run, as sentences."""
    clock = (run["referee"] or {}).get("clock")
    sentences = [*_faults_of_model(run), *faults_of_run(run)[0], *contestant_doubts(run)]
    sentences += [sentence for _, sentence in outside_clock.doubts(clock, is_busy(run))] if clock is not None else []
    return sentences + [why for why in [_fault_of_code(run)] if why]


def _fault_of_code(run: Facts) -> str | None:
    """Returns why the code in the record is not what its ranks imported; None if it is, or if nothing is recorded."""
    imported = (run.get("referee") or {}).get("code")
    if imported is None:
        return None
    if imported["elsewhere"]:
        names = ", ".join(imported["elsewhere"])
        remedy = "name your module in an import statement to include it"
        return f"{names}: not imported from the copy of the code that this record holds ({remedy})"
    if imported["copies"] != [run["code"].get("copy")]:
        names = ", ".join(imported["copies"])
        return f"its ranks imported code copy {names}, but this record holds {run['code'].get('copy')}"
    return None


def _faults_of_model(run: Facts) -> Iterator[str]:
    """Yields the referee's findings after the last validation that make all numbers of the run invalid."""
    causal, evaluation = _checks(run)
    if causal.get("found") == "not causal":
        yield f"after the last step, {causal['why']}"
    if not evaluation or evaluation["why"]:
        return
    first_nats, repeated_nats = evaluation["first_nats"], evaluation["repeated_nats"]
    if None in (first_nats, repeated_nats):  # JSON has null for nan and inf
        yield f"the loss of the same tokens was {first_nats} in the last validation and {repeated_nats} when repeated"
    elif not abs(repeated_nats - first_nats) <= evaluation["rounding_nats"]:
        numbers = f"{first_nats:.7f} in the last validation and {repeated_nats:.7f} when repeated"
        yield f"the loss of the same tokens was {numbers} (rounding: {evaluation['rounding_nats']:.1g})"
    if evaluation["trained"]:
        yield f"evaluating the model changes its weights or its optimizer: {', '.join(evaluation['trained'])}"


def _checks(run: Facts) -> tuple[Section, Section]:
    """Returns the referee's findings at the end of the run, (causality, evaluation), both empty in older records."""
    referee = run.get("referee") or {}
    return referee.get("causality", {}).get("end", {}), referee.get("evaluation", {})


# ---- the referee's own loss


def bound_nats(dtype: str, is_compiled: bool) -> float:
    """Returns by how much the loss of forward() may differ from the one that the referee computes from the logits."""
    return BOUND_NATS[dtype][is_compiled]


def is_trained(first_nats: float | None, vocab_size: int | None) -> bool:
    """Whether a validation loss at step 0 is lower than that of an untrained model."""
    return first_nats is not None and vocab_size is not None and first_nats < START_FRAC * math.log(vocab_size)


def start_doubt(first_nats: float, vocab_size: int) -> str:
    """Returns the doubt about a run for which is_trained() is true."""
    least = f"{START_FRAC:g} * ln({vocab_size}) = {START_FRAC * math.log(vocab_size):.3f}"
    loss = f"its loss at step 0 is already {first_nats:.3f}, but an untrained model's is at least {least}"
    return f"{loss}: it was trained before its clock started, or has seen the data"


def faults_of_run(run: Facts) -> tuple[list[str], list[str]]:
    """Returns the reasons for which a complete record is invalid, and those for which it is suspect, as sentences."""
    facts = (run.get("referee") or {}).get("loss")
    if not facts:
        return [], []  # a script, or a record that is older than this check
    if facts.get("not_checked"):
        return [], [f"its loss was not checked: {facts['not_checked']}"] if run["track"] != "free" else []
    invalid, doubts = faults(facts)
    kept, recorded = facts["val_loss"], run["metrics"]["val_loss"]
    if None not in (kept, recorded) and not math.isclose(kept, recorded, rel_tol=1e-6):
        invalid.append(f"its val_loss is {recorded:.6f}, but the validation that the referee checked gave {kept:.6f}")
    return invalid, doubts


def faults(facts: Section) -> tuple[list[str], list[str]]:
    """Returns what faults_of_run() does, from run.json["referee"]["loss"] of a run whose loss was checked."""
    vocab_size, bound = facts["vocab_size"], bound_nats(facts["dtype"], facts["is_compiled"])
    wrong = [_mismatch(checked, f"on the validation at step {checked['step']}", bound) for checked in facts["checked"]]
    random_tokens, held_out = facts["random_tokens"], facts["held_out"]
    wrong += [_mismatch(random_tokens, "on random tokens", bound), _impossible(random_tokens, vocab_size)]
    doubts = []
    if not held_out.get("not_checked"):
        wrong.append(_mismatch(held_out, "on a held-out slice of the validation data", bound))
        doubts.append(too_good(facts, held_out))
    doubts += [_unknown(random_tokens, "of random tokens"), _unknown(held_out, "of a held-out slice")]
    first_nats = facts.get("val_loss_at_start")  # the mean over all tokens, as that of a few batches varies too much
    if first_nats is not None and is_trained(first_nats, vocab_size):
        doubts.append(start_doubt(first_nats, vocab_size))
    return list(filter(None, wrong)), list(filter(None, doubts))


def _mismatch(checked: Section, where: str, bound: float) -> str | None:
    claimed, own = checked["claimed_nats"], checked["from_logits_nats"]
    moved = checked.get("moved_nats", 0.0)
    if None in (claimed, own):
        return None if claimed is own else f"the loss {where} is {claimed} by forward() and {own} from its logits"
    if abs(claimed - own) > bound:
        both = f"forward() gives {claimed:.6f} nats {where}, but its logits give {own:.6f}"
        return f"{both} (tolerance {bound:g}): val_loss is not this model's loss"
    if moved is None or moved > bound:
        change = f"the loss from logits {where} moved by {moved} nats"
        return f"{change} once forward() had seen the targets (limit {bound:g})"
    return None


def _unknown(checked: Section, where: str) -> str | None:
    """Returns why a check on unseen tokens is not possible: the model's loss there is not a number; else None."""
    is_number = checked.get("claimed_nats") is not None or checked.get("from_logits_nats") is not None
    if checked.get("not_checked") or is_number:
        return None
    return f"its loss {where} is not a number"


def _impossible(checked: Section, vocab_size: int) -> str | None:
    """Returns a sentence if the loss on uniformly random tokens is too low for a causal model: stats.log_e_value()."""
    losses = [value for value in (checked["claimed_nats"], checked["from_logits_nats"]) if value is not None]
    num_tokens, least = checked["num_tokens"], stats.least_nats(math.log(vocab_size), checked["num_tokens"])
    if not losses or stats.log_e_value(math.log(vocab_size), min(losses), num_tokens) < stats.MIN_LOG_E_VALUE:
        return None
    loss = f"its loss on {num_tokens} random tokens is {min(losses):.4f} (standard error {checked['se_nats']:.4f})"
    return f"{loss}, and a causal model is below {least:.4f} at most once in a million: future tokens or targets leak"


def too_good(facts: Section, held_out: Section) -> str | None:
    """Returns a sentence if the held-out slice's loss is higher than chance allows; facts: val_loss, validation."""
    claimed, other = facts["val_loss"], held_out["from_logits_nats"]
    is_small = held_out["num_batches"] < HELD_OUT_BATCHES or held_out["num_tokens"] < HELD_OUT_TOKENS
    if None in (claimed, other) or is_small:
        return None
    spread = facts["validation"]
    sd_nats = max(spread["sd_nats"] or 0.0, held_out["sd_of_batches_nats"] or 0.0)
    se_nats = sd_nats * math.sqrt(1 / max(1, spread["num_batches"]) + 1 / held_out["num_batches"])
    most = HELD_OUT_SE * se_nats + HELD_OUT_FRAC * claimed
    if other - claimed <= most:
        return None
    both = f"its val_loss is {claimed:.4f}, but its loss on a held-out slice of the same data is {other:.4f}"
    return f"{both}, {other - claimed:.4f} higher (limit {most:.4f}): it has seen the validation data"
