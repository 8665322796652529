"""The speed of a repository over its commits: change points, the series of a planted history, what CI does."""

import io
import json
import math
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import real_runs
import yaml
from browser import Browser, look_at, needs_browser
from real_runs import REPO, git

from bench.base import atomic, change_points, stats
from bench.record import named
from bench.report import history

TRAIN = """import time
from speed import STEP_MS
t0 = time.perf_counter()
for step in range(1, 21):
    time.sleep(STEP_MS / 1e3)
    ms = 1e3 * (time.perf_counter() - t0)
    print(f"step:{step}/20 train_time:{ms:.3f}ms step_avg:{ms / step:.3f}ms", flush=True)
print(f"step:20/20 val_loss:3.0000 train_time:{ms:.3f}ms step_avg:{ms / 20:.3f}ms")
"""
SETTINGS = ["script=train.py", "script.torchrun=false", "track=free", "hardware=cpu"]


def repository(folder, step_ms_by_commit):
    """Makes a git repository with a commit for each step time -> the commits, oldest first."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "train.py").write_text(TRAIN)
    for number, step_ms in enumerate(step_ms_by_commit):
        (folder / "speed.py").write_text(f"STEP_MS = {step_ms}  # {number}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"change {number}")
    return git(folder, "rev-list", "--reverse", "HEAD").split()


# ---- change points


def test_two_planted_steps_are_found_between_the_right_values():
    noise = [0.1, -0.1, 0.0, 0.1, -0.1] * 4
    values = [level + extra for level, extra in zip([0] * 7 + [10] * 7 + [30] * 6, noise, strict=True)]
    first, second = change_points.find(values)
    assert [(change.before, change.after) for change in (first, second)] == [(6, 7), (13, 14)]
    assert first.step == pytest.approx(10, abs=0.1) and first.low < 10 < first.high
    assert second.step == pytest.approx(20, abs=0.1) and second.low < 20 < second.high


def test_a_small_step_has_a_wide_stretch_and_a_series_of_seven_has_none():
    random.seed(1)
    values = [random.gauss(0, 1) + 4 * (number >= 20) for number in range(40)]
    (change,) = change_points.find(values)
    assert change.before < 20 <= change.after and change.after - change.before > 1
    assert change_points.find([0.0] * 3 + [100.0] * 4) == []


@pytest.mark.parametrize(("draw", "most"), [("normal", 0.05), ("t5", 0.12)])
def test_steady_series_seldom_have_changes(draw, most):
    """Normal noise shows one in at most one of twenty series; the heavier tails of t with 5 degrees in more of them."""
    chance = np.random.default_rng(5)
    series = chance.standard_normal((300, 30)) if draw == "normal" else chance.standard_t(5, (300, 30))
    assert sum(bool(change_points.find(list(map(float, values)))) for values in series) <= 300 * most


def test_a_stretch_that_is_reported_holds_a_true_change_in_95_of_100_series():
    num_wrong = 0
    for seed in range(300):
        chance = random.Random(seed)
        values = [chance.gauss(0, 1) + 6 * (number >= 9) - 4 * (number >= 21) for number in range(30)]
        changes = change_points.find(values)
        assert changes
        num_wrong += any(not (c.before < 9 <= c.after or c.before < 21 <= c.after) for c in changes)
    assert num_wrong <= 15


@pytest.mark.parametrize(("num_from_change", "step_sds"), [(1, 3.3), (3, 2.3), (10, 1.5)])
def test_changes_are_found_that_are_as_small_as_the_docs_say(num_from_change, step_sds):
    """docs/race.md: a push runs each side five times."""
    chance, num, num_found = random.Random(3), 14 + num_from_change, 0
    for _ in range(100):
        values = [chance.gauss(step_sds * (number >= 14), 5**-0.5) for number in range(num)]
        num_found += any(change.before < 14 <= change.after for change in change_points.find(values))
    assert 70 <= num_found <= 95
    assert stats.smallest_difference((1.0, 1.0), (5, 5)) == pytest.approx(2.02, abs=0.01)


@pytest.mark.parametrize("num", [10, 14, 100])
def test_the_threshold_is_above_the_simulated_quantile(num):
    """The quantile of the largest |sum| / sqrt(length) / sigma over all stretches of independent normal values."""
    values = np.random.default_rng(num).standard_normal((8000, num))
    sums = np.concatenate([np.zeros((8000, 1)), np.cumsum(values, 1)], 1)
    largest = np.max([np.abs(sums[:, k:] - sums[:, :-k]).max(1) / math.sqrt(k) for k in range(1, num + 1)], axis=0)
    sigmas = np.array([change_points.sigma(list(row)) for row in values])
    threshold = next(limit for most, limit in change_points.THRESHOLDS if num <= most)
    assert 0.9 * threshold < np.quantile(largest / sigmas, 0.95) < threshold * 1.01


# ---- the series of a repository


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """(repository, its twenty commits, results): slower by 30 % from the 8th on, by 20 % more from the 15th.

    One run is real; the others are its record with another commit and time.
    """
    folder = tmp_path_factory.mktemp("planted")
    repo, results = folder / "repo", folder / "results"
    commits = repository(repo, [1] * 20)
    overrides = [*SETTINGS, f"script.root={repo}", f"script.rev={commits[0]}"]
    real_runs.bench(results, "run", *overrides, code=0)
    (first,) = real_runs.folders(results)
    chance = random.Random(0)
    for number, commit in enumerate(commits):
        for repeat in range(2):
            copy = first.with_name(f"{first.name}-{number}-{repeat}")
            shutil.copytree(first, copy)
            run = json.loads((copy / "run.json").read_text())
            step_ms = 10 * 1.3 ** (number >= 7) * 1.2 ** (number >= 14) * math.exp(chance.gauss(0, 0.01))
            run["run_id"], run["metrics"]["step_avg_ms"] = copy.name, step_ms
            (copy / "run.json").write_text(json.dumps(run))
            config = (copy / "config.yaml").read_text().replace(commits[0], commit)
            (copy / "config.yaml").write_text(config)
    shutil.rmtree(first)
    return repo, commits, results


def test_a_badge_replaces_a_badge_and_no_other_picture(tmp_path):
    badges = []
    for num_points in (3, 1200):
        series = types.SimpleNamespace(points=[None] * num_points, is_steady=True)
        badges.append(history.badge([series]))
        atomic.write_out(tmp_path / "badge.svg", badges[-1], "--badge", mark=history.BADGE_MARK)
    assert badges[0] != badges[1] == (tmp_path / "badge.svg").read_text()
    (tmp_path / "badge.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="9"><title>mine</title></svg>')
    with pytest.raises(ValueError, match="has no mark of this program"):
        atomic.write_out(tmp_path / "badge.svg", badges[0], "--badge", mark=history.BADGE_MARK)


def shown(planted, *arguments):
    repo, _, results = planted
    done = real_runs.bench(results, "history", *arguments, SPEEDRUN_CWD=str(repo), code=0)
    return done.stdout


def test_two_planted_regressions_are_found_with_the_commands_that_find_the_commits(planted, tmp_path):
    repo, commits, _ = planted
    page, badge = tmp_path / "index.html", tmp_path / "badge.svg"
    (series,) = json.loads(shown(planted, "--json", "--html", str(page), "--badge", str(badge)))
    assert len(series["points"]) == 20 and {point["num_runs"] for point in series["points"]} == {2}
    first, second = series["changes"]
    for change, planted_at in ((first, 7), (second, 14)):
        assert commits.index(change["before"]) < planted_at <= commits.index(change["after"])
    assert float(first["change"].split()[0]) == pytest.approx(30, abs=3)
    assert float(second["change"].split()[0]) == pytest.approx(20, abs=3)
    between = f"{second['before'][:10]} {second['after'][:10]}"
    assert re.fullmatch(rf"\./run\.sh bisect {between} .*script=train\.py.* script\.root=\.", second["command"])
    assert series["command"] is None  # of an undecided series
    assert "seed=" not in second["command"] and "script.rev=" not in second["command"]
    text = page.read_text()
    assert second["before"][:10] in text and "bisect" in text and "Narrowest Significance Pursuit" in text
    assert str(repo) not in text and text.index(second["command"]) < text.index(first["command"])
    assert re.search(r"<title>speed: \+\d+\.\d\d % in [0-9a-f]{7}\.\.[0-9a-f]{7}</title>", badge.read_text())


def test_the_answer_begins_with_the_newest_change(planted):
    lines = shown(planted).splitlines()
    assert lines[0].startswith("verdict: SLOWER") and "step_avg_ms changed by +" in lines[0]
    assert "to find the commit: " in lines[1] or "to confirm " in lines[1]
    assert not any("more: --json has all" in line for line in lines)  # all of twenty commits


def test_runs_of_another_machine_and_doubtful_clocks_are_no_part_of_a_series(planted, monkeypatch):
    repo, commits, results = planted
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(results))
    rows = named.rows_of_names([])
    rows[0]["comparability_id"], rows[1]["script_doubt"], rows[2]["discarded"] = "another", "it lies", True
    (series,) = history.all_series(rows, history.commits_of(repo, "HEAD"), "step_avg_ms")
    assert sum(point.num_runs for point in series.points) == 37
    (before_the_change,) = history.all_series(rows, history.commits_of(repo, commits[5]), "step_avg_ms")
    assert len(before_the_change.points) <= 6 and not before_the_change.changes


def test_a_series_that_is_too_short_for_changes_says_what_its_newest_race_showed(planted, tmp_path):
    """Else the page and the badge of a new project say "undecided" beside a job that fails."""
    repo, commits, results = planted
    listed = history.commits_of(repo, "HEAD")
    few = [
        row for row in named.rows_of_names([str(results)]) if any(sha in "".join(row["config"]) for sha in commits[4:9])
    ]
    rows = [row | {"race_id": "R", "started_at": "2026-01-01T00:00:00Z"} for row in few]
    revs = {"A": commits[6], "B": commits[7], "C": commits[8]}
    arms = {name: {"overrides": ["script=a.py", f"script.rev={sha}"]} for name, sha in revs.items()}
    time = {"change_pct": 30.111}
    against = {"B": {"verdict": "slower", "words": "B is slower", "time": time}, "C": {"verdict": "inconclusive"}}
    race = {"race_id": "R", "baseline": "A", "arms": arms, "result": {"against": against}}
    folder = results / "races" / "R"
    folder.mkdir(parents=True)
    try:
        (folder / "race.json").write_text(json.dumps(race))
        (series,) = all_series = history.all_series(rows, listed, "step_avg_ms")
        (verdict,) = history.document(all_series, "repo").verdicts
        words = f"step_avg_ms of {commits[7][:10]} (change 7) differs by +30.11 % from {commits[6][:10]}, by their race"
        assert (verdict.word, verdict.sentence) == ("slower", words)
        (drawn,) = history.document(all_series, "repo").charts
        assert [line["name"] for line in drawn["series"]] == ["commits"]  # an undecided series has no level
        assert verdict.notes == ["from 8 commits on a series shows changes without races; this one has 5"]
        assert f">speed: +30.11 % in {commits[6][:7]}..{commits[7][:7]}<" in history.badge(all_series)
        (losses,) = history.all_series(rows, listed, "val_loss")
        assert losses.raced is None  # the race is about time
        (longer,) = history.all_series(
            [row | {"race_id": "R"} for row in named.rows_of_names([str(results)])], listed, "step_avg_ms"
        )
        assert longer.raced is None and longer.changes
    finally:
        shutil.rmtree(folder)
    assert history.all_series(rows, listed, "step_avg_ms")[0].raced is None  # a race that is lost


def test_of_several_races_the_one_of_the_nearest_commits_counts_until_it_is_refuted(planted):
    """A later race of a range would otherwise widen what an earlier race of two neighbours showed."""
    repo, commits, results = planted
    listed = history.commits_of(repo, "HEAD")
    few = [
        row for row in named.rows_of_names([str(results)]) if any(sha in "".join(row["config"]) for sha in commits[4:9])
    ]
    ends = {"R1": (6, 7, "slower"), "R2": (4, 8, "slower"), "R3": (6, 7, "inconclusive")}
    rows = [row | {"race_id": race, "started_at": f"2026-01-0{race[1]}T00:00:00Z"} for race in ends for row in few]
    try:
        for race, (first, second, verdict) in ends.items():
            arms = {
                "A": {"overrides": [f"script.rev={commits[first]}"]},
                "B": {"overrides": [f"script.rev={commits[second]}"]},
            }
            against = {"B": {"verdict": verdict, "words": "", "time": {"change_pct": 30.0}}}
            (results / "races" / race).mkdir(parents=True)
            content = {"race_id": race, "baseline": "A", "arms": arms, "result": {"against": against}}
            (results / "races" / race / "race.json").write_text(json.dumps(content))
        for known, nearest in ((("R1",), (6, 7)), (("R1", "R2"), (6, 7)), (("R1", "R2", "R3"), (4, 8))):
            (series,) = history.all_series([row for row in rows if row["race_id"] in known], listed, "step_avg_ms")
            assert (series.raced.before, series.raced.after) == tuple(listed[at] for at in nearest)
    finally:
        shutil.rmtree(results / "races")


def rows_of_pushes(planted, seed):
    """The rows of 19 races of a commit and the one before it, two runs each, on a machine that differs each time."""
    _, commits, results = planted
    chance, rows = random.Random(seed), named.rows_of_names([str(results)])
    by_commit = {commit: next(row for row in rows if commit in "".join(row["config"])) for commit in commits}
    for number in range(1, len(commits)):
        level = 0.03 * chance.gauss(0, 1)
        for commit in commits[number - 1 : number + 1] * 2:
            step_ms = 10 * math.exp(level + 0.01 * chance.gauss(0, 1))
            of_race = {"race_id": f"R{number}", "started_at": f"2026-01-{number:02d}T00:00:00Z"}
            yield by_commit[commit] | of_race | {"step_avg_ms": step_ms, "machine_doubts": [], "validity": "valid"}


def test_a_steady_series_of_pushes_seldom_shows_a_change_on_a_machine_that_drifts(planted):
    """With both races of each commit, a quarter of these series showed one: neighbours shared a race."""
    commits = history.commits_of(planted[0], "HEAD")
    series = [history.all_series(rows_of_pushes(planted, seed), commits, "step_avg_ms")[0] for seed in range(60)]
    assert {point.num_runs for curve in series for point in curve.points} == {2}
    assert sum(bool(curve.changes) for curve in series) <= 3


def test_disturbed_runs_of_a_commit_count_only_if_no_race_has_two_others(planted):
    rows, commits = list(rows_of_pushes(planted, 0)), history.commits_of(planted[0], "HEAD")
    disturbed = {"machine_doubts": ["other programs"], "validity": "suspect", "step_avg_ms": 99.0}
    rows[3] |= disturbed  # of commit 1, whose next race has two others
    rows[-1] |= disturbed  # of the newest commit, which has no other race
    ((*_, newest),) = (series.points for series in history.all_series(rows, commits, "step_avg_ms"))
    assert (newest.num_runs, newest.num_suspect) == (2, 1) and newest.value > 20
    (series,) = history.all_series(rows, commits, "step_avg_ms")
    value = math.sqrt(rows[4]["step_avg_ms"] * rows[6]["step_avg_ms"])
    assert (series.points[1].num_suspect, series.points[1].value) == (0, pytest.approx(value))
    rows[-3] |= disturbed  # now all runs of the newest commit
    (left,) = history.all_series(rows, commits, "step_avg_ms")
    assert [point.commit for point in left.points] == commits[:19]
    all_disturbed = [row | disturbed for row in rows]
    assert len(history.all_series(all_disturbed, commits, "step_avg_ms")[0].points) == 20
    of_two = [row for row in rows if history._commit_of(row) in (commits[18].sha, commits[19].sha)]
    (two,) = history.all_series(of_two, commits, "step_avg_ms")  # as on a pull request whose head ran beside others
    assert [point.num_suspect for point in two.points] == [0, 2]
    (losses,) = history.all_series(rows, commits, "val_loss")
    assert [point.num_runs for point in losses.points] == [2, *[4] * 18, 2]  # a loss does not depend on the machine


def test_a_folder_without_git_or_without_runs_is_refused(planted, tmp_path):
    repo, _, _ = planted
    for cwd, message in ((tmp_path, "is in no repository with this revision"), (repo, "no two commits have runs")):
        done = real_runs.bench(tmp_path / "empty", "history", SPEEDRUN_CWD=str(cwd))
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_revision_that_looks_like_an_option_of_git_writes_no_file(planted, tmp_path):
    with pytest.raises(ValueError, match="is in no repository with this revision"):
        history.commits_of(planted[0], f"--output={tmp_path / 'written'}")
    assert not (tmp_path / "written").exists()


def test_a_subject_of_several_lines_and_damaged_runs_cost_only_themselves(planted, tmp_path, capsys):
    repo, commits, results = planted
    git(repo, "commit", "-q", "--allow-empty", "-m", "a\fpage\u2028and a line")
    assert history.commits_of(repo, "HEAD")[-1].subject == "a\fpage\u2028and a line"
    token = "_".join(("hf", "aB3d" * 8))  # in parts: this file may be in a diff
    git(repo, "commit", "-q", "--allow-empty", "-m", f"{token} of {Path.home()}/data")
    assert history.commits_of(repo, "HEAD")[-1].subject == "SECRET of ~/data"
    git(repo, "reset", "-q", "--hard", commits[-1])
    rows = [dict(row) for row in named.rows_of_names([str(results)])]
    rows[0]["step_avg_ms"], rows[1]["step_avg_ms"] = 0.0, -1.0
    for number, damaged in enumerate(["5\n", "a: b\n", ""]):
        folder = shutil.copytree(rows[number + 2]["folder"], tmp_path / str(number))
        (folder / "overrides.yaml").write_text(damaged) if damaged else (folder / "overrides.yaml").unlink()
        rows[number + 2] |= {"folder": str(folder), "started_at": f"2099-01-0{number + 1}T00:00:00Z"}
    (series,) = history.all_series(rows, history.commits_of(repo, "HEAD"), "step_avg_ms")
    assert sum(point.num_runs for point in series.points) == 38 and "script=train.py" in series.settings
    assert capsys.readouterr().err.count("overrides.yaml: ") == 3


def test_clones_in_different_folders_give_one_series(planted):
    """The script, the patterns of its lines and the data lie in another folder on another machine."""
    repo, _, results = planted
    rows = [dict(row) for row in named.rows_of_names([str(results)])]
    for number, row in enumerate(rows):
        script = json.loads(next(text for text in row["config"] if text.startswith('{"script.')))
        script |= {"script.root": f"/clone{number % 2}", "script.dialect": f"/clone{number % 2}/lines.yaml"}
        others = [text for text in row["config"] if not text.startswith('{"script.')]
        row["config"] = [*others, json.dumps(script)]
    assert len(history.all_series(rows, history.commits_of(repo, "HEAD"), "step_avg_ms")) == 1


def test_runs_of_a_race_that_has_not_ended_are_not_shown(planted):
    repo, commits, results = planted
    rows = [row | {"race_id": "R"} for row in named.rows_of_names([str(results)])]
    race, commits = results / "races" / "R", history.commits_of(repo, "HEAD")
    race.mkdir(parents=True)
    (race / "plan.json").write_text("{}")
    assert not history.all_series(rows, commits, "step_avg_ms")
    (race / "race.json").write_text("{}")
    assert len(history.all_series(rows, commits, "step_avg_ms")[0].points) == 20
    shutil.rmtree(race)


# ---- in CI


def steps(inputs, github):
    """The Action's own steps in order, with their expressions filled in -> [(name, script, env)]."""
    action = yaml.safe_load((REPO / ".ci" / "action.yml").read_text())
    defaults = {name: facts["default"] for name, facts in action["inputs"].items() if "default" in facts}

    def filled(text, outputs):
        values = {f"inputs.{name}": value for name, value in (defaults | inputs).items()}
        values |= {f"github.{name}": value for name, value in github.items()}
        values |= {f"steps.race.outputs.{name}": value for name, value in outputs.items()}
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: values[match[1]], str(text))

    return [step for step in action["runs"]["steps"] if "run" in step], filled


