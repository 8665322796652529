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

import numpy as np
import pytest
import real_runs
import yaml
from browser import Browser, look_at, needs_browser
from real_runs import REPO, git

from bench.base import change_points, stats
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


@pytest.mark.parametrize(("num_from_change", "step_sds"), [(1, 2.5), (3, 1.7), (10, 1.1)])
def test_changes_are_found_that_are_as_small_as_the_docs_say(num_from_change, step_sds):
    """docs/race.md: by pushes of five runs a side, each commit but the newest and the oldest is in two races."""
    chance, num, num_found = random.Random(3), 14 + num_from_change, 0
    for _ in range(100):
        sds = [(1 / (5 if number in (0, num - 1) else 10)) ** 0.5 for number in range(num)]
        values = [chance.gauss(step_sds * (number >= 14), sd) for number, sd in enumerate(sds)]
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
    assert "seed=" not in second["command"] and "script.rev=" not in second["command"]
    text = page.read_text()
    assert second["before"][:10] in text and "bisect" in text and "Narrowest Significance Pursuit" in text
    assert str(repo) not in text and text.index(second["command"]) < text.index(first["command"])
    assert re.search(r"<title>speed: \+\d+\.\d\d % at [0-9a-f]{7}</title>", badge.read_text())


def test_the_answer_begins_with_the_newest_change(planted):
    lines = shown(planted).splitlines()
    assert lines[0].startswith("verdict: SLOWER") and "step_avg_ms changed by +" in lines[0]


def test_runs_of_another_machine_and_doubtful_clocks_are_no_part_of_a_series(planted, monkeypatch):
    repo, commits, results = planted
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(results))
    rows = named.rows_of_names([])
    rows[0]["comparability_id"], rows[1]["script_doubt"], rows[2]["discarded"] = "another", "it lies", True
    (series,) = history.all_series(rows, history.commits_of(repo, "HEAD"), "step_avg_ms")
    assert sum(point.num_runs for point in series.points) == 37
    (before_the_change,) = history.all_series(rows, history.commits_of(repo, commits[5]), "step_avg_ms")
    assert len(before_the_change.points) <= 6 and not before_the_change.changes


def test_a_folder_without_git_or_without_runs_is_refused(planted, tmp_path):
    repo, _, _ = planted
    for cwd, message in ((tmp_path, "is in no repository with this revision"), (repo, "no two commits have runs")):
        done = real_runs.bench(tmp_path / "empty", "history", SPEEDRUN_CWD=str(cwd))
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_subject_of_several_lines_and_damaged_runs_cost_only_themselves(planted, tmp_path, capsys):
    repo, commits, results = planted
    git(repo, "commit", "-q", "--allow-empty", "-m", "a\fpage\u2028and a line")
    assert history.commits_of(repo, "HEAD")[-1].subject == "a\fpage\u2028and a line"
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


@pytest.mark.slow  # six runs of a script
def test_the_actions_steps_race_a_slower_head_comment_and_fail(tmp_path):
    """Runs step by step as a runner does, with a gh that keeps what it is given."""
    repo, temp = tmp_path / "repo", tmp_path / "runner"
    base, head = repository(repo, [5, 20])
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
    own, filled = steps({"settings": settings, "base": base, "head": head, "n": "2", "keep": "4"}, github)
    codes, outputs = {}, {}
    for step in own:
        env = {name: filled(value, outputs) for name, value in step.get("env", {}).items()}
        env |= {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_REPOSITORY": "o/r"}
        env |= {"PATH": f"{temp}:{os.environ['PATH']}", "SPEEDRUN_PYTHON": sys.executable}
        script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(script, cwd=repo, env=os.environ | env, capture_output=True, text=True)
        codes[step["name"]] = done.returncode
        assert "Traceback" not in done.stderr, done.stderr
        outputs |= dict(line.split("=", 1) for line in output.read_text().splitlines())
    assert codes == {"Key of the environment": 0, "Race": 0, "Comment": 0, "Verdict": 1}, done.stderr
    assert outputs["code"] == "1" and len(outputs["sha256"]) == 16
    assert [folder for folder in cached if not folder.exists()] == [*cached[:2], cached[6]]  # all but the newest four
    comment = (repo / "speedrun" / "comment.md").read_text()
    assert comment.startswith("<!-- speedrun -->\n# Race: B against A\n\nverdict: ") and "<details>" in comment
    assert str(repo) not in comment and summary.read_text() == comment
    assert "-X POST repos/o/r/issues/7/comments -F body=@speedrun/comment.md" in (temp / "gh.log").read_text()
    page = (repo / "speedrun" / "race.html").read_text()
    links = set(re.findall(r'href="(results/[^"]*)"', page))
    assert len(links) == 6 and all((repo / "speedrun" / link).is_file() for link in links)
    assert {path.name for path in (repo / "speedrun").iterdir()} >= {"race.html", "index.html", "badge.svg", "results"}


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
    assert job["script"][-1] == 'exit "$code"' and all("$" not in name for name in job["artifacts"]["paths"])


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
    assert watched("merge", f"{names['merge']}^1") == (0, [names["main"], names["merge"]], "5")
    for base, expected in (("0" * 40, names["change^"]), ("main", names["main"]), (fork, fork)):
        assert watched("change", base) == (0, [expected, names["change"]], "5")
    code, stderr, _ = watched("change", "1" * 40)
    assert code == 2 and f"watch: {'1' * 40} is neither in this clone nor on its origin: check out with" in stderr
    code, stderr, _ = watched("change", "2" * 40, "/nowhere")
    assert code == 2 and ("this clone is shallow and could not be completed" in stderr) == bool(options)


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
    points = [history.Point(history.Commit(letter * 40, "", ""), 1.0, 2) for letter in "ab"]
    typed = ["script=/home/u/mine/train.py", "script.root=/home/u/mine", "script.args=[--data=/home/u/mine/data]"]
    series = history.Series("", "", "train_s", points, [], [*typed, "script.data=/home/u/mine2", "seed=3"])
    settings = "script=train.py script.root=. 'script.args=[--data=/home/u/mine/data]' script.data=/home/u/mine2"
    change = change_points.Change(0, 1, 0.1, None, None)
    assert series.command_of(change) == f"./run.sh bisect aaaaaaaaaa bbbbbbbbbb {settings}"
