"""The commands as a user types them: exit codes, clear refusals, sweeps that go on and are not done twice."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import claimed
import pytest
import real_runs

from bench.cli import main as program
from bench.cli import run as run_verb
from bench.data import shards
from bench.launch import prepare, summary
from bench.plans.sweep import points
from bench.record import store


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


def test_outside_of_the_checkout_messages_name_run_sh_as_it_was_typed(tmp_path, monkeypatch, capsys):
    """What is sent to others does not: it would name a path of this machine."""
    typed = {"SPEEDRUN_CWD": str(tmp_path), "SPEEDRUN_TYPED": "../my harness/run.sh"}
    for words, shown in ((["rnu"], "'../my harness/run.sh' --help lists"), (["rnu", "--md"], " ./run.sh --help lists")):
        for name, value in typed.items():
            monkeypatch.setenv(name, value)
        assert program.main(words) == 2 and shown in capsys.readouterr().err
        assert "SPEEDRUN_TYPED" not in os.environ
    monkeypatch.setenv("SPEEDRUN_TYPED", "/home/me/run.sh")
    assert program.main(["pr", "nothing"]) == 2 and "/home/me" not in capsys.readouterr().err  # Markdown for a thread
    monkeypatch.setenv("SPEEDRUN_CWD", str(real_runs.REPO))
    monkeypatch.setenv("SPEEDRUN_TYPED", "/a/run.sh")
    assert program.main(["rnu"]) == 2 and " ./run.sh --help lists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=gpt3"], "run: model=gpt3"),
        (["run", "data=shards"], "data.source=shards needs data.train_glob"),
        (["run", "optim.schedule=cosine"], "optim.schedule=cosine: write optim/schedule=cosine; choose from constant"),
        (["run", "optim.warmup_frac=0"], "optim.warmup_frac=0: did you mean optim.schedule.warmup_frac?"),
        (["run", "optim.name=sgd"], "optim.name=sgd: there is none of that name; choose from adamw"),
        (["run", "model.arch=base"], "model.arch=base: there is none of that name; choose from gpt2, modern"),
        (["run", "instruments=[regions,wandb]"], "it is an exporter, not an instrument: write exporters=[wandb]"),
        (["run", "optim.lr=1e-3 seed=2"], "two settings are in one word: separate them, optim.lr=1e-3 seed=2"),
        (["run", "seed=99999999999999999999"], "use a whole number of 0 or more, below 2**63"),
        (["run", "exporters=[wandb]", "exporters.wandb.mode=on"], "exporters.wandb.mode=on: use offline or online"),
        (["run", "--track", "cpu_nano"], "run: --track: settings are key=value, not flags: write track=VALUE"),
        (["speedrun", "-m", "seed=0,1"], "speedrun: -m: only ./run.sh run makes sweeps: omit it"),
        (["race", "A=model=modern,gpt2", "B="], "a race gives each value an arm: A=model=modern B=model=gpt2"),
        (["export", "x", "--tp", "csv"], "export: --tp: there is no such option or argument; did you mean --to?"),
        (["report", "x", "--png", "y"], "there is no such option or argument; what is written goes to --out y"),
        (["table", "--json=x"], "table: --json: it takes no value: omit that"),
        (["init", "."], "init: .: there is no such option or argument; ./run.sh init --help says more"),
        (["race", "A=", "B=optim=muon", "--fail-if", "shown"], "race: --fail-if: it needs --fail-on: add it"),
        (["judge", "README.md"], "README.md: is not a folder of runs"),
        (["export", "x"], "export: the following arguments are required: --to; ./run.sh export --help says more"),
        (["import", "nanogtp", "x"], "import: format nanogtp: did you mean nanogpt? choose from modded-nanogpt"),
        (["export", "x", "--to", "cvs"], "export: --to cvs: did you mean csv? choose from csv, parquet, mllog, modded"),
        (["rnu"], "rnu: unknown command; did you mean run? ./run.sh --help lists them; a setting is KEY=VALUE"),
        (["train"], "train: unknown command; did you mean run? "),
        (["run", "hardware=gpu"], "hardware=gpu: there is no hardware 'gpu'; did you mean cuda? choose from auto, cpu"),
        (["run", "track=cpu_nano", "track.fixed=[]"], "track.fixed=[]: track cpu_nano says ['data', 'goal']"),
        (["run", "track=free", "track.name=cpu_nano"], "track.about=no rules, nothing fixed: track cpu_nano says"),
        (["run", "track=free", "track.name=../../out"], "track.name=../../out: there is none of that name"),
        (["run", "track=free", "seed=0,1"], "seed=0,1: several values are a sweep, which ./run.sh run -m makes"),
        (["run", "optim.lr=nan"], "optim.lr=nan: use a number above 0"),
        (["run", "instruments.regions=5"], "instruments.regions=5"),
        (["compare", "a", "b", "--format", "json"], "no such option or argument; did you mean --json?"),
        (["run", "-m", "seed=0,1", "--parallel", "3"], "no such option or argument; did you mean --jobs?"),
        (["table", "--html"], "table: --html: ./run.sh report writes pages"),
        (["doctor", "--fast"], "--fast: there is no such option or argument; did you mean --quick?"),
        (["run", "experiment=r03"], "there is no experiment 'r03'; not every record is a rung of the ladder"),
        (["run", "script=README.md", "track=free"], "script=README.md: is not a Python program: give a .py file"),
        (["table", "--where", "optim.lr<"], "table: --where optim.lr<: a value must follow <"),
        (["run", "-m", "optim.lr=interval(1,2)", "hydra/sweeper=optuna", "--dry-run"], "run: "),
    ],
)
def test_wrong_use_is_one_clear_line_and_exit_code_2(arguments, message, results, capsys):
    assert program.main(arguments) == 2
    stderr = capsys.readouterr().err
    assert message in stderr and "Traceback" not in stderr and len(stderr.strip().splitlines()) == 1
    assert list(results.iterdir()) == []  # nothing was started


def test_a_command_in_a_folder_that_is_gone_is_answered_in_a_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert program.main(["table"]) == 2
    assert capsys.readouterr().err == "table: No such file or directory: go to a folder that is there, and free space\n"


def test_a_run_without_torch_is_refused_before_it_begins(results, monkeypatch, capsys):
    monkeypatch.setattr("bench.machine.gpus.torch_build", lambda: None)
    assert program.main(["run", "track=free", "experiment=smoke"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("run: torch: ") and "pip install torch" in stderr and list(results.iterdir()) == []


def test_without_a_word_the_program_shows_its_commands_by_purpose(printed):
    output = printed(program)
    places = [output.index(f"\n{purpose}:\n") for purpose in program.GROUPS]
    assert places == sorted(places)
    assert {line.split()[0] for line in output.splitlines() if line.startswith("  ")} >= set(program.VERBS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "track=cpu_nano", "hardware=cpu", "goal.num_steps=7"], "7 steps on cpu"),
        (["run", "-m", "track=cpu_nano", "hardware=cpu", "seed=0,1", "optim.lr=0.001,0.002"], "plan  4 runs, "),
        (["race", "A=", "B=optim=muon", "n=3", "track=cpu_nano", "hardware=cpu"], "plan  8 runs, "),
    ],
)
def test_a_dry_run_says_what_would_run_and_writes_nothing(arguments, message, results, printed):
    output = printed(program, *arguments, "--dry-run")
    assert message in output and output.endswith("a dry run: nothing was trained or recorded\n")
    assert [path for path in results.rglob("*") if path.is_file() and path.name != ".checked.json"] == []


def test_a_fork_answers_as_the_program_does(results):
    """All tests that call real_runs.bench() rely on this."""
    for arguments in (["run", "seed=0,1"], ["table"], ["--help"]):
        forked, fresh = real_runs.bench(results, *arguments), real_runs.bench(results, *arguments, PYTHONHASHSEED="0")
        assert (forked.returncode, forked.stdout, forked.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_failed_job_and_skips_what_is_complete(tmp_path):
    sweep = ["run", "-m", *real_runs.SHORT, "goal.num_steps=20", "optim.grad_clip_norm=null"]
    done = real_runs.bench(tmp_path, *sweep, "optim.lr=1e30,0.0018", "--json", code=1)
    assert "1 of 2 complete" in done.stderr and "2 of 2: " in done.stderr
    printed = json.loads(done.stdout)
    runs = [real_runs.run_json(Path(run["folder"])) for run in printed]
    assert [run["status"] for run in runs] == ["failed", "complete"]
    assert runs[0]["started_at"] < runs[1]["started_at"]
    assert [run["overrides"][-1] for run in printed] == ["optim.lr=1e+30", "optim.lr=0.0018"]
    for job, run in zip(printed, runs, strict=True):
        assert {key: run[key] for key in ("run_id", "status", "validity", "failure", "metrics")}.items() <= job.items()
    once_more = real_runs.bench(tmp_path, *sweep, "optim.lr=0.0018", "--quiet")
    assert once_more.returncode == 0 and once_more.stdout.startswith("   sweep  1 of 1 complete\n")
    once_more = real_runs.bench(tmp_path, *sweep, "optim.lr=0.0018", "--json")
    assert once_more.stderr.count("already complete") == 1
    assert json.loads(once_more.stdout) == [printed[1]]


def test_a_run_says_first_what_it_runs_and_its_json_is_all_there_is_on_standard_output(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path))
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    results = claimed.Results(tmp_path)
    for number, status in enumerate(("complete", "failed")):
        folder = results.add(number, train_s=22.0, status=status)  # 42 s from its start to its end
        job = prepare.Job(claimed.config(number), None, [], [])
        record = real_runs.run_json(folder) | {"folder": str(folder)}
        monkeypatch.setattr(run_verb, "prepare", lambda overrides, say, job=job, **options: job)
        monkeypatch.setattr(run_verb.launcher, "launch", lambda *_, record=record, **__: record)
        assert run_verb.main(["--json"]) == number
        captured = capsys.readouterr()
        assert json.loads(captured.out) == {key: record.get(key) for key in summary.KEYS}
        what = f"gpt2 (4 layers, width 128), adamw, seed {number}, track cpu_nano, 120 steps on cpu, 1 process"
        assert captured.err.splitlines()[0] == f"     run  {what}, about 42 s; what else there is: ./run.sh --help"
        assert captured.err.splitlines()[-1] == f"       cpu_nano/{folder.name}"  # from where the user stands
        assert run_verb.main(["seed=1", "-q"]) == number
        captured = capsys.readouterr()
        assert captured.out.startswith(f"     run  {status}: ") and captured.err == ""


@pytest.mark.slow
def test_a_run_on_the_users_own_shards_in_an_odd_folder(tmp_path, results):
    odd = tmp_path / "my 'own' (shards)"
    odd.mkdir()
    job = prepare.prepare(real_runs.SHORT)  # makes the data where they are not there yet
    tokens = shards.check(job.dataset.val[0].path).tokens()
    shards.write(odd / "a_train.bin", tokens[:60000])
    shards.write(odd / "val.bin", tokens[60000:])
    overrides = ["data=shards", f"data.train_glob={odd}/*_train.bin", "data.val_glob=val.bin", "data.vocab_size=257"]
    overrides.append("goal.num_steps=1")
    env = {"SPEEDRUN_CWD": str(odd), "HOME": str(tmp_path)}
    real_runs.bench(tmp_path, "run", *real_runs.SHORT, *overrides, code=0, **env)
    (folder,) = real_runs.folders(tmp_path)
    assert str(tmp_path) not in (folder / "run.json").read_text()  # the home folder is ~ there
    assert [file["file"] for file in real_runs.run_json(folder)["data"]["train"]] == ["~/my 'own' (shards)/a_train.bin"]
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_real_run_passes_verify_and_is_in_the_table(finished_run, answer_of, capsys):
    assert program.main(["verify", str(finished_run)]) == 0
    capsys.readouterr()
    (row,) = answer_of(program, "table", finished_run)
    assert (row["track"], row["status"], row["model"], row["optim"]) == ("free", "complete", "gpt2", "adamw")
    assert (row["world_size"], row["num_steps"], row["seed"]) == (1, 6, 5)


@pytest.mark.slow
def test_repeats_end_in_a_table_and_a_verdict(tmp_path):
    overrides = ["track.repeats=2", "goal.num_steps=20", "goal.val_every_steps=20", "goal.target_val_loss=5.5"]
    done = real_runs.bench(tmp_path, "speedrun", *real_runs.SHORT, *overrides, code=0)
    assert "verdict  mean val_loss" in done.stdout and "n=2" in done.stdout
    runs = [real_runs.run_json(folder) for folder in real_runs.folders(tmp_path)]
    assert sorted(run["seed"] for run in runs) == [0, 1]
    assert all(run["run_id"] in done.stdout for run in runs)
    assert "runs of 20 steps, 10,240 tokens (0.01 epochs); track.repeats=1 makes only one" in done.stdout
    assert "     run  1 of 2: seed 0\n" in done.stdout
    assert re.search("run  2 of 2: seed 1, about [0-9]+ s to go", done.stdout)


def test_a_sweep_counts_a_suspect_run_and_says_so_and_takes_a_valid_one_first(tmp_path, monkeypatch, printed):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path))
    results = claimed.Results(tmp_path)

    def suspect(run):
        run["validity"], run["validity_reasons"] = "suspect", ["other programs used 0.50 CPU cores"]

    config = claimed.config(0)
    files = [SimpleNamespace(sha256=sha256) for sha256 in (config.data.train_sha256, config.data.val_sha256)]
    monkeypatch.setattr(prepare.Job, "source_sha256", "4" * 64)

    def job(overrides, say, machine=None):
        dataset = SimpleNamespace(train=files[:1], val=files[1:])
        seed = next(int(override[5:]) for override in overrides if override.startswith("seed="))
        others = [override for override in overrides if not override.startswith("seed=")]
        return prepare.Job(claimed.config(seed, others), dataset, overrides, [])

    monkeypatch.setattr(points, "prepare", job)
    reads = []
    read_rows = store.read_rows
    monkeypatch.setattr(store, "read_rows", lambda paths, **options: reads.append(1) or read_rows(paths, **options))
    kept = [results.add(seed, change=change, source="4") for seed, change in ((0, suspect), (1, suspect), (1, None))]
    head, *lines = printed(run_verb, "-m", "seed=0,1").splitlines()
    assert head.endswith(", 2 runs: 2 seed") and head.startswith("   sweep  sweep-")
    assert lines[0].startswith(f"   sweep  seed=0: already complete, {kept[0].name}, suspect: other programs used 0.50")
    assert lines[1] == f"   sweep  seed=1: already complete, {kept[2].name}"
    assert lines[2].startswith("   sweep  val_loss 2.7500 (mean of 2 runs, sd 0.0000); ./run.sh judge ")
    assert lines[3] == "   sweep  2 of 2 complete"  # one config: nothing to rank
    assert lines[4].endswith(f"/sweep.html; ./run.sh table --sweep {head.split()[1].rstrip(',')}")
    assert len(reads) == 1  # for what is complete: not once a point
    for seed, train_s in ((0, 10.0), (1, 12.0)):
        results.add(seed, train_s, 2.5, overrides=["optim.lr=0.002"], source="4")
    lines = printed(run_verb, "-m", "seed=0,1", "optim.lr=0.0018,0.002", "exporters=[mlflow]").splitlines()
    assert lines[2] == f"   sweep  not exported again: ./run.sh dashboard {kept[0].name} --to mlflow"
    assert lines[10].startswith("2 configs, least mean val_loss first")
    assert lines[11] == "settings of all: exporters=[mlflow]"
    head, _, best, other = (line.split() for line in lines[13:17])
    assert head[:4] == ["optim.lr", "n", "val_loss_mean", "val_loss_sd"] and head[-1] == "config_id"
    assert best[:6] == ["0.002", "2", "2.5000", "0.00000", "11.00", "1.414"]
    assert other[:5] == ["0.0018", "2,", "1", "suspect", "2.7500"] and other[6] == "+0.2500"
