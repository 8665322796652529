"""Rules about each record alone, and about the ledger that has it."""

from bench.claims.rules.evidence import of_each
from bench.record import certificates, ledger, verification
from bench.terminal.text_table import counted

COMPLETE = verification.is_complete.__name__.replace("_", " ")  # a rule of its own: another arm's run may have failed


def every_record_is_true_to_itself(claim):
    """Each run passes ./run.sh verify: no byte of its folder was changed, and its numbers follow from its facts."""

    def fault_of(run):
        rules = verification.report(run.folder)["rules"]
        failed = [rule for rule in rules if not rule["passed"] and rule["rule"] != COMPLETE]
        return "; ".join(f"{rule['rule']}: {rule['evidence']}" for rule in failed[:2]) or None

    return of_each(claim.all_runs, fault_of, f"{counted(len(claim.all_runs), 'record')} verified")


def every_run_came_out_again(claim):
    """Replays that this machine made reproduce each claimed run, computed again from both steps.csv."""
    from bench.replay import recomputed  # numpy, which a judge without --replayed does not need

    made = []

    def fault_of(run):
        try:
            made.append(recomputed.of_record(run.folder))
        except ValueError as error:
            return str(error)
        return None if made[-1].holds else f"{made[-1].outcome}: {made[-1].why}"

    faults = of_each(claim.runs, fault_of, "")
    words = certificates.of_several(f"{one.outcome} (time {one.time.word})" for one in made if one.time)
    return faults if not faults[0] else (True, f"computed again from replays made here: {words}")


def the_ledger_is_whole(claim):
    """No line of the ledger was changed or removed."""
    faults, lines = claim.ledger.faults, claim.ledger.lines
    if not lines:
        return False, "there is no ledger: copy ledger.jsonl of the results folder to these runs"
    return not faults, "; ".join(faults[:3]) or f"{len(lines)} lines, each names the one before it"


def every_record_is_that_of_the_ledger(claim):
    """The ledger has the start and the end of each run, and its run.json is the one that was written then."""
    names = {line.get("sha256") for line in claim.ledger.lines}

    def fault_of(run):
        known = claim.ledger.runs.get(run.name)
        if known is None:
            return "it is not in the ledger"
        if run.record.get("ledger_sha256") not in names:
            return "the ledger's line of its start is not the one that the run names"
        if known["end"] is None:
            return "its end is not in the ledger"
        sha256 = ledger.sha256_of(run.folder / "run.json")
        return None if sha256 == known["end"]["run_json_sha256"] else "run.json was changed after the run"

    return of_each(claim.all_runs, fault_of, f"start and end of {counted(len(claim.all_runs), 'run')}")


def every_run_completed(claim):
    """A run that failed or is invalid is lost; a suspect one keeps its loss, and its time does not count."""

    def fault_of(run):
        if run.record["status"] != "complete":
            return f"{run.record['status']}, {(run.record['failure'] or {}).get('kind')}"
        return f"invalid, {'; '.join(run.record['validity_reasons'])}" if run.record["validity"] == "invalid" else None

    return of_each(claim.runs, fault_of, f"{len(claim.runs)} complete")
