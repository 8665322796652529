"""The facts on a run's page below its numbers: machine, code and data, instruments, what cost time, and every file.

Costs of time that nothing watched for are listed as unknown.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.analysis.diagnosis import stalls
from bench.base import private
from bench.base.reading import plain_file, yaml_file
from bench.base.reading.damage import Damaged
from bench.base.text_table import counted
from bench.base.units import format_bytes
from bench.record import certificates, configs, run_folder
from bench.record.rows import row_of
from bench.record.shape import Record
from bench.record.step_files import StepRow
from bench.web.document import Block, Bullets, Columns, Lines, Section, Shown, Table, Verbatim, code, coloured, link
from bench.web.page import join, tag

QUIET_EVENTS = ("init_start", "run_start", "run_stop", "run_end", "eval_stop")
MAX_EVENTS = 200
MAX_OPEN_EVENTS = 12  # more events are folded
STALL = ("ms", "step_ms", "usual_ms", "what", "causes", "where")
NAMES = {
    "cpu_model": "CPU",
    "num_cpus": "CPU cores",
    "memory_gib": "memory, GiB",
    "os": "OS",
    "cuda": "CUDA",
    "nccl": "NCCL",
}
MAX_OPEN_FILES = 16  # more files are folded


def device(environment: Mapping[str, Any]) -> str | None:
    """Returns text such as "8 x NVIDIA H100", or the CPU's model; None if it is unknown."""
    gpus = environment.get("gpus") or []
    return f"{len(gpus)} x {gpus[0].get('name')}" if gpus else environment.get("cpu_model")


def training(folders: Iterable[Path]) -> str:
    """Returns what these runs train, as far as they share it: "pysource, gpt2, 4 layers of width 128, ..."."""
    rows = [row_of(run_folder.read(folder), configs.read(str(folder))) for folder in folders]
    seen = {key: {row[key] for row in rows} for key in ("data", "model", "size", "num_steps", "batch_tokens", "device")}
    alike: dict[str, Any] = {key: next(iter(values)) if len(values) == 1 else None for key, values in seen.items()}
    parts = [alike["data"], alike["model"]]
    if alike["size"]:
        num_layers, width = alike["size"].split("x")
        parts.append(f"{counted(int(num_layers), 'layer')} of width {width}")
    if alike["num_steps"] and alike["batch_tokens"]:
        parts.append(f"{alike['num_steps']:,} steps of {alike['batch_tokens']:,.0f} tokens")
    return ", ".join([part for part in parts if part] + [f"on {alike['device']}"] * bool(alike["device"]))


def _facts(title: str, facts: Mapping[str, object], *blocks: Block) -> Section:
    """Returns a section with a line for each fact that is not None."""
    lines = [[key, value] for key, value in facts.items() if value is not None]
    return Section(title, [Table((), lines, style="facts"), *blocks])


def where(folder: Path, run: Record, at: Path) -> Section:
    """Returns the known facts about machine, code and data.  at: the folder of the page."""
    env, source = run["environment"], run["code"]
    gpus = env.get("gpus") or []
    is_ours = run.get("provenance") != "imported"
    facts: dict[str, Any] = {"GPUs": device(env) if gpus else "none used" if is_ours else None}
    facts["power limit, W"] = gpus[0].get("power_limit_w") if gpus else None
    keys = ("cpu_model", "num_cpus", "memory_gib", "os", "python", "torch", "cuda", "nccl", "driver")
    facts |= {NAMES.get(key, key): env.get(key) for key in keys}
    if commit := source.get("commit"):
        changed = " with uncommitted changes" if source.get("dirty") else ""
        facts["commit"] = Shown(commit + changed, join([tag("code", commit), tag("span", changed) if changed else ""]))
    facts["source sha256"] = code(source["source_sha256"]) if source.get("source_sha256") else None
    ids = {key: run.get(key) for key in ("config_id", "session_id", "comparability_id")}
    facts |= {key: code(str(value)) for key, value in ids.items() if value}
    facts["timing protocol"] = (run.get("timing_protocol") or {}).get("id")
    facts["by the launcher's clock"] = _outside(run)
    if is_ours:
        facts["command"] = code(" ".join(["./run.sh", *(run.get("command") or [])]))
        facts["instruments"] = ", ".join(run["instruments"] or []) or "none"
        facts["started"] = run["started_at"]
        replayed, way = certificates.sentence(folder), private.way(folder, at)
        facts["certificate"] = _link(folder, certificates.FILE, way, replayed) if replayed else None
    shards = [
        [split, file["file"], file["num_tokens"], code(file["sha256"])]
        for split in ("train", "val")
        for file in run["data"].get(split) or []
    ]
    facts = {key: fact if isinstance(fact, Shown) else plain(fact) for key, fact in facts.items()}
    data = Section(f"Data: {len(shards)} shards", [Table(("split", "shard", "tokens", "sha256"), shards)], True)
    return _facts("Environment", facts, *([data] if shards else []))