def ci_job(tmp_path):
    """Runs the Action's steps as a runner does, on a slower head -> what the test below looks at."""
    repo, temp = tmp_path / "repo", tmp_path / "runner"
    base, head = repository(repo, [10, 40])
    temp.mkdir()
    kept = repo / "speedrun" / "results"
    cached = [kept / track / f"2020010{day}T000000Z-a run" for day in (1, 2, 3) for track in ("a", "b")]
    cached += [kept / f"races/2020010{day}T000000Z-race" for day in (1, 2, 3, 4, 5)]
    for folder in cached:
        folder.mkdir(parents=True)
    (temp / "gh").write_text(f'#!/bin/sh\necho "$@" >>{temp}/gh.log\n')
    (temp / "gh").chmod(0o755)
    output, summary = temp / "output", temp / "summary"
    github = {"action_path": str(REPO / ".ci"), "token": "t", "sha": head, "event.pull_request.number": "7"}
    settings = " ".join(["script=train.py", "script.torchrun=false", "'track=free'", "hardware=cpu"])
    own, filled = steps({"settings": settings, "base": base, "head": head, "n": "3", "keep": "4"}, github)
    codes, outputs = {}, {}
    for step in own:
        env = {name: filled(value, outputs) for name, value in step.get("env", {}).items()}
        env |= {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_REPOSITORY": "o/r"}
        env |= {"PATH": f"{temp}:{os.environ['PATH']}", "SPEEDRUN_PYTHON": sys.executable}
        script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(script, cwd=repo, env=os.environ | env, capture_output=True, text=True)
        codes[step["name"]] = done.returncode
        assert "Traceback" not in done.stderr and "no two commits" not in done.stderr, done.stderr
        outputs |= dict(line.split("=", 1) for line in output.read_text().splitlines())
    return repo, temp, (base, head), cached, codes, outputs, summary


@pytest.mark.slow  # eight runs of a script
def test_the_actions_steps_race_a_slower_head_comment_and_fail(tmp_path):
    """The gh keeps what it is given.  Where the machine was busy beside one arm, the job is run again, as it says."""
    for attempt in "123":
        (tmp_path / attempt).mkdir()
        repo, temp, (base, head), cached, codes, outputs, summary = ci_job(tmp_path / attempt)
        if codes["Verdict"] != os.EX_TEMPFAIL:
            break
    assert codes == {"Key of the environment": 0, "Race": 0, "Comment": 0, "Verdict": 1}
    assert outputs["code"] == "1" and len(outputs["sha256"]) == 16
    assert [folder for folder in cached if not folder.exists()] == [*cached[:2], cached[6]]  # all but the newest four
    comment = (repo / "speedrun" / "comment.md").read_text()
    assert comment.startswith("<!-- speedrun -->\n### The head is slower than the base\n\n") and "<details>" in comment
    assert f"\nBase: `{base[:7]} change 0`  \nHead: `{head[:7]} change 1`  \n\nverdict:" in comment
    assert f"**SLOWER**  Head ({head[:7]}) is " in comment
    assert "To find the commit" not in comment  # there is one
    assert "\n\nThe job fails: a slowdown of Head by more than 1 % is shown (95 % interval" in comment
    assert git(repo, "status", "--porcelain") == ""
    assert str(repo) not in comment and summary.read_text() == comment
    assert "-X POST repos/o/r/issues/7/comments -F body=@speedrun/comment.md" in (temp / "gh.log").read_text()
    page = (repo / "speedrun" / "race.html").read_text()
    links = set(re.findall(r'href="(results/[^"]*)"', page))
    assert len(links) == 8 and all((repo / "speedrun" / link).is_file() for link in links)
    pages = {"comment.md", "race.html", "race.json", "index.html", "badge.svg"}
    assert {path.name for path in (repo / "speedrun").iterdir()} == {*pages, "results", ".gitignore"}


@pytest.mark.skipif(shutil.which("jq") is None, reason="gh's --jq is tried with jq")
@pytest.mark.parametrize(
    ("comments", "request_line"),
    [
        ([("mallory", 1)], "-X POST repos/o/r/issues/7/comments"),
        ([("mallory", 1), ("github-actions[bot]", 2), ("github-actions[bot]", 3)], "-X PATCH https://api/2"),
        (None, None),
    ],
)
def test_the_action_edits_its_own_comment_alone_and_warns_without_permission(tmp_path, comments, request_line):
    listed = [
        {"user": {"login": login}, "url": f"https://api/{number}", "body": "<!-- speedrun -->\nverdict: faster"}
        for login, number in comments or ()
    ]
    (tmp_path / "comments.json").write_text(json.dumps(listed))
    reply = f'jq -r "$5" {tmp_path}/comments.json' if comments else "exit 1"
    cases = f"case $2 in user) exit 1;; repos/*) {reply};; esac"
    (tmp_path / "gh").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/gh.log\n{cases}\n')
    (tmp_path / "gh").chmod(0o755)
    own, _ = steps({}, {})
    (script,) = (step["run"] for step in own if step["name"] == "Comment")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_REPOSITORY": "o/r", "PULL_REQUEST": "7"}
    env["MARK"] = "<!-- speedrun -->"
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("::warning::" in done.stdout) == (comments is None)
    written = [line for line in (tmp_path / "gh.log").read_text().splitlines() if "-X" in line]
    assert written == ([f"api {request_line} -F body=@speedrun/comment.md"] if request_line else [])


def test_gitlabs_template_and_the_action_call_the_same_script():
    job = yaml.safe_load((REPO / ".ci" / "gitlab.yml").read_text())["speedrun"]
    own, _ = steps({}, {})
    lines = [line for line in [*job["script"], *(step["run"] for step in own)] if "/watch" in line]
    assert len(lines) == 2 and all("/watch" in line and '"${settings[@]}" || code=$?' in line for line in lines)
    assert job["cache"][1]["when"] == "always"  # also of a job that fails
    action = yaml.safe_load((REPO / ".ci" / "action.yml").read_text())
    saved = [step for step in action["runs"]["steps"] if "cache/save" in step.get("uses", "")]
    assert len(saved) == 2 and all(step["if"].startswith("always()") for step in saved)
    assert job["script"][-1] == 'exit "$code"' and job["retry"] == {"max": 2, "exit_codes": 75}
    # with expose_as, GitLab refuses a pipeline whose artifacts have a * in their paths
    assert "expose_as" not in job["artifacts"] and "*" in "".join(job["artifacts"]["paths"])


def test_gitlabs_job_takes_a_commit_or_a_branch_of_the_harness_also_over_a_cached_one(tmp_path):
    commits = repository(tmp_path / "harness", [1, 2])
    lines = yaml.safe_load((REPO / ".ci" / "gitlab.yml").read_text())["speedrun"]["script"][:3]
    for version, number in ((commits[0], 0), ("main", 1)):
        env = os.environ | {"SPEEDRUN_REPOSITORY": f"file://{tmp_path}/harness", "SPEEDRUN_VERSION": version}
        subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, env=env, check=True)
        assert git(tmp_path / ".speedrun", "rev-parse", "HEAD").strip() == commits[number]


