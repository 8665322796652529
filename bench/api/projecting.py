"""Projects a step to more GPUs: speedrun.project() and ./run.sh project."""

from typing import Any

from bench.analysis.projection import document
from bench.analysis.projection.projected import Scaling
from bench.api import traces
from bench.api.answers import Answer
from bench.api.tables import Named, names_for


class Projection(Answer):
    """The projected time of a step on more GPUs than were measured, with an interval if one was ever checked."""

    @property
    def step_ms(self) -> float:
        """The projected milliseconds of a step."""
        return float(self.to_dict()["step_ms"])

    @property
    def interval_ms(self) -> tuple[float, float] | None:
        """The interval of step_ms, (low, high) in ms; None if no similar projection was ever checked."""
        facts: dict[str, Any] = self.to_dict()
        return (facts["low_ms"], facts["high_ms"]) if facts["checked"] else None


def project(
    *what: Named,
    gpus: int,
    nodes: int = 1,
    link: str | None = None,
    scaling: Scaling | None = None,
    usd_per_gpu_hour: float | None = None,
) -> Projection:
    """Project a step of a run, or of the traces of the ranks of one job, to gpus GPUs on nodes nodes in total.

    link: nvlink4, "nvlink4,ib400" with several nodes, another name of ./run.sh project --help, or a file with tables of
    nccl-tests or a passport; None: nvlink4 for GPUs.  scaling: "strong" keeps the batch (the default for runs), "weak"
    keeps each GPU's work (for traces).  usd_per_gpu_hour: also project the cost of a run; None: no cost.
    Raises ValueError, with the reason, if nothing can be projected.
    """
    jobs = traces.jobs(names_for("project", what))
    if len(jobs) != 1:
        raise ValueError(f"{len(jobs)} jobs: name one run, or the traces of the ranks of one job")
    ((title, paths),) = jobs
    is_run = len(paths) == 1 and (paths[0] / "run.json").is_file()
    if is_run:
        return Projection(document.from_run(paths[0], gpus, nodes, link, scaling or "strong", usd_per_gpu_hour))
    if usd_per_gpu_hour is not None:
        raise ValueError("--usd-per-gpu-hour: a trace does not say how many steps there are to pay for; name the run")
    if scaling == "strong":
        raise ValueError("--scaling strong: a trace does not say which work is divided; project the run's record")
    return Projection(document.from_traces(title, paths, gpus, nodes, link or document.LINK))
