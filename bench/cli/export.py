"""./run.sh export RUN|FOLDER... --to csv|parquet|mllog|modded-nanogpt [--steps] [--out PATH]      records for other programs

csv, parquet: a line a run, or with --steps a line a step.  mllog: MLPerf's ":::MLLOG {json}" lines of each run.  modded-nanogpt:
a log in the format of its records, code first.  Without --out everything but parquet goes to the terminal.
"""

import argparse
import csv
import io
import json
import math
import os
import sys
from datetime import datetime

from bench import atomic, paths
from bench.record import run_folder, step_files
from bench.cli import table as results_table

FORMATS = ("csv", "parquet", "mllog", "modded-nanogpt")
RULE = "=" * 100


def main(argv):
    """Exit codes: 0 written, 2 wrong use."""
    args = _parser().parse_args(argv)
    folders = list(dict.fromkeys(run_folder.find_runs([run_folder.locate(word) for word in args.run])))
    if not folders:
        raise ValueError(f"{' '.join(args.run)}: there is no run in there: ./run.sh table lists the runs")
    out = args.out and paths.of_user(args.out)
    if args.to == "parquet":
        if out is None:
            raise ValueError("--to parquet: it is no text: say where with --out FILE.parquet")
        _parquet(_rows(folders, args.steps), out)
    elif args.to == "csv":
        _put(as_csv(_rows(folders, args.steps)), out)
    elif args.to == "mllog":
        _put("".join(line + "\n" for folder in folders for line in mllog(run_folder.read(folder), step_files.read(folder), step_files.read_events(folder))), out)
    else:
        if len(folders) != 1:
            raise ValueError(f"--to modded-nanogpt: it is the log of one run, and these are {len(folders)}")
        _put(modded_nanogpt_log(folders[0]), out)
    return 0


def _rows(folders, of_steps):
    """[{column: value}]: of runs as the table has them, or of all their steps with run_id first."""
    if of_steps:
        return [{"run_id": run_folder.read(folder)["run_id"]} | row for folder in folders for row in step_files.read(folder)]
    return results_table.read_rows([str(folder) for folder in folders])


def as_csv(rows):
    columns = list(dict.fromkeys(column for row in rows for column in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: json.dumps(value) if isinstance(value, (list, dict)) else value for key, value in row.items()} for row in rows)
    return out.getvalue()


def _parquet(rows, out):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError("--to parquet: it needs pyarrow: pip install 'pyarrow>=15' into the Python that runs this") from None
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    try:
        pyarrow.parquet.write_table(table, out)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({os.strerror(error.errno) if error.errno else error})") from None
    print(os.path.relpath(out))


# ---- MLPerf