def of_a_stand_in(tmp_path, *arguments, code=0, stderr="", verdict="", has_raced=True, cwd=None):
    """Calls .ci/watch with a ./run.sh that races nothing, says this and ends with this code -> (process, comment)."""
    harness, repo = tmp_path / "harness", tmp_path / "repo"
    if not harness.exists():
        repository(repo, [1, 1])
        (harness / ".ci").mkdir(parents=True)
        shutil.copy(REPO / ".ci" / "watch", harness / ".ci" / "watch")
    begun = """echo '{\n "race_id": "R",\n}'\n""" if has_raced else ""
    race = f"""race) cat >&2 <<'E'\n{stderr}\nE\n{begun}exit {code};;"""
    report = f"""report) [ "$3" = --md ] && cat <<'E'\n{verdict}\nE\n;;"""
    (harness / "run.sh").write_text(f"#!/bin/bash\ncase $1 in\n{race}\n{report}\nesac\n")
    (harness / "run.sh").chmod(0o755)
    watch = [harness / ".ci" / "watch", *arguments]
    done = subprocess.run(watch, cwd=cwd or repo, capture_output=True, text=True)
    comment = (cwd or repo) / "speedrun" / "comment.md"
    return done, comment.read_text() if comment.exists() else None


@pytest.mark.parametrize(
    ("code", "stderr", "verdict", "headline", "job"),
    [
        (
            *(0, "slower passes: it is excluded", "**FASTER**  B is"),
            *("The head is faster than the base", "passes: it is excluded"),
        ),
        (1, "slower fails: it is shown", "**SLOWER**  B is", "The head is slower than the base", "fails: it is shown"),
        (
            *(0, "slower passes: it is excluded", "**EQUIVALENT**  B is"),
            *("The difference between head and base is too small to matter", "passes: it is excluded"),
        ),
        (
            *(1, "slower fails: it is not excluded", "**INCONCLUSIVE**  B against A"),
            *("No difference between head and base is shown", "fails: it is not excluded"),
        ),
        (
            *(2, "", "**NOT COMPARABLE**  B against A: other losses", "The head could not be compared with the base"),
            "fails: the race gave no verdict that could be checked",
        ),
        (
            *(75, "", "**NOT COMPARABLE**  B against A: load", "Not measured: other programs kept the machine busy"),
            "fails with exit code 75: run it again when these programs have ended",
        ),
        (
            *(1, "", "no verdict: the warm-up of B failed", "The head could not be compared with the base"),
            "fails: the race gave no verdict that could be checked",
        ),
    ],
)
def test_the_comment_says_first_what_happened_then_what_was_raced_and_why_the_job_fails(
    tmp_path, code, stderr, verdict, headline, job
):
    label = "" if verdict.startswith("no verdict") else "verdict: "
    answer = f"# Race: B against A\n\n{label}{verdict}  \n1 earlier race\n\ntrack free\n\n## Arms"
    answer += "\n\n## Numbers\n\n| time | 1 s |\n\nnot worse\n\n## Plan"
    done, comment = of_a_stand_in(tmp_path, "HEAD~1", "HEAD", code=code, stderr=f"--fail-on {stderr}", verdict=answer)
    first, arms, given, numbers, sentence, reason, details, *rest = comment.split("\n\n")
    assert (done.returncode, first) == (code, f"<!-- speedrun -->\n### {headline}")
    assert re.fullmatch("Base: `.* change 0`  \nHead: `.* change 1`  ", arms)
    assert (given, reason) == (f"{label}{verdict}  \n1 earlier race", f"The job {job}.")
    assert (numbers, sentence) == ("| time | 1 s |", "not worse")  # in sight, and once
    assert details.startswith("<details>") and rest[:-1] == ["track free", "## Arms", "## Plan", "</details>"]
    assert rest[-1].startswith("The pages are in `speedrun/`, ")


