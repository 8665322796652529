"""Runs, or their steps, for other programs: csv, parquet, MLPerf's log lines, a log as modded-nanogpt writes it."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.base import atomic, escape, utc
from bench.base.reading import plain_file, yaml_file
from bench.base.reading.damage import Damaged, reading_record
from bench.base.units import ms_from_s
from bench.record import named, run_folder, step_files
from bench.record.metrics import step_avg_ms
from bench.record.shape import Record, Section
from bench.record.step_files import StepRow

RULE = "=" * 100  # around the parts of modded-nanogpt's logs
T = TypeVar("T")


def rows_of(folders: Sequence[Path | str], with_steps: bool) -> Sequence[Mapping[str, Any]]:
    """[{column: value}]: of runs with every setting as a column, or of all their steps with run_id first."""
    if with_steps:
        runs = export_each(folders, lambda folder: (run_folder.read(folder)["run_id"], step_files.read(folder)))
        return [{"run_id": run_id} | row for run_id, rows in runs for row in rows]
    return _some(named.store_of([str(folder) for folder in folders]).listing(), folders)


def _some(found: Sequence[T], folders: Sequence[Path | str]) -> Sequence[T]:
    if folders and not found:
        raise ValueError(f"{folders[0]}: no record of {len(folders)} can be read: ./run.sh verify says what is wrong")
    return found


def export_each(folders: Iterable[Path | str], make: Callable[[Any], T]) -> Sequence[T]:
    """make(folder) of each run folder; a damaged record is excluded, on standard error.  ValueError: all are."""
    made, folders = [], list(folders)
    for folder in folders:
        try:
            with reading_record(folder):
                made.append(make(folder))
        except Damaged as error:
            named.report_excluded("export", str(error))
    return _some(made, folders)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows, whose keys may differ -> csv with a head; None is an empty cell, a list or dict is JSON in its own."""
    columns = _columns(rows)
    cells = ((row.get(column) for column in columns) for row in rows)
    lines = ([json.dumps(cell) if isinstance(cell, (list, dict)) else cell for cell in row] for row in cells)
    return escape.csv_text([columns, *lines])


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def write_parquet(rows: Sequence[Mapping[str, Any]], out: Path | str) -> None:
    """The same as a parquet file.  ValueError without pyarrow, or where out cannot be written."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        hint = "pip install 'pyarrow>=15' into the Python that runs this"
        raise ValueError(f"--to parquet: it needs pyarrow: {hint}") from None
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in _columns(rows)})
    except (pyarrow.ArrowException, OverflowError) as error:
        raise ValueError(f"--to parquet: a column has values of several kinds ({error}): use --to csv") from None
    atomic.refuse_record(Path(out))
    try:
        pyarrow.parquet.write_table(table, out)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise ValueError(f"--out {out}: cannot be written ({why})") from None


def mllog(folder: Path | str) -> str:
    """The lines of a run folder: https://github.com/mlcommons/logging, keys of MLPerf training.

    A line is ":::MLLOG " and a JSON object: namespace, time_ms (Unix), event_type, key, value, metadata.  Times are
    those of the events, which bear MLPerf's names; a log that has none is timed by its train time from its start, and
    what is unknown has no line, or no time_ms.  train_s in the metadata is the run's clock, which stands still during
    a validation.
    """
    return "".join(f"{line}\n" for line in _mllog_lines(run_folder.read(folder), folder))


def _mllog_lines(run: Record, folder: Path | str) -> Iterator[str]:
    at_ms: dict[tuple[str, int | None], int | None] = {}
    for event in step_files.read_events(folder):
        step = event.get("step") if event["event"] == "eval_stop" else None
        at_ms[event["event"], step] = _unix_ms(event.get("utc"))
    begun_ms = _unix_ms(run["started_at"])
    start_ms = at_ms.get(("run_start", None), begun_ms)
    yield _line("POINT_IN_TIME", "submission_benchmark", run["track"], begun_ms, run_id=run["run_id"])
    gpus = run["environment"].get("gpus") or []
    facts = {
        "submission_platform": f"{len(gpus)}x{gpus[0]['name']}" if gpus else run["environment"].get("cpu_model"),
        "seed": run["seed"],
        "global_batch_size": run["measured"].get("batch_tokens"),
        "gradient_accumulation_steps": run["measured"].get("num_micro_steps"),
        "opt_name": run["optim"],
    }
    for key, value in facts.items():
        if value not in (None, "unknown"):
            yield _line("POINT_IN_TIME", key, value, begun_ms)
    if ("init_start", None) in at_ms and ("run_start", None) in at_ms:
        yield _line("INTERVAL_START", "init_start", None, at_ms["init_start", None])
        yield _line("INTERVAL_END", "init_stop", None, start_ms)
    yield _line("INTERVAL_START", "run_start", None, start_ms)
    train_ms = 0.0
    for row in step_files.read(folder):
        train_ms = train_ms + (row.get("step_ms") or 0.0) if row.get("train_time_ms") is None else row["train_time_ms"]
        if row.get("val_loss") is not None:
            known_ms = round(start_ms + train_ms) if start_ms is not None and (train_ms or not row["step"]) else None
            time_ms = at_ms.get(("eval_stop", row["step"]), known_ms)
            units = {"samples_count": row.get("tokens"), "samples": "tokens", "loss": "nats per token"}
            yield _line("POINT_IN_TIME", "eval_accuracy", row["val_loss"], time_ms, step_num=row["step"], **units)
    has_reached = run["status"] == "complete" and run["metrics"].get("target_reached") is not False
    train_s = run["metrics"].get("train_s")
    total_ms = train_ms if train_s is None else ms_from_s(train_s)
    known_ms = round(start_ms + total_ms) if start_ms is not None and total_ms else None
    status, end_ms = "success" if has_reached else "aborted", at_ms.get(("run_stop", None), known_ms)
    yield _line("INTERVAL_END", "run_stop", None, end_ms, status=status, train_s=train_s)


def _line(kind: str, key: str, value: Any, time_ms: int | None, **metadata: Any) -> str:
    event = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}
    return ":::MLLOG " + json.dumps(event)


def _unix_ms(text: str | None) -> int | None:
    return None if text is None else round(ms_from_s(utc.seconds(text)))


def modded_nanogpt_log(folder: Path) -> str:
    """Code, environment and step lines between rules of 100 =, as in the records of KellerJordan/modded-nanogpt.

    The code is its sha256, its commit and what was not committed.  train_time is the sum of the steps so far, at the
    end the record's train_s, which is the slowest rank's; validation is outside of it.  Times have 0 decimals and
    losses 4, or all that the record has.  A run without times is written as llm.c's log, which has none.  What is
    unknown has no line.
    ValueError: it did not complete and does not say how many steps it was to have.
    """
    run, rows = run_folder.read(folder), step_files.read(folder)
    patch = folder / "code" / "diff.patch"
    code = [f"# sources sha256 {run['code'].get('source_sha256')}, commit {run['code'].get('commit')}"]
    if patch.is_file() and patch.stat().st_size:
        changes = plain_file.text(patch, errors="replace").splitlines()
        code += ["# changes that were not committed:", *(f"# {line}" for line in changes)]
    imported = run.get("imported") or {}
    is_timed = not imported and any(row.get("step_ms") is not None for row in rows)
    has_times = is_timed or run["metrics"].get("train_s") is not None
    train_s = run["metrics"].get("train_s") if is_timed and run["status"] == "complete" else None
    planned = _num_planned(folder, run, rows)
    lines = list(_step_lines(rows, planned, imported, train_s) if has_times else _llmc_lines(rows))
    lines += [f"tailavg {_tail(fields)}" for fields in imported.get("tail_averages") or ()]
    lines += imported.get("other_lines") or ()
    peaks_gib = (run["measured"].get("peak_mem_gib_by_rank") or {}).get("allocated") or ()
    if peaks := [gib for gib in peaks_gib if gib is not None]:
        lines.append(f"peak memory allocated: {max(peaks) * 1024:.0f} MiB")
    whole = "\n".join([*code, RULE, *_environment(run), RULE, *lines]) + "\n"
    return escape.CONTROL.sub(escape.shown, whole)


def _environment(run: Record) -> Iterator[str]:
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
        local = f"{utc.parse(run['started_at']):%a %b %d %H:%M:%S %Y}"
        yield local if is_local else f"Run UTC timestamp={run['started_at']}"
    if run["seed"] is not None:
        yield f"Using seed={run['seed']}"


def _num_planned(folder: Path, run: Record, rows: Sequence[StepRow]) -> int:
    """Steps that the run was to have: a log that says fewer would make a run that broke off look like a whole one."""
    declared = (run.get("imported") or {}).get("declared_steps")
    if declared is None and run["status"] != "complete":
        if (folder / "config.yaml").is_file():
            declared = (yaml_file.read(folder / "config.yaml").get("goal") or {}).get("num_steps")
        if declared is None:
            what = f"status={run['status']}, and it does not say how many steps it was to have"
            raise ValueError(f"{run['run_id']}: {what}: export it --to csv")
    return declared or run["metrics"].get("num_steps") or (rows[-1]["step"] if rows else 0)


def _step_lines(rows: Sequence[StepRow], total: int, imported: Section, train_s: float | None = None) -> Iterator[str]:
    """A line a step and one a validation; step_avg as the log had it.  train_s: of our own complete run."""
    meaning, tails = imported.get("step_avg_meaning") or "", imported.get("line_tails") or {}
    untimed, train_ms, before = 10 if "step-10" in meaning else 0, 0.0, (0, 0.0)
    for row in rows:
        step, known_ms = row["step"], row.get("train_time_ms")
        if known_ms is not None or (imported and row.get("step_ms") is None and step):
            train_ms = math.nan if known_ms is None else known_ms  # a log that does not say this step's
        else:
            train_ms += row.get("step_ms") or 0.0
        if train_s is not None and row is rows[-1]:
            train_ms = train_s * 1e3
        average = _average(train_ms, step - untimed)
        start, tail = f"step:{step}/{total}", f" {_tail(tails[str(step)])}" if str(step) in tails else ""
        is_own_time = row.get("val_loss") is None or row.get("train_time_at_val_ms") is not None
        has_line = (known_ms is not None and is_own_time) or row.get("train_loss") is not None
        if step and (has_line or row.get("step_ms") is not None):
            loss = "" if row.get("train_loss") is None else f" train_loss:{_loss(row['train_loss'])}"
            yield f"{start}{loss} train_time:{_ms(train_ms)}ms step_avg:{average}ms"
        if row.get("val_loss") is not None:
            at_ms = train_ms if row.get("train_time_at_val_ms") is None else row["train_time_at_val_ms"]
            since, since_ms = before if "previous val" in meaning and step > before[0] else (untimed, 0.0)
            before = step, at_ms
            average = _average(at_ms - since_ms, step - since)
            yield f"{start} val_loss:{_loss(row['val_loss'])} train_time:{_ms(at_ms)}ms step_avg:{average}ms{tail}"


def _average(train_ms: float, num_steps: int) -> str:
    average_ms = step_avg_ms(train_ms, max(0, num_steps))
    if average_ms is None:
        return "nan"
    return f"{average_ms:.2f}" if train_ms.is_integer() else _ms(average_ms)


def _llmc_lines(rows: Sequence[StepRow]) -> Iterator[str]:
    for row in rows:
        if row.get("train_loss") is not None:
            has_more = None not in (row.get("lr"), row.get("grad_norm"))
            more = f" lr:{row['lr']!r} norm:{row['grad_norm']!r}" if has_more else ""
            yield f"s:{row['step']} trl:{_loss(row['train_loss'])}{more}"
        if row.get("val_loss") is not None:
            yield f"s:{row['step']} tel:{_loss(row['val_loss'])}"


def _ms(time_ms: float) -> str:
    """Milliseconds to the nanosecond, none of the digits that say nothing."""
    return f"{time_ms:.6f}".rstrip("0").rstrip(".")


def _loss(nats: float) -> str:
    return f"{nats:.4f}" if float(f"{nats:.4f}") == nats else repr(nats)


def _tail(fields: dict[str, str]) -> str:
    return " ".join(f"{key}:{text}" if text else key for key, text in fields.items())
