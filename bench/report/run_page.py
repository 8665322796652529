"""The page of one run: the verdict first, then where the time went, then all that was recorded."""

import csv
import json
from pathlib import Path

from bench import text_table
from bench.record import run_folder, step_files
from bench.report import run_charts, run_memory
from bench.units import format_bytes
from bench.web.page import Safe, figure, page, section, table, tag

TELEMETRY = (
    ("power_w", "power, W"),
    ("sm_clock_mhz", "SM clock, MHz"),
    ("temp_c", "temperature, °C"),
    ("util_pct", "utilisation, %"),
    ("mem_gib", "memory, GiB"),
    ("cpu_util_pct", "CPU utilisation, %"),
    ("cpu_freq_mhz", "CPU frequency, MHz"),
    ("rss_gib", "resident set, GiB"),
)
QUIET_EVENTS = ("init_start", "run_start", "run_stop", "run_end", "eval_stop")
MAX_EVENTS = 200
TILES = (  # metric, label, decimals
    ("val_loss", "val_loss, nats per token", 4),
    ("train_s", "train time, s", 2),
    ("step_avg_ms", "step_avg, ms", 2),
    ("tokens_per_s", "tokens/s", 0),
    ("mfu", "MFU", 3),
    ("peak_mem_gib", "peak memory, GiB", 2),
    ("energy_j", "energy, J", 0),
    ("num_steps", "steps", 0),
)
COLOUR = {"valid": "good", "suspect": "doubt", "invalid": "bad"}


def html(folder, assets=None, back=None):
    """A run folder -> the page's html.  assets: see page.page(); back: link to the site's list."""
    folder = Path(folder)
    run = run_folder.effective(run_folder.read(folder))
    events = step_files.read_events(folder)
    charts = charts_of(folder)
    memory_charts, memory_section = run_memory.of_run(folder)
    title = f"{run['name']} seed {run['seed']}, {run['track']}"
    body = [
        tag("p", tag("a", "All runs", href=back)) if back else "",
        tag("h1", title),
        tag("p", tag("code", run["run_id"]), class_="soft"),
        _verdict(run),
        _tiles(run),
        *(figure(one) for one in charts),
        _happened(run, events),
        _summaries(run),
        _kernels(folder),
        memory_section,
        _where(run),
        _files(folder, run),
    ]
    return page(title, *body, data={"charts": charts + memory_charts}, assets=assets)


def _verdict(run):
    badge = tag("span", run["validity"], class_=f"badge {COLOUR.get(run['validity'], 'soft')}")
    status = tag("span", run["status"], class_=f"badge {'good' if run['status'] == 'complete' else 'bad'}")
    return section(
        "Verdict",
        tag("p", status, badge, sentence(run), class_="verdict"),
        _list(run["validity_reasons"]),
        _list(run["deviations"], "Changed against the track: "),
    )


def sentence(run):
    """What became of the run, in one sentence of words."""
    found, failure = run["metrics"], run["failure"]
    if run["status"] == "running":
        return "The race is still running."
    if failure:
        where = "" if failure.get("step") is None else f" at step {failure['step']}"
        return (
            f"It ended with {failure['kind']}{where}: {failure['message']} Try: {failure.get('hint') or 'see the logs'}"
        )
    if found.get("val_loss") is None:
        return "It never measured a validation loss."
    words = f"val_loss {found['val_loss']:.4f} after {found['num_steps']} steps"
    if found.get("train_s") is not None:
        words += f" in {found['train_s']:.2f} s"
    if found.get("target_reached") is not None:
        goal = run["goal"]
        target = (
            f"{goal['target_val_loss']:.6g}"
            if goal.get("target_val_loss") is not None
            else f"{goal.get('target_gap_nats')} above the floor"
        )
        words += f"; the target, {target}, was {'reached' if found['target_reached'] else 'missed'}"
    return words + ". One run has no interval and no verdict about speed."