def mllog(run, rows, events=()):
    """Lines of one run: https://github.com/mlcommons/logging, keys of MLPerf training.  events: of its events.jsonl.

    A line is ":::MLLOG " and a JSON object: namespace, time_ms (Unix), event_type, key, value, metadata.  Times are those of the
    events, which bear MLPerf's names; a log that has none is timed by its train time from its start, and what is unknown has no
    line, or no time_ms.  train_s in the metadata is the race's clock, which stands still while a validation runs.
    """
    at_ms = {(event["event"], event.get("step") if event["event"] == "eval_stop" else None): _unix_ms(event.get("utc")) for event in events}
    begun_ms = _unix_ms(run["started_at"])
    start_ms = at_ms.get(("run_start", None), begun_ms)

    def line(kind, key, value, time_ms, **metadata):
        event = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}
        return ":::MLLOG " + json.dumps(event)

    gpus = run["environment"].get("gpus") or []
    yield line("POINT_IN_TIME", "submission_benchmark", run["track"], begun_ms, run_id=run["run_id"])
    platform = f"{len(gpus)}x{gpus[0]['name']}" if gpus else run["environment"].get("cpu_model")
    measured = run["measured"]
    facts = {
        "submission_platform": platform, "seed": run["seed"], "global_batch_size": measured.get("batch_tokens"),
        "gradient_accumulation_steps": measured.get("num_micro_steps"), "opt_name": run["optim"],
    }  # fmt: skip
    for key, value in facts.items():
        if value not in (None, "unknown"):
            yield line("POINT_IN_TIME", key, value, begun_ms)
    if ("init_start", None) in at_ms and ("run_start", None) in at_ms:
        yield line("INTERVAL_START", "init_start", None, at_ms["init_start", None])
        yield line("INTERVAL_END", "init_stop", None, start_ms)
    yield line("INTERVAL_START", "run_start", None, start_ms)
    train_ms = 0.0
    for row in rows:
        train_ms = row["train_time_ms"] if row.get("train_time_ms") is not None else train_ms + (row.get("step_ms") or 0.0)
        if row.get("val_loss") is not None:
            known = round(start_ms + train_ms) if start_ms is not None and (train_ms or not row["step"]) else None
            told = {"step_num": row["step"], "samples_count": row.get("tokens"), "samples": "tokens", "loss": "nats per token"}
            yield line("POINT_IN_TIME", "eval_accuracy", row["val_loss"], at_ms.get(("eval_stop", row["step"]), known), **told)
    status = "success" if run["status"] == "complete" and run["metrics"].get("target_reached") is not False else "aborted"
    train_s = run["metrics"].get("train_s")
    total_ms = 1e3 * train_s if train_s is not None else train_ms
    known = round(start_ms + total_ms) if start_ms is not None and total_ms else None
    yield line("INTERVAL_END", "run_stop", None, at_ms.get(("run_stop", None), known), status=status, train_s=train_s)


def _unix_ms(utc):
    return None if utc is None else round(1e3 * datetime.fromisoformat(utc.replace("Z", "+00:00")).timestamp())


# ---- modded-nanogpt


def modded_nanogpt_log(folder):
    """Code, environment and step lines between rules of 100 =, as in the records of KellerJordan/modded-nanogpt.

    train_time is the record's, validation outside of it, in whole milliseconds as there; losses have 4 decimals, or all that
    the record has.  A run without times is written as llm.c's log, which has none.  What is unknown has no line.
    """
    run, rows = run_folder.read(folder), step_files.read(folder)
    patch = folder / "code" / "diff.patch"
    code = [f"# sources sha256 {run['code'].get('source_sha256')}, commit {run['code'].get('commit')}"]
    if patch.is_file() and patch.stat().st_size:
        code += ["# changes that were not committed:"] + [f"# {line}" for line in patch.read_text(errors="replace").splitlines()]
    imported = run.get("imported") or {}
    has_times = run["metrics"].get("train_s") is not None or (not imported and any(row.get("step_ms") is not None for row in rows))
    lines = list(_step_lines(rows, _num_planned(folder, run, rows), imported) if has_times else _llmc_lines(rows))
    lines += [f"tailavg {_tail(words)}" for words in imported.get("tail_averages") or ()]
    lines += imported.get("other_lines") or ()
    peaks_gib = (run["measured"].get("peak_mem_gib_by_rank") or {}).get("allocated") or ()
    if peaks := [gib for gib in peaks_gib if gib is not None]:
        lines.append(f"peak memory allocated: {max(peaks) * 1024:.0f} MiB")
    return "\n".join([*code, RULE, *_environment(run), RULE, *lines]) + "\n"


def _environment(run):
    env, gpus = run["environment"], run["environment"].get("gpus") or []
    yield f"# {run['run_id']}"
    if env.get("python") is not None:
        yield f"Running Python {env['python']}"
    if env.get("torch") is not None:
        yield f"Running PyTorch {env['torch']}" + (f" compiled for CUDA {env['cuda']}" if env.get("cuda") else "")
    if gpus or env.get("cpu_model"):
        power_w = {gpu.get("power_limit_w") for gpu in gpus} - {None}
        limit = f" at {power_w.pop():g} W" if len(power_w) == 1 else ""
        ranks = f" with world_size {run['world_size']}" if run["world_size"] is not None else ""
        where = f"{len(gpus)} x {gpus[0]['name']}" if gpus else env["cpu_model"]
        yield f"Running on {where}{limit}{ranks}"
    if env.get("driver") is not None:
        yield f"Driver Version: {env['driver']}"
    if run["started_at"] is not None:
        is_local = str((run.get("imported") or {}).get("started_zone")).startswith("unknown")
        yield f"{datetime.fromisoformat(run['started_at']):%a %b %d %H:%M:%S %Y}" if is_local else f"Run UTC timestamp={run['started_at']}"
    if run["seed"] is not None:
        yield f"Using seed={run['seed']}"


