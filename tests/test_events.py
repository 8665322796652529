"""The instruments of events that cost time, and hardware.gc; events planted in a run: each found, named and costed."""

import gc
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
import real_runs

from bench.base import utc
from bench.config import resolve, schema
from bench.launch import ranks, summary
from bench.record import failures, step_files
from bench.training import flight_recorder
from bench.training.instruments import registry
from bench.training.instruments.base import Context, InstrumentSet
from bench.training.step_writer import RankEvents
from bench.training.timing import clock
from bench.training.timing.clock import HostMarks


@pytest.fixture
def emitted():
    return []


@pytest.fixture
def context(tmp_path, emitted):
    def emit(name, **facts):
        emitted.append({"event": name, **facts})

    return Context(tmp_path, 0, 1, "cpu", 4, HostMarks(), emit=emit)


@pytest.fixture
def collecting():
    """Turns the collector off, so that only what a test asks for is collected, and restores it afterwards."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def made(context, **chosen):
    instruments, warnings = registry.load(chosen, context)
    assert not warnings
    return InstrumentSet(instruments), *instruments


def run(watch, *works, between=lambda: None):
    """Runs a step for each of these functions, and calls `between` after each step."""
    watch.on_run_start()
    for step, work in enumerate(works):
        watch.on_step_start(step)
        work()
        watch.on_step_end(step)
        between()
    watch.on_run_end()


def computes(ms):
    started_ns = time.thread_time_ns()
    while time.thread_time_ns() - started_ns < ms * 1e6:
        pass


def nothing():
    pass


def test_collections_in_a_step_are_events_with_generation_and_time(context, emitted, collecting):
    watch, garbage = made(context, garbage={"min_event_ms": 0.0})
    around_ns = []

    def collects():
        around_ns.append(time.perf_counter_ns())
        gc.collect()
        around_ns.append(time.perf_counter_ns())
        gc.collect(0)

    run(watch, nothing, collects, between=gc.collect)  # between steps a validation may be
    gc.collect()
    full, young, total = emitted
    assert (full["event"], full["step"], full["generation"]) == ("gc", 2, 2)
    assert around_ns[0] <= full["t_ns"] and full["t_ns"] + full["ms"] * 1e6 <= around_ns[1]
    assert (young["generation"], young["step"]) == (0, 2)
    assert total == {"event": "gc_total", "count": 2, "ms": pytest.approx(full["ms"] + young["ms"])}
    summary = garbage.summary()
    assert (summary["num_collections"], summary["num_by_generation"]) == (2, {"0": 1, "1": 0, "2": 1})
    assert summary["max_pause_ms"] == pytest.approx(full["ms"])
    assert summary["between_steps_ms"] > 0
    assert garbage._seen not in gc.callbacks


def test_short_collections_are_counted_but_are_no_events(context, emitted, collecting):
    watch, _ = made(context, garbage={"min_event_ms": 60_000.0})
    run(watch, gc.collect)
    assert [event["event"] for event in emitted] == ["gc_total"]
    assert emitted[0]["count"] == 1


def test_a_failed_run_leaves_no_callback_behind(context):
    watch, garbage = made(context, garbage={"min_event_ms": 1.0})
    watch.on_run_start()
    watch.close()
    watch.close()
    assert garbage._seen not in gc.callbacks


def test_a_recompile_and_a_graph_break_in_a_step_are_events_and_a_doubt(context, emitted):
    import torch

    def doubled(numbers):
        return numbers * 2

    def broken(numbers):
        torch._dynamo.graph_break()
        return numbers + 1

    compiled, parts = (torch.compile(function, backend="eager", dynamic=False) for function in (doubled, broken))
    compiled(torch.ones(3))
    watch, recompiles = made(context, recompiles={})
    run(watch, lambda: compiled(torch.ones(3)), lambda: compiled(torch.ones(4)), lambda: parts(torch.ones(3)))
    compiled(torch.ones(5))  # after the run: the listener is gone
    expected = [("recompile", 2), ("recompile", 3), ("recompile", 3), ("graph_break", 3)]
    assert [(event["event"], event["step"]) for event in emitted] == expected
    first = emitted[0]
    assert re.fullmatch(r"doubled \(test_events\.py:\d+\)", first["function"])
    assert first["reason"].endswith("tensor 'numbers' size mismatch at index 0. expected 3, actual 4")
    assert first["ms"] > 0 and first["trigger"] == "dynamo"
    assert emitted[3]["count"] == 1 and "\n" not in emitted[3]["reason"]
    assert recompiles.summary()["num_recompiles"] == 3
    assert recompiles.summary()["num_graph_breaks"] == 1
    (doubt,) = recompiles.doubts()
    assert doubt.startswith("torch.compile worked 3 time(s), ") and "step 2, doubled" in doubt


def test_a_run_that_compiles_nothing_has_no_doubt(context, emitted):
    watch, recompiles = made(context, recompiles={})
    run(watch, nothing)
    assert (emitted, recompiles.doubts()) == ([], [])
    assert recompiles.summary()["num_recompiles"] == 0


def test_the_default_instruments_import_nothing_that_takes_long():
    """torch._dynamo takes a second to import: where nothing is compiled, watching for it must not import it."""
    code = """
