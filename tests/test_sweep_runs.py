"""A sweep's runs: side by side, stopped without hope, searched for, confirmed by a race."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import claimed
import pytest
import real_runs
import scripted
from hydra.core.override_parser.overrides_parser import OverridesParser

from bench.cli import main as program
from bench.cli import sweeping
from bench.compare import eligibility
from bench.config import multirun, schema, typed
from bench.launch import finish
from bench.machine import gpus, leases
from bench.plans.sweep import packing, search
from bench.plans.sweep import points as sweep_points
from bench.record import failures, run_folder, step_files, sweep, validity
from bench.record.rows import row_of

FOUR_CORES = {0, 1, 2, 3}


def has(package):
    with contextlib.suppress(ModuleNotFoundError):  # what it is in is not there either
        return importlib.util.find_spec(package) is not None
    return False


# ---- side by side


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(packing.os, "sched_getaffinity", lambda pid: FOUR_CORES, raising=False)


@pytest.mark.parametrize(
    ("parallel", "expected"), [("auto", [(0,), (1,), (2,), (3,)]), (2, [(0, 1), (2, 3)]), (3, [(0,), (1,), (2,)])]
)
def test_runs_side_by_side_share_no_core(cores, parallel, expected):
    assert [slot.cores for slot in packing.slots(parallel, on_cpu=True)] == expected


def test_hyper_threads_of_one_core_are_never_two_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(packing.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(packing, "TOPOLOGY", tmp_path)
    for cpu in range(8):  # as usual: the second threads follow the first ones
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    cores_of = lambda parallel: [slot.cores for slot in packing.slots(parallel, on_cpu=True)]  # noqa: E731
    assert cores_of("auto") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert cores_of(2) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    with pytest.raises(ValueError, match="use hydra.launcher.parallel=4"):
        cores_of(5)


def device(number, cpus=(), num_processes=0):
    return gpus.Device(number, f"GPU-{os.getpid()}-{number}", 80.0, num_processes, frozenset(cpus))


@pytest.fixture
def two_sockets(cores, monkeypatch):
    """Four GPUs, two at each half of four cores, of which the second half is the first two's."""
    devices = [device(0, (2, 3)), device(1, (2, 3)), device(2, (0, 1)), device(3, (0, 1))]
    monkeypatch.setattr(packing.gpus, "devices", lambda: devices)
    yield devices
    for name in leases._held.keys() & {gpu.name for gpu in devices}:
        leases.release(name)


def test_on_gpus_each_run_has_one_and_its_share_of_the_cores_near_it(two_sockets):
    slots = packing.slots("auto", on_cpu=False)
    assert [(slot.gpu_number, slot.cores) for slot in slots] == [(0, (2,)), (1, (3,)), (2, (0,)), (3, (1,))]
    assert packing.environment(slots[1])["CUDA_VISIBLE_DEVICES"] == two_sockets[1].name
    assert slots[1].machine() == schema.Machine(1, 1, 80.0)
    assert (slots[1].fact()["gpu"], slots[1].fact()["cores"]) == ("1", [3])  # and no UUID


def test_gpus_on_which_somebody_computes_come_last(two_sockets, monkeypatch):
    devices = [device(0, (2, 3), 1), *two_sockets[1:]]
    monkeypatch.setattr(packing.gpus, "devices", lambda: devices)
    assert [slot.gpu_number for slot in packing.slots(3, on_cpu=False)] == [1, 2, 3]


def test_a_gpu_whose_memory_is_in_use_is_left_out(two_sockets, monkeypatch, capsys):
    full = two_sockets[0]._replace(used_memory_gib=70.0)
    monkeypatch.setattr(packing.gpus, "devices", lambda: [full, two_sockets[1]._replace(used_memory_gib=8.0)])
    assert [slot.gpu_number for slot in packing.slots("auto", on_cpu=False)] == [1]  # a tenth of 80 GiB is not
    assert "GPU 0 is left out: 70 of its 80 GiB are in use" in capsys.readouterr().out


