"""The step log and its writer: times, losses that must stay numbers, one steps.csv with one set of columns."""

import errno
import json

import pytest
import torch
from hand import Hand

from bench.record import metrics, run_folder, step_files
from bench.training.instruments.base import Instrument, InstrumentSet
from bench.training.step_writer import StepWriter, step_lines
from bench.training.timing.clock import HostMarks
from bench.training.timing.step_log import NonFiniteLoss, StepLog


def make(num_steps=4):
    hand = Hand()
    seen = []
    log = StepLog(HostMarks(hand), torch.device("cpu"), num_steps, on_row=seen.append, now_ns=hand)
    return hand, log, seen


def step(hand, log, number, ms, losses):
    log.on_step_start(number)
    hand.ns += ms * 1_000_000
    for loss in losses:
        log.add_loss(number, torch.tensor(loss))
    log.on_step_end(number)


def test_train_s_runs_on_over_a_validation_but_does_not_count_it():
    hand, log, seen = make()
    log.on_validation(0, 5.5, 0.0)
    step(hand, log, 0, 100, [1.0, 1.5])
    step(hand, log, 1, 200, [2.0])
    log.on_validation(2, 4.5, 0.3)
    hand.ns += 9_000_000_000  # validation takes 9 s
    step(hand, log, 2, 400, [0.5])
    log.on_validation(3, 4.0, 0.7)
    times = [(row["step"], row["t_ns"], row["step_ms"], row["train_s"]) for row in seen]
    assert times == [
        (0, None, None, 0.0),
        (1, 0, 100.0, 0.1),
        (2, 100_000_000, 200.0, 0.3),  # with a validation: the clock's own train_s
        (3, 9_300_000_000, 400.0, 0.7),
    ]
    assert [row["train_loss"] for row in seen] == [None, 2.5, 2.0, 0.5]
    assert [row["val_loss"] for row in seen] == [5.5, None, 4.5, 4.0]
    assert log.rows == seen[1:]


def test_the_end_of_a_run_without_a_validation_reads_what_is_unread():
    hand, log, seen = make()
    log.on_validation(0, 5.5, 0.0)
    for number in (0, 1):
        step(hand, log, number, 100, [1.0])
    log.on_run_end()
    assert [(row["step"], row["step_ms"], row["val_loss"]) for row in seen[1:]] == [(1, 100.0, None), (2, 100.0, None)]


def test_between_validations_train_s_is_the_clock_of_the_last_one_and_the_marks_since():
    hand, log, seen = make()
    log.on_validation(0, 5.5, 0.0)
    step(hand, log, 0, 100, [1.0])
    log.on_validation(1, 4.5, 0.15)  # the clock says more than the marks
    for number in (1, 2, 3):
        step(hand, log, number, 200, [1.0])
    assert [row["train_s"] for row in seen[2:]] == [pytest.approx(0.35), pytest.approx(0.55)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_and_names_its_step(bad):
    hand, log, _ = make()
    step(hand, log, 0, 1, [2.0])
    step(hand, log, 1, 1, [bad])
    with pytest.raises(NonFiniteLoss, match="at step 2") as caught:
        step(hand, log, 2, 1, [1.0])
    assert caught.value.step == 2
    assert [row["step"] for row in log.rows] == [1, 2]


def test_a_validation_that_is_no_number_ends_the_run_too():
    _, log, _ = make()
    with pytest.raises(NonFiniteLoss, match="val_loss=nan at step 3"):
        log.on_validation(3, float("nan"), 0.1)


def test_a_step_is_read_late_so_that_nothing_waits():
    class Slow(HostMarks):
        passed = False

        def ready(self, mark):
            return self.passed

    marks = Slow(Hand())
    log = StepLog(marks, torch.device("cpu"), 9)
    for number in range(5):
        log.on_step_start(number)
        log.on_step_end(number)
    assert log.rows == []
    marks.passed = True
    log.on_step_start(5)
    log.on_step_end(5)
    assert [row["step"] for row in log.rows] == [1, 2, 3, 4, 5]


def test_what_an_instrument_does_in_a_step_is_in_its_time():
    """At each edge that the clock runs at: else a costly instrument would make a run look faster than it is."""
    hand, log, seen = make()

    class Costly(Instrument):
        def on_step_start(self, step):
            hand.ns += 1_000_000

        def on_phase(self, name):
            hand.ns += 20_000_000

        def on_step_end(self, step):
            hand.ns += 300_000_000

    watch = InstrumentSet([Costly(context=None)], essential=log)
    watch.on_step_start(0)
    watch.on_phase("forward")
    log.add_loss(0, torch.tensor(1.0))
    watch.on_step_end(0)
    watch.on_validation(1, 4.5, 0.321)
    assert seen[-1]["step_ms"] == 321.0


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
