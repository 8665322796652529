"""Do repeats reach their track's target?"""

from bench import stats


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
    losses = [
        run["metrics"]["val_loss"] for run in runs if run["status"] == "complete" and run["validity"] != "invalid"
    ]
    missing = len(runs) - len(losses)
    num_suspect = sum(run["validity"] == "suspect" for run in runs)
    doubt = (
        f"; {num_suspect} of {len(runs)} runs are suspect: trust their losses, not their times" if num_suspect else ""
    )
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
