"""Whether a finished run counts: valid, suspect or invalid, and why."""

from bench.record import loss_rules, outside_clock

MAX_FOREIGN_CPU_CORES = 0.1  # other programs' load beside a CPU run; above it steps stretch visibly (assumed)


def validity(run: dict) -> tuple[str, list[str]]:
    """A finished record -> ("valid" | "suspect" | "invalid", reasons)."""
    if run["status"] != "complete":
        return "invalid", ["the run did not complete"]
    if audit := run.get("audit"):
        return "invalid", [f"it is an audit run of {audit['run']} on substituted data, not a measurement"]
    doubts = [doubt["doubt"] for doubt in run.get("doubts", ())]
    if why := _of_other_code(run):
        return "invalid", [why, *doubts]
    val_loss, floor_nats = run["metrics"]["val_loss"], run["data"]["floor_nats"]
    sees = "the targets leak into the validation"
    if None not in (floor_nats, val_loss) and val_loss < floor_nats - _slack_nats(run):
        return "invalid", [f"val_loss {val_loss:.6f} is below the data's floor {floor_nats:.6f}: {sees}"]
    implausible = (run.get("goal") or {}).get("implausible_val_loss")
    if implausible is not None and val_loss < implausible:
        words = f"val_loss {val_loss:.6f} is below {implausible:g}, which nothing trained on this track can reach"
        return "invalid", [f"{words}: {sees} (track.rules.implausible_val_loss)", *doubts]
    if run["metrics"].get("train_s") == 0 and run["metrics"]["num_steps"]:
        words = f"its clock did not advance: {run['metrics']['num_steps']} steps in 0 s"
        return "invalid", [f"{words}, so that no time of it was measured", *doubts]
    if wrong := [*_faults_of_model(run), *loss_rules.faults_of_run(run)[0]]:
        return "invalid", [*wrong, *doubts]
    doubts += contestant_doubts(run)
    if beside := run.get("beside"):
        others = beside["num_slots"] - 1
        words = f"up to {others} other run{'s' * (others > 1)} of its sweep ran beside it"
        doubts.append(f"{words}: its loss counts, its times are not those of a machine of its own")
    foreign = run["measured"].get("foreign_cpu_cores")
    on_cpu = run["hardware"]["device"] == "cpu"
    if on_cpu and foreign is None:
        doubts.append("how busy other programs kept the CPU is unknown: the system does not say")
    elif on_cpu and round(foreign, 2) > MAX_FOREIGN_CPU_CORES:
        doubts.append(f"other programs used {foreign:.2f} CPU cores during the run (limit {MAX_FOREIGN_CPU_CORES})")
    return ("suspect", doubts) if doubts else ("valid", [])


def contestant_doubts(run: dict) -> list[str]:
    """What the referee found out about the model itself that makes a complete run suspect."""
    return [*loss_rules.faults_of_run(run)[1], *_model_doubts(run)]


def of_referee(run: dict) -> list[str]:
    """All that the rules say of what the referee found in a complete run."""
    clock = (run["referee"] or {}).get("clock")
    said = [*_faults_of_model(run), *loss_rules.faults_of_run(run)[0], *contestant_doubts(run)]
    said += [words for _, words in outside_clock.doubts(clock)] if clock is not None else []
    return said + [why for why in [_of_other_code(run)] if why]


def _of_other_code(run):
    """Why the code that the record holds is not what its ranks imported; None: it is, or the record does not say."""
    found = (run.get("referee") or {}).get("code")
    if found is None:
        return None
    if found["elsewhere"]:
        names = ", ".join(found["elsewhere"])
        remedy = "name your module in an import statement to include it"
        return f"{names}: not imported from the copy of the code that this record holds ({remedy})"
    if found["copies"] != [run["code"].get("copy")]:
        names = ", ".join(found["copies"])
        return f"its ranks imported code copy {names}, but this record holds {run['code'].get('copy')}"
    return None


def _faults_of_model(run):
    """What the referee saw the model do after its last validation that no number of it survives."""
    causal, evaluation = _checks(run)
    if causal.get("found") == "not causal":
        yield f"after the last step, {causal['why']}"
    if not evaluation or evaluation["why"]:
        return
    first_nats, repeated_nats = evaluation["first_nats"], evaluation["repeated_nats"]
    if None in (first_nats, repeated_nats):  # as JSON has what is no number
        yield f"the loss of the same tokens was {first_nats} in the last validation and {repeated_nats} when repeated"
    elif not abs(repeated_nats - first_nats) <= evaluation["rounding_nats"]:
        numbers = f"{first_nats:.7f} in the last validation and {repeated_nats:.7f} when repeated"
        yield f"the loss of the same tokens was {numbers} (rounding: {evaluation['rounding_nats']:.1g})"
    if evaluation["trained"]:
        yield f"evaluating the model changes its weights or its optimizer: {', '.join(evaluation['trained'])}"


def _model_doubts(run):
    causal, evaluation = _checks(run)
    start = (run.get("referee") or {}).get("causality", {}).get("start", {})
    whys = {found["why"]: when for found, when in ((causal, "the run"), (start, "the warm-up")) if found.get("why")}
    if run.get("track") != "free":
        for why, when in whys.items():
            yield f"whether the model sees what it must predict could not be checked at the end of {when}: {why}"
    if evaluation.get("why"):
        yield f"whether evaluation changes the model could not be checked: {evaluation['why']}"
    if evaluation.get("changed"):
        yield f"evaluating the model changes state that outlives it: {', '.join(evaluation['changed'])}"


def _checks(run):
    """What the referee found at the end of the run: (of causality, of evaluation); older records have neither."""
    referee = run.get("referee") or {}
    return referee.get("causality", {}).get("end", {}), referee.get("evaluation", {})


def _slack_nats(run):
    from bench.data.sources.markov import floor_slack_nats  # numpy, which a launcher of other data does not need

    return floor_slack_nats(run["goal"]["val_tokens"])
