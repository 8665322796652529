"""What may be said of runs: whether one counts, and whether several reach their track's target."""

from bench import stats
from bench.data.sources.markov import floor_slack_nats

MAX_FOREIGN_CPU_CORES = 0.1  # other programs' load beside a CPU race; above it steps stretch visibly (assumed)


def validity(run):
    """A finished record -> ("valid" | "suspect" | "invalid", reasons)."""
    if run["status"] != "complete":
        return "invalid", ["the run did not complete"]
    val_loss, floor_nats = run["metrics"]["val_loss"], run["data"]["floor_nats"]
    if floor_nats is not None and val_loss < floor_nats - floor_slack_nats(run["goal"]["val_tokens"]):
        return "invalid", [f"val_loss {val_loss:.6f} is below the data's floor {floor_nats:.6f}: validation sees its targets"]
    doubts = [doubt["doubt"] for doubt in run.get("doubts", ())]
    foreign = run["measured"].get("foreign_cpu_cores")
    if run["hardware"]["device"] == "cpu" and foreign is not None and foreign > MAX_FOREIGN_CPU_CORES:
        limit = f"limit {MAX_FOREIGN_CPU_CORES}"
        doubts.append(f"other programs used {foreign:.2f} CPU cores during the race ({limit})")
    return ("suspect", doubts) if doubts else ("valid", [])


def target_of(run):
    """The val_loss to be below: the goal's, or its gap above the data's floor; None without a target."""
    goal = run["goal"]
    if goal["target_gap_nats"] is not None:
        return run["data"]["floor_nats"] + goal["target_gap_nats"]
    return goal["target_val_loss"]


def of_repeats(runs, p_value):
    """Runs of one config with different seeds -> {"passed", "n", "mean", "sd", "t", "p", "words"}.

    A fixed number of steps is won when the mean val_loss is below the target, one-sided t test, p < p_value
    (modded-nanogpt's rule).  passed is None where there is nothing to decide: no target, or too few runs.
    """
    losses = [run["metrics"]["val_loss"] for run in runs if run["status"] == "complete" and run["validity"] != "invalid"]
    missing = len(runs) - len(losses)
    num_suspect = sum(run["validity"] == "suspect" for run in runs)
    doubt = f"; {num_suspect} of {len(runs)} runs are suspect: trust their losses, not their times" if num_suspect else ""
    target_val_loss = target_of(runs[0])
    answer = {"n": len(losses), "mean": stats.mean(losses) if losses else None, "sd": None, "t": None, "p": None}
    if missing:
        return answer | {"passed": False, "words": f"{missing} of {len(runs)} runs did not complete or are invalid"}
    if any(run["goal"]["stop_at_target"] for run in runs):
        return answer | _reached(runs, doubt)
    if target_val_loss is None:
        return answer | {"passed": None, "words": "no target to reach: the losses above are the result"}
    if len(losses) < 2:
        return answer | {"passed": None, "words": "one run has no spread and gives no verdict"}
    answer["sd"] = stats.sd(losses)
    answer["t"], answer["p"] = stats.one_sample_t_less(losses, target_val_loss)
    passed = answer["p"] < p_value
    words = (
        f"mean val_loss {answer['mean']:.4f} (sd {answer['sd']:.4f}, n={len(losses)}) is "
        f"{'below' if passed else 'not shown to be below'} the target {target_val_loss:.6g}: "
        f"p={answer['p']:.2g}, needed p<{p_value}{doubt}"
    )
    return answer | {"passed": passed, "words": words}


def _reached(runs, doubt):
    """Races to a target are won one by one: each either got there within its steps or did not."""
    steps = [run["metrics"]["num_steps"] for run in runs if run["metrics"]["target_reached"]]
    passed = len(steps) == len(runs)
    at = f", after {', '.join(str(step) for step in steps)} steps" if steps else ""
    return {"passed": passed, "words": f"{len(steps)} of {len(runs)} runs reached the target{at}{doubt}"}
