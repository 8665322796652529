"""What a run's page says below its numbers: machine, code and data, instruments, what cost time, and every file of it.

Of what cost time only what was watched is said, and never of what could not be seen.
"""

import json
import os
from pathlib import Path
from urllib.parse import quote

from bench.analysis.diagnosis import stalls
from bench.base.reading import plain_file, yaml_file
from bench.base.reading.damage import Damaged
from bench.base.text_table import counted
from bench.base.units import format_bytes
from bench.record import certificates
from bench.web.page import Safe, bullets, details, section, soft, table, tag

QUIET_EVENTS = ("init_start", "run_start", "run_stop", "run_end", "eval_stop")
MAX_EVENTS = 200
MAX_OPEN_EVENTS = 12  # more are folded
STALL = ("ms", "step_ms", "usual_ms", "what")
NAMES = {
    "cpu_model": "CPU",
    "num_cpus": "CPU cores",
    "memory_gib": "memory, GiB",
    "os": "OS",
    "cuda": "CUDA",
    "nccl": "NCCL",
}
MAX_OPEN_FILES = 16  # more are folded


def device(environment: dict) -> str | None:
    """8 x NVIDIA H100, or the CPU's model; None: unknown."""
    gpus = environment.get("gpus") or []
    return f"{len(gpus)} x {gpus[0].get('name')}" if gpus else environment.get("cpu_model")


def where(folder: Path, run: dict, at: Path) -> Safe:
    """The machine, the code, the data, as far as they are known.  at: the folder of the page."""
    env, code = run["environment"], run["code"]
    gpus = env.get("gpus") or []
    is_ours = run.get("provenance") != "imported"
    facts = {"GPUs": device(env) if gpus else "none used" if is_ours else None}
    facts["power limit, W"] = gpus[0].get("power_limit_w") if gpus else None
    keys = ("cpu_model", "num_cpus", "memory_gib", "os", "python", "torch", "cuda", "nccl", "driver")
    facts |= {NAMES.get(key, key): env.get(key) for key in keys}
    changed = " with uncommitted changes" if code.get("dirty") else ""
    facts["commit"] = _code(code["commit"], changed) if code.get("commit") else None
    facts["source sha256"] = _code(code["source_sha256"]) if code.get("source_sha256") else None
    facts |= {key: _code(run[key]) for key in ("config_id", "session_id", "comparability_id") if run.get(key)}
    facts["timing protocol"] = (run.get("timing_protocol") or {}).get("id")
    facts["by the launcher's clock"] = _outside(run)
    if is_ours:
        facts["command"] = _code(" ".join(["./run.sh", *(run.get("command") or [])]))
        facts["instruments"] = ", ".join(run["instruments"] or []) or "none"
        facts["started"] = run["started_at"]
        facts["certificate"] = _certificate(folder, at)
    shards = [
        [split, file["file"], file["num_tokens"], _code(file["sha256"])]
        for split in ("train", "val")
        for file in run["data"].get(split) or []
    ]
    lines = [[key, one if isinstance(one, Safe) else plain(one)] for key, one in facts.items() if one is not None]
    head = ("split", "shard", "tokens", "sha256")
    data = details(f"Data: {len(shards)} shards", table(head, shards)) if shards else ""
    return section("Where and with what", table((), lines, class_="facts"), data)


def _outside(run):
    """What the launcher's clock says, in words; None: an older record, which has none."""
    clock = (run.get("referee") or {}).get("clock")
    if clock is None or clock["unknown"]:
        return clock and f"unknown: {clock['unknown']}"
    return f"{clock['outside_train_s']:.3f} s of training, {clock['outside_s']:.3f} s with validations"


def _certificate(folder, at):
    """What a replay of the run showed, a link to its file; None without."""
    words = certificates.sentence(folder)
    way = os.path.relpath(folder.resolve(), at.resolve())
    return words and Safe(_link(folder, certificates.FILE, way, words))


def _code(words, more=""):
    return Safe(tag("code", words) + tag("span", more)) if more else tag("code", words)


def stages(run: dict) -> Safe:
    """What the run's stages were, a row each; nothing of a run without."""
    rows = run["measured"].get("stages") or ()
    columns = {
        "from step": "first_step",
        "steps": "num_steps",
        "tokens a step": "batch_tokens",
        "tokens a sequence": "seq_len",
        "micro-steps": "num_micro_steps",
        "window": "window_tokens",
        "times lr": "lr_frac",
        "momenta": "momenta",
        "updates every": "update_every_steps",
        "frozen for": "frozen_steps",
        "weights of next tokens": "ahead_weights",
        "at its end": "end_ahead_weights",
        "untied": "untied",
    }
    given = {head: key for head, key in columns.items() if any(row.get(key) is not None for row in rows)}
    lines = [[_words(row.get(key)) for key in given.values()] for row in rows]
    return section("Stages", table(tuple(given), lines)) if rows else Safe("")


def _words(value):
    if isinstance(value, list):
        return ", ".join(f"{one:g}" for one in value)
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else value


