"""What changed in the source between two runs, rebuilt from commits, patches and untracked files; worktrees."""

import json

import pytest
from real_runs import git

from bench.analysis.diagnosis import code_diff
from bench.machine import code_state
from bench.plans.race import worktrees
from bench.report import basis
from bench.web.document import Columns


@pytest.fixture
def repo(tmp_path):
    """One commit of models/a.py (three lines) and results/x; the patches come from real changes of the work tree."""
    root = tmp_path / "repo"
    (root / "models").mkdir(parents=True)
    (root / "results").mkdir()
    (root / "models" / "a.py").write_text("one = 1\ntwo = 2\nthree = 3\n")
    (root / "results" / "x").write_text("x")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def run_of(repo, tmp_path, name):
    """A run folder of the work tree as it is now."""
    code_state.write(repo, tmp_path / name / "code")
    return tmp_path / name


def test_the_same_code_has_no_change(repo, tmp_path):
    a, b = run_of(repo, tmp_path, "a"), run_of(repo, tmp_path, "b")
    assert code_diff.diff_folders(a, b, repo) == {"files": [], "patch": "", "is_cut": False, "unknown": None}


def test_commits_uncommitted_changes_and_untracked_sources_are_all_in_it(repo, tmp_path):
    a = run_of(repo, tmp_path, "a")
    (repo / "models" / "a.py").write_text("one = 1\ntwo = 22\nthree = 3\n")
    git(repo, "commit", "-qam", "second")
    (repo / "models" / "a.py").write_text("one = 1\ntwo = 22\nthree = 33\n")
    (repo / "models" / "new.py").write_text("new = True\n")
    (repo / "results" / "x").write_text("y")
    b = run_of(repo, tmp_path, "b")
    objects = sorted(path.name for path in (repo / ".git").rglob("*"))
    change = code_diff.diff_folders(a, b, repo)
    assert change["unknown"] is None
    expected = [{"path": "models/a.py", "added": 2, "removed": 2}, {"path": "models/new.py", "added": 1, "removed": 0}]
    assert change["files"] == expected
    assert "-two = 2\n-three = 3\n+two = 22\n+three = 33\n" in change["patch"] and "+new = True\n" in change["patch"]
    assert sorted(path.name for path in (repo / ".git").rglob("*")) == objects  # nothing was written there
    back = code_diff.diff_folders(b, a, repo)
    assert back["files"][1] == {"path": "models/new.py", "added": 0, "removed": 1}


def test_a_long_change_is_cut_at_a_line(repo, tmp_path, monkeypatch):
    a = run_of(repo, tmp_path, "a")
    (repo / "models" / "a.py").write_text("\n".join(f"line = {num}" for num in range(100)))
    b = run_of(repo, tmp_path, "b")
    monkeypatch.setattr(code_diff, "MAX_PATCH_CHARS", 300)
    change = code_diff.diff_folders(a, b, repo)
    assert change["is_cut"] and len(change["patch"]) <= 300 and change["patch"].endswith("\n")


def changed(folder, **facts):
    path = folder / "code" / "commit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"commit": "0" * 40}, "commit 000000000000 is not in this repository: fetch it"),
        ({"commit": None}, "b ran outside of git"),
        ({"commit": "--upload-pack=touch x"}, "b names no commit"),
        ({"untracked": ["../../a/code/commit.json"]}, "b does not hold its untracked source"),
        ({"untracked": ["missing.py"]}, "b does not hold its untracked source missing.py"),
    ],
)
def test_what_cannot_be_rebuilt_is_said(repo, tmp_path, facts, why):
    a, b = run_of(repo, tmp_path, "a"), run_of(repo, tmp_path, "b")
    changed(b, **facts)
    assert why in code_diff.diff_folders(a, b, repo)["unknown"]


def test_a_patch_that_does_not_fit_and_a_run_without_code_are_said(repo, tmp_path):
    a, b = run_of(repo, tmp_path, "a"), run_of(repo, tmp_path, "b")
    (b / "code" / "diff.patch").write_text("--- a/no.py\n+++ b/no.py\n@@ -1 +1 @@\n-x\n+y\n")
    assert "the patch of b does not fit its commit" in code_diff.diff_folders(a, b, repo)["unknown"]
    assert "none does not say which code ran" in code_diff.diff_folders(tmp_path / "none", b, repo)["unknown"]


def test_in_words_the_files_come_with_their_lines_and_the_patch_on_request():
    files = [{"path": "models/a.py", "added": 2, "removed": 1}, {"path": "x.bin", "added": None, "removed": None}]
    change = {"files": files, "patch": "+a\x1b[31m\n-b\n", "is_cut": False, "unknown": None}
    text = Columns(basis.source(change, patch=False)).text(False)
    expected = ["models/a.py      +2       -1", "x.bin        binary   binary", "", "--diff shows the lines"]
    assert text.splitlines()[2:] == expected
    shown = Columns(basis.source(change))
    assert shown.text(False).endswith("\n\n+a\\x1b[31m\n-b\n")  # no escape sequence reaches the terminal
    assert "````diff\n+a\\x1b[31m" in shown.text(True) and '<pre tabindex="0">+a' in shown.html()
    assert basis.source(None) == []
    unknown = {"files": [], "patch": "", "is_cut": False, "unknown": "why"}
    assert Columns(basis.source(unknown)).text(False).endswith("unknown: why")