def _tiles(run):
    shown = [(label, run["metrics"].get(name), decimals) for name, label, decimals in TILES]
    return tag(
        "dl",
        *(
            tag("div", tag("dt", label), tag("dd", f"{value:,.{decimals}f}"))
            for label, value, decimals in shown
            if value is not None
        ),
        class_="tiles",
    )


def charts_of(folder):
    """All specs of a run, in the order of the page."""
    return [chart for chart in _charts(Path(folder), step_files.read(folder), step_files.read_events(folder)) if chart]


def _charts(folder, rows, events):
    at_s = run_charts.wall_s(rows, events)
    stalls = [
        {"step": event["step"], "label": what(event)}
        for event in events
        if event["event"] == "stall" and "step" in event
    ]
    yield run_charts.step_time(rows, at_s, stalls)
    yield run_charts.regions(rows, at_s)
    yield run_charts.losses(rows)
    yield run_charts.distribution(rows)
    start_ns = next((event["t_ns"] for event in events if event["event"] == "run_start"), None)
    if start_ns is not None and (folder / "telemetry.csv").exists():
        yield from run_charts.telemetry(_telemetry(folder / "telemetry.csv"), start_ns, TELEMETRY)


def _telemetry(path):
    """telemetry.csv -> {column: values}; a cut or foreign cell is None."""
    found = {}
    with open(path, newline="", errors="replace") as file:
        for row in csv.DictReader(file):
            if not (row.get("t_ns") or "").isdigit():
                continue
            for column, cell in row.items():
                if column is not None:
                    found.setdefault(column, []).append(
                        int(cell) if column == "t_ns" else cell if column == "device" else _number(cell)
                    )
    return found if "device" in found else {}


def _number(cell):
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _happened(run, events):
    """What cost time, and what was warned of."""
    parts = []
    costs = run.get("costs") or {}
    if costs:
        lines = [
            [kind, cost.get("count"), _ms(cost.get("ms"))] for kind, cost in costs.items() if isinstance(cost, dict)
        ]
        parts.append(table(("what", "count", "cost, ms"), lines, caption="What cost time in the timed region"))
    loud = [event for event in events if event["event"] not in QUIET_EVENTS]
    if loud:
        lines = [[event["event"], event.get("step"), event.get("rank"), what(event)] for event in loud[:MAX_EVENTS]]
        rest = f", the first {MAX_EVENTS} of {len(loud)}" if len(loud) > MAX_EVENTS else ""
        parts.append(table(("event", "step", "rank", "facts"), lines, caption="Events" + rest))
    if run.get("warnings"):
        parts.append(
            _list(
                [f"{one.get('instrument')}, rank {one.get('rank')}: {one.get('error')}" for one in run["warnings"]],
                "Instrument warning: ",
            )
        )
    return section("What happened", *(parts or [tag("p", "No stall, recompile or warning was recorded.")]))


def what(event):
    """An event's own facts, as words."""
    return ", ".join(
        f"{key} {_plain(value)}"
        for key, value in event.items()
        if key not in ("t_ns", "utc", "event", "rank", "step") and value is not None
    )


def _plain(value):
    return (
        f"{value:.6g}"
        if isinstance(value, float)
        else json.dumps(value)
        if isinstance(value, (dict, list))
        else str(value)
    )


def _ms(value):
    return None if value is None else round(value, 3)


def _summaries(run):
    """What each instrument found, as it says it."""
    parts = []
    for name, summary in (run.get("instrument_summaries") or {}).items():
        lines = [
            [key, round(value, 6) if isinstance(value, float) else _plain(value) if value is not None else None]
            for key, value in summary.items()
        ]
        parts.append(tag("details", tag("summary", name), table(("", ""), lines)))
    return section("Instruments", *parts) if parts else ""