def test_the_comment_of_a_slower_head_of_several_commits_has_the_command_that_finds_the_commit(tmp_path):
    commits = repository(tmp_path / "other", [1, 1, 1])
    words = ["script=a b.py", "--fail-if", "shown", "on=loss", "n=3"]
    for verdict, on in (("SLOWER", ""), ("WORSE", " --on val_loss"), ("FASTER", None)):
        answer = f"# Race: B against A\n\nverdict: **{verdict}**  B"
        arguments = ("HEAD~2", "HEAD", *words)
        _, comment = of_a_stand_in(tmp_path, *arguments, code=1, verdict=answer, cwd=tmp_path / "other")
        command = f"path/to/run.sh bisect {commits[0][:10]} {commits[2][:10]} --anyway{on} script=a\\ b.py on=loss"
        assert (f"\n\nTo find the commit, in a clone with a quiet machine: `{command}`\n\n<details>" in comment) == (
            on is not None
        )


def test_a_job_that_raced_nothing_says_so_in_its_comment(tmp_path):
    """Else the comment of an earlier job would stay."""
    head = "Head: `.{7} change 1`  \n\n"
    mark = "<!-- speedrun -->\n### The head could not be compared with the base\n\n"
    error = "race: script=x.py: there is no `such` file"
    done, comment = of_a_stand_in(tmp_path, "HEAD~1", "HEAD", code=2, stderr=f"conf\n{error}", has_raced=False)
    beginning, why, end = re.fullmatch("(?s)(.*  \n\n)`(.*)`\n\n(.*)", comment).groups()
    assert re.fullmatch(f"{mark}Base: `.{{7}} change 0`  \n{head}", beginning)
    assert (done.returncode, why, end) == (2, error.replace("`", ""), "The job fails: no times were compared.\n")
    for option in ("--dry-run", "--look=R", "--resume", "--abandon", "--help"):
        done, comment = of_a_stand_in(tmp_path, "HEAD~1", "HEAD", option)
        sentence = f"watch: {option} makes no race of these commits: leave it out, or give it to ./run.sh race"
        assert (done.returncode, done.stderr, comment) == (2, sentence + "\n", f"{beginning}`{sentence}`\n\n{end}")
    done, comment = of_a_stand_in(tmp_path, "nothing", "HEAD")
    assert done.returncode == 2 and re.match(f"{mark}{head}`watch: nothing is neither in this clone nor", comment)
    done, _ = of_a_stand_in(tmp_path, "HEAD~1", "HEAD", cwd=tmp_path)
    sentence = f"watch: {tmp_path} is in no git repository: go to the one that is to be watched\n"
    assert (done.returncode, done.stderr) == (2, sentence) and not (tmp_path / "speedrun").exists()


