"""The page of one run: the verdict first, then where the time went, then all that was recorded."""

import csv
import json
from pathlib import Path

from bench import text_table
from bench.record import run_folder, step_files
from bench.report import run_charts, run_memory
from bench.units import format_bytes
from bench.web.page import Safe, details, figure, page, section, soft, table, tag, tiles

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
NAME = "report.html"  # in the run's folder
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


def html(folder: Path | str, assets: str | None = None, back: str | None = None) -> str:
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
        soft(tag("code", run["run_id"])),
        _verdict(run),
        tiles(_metrics(run)),
        *(figure(one) for one in charts),
        _happened(run, events),
        _summaries(run),
        _kernels(folder),
        memory_section,
        _where(run),
        _files(folder, run),
    ]
    return page(title, *body, data={"charts": charts + memory_charts}, assets=assets)


def block(folder: Path | str) -> str:
    """A run in Markdown, for a pull request."""
    run = run_folder.effective(run_folder.read(folder))
    env, gpus, source = run["environment"], run["environment"].get("gpus") or [], run["code"].get("source_sha256")
    machine = f"{len(gpus)} x {gpus[0]['name']}" if gpus else env.get("cpu_model")
    words = (run["name"], run["track"], sentence(run), run["run_id"], f"{machine}, torch {env.get('torch')}")
    name, track, how, run_id, where = (text_table.line(str(one), True) for one in words)
    lines = [f"**{name}**, seed {run['seed']}, track {track}: {how}", ""]
    if metrics := _metrics(run):
        labels, values = zip(*metrics)
        lines += [text_table.render(labels, [values], [True] * len(labels), "github"), ""]
    return "\n".join([*lines, f"`{run_id}`, {where}, source {str(source)[:12]}, {run['validity']}\n"])


def _metrics(run):
    """[(label, value as text)] of those that were measured."""
    shown = [(label, run["metrics"].get(name), decimals) for name, label, decimals in TILES]
    return [(label, f"{value:,.{decimals}f}") for label, value, decimals in shown if value is not None]


def _verdict(run):
    badge = tag("span", run["validity"], class_=f"badge {COLOUR.get(run['validity'], 'soft')}")
    status = tag("span", run["status"], class_=f"badge {'good' if run['status'] == 'complete' else 'bad'}")
    deviations = _list(run["deviations"], "Changed against the track: ")
    words = tag("p", status, badge, sentence(run), class_="verdict")
    return section("Verdict", words, _list(run["validity_reasons"]), deviations)


def sentence(run):
    """How the run ended, in one sentence of words."""
    metrics, failure = run["metrics"], run["failure"]
    if run["status"] == "running":
        return "The run has not ended."
    if failure:
        where = "" if failure.get("step") is None else f" at step {failure['step']}"
        hint = failure.get("hint") or "see the logs"
        return f"It ended with {failure['kind']}{where}: {failure['message']} Try: {hint}"
    if metrics.get("val_loss") is None:
        return "It has no validation loss."
    words = f"val_loss {metrics['val_loss']:.4f} after {metrics['num_steps']} steps"
    if metrics.get("train_s") is not None:
        words += f" in {metrics['train_s']:.2f} s"
    if metrics.get("target_reached") is not None:
        loss, gap = (run["goal"].get(key) for key in ("target_val_loss", "target_gap_nats"))
        target = f"{loss:.6g}" if loss is not None else f"{gap} above the floor"
        words += f"; the target, {target}, was {'reached' if metrics['target_reached'] else 'missed'}"
    return words + ". One run has no interval and no verdict about speed."


def charts_of(folder: Path | str) -> list[dict]:
    """All specs of a run, in the order of the page.  ValueError for a folder without a record."""
    folder = Path(folder)
    run_folder.read(folder)
    return [spec for spec in _charts(folder, step_files.read(folder), step_files.read_events(folder)) if spec]


def _charts(folder, rows, events):
    end_s = run_charts.end_s(rows, events)
    stalls = [event for event in events if event["event"] == "stall" and "step" in event]
    yield run_charts.step_time(rows, end_s, [{"step": event["step"], "label": what(event)} for event in stalls])
    yield run_charts.regions(rows, end_s)
    yield run_charts.losses(rows)
    yield run_charts.distribution(rows)
    start_ns = next((event["t_ns"] for event in events if event["event"] == "run_start"), None)
    if start_ns is not None and (folder / "telemetry.csv").exists():
        yield from run_charts.telemetry(_telemetry(folder / "telemetry.csv"), start_ns, TELEMETRY)


def _telemetry(path):
    """telemetry.csv -> {column: values}; a cut or foreign cell is None."""
    columns = {}
    with open(path, newline="", errors="replace") as file:
        for row in csv.DictReader(file):
            if not (row.get("t_ns") or "").isdigit():
                continue
            row |= {"t_ns": int(row["t_ns"])}
            for name, cell in row.items():
                if name is not None:
                    columns.setdefault(name, []).append(cell if name in ("t_ns", "device") else _number(cell))
    return columns if "device" in columns else {}


