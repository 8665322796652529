"""./run.sh export RUN|FOLDER... --to csv|parquet|mllog|modded-nanogpt [--steps] [--out PATH]      records for other programs

csv, parquet: a line a run, or with --steps a line a step.  mllog: MLPerf's ":::MLLOG {json}" lines of each run.  modded-nanogpt:
a log in the format of its records, code first.  Without --out everything but parquet goes to the terminal.
"""

import argparse
import csv
import io
import json
import os
import sys
from datetime import datetime

from bench import atomic, places, record, steps
from bench import table as results_table

FORMATS = ("csv", "parquet", "mllog", "modded-nanogpt")
RULE = "=" * 100


def main(argv):
    """Exit codes: 0 written, 2 wrong use."""
    args = _parser().parse_args(argv)
    folders = list(dict.fromkeys(record.find_runs([record.locate(word) for word in args.run])))
    if not folders:
        raise ValueError(f"{' '.join(args.run)}: there is no run in there: ./run.sh table lists the runs")
    out = args.out and places.of_user(args.out)
    if args.to == "parquet":
        if out is None:
            raise ValueError("--to parquet: it is no text: say where with --out FILE.parquet")
        _parquet(_rows(folders, args.steps), out)
    elif args.to == "csv":
        _put(as_csv(_rows(folders, args.steps)), out)
    elif args.to == "mllog":
        _put("".join(line + "\n" for folder in folders for line in mllog(record.read(folder), steps.read(folder))), out)
    else:
        if len(folders) != 1:
            raise ValueError(f"--to modded-nanogpt: it is the log of one run, and these are {len(folders)}")
        _put(modded_nanogpt_log(folders[0]), out)
    return 0


def _rows(folders, of_steps):
    """[{column: value}]: of runs as the table has them, or of all their steps with run_id first."""
    if of_steps:
        return [{"run_id": record.read(folder)["run_id"]} | row for folder in folders for row in steps.read(folder)]
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
    pyarrow.parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in columns}), out)
    print(os.path.relpath(out))


# ---- MLPerf


def mllog(run, rows):
    """Lines of one run: https://github.com/mlcommons/logging, keys of MLPerf training; times are the record's own.

    A line is ":::MLLOG " and a JSON object: namespace, time_ms (Unix), event_type, key, value, metadata.
    """
    start_ms = _unix_ms(run["started_at"])

    def line(kind, key, value, at_ms, **metadata):
        event = {"namespace": "", "time_ms": at_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}
        return ":::MLLOG " + json.dumps(event)

    gpus = run["environment"].get("gpus") or []
    yield line("POINT_IN_TIME", "submission_benchmark", run["track"], start_ms, run_id=run["run_id"])
    yield line("POINT_IN_TIME", "submission_platform", f"{len(gpus)}x{gpus[0]['name']}" if gpus else run["environment"].get("cpu_model"), start_ms)
    for key, value in (("seed", run["seed"]), ("global_batch_size", run["measured"].get("batch_tokens")), ("opt_name", run["optim"])):
        yield line("POINT_IN_TIME", key, value, start_ms)
    yield line("INTERVAL_START", "run_start", None, start_ms)
    train_ms = 0.0
    for row in rows:
        train_ms += row.get("step_ms") or 0.0
        if row.get("val_loss") is not None:
            yield line("POINT_IN_TIME", "eval_accuracy", row["val_loss"], start_ms and round(start_ms + train_ms), step_num=row["step"], loss="nats per token")
    status = "success" if run["status"] == "complete" and run["metrics"].get("target_reached") is not False else "aborted"
    total_ms = 1e3 * run["metrics"]["train_s"] if run["metrics"].get("train_s") is not None else train_ms
    yield line("INTERVAL_END", "run_stop", None, start_ms and round(start_ms + total_ms), status=status)


def _unix_ms(utc):
    return None if utc is None else round(1e3 * datetime.fromisoformat(utc.replace("Z", "+00:00")).timestamp())


# ---- modded-nanogpt


def modded_nanogpt_log(folder):
    """Code, environment and step lines between rules of 100 =, as in the records of KellerJordan/modded-nanogpt.

    train_time is the sum of the record's step times, step_avg train_time / step; validation is outside of it.
    """
    run, rows = record.read(folder), steps.read(folder)
    env, gpus = run["environment"], run["environment"].get("gpus") or []
    patch = folder / "code" / "diff.patch"
    code = [f"# {run['run_id']}: commit {run['code'].get('commit')}, sources sha256 {run['code'].get('source_sha256')}"]
    if patch.is_file() and patch.stat().st_size:
        code += ["# changes that were not committed:"] + [f"# {line}" for line in patch.read_text(errors="replace").splitlines()]
    where = f"{len(gpus)} x {gpus[0]['name']}" if gpus else env.get("cpu_model")
    words = [f"Running Python {env.get('python')}", f"Running PyTorch {env.get('torch')} compiled for CUDA {env.get('cuda')}",
             f"Running on {where} with world_size {run['world_size']}", f"Using seed={run['seed']}"]  # fmt: skip
    total, train_ms, lines = run["metrics"].get("num_steps") or (rows[-1]["step"] if rows else 0), 0.0, []
    for row in rows:
        step = row["step"]
        train_ms += row.get("step_ms") or 0.0
        average = f"train_time:{train_ms:.0f}ms step_avg:{train_ms / max(step, 1):.2f}ms"
        if step:
            lines.append(f"step:{step}/{total} {average}")
        if row.get("val_loss") is not None:
            lines.append(f"step:{step}/{total} val_loss:{row['val_loss']:.4f} {average}")
    peak_gib = run["metrics"].get("peak_mem_gib")
    if peak_gib is not None:
        lines.append(f"peak memory allocated: {peak_gib * 1024:.0f} MiB")
    return "\n".join([*code, RULE, *words, RULE, *lines]) + "\n"


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
