"""Rules about each record alone, and about the ledger that has it."""

from bench.claims.rules.evidence import of_each
from bench.record import audits, certificates, ledger, verification
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
    """./run.sh replay has certified each claimed run: identical, equal within rounding, or statistically reproduced."""

    def fault_of(run):
        result = certificates.read(run.folder)
        if result is None:
            return f"has no certificate: ./run.sh replay {run.name}"
        return None if result["outcome"] in certificates.HOLDS else f"{result['outcome']}: {result['why']}"

    return of_each(claim.runs, fault_of, f"{counted(len(claim.runs), 'certificate')}")


def no_audit_failed(claim):
    """Where a run of the contestant was audited (./run.sh audit), no counterfactual audit failed."""
    found = {run.name: audits.read(run.folder) for run in claim.runs}
    found = {name: audit for name, audit in found.items() if audit is not None}
    if not found:
        return None, f"not audited: ./run.sh audit {claim.runs[0].name}" if claim.runs else "no run"
    failed = [
        f"{name}: {one['kind'].replace('_', ' ')}: {one['why']}"
        for name, audit in found.items()
        for one in audit["audits"]
        if one["outcome"] == audits.FAILED
    ]
    outcomes = ", ".join(f"{name} {audit['outcome']}" for name, audit in found.items())
    return not failed, "; ".join(failed) or outcomes


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