def _kernels(folder):
    """Kernel categories of analysis.json, where the traces were analysed."""
    try:
        ranks = json.loads((folder / "analysis.json").read_text())["ranks"]
    except (OSError, ValueError, KeyError):
        return ""
    parts = []
    for rank, found in ranks.items():
        kernels = found.get("kernels") or []
        total_us = sum(kernel["sum_us"] for kernel in kernels)
        if not total_us:
            continue
        lines = [
            [k["name"], k.get("category"), k["count"], round(k["sum_us"], 1), round(100 * k["sum_us"] / total_us, 2)]
            for k in kernels[:20]
        ]
        parts.append(
            table(
                ("kernel", "category", "count", "sum, us", "%"),
                lines,
                caption=f"Rank {rank}: the kernels that took longest",
            )
        )
    return section("Kernels", *parts) if parts else ""


def _where(run):
    env, code = run["environment"], run["code"]
    gpus = env.get("gpus") or []
    machine = [
        ["GPUs", f"{len(gpus)} x {gpus[0].get('name')}" if gpus else "none used"],
        ["power limit, W", gpus[0].get("power_limit_w") if gpus else None],
    ]
    machine += [
        [key, env.get(key)]
        for key in ("cpu_model", "num_cpus", "memory_gib", "os", "python", "torch", "cuda", "nccl", "driver")
    ]
    state = f"{code.get('commit')}{' with uncommitted changes' if code.get('dirty') else ''}"
    ids = [
        ["commit", state],
        ["source", code.get("source_sha256")],
        ["config_id", run["config_id"]],
        ["session_id", run["session_id"]],
        ["comparability_id", run["comparability_id"]],
        ["timing protocol", (run.get("timing_protocol") or {}).get("id")],
        ["command", " ".join(["./run.sh", *(run.get("command") or [])])],
        ["started", run["started_at"]],
        ["instruments", ", ".join(run["instruments"] or []) or "none"],
    ]
    data = [
        [split, file["file"], file["num_tokens"], file["sha256"]]
        for split in ("train", "val")
        for file in run["data"].get(split) or []
    ]
    facts = [[key, _plain(value) if value is not None else None] for key, value in machine + ids]
    return section(
        "Where and with what", table((), facts), table(("split", "shard", "tokens", "sha256"), data) if data else ""
    )


def _files(folder, run):
    parts = []
    for name in ("config.yaml", "overrides.yaml"):
        if (folder / name).exists():
            parts.append(tag("details", tag("summary", name), tag("pre", (folder / name).read_text(errors="replace"))))
    lines = [[one["path"], one["role"], format_bytes(one["num_bytes"]), one["sha256"]] for one in run["artifacts"]]
    parts.append(
        tag("details", tag("summary", f"{len(lines)} files"), table(("file", "role", "size", "sha256"), lines))
    )
    return section("Files", *parts)


def _list(words, before=""):
    return tag("ul", *(tag("li", before + str(word)) for word in words)) if words else Safe("")


def block(folder):
    """A run in Markdown, to paste into a pull request."""
    run = run_folder.effective(run_folder.read(folder))
    found = run["metrics"]
    cells = [(label, found.get(name), decimals) for name, label, decimals in TILES if found.get(name) is not None]
    name, track, how, id = (
        text_table.line(words, True) for words in (run["name"], run["track"], sentence(run), run["run_id"])
    )
    lines = [f"**{name}**, seed {run['seed']}, track {track}: {how}", ""]
    if cells:
        values = [f"{value:,.{decimals}f}" for _, value, decimals in cells]
        lines += [text_table.render([label for label, _, _ in cells], [values], [True] * len(cells), "github"), ""]
    gpus, env = run["environment"].get("gpus") or [], run["environment"]
    machine = f"{len(gpus)} x {gpus[0]['name']}" if gpus else env.get("cpu_model")
    where = text_table.line(f"{machine}, torch {env.get('torch')}", True)
    lines.append(f"`{id}`, {where}, source {str(run['code'].get('source_sha256'))[:12]}, {run['validity']}")
    return "\n".join(lines) + "\n"
