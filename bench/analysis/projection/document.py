"""Presents a projection as a Document: verdict, parts of the step, the whole run; and the table of errors."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from bench.analysis.projection import links, pairs, projected
from bench.analysis.projection.projected import Projection, Scaling, project
from bench.base.paths import user_path
from bench.base.text_table import counted
from bench.base.units import MS_PER_S, format_ms, format_s
from bench.web.document import Block, Bullets, Document, Lines, Section, Table, Verdict

LINK = "nvlink4"
S_PER_HOUR = 3600.0
PARTS = (
    ("work_ms", "forward and backward"),
    ("replicated_ms", "the same on every GPU (optimizer)"),
    ("exposed_ms", "exposed communication"),
    ("slowest_ms", "waiting for the slowest GPU"),
)


def from_run(
    folder: Path, num_gpus: int, num_nodes: int, link: str | None, scaling: Scaling, usd_per_gpu_hour: float | None
) -> Document:
    """Projects a run.  Raises ValueError as measured.from_record() and links.read() do, or for an uneven batch."""
    _check_gpus(num_gpus, num_nodes)
    job = projected.from_record(folder)
    link = str(user_path(link)) if link and user_path(link).is_file() else link
    if job.device == projected.CPU and (link is None or not Path(link).is_file()):
        remedy = "name the file of a passport (./run.sh doctor --passport), or of nccl-tests"
        raise ValueError(f"--link {link}: a run on a CPU has no such link: {remedy}")
    curve = links.read(link or LINK, num_nodes)
    if scaling == "strong":
        projected.check_batch(job, num_gpus)
    projection = project(job.step, num_gpus, num_nodes, curve, scaling)
    facts = _answer(
        job, projection, curve, scaling, "cpu" if job.device == projected.CPU else "node" if num_nodes == 1 else "nodes"
    )
    return _document(facts | {"job": _whole_job(job, facts, usd_per_gpu_hour)})


def from_traces(title: str, paths: Sequence[Path], num_gpus: int, num_nodes: int, link: str) -> Document:
    """Projects the traces of a job.  Raises ValueError as measured.from_traces() and links.read() do."""
    curve = links.read(link, num_nodes)
    _check_gpus(num_gpus, num_nodes)
    job, projection = projected.from_traces(title, paths, num_gpus, num_nodes, curve)
    return _document(_answer(job, projection, curve, "weak", "trace" if num_nodes == 1 else "nodes") | {"job": None})


def _check_gpus(num_gpus: int, num_nodes: int) -> None:
    if num_gpus < 1 or num_nodes < 1 or num_gpus % num_nodes:
        raise ValueError(f"--gpus {num_gpus} --nodes {num_nodes}: GPUs of all nodes together, as many in each")


def _answer(
    job: projected.Job, projection: Projection, curve: links.Curve, scaling: Scaling, kind: pairs.Kind
) -> dict[str, Any]:
    step = job.step
    numbers = step.num_gpus, projection.num_gpus
    errors, about = pairs.checked(kind, scaling, job.device, curve.name, numbers, projection)
    errors, about = ([], job.unlike) if job.unlike else (errors, about)
    worst_pct = abs(errors[0].error_pct) if errors else None
    share = step.num_gpus / projection.num_gpus if scaling == "strong" else 1.0
    return {
        "title": job.title,
        "device": job.device,
        "link": {"name": curve.name, "source": curve.source},
        "scaling": scaling,
        "measured": {"gpus": step.num_gpus, "step_ms": step.ms},
        "gpus": projection.num_gpus,
        "nodes": projection.num_nodes,
        "step_ms": projection.ms,
        "low_ms": None if worst_pct is None else projection.ms * (1 - worst_pct / 100),
        "high_ms": None if worst_pct is None else projection.ms * (1 + worst_pct / 100),
        "perfect_ms": step.ms * share,
        "efficiency_frac": step.ms * share / projection.ms,
        "parts": {name: getattr(projection, name) for name, _ in PARTS},
        "messages_ms": projection.messages_ms,
        "checked": bool(errors),
        "checked_by": about,
        "worst_error_pct": worst_pct,
        "assumed": job.assumed,
    }


def _whole_job(job: projected.Job, facts: dict[str, Any], usd_per_gpu_hour: float | None) -> dict[str, Any] | None:
    """Projects the whole run, with as many steps as measured; None unless the batch stays the same."""
    assert job.run is not None
    metrics, num_gpus = job.run["metrics"], facts["gpus"]
    num_steps, power_w, peak_gib = metrics.get("num_steps"), metrics.get("mean_power_w"), metrics.get("peak_mem_gib")
    if facts["scaling"] != "strong" or not num_steps:
        return None
    train_s = num_steps * facts["step_ms"] / MS_PER_S
    gpu_hours = num_gpus * train_s / S_PER_HOUR
    return {
        "num_steps": num_steps,
        "target_reached": metrics.get("target_reached"),
        "train_s": train_s,
        "gpu_hours": gpu_hours,
        "usd": None if usd_per_gpu_hour is None else usd_per_gpu_hour * gpu_hours,
        "energy_j": None if power_w is None else power_w / job.step.num_gpus * num_gpus * train_s,
        "peak_mem_gib": peak_gib,
    }


def _document(facts: dict[str, Any]) -> Document:
    title = f"A step on {counted(facts['gpus'], 'GPU')}" + (f" of {facts['nodes']} nodes" * (facts["nodes"] > 1))
    return Document(title, [_verdict(facts)], list(_blocks(facts)), facts)


def _verdict(facts: dict[str, Any]) -> Verdict:
    before = facts["measured"]
    kept = "the same batch" if facts["scaling"] == "strong" else "each with the work that it has"
    step = format_ms(facts["step_ms"])
    if facts["checked"]:
        step += f" [{format_ms(facts['low_ms'])}, {format_ms(facts['high_ms'])}]"
    sentence = (
        f"On {facts['gpus']} GPUs over {facts['link']['name']}, {kept}, a step takes {step}; measured: "
        f"{format_ms(before['step_ms'])} on {before['gpus']}.  Perfect scaling: {format_ms(facts['perfect_ms'])}."
    )
    if facts["checked"]:
        note = f"The interval is the largest error, {facts['worst_error_pct']:.1f} %, on {facts['checked_by']}."
    else:
        note = f"Not checked, so without an interval: {facts['checked_by']}."
    return Verdict(sentence, "", notes=[note])


def _blocks(facts: dict[str, Any]) -> Iterator[Block]:
    rows: list[list[object]] = [[name, format_ms(facts["parts"][key])] for key, name in PARTS]
    rows.append(["a step", format_ms(facts["step_ms"])])
    yield Table(["part", "ms"], rows, [False, True])
    yield Lines([f"All messages take {format_ms(facts['messages_ms'])}, by {facts['link']['source']}."], is_soft=True)
    if (job := facts["job"]) is not None:
        reached = {True: ", target reached", False: ", target missed"}.get(cast(bool, job["target_reached"]), "")
        rows = [["steps", f"{job['num_steps']:,}{reached}"], ["training", format_s(job["train_s"])]]
        rows.append(["GPU hours", f"{job['gpu_hours']:.3g}"])
        if job["usd"] is not None:
            rows.append(["cost", f"{job['usd']:.2f} USD"])
        if job["energy_j"] is not None:
            rows.append(["energy, at the power that was measured", f"{job['energy_j'] / 3.6e6:.3g} kWh"])
        if job["peak_mem_gib"] is not None:
            memory = f"{job['peak_mem_gib']:.2f} GiB"
            rows.append(["memory of a GPU, at most, with the same micro-batch", memory])
        yield Section("To the end of the run", [Table(["", ""], rows)])
    yield Section("Taken for granted", [Bullets(facts["assumed"])] if facts["assumed"] else [])


def table_of_errors() -> Document:
    """Returns the answer of ./run.sh project --errors: every pair that was checked, the worst first."""
    errors, heads = pairs.errors(), ("error_pct", "dividing_pct", "gpus", "projected_ms", "measured_ms", "source")
    data, rows = [], []
    for error in errors:
        pair = error.pair
        about = f" ({pair.about})" if pair.about else ""
        gpus, source = f"{pair.from_gpus} to {pair.num_gpus} {pair.device.removeprefix('NVIDIA ')}", pair.source + about
        values = error.error_pct, error.baseline_pct, gpus, error.projected_ms, pair.measured_ms, source
        data.append(dict(zip(heads, values), kind=pair.kind))
        dividing = None if error.baseline_pct is None else f"{error.baseline_pct:+.1f}"
        rows.append([f"{error.error_pct:+.1f}", dividing, gpus, f"{values[3]:,.2f}", f"{values[4]:,.2f}", source])
    sentences = []
    for kind in dict.fromkeys(error.pair.kind for error in errors):  # the one with the worst pair first
        mine = [error for error in errors if error.pair.kind == kind]
        worst = max((abs(error.baseline_pct) for error in mine if error.baseline_pct is not None), default=None)
        baseline = "" if worst is None else f", where dividing alone errs by {worst:.1f} %"
        error_pct, num_pairs = abs(mine[0].error_pct), counted(len(mine), "pair")
        sentences.append(f"{pairs.KINDS[kind]}: at most {error_pct:.1f} % on {num_pairs}{baseline}.")
    names = [head.replace("_pct", " %").replace("_", " ") for head in heads]
    table = Table(names, rows, [True, True, False, True, True, False])
    title = "Errors of projections, the worst first"
    return Document(title, [Verdict(sentences[0], "", notes=sentences[1:])], [table], data)
