"""Exports runs or their steps as csv, parquet, MLPerf's log lines, or a log like those of modded-nanogpt."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.base import atomic, escape, private, utc
from bench.base.paths import REPO
from bench.base.reading import plain_file, yaml_file
from bench.base.reading.damage import Damaged, reading_record
from bench.base.units import ms_from_s
from bench.machine import code_state
from bench.record import named, run_folder, step_files
from bench.record.metrics import step_avg_ms
from bench.record.shape import Record
from bench.record.step_files import StepRow

RULE = "=" * 100  # separates the parts of modded-nanogpt's logs
T = TypeVar("T")


def rows_of(folders: Sequence[Path | str], with_steps: bool) -> Sequence[Mapping[str, Any]]:
    """Returns rows, [{column: value}]: of runs with every setting as a column, or of all their steps with run_id."""
    if with_steps:
        runs = export_each(folders, _steps_of)
        return [{"run_id": run_id} | row for run_id, rows in runs for row in rows]
    return _not_empty(named.store_of([str(folder) for folder in folders]).listing(), folders)


def _steps_of(folder: Path | str) -> tuple[str, list[StepRow]]:
    """Returns the run's id and its steps.  Only a run that did not complete may have a line that was cut."""
    run = run_folder.read(folder)
    return run["run_id"], step_files.read(folder, strict=run["status"] == "complete")


def _not_empty(rows: Sequence[T], folders: Sequence[Path | str]) -> Sequence[T]:
    if folders and not rows:
        raise ValueError(f"{folders[0]}: no record of {len(folders)} can be read: ./run.sh verify says what is wrong")
    return rows


def export_each(folders: Iterable[Path | str], make: Callable[[Any], T]) -> Sequence[T]:
    """Returns make(folder) of each run folder; damaged records are reported and skipped.  ValueError if all are."""
    exports, folders = [], list(folders)
    for folder in folders:
        try:
            with reading_record(folder):
                exports.append(make(folder))
        except Damaged as error:
            named.report_excluded("export", str(error))
    return _not_empty(exports, folders)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows, whose keys may differ, as CSV with a header; None is an empty cell, lists and dicts are JSON."""
    columns = _columns(rows)
    cells = ((row.get(column) for column in columns) for row in rows)
    lines = ([json.dumps(cell) if isinstance(cell, (list, dict)) else cell for cell in row] for row in cells)
    return escape.csv_text([columns, *lines])


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def write_parquet(rows: Sequence[Mapping[str, Any]], out: Path | str) -> None:
    """Writes rows to a parquet file.  Raises ValueError without pyarrow, or if out cannot be written.

    pyarrow itself would remove a file, or as root a device, that it cannot write to.
    """
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
    pyarrow.parquet.write_table(table, content := io.BytesIO())
    atomic.write_out(Path(out), content.getvalue())


def mllog(folder: Path | str) -> str:
    """Returns a run as MLPerf training's log lines: https://github.com/mlcommons/logging.

    A line is ":::MLLOG " and a JSON object: namespace, time_ms (Unix), event_type, key, value, metadata.  Times are
    those of the record's events, which have MLPerf's names.  What is unknown has no line, or time_ms null.  train_s in
    the metadata is the time of the run's clock, which is paused during validations.
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
    for row in _steps_of(folder)[1]:
        if row.get("val_loss") is not None:
            time_ms = at_ms.get(("eval_stop", row["step"]))
            units = {"samples_count": row.get("tokens"), "samples": "tokens", "loss": "nats per token"}
            yield _line("POINT_IN_TIME", "eval_accuracy", row["val_loss"], time_ms, step_num=row["step"], **units)
    has_reached = run["status"] == "complete" and run["metrics"].get("target_reached") is not False
    status, end_ms = "aborted", at_ms.get(("run_stop", None))
    if has_reached and run["validity"] != "invalid":
        status = "success"
    facts = {"train_s": run["metrics"].get("train_s"), "validity": run["validity"]}
    yield _line("INTERVAL_END", "run_stop", None, end_ms, status=status, **facts)


def _line(kind: str, key: str, value: Any, time_ms: int | None, **metadata: Any) -> str:
    event = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}
    return ":::MLLOG " + json.dumps(event)


def _unix_ms(text: str | None) -> int | None:
    return None if text is None else round(ms_from_s(utc.seconds(text)))