@pytest.mark.parametrize("options", [(), ("--depth=1",)])
def test_ci_races_a_commit_with_what_it_follows_also_in_a_shallow_clone(tmp_path, options):
    """The branch main goes on after the branch change left it, and GitHub merges the two."""
    work, watch, origin = tmp_path / "work", tmp_path / "harness/.ci/watch", tmp_path / "origin.git"
    fork = repository(work, [1] * 3)[-1]
    for words in (
        "checkout -b change",
        "commit -m 1",
        "commit -m 2",
        "checkout main",
        "commit -m 3",
        "checkout -b merge",
    ):
        git(work, *words.split(), *["--allow-empty"] * words.startswith("commit"))
    git(work, "merge", "-q", "--no-ff", "-m", "merge", "change")
    git(tmp_path, "clone", "-q", "--bare", str(work), str(origin))
    names = {name: git(work, "rev-parse", name).strip() for name in ("main", "change", "change^", "merge")}
    watch.parent.mkdir(parents=True)
    shutil.copy(REPO / ".ci" / "watch", watch)
    (tmp_path / "harness/run.sh").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "harness/run.sh").chmod(0o755)

    def watched(branch, base, origin=origin):
        """(exit code, arms of the race or why there is none, number of commits in the history)."""
        clone = tmp_path / f"clone-{branch}-{base[:9]}"
        words = f"--single-branch -b {branch} file://{tmp_path}/origin.git {clone}"
        git(tmp_path, "clone", "-q", *options, *words.split())
        git(clone, "remote", "set-url", "origin", f"file://{origin}")
        done = subprocess.run([watch, base, names[branch]], cwd=clone, capture_output=True, text=True)
        arms = (clone / "speedrun/race.json").read_text().split()[1:3] if done.returncode == 0 else done.stderr
        return done.returncode, arms, git(clone, "rev-list", "--count", "--first-parent", "HEAD").strip()

    default = yaml.safe_load((REPO / ".ci" / "action.yml").read_text())["inputs"]["base"]["default"]
    assert default == "${{ github.event_name == 'push' && github.event.before || format('{0}^1', github.sha) }}"
    assert watched("merge", f"{names['merge']}^1") == (
        0,
        [f"Base.rev={names['main']}", f"Head.rev={names['merge']}"],
        "5",
    )
    for base, expected in (("0" * 40, names["change^"]), ("main", names["main"]), (fork, fork)):
        assert watched("change", base) == (0, [f"Base.rev={expected}", f"Head.rev={names['change']}"], "5")
    code, stderr, _ = watched("change", "1" * 40)
    assert code == 2 and f"watch: {'1' * 40} is neither in this clone nor on its origin: check out with" in stderr
    code, stderr, _ = watched("change", "2" * 40, "/nowhere")
    assert code == 2 and ("this clone is shallow and could not be completed" in stderr) == bool(options)