@pytest.fixture
def two_commits(tmp_path):
    folder = tmp_path / "repo"
    (folder / "bench").mkdir(parents=True)
    git(folder, "init", "-q")
    for number in (1, 2):
        (folder / "bench" / "a.py").write_text(f"x = {number}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", str(number))
    (folder / "bench" / "a.py").write_text("x = 3  # not committed\n")
    return folder


def test_each_revision_has_its_own_code_and_the_working_tree_keeps_its_own(two_commits):
    commits = {name: worktrees.commit_of(two_commits, rev) for name, rev in (("old", "HEAD~1"), ("new", "HEAD"))}
    with worktrees.checked_out(two_commits, commits) as paths:
        expected = {"old": "x = 1\n", "new": "x = 2\n"}
        assert {name: (path / "bench" / "a.py").read_text() for name, path in paths.items()} == expected
        states = {name: code_state.state(path) for name, path in paths.items()}
        assert {name: (state["commit"], state["dirty"], state["untracked"]) for name, state in states.items()} == {
            name: (commit, False, []) for name, commit in commits.items()
        }
        assert git(two_commits, "status", "--short") == " M bench/a.py"
        assert (two_commits / "bench" / "a.py").read_text() == "x = 3  # not committed\n"
    assert len(git(two_commits, "worktree", "list").splitlines()) == 1
    assert not (two_commits / ".git" / worktrees.FOLDER).exists()


def test_it_is_removed_when_the_race_fails_and_with_all_that_was_written_into_it(two_commits):
    commit = worktrees.commit_of(two_commits, "HEAD")
    with pytest.raises(RuntimeError), worktrees.checked_out(two_commits, {"a": commit}) as paths:
        (paths["a"] / "left.txt").write_text("by a run")
        raise RuntimeError
    assert not paths["a"].exists()


def test_what_a_killed_race_left_behind_is_made_anew(two_commits):
    path = worktrees.add(two_commits, "a", worktrees.commit_of(two_commits, "HEAD"))
    (path / "bench" / "a.py").write_text("damaged")
    with worktrees.checked_out(two_commits, {"a": worktrees.commit_of(two_commits, "HEAD~1")}) as paths:
        assert (paths["a"] / "bench" / "a.py").read_text() == "x = 1\n"


def test_a_harness_within_a_project_of_others_is_checked_out_in_its_folder(two_commits):
    with worktrees.checked_out(two_commits / "bench", {"a": worktrees.commit_of(two_commits, "HEAD")}) as paths:
        assert (paths["a"] / "a.py").read_text() == "x = 2\n"
    assert not (two_commits / ".git" / worktrees.FOLDER).exists()


def test_those_of_an_abandoned_race_are_removed_and_no_others(two_commits, tmp_path):
    for name in ("20261129T000000Z-race-1-A", "20261129T000000Z-race-1-B", "20261129T000000Z-race-2-A"):
        kept = worktrees.add(two_commits, name, worktrees.commit_of(two_commits, "HEAD"))
    worktrees.remove_all(two_commits, "20261129T000000Z-race-1-")
    assert list(worktrees.path_of(two_commits, "").iterdir()) == [kept]
    worktrees.remove_all(tmp_path / "no repository", "20261129T000000Z-race-1-")


def test_the_users_own_worktrees_are_kept_also_while_their_folder_is_away(two_commits, tmp_path):
    """On a drive that is not mounted: git forgets them only when it is told to prune."""
    git(two_commits, "worktree", "add", "-q", "--detach", str(tmp_path / "idea"))
    (tmp_path / "idea").rename(tmp_path / "away")
    path = worktrees.add(two_commits, "a", worktrees.commit_of(two_commits, "HEAD"))
    (path / ".git").unlink()  # damaged: git alone would not remove it
    worktrees.remove(two_commits, "a")
    (tmp_path / "away").rename(tmp_path / "idea")
    assert git(tmp_path / "idea", "status", "--short") == ""
    assert len(git(two_commits, "worktree", "list").splitlines()) == 2


def test_a_revision_that_does_not_exist_and_a_folder_without_git_are_refused(two_commits, tmp_path):
    with pytest.raises(ValueError, match="nosuch: this repository has no such revision: .* A.rev=HEAD B= races"):
        worktrees.commit_of(two_commits, "nosuch")
    with pytest.raises(ValueError, match="is not in a git repository"):
        worktrees.path_of(tmp_path, "a")


def test_a_data_lock_that_a_revision_lacks_is_lent_to_it(two_commits):
    """Fetched before it was committed, or after the revision: the race finds its data all the same."""
    locks = two_commits / "conf" / "data"
    locks.mkdir(parents=True)
    (locks / "a.lock.json").write_text("committed")
    git(two_commits, "add", "conf")
    git(two_commits, "commit", "-qm", "3")
    (locks / "a.lock.json").write_text("newer")
    (locks / "b.lock.json").write_text("fetched")
    with worktrees.checked_out(two_commits, {"new": worktrees.commit_of(two_commits, "HEAD")}) as paths:
        files = {path.name: path.read_text() for path in (paths["new"] / "conf" / "data").iterdir()}
        assert files == {"a.lock.json": "committed", "b.lock.json": "fetched"}
        assert code_state.state(paths["new"])["dirty"] is False