def _outside(run: Record) -> str | None:
    """Returns the times by the launcher's clock as text; None for an older record, which lacks it."""
    clock = (run.get("referee") or {}).get("clock")
    if clock is None or clock["unknown"]:
        return clock and f"unknown: {clock['unknown']}"
    return f"{clock['outside_train_s']:.3f} s of training, {clock['outside_s']:.3f} s with validations"


def stages(run: Record) -> Section:
    """Returns a table of the run's stages; empty for a run without stages."""
    rows = run["measured"].get("stages") or ()
    columns = {
        "from step": "first_step",
        "steps": "num_steps",
        "tokens per step": "batch_tokens",
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
    shown = {head: key for head, key in columns.items() if any(row.get(key) is not None for row in rows)}
    lines = [[_joined(row.get(key)) for key in shown.values()] for row in rows]
    return Section("Stages", [Table(tuple(shown), lines)] if rows else [])


def _joined(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(f"{number:g}" for number in value)
    return ", ".join(f"{name} {entry}" for name, entry in value.items()) if isinstance(value, dict) else value


def summaries(run: Record) -> Section:
    """Returns the summary of each instrument."""
    parts = []
    for name, summary in (run.get("instrument_summaries") or {}).items():
        lines = [[key, round(value, 6) if isinstance(value, float) else plain(value)] for key, value in summary.items()]
        parts.append(Section(name, [Table((), lines)], is_folded=True))
    return Section("Instruments", [Columns(parts)])


def files(folder: Path, run: Record, at: Path) -> Section:
    """Returns all files of the record with links to those that exist, and the settings.  at: the page's folder."""
    settings = [folder / name for name in ("config.yaml", "overrides.yaml") if (folder / name).exists()]
    settings = [path for path in settings if not path.is_symlink()]  # to a file of the reader's own
    parts = [Section(path.name, [Verbatim(_text(path))], is_folded=True) for path in settings]
    entries = [{"path": "run.json", "role": "record"}, *run["artifacts"]]
    way, lines = private.way(folder, at), list[list[Any]]()
    for file in entries:
        size = format_bytes(file["num_bytes"]) if "num_bytes" in file else None
        sha256 = code(file["sha256"]) if file.get("sha256") else None
        lines.append([_link(folder, file["path"], way), file["role"], size, sha256])
    listed = Table(("file", "role", "size", "sha256"), lines)
    is_long = len(lines) > MAX_OPEN_FILES
    return Section("Files", [Section(f"{len(lines)} files", [listed], True) if is_long else listed, *parts])


def _text(path: Path) -> str:
    try:
        return plain_file.text(path, yaml_file.MAX_BYTES, errors="replace")
    except Damaged as error:
        return str(error)


def _link(folder: Path, name: str, way: str | None, text: str | None = None) -> Shown:
    if not os.path.isfile(f"{folder}/{name}"):  # traces and logs are often left out when a run is sent
        return coloured(name, "soft", "not in this folder")
    return link(text or name, way and quote(os.path.normpath(f"{way}/{name}")))


def section_of(run: Record, rows: Sequence[StepRow], events: Sequence[Mapping[str, Any]]) -> Section:
    """Returns what happened in the run: what cost time, its events, and instrument warnings."""
    costs = costs_of(run, rows)
    lines = []
    for kind, cost in costs.items():
        if cost["count"]:
            ms = cost.get("ms")
            lines.append([_kind(kind), cost["count"], round(ms, 3) if isinstance(ms, float) else ms])
    caption = "Costs in the timed region"
    parts: list[Block] = [Table(("what", "count", "cost, ms"), lines, caption=caption)] if lines else []
    quiet = [_kind(kind) for kind, cost in costs.items() if not cost["count"]]
    until = "" if run["status"] == "complete" else " before it ended"
    parts += [Lines([f"None of these occurred{until}: {', '.join(quiet)}."])] if quiet else []
    missing = ["stall (too few timed steps)"] * ("stall" not in costs)
    missing += [_kind(kind) for kind in stalls.WATCHED_BY if kind not in costs]
    why = "a log does not say" if is_imported(run) else "no instrument recorded it to an end"
    unwatched = [f"Not watched, so unknown: {', '.join(missing)} ({why})."] if missing else []
    parts.append(Lines(unwatched, is_soft=True))
    loud = [event for event in events if event["event"] not in QUIET_EVENTS]
    if loud:
        facts = [[event["event"], event.get("step"), event.get("rank"), details(event)] for event in loud[:MAX_EVENTS]]
        rest = f", the first {MAX_EVENTS} shown" if len(loud) > MAX_EVENTS else ""
        listed = Table(("event", "step", "rank", "facts"), facts)
        title = counted(len(loud), "event") + rest
        parts.append(Section(title, [listed], is_folded=True) if len(loud) > MAX_OPEN_EVENTS else listed)
    warnings = [
        f"Instrument warning: {warning.get('instrument')}, rank {warning.get('rank')}: {warning.get('error')}"
        for warning in run.get("warnings") or []
    ]
    return Section("Events", [*parts, Bullets(warnings)])


def costs_of(run: Record, rows: Sequence[StepRow]) -> dict[str, dict[str, Any]]:
    """Returns {kind: {"count", "ms"}} of the record, with stalls found from its steps if it lists none."""
    kept = {kind: cost for kind, cost in (run.get("costs") or {}).items() if isinstance(cost, dict) and "count" in cost}
    if "stall" in kept:
        return kept
    timed = [row for row in rows if row["step"] and row.get("step_ms") is not None]
    return ({"stall": stalls.cost(timed)} if len(timed) >= stalls.MIN_STEPS else {}) | kept


def _kind(kind: str) -> str:
    return kind.replace("_", " ")


def details(event: Mapping[str, Any]) -> str:
    """Returns an event's facts as text; for a stall, its length, its causes and its regions come first."""
    skipped, parts = ["t_ns", "utc", "event", "rank", "step"], []
    if event["event"] == "stall" and all(name in event for name in STALL):
        skipped += STALL
        causes = {cause["what"]: cause["ms"] for cause in event["causes"]} or {event["what"]: None}
        parts = [f"{event['ms']:.4g} ms above the usual {event['usual_ms']:.4g} ms", f"cause: {_each_ms(causes)}"]
        parts += [f"in {_each_ms(event['where'])}"] if event["where"] else []
    shown = {key: value for key, value in event.items() if key not in skipped and value not in (None, [], {})}
    return ", ".join([*parts, *(f"{key} {plain(value)}" for key, value in shown.items())])


def _each_ms(ms_by_name: Mapping[str, float | None]) -> str:
    lines = ((_kind(name.removesuffix("_ms")), ms) for name, ms in ms_by_name.items())
    return ", ".join(name if ms is None else f"{name} {ms:.4g} ms" for name, ms in lines)


def plain(value: object) -> str | None:
    """Returns a value of a record as text; None stays None."""
    if value is None:
        return None
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


IMPORTED = "imported"
FROM_OUTSIDE = (
    ("wall_of_lines_s", "from its first line to its last, s"),
    ("counted_s", "of which its clock counted, s"),
    ("uncounted_s", "of which it did not count, s"),
    ("uncounted_at_validations_s", "uncounted before validations, s"),
    ("unseen_s", "uncounted while steps had no line, s"),
    ("overcounted_s", "counted although it did not pass, s"),
    ("num_untimed_steps", "first steps that its clock left out"),
    ("foreign_cpu_cores", "other programs' load, CPU cores"),
)


def is_imported(run: Record) -> bool:
    """Returns whether a record was made from another harness's log."""
    return run.get("provenance") == "imported"


def made_of(run: Record) -> str:
    """Returns text on the log or script that the run is of, to follow its id; "" for a run of our own model."""
    log, script = run.get("imported") or {}, run.get("script")
    if is_imported(run):
        return f", imported from a log of {log.get('format')}: {log.get('file')}"
    return f", script {script['file']}, dialect {script.get('dialect') or 'unknown'}" if script else ""


def imported_section(run: Record) -> Section:
    """Returns the harness and the log that the run comes from, and what its clock counts."""
    of = run.get("imported") or {}
    zone = of.get("started_zone") or "unknown"
    started = f"{str(run['started_at']).removesuffix('Z')}, time zone {zone}"
    number, num_runs = of.get("run_of_file"), of.get("num_runs_of_file")
    facts = {
        "harness": of.get("format"),
        "log": code(str(of.get("file"))),
        "sha256 of the log": code(str(of.get("sha256"))),
        "run of the log": f"{number + 1} of {num_runs}" if num_runs and number is not None and num_runs > 1 else None,
        "run by": "the log does not say",
        "started": started if run["started_at"] else "the log does not say",
        "clock": (run.get("timing_protocol") or {}).get("clock"),
        "step_avg in the log": None if of.get("printed_step_avg_ms") is None else f"{of['printed_step_avg_ms']} ms",
        "it means": of.get("step_avg_meaning"),
        "declared steps": plain(of.get("declared_steps")),
        "result its author goes by": ", ".join(f"{key} {value}" for key, value in (of.get("headline") or {}).items())
        or None,
    }
    note = "The log itself is not kept: compare its sha256 with that of the file you have."
    return _facts("Imported from a log", facts, Lines([note], is_soft=True))


def unknown_section(run: Record) -> Section:
    """Lists the facts that a record of our own has and this one lacks."""
    env, source, data = run["environment"], run["code"], run["data"]
    facts = {
        "seed": run["seed"],
        "config and overrides": run["config_id"],
        "commit": source.get("commit"),
        "source code": source.get("source_sha256"),
        "command": run.get("command") or None,
        "session (so whether two runs shared one)": run["session_id"],
        "training and validation data": data.get("train") or None,
        "number of validation tokens": (run["goal"] or {}).get("val_tokens"),
        "model": None if run["model"].get("arch") == "unknown" else run["model"].get("arch"),
        "optimizer": None if run["optim"] == "unknown" else run["optim"],
        "tokens per step": run["measured"].get("batch_tokens"),
        "GPUs": env.get("gpus") or None,
        "number of processes": run["world_size"],
        **{
            NAMES.get(key, key): env.get(key)
            for key in ("python", "torch", "cuda", "nccl", "driver", "os", "cpu_model")
        },
        "train time": run["metrics"].get("train_s"),
        "peak memory": run["metrics"].get("peak_mem_gib"),
        "power, clocks and temperature": run["metrics"].get("energy_j"),
        "load of other programs": None,  # no log has this fact or the next
        "recompiles, garbage collection, allocator retries": None,
    }
    return Section("Unknown", [Bullets([name for name, value in facts.items() if value is None])])


def script_section(run: Record) -> Section:
    """Returns facts about the script, measured and opened files included; empty for a run of our own model."""
    of, measured = run.get("script"), run["measured"]
    if not of:
        return Section("", [])
    facts = {
        "script": code(" ".join([of["file"], *of["args"]])),
        "its interpreter": of.get("python") or "the harness's own",
        "variables": ", ".join(f"{name}={value}" for name, value in of["env"].items()) or None,
        "sources": ", ".join(name.removeprefix("script/") for name in of["sha256_by_file"]),
        "dialect of its lines": of.get("dialect"),
        "steps that it declared": _plain_number(of.get("declared_steps")),
        "its step_avg": of.get("step_avg_meaning"),
        **{name: _plain_number(measured.get(key)) for key, name in FROM_OUTSIDE},
        "data that it opened": ", ".join(of.get("opened") or ()) or "none that was seen",
        "files that it wrote": _files_written(of),
        "lines that its log lacks": of.get("num_unkept_lines") or None,
    }
    note = "The script timed itself; the launcher timed its lines.  A seed that it does not take is only a label."
    return _facts("The training script", facts, Lines([note], is_soft=True))


def _plain_number(value: float | None) -> str | None:
    return f"{value:.3f}" if isinstance(value, float) else None if value is None else str(value)


def _files_written(of: dict[str, Any]) -> str | None:
    names = of.get("files_written") or []
    num_omitted = of.get("num_files_written", len(names)) - len(names)
    return ", ".join([*names, *([f"{num_omitted:,} more"] if num_omitted else [])]) or None
