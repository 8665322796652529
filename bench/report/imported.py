"""What the page of a run says of a log that was imported, and of a training script: its origin, its claims.

Of the first another program's log is the only witness; of the second the launcher saw something from outside.
"""

from bench.report import run_facts
from bench.web.page import Safe, bullets, section, soft, table, tag

WORD = "imported"
FROM_OUTSIDE = (
    ("wall_of_lines_s", "its lines came in, s"),
    ("counted_s", "of that it counted, s"),
    ("uncounted_s", "and did not count, s"),
    ("uncounted_at_validations_s", "of that before validations, s"),
    ("unseen_s", "of that with steps that have no line, s"),
    ("overcounted_s", "counted, but not passed, s"),
    ("num_untimed_steps", "first steps that are in no time"),
    ("foreign_cpu_cores", "other programs' load, CPU cores"),
)


def is_one(run: dict) -> bool:
    """Whether a record was made from another harness's log."""
    return run.get("provenance") == "imported"


def badges(run: dict) -> list[tuple[str, str]]:
    """(word, colour) of each: none is green, because nothing here watched the run."""
    result = [(WORD, "doubt"), ("log complete" if run["status"] == "complete" else "log incomplete", "soft")]
    return result + [("suspect", "doubt")] * (run["validity"] == "suspect")


def line(run: dict) -> str:
    """What stands below the title; "" for a run of our own."""
    of = run.get("imported") or {}
    return f", imported from a log of {of.get('format')}: {of.get('file')}" if is_one(run) else ""


def section_of(run: dict) -> Safe:
    """From which harness and file the run is, by whom and when, and what its clock counts."""
    of = run.get("imported") or {}
    zone = of.get("started_zone") or "unknown"
    started = f"{str(run['started_at']).removesuffix('Z')}, time zone {zone}"
    number, num_runs = of.get("run_of_file"), of.get("num_runs_of_file")
    facts = {
        "harness": " ".join(filter(None, [of.get("format"), f"(lines of kind {of.get('format_id')})"])),
        "log": tag("code", of.get("file")),
        "sha256 of the log": tag("code", of.get("sha256")),
        "run of the log": f"{number + 1} of {num_runs}" if num_runs and number is not None and num_runs > 1 else None,
        "run by": "the log does not say",
        "started": started if run["started_at"] else "the log does not say",
        "clock": (run.get("timing_protocol") or {}).get("clock"),
        "step_avg in the log": None if of.get("printed_step_avg_ms") is None else f"{of['printed_step_avg_ms']} ms",
        "it means": of.get("step_avg_meaning"),
        "declared steps": run_facts.plain(of.get("declared_steps")),
        "result its author goes by": ", ".join(f"{key} {value}" for key, value in (of.get("headline") or {}).items())
        or None,
    }
    lines = [(key, value) for key, value in facts.items() if value is not None]
    note = soft("The log itself is not kept: compare its sha256 with that of the file you have.")
    return section("Imported from a log", table((), lines, class_="facts"), note)


def unknown(run: dict) -> Safe:
    """What a record of our own has and this one lacks."""
    env, code, data = run["environment"], run["code"], run["data"]
    facts = {
        "seed": run["seed"],
        "config and overrides": run["config_id"],
        "commit": code.get("commit"),
        "source code": code.get("source_sha256"),
        "command": run.get("command") or None,
        "session (so whether two runs shared one)": run["session_id"],
        "training and validation data": data.get("train") or None,
        "number of validation tokens": run["goal"].get("val_tokens"),
        "model": None if run["model"].get("arch") == "unknown" else run["model"].get("arch"),
        "optimizer": None if run["optim"] == "unknown" else run["optim"],
        "tokens a step": run["measured"].get("batch_tokens"),
        "GPUs": env.get("gpus") or None,
        "number of processes": run["world_size"],
        **{
            run_facts.NAMES.get(key, key): env.get(key)
            for key in ("python", "torch", "cuda", "nccl", "driver", "os", "cpu_model")
        },
        "train time": run["metrics"].get("train_s"),
        "peak memory": run["metrics"].get("peak_mem_gib"),
        "power, clocks and temperature": run["metrics"].get("energy_j"),
        "load of other programs": None,  # a log has none of these two
        "recompiles, garbage collection, allocator retries": None,
    }
    return section("Unknown", bullets([name for name, value in facts.items() if value is None]))


def script_line(run: dict) -> str:
    """What stands below the title; "" for a run of our own model."""
    of = run.get("script")
    return f", script {of['file']}, dialect {of.get('dialect') or 'unknown'}" if of else ""


def script_claim(run: dict) -> str:
    """Behind the times of the sentence that says how the run ended."""
    wall_s = run["measured"].get("wall_of_lines_s")
    if not run.get("script"):
        return ""
    return ", as the script says" + ("" if wall_s is None else f" (its lines came in {wall_s:.2f} s)")


def script_section(run: dict) -> Safe | str:
    """What ran, what was measured from outside, and what it opened; "" for a run of our own model."""
    of, measured = run.get("script"), run["measured"]
    if not of:
        return ""
    facts = {
        "script": tag("code", " ".join([of["file"], *of["args"]])),
        "its interpreter": of.get("python") or "the harness's own",
        "variables": ", ".join(f"{name}={value}" for name, value in of["env"].items()) or None,
        "sources": ", ".join(name.removeprefix("script/") for name in of["sha256_by_file"]),
        "dialect of its lines": of.get("dialect"),
        "steps that it declared": _number(of.get("declared_steps")),
        "its step_avg": of.get("step_avg_meaning"),
        **{name: _number(measured.get(key)) for key, name in FROM_OUTSIDE},
        "data that it opened": ", ".join(of.get("opened") or ()) or "none that was seen",
        "files that it wrote": ", ".join(of.get("files_written") or ()) or None,
        "lines that its log lacks": of.get("num_unkept_lines") or None,
    }
    lines = [(name, value) for name, value in facts.items() if value is not None]
    note = soft(
        "Its time is its own claim; the wall time of its lines was taken by another process.  Seeds are labels."
    )
    return section("The training script", table((), lines, class_="facts"), note)


def _number(value):
    return f"{value:.3f}" if isinstance(value, float) else None if value is None else str(value)