def summaries(run: dict) -> Safe:
    """What each instrument recorded."""
    parts = []
    for name, summary in (run.get("instrument_summaries") or {}).items():
        lines = [[key, round(value, 6) if isinstance(value, float) else plain(value)] for key, value in summary.items()]
        parts.append(details(name, table((), lines)))
    return section("Instruments", tag("div", *parts, class_="columns")) if parts else Safe("")


def files(folder: Path, run: dict, at: Path) -> Safe:
    """Every file that the record names, a link where it is there; its settings also in full.  at: the page's folder."""
    settings = [folder / name for name in ("config.yaml", "overrides.yaml") if (folder / name).exists()]
    parts = [details(path.name, tag("pre", _text(path))) for path in settings]
    known = [{"path": "run.json", "role": "record"}, *run["artifacts"]]
    way = os.path.relpath(folder.resolve(), at.resolve())
    lines = [[_link(folder, one["path"], way), one["role"], *_size(one), _code(one.get("sha256"))] for one in known]
    listed = table(("file", "role", "size", "sha256"), lines)
    return section("Files", details(f"{len(lines)} files", listed) if len(lines) > MAX_OPEN_FILES else listed, *parts)


def _text(path):
    try:
        return plain_file.text(path, yaml_file.MAX_BYTES, errors="replace")
    except Damaged as error:
        return str(error)


def _link(folder, name, way, words=None):
    if not os.path.isfile(f"{folder}/{name}"):  # traces and logs are often not sent along
        return tag("span", name, title="not in this folder", class_="soft")
    return tag("a", words or name, href=quote(os.path.normpath(f"{way}/{name}")))


def _size(one):
    return [format_bytes(one["num_bytes"]) if "num_bytes" in one else None]


def section_of(run: dict, rows: list[dict], events: list[dict]) -> Safe:
    """run: its record; rows of steps.csv; events of events.jsonl."""
    costs = costs_of(run, rows)
    lines = [[_kind(kind), cost["count"], _rounded(cost.get("ms"), 3)] for kind, cost in costs.items() if cost["count"]]
    caption = "What cost time in the timed region"
    parts = [table(("what", "count", "cost, ms"), lines, caption=caption)] if lines else []
    quiet = [_kind(kind) for kind, cost in costs.items() if not cost["count"]]
    until = "" if run["status"] == "complete" else " until it ended"
    parts += [tag("p", f"Watched for{until}, and there was none: {', '.join(quiet)}.")] if quiet else []
    parts.append(soft(_unwatched(run, costs)))
    loud = [event for event in events if event["event"] not in QUIET_EVENTS]
    if loud:
        facts = [[event["event"], event.get("step"), event.get("rank"), what(event)] for event in loud[:MAX_EVENTS]]
        rest = f", the first {MAX_EVENTS} shown" if len(loud) > MAX_EVENTS else ""
        listed = table(("event", "step", "rank", "facts"), facts)
        title = counted(len(loud), "event") + rest
        parts.append(details(title, listed) if len(loud) > MAX_OPEN_EVENTS else listed)
    warnings = [
        f"{one.get('instrument')}, rank {one.get('rank')}: {one.get('error')}" for one in run.get("warnings") or []
    ]
    return section("What happened", *parts, bullets(warnings, "Instrument warning: "))


def costs_of(run: dict, rows: list[dict]) -> dict[str, dict]:
    """{kind: {"count", "ms"}} of the record; stalls also where it has none, from its steps, as compare finds them."""
    kept = {kind: cost for kind, cost in (run.get("costs") or {}).items() if isinstance(cost, dict) and "count" in cost}
    if "stall" in kept:
        return kept
    timed = [row for row in rows if row["step"] and row.get("step_ms") is not None]
    return ({"stall": stalls.cost(timed)} if len(timed) >= stalls.MIN_STEPS else {}) | kept


def _unwatched(run, costs):
    missing = [_kind(kind) for kind in stalls.WATCHED_BY if kind not in costs]
    if not missing and "stall" in costs:
        return ""
    words = ["stall (too few timed steps)"] * ("stall" not in costs) + missing
    why = "a log does not say" if run.get("provenance") == "imported" else "no instrument recorded it to an end"
    return f"Not watched, so unknown: {', '.join(words)} ({why})."


def _kind(kind):
    return kind.replace("_", " ")


def what(event: dict) -> str:
    """An event's own facts, as words; of a stall first how long, and why as far as that is known."""
    skipped, words = ("t_ns", "utc", "event", "rank", "step"), []
    if event["event"] == "stall" and all(name in event for name in STALL):
        skipped += STALL
        words = [f"{event['ms']:.4g} ms above the usual {event['usual_ms']:.4g} ms", f"cause {_kind(event['what'])}"]
    shown = {key: value for key, value in event.items() if key not in skipped and value not in (None, [], {})}
    return ", ".join([*words, *(f"{key} {plain(value)}" for key, value in shown.items())])


def plain(value: object) -> str | None:
    """A value of a record as text; None stays None."""
    if value is None:
        return None
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _rounded(value, decimals):
    return round(value, decimals) if isinstance(value, float) else value