def _number(cell):
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _happened(run, events):
    """What cost time, and what was warned of."""
    parts = []
    costs = {kind: cost for kind, cost in (run.get("costs") or {}).items() if isinstance(cost, dict)}
    if costs:
        lines = [[kind, cost.get("count"), _rounded(cost.get("ms"), 3)] for kind, cost in costs.items()]
        parts.append(table(("what", "count", "cost, ms"), lines, caption="What cost time in the timed region"))
    loud = [event for event in events if event["event"] not in QUIET_EVENTS]
    if loud:
        lines = [[event["event"], event.get("step"), event.get("rank"), what(event)] for event in loud[:MAX_EVENTS]]
        rest = f", the first {MAX_EVENTS} of {len(loud)}" if len(loud) > MAX_EVENTS else ""
        parts.append(table(("event", "step", "rank", "facts"), lines, caption="Events" + rest))
    warnings = [
        f"{one.get('instrument')}, rank {one.get('rank')}: {one.get('error')}" for one in run.get("warnings") or []
    ]
    parts.append(_list(warnings, "Instrument warning: "))
    return section(
        "What happened", *(parts if any(parts) else [tag("p", "No stall, recompile or warning was recorded.")])
    )


def what(event):
    """An event's own facts, as words."""
    common = ("t_ns", "utc", "event", "rank", "step")
    return ", ".join(
        f"{key} {_plain(value)}" for key, value in event.items() if key not in common and value is not None
    )


def _plain(value):
    if value is None:
        return None
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _rounded(value, decimals):
    return round(value, decimals) if isinstance(value, float) else _plain(value)


def _summaries(run):
    """What each instrument recorded."""
    parts = []
    for name, summary in (run.get("instrument_summaries") or {}).items():
        lines = [[key, _rounded(value, 6)] for key, value in summary.items()]
        parts.append(details(name, table((), lines)))
    return section("Instruments", *parts) if parts else ""


def _kernels(folder):
    """Kernel categories of analysis.json, where the traces were analysed."""
    try:
        ranks = json.loads((folder / "analysis.json").read_text())["ranks"]
    except (OSError, ValueError, KeyError):
        return ""
    parts = []
    for rank, analysis in ranks.items():
        kernels = analysis.get("kernels") or []
        total_us = sum(kernel["sum_us"] for kernel in kernels)
        if not total_us:
            continue
        lines = [
            [k["name"], k.get("category"), k["count"], round(k["sum_us"], 1), round(100 * k["sum_us"] / total_us, 2)]
            for k in kernels[:20]
        ]
        caption = f"Rank {rank}: the kernels that took longest"
        parts.append(table(("kernel", "category", "count", "sum, us", "%"), lines, caption=caption))
    return section("Kernels", *parts) if parts else ""


def _where(run):
    env, code = run["environment"], run["code"]
    gpus = env.get("gpus") or []
    facts = {"GPUs": f"{len(gpus)} x {gpus[0].get('name')}" if gpus else "none used"}
    facts["power limit, W"] = gpus[0].get("power_limit_w") if gpus else None
    keys = ("cpu_model", "num_cpus", "memory_gib", "os", "python", "torch", "cuda", "nccl", "driver")
    facts |= {key: env.get(key) for key in keys}
    facts["commit"] = f"{code.get('commit')}{' with uncommitted changes' if code.get('dirty') else ''}"
    facts["source"] = code.get("source_sha256")
    facts |= {key: run[key] for key in ("config_id", "session_id", "comparability_id")}
    facts["timing protocol"] = (run.get("timing_protocol") or {}).get("id")
    facts["command"] = " ".join(["./run.sh", *(run.get("command") or [])])
    facts["started"] = run["started_at"]
    facts["instruments"] = ", ".join(run["instruments"] or []) or "none"
    shards = [
        [split, file["file"], file["num_tokens"], file["sha256"]]
        for split in ("train", "val")
        for file in run["data"].get(split) or []
    ]
    data = table(("split", "shard", "tokens", "sha256"), shards) if shards else ""
    return section("Where and with what", table((), [[key, _plain(value)] for key, value in facts.items()]), data)


def _files(folder, run):
    paths = [folder / name for name in ("config.yaml", "overrides.yaml") if (folder / name).exists()]
    parts = [details(path.name, tag("pre", path.read_text(errors="replace"))) for path in paths]
    lines = [[one["path"], one["role"], format_bytes(one["num_bytes"]), one["sha256"]] for one in run["artifacts"]]
    return section("Files", *parts, details(f"{len(lines)} files", table(("file", "role", "size", "sha256"), lines)))


def _list(words, before=""):
    return tag("ul", *(tag("li", before + str(word)) for word in words)) if words else Safe("")
