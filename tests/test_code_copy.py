"""What runs is what the record holds: read-only copies of the code, and a git that fails is unknown."""

import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import pytest
import real_runs
from claimed import Results
from real_runs import git
from test_environment import commit

from bench.api import judging
from bench.base import paths
from bench.claims.rules import rulebook
from bench.cli import verify
from bench.config import user_code
from bench.machine import code_copy, code_state, preflight
from bench.machine import git as git_program
from bench.record import validity
from bench.training import imported

REPO = real_runs.REPO
HALVED = ("return F.cross_entropy(", "return 0.5 * F.cross_entropy(")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache for copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "speedrun-code"


@pytest.fixture
def small(tmp_path):
    """A repository with one commit of a file of each folder."""
    root = tmp_path / "repo"
    for name in ("bench/a.py", "models/b.py", "conf/c.yaml"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("x = 1\n")
    git(root, "init", "-q")
    commit(root)
    return root


def copied(repo):
    with code_copy.held(repo) as folder:
        return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


# ---- the copy


def test_a_copy_is_made_once_for_each_state_of_the_code_and_is_read_only(small, cache):
    first = copied(small)
    made_ns = first.stat().st_mtime_ns
    assert (first / "models/b.py").read_text() == "x = 1\n" and copied(small) == first
    assert first.stat().st_mtime_ns == made_ns
    assert {path.stat().st_mode & 0o222 for path in first.rglob("*")} == {0}
    assert list((first / "models/__pycache__").iterdir())
    (small / "models/b.py").write_text("x = 2\n")
    second = copied(small)
    assert second != first and (first / "models/b.py").read_text() == "x = 1\n"
    (small / "models/b.py").write_text("x = 1\n")
    assert copied(small) == first and names(cache) == sorted([first.name, second.name])


@pytest.mark.parametrize("name", ["models/b.py", "models/new.py"])
def test_a_copy_that_was_tampered_with_is_made_again(small, cache, name):
    folder = copied(small)
    os.chmod(folder / "models", 0o755)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text("x = 'a cheat'\n")
    assert not code_copy.is_whole(folder)
    assert copied(small) == folder and code_copy.is_whole(folder)
    assert (folder / "models/b.py").read_text() == "x = 1\n" and not (folder / "models/new.py").exists()


def test_processes_that_make_a_copy_at_once_get_the_same_whole_one(small, cache):
    program = (
        "import sys; from pathlib import Path; from bench.machine import code_copy\n"
        "with code_copy.held(Path(sys.argv[1])) as folder: print(folder, code_copy.is_whole(folder))"
    )
    command = [sys.executable, "-c", program, str(small)]
    several = [subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert {process.communicate()[0] for process in several} == {f"{copied(small)} True\n"}
    assert len(names(cache)) == 1


def test_a_program_of_a_copy_that_is_not_told_its_checkout_refuses_to_start(cache):
    """It would take the copy for its project, prepare data in it, and so change it for every run."""
    with code_copy.held(REPO) as copy:
        variables = {name: value for name, value in os.environ.items() if name != paths.CHECKOUT}
        command = [sys.executable, "-m", "bench", "data", "show"]
        refused = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True)
        assert refused.returncode == 1 and f"{copy} is a read-only copy" in refused.stderr, refused.stderr
        done = subprocess.run(command, cwd=copy, env=variables | {paths.CHECKOUT: str(REPO)}, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert code_copy.is_whole(copy)


def test_the_copies_used_last_are_kept_and_so_is_one_in_use(small, cache, monkeypatch):
    monkeypatch.setattr(code_copy, "KEPT_COPIES", 2)
    copies = []
    with code_copy.held(small) as used:
        for number in range(3):
            (small / "models/b.py").write_text(f"x = {number} + 7\n")
            copies.append(copied(small))
            os.utime(copies[-1].with_name(f"{copies[-1].name}.lock"), (number, number))
        os.utime(used.with_name(f"{used.name}.lock"), (0, 0))
        (small / "models/b.py").write_text("x = 'last'\n")
        last = copied(small)
        assert names(cache) == sorted([used.name, copies[-1].name, last.name])
    copied(small)
    assert names(cache) == sorted([copies[-1].name, last.name])


def test_a_cache_that_others_can_write_is_not_used(small, cache, monkeypatch, tmp_path):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    assert copied(small).is_relative_to(tmp_path / "temp")
    (tmp_path / "temp" / f"speedrun-code-{os.geteuid()}").chmod(0o777)
    with pytest.raises(ValueError, match="others can write to it.*set XDG_CACHE_HOME"):
        copied(small)


def test_a_copy_that_may_not_be_written_is_not_refused_for_want_of_space(small, cache, monkeypatch):
    monkeypatch.setattr(code_copy, "_write", lambda *args: os.mkdir("/proc/denied"))
    with pytest.raises(ValueError, match="the code cannot be copied there .*: make it writable"):
        copied(small)


def test_what_lies_beside_the_users_own_sources_is_linked(tmp_path, cache):
    (tmp_path / "pkg").mkdir()
    for name in ("net.py", "pkg/deep.py", "weights.bin", "pkg/unseen.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    sources = {"own/net.py": tmp_path / "net.py", "own/pkg/deep.py": tmp_path / "pkg/deep.py"}
    with code_copy.held_sources(sources) as copies:
        (tmp_path / "net.py").write_text("# edited\n")
        (tmp_path / "weights.bin").write_text("larger\n")
        own = copies["own/net.py"].parent
        assert copies["own/net.py"].read_text() == "# net.py\n" and not copies["own/net.py"].is_symlink()
        assert (own / "weights.bin").read_text() == "larger\n" and (own / "pkg/unseen.py").is_symlink()
        assert not (own / "pkg").is_symlink() and code_copy.is_whole(own.parent)


def test_a_source_that_is_a_pipe_or_a_hole_is_refused_by_name(tmp_path, cache):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "hole.py").touch()
    os.truncate(tmp_path / "hole.py", 2**42)
    for name, why in (("pipe.py", "it is not a regular file"), ("hole.py", "most of which are a hole")):
        with pytest.raises(ValueError, match=f"{name}: cannot be read .*{why}"):
            code_copy.held_sources({"own/net.py": tmp_path / name}).__enter__()


# ---- the record is of the copy


def test_the_record_is_of_the_copy_whatever_happens_to_the_checkout(small, cache, tmp_path):
    (small / "models/b.py").write_text("x = 2\n")
    (small / "models/new.py").write_text("y = 2\n")
    before = code_state.state(small)
    with code_copy.held(small) as folder:
        (small / "models/b.py").write_text("x = 3\n")
        (small / "models/new.py").unlink()
        (small / "conf/c.yaml").unlink()
        assert code_state.state(folder, repo=small) == before != code_state.state(small)
        code_state.write(folder, tmp_path / "code", repo=small)
    assert "+x = 2" in (tmp_path / "code/diff.patch").read_text()
    assert (tmp_path / "code/untracked/models/new.py").read_text() == "y = 2\n"
    assert before["untracked"] == ["models/new.py"]


def test_a_file_that_git_is_told_not_to_look_at_is_dirty_all_the_same(small):
    git(small, "update-index", "--assume-unchanged", "models/b.py")
    (small / "models/b.py").write_text("x = 2\n")
    assert git(small, "status", "--porcelain") == "" and code_state.state(small)["dirty"]


WAITS = """
import os, sys, time
if sys.orig_argv[1:3] == ["-m", "bench.training.worker"]:
    open(os.environ["WAITING"], "w").close()
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.02)
"""


@pytest.mark.slow
def test_a_source_that_is_saved_while_a_run_starts_is_in_the_next_run(tmp_path):
    """The rank's interpreter waits between the hash and the import until the file has been edited."""
    clone, site, results = tmp_path / "clone", tmp_path / "site", tmp_path / "results"
    for name in code_copy.FOLDERS:
        shutil.copytree(REPO / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    git(clone, "init", "-q")
    commit(clone)
    site.mkdir()
    (site / "sitecustomize.py").write_text(WAITS)
    waiting, go = tmp_path / "waiting", tmp_path / "go"
    env = real_runs.environment(results, PYTHONPATH=str(site), WAITING=str(waiting), GO=str(go))
    env |= {"SPEEDRUN_CWD": str(tmp_path)}
    command = [sys.executable, "-m", "bench", "run", *real_runs.SHORT, "instruments=[]"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=clone, env=env, **streams) as process:
        deadline_s = time.monotonic() + 120
        while not waiting.exists():
            assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()[0]
            time.sleep(0.02)
        edited = clone / "models/base.py"
        assert HALVED[0] in edited.read_text()
        edited.write_text(edited.read_text().replace(*HALVED))
        go.touch()
        assert process.wait(120) == 0, process.communicate()[0]
    (honest,) = real_runs.folders(results)
    subprocess.run(command, cwd=clone, env=env, check=True, timeout=120, stdout=subprocess.DEVNULL)
    after = real_runs.folders(results)[1]
    old, new = real_runs.run_json(honest), real_runs.run_json(after)
    assert (old["code"]["dirty"], new["code"]["dirty"]) == (False, True)
    assert code_state.differing_files(old["code"], new["code"]) == ["models/base.py"]
    assert "+    " in (after / "code/diff.patch").read_text() and not (honest / "code/diff.patch").read_text()
    assert new["metrics"]["val_loss"] < 0.6 * old["metrics"]["val_loss"]
    assert old["referee"]["code"]["copies"] == [old["code"]["copy"]] != [new["code"]["copy"]]
    assert old["referee"]["code"]["elsewhere"] == [] and old["validity"] != "invalid"
    assert str(tmp_path) not in (honest / "run.json").read_text()


# ---- what a rank imported


def module(name, path):
    created = ModuleType(name)
    created.__file__ = path and str(path)
    return created


@pytest.fixture
def rank(small, cache, monkeypatch, tmp_path):
    """A process that runs from a copy, with a class of the user's own -> (the copy, the copy of the user's code)."""
    (tmp_path / "net.py").write_text("")
    (tmp_path / "unseen.py").write_text("")
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    others = {name: loaded for name, loaded in sys.modules.items() if name.partition(".")[0] not in ("bench", "models")}
    monkeypatch.setattr(sys, "modules", others)
    with code_copy.held(small) as code, code_copy.held_sources({"own/net.py": tmp_path / "net.py"}) as sources:
        monkeypatch.setattr(imported, "CODE", code)
        monkeypatch.setattr(user_code, "_copied", sources["own/net.py"].parent)
        others["bench.a"] = module("bench.a", code / "bench/a.py")
        others["own_net_py"] = module("x", sources["own/net.py"])
        yield code, sources["own/net.py"].parent


def test_modules_of_the_copies_are_in_order(rank):
    assert imported.facts(hashes=True) == {"copy": rank[0].name, "num_modules": 2, "elsewhere": []}


@pytest.mark.parametrize(
    "where", ["checkout", "nowhere", "a link", "the user's folder", "a computed import", "compiled"]
)
def test_a_module_from_elsewhere_is_named(rank, small, tmp_path, where):
    code, own = rank
    name, path = {
        "checkout": ("models.b", small / "models/b.py"),
        "nowhere": ("bench.training.model", None),
        "a link": ("models.b", code.parent / "models" / "b.py"),
        "the user's folder": ("unseen", tmp_path / "unseen.py"),
        "a computed import": ("unseen", own / "unseen.py"),
        "compiled": ("models.b", code / "models/b.cpython-311-x86_64-linux-gnu.so"),  # found before b.py
    }[where]
    if where == "a link":
        (code.parent / "models").mkdir()
        path.symlink_to(small / "models/b.py")
    sys.modules[name] = module(name, path)
    assert imported.facts(hashes=True)["elsewhere"] == [name]


def test_bytecode_of_another_program_is_named(rank):
    """A contestant may leave it for the next: the source is right, but Python imports the bytecode beside it."""
    code, _ = rank
    for name, text in (("honest", "x = 1\n"), ("forged", "x = 0.5\n")):
        path = code / "bench/a.py"
        cached = importlib.util.cache_from_source(str(path))
        os.chmod(cached, 0o644)
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        (code.parent / "a.py").write_text(text)
        py_compile.compile(str(code.parent / "a.py"), cached, str(path), doraise=True, invalidation_mode=mode)
        spec = importlib.util.spec_from_file_location("bench.a", path)
        sys.modules["bench.a"] = importlib.util.module_from_spec(spec)
        assert imported.facts(hashes=True)["elsewhere"] == ["bench.a"] * (name == "forged")


def test_a_copy_that_changed_while_it_ran_is_named(rank):
    code, _ = rank
    os.chmod(code / "models/b.py", 0o644)
    (code / "models/b.py").write_text("x = 'a cheat'\n")
    assert imported.facts(hashes=True)["elsewhere"] == [code.name]


def test_a_rank_of_other_code_makes_a_run_invalid():
    facts = {"copy": "a", "num_modules": 9, "elsewhere": []}
    alone, both = imported.merged([facts]), imported.merged([facts, facts | {"copy": None}])
    assert both["copies"] == ["None", "a"]
    run = {"status": "complete", "metrics": {"val_loss": 3.0, "num_steps": 1}, "data": {"floor_nats": None}}
    run |= {"measured": {"foreign_cpu_cores": 0.0}, "hardware": {"device": "cpu"}, "code": {"copy": "a"}}
    assert validity.validity(run | {"referee": {"code": alone}})[0] == "valid"
    state, (why,) = validity.validity(run | {"referee": {"code": both}})
    assert state == "invalid" and why == "its ranks imported code copy None, a, but this record holds a"
    state, (why,) = validity.validity(run | {"referee": {"code": alone | {"elsewhere": ["models.base"]}}})
    assert state == "invalid" and why.startswith("models.base: not imported from the copy")


OWN = """
import importlib
from pathlib import Path
from models.gpt2 import GPT2
assert (Path(__file__).parent / "beside.txt").read_text() == "beside"
class Net(GPT2):
    def __init__(self, helper=None, **shape):
        super().__init__(**shape)
        helper and importlib.import_module(helper)
"""


@pytest.mark.slow
def test_a_model_of_the_users_own_runs_from_its_copy_and_a_computed_import_does_not_count(tmp_path, capsys):
    (tmp_path / "net.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "beside.txt").write_text("beside")
    overrides = ["model.arch=net.py:Net", "instruments=[]"]
    named = real_runs.run(tmp_path / "results", *overrides, SPEEDRUN_CWD=str(tmp_path))
    code = real_runs.run_json(named)["referee"]["code"]
    assert code["elsewhere"] == [] and real_runs.run_json(named)["validity"] != "invalid"
    computed = real_runs.run(tmp_path / "results", *overrides, "model.args.helper=helper", SPEEDRUN_CWD=str(tmp_path))
    run = real_runs.run_json(computed)
    assert run["validity"] == "invalid" and run["validity_reasons"][0].startswith("helper: not imported from the copy")
    assert verify.main([str(computed)]) == 0 and "ruled invalid: helper: not imported" in capsys.readouterr().out


# ---- git that fails


def set_filter(repo, command):
    """Makes git pass every *.py through this program, as in a clone with LFS but without git-lfs."""
    git(repo, "config", "filter.lfs.clean", command)
    git(repo, "config", "filter.lfs.required", "true")
    (repo / ".git/info").mkdir(exist_ok=True)
    (repo / ".git/info/attributes").write_text("*.py filter=lfs\n")


def damage(repo, what):
    if what == "another owner":
        if os.geteuid():
            pytest.skip("only root may give a file away")
        for path in (repo, *repo.rglob("*")):
            os.chown(path, 12345, -1)
    elif what == "a filter that is missing":
        set_filter(repo, "git-lfs-that-is-not-there clean")
    elif what == "a filter that hangs":
        set_filter(repo, "sleep 60")
    elif what == "a damaged HEAD":
        (repo / ".git/HEAD").write_text("garbage\n")
    elif what == "a branch that is gone":
        git(repo, "branch", "other")
        git(repo, "symbolic-ref", "HEAD", "refs/heads/gone")
    elif what == "a lost object":
        object_name = git(repo, "rev-parse", "HEAD^{tree}")
        (repo / ".git/objects" / object_name[:2] / object_name[2:]).unlink()


DAMAGES = {  # what is wrong: (what the failure says, what the remedy says)
    "another owner": ("dubious ownership", "safe.directory"),
    "a filter that is missing": ("lfs", "git-lfs"),
    "a filter that hangs": ("timed out", "what takes so long"),
    "a damaged HEAD": ("git rev-parse", "fresh clone"),
    "a branch that is gone": ("git rev-parse", "fresh clone"),
    "a lost object": ("git read-tree", "fresh clone"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_git_that_fails_is_unknown_and_says_so(small, monkeypatch, what):
    (small / "models/b.py").write_text("x = 2\n")
    damage(small, what)
    monkeypatch.setattr(git_program, "TIMEOUT_S", 1.0)
    state = code_state.state(small)
    assert {state[name] for name in ("commit", "dirty", "diff_sha256")} == {None} and len(state["source_sha256"]) == 64
    phrase, remedy = DAMAGES[what]
    assert phrase in state["git_failure"] and str(small) not in state["git_failure"]
    check = preflight.git(code_state.git_failure(small), small)
    assert (check.name, check.status) == ("git", "warn") and phrase in check.found and remedy in check.remedy


def test_without_git_the_code_is_known_by_its_hash_and_nothing_has_failed(small, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "git cannot be run" in code_state.state(small)["git_failure"]  # there is a repository, and nobody to ask
    shutil.rmtree(small / ".git")
    state = code_state.state(small)
    assert state["commit"] is None and "git_failure" not in state and code_state.git_failure(small) is None
    assert preflight.git(None, small).status == "ok"


def test_a_run_whose_git_failed_cannot_be_claimed(tmp_path):
    results = Results(tmp_path / "results")

    def unknown(run):
        run["code"] |= {"git_failure": "git diff: dubious ownership", "dirty": None}

    folders = [results.add(seed, val_loss=2.74 + 0.01 * seed, change=unknown) for seed in range(3)]
    ((_, claim),) = judging.claims_of([str(folder) for folder in folders])
    rule = next(rule for rule in rulebook.check(claim) if rule["rule"] == "git identified the code of every run")
    assert rule["passed"] is False and "dubious ownership" in rule["evidence"]


def test_the_cheapest_of_starts_hashes_and_finds_the_copy_in_little_time(cache):
    copied(REPO)
    started_s = time.process_time()
    copied(REPO)
    assert time.process_time() - started_s < 0.2  # 35 ms where nothing else runs; 0.05 s is the aim
    assert Path(copied(REPO), "bench/training/worker.py").is_file()
