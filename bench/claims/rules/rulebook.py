"""The rules by which a claim (bench/claims/claim.py) is judged.

Each rule is a function that takes the claim and returns (passed, evidence); passed is None if the rule does not apply.
The numbers and names of a track are data in conf/track/.
"""

import functools
from collections.abc import Callable
from typing import TypedDict

from bench.claims.claim import NOT_KNOWN, Claim, Judged
from bench.claims.rules import races, records, runs
from bench.record import verification


class Result(TypedDict):
    rule: str  # name of the rule, a sentence
    passed: bool | None  # None if the rule does not apply, or the answer is unknown
    evidence: str
    known: bool  # False if the runs are logs that do not show it


RULES: list[Callable[[Claim], Judged]] = [
    records.the_ledger_is_whole,
    records.every_record_matches_the_ledger,
    records.every_run_completed,
    records.git_identified_the_code_of_every_run,
    records.the_contestant_was_audited,
    runs.nothing_that_the_track_fixes_was_changed,
    runs.the_hardware_is_that_of_the_track,
    runs.the_data_are_those_of_the_track,
    runs.only_what_may_be_untimed_was_untimed,
    runs.no_forbidden_instrument_ran,
    runs.only_allowed_flags_of_torch_compile_were_set,
    runs.the_runs_share_config_and_code,
    runs.the_runs_share_one_setting,
    runs.every_run_has_its_own_seed,
    runs.there_are_enough_runs,
    runs.all_claimed_runs_are_present,
    runs.no_run_was_left_out,
    runs.the_target_is_reached,
    runs.every_run_has_a_score_within_its_budget,
    runs.the_artifact_is_small_enough,
    races.the_plan_was_made_first,
    races.the_plan_is_as_strict_as_the_track,
    races.the_runs_follow_the_plan,
    races.there_was_no_unplanned_look,
    races.few_runs_were_interrupted,
    races.it_is_faster_than_its_baseline,
    races.the_table_matches_the_runs,
    records.every_record_is_internally_consistent,  # last: it reads every file of every run
]


# rules that need the ledger, config.yaml or the referee's observations
NOT_IN_LOGS = {
    records.the_ledger_is_whole,
    records.every_record_matches_the_ledger,
    records.git_identified_the_code_of_every_run,
    records.the_contestant_was_audited,
    runs.nothing_that_the_track_fixes_was_changed,
    runs.the_data_are_those_of_the_track,
    runs.no_forbidden_instrument_ran,
    runs.only_allowed_flags_of_torch_compile_were_set,
    runs.no_run_was_left_out,
}


def check(claim: Claim, replayed: bool = False) -> list[Result]:
    """Applies every rule, even after a failure; also that of replays if replayed, and that of --against if given."""
    on_request = [records.every_run_was_reproduced] * replayed
    on_request += [runs.it_is_better_than_the_other] * (claim.against is not None)
    results: list[Result] = []
    for rule in RULES + on_request:
        if claim.is_of_logs and rule in NOT_IN_LOGS:
            rule = functools.wraps(rule)(lambda claim: (None, NOT_KNOWN))
        ((name, passed, evidence),) = verification.applied([rule], claim)
        is_known = not (passed is None and evidence.startswith(NOT_KNOWN))
        results.append({"rule": name, "passed": passed, "evidence": evidence, "known": is_known})
    return results


def first_failed(claim: Claim) -> str | None:
    """Returns the name of the first rule that fails, without applying later ones, or None if none fails."""
    return next((name for name, passed, _ in verification.applied(RULES, claim) if passed is False), None)
