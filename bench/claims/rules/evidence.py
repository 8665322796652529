"""The evidence of a rule that looks at each run alone."""

from bench.base.text_table import some


def of_each(runs, fault_of, good):
    """fault_of(run) is a sentence or None."""
    faults = [f"{run.name}: {fault}" for run in runs if (fault := fault_of(run))]
    return not faults, some(faults, separator="; ") or good