def _num_planned(folder, run, rows):
    """Steps that the run was to have: a log that says fewer would make a run that broke off look like a whole one."""
    declared, config = (run.get("imported") or {}).get("declared_steps"), folder / "config.yaml"
    if declared is None and run["status"] != "complete" and config.is_file():
        import yaml

        declared = (yaml.safe_load(config.read_text()).get("goal") or {}).get("max_steps")
    if declared is None and run["status"] != "complete":
        raise ValueError(f"{run['run_id']}: status={run['status']}, and it does not say how many steps it was to have: export it --to csv")
    return declared or run["metrics"].get("num_steps") or (rows[-1]["step"] if rows else 0)


def _step_lines(rows, total, imported):
    """One line a step and one a validation; step_avg as the record's log had it: see importers.modded_nanogpt.MEANINGS."""
    meaning, tails, train_ms, before = imported.get("step_avg_meaning") or "", imported.get("line_tails") or {}, 0.0, (0, 0.0)
    for row in rows:
        step, known_ms = row["step"], row.get("train_time_ms")
        if known_ms is not None or (imported and row.get("step_ms") is None and step):
            train_ms = math.nan if known_ms is None else known_ms  # a log that does not say this step's
        else:
            train_ms += row.get("step_ms") or 0.0
        untimed = 10 if "step-10" in meaning else 0
        average = f"{train_ms / (step - untimed):.2f}" if step > untimed else "nan"
        start, tail = f"step:{step}/{total}", f" {_tail(tails[str(step)])}" if str(step) in tails else ""
        of_its_own = known_ms is not None and (row.get("val_loss") is None or row.get("train_time_at_val_ms") is not None)
        if step and (of_its_own or row.get("train_loss") is not None or row.get("step_ms") is not None):
            loss = "" if row.get("train_loss") is None else f" train_loss:{_loss(row['train_loss'])}"
            yield f"{start}{loss} train_time:{train_ms:.0f}ms step_avg:{average}ms"
        if row.get("val_loss") is not None:
            at_ms = train_ms if row.get("train_time_at_val_ms") is None else row["train_time_at_val_ms"]
            since, since_ms = before if "previous val" in meaning and step > before[0] else (untimed, 0.0)
            before = step, at_ms
            average = f"{(at_ms - since_ms) / (step - since):.2f}" if step > since else "nan"
            yield f"{start} val_loss:{_loss(row['val_loss'])} train_time:{at_ms:.0f}ms step_avg:{average}ms{tail}"


def _llmc_lines(rows):
    for row in rows:
        if row.get("train_loss") is not None:
            more = f" lr:{row['lr']!r} norm:{row['grad_norm']!r}" if None not in (row.get("lr"), row.get("grad_norm")) else ""
            yield f"s:{row['step']} trl:{_loss(row['train_loss'])}{more}"
        if row.get("val_loss") is not None:
            yield f"s:{row['step']} tel:{_loss(row['val_loss'])}"


def _loss(nats):
    return f"{nats:.4f}" if float(f"{nats:.4f}") == nats else repr(nats)


def _tail(words):
    return " ".join(f"{key}:{text}" if text else key for key, text in words.items())


def _put(text, out):
    if out is None:
        sys.stdout.write(text)
        return
    try:
        atomic.write_text(out, text)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from None
    print(os.path.relpath(out))


def _parser():
    parser = argparse.ArgumentParser(prog="./run.sh export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", metavar="RUN", help="run folders, run ids, or folders of runs")
    parser.add_argument("--to", choices=FORMATS, required=True)
    parser.add_argument("--steps", action="store_true", help="csv, parquet: a line a step instead of a run")
    parser.add_argument("--out", metavar="PATH")
    return parser