import sys
from pathlib import Path
from bench.training.instruments import registry
from bench.training.instruments.base import Context, InstrumentSet
chosen = {"garbage": {"min_event_ms": 1.0}, "recompiles": {}, "host": {}}
made, warnings = registry.load(chosen, Context(Path("."), 0, 1, "cpu", 1, None))
watch = InstrumentSet(made)
watch.on_run_start(), watch.on_step_start(0), watch.on_step_end(0), watch.on_run_end()
print(warnings, watch.warnings, "torch" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] [] False\n"


def test_the_host_distinguishes_computing_from_waiting(context):
    watch, host = made(context, host={})
    run(watch, lambda: computes(30), lambda: time.sleep(0.05), nothing)
    columns = host.columns()
    assert 29 < columns["cpu_ms"][1] < 60
    assert columns["cpu_ms"][2] < 25  # of at least 50 ms
    assert set(columns["cpu_ms"]) == {1, 2, 3}
    assert host.summary()["cpu_ms"] == pytest.approx(sum(columns["cpu_ms"].values()))


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="no schedstat here")
def test_a_thread_that_ends_while_training_is_left_out(context, monkeypatch):
    monkeypatch.setattr("bench.training.instruments.host.MAX_THREADS", 1000)  # all, however busy they were
    stop, (watch, host) = threading.Event(), made(context, host={})
    thread = threading.Thread(target=stop.wait)
    thread.start()
    run(watch, nothing, lambda: (stop.set(), thread.join()), lambda: computes(30))
    assert watch.warnings == [] and host.columns()["cpu_ms"][3] > 29


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="no schedstat here")
def test_what_others_do_between_two_steps_is_in_neither(context):
    """A profiler's flush comes after the host's reading at the end of a step."""
    watch, host = made(context, host={})
    run(watch, nothing, nothing, between=lambda: computes(50))
    assert max(host.columns()["cpu_ms"].values()) < 25