LEASE = "import sys; from bench.machine.leases import lease; print([*map(lease, sys.argv[1:])], flush=True); input()"


def lessee(*names, env=None, started_by=()):
    """A process that leases GPUs and prints who has each instead; it ends at a line on its standard input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([*started_by, sys.executable, "-c", LEASE, *names], cwd=real_runs.REPO, env=env, **pipes)


def test_two_sweeps_share_no_gpu_and_one_that_is_killed_gives_it_back(two_sockets, capsys):
    names = [gpu.name for gpu in two_sockets[:2]]
    with lessee(*names) as other:
        assert other.stdout.readline() == "[None, None]\n"
        assert [slot.gpu_number for slot in packing.slots("auto", on_cpu=False)] == [2, 3]
        assert [slot.gpu_number for slot in packing.slots(2, on_cpu=False)] == [2, 3]  # which it has already
        with pytest.raises(ValueError, match=r"has 4 GPU\(s\), 2 of them free, and 4 cores"):
            packing.slots(3, on_cpu=False)
        assert f"GPU 0 is left out: process {other.pid} of user {os.geteuid()} has it" in capsys.readouterr().out
        other.kill()
    assert [slot.gpu_number for slot in packing.slots("auto", on_cpu=False)] == [0, 1, 2, 3]


def test_a_run_has_its_gpus_alone_and_what_it_starts_uses_them(two_sockets):
    first, second = (gpu.name for gpu in two_sockets[:2])
    with leases.held(2):
        for started_by in ((), ("sh", "-c", 'exec "$@" & wait', "-")):  # a grandchild too
            with lessee(first, started_by=started_by) as child:
                assert child.communicate("\n")[0] == "[None]\n"
        with leases.held(1), leases.free(1):
            pass
        assert first in leases._held  # what was there before stays
    assert leases._held.keys().isdisjoint(gpu.name for gpu in two_sockets)
    with lessee(second) as other:
        other.stdout.readline()
        why = pytest.raises(ValueError, match=rf"GPU 1: process {other.pid} of user \d+ has it")
        with leases.held(1), why, leases.held(2):
            pass
        assert leases._held.keys().isdisjoint(gpu.name for gpu in two_sockets)
        other.kill()


def test_what_outlives_a_lease_is_not_believed_to_have_it_when_another_process_does(two_sockets, monkeypatch):
    name = two_sockets[0].name
    assert leases.lease(name) is None
    kept = dict(os.environ)
    with monkeypatch.context() as in_a_child:
        in_a_child.setattr(leases, "_held", {})
        assert {leases.lease(name) for _ in range(leases.NUM_ASKING + 2)} == {None}  # however many ask
    leases.release(name)
    clean = {key: value for key, value in kept.items() if key != leases.INHERITED}
    with lessee(name, env=clean) as other:
        assert other.stdout.readline() == "[None]\n"
        with lessee(name, env=kept) as survivor:
            assert survivor.communicate("\n")[0] == f"['process {other.pid} of user {os.geteuid()}']\n"
        other.kill()
    with lessee(name, env=kept) as survivor:  # once it is free, it has it
        assert survivor.communicate("\n")[0] == "[None]\n"


def test_jobs_are_of_a_sweep(results, printed, capsys):
    assert program.main(["run", "track=free", "--jobs", "2"]) == 2
    assert "hydra.launcher.parallel=2: settings of Hydra are for sweeps" in capsys.readouterr().err
    assert "parallel: 2" in printed(program, "run", "-m", "track=free", "seed=0,1", "-j", "2", "--cfg", "hydra")


def test_a_sweep_that_runs_is_not_begun_a_second_time(results, monkeypatch, capsys):
    command, codes = ["run", "-m", "track=free", "seed=0,1"], []
    monkeypatch.setattr(sweeping.multirun, "go", lambda *_: codes.append(program.main(command) if not codes else None))
    monkeypatch.setattr(sweeping, "_end", lambda *_: [])
    program.main(command)
    assert codes == [os.EX_TEMPFAIL]
    assert f"process {os.getpid()} runs this sweep: wait for its end" in capsys.readouterr().err


@pytest.mark.parametrize("parallel", [5, "many", 0])
def test_more_than_the_machine_has_is_refused(cores, parallel):
    with pytest.raises(ValueError, match=f"hydra.launcher.parallel={parallel}"):
        packing.slots(parallel, on_cpu=True)


def test_a_run_beside_others_is_suspect_and_its_time_is_not_compared(tmp_path):
    results = claimed.Results(tmp_path)
    slot = packing.Slot(0, 2, (0,))

    def change(run):
        run["beside"] = slot.fact()
        run["validity"], run["validity_reasons"] = validity.validity(run)

    alone = [row_of(run_folder.read(results.add(seed))) for seed in range(2)]
    beside = [row_of(run_folder.read(results.add(seed, change=change, overrides=["optim.lr=0.1"]))) for seed in (2, 3)]
    assert {row["validity"] for row in beside} == {"suspect"} and {row["validity"] for row in alone} == {"valid"}
    for arm in (alone, beside):  # of both arms alike too
        refusals = eligibility.judge(arm, beside).refusals
        assert any("ran beside others of their sweep: their times do not count" in sentence for sentence in refusals)
    assert not any("beside" in sentence for sentence in eligibility.judge(alone, alone[:1]).refusals)
    assert "beside" not in json.loads(alone[0]["setting"])  # what old records' comparability rests on is as it was


@pytest.mark.slow
def test_two_runs_at_a_time_are_pinned_and_marked(tmp_path):
    if len(packing.os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: nothing can run beside")
    overrides = ["optim.lr=0.001,0.002", "hydra.launcher.parallel=2"]
    overrides += ["hardware.price_usd_per_hour=36"]
    real_runs.bench(tmp_path, "run", "-m", *real_runs.SHORT, *overrides, "--json", "--anyway", code=0)
    runs = [real_runs.run_json(folder) for folder in real_runs.folders(tmp_path)]
    assert [run["beside"]["num_slots"] for run in runs] == [2, 2]
    assert [run["hardware"]["price_usd_per_hour"] for run in runs] == [18.0, 18.0]  # which they share
    assert not set(runs[0]["beside"]["cores"]) & set(runs[1]["beside"]["cores"])
    assert {run["validity"] for run in runs} == {"suspect"} and "-m" in runs[0]["command"]


# ---- stopped


def curve(folder, losses):
    """Writes a steps.csv with a validation at each step of {step: val_loss}; a step takes half a second."""
    empty = dict.fromkeys(step_files.CORE_COLUMNS)
    rows = [
        empty | {"step": step, "val_loss": losses.get(step), "step_ms": 500.0 if step else None, "flags": ""}
        for step in range(max(losses) + 1)
    ]
    step_files.write(folder, rows)


def finished(tmp_path, name, val_loss, losses, reached=None):
    folder = tmp_path / name
    folder.mkdir()
    curve(folder, losses)
    metrics = {"val_loss": val_loss, "target_reached": reached, "train_s": 2.0}
    return {"run_id": name, "status": "complete", "metrics": metrics, "folder": str(folder)}


def test_a_stopped_run_has_a_status_of_its_own_and_is_no_result():
    assert finish.ENDED_BY["stopped"] == "stopped" and "stopped" in failures.HINTS
    assert validity.validity({"status": "stopped"}) == ("invalid", ["the run did not complete"])


# ---- searched for


def test_the_objective_is_a_metric_or_the_time_to_the_target(tmp_path):
    run = finished(tmp_path, "run", 3.0, {0: 5.0, 2: 3.4, 4: 3.0})
    assert (search.objective_of(run, "val_loss"), search.objective_of(run, "train_s")) == (3.0, 2.0)
    assert search.objective_of(run | {"status": "failed"}, "val_loss") is None
    record = run_folder.read(claimed.BASE) | {"folder": run["folder"]}
    record["goal"]["target_val_loss"] = 3.5
    assert search.objective_of(record, "target_s") == 1.0  # two steps of half a second
    record["goal"]["target_val_loss"] = 2.5
    assert search.objective_of(record, "target_s") is None
    record["goal"]["target_val_loss"] = None
    with pytest.raises(ValueError, match="target_s: runs have no target: give goal.target_val_loss=NUMBER"):
        search.objective_of(record, "target_s")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "loss"}, "hydra.sweeper.objective=loss: use val_loss, score, train_s, step_avg_ms or tar"),
        ({"sampler": "tpp"}, "hydra.sweeper.sampler=tpp: use tpe, random"),
        ({"n_trials": 0}, "hydra.sweeper.n_trials=0: use a whole number of 1 or more"),
        ({"objective": "train_s", "pruner": "median"}, "hydra.sweeper.pruner=median: it compares losses"),
    ],
)
def test_settings_of_a_search_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        typed.build(search.Settings, changes, "hydra.sweeper.")


def opened(folder, *overrides):
    settings = search.Settings(n_trials=4, sampler="random", seed=0)
    return search.opened(settings, OverridesParser.create().parse_overrides(list(overrides)), folder)


def test_a_search_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is nothing to search: give a space"):
        opened(tmp_path, "seed=3")


def test_without_optuna_a_search_says_what_to_install(tmp_path):
    if has("optuna"):
        pytest.skip("optuna is installed here")
    with pytest.raises(ValueError, match="hydra/sweeper=optuna is not installed here: pip install optuna"):
        opened(tmp_path, "seed=0,1")


@pytest.mark.skipif(not has("optuna"), reason="optuna is not installed: pip install optuna")
def test_a_search_goes_on_where_it_stood(tmp_path):
    space = ["optim.lr=tag(log,interval(1e-4,1e-1))", "model=gpt2,modern", "model.num_layers=range(2,9,2)"]
    first = opened(tmp_path, *space, "track=free")
    for value, was_stopped in ((3.0, False), (None, True), (None, False)):
        trial, (track, lr, model, num_layers) = first.propose()
        assert track == "track=free" and 1e-4 <= float(lr.removeprefix("optim.lr=")) <= 1e-1
        assert model in ("model=gpt2", "model=modern")
        assert num_layers in [f"model.num_layers={number}" for number in (2, 4, 6, 8)]
        first.conclude(trial, value, was_stopped)
    first.propose()  # killed here
    again = opened(tmp_path, *space, "track=free")
    assert again.num_left == 2  # of 4: one complete, one pruned; the failed and the killed do not count
    assert again.results()["best_value"] == 3.0
    other = opened(tmp_path, *space, "track=cpu_nano")
    assert other.num_left == 4 and other.name != again.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "overrides"),
    [
        ("submitit", ["hydra/launcher=submitit_local", "optim.lr=0.001,0.002"]),
        ("joblib", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "optim.lr=0.001,0.002"]),
        ("optuna", ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "optim.lr=tag(log,interval(1e-4,1e-2))"]),
    ],
)
def test_a_plugin_of_hydra_makes_runs_with_records_of_their_own(package, overrides, tmp_path):
    if not has({"optuna": "optuna"}.get(package, f"hydra_plugins.hydra_{package}_launcher")):
        pytest.skip(f"{package} is not installed: docs/race.md")
    done = real_runs.bench(tmp_path, "run", "-m", *real_runs.SHORT, *overrides, "--json", "--anyway", code=0)
    assert [run["status"] for run in json.loads(done.stdout)] == ["complete"] * 2
    if package == "optuna":  # once for all trials
        assert done.stderr.count("    plan  2 runs, the first run shows how long they take\n") == 1, done.stderr
        assert "    plan  1 run" not in done.stderr and "     run  2 of 2: optim.lr=" in done.stderr
    (folder,) = sweep.folders(tmp_path)
    for run in map(real_runs.run_json, real_runs.folders(tmp_path)):
        assert run["sweep"]["sweep_id"] == folder.name and run["status"] == "complete"


needs_joblib = pytest.mark.skipif(not has("joblib"), reason="joblib is not installed: docs/race.md")


@contextlib.contextmanager
def sweep_by_joblib(results):
    """Yields the process of a sweep of three runs, two of which train."""
    overrides = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1,2", "hardware.num_threads=1", "--anyway"]
    command = [sys.executable, "-m", "bench", "run", "-m", *real_runs.LONG, *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = real_runs.environment(results)
    with subprocess.Popen(command, cwd=real_runs.REPO, env=env, start_new_session=True, **pipes) as process:
        until_s = time.monotonic() + 120
        while len(list(results.glob("*/*/.progress.tmp"))) < 2:
            assert process.poll() is None and time.monotonic() < until_s
            time.sleep(0.2)
        yield process


@pytest.mark.slow
@needs_joblib
@pytest.mark.parametrize("ended_by", ["SIGTERM to the sweep", "Ctrl-C in the terminal", "a killed worker"])
def test_a_sweep_by_joblib_that_is_ended_leaves_no_process_and_no_record_that_says_running(ended_by, tmp_path):
    with sweep_by_joblib(tmp_path) as process:
        if ended_by == "a killed worker":
            run = real_runs.run_json(real_runs.folders(tmp_path)[0])
            os.kill(run["launcher"]["pid"], signal.SIGKILL)
        elif ended_by == "SIGTERM to the sweep":
            process.send_signal(signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=90)
    assert process.returncode == 1 and "not run, " in out, out
    assert scripted.all_gone(tmp_path, 30)  # the guard of a run whose launcher was killed ends after the sweep
    runs = [real_runs.run_json(folder) for folder in real_runs.folders(tmp_path)]
    assert {run["status"] for run in runs} == {"aborted"}, [run["failure"] for run in runs]


def test_a_budget_is_not_for_launchers_with_limits_of_their_own(tmp_path):
    (tmp_path / "hydra" / "launcher").mkdir(parents=True)
    runner = type("Runner", (), {"budget_s": 60.0, "elsewhere": None})()
    config = multirun.OUR_LAUNCHER
    assert config == "hydra_plugins.speedrun.Processes"
    with pytest.raises(ValueError, match="--budget: this launcher's jobs have their own limits"):
        multirun.go(["seed=0,1", "hydra.launcher._target_=some.Other"], runner, tmp_path)


# ---- confirmed


def test_a_sweeps_best_are_the_arms_of_a_race(tmp_path):
    results = claimed.Results(tmp_path)
    points = [["optim.lr=0.1", "seed=0"], ["optim.lr=0.1", "seed=1"], ["optim.lr=0.2", "seed=0"], ["optim.lr=0.3"]]
    folder = sweep.begin(tmp_path, "sweep-00000000", ["run"], points, None)
    for number, (overrides, val_loss) in enumerate(zip(points, (2.6, 2.8, 2.5, 2.9))):
        lr = [override for override in overrides if override.startswith("optim")]
        seed = int(overrides[1][5:]) if len(overrides) > 1 else 0
        run = run_folder.read(made := results.add(seed, val_loss=val_loss, overrides=lr)) | {"folder": str(made)}
        sweep.keep(folder, number, overrides, run)
    assert sweep_points.winning_arms(folder, 2) == ["A=optim.lr=0.2", "B=optim.lr=0.1"]  # means 2.5 and 2.7
    with pytest.raises(ValueError, match="--top 4: sweep-00000000 has 3 configs with complete runs"):
        sweep_points.winning_arms(folder, 4)
    with pytest.raises(ValueError, match="--top 1: use 2 to 10"):
        sweep_points.winning_arms(folder, 1)
