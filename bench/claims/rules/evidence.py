"""The evidence of a rule that looks at each run alone."""


def of_each(runs, fault_of, good):
    """fault_of(run) is a sentence or None."""
    faults = [f"{run.name}: {fault}" for run in runs if (fault := fault_of(run))]
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return not faults, "; ".join(faults[:3]) + more or good
