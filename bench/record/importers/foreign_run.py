"""One run as another program's log has it.  What the log does not say is None."""

from dataclasses import dataclass, field


@dataclass
class Run:
    number: int  # in its file, from 0
    columns: dict  # {name of lines.COLUMNS: array}, an entry a metric line
    num_steps: int
    declared_steps: int | None
    complete: bool  # validated at the last declared step
    val_loss: float | None  # of the last validation
    val_step: int | None
    train_time_ms: float | None
    step_avg_ms: float | None  # as printed last
    step_avg_meaning: str | None
    # torch cuda python driver gpu_name num_gpus world_size power_limit_w peak_mib seed started_at started_zone
    facts: dict
    extras: dict = field(default_factory=dict)  # step -> {key: text} of a line's free tail
    tail_averages: list = field(default_factory=list)  # {key: text} of the file's "tailavg" lines
    other_lines: list = field(default_factory=list)  # of the file, of a step, without its loss or time: as they are
    headline: dict = field(default_factory=dict)  # the result that the log's author goes by, where it is not val_loss
    source_sha256: str | None = None
    diverged_step: int | None = None  # the first whose loss is printed as nan or inf
    flags: dict = field(default_factory=dict)  # step -> why its time is not its own
    model: str = "unknown"
    batch_tokens: int | None = None
    num_untimed_steps: int = 0  # the first ones, which are not in train_time_ms
