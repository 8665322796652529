"""What may be submitted to a referee: diffs beyond the model, code that spies, the changes of the example agent."""

import json
import os
import random
import socket
import subprocess
import sys

import pytest
import real_runs

from bench.machine import sandbox
from bench.plans.race import arm_process
from bench.plans.referee import agent, refereeing, submission
from bench.record import run_folder


def new_file(name, text, mode="100644"):
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    head = f"diff --git a/{name} b/{name}\nnew file mode {mode}\n--- /dev/null\n+++ b/{name}\n"
    return f"{head}@@ -0,0 +1,{len(text.splitlines())} @@\n{lines}"


MOVED = "diff --git a/{0} b/{1}\nsimilarity index 100%\nrename from {0}\nrename to {1}\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a file in each place that matters."""
    repo = tmp_path / "checkout"
    for name in ("bench/judge.py", "conf/track/cpu_nano.yaml", "conf/model/gpt2.yaml", "models/gpt2.py"):
        (repo / name).parent.mkdir(parents=True)
        (repo / name).write_text("x: 1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        real_runs.git(repo, *command)
    monkeypatch.setattr(submission, "REPO", repo)
    return repo


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (MOVED.format("bench/judge.py", "models/judge.py"), "bench/judge.py: a diff can change only models/"),
        (MOVED.format("conf/track/cpu_nano.yaml", "conf/model/size.yaml"), "conf/track/cpu_nano.yaml: a diff can"),
        (new_file("conf/goal/steps.yaml", "num_steps: 1"), "conf/goal/steps.yaml: a diff can change only"),
        (new_file("models/mine.py", "/etc/passwd", "120000"), "models/mine.py: is a symbolic link"),
    ],
)
def test_a_diff_of_a_model_reaches_no_other_file(checkout, tmp_path, patch, why):
    (tmp_path / "my.patch").write_text(patch)
    with pytest.raises(ValueError, match=why):
        submission.stored([str(tmp_path / "my.patch")], {"overrides": [], "rev": None}, tmp_path, "s/1", True)
    (tmp_path / "my.patch").write_text(new_file("models/mine.py", "y = 1"))
    arm = submission.stored([str(tmp_path / "my.patch")], {"overrides": [], "rev": None}, tmp_path, "s/1", True)
    assert len(arm["rev"]) == 40


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        ("models/mine.py", True),
        ("models/ladder/r99.py", True),
        ("models/optimizers/mine.py", False),  # its settings are read by the launcher, which is in no sandbox
        ("models/__init__.py", False),
        ("models/mine/__init__.py", False),
        ("models/__pycache__/base.cpython-311.pyc", False),
        ("conf/model/mine.yaml", False),  # it can set script.path, exporters and the sandbox itself
    ],
)
def test_without_trust_a_diff_changes_only_what_runs_in_the_sandbox(checkout, tmp_path, monkeypatch, name, is_taken):
    monkeypatch.setattr(sandbox, "kind", lambda: "bubblewrap")
    patch, champion = tmp_path / "my.patch", {"overrides": ["model=gpt2"], "rev": None}
    patch.write_text(new_file(name, "y: 1"))
    assert submission.stored([str(patch)], champion, tmp_path, "s/1", True)["overrides"] == ["model=gpt2"]
    if is_taken:
        arm = submission.stored([str(patch)], champion, tmp_path, "s/1", False)
        assert arm["overrides"] == ["model=gpt2", submission.CONFINED]
    else:
        with pytest.raises(
            ValueError, match=f"{name}: only the Python files of models in.*begin the search with --trust"
        ):
            submission.stored([str(patch)], champion, tmp_path, "s/1", False)


def test_no_launcher_and_no_auditor_imports_a_file_that_a_diff_may_change():
    code = """
import sys
from bench.cli import audit, referee, run
from bench.config import typed
from bench.data import loader
from models import optimizers, schedules
for config in (optimizers.Config, schedules.Config):
    [typed.variant(config, name) for name in typed.variants(config)]
print(*(module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "models"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=real_runs.REPO, capture_output=True, text=True, check=True)
    names = [os.path.relpath(path, real_runs.REPO) for path in done.stdout.split()]
    assert "models/settings.py" in names and not list(filter(submission.OF_RANKS.fullmatch, names))


def test_a_champion_and_submitted_code_race_in_sandboxes_alike():
    champion, mine = ({"overrides": words, "rev": None} for words in (["a=1"], ["a=2", submission.CONFINED]))
    arms = refereeing._arms(champion, mine, ["b=3"])
    assert arms["A"]["overrides"] == ["a=1", submission.CONFINED, "b=3"]
    assert arms["B"]["overrides"] == ["a=2", submission.CONFINED, "b=3"]
    assert refereeing._arms(champion, champion)["A"]["overrides"] == ["a=1"]


def test_an_edit_of_a_file_that_was_submitted_changes_no_champion(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "kind", lambda: "bubblewrap")
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    (tmp_path / "mine.py").write_text("import helper, torch\n")
    (tmp_path / "helper.py").write_text("x = 1\n")
    champion = {"overrides": ["model=gpt2"], "rev": None}
    arm = submission.stored(["model.arch=mine.py:Net"], champion, tmp_path / "results/1", "s/1", False)
    name = "results/1/files/mine.py"
    assert arm["overrides"] == ["model=gpt2", submission.CONFINED, f"model.arch={name}:Net"]
    assert (tmp_path / name).read_text() == "import helper, torch\n"
    assert (tmp_path / name).with_name("helper.py").read_text() == "x = 1\n"
    (tmp_path / "below").mkdir()
    (tmp_path / "below/net.py").write_text("import helper\n")
    with pytest.raises(ValueError, match="helper.py: is a link or not beside net.py"):
        submission.stored(["model.arch=below/net.py:Net"], champion, tmp_path / "results/2", "s/1", False)


SPY = """
import json, os, socket, subprocess, sys
from models.gpt2 import GPT2

