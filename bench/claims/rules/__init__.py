"""When a claim holds: each rule a function of the claim (bench/claims/claim.py) -> (passed, evidence).

passed None: the rule does not apply.  A track's own numbers and names are data in conf/track/; here is what is done with
them.
"""

from bench.claims.rules import races, records, track
from bench.claims.rules import runs as together

RULES = [
    records.every_record_is_true_to_itself,
    records.the_ledger_is_whole,
    records.every_record_is_the_one_of_the_ledger,
    records.every_run_completed,
    track.nothing_that_the_track_fixes_was_changed,
    track.the_hardware_is_that_of_the_track,
    track.the_data_are_those_of_the_track,
    track.only_what_may_be_untimed_was_untimed,
    track.no_forbidden_instrument_ran,
    together.the_runs_are_repeats_of_one_thing,
    together.the_runs_are_of_one_setting,
    together.every_run_has_its_own_seed,
    together.there_are_enough_runs,
    together.the_claimed_runs_are_all_there,
    together.no_run_was_dropped,
    together.the_target_is_reached,
    races.the_plan_was_made_first,
    races.it_was_raced_as_planned,
    races.nobody_peeked,
    races.interrupts_were_few,
    races.it_is_faster_than_its_baseline,
    races.the_table_says_what_the_runs_say,
]


def check(claim):
    """Every rule's {"rule", "passed", "evidence"}, whatever the ones before it said."""
    found = []
    for rule in RULES:
        try:
            passed, evidence = rule(claim)
        except (ArithmeticError, AttributeError, KeyError, IndexError, TypeError, OSError, ValueError) as error:
            passed, evidence = False, f"cannot be checked: {type(error).__name__}: {error}"
        found.append({"rule": rule.__name__.replace("_", " "), "passed": passed, "evidence": evidence})
    return found
