"""The step writer: one steps.csv with one set of columns while the run lasts, and the numbers that a person sees."""

import errno
import json

import pytest

from bench.record import metrics, run_folder, step_files
from bench.training.step_writer import StepWriter, step_lines

RUN = {"measured": {"batch_tokens": 1024}, "model": {}, "environment": {"gpus": []}, "world_size": 1}


def row(step, val_loss=None, train_s=None):
    facts = dict.fromkeys(("t_ns", "step_ms", "train_loss"))
    if step:
        facts = {"t_ns": 1000 * step, "step_ms": 50.0, "train_loss": 5.0}
    return facts | {"step": step, "train_s": 0.05 * step if train_s is None else train_s, "val_loss": val_loss}


def writer(folder, out=None):
    def speed(train_s, num_steps):
        return metrics.speed(RUN, train_s, num_steps)

    return StepWriter(
        folder, 4, lambda step: 1024 * step, lambda step: 1e-3 * step, speed, (out if out is not None else []).append
    )


def test_rows_are_in_the_file_with_the_columns_of_a_complete_run(tmp_path):
    with writer(tmp_path) as steps:
        steps.row(row(0, val_loss=5.5))
        steps.row(row(1))
        steps.row(row(2, val_loss=4.5))
    text = (tmp_path / "steps.csv").read_text()
    assert text.splitlines() == [
        "step,flags,tokens,lr,train_loss,val_loss,step_ms,t_ns",
        "0,,0,,,5.5,,",
        "1,,1024,0.0,5.0,,50.0,1000",
        "2,,2048,0.001,5.0,4.5,50.0,2000",
    ]
    step_files.write(tmp_path, [row | {"data_ms": None} for row in steps.rows], step_files.RUN_COLUMNS)
    assert (tmp_path / "steps.csv").read_text().splitlines()[0] == text.splitlines()[0] + ",data_ms"
    assert [event["step"] for event in step_files.read_events(tmp_path)] == [0, 2]


def test_a_line_and_the_bar_show_the_records_own_step_avg(tmp_path):
    out = []
    with writer(tmp_path, out) as steps_writer:
        steps_writer.row(row(3, val_loss=4.0, train_s=0.16))
    assert out == [
        "step:3/4 train_time:160ms step_avg:53.33ms\nstep:3/4 val_loss:4.0000 train_time:160ms step_avg:53.33ms\n"
    ]
    progress = json.loads((tmp_path / run_folder.PROGRESS).read_text())
    steps = [{"step": step, "step_ms": 50.0} for step in (1, 2, 3)]
    numbers = metrics.metrics(RUN | {"measured": {"batch_tokens": 1024, "train_s_by_rank": [0.16]}, "data": {}}, steps)
    for name in ("step_avg_ms", "tokens_per_s"):
        assert progress[name] == numbers[name]
    assert (progress["step"], progress["step_avg_ms"]) == (3, pytest.approx(160 / 3))


def test_the_validation_before_the_first_step_has_one_line():
    assert step_lines(row(0, val_loss=5.5, train_s=2e-5), 4) == [
        "step:0/4 val_loss:5.5000 train_time:0ms"  # no step has been taken: no average
    ]


@pytest.fixture
def full_disk(monkeypatch):
    class Full:
        """A file with room for ten more bytes."""

        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            self._file.close()

        def write(self, data):
            return self._file.write(data[:10])

    def opened(*args, **options):
        return Full(open(*args, **options))

    def fill():
        monkeypatch.setattr(step_files, "open", opened, raising=False)

    return fill


def test_rows_that_do_not_fit_on_the_disk_leave_no_half_line_and_end_the_run(tmp_path, full_disk):
    steps = writer(tmp_path)
    before = (tmp_path / "steps.csv").read_text()
    full_disk()
    with pytest.raises(OSError) as caught, steps:
        steps.row(row(1))
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "steps.csv").read_text() == before


def test_an_event_that_does_not_fit_leaves_no_half_line_that_spoils_the_next(tmp_path, full_disk, monkeypatch):
    first, last = ({"t_ns": t_ns, "event": name} for t_ns, name in ((1, "run_start"), (3, "run_end")))
    step_files.append_event(tmp_path, first)
    full_disk()
    with pytest.raises(OSError):
        step_files.append_event(tmp_path, {"t_ns": 2, "event": "gc"})
    monkeypatch.undo()  # somebody freed space
    step_files.append_event(tmp_path, last)
    assert step_files.read_events(tmp_path) == [first, last]


def test_what_ended_the_loop_is_raised_and_not_what_the_writer_met(tmp_path, monkeypatch):
    monkeypatch.setattr(step_files, "append", lambda *args: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(ZeroDivisionError), writer(tmp_path) as steps:
        steps.row(row(1))
        raise ZeroDivisionError