@pytest.mark.parametrize("planted", ["link", "tracked", "checkout"])
def test_what_git_knows_in_speedrun_is_neither_read_nor_written(tmp_path, planted):
    """A pull request could lead the job's files elsewhere, or have its own comment posted."""
    repo, victim = tmp_path / "repo", tmp_path / "victim"
    repository(repo, [1, 1])
    victim.mkdir()
    if planted == "link":
        (repo / "speedrun").symlink_to(victim)
    elif planted == "checkout":
        git(repo, "init", "-q", "speedrun")
    else:
        (repo / "speedrun").mkdir()
        (repo / "speedrun" / ".gitignore").symlink_to(victim / "file")
        (repo / "speedrun" / "comment.md").write_text("mine")
        git(repo, "add", "-f", "speedrun")
    done = subprocess.run([REPO / ".ci" / "watch", "HEAD~1", "HEAD"], cwd=repo, capture_output=True, text=True)
    why = "is a checkout" if planted == "checkout" else "is a link or has files that git knows"
    assert done.returncode == 3 and why in done.stderr
    assert planted != "checkout" or [path.name for path in (repo / "speedrun").iterdir()] == [".git"]
    assert not list(victim.iterdir())
    own, _ = steps({}, {})
    (race,) = [step["run"] for step in own if step["name"] == "Race"]
    assert '[ "$code" != 3 ] || exit 3' in race
    job = yaml.safe_load((REPO / ".ci" / "action.yml").read_text())["runs"]["steps"]
    later = [
        step for step in job[[step.get("id") for step in job].index("race") + 1 :] if "always()" in step.get("if", "")
    ]
    assert all("steps.race.outcome == 'success'" in step["if"] or "venv" in str(step["with"]["path"]) for step in later)


