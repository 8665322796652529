"""Which commit made it worse: a search by git over a planted history, and what a race says of a commit."""

import json
import multiprocessing
import subprocess

import pytest
import real_runs
from real_runs import git

from bench.cli import bisect as cli
from bench.machine import processes
from bench.plans.race import worktrees
from bench.plans.replay import bisect
from bench.plans.replay.bisect import BAD, GOOD, UNDECIDED


@pytest.fixture
def history(tmp_path):
    """(repository, its nine commits, the oldest first)."""
    git(tmp_path, "init", "-q", "repo")
    repo = tmp_path / "repo"
    for number in range(9):
        (repo / "file").write_text(str(number))
        git(repo, "add", "file")
        git(repo, "commit", "-q", "-m", f"commit {number}")
    return repo, git(repo, "rev-list", "--reverse", "HEAD").split()


@pytest.mark.parametrize("first_bad", range(1, 9))
def test_the_first_bad_commit_is_found_in_few_races(history, first_bad):
    repo, commits = history
    ended = bisect.search(repo, commits[0], commits[8], lambda commit: BAD if commit in commits[first_bad:] else GOOD)
    assert ended.commits == [commits[first_bad]] and len(ended.outcome_by_commit) <= 3
    assert git(repo, "status", "--porcelain") == "" and git(repo, "worktree", "list").count("\n") == 0
    assert git(repo, "for-each-ref", "refs/bisect") == ""


def test_a_search_is_not_disturbed_by_another_one_of_the_same_repository(history):
    """In another terminal, for another setting; and what a killed one left behind goes."""
    repo, commits = history
    killed = subprocess.Popen(["true"])
    killed.wait()
    left = f"bisect-{processes.boot_id_hash()[:8]}-{killed.pid}"
    worktrees.add(repo, left, commits[0])

    def ask(commit):
        arguments = (repo, commits[0], commits[8], lambda other: GOOD)
        ended = multiprocessing.get_context("fork").Process(target=bisect.search, args=arguments)
        ended.start()
        ended.join()
        assert ended.exitcode == 0
        return BAD if commit in commits[3:] else GOOD

    assert bisect.search(repo, commits[0], commits[8], ask).commits == [commits[3]]
    assert not worktrees.path_of(repo, left).exists()


def test_what_could_not_be_decided_stays_in_the_answer(history):
    repo, commits = history
    outcomes = {commits[number]: GOOD for number in (1, 2, 3)} | {commits[number]: BAD for number in (6, 7)}
    ended = bisect.search(repo, commits[0], commits[8], lambda commit: outcomes.get(commit, UNDECIDED))
    assert sorted(ended.commits) == sorted(commits[4:7])  # 4 and 5 are undecided, 6 is bad
    assert {commit for commit, outcome in ended.outcome_by_commit.items() if outcome == UNDECIDED} == set(commits[4:6])


def test_a_good_commit_that_is_no_ancestor_is_refused(history):
    repo, commits = history
    with pytest.raises(ValueError, match="is not an ancestor of"):
        bisect.check_order(repo, commits[5], commits[2])


@pytest.mark.parametrize(
    ("interval", "outcome"), [([4.0, 6.0], BAD), ([-1.0, 1.0], GOOD), ([1.0, 4.0], UNDECIDED), ([2.6, 4.0], BAD)]
)
def test_a_commit_is_judged_by_its_interval_against_half_of_the_change(interval, outcome):
    time = {"change_pct": sum(interval) / 2, "ci95_pct": interval}
    race = {"race_id": "r", "result": {"against": {"B": {"comparable": True, "time": time}}}}
    assert bisect.answer(bisect.change_of(race, "step_avg_ms"), 2.5) == outcome


@pytest.mark.parametrize(
    ("metric", "text"),
    [(["accuracy", "", "higher"], "-0.3000 accuracy [-0.3200, -0.2800]"), (None, "-0.3000 nats [-0.3200, -0.2800]")],
)
def test_a_fall_is_worse_for_a_metric_of_which_higher_is_better(metric, text):
    loss = {"change": -0.3, "ci95": [-0.32, -0.28], "metric": metric}
    race = {"race_id": "r", "result": {"against": {"B": {"comparable": True, "val_loss": loss}}}}
    change = bisect.change_of(race, "val_loss")
    assert (bisect.answer(change, 0.15), str(change)) == (BAD if metric else GOOD, text)


def test_a_commit_that_could_not_be_compared_is_undecided():
    time = {"change_pct": 5.0, "ci95_pct": [4.0, 6.0]}
    race = {"race_id": "r", "result": {"against": {"B": {"comparable": False, "time": time}}}}
    assert bisect.change_of(race, "step_avg_ms") is None and bisect.answer(None, 1.0) == UNDECIDED
    assert bisect.change_of({"result": None}, "val_loss") is None


@pytest.mark.parametrize(("settings", "hint"), [([], "n=10"), (["n=8"], "n=16"), (["n=auto:3-20"], "n=40")])
def test_a_pair_without_a_shown_change_is_to_be_raced_with_twice_the_runs(history, settings, hint, monkeypatch, capsys):
    repo, _ = history
    monkeypatch.setattr(cli._Search, "_change", lambda *_: None)
    assert cli.main(["HEAD~1", "HEAD", *settings, f"script.root={repo}", "script=file"]) == 1
    assert f"BAD is not shown to be worse than GOOD: more runs ({hint}), or another pair" in capsys.readouterr().out


@pytest.mark.slow
def test_a_commit_that_learns_worse_is_found_by_races(tmp_path):
    """Of two commits the first takes a tenth of AdamW's learning rate, the other changes nothing that is trained."""
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(real_runs.REPO), str(clone))
    good = git(clone, "rev-parse", "HEAD")
    yaml = clone / "conf" / "optim" / "adamw.yaml"
    for number in range(2):
        if number == 0:
            lines = yaml.read_text().splitlines()
            (lr,) = [line for line in lines if line.strip().startswith("lr:")]
            value = float(lr.split(":")[1].split("#")[0])
            yaml.write_text(yaml.read_text().replace(lr, lr.split(":")[0] + f": {value / 10}"))
        (clone / "README.md").write_text(str(number))
        git(clone, "commit", "-qam", f"change {number}")
    bad = git(clone, "rev-parse", "HEAD")
    arguments = ["bisect", good, bad, "--on", "val_loss", "n=2", *real_runs.SHORT, "--anyway", "--json"]
    done = real_runs.bench(tmp_path / "results", *arguments, cwd=clone, timeout_s=900, code=0)
    report = json.loads(done.stdout)
    assert report["commits"] == [git(clone, "rev-parse", "HEAD~1")]
    assert report["effect"]["low"] > 0 and "trains by the code and settings of" in done.stderr
