"""What all ranks found -> steps.csv, steps_by_rank.csv and .result.tmp, written by rank 0 when the race is over.

It is the worker's half of run.json: the launcher merges and removes it.
"""

from bench import atomic
from bench.machine import environment
from bench.record import run_folder, step_files


def write(folder, config, num_micro_steps, trainer, times, everyone, summaries):
    """everyone: each rank's dict from bench.training.worker, in rank order; summaries: what the instruments of all ranks say together."""
    rows = _rows(config, trainer.lr_frac, everyone)
    step_files.write(folder, rows)
    if len(everyone) > 1:
        step_files.write_by_rank(folder, _by_rank(everyone))
    _append_events(folder, everyone)
    first = everyone[0]
    seq_len = config.data.seq_len
    result = {
        "model": {
            "arch": config.model.arch,
            "num_params": sum(parameter.numel() for parameter in trainer.model.parameters()),
            "flops_per_token": trainer.model.flops_per_token(seq_len),
            "flops_per_token_causal": trainer.model.flops_per_token_causal(seq_len),
        },
        "measured": {
            "train_s_by_rank": [rank["train_s"] for rank in everyone],
            "validation_s": first["paused_s"].get("validation", 0.0),
            "num_validations": first["num_pauses"].get("validation", 0),
            **times,
            "peak_mem_gib_by_rank": _by_kind([rank["peak_mem_gib"] for rank in everyone]),
            "loader_wait_ms": max(rank["loader_wait_ms"] for rank in everyone),
            "foreign_cpu_cores": first["foreign_cpu_cores"],
            "batch_tokens": config.data.batch_tokens,
            "num_micro_steps": num_micro_steps,
            "dtype": config.hardware.dtype,
        },
        "torch_facts": environment.torch_facts(),
        "instrument_summaries": summaries,
        "doubts": [
            {"rank": num, "instrument": name, "doubt": doubt}
            for num, rank in enumerate(everyone)
            for name, doubts in rank["doubts"].items()
            for doubt in doubts
        ],
        "warnings": [{"rank": num, **warning} for num, rank in enumerate(everyone) for warning in rank["warnings"]],
    }
    atomic.write_json(folder / run_folder.RESULT, result)


def _append_events(folder, everyone):
    """What the other ranks' instruments emitted; rank 0's is written already."""
    for event in sorted((event for rank in everyone for event in rank["events"]), key=lambda event: event["t_ns"]):
        step_files.append_event(folder, event)


def _rows(config, lr_frac, everyone):
    """Rows 0..num_steps of steps.csv: losses are means over ranks, milliseconds are maxima over ranks."""
    num_steps = everyone[0]["num_steps"]
    val_losses = everyone[0]["val_losses"]
    columns = sorted(
        {name for rank in everyone for of_one in rank["columns"].values() for name in of_one}, key=_column_order
    )
    flags = [flag for rank in everyone for flag in rank["flags"].values()]
    rows = []
    for step in range(num_steps + 1):
        row = {"step": step, "flags": ";".join(sorted({flag[step] for flag in flags if step in flag}))}
        row["tokens"] = step * config.data.batch_tokens
        row["val_loss"] = val_losses.get(step)
        if step:
            row["lr"] = config.optim.lr * lr_frac(step - 1)
            row["train_loss"] = sum(rank["rows"][step - 1]["train_loss"] for rank in everyone) / len(everyone)
            # Of a flagged step rank 0's: metrics takes them off the whole, and where ranks waited for one that wrote a
            # trace, the maxima of neighbouring steps are more than the time that passed.
            looked_at = everyone[:1] if row["flags"] else everyone
            row["step_ms"] = max(rank["rows"][step - 1]["step_ms"] for rank in looked_at)
            row["t_ns"] = everyone[0]["rows"][step - 1]["t_ns"]
        for column in columns:
            found = [
                of_one[column].get(step) for rank in everyone for of_one in rank["columns"].values() if column in of_one
            ]
            row[column] = max((value for value in found if value is not None), default=None)
        rows.append(row)
    return rows


def _by_rank(everyone):
    """{"step_ms", and where the regions are known "own_ms": [{row: milliseconds} of each rank]}.

    Ranks wait for each other within a step, so that their step_ms are alike; what a rank does before it can wait, its
    data and forward, is its own and shows who was late.
    """
    found = {"step_ms": [{row["step"]: row["step_ms"] for row in rank["rows"]} for rank in everyone]}
    regions = [rank["columns"].get("regions", {}) for rank in everyone]
    if all(one.get("data_ms") and one.get("forward_ms") for one in regions):
        found["own_ms"] = [
            {row: one["data_ms"].get(row, 0.0) + ms for row, ms in one["forward_ms"].items()} for one in regions
        ]
    return found


def _column_order(name):
    order = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")
    return (order.index(name) if name in order else len(order), name)


def _by_kind(peaks):
    return {kind: [peak[kind] for peak in peaks] for kind in peaks[0]}