def test_a_long_subject_stays_text(tmp_path):
    repo = tmp_path / "other"
    repository(repo, [1, 1])
    git(repo, "commit", "-q", "--amend", "-m", "ä" * 150)
    _, comment = of_a_stand_in(tmp_path, "HEAD~1", "HEAD", cwd=repo, verdict="# Race\n\nverdict: **FASTER**  B")
    assert re.search("Head: `[0-9a-f]{7} ä{98}\\.\\.`", comment)


def test_a_condition_among_the_settings_replaces_that_of_the_job_and_a_call_without_commits_shows_the_usage(tmp_path):
    repository(tmp_path / "repo", [1, 1])
    watch = tmp_path / ".ci" / "watch"
    watch.parent.mkdir()
    shutil.copy(REPO / ".ci" / "watch", watch)
    (tmp_path / "run.sh").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "run.sh").chmod(0o755)
    for options, expected in (([], "slower:1%"), (["--fail-on=slower:5%"], "--fail-on=slower:5%")):
        subprocess.run([watch, "HEAD~1", "HEAD", *options], cwd=tmp_path / "repo", check=True)
        words = (tmp_path / "repo/speedrun/race.json").read_text().split()
        assert words[-1] == expected and sum("slower" in word for word in words) == 1
    done = subprocess.run([watch], cwd=tmp_path / "repo", capture_output=True, text=True)
    assert done.returncode == 2 and ".ci/watch BASE HEAD [SETTING...]" in done.stderr and "set -" not in done.stderr


def test_commits_that_train_alike_are_not_raced_and_the_comment_says_so(tmp_path):
    repo = tmp_path / "repo"
    repository(repo, [1])
    (repo / "README.md").write_text("how to run")
    git(repo, "add", ".")
    git(repo, "commit", "-q", "-m", "a page")
    settings = ["script=train.py", "script.torchrun=false", "track=free", "hardware=cpu"]
    env = os.environ | {"SPEEDRUN_PYTHON": sys.executable}
    watch = [REPO / ".ci" / "watch", "HEAD~1", "HEAD", *settings]
    assert subprocess.run(watch, cwd=repo, env=env, capture_output=True).returncode == 0
    first, _, why, job = (repo / "speedrun/comment.md").read_text().strip().split("\n\n")
    assert first == "<!-- speedrun -->\n### There is nothing to compare"
    assert (
        why.startswith("`Base and Head train the same program: ") and job == "The job passes: no times were compared."
    )
    assert not (repo / "speedrun/results/races").exists()
    git(repo, "mv", "train.py", "other.py")
    git(repo, "commit", "-q", "-m", "another script")
    added = [REPO / ".ci" / "watch", "HEAD~1", "HEAD", "script=other.py", *settings[1:]]
    assert subprocess.run(added, cwd=repo, env=env, capture_output=True).returncode == 0
    assert (
        "other.py is not in the base, so there is nothing to compare with" in (repo / "speedrun/comment.md").read_text()
    )


