"""Worktrees of revisions: exactly that commit, invisible to git's own commands, and gone afterwards."""

import pytest
from real_runs import git

from bench.machine import code_state
from bench.plans.race import worktrees


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


def test_a_revision_that_does_not_exist_and_a_folder_without_git_are_refused(two_commits, tmp_path):
    with pytest.raises(ValueError, match="nosuch: this repository has no such revision"):
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