def modded_nanogpt_log(folder: Path) -> str:
    """Returns a run as a log like those of KellerJordan/modded-nanogpt: code, environment and steps between rules.

    Instead of the code it has the code's sha256, the commit and the uncommitted changes, without credentials and
    private paths.  train_time is what a script
    printed, or else the sum of the steps so far; at the end of a complete run it is the record's train_s.  Values have
    all the digits of the record, and what is unknown has no line.
    Raises ValueError if the record is an imported log, or the run did not complete and its number of steps is unknown.
    """
    run, rows = run_folder.read(folder), _steps_of(folder)[1]
    if run.get("provenance") == "imported":
        raise ValueError(f"{run['run_id']}: was imported from a log, which is not written again: export it --to csv")
    patch = code_state.kept(folder) / "diff.patch"
    code = [f"# sources sha256 {run['code'].get('source_sha256')}, commit {run['code'].get('commit')}"]
    if patch.is_file() and patch.stat().st_size:
        changes = plain_file.text(patch, errors="replace").splitlines()
        code += ["# changes that were not committed:", *(f"# {line}" for line in changes)]
    train_s = run["metrics"].get("train_s") if run["status"] == "complete" else None
    num_untimed = run["measured"].get("num_untimed_steps") or 0
    lines = list(_step_lines(rows, _num_planned(folder, run, rows), train_s, num_untimed))
    peaks_gib = (run["measured"].get("peak_mem_gib_by_rank") or {}).get("allocated") or ()
    if peaks := [gib for gib in peaks_gib if gib is not None]:
        lines.append(f"peak memory allocated: {max(peaks) * 1024:.0f} MiB")
    whole = "\n".join([*code, RULE, *_environment(run), RULE, *lines]) + "\n"
    return escape.CONTROL.sub(escape.shown, private.redact(whole, REPO))


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
        yield f"Run UTC timestamp={run['started_at']}"
    if run["seed"] is not None:
        yield f"Using seed={run['seed']}"


def _num_planned(folder: Path, run: Record, rows: Sequence[StepRow]) -> int:
    """Returns the number of steps that were planned, so that an aborted run does not look like a complete one."""
    if run["status"] == "complete":
        return run["metrics"].get("num_steps") or (rows[-1]["step"] if rows else 0)
    config = yaml_file.recorded(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    num_steps: int | None = (config.get("goal") or {}).get("num_steps")
    if num_steps is None:
        raise ValueError(f"{run['run_id']}: {run['status']}, of an unknown number of steps: export it --to csv")
    return num_steps


def _step_lines(rows: Sequence[StepRow], total: int, train_s: float | None, num_untimed: int) -> Iterator[str]:
    """Yields a line for each step and validation.

    train_s: for a complete run, the time at its last row.  num_untimed: the first steps, after which a script's clock
    was restarted: step_avg is of the others.
    """
    train_ms = 0.0
    for row in rows:
        step, printed_ms = row["step"], row.get("train_time_ms")
        train_ms = train_ms + (row.get("step_ms") or 0.0) if printed_ms is None else printed_ms
        if train_s is not None and row is rows[-1]:
            train_ms = ms_from_s(train_s)
        start = f"step:{step}/{total}"
        if step and (row.get("train_loss") is not None or row.get("step_ms") is not None):
            loss = "" if row.get("train_loss") is None else f" train_loss:{_loss(row['train_loss'])}"
            yield f"{start}{loss} {_times(train_ms, step - num_untimed)}"
        if row.get("val_loss") is not None:
            at_ms = row.get("train_time_at_val_ms")
            times = _times(train_ms if at_ms is None else at_ms, step - num_untimed)
            yield f"{start} val_loss:{_loss(row['val_loss'])} {times}"


def _times(train_ms: float, num_timed: int) -> str:
    average_ms = step_avg_ms(train_ms, max(0, num_timed))
    average = "nan" if average_ms is None else f"{average_ms:.2f}" if train_ms.is_integer() else _ms(average_ms)
    return f"train_time:{_ms(train_ms)}ms step_avg:{average}ms"


def _ms(time_ms: float) -> str:
    """Formats milliseconds with a precision of a nanosecond, without trailing zeros."""
    return f"{time_ms:.6f}".rstrip("0").rstrip(".")


def _loss(nats: float) -> str:
    return f"{nats:.4f}" if float(f"{nats:.4f}") == nats else repr(nats)