def test_a_series_is_steady_only_if_a_change_would_probably_have_been_seen():
    """The same noise in per cent: 1, of which a change of 10 would be seen, and 10, of which it would not."""
    chance = random.Random(2)
    noise, commit = [chance.gauss(0, 1) for _ in range(20)], history.Commit("a" * 40, "", "")
    answers = []
    for noise_pct in (1, 10):
        logs = [noise_pct / 100 * value for value in noise]
        points = [history.Point(commit, math.exp(value), 2, 1) for value in logs]
        hidden = change_points.hidden_step(logs)
        series = history.Series("", "", "step_avg_ms", points, change_points.find(logs), hidden, [])
        (verdict,) = history.document([series], "repo").verdicts
        badge = re.search("<title>(.*)</title>", history.badge([series]))[1]
        answers.append((series.is_steady, badge, verdict.text(False)))
    (steady, badge, _), (noisy, other_badge, sentence) = answers
    assert (steady, noisy) == (True, False)
    assert (badge, other_badge) == ("speed: steady, 20 commits", "speed: undecided, 20 commits")
    assert re.search(r"is shown in 20 commits; a change of \d+ % would be missed half of the time", sentence)
    short = history.Series("", "", "step_avg_ms", points[:4], [], None, [])
    (verdict,) = history.document([short], "repo").verdicts
    first, *_ = verdict.text(False).splitlines()
    assert first == "undecided: no change of step_avg_ms is shown in 4 commits; it takes 8 to show one"
    assert "speed: undecided, 4 commits" in history.badge([short])


@pytest.mark.parametrize("num", [14, 30])
def test_a_step_that_noise_hides_every_second_time_is_found_about_as_often(num):
    chance = np.random.default_rng(1)
    hidden = np.median([change_points.hidden_step(list(chance.standard_normal(num))) for _ in range(100)])
    steps = hidden * (np.arange(num) >= num // 2)
    found = [bool(change_points.find(list(map(float, chance.standard_normal(num) + steps)))) for _ in range(200)]
    assert 0.3 < np.mean(found) < 0.65


@pytest.mark.parametrize(("author", "request_line"), [(7, ("PUT", "/3")), (8, ("POST", ""))])
def test_gitlabs_job_edits_its_own_note_alone(tmp_path, monkeypatch, author, request_line):
    verdict, sent = "<!-- speedrun -->\n# Race: B against A\n", []
    notes = [(1, 8, verdict), (2, 7, "thanks"), (3, author, verdict)]

    def urlopen(request, timeout):
        sent.append((request.method, request.full_url, request.data))
        shown = [{"id": number, "author": {"id": of}, "body": body} for number, of, body in notes]
        return io.BytesIO(json.dumps({"id": 7} if request.full_url.endswith("/user") else shown).encode())

    values = {"CI_API_V4_URL": "https://g", "CI_PROJECT_ID": "1", "CI_MERGE_REQUEST_IID": "2", "SPEEDRUN_TOKEN": "t"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    (tmp_path / "comment.md").write_text(verdict)
    runpy.run_path(str(REPO / ".ci" / "gitlab_note"))["main"](tmp_path / "comment.md")
    method, note = request_line
    written = (method, f"https://g/projects/1/merge_requests/2/notes{note}", json.dumps({"body": verdict}).encode())
    assert sent[2:] == [written]


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1300, False)])
def test_the_page_shows_the_newest_change_first_and_does_not_scroll_sideways(planted, tmp_path, width, dark):
    page = tmp_path / "index.html"
    shown(planted, "--html", str(page))
    look_at(page)
    with Browser() as browser:
        opened = browser.open(page, width=width, dark=dark)
        assert opened.js("document.querySelector('.verdict .badge').textContent") == "slower"
        assert opened.js("document.querySelectorAll('.uplot canvas').length") == 1
        table = "document.querySelector('.scroll')"
        assert width < 500 or opened.js(f"{table}.scrollWidth <= {table}.clientWidth")  # the commands can be read


def test_a_command_to_bisect_keeps_the_arguments_of_a_script_as_they_are(monkeypatch):
    """A script starts in a folder of its run, where a relative path of the user's folder means nothing."""
    monkeypatch.setenv("SPEEDRUN_CWD", "/home/u/mine")
    points = [history.Point(history.Commit(letter * 40, "", ""), 1.0, 2, 0) for letter in "ab"]
    typed = ["script=/home/u/mine/train.py", "script.root=/home/u/mine", "script.args=[--data=/home/u/mine/data]"]
    series = history.Series("", "", "train_s", points, [], None, [*typed, "script.data=/home/u/mine2", "seed=3"])
    settings = "script=train.py script.root=. 'script.args=[--data=/home/u/mine/data]' script.data=/home/u/mine2"
    change = change_points.Change(0, 1, 0.1, None, None)
    assert series.command_of(change) == f"./run.sh bisect aaaaaaaaaa bbbbbbbbbb {settings}"
    assert series.possible_change is None  # both are as fast
    faster = change_points.Change(0, 1, -0.1, None, None)  # of which bisect would say that it is not worse
    assert series.command_of(faster) == f"./run.sh race aaaaaaaaaa..bbbbbbbbbb {settings}"


def test_a_series_that_shows_no_change_has_the_command_that_looks_for_one_since_its_best_commit():
    times = zip("abcd", (9.0, 8.0, 9.0, 8.5))
    points = [history.Point(history.Commit(sha * 40, "", ""), step_ms, 2, 0) for sha, step_ms in times]
    document = history.document([history.Series("", "", "step_avg_ms", points, [], None, ["script=a.py"])], "repo")
    hint = "to see if a commit since the best made it worse: ./run.sh bisect bbbbbbbbbb dddddddddd script=a.py"
    assert hint in document.terminal() and hint.partition(": ")[2] == json.loads(document.json())[0]["command"]
