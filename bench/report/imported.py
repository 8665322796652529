"""What the page of a run says that another program's log is the only witness of: where it is from, what is unknown."""

from bench.report import run_events, run_facts
from bench.web.page import Safe, bullets, section, soft, table, tag

WORD = "imported"


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
        "declared steps": run_events.plain(of.get("declared_steps")),
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