def test_the_host_shows_when_another_program_had_its_core(context):
    """Another process spins on the one core that this thread may use: half of the time is spent waiting for it."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    spin = (
        f"import os, time\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\n"
        "end = time.time() + 60\nwhile time.time() < end: pass"
    )
    other = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        os.sched_setaffinity(0, {core})
        watch, host = made(context, host={})

        def spins():
            until_s = time.perf_counter() + 0.3
            while time.perf_counter() < until_s:
                pass

        run(watch, spins)
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.communicate()
    assert host.columns()["runqueue_ms"][1] > 50


def test_two_ticks_of_schedstat_are_milliseconds(context):
    _, host = made(context, host={})
    main, other = (b"1000000 500000 7\n", b"3500000 4500000 9\n"), (b"0 0 0\n", b"9 1000000 1\n")
    host._samples = [(1, *zip(main, other))]
    assert host.columns() == {"cpu_ms": {1: 2.5}, "runqueue_ms": {1: 5.0}}  # of the main thread; of both


@pytest.fixture
def as_before():
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    gc.enable() if enabled else gc.disable()


@pytest.mark.parametrize(
    ("policy", "frozen", "enabled"),
    [(None, True, True), ("on", False, True), ("off", True, False), ("manual", True, False)],
)
def test_a_policy_does_what_the_record_says(as_before, policy, frozen, enabled):
    gc.unfreeze()
    collector = clock.GcPolicy(policy, 5)
    collector.before_training()
    assert (gc.get_freeze_count() > 0, gc.isenabled()) == (frozen, enabled)
    protocol = (clock.TIMING_PROTOCOL | clock.gc_protocol(policy, 5))["garbage_collection"]
    assert ("frozen" in protocol, "off" not in protocol) == (frozen, enabled)
    collector.after_training()
    assert gc.isenabled()


def test_by_hand_means_every_so_many_steps(as_before, monkeypatch):
    generations = []
    collector = clock.GcPolicy("manual", 3)
    monkeypatch.setattr(gc, "collect", generations.append)
    for _ in range(7):
        for check in collector.checks:
            check()
    assert generations == [1, 1]  # after steps 3 and 6
    assert clock.GcPolicy(None).checks == clock.GcPolicy("off").checks == ()


def test_the_default_policy_has_one_config_id_said_or_not():
    def hardware(**settings):
        config = schema.build(schema.HardwareConfig, {"device": "cpu", **settings}, "hardware.")
        resolve.resolve_hardware(config, schema.Machine(0, 2))
        return config

    assert hardware(gc="freeze") == hardware()
    assert hardware(gc="off") != hardware()
    assert set(clock.GC_WORDS) == {"on", "off", "manual"}
    for policy in clock.GC_WORDS:
        hardware(gc=policy, gc_every_steps=50 if policy == "manual" else None)
    for settings, sentence in (
        ({"gc": "never"}, "hardware.gc=never: use freeze, on, off or manual"),
        ({"gc": "manual"}, "hardware.gc=manual needs it"),
        ({"gc_every_steps": 3}, "it has no effect with hardware.gc=freeze"),
        ({"gc": "manual", "gc_every_steps": 0}, "hardware.gc_every_steps=0: use a whole number of 1 or more"),
    ):
        with pytest.raises(ValueError, match=sentence):
            hardware(**settings)


def test_the_flight_recorder_is_for_ranks_that_talk_to_each_other():
    assert flight_recorder.variables(1) == {}
    several, place = flight_recorder.variables(2), ranks.Place(1, 2, master=("127.0.0.1", 29500))
    assert several["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert not several.keys() & place.variables().keys()  # those of a rank that no torchrun starts


@pytest.mark.parametrize(
    "nccl, gloo",
    [(b'{"entries": [1, 2]}', b'{"entries": []}'), (b"{}", '{"entries": [1]}'), (None, b'{"entries": [1]}')],
)
def test_the_buffer_with_collectives_in_it_is_kept_whichever_backend_filled_it(tmp_path, monkeypatch, nccl, gloo):
    from torch._C import _distributed_c10d as c10d

    (tmp_path / "logs").mkdir()
    if nccl is not None:
        monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: nccl, raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: gloo)
    flight_recorder.dump(tmp_path, 3)
    assert json.loads((tmp_path / "logs" / "rank3.flight.json").read_text())["entries"]


def test_an_event_reported_late_has_the_wall_clocks_time_of_when_it_happened():
    events = RankEvents(0)
    events("gc", t_ns=time.perf_counter_ns() - 3_000_000_000)
    events("gc")
    early, late = (utc.parse(event["utc"]) for event in events.kept)
    assert 2.9 < (late - early).total_seconds() < 3.2


def test_nccls_watchdog_aborts_and_the_record_says_timeout(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "agent.json").write_text('{"failures": [{"rank": 2, "exit_code": -6, "failed_at_s": 100.0}]}')
    log = tmp_path / "logs" / "rank2.log"
    line = "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    log.write_text(f"{line}\nAborted\n")
    failure = failures.classify(tmp_path, 1)
    assert (failure["kind"], failure["rank"], failure["signal"]) == ("collective_timeout", 2, "SIGABRT")
    log.write_text("double free or corruption\n")
    assert failures.classify(tmp_path, 1)["kind"] == "rank_crashed"


def test_what_an_instrument_could_not_do_is_reported_after_the_run():
    names = ("wandb", "mlflow", "tensorboard", "telemetry")
    warned = [{"rank": rank, "instrument": name, "error": "needs x"} for name in names for rank in (0, 1)]
    failure = {"kind": "interrupted", "rank": None, "step": 3, "message": "m", "hint": "h"}
    record = {"status": "aborted", "failure": failure, "folder": "f", "warnings": warned}
    shown = [*(f"{name}: needs x" for name in names[:3]), "and 1 more warnings in run.json"]
    assert summary.outcome_text(record).splitlines()[3:] == [f"       warning: {line}" for line in shown]
    assert "warning" not in summary.outcome_text(record | {"warnings": []})


TINY = ["model.num_layers=1", "model.width=32", "model.num_heads=2", "data.batch_tokens=256", "goal.num_steps=30"]
SLEEP, COLLECTION, RECOMPILE = 9, 15, 21  # rows of steps.csv: one more than the step
OWN_START, OWN_END = 5, 27


@pytest.fixture(scope="module")
def planted_run(tmp_path_factory):
    planted = str(real_runs.REPO / "tests" / "planted")
    folder = real_runs.run(tmp_path_factory.mktemp("results"), *TINY, "goal.val_every_steps=12", PYTHONPATH=planted)
    return real_runs.run_json(folder), step_files.read_events(folder), step_files.read(folder)


def named(events, name):
    return [event for event in events if event["event"] == name]


def test_the_sleep_is_a_stall_in_which_the_process_waited_in_its_optimizer(planted_run):
    run, events, rows = planted_run
    (stall,) = [event for event in named(events, "stall") if event["step"] == SLEEP]
    assert stall["what"] == "waiting"
    assert 150 < stall["ms"] < 400
    assert stall["where"]["optimizer_ms"] == pytest.approx(200, abs=100)
    assert stall["t_ns"] == rows[SLEEP]["t_ns"]
    assert run["costs"]["stall"]["count"] == len(named(events, "stall")) >= 1
    assert run["costs"]["stall"]["ms"] == pytest.approx(sum(event["ms"] for event in named(events, "stall")))


def test_the_garbage_collection_is_named_with_its_step_and_generation(planted_run):
    run, events, rows = planted_run
    (full,) = [event for event in named(events, "gc") if event["step"] == COLLECTION and event["generation"] == 2]
    assert 3 < full["ms"] < rows[COLLECTION]["step_ms"]
    assert 0 <= full["t_ns"] - rows[COLLECTION]["t_ns"] < rows[COLLECTION]["step_ms"] * 1e6
    assert [event["what"] for event in named(events, "stall") if event["step"] == COLLECTION] in ([], ["gc"])
    assert run["costs"]["gc"]["count"] >= 1
    assert run["costs"]["gc"]["ms"] >= full["ms"]


def test_the_recompile_is_named_with_its_function_and_reason_and_makes_the_run_suspect(planted_run):
    run, events, rows = planted_run
    (recompile,) = named(events, "recompile")
    assert recompile["step"] == RECOMPILE
    assert recompile["function"].startswith("doubled (sitecustomize.py:")
    assert "size mismatch at index 0. expected 3, actual 4" in recompile["reason"]
    assert run["costs"]["recompile"] == {"count": 1, "ms": recompile["ms"]}
    assert 0 < recompile["ms"] < rows[RECOMPILE]["step_ms"]
    assert run["validity"] == "suspect"
    assert any("torch.compile worked 1 time(s)" in reason for reason in run["validity_reasons"])


def test_what_stalls_a_step_is_distinguished_from_what_was_planted_elsewhere(planted_run):
    _, events, _ = planted_run
    for event in named(events, "stall"):
        whats = {cause["what"] for cause in event["causes"]}
        assert ("gc" in whats) <= (event["step"] != SLEEP)
        assert ("recompile" in whats) == (event["step"] == RECOMPILE)


@pytest.mark.parametrize("row", [OWN_START, OWN_END])
def test_what_an_instrument_itself_costs_in_a_step_is_in_its_time(planted_run, row):
    """Asleep 100 ms as one step starts and as another ends: the run's marks enclose the instruments' calls."""
    _, _, rows = planted_run
    assert rows[row]["step_ms"] >= 100


def test_the_warning_of_an_instrument_that_failed_names_no_private_path(planted_run):
    run, _, _ = planted_run
    (warning,) = [warning for warning in run["warnings"] if warning["instrument"] == "planted"]
    assert "FileNotFoundError" in warning["error"] and "./tests/planted/nothing" in warning["error"]
    assert str(real_runs.REPO) not in str(run)
