"""A record's rows -> chart specs (bench/web/chart.py)."""

from bench import stats
from bench.units import NS_PER_S, s_from_ms
from bench.web.chart import chart, mark_of, series_of

REGIONS = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")
NUM_BINS = 60


def wall_s(rows, events):
    """{row: seconds from the run's start to the end of that step}, validations included; the telemetry's axis too.

    Steps follow each other from the end of the last validation (its event's stamp) on; where there are no events, from 0.
    """
    stamps = {
        event["step"]: event["t_ns"]
        for event in events
        if event["event"] == "eval_stop" and event.get("step") is not None
    }
    start_ns = next((event["t_ns"] for event in events if event["event"] == "run_start"), None)
    at_s, found = 0.0, {}
    for row in rows:
        step = row["step"]
        if row.get("step_ms") is not None:
            at_s += s_from_ms(row["step_ms"])
        found[step] = at_s
        if step in stamps and start_ns is not None:
            at_s = max(at_s, (stamps[step] - start_ns) / NS_PER_S)
    return found


def step_time(rows, at_s, stalls=()):
    """Milliseconds of every step; disturbed ones in a series of their own.  stalls: [{"step", "label"}]."""
    timed = [row for row in rows if row.get("step_ms") is not None]
    if not timed:
        return None
    flagged = any(row.get("flags") for row in timed)
    series = [series_of("step", [None if row.get("flags") else row["step_ms"] for row in timed], "points")]
    if flagged:
        series.append(
            series_of(
                "disturbed by an instrument", [row["step_ms"] if row.get("flags") else None for row in timed], "points"
            )
        )
    plain_ms = [row["step_ms"] for row in timed if not row.get("flags")]
    caption = (
        f"median {stats.percentile(plain_ms, 50):.2f} ms, 95th percentile {stats.percentile(plain_ms, 95):.2f} ms"
        if plain_ms
        else ""
    )
    marks = [
        mark_of(at_s[row["step"]], f"validation after step {row['step']}", "validation")
        for row in rows
        if row.get("val_loss") is not None
    ]
    marks += [mark_of(at_s[stall["step"]], stall["label"], "stall") for stall in stalls if stall["step"] in at_s]
    return chart(
        "step-time",
        "Step time",
        caption,
        "seconds since the start",
        "ms",
        [at_s[row["step"]] for row in timed],
        series,
        marks,
        "time",
    )


def regions(rows, at_s):
    """Where each step's time went, stacked."""
    names = [name for name in REGIONS if any(row.get(name) is not None for row in rows)]
    timed = [row for row in rows if row.get("step_ms") is not None]
    if not names or not timed:
        return None
    plain = [row for row in timed if not row.get("flags")] or timed
    means = {name: stats.mean([row[name] for row in plain if row.get(name) is not None] or [0.0]) for name in names}
    caption = "mean " + ", ".join(f"{name.removesuffix('_ms')} {means[name]:.2f} ms" for name in names)
    series = [series_of(name.removesuffix("_ms"), [row.get(name) for row in timed], "area") for name in names]
    return chart(
        "regions",
        "Regions of a step",
        caption,
        "seconds since the start",
        "ms",
        [at_s[row["step"]] for row in timed],
        series,
        (),
        "time",
    )


def losses(rows):
    trained = [row for row in rows if row.get("train_loss") is not None or row.get("val_loss") is not None]
    if not trained:
        return None
    found = [row["val_loss"] for row in trained if row.get("val_loss") is not None]
    caption = f"last val_loss {found[-1]:.4f}" if found else "never validated"
    series = [
        series_of("train_loss", [row.get("train_loss") for row in trained], "line"),
        series_of("val_loss", [row.get("val_loss") for row in trained], "points"),
    ]
    return chart("loss", "Loss", caption, "step", "nats per token", [row["step"] for row in trained], series)


def distribution(rows):
    """How often a step took how long; the unflagged ones, the longest 1 % in the last bar."""
    timed_ms = [row["step_ms"] for row in rows if row.get("step_ms") is not None and not row.get("flags")]
    if len(timed_ms) < 2:
        return None
    low_ms, high_ms = min(timed_ms), stats.percentile(timed_ms, 99)
    width_ms = (high_ms - low_ms) / NUM_BINS or 1.0
    counts = [0] * (NUM_BINS + 1)
    for ms in timed_ms:
        counts[min(NUM_BINS, int((ms - low_ms) / width_ms))] += 1
    middles = [low_ms + (num + 0.5) * width_ms for num in range(NUM_BINS + 1)]
    caption = f"{len(timed_ms)} steps, {min(timed_ms):.2f} to {max(timed_ms):.2f} ms; the last bar holds all above {high_ms:.2f}"
    return chart(
        "distribution",
        "Distribution of step times",
        caption,
        "ms",
        "steps",
        middles,
        [series_of("steps", counts, "bars")],
    )


def telemetry(table, run_start_ns, columns):
    """table: {column: [...]} of telemetry.csv with t_ns and device -> a chart per column, a series per device."""
    charts = []
    devices = sorted(set(table.get("device", ())))
    for column, label in columns:
        if not any(value is not None for value in table.get(column, ())):
            continue
        points = sorted(set(table["t_ns"]))
        place = {t_ns: num for num, t_ns in enumerate(points)}
        series = []
        for device in devices:
            values = [None] * len(points)
            for t_ns, whose, value in zip(table["t_ns"], table["device"], table[column]):
                if whose == device:
                    values[place[t_ns]] = value
            series.append(series_of(str(device), values, "line"))
        x = [(t_ns - run_start_ns) / NS_PER_S for t_ns in points]
        charts.append(chart(f"telemetry-{column}", label, "", "seconds since the start", label, x, series, (), "time"))
    return charts