seen = [path for path in PATHS if os.path.exists(path)] + [name for name in os.environ if "TOKEN" in name]
open(PATHS[0], "a").write("x")  # in memory

class Spy(GPT2):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        try:
            socket.create_connection(("127.0.0.1", PORT), timeout=5)
            seen.append("network")
        except OSError:
            pass
        subprocess.Popen("setsid env -i sleep 433.5 & exit", shell=True).wait()
        folder = sys.argv[1]
        os.symlink(PATHS[0], f"{folder}/telemetry.csv.link")
        open(f"{folder}/audit.json", "w").write("{}")
        open(f"{folder}/logs/gpus.log", "w").write("gpu0 had Xid 31\\n")  # as telemetry does
        tokens = [os.path.getsize(path) for path in json.load(open(f"{folder}/.launch.tmp"))["shards"]["val"]]
        print("SPY", json.dumps([seen, tokens]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or sandbox._tried()[0] is None, reason="no sandbox can be made here")
def test_a_model_that_spies_finds_nothing_and_its_run_is_recorded(tmp_path):
    (tmp_path / "id_rsa").write_text("KEY")
    with socket.create_server(("127.0.0.1", 0)) as ours:
        results = tmp_path / "results"
        paths = [tmp_path / "id_rsa", tmp_path / "spy.py", results / "ledger.jsonl", results / "searches"]
        paths = [*map(str, paths), str(real_runs.REPO / "bench/__init__.py")]
        (tmp_path / "spy.py").write_text(f"PATHS, PORT = {paths}, {ours.getsockname()[1]}\n{SPY}")
        overrides = ["track=free", "model=gpt2", "model.num_layers=1", "model.width=64", "model.num_heads=2", "look=on"]
        overrides += ["model.arch=spy.py:Spy", "goal.num_steps=2", "goal.val_tokens=8192", "checkpoint.save=true"]
        env = {"SPEEDRUN_CWD": str(tmp_path), "HF_TOKEN": "secret"}
        overrides += ["hardware.sandbox=true"]
        folder = real_runs.run(results, *overrides, **env)
    assert not arm_process.ask(real_runs.REPO, overrides, os.environ | env).get("refused")  # as a race is planned
    absolute = f"model.arch={tmp_path / 'spy.py'}:Spy"
    with pytest.raises(ValueError, match="no private path"):  # and no rank has imported torch for it
        arm_process.ask(real_runs.REPO, [*overrides, absolute], os.environ | env)
    lines = (folder / "logs/rank0.log").read_text().splitlines()
    seen, (val_bytes,) = json.loads(next(line for line in lines if line.startswith("SPY ")).removeprefix("SPY "))
    assert seen == [] and val_bytes == 1024 + 2 * (8192 + 1)  # what is held out is not in the sandbox
    record = run_folder.read(folder)
    assert record["status"] == "complete" and record["metrics"]["num_steps"] == 2
    assert "leaves too few for a batch" in record["referee"]["loss"]["held_out"]["not_checked"]
    kept = [*record["look"]["files"], "logs/gpus.log"]  # not its pages, as a browser would run what the model wrote
    assert "traces/ops/look_account.txt" in kept and all((folder / file).is_file() for file in kept)
    assert not [*folder.rglob("*.html")]
    assert (tmp_path / "id_rsa").read_text() == "KEY" and not (folder / "audit.json").exists()
    assert (folder / run_folder.WEIGHTS).is_file() and not [path for path in folder.rglob("*") if path.is_symlink()]
    assert real_runs.bench(results, "verify", str(folder)).returncode == 0
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "sleep 433.5" not in running


@pytest.mark.parametrize("settings", [[], [submission.SANDBOX]])
def test_a_diff_of_a_script_adds_no_link(tmp_path, settings):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("print(1)\n")
    (tmp_path / "my.patch").write_text(new_file("notes.py", "/etc/passwd", "120000"))
    champion = {"overrides": [f"script={tmp_path}/mine/train.py", *settings], "rev": None}
    with pytest.raises(ValueError, match="notes.py: is a symbolic link: submit the file itself"):
        submission.stored([str(tmp_path / "my.patch")], champion, tmp_path / "stored", "s/1", True)


def test_a_mutation_changes_one_constant_of_a_script():
    source = "import sys\nSTEPS = 40  # of training\nRATE = 2.5\nx = 3\n"
    seen = {agent.mutated(source, random.Random(seed)) for seed in range(100)}
    assert ("STEPS = 10, was 40", source.replace("40", "10")) in seen
    assert ("RATE = 5, was 2.5", source.replace("2.5", "5")) in seen
    assert all(changed.count("\n") == 4 and "x = 3" in changed for _, changed in seen)
