"""Rules with their evidence as lines, for ./run.sh judge and ./run.sh verify."""

from bench.base import text_table
from bench.base.text_table import counted

MARKS = {True: "pass", None: "-", False: "FAIL"}


def text(rules):
    """rules: {"rule", "passed", "evidence"} each; passed None does not apply.  What failed stands last, to be seen."""
    ordered = sorted(rules, key=lambda rule: rule["passed"] is False)
    return text_table.marked((MARKS[rule["passed"]], f"{rule['rule']}: {rule['evidence']}") for rule in ordered)


def count(rules):
    """E.g. "2 of 22 rules failed"."""
    num_failed = sum(rule["passed"] is False for rule in rules)
    num_open = sum(rule["passed"] is None for rule in rules)
    if num_failed:
        return f"{num_failed} of {counted(len(rules), 'rule')} failed"
    if num_open:
        return f"{counted(len(rules) - num_open, 'rule')} passed, {num_open} not applicable"
    return f"all {counted(len(rules), 'rule')} passed"
