"""What may be submitted to a referee: diffs that reach for more than the model, and mutations of the agent."""

import random

import pytest
import real_runs

from bench.plans.referee import agent, submission


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
        submission.stored([str(tmp_path / "my.patch")], {"overrides": [], "rev": None}, tmp_path, "s/1")
    (tmp_path / "my.patch").write_text(new_file("models/mine.py", "y = 1"))
    arm = submission.stored([str(tmp_path / "my.patch")], {"overrides": [], "rev": None}, tmp_path, "s/1")
    assert len(arm["rev"]) == 40


@pytest.mark.parametrize("settings", [[], [submission.SANDBOX]])
def test_a_diff_of_a_script_adds_no_link(tmp_path, settings):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("print(1)\n")
    (tmp_path / "my.patch").write_text(new_file("notes.py", "/etc/passwd", "120000"))
    champion = {"overrides": [f"script={tmp_path}/mine/train.py", *settings], "rev": None}
    with pytest.raises(ValueError, match="notes.py: is a symbolic link: submit the file itself"):
        submission.stored([str(tmp_path / "my.patch")], champion, tmp_path / "stored", "s/1")


def test_a_mutation_changes_one_constant_of_a_script():
    source = "import sys\nSTEPS = 40  # of training\nRATE = 2.5\nx = 3\n"
    seen = {agent.mutated(source, random.Random(seed)) for seed in range(100)}
    assert ("STEPS = 10, was 40", source.replace("40", "10")) in seen
    assert ("RATE = 5, was 2.5", source.replace("2.5", "5")) in seen
    assert all(changed.count("\n") == 4 and "x = 3" in changed for _, changed in seen)
