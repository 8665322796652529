"""Programs started as their authors start them: python -m from their root, without torchrun, or as a command."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import real_runs
import scripted

from bench.base.paths import REPO
from bench.cli import main as program
from bench.config import compose, identity, schema, user_code
from bench.launch.script import outcome, output, script, work_folder
from bench.machine import code_state
from bench.plans.race import arm_process, plan, planning
from bench.record import run_folder, step_files, verification
from bench.record.importers import dialects
from bench.report import run_facts

PACKAGE = scripted.SCRIPTS / "package"
FREE = ["track=free", "hardware=cpu", "instruments=[]"]
STARTS = {
    "module": ["script.module=scripts.base_train", "script.torchrun=false", "script.args=6"],
    "path": ["script=scripts/base_train.py", "script.torchrun=false", "script.args=6"],
    "command": ["script.command=./train.sh 6"],
}


def run(results, root, *overrides, expect=0, **env):
    real_runs.bench(results, "run", *FREE, f"script.root={root}", *overrides, **env, code=expect)
    (folder,) = real_runs.folders(results)
    return folder


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    ran = {}

    def of(start):
        if start not in ran:
            ran[start] = run(tmp_path_factory.mktemp(start), PACKAGE, *STARTS[start])
        return ran[start]

    return of


@pytest.mark.parametrize("start", STARTS)
def test_a_program_runs_as_its_author_starts_it(started, start):
    record, rows = real_runs.run_json(started(start)), step_files.read(started(start))
    assert (record["status"], record["script"]["dialect"], record["world_size"]) == ("complete", "nanogpt", 1)
    assert [row["step"] for row in rows] == list(range(1 if start == "command" else 0, 8))
    machine = ("telemetry", "machine", "outside clock")
    assert [row for row in record["doubts"] if row["instrument"] not in machine and "machine" not in row["doubt"]] == []
    assert [rule for rule in verification.report(started(start))["rules"] if not rule["passed"]] == []
    arch = {"module": "scripts.base_train", "path": "base_train.py", "command": "train.sh"}[start]
    assert record["model"] == {"arch": arch} and record["data"]["source"] == "script"


def test_the_code_below_its_root_is_its_identity_and_what_it_used_is_kept(started):
    names = ["configs/debug.toml", "engine/__init__.py", "engine/data/__init__.py", "engine/steps.py"]
    names = [f"script/{name}" for name in [*names, "scripts/base_train.py", "train.sh"]]
    record = real_runs.run_json(started("module"))
    assert sorted(record["script"]["sha256_by_file"]) == names
    assert sorted(record["script"]["used"]) == names[:-1]
    assert record["script"]["module"] == "scripts.base_train"
    for name in names[:-1]:
        assert (started("module") / "code" / name).read_bytes() == (PACKAGE / name.removeprefix("script/")).read_bytes()
    assert real_runs.run_json(started("command"))["script"]["used"] == {"script/train.sh": "the script"}


def test_an_edit_below_the_root_is_another_identity_and_what_runs_wrote_is_none(tmp_path):
    root = tmp_path / "mine"
    shutil.copytree(PACKAGE, root)
    own = [f"{root}/./scripts/base_train.py:__main__"]

    def identity():
        return code_state.source_sha256(own=user_code.sources(own))

    identities = [identity()]
    (root / "out-package").mkdir()
    (root / "out-package" / "old.py").write_text("1")
    (root / "data").mkdir()
    (root / "data" / "prepare.py").write_text("1")
    assert [identity()] == identities
    for name in ("engine/data/__init__.py", "configs/debug.toml"):
        (root / name).write_text((root / name).read_text() + "\nother = 1\n")
        identities.append(identity())
    assert len(set(identities)) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["script.module=scripts.base_train"], "script.module=scripts.base_train: give script.root=DIR"),
        (["script.root=ROOT"], "there is no script: give script=PATH/train_gpt.py, or script.root=DIR with"),
        (["script.root=EMPTY", "script.command=true"], "script.root=EMPTY: no source is in it, by which versions"),
        (["script.root=ROOT/none", "script.module=a"], "there is no such folder: give the program's repository"),
        (["script.root=ROOT", "script.module=scripts.other"], "script.root=ROOT has no file scripts/other.py"),
        (["script.root=ROOT", "script=other.py"], "script=other.py: script.root=ROOT has no file other.py"),
        (
            ["script.root=ROOT", "script.command=./train.sh", "script.dialect=nanogpt", "goal.metric=val_bpb"],
            "goal.metric=val_bpb: lines of script.dialect=nanogpt have none: give another metric",
        ),
        (["script.root=ROOT", "script=../odd/train.py"], "has no file ../odd/train.py: give one that is there"),
        (["script.root=ROOT", "script.command=no-such-program 1"], "neither a file in ROOT nor a program on PATH"),
        (["script.root=ROOT", "script.command=[]"], "script.command=[]: use a list of a program and its arguments"),
        (["script.root=ROOT", "script.args=--x 'y"], "No closing quotation"),
        (["script.root=ROOT", "script.module=a", "script.command=b"], "script.module and script.command each say"),
        (["script.root=ROOT", "script.command=./train.sh", "model=modern"], "has its own model and optimizer"),
        (
            ["script.root=ROOT", "script.command=./train.sh", "hardware.num_processes=2"],
            "hardware.num_processes=2: without torchrun it starts what it needs itself",
        ),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_sentence(results, tmp_path, capsys, settings, message):
    (tmp_path / "empty").mkdir()
    words, expected = (
        [text.replace("ROOT", str(PACKAGE)).replace("EMPTY", str(tmp_path / "empty")) for text in texts]
        for texts in (settings, [message])
    )
    assert program.main(["run", *FREE, *words]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert expected[0] in shown and "Traceback" not in shown
    assert real_runs.folders(results) == []


def test_an_interpreter_that_the_repository_has_is_not_taken_for_its_users(tmp_path):
    """A cheat: a revision commits a .venv, which the other revision of a race would be run with."""
    real_runs.git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("print(1)")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    settings = ["track=free", f"script.root={tmp_path}", "script=train.py"]
    assert compose_script(settings).python == str(tmp_path / ".venv/bin/python")
    real_runs.git(tmp_path, "add", "-f", ".venv", "train.py")
    real_runs.git(tmp_path, "commit", "-qm", "an environment")
    assert compose_script(settings).python == str(tmp_path / ".venv/bin/python")  # no other revision
    settings.append("script.rev=HEAD")
    with pytest.raises(ValueError, match=r"/.venv is part of its repository: give an interpreter that is not"):
        compose_script(settings)
    assert compose_script([*settings, f"script.python={sys.executable}"]).python == sys.executable


def compose_script(settings):
    return script.from_config(compose.compose(settings), settings)


@pytest.mark.parametrize(
    ("command", "args"),
    [
        ("script.args=--lr=3 --name='a b'", ["--lr=3", "--name=a b"]),
        ("script.args=['--lr=3', '4']", ["--lr=3", "4"]),
        ("script.args=config/a.py", ["config/a.py"]),
    ],
)
def test_arguments_are_split_as_a_shell_splits_them(command, args):
    assert compose.compose(["script=train.py", command]).script.args == args


def test_a_line_that_is_overwritten_has_the_time_at_which_it_came(tmp_path):
    (tmp_path / "logs").mkdir()
    kept = SimpleNamespace(lines=[], late_ns={})
    looks_like = re.compile("^step")
    with open(os.devnull) as null:
        rank = output._Rank(os.dup(null.fileno()), tmp_path / "logs" / "rank0.log", looks_like, kept)
    for t_ns, data in enumerate((b"begin\n", b"\rstep 0 |  ", b"\rstep 1", b" | \rstep 2 |", b"\r\nval_bpb: 1\r\n"), 1):
        rank.take(data, t_ns)
    rank.close()
    assert kept.lines[:3] == [(1, "begin"), (2, "step 0 |  "), (4, "step 1 | ")]
    assert kept.lines[3] == (4, "step 2 |") and kept.lines[-1] == (5, "val_bpb: 1")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The package in a repository of its own, with prepared data, at a second revision that is 0.1 nats better."""
    root = tmp_path_factory.mktemp("programs") / "package"
    shutil.copytree(PACKAGE, root)

    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"], ["tag", "v1"]):
        real_runs.git(root, *command)
    (root / "engine" / "data" / "__init__.py").write_text("VAL_LOSS = 5.9")
    real_runs.git(root, "commit", "-qam", "second")
    (root / "data").mkdir()
    (root / "data" / "train.bin").write_bytes(b"made")
    (root / "engine" / "steps.py").write_text("raise SystemExit('not committed')")
    return root


def test_an_earlier_revision_of_a_program_runs_beside_its_prepared_data(tmp_path, repository, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))
    folder, commit = script.checked_out(repository, "v1")
    assert script.checked_out(repository, commit) == (folder, commit)
    name = "engine/data/__init__.py"
    assert (folder / name).read_bytes() == (PACKAGE / name).read_bytes()
    assert (folder / "data" / "train.bin").read_bytes() == b"made"
    (repository / "console.txt").write_text("of a race that is shown here")  # linked, and no source
    script.checked_out(repository, commit)
    sources = user_code.script_sources(folder, "", is_root=True)
    assert (folder / "console.txt").is_symlink() and "script/console.txt" not in sources
    (repository / "console.txt").unlink()  # or committed: an older commit did not have it
    script.checked_out(repository, commit)
    assert not (folder / "console.txt").is_symlink() and (folder / "data").is_symlink()
    again = shutil.copytree(repository, tmp_path / repository.name, symlinks=True)  # this commit with data of its own
    (again / "data" / "train.bin").write_bytes(b"other")
    assert (script.checked_out(again, commit)[0] / "data" / "train.bin").read_bytes() == b"other"
    with pytest.raises(ValueError, match=r"script.rev=v9: .*: no git repository there has it"):
        script.checked_out(repository, "v9")
    with pytest.raises(ValueError, match=r"script.rev=v1: the folder .*/data is not in this commit: commit it, or"):
        script.checked_out(repository / "data", "v1")
    wanted = plan.parse_request([f"script.root={repository}", "A.rev=v1", "B.rev=HEAD", *STARTS["module"]])
    assert [arm["rev"] for arm in wanted["arms"].values()] == [None, None]
    assert wanted["arms"]["A"]["overrides"][-1] == "script.rev=v1"
    assert planning._pinned(wanted["arms"]["A"]["overrides"])[-1] == f"script.rev={commit}"


@pytest.mark.parametrize("changed", ["engine/steps.py", "sitecustomize.py", "data", ""])
def test_a_revision_that_an_earlier_run_changed_is_made_again(tmp_path, repository, monkeypatch, changed):
    """Else one attempt of an author slows the baseline of the next, or trains it on other data."""
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))
    folder, commit = script.checked_out(repository, "v1")
    before = {path: path.lstat().st_ino for path in folder.rglob("*.py")}
    if changed == "data":
        (folder / "data").unlink()
        (folder / "data").symlink_to(tmp_path)
    elif changed:
        (folder / changed).unlink(missing_ok=True)
        (folder / changed).write_text("import time; time.sleep(1)")
    assert script.checked_out(repository, commit)[0] == folder
    after = {path: path.lstat().st_ino for path in folder.rglob("*.py")}
    assert (folder / "engine/steps.py").read_bytes() == (PACKAGE / "engine/steps.py").read_bytes()
    assert not (folder / "sitecustomize.py").exists() and (folder / "data/train.bin").read_bytes() == b"made"
    assert (before == after) == (not changed)  # and an unchanged one is not


def test_a_file_beside_a_script_to_which_the_command_prints_is_no_source_for_its_runs_either(tmp_path):
    """./run.sh race script=s.py > out.txt grows while it races.  An older output is a source, as all texts are."""
    for name in ("s.py", "settings.txt"):
        (tmp_path / name).write_text("")
    facts = "{'names': sorted(user_code.sources(['s.py:__main__'])), 'env': arm_process.environment('.')}"
    code = f"import json; from bench.config import user_code; from bench.plans.race import arm_process; print({facts})"
    code = code.replace("print(", "print(json.dumps(").removesuffix(")") + "))"
    command, here = [sys.executable, "-c", code], os.environ | {"SPEEDRUN_CWD": str(tmp_path), "PYTHONPATH": str(REPO)}
    with open(tmp_path / "out.txt", "w") as out:
        subprocess.run(command, stdout=out, stderr=subprocess.DEVNULL, env=here, check=True)
    printed = json.loads((tmp_path / "out.txt").read_text())
    inside = subprocess.run(command, capture_output=True, env=printed["env"] | here, check=True).stdout
    assert printed["names"] == json.loads(inside)["names"] == ["script/s.py", "script/settings.txt"]
    later = subprocess.run(command, capture_output=True, env=here, check=True).stdout
    assert "script/out.txt" in json.loads(later)["names"]


def test_a_source_whose_name_is_not_utf8_is_refused_by_name(tmp_path):
    (tmp_path / "s.py").write_text("")
    for name, start in ((b"x\xff.txt", "s.py"), (b"n\xff.py", os.fsdecode(b"n\xff.py"))):
        path = os.path.join(os.fsencode(tmp_path), name)
        with open(path, "w"), pytest.raises(ValueError, match=r"\\xff\.\w+: its name is not UTF-8"):
            user_code.script_sources(tmp_path, start)
        (facts,) = arm_process._all_facts([["track=free", "hardware=cpu", f"script={tmp_path}/s.py"]])
        assert "its name is not UTF-8" in facts["refused"]
        os.remove(path)


def test_a_commit_that_git_forgets_in_the_middle_of_a_race_still_runs(tmp_path, repository, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))
    root = shutil.copytree(repository, tmp_path / "theirs", symlinks=True)
    folder, commit = script.checked_out(root, real_runs.git(root, "commit-tree", "HEAD^{tree}", "-m", "of no branch"))
    real_runs.git(root, "gc", "-q", "--prune=now")
    real_runs.git(root, "cat-file", "-e", commit, code=1)
    assert script.checked_out(root, commit) == (folder, commit)
    with pytest.raises(ValueError, match="no git repository there has it"):
        script.checked_out(root, commit[:12] + "0" * 28)


def test_a_commit_in_the_middle_of_a_race_of_revisions_does_not_change_them(tmp_path, repository, monkeypatch):
    """HEAD~1 and HEAD are commits in the plan."""
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))
    request = plan.parse_request(["HEAD~1", "HEAD", f"script.root={repository}", *STARTS["module"], "n=2"])
    typed, asked = [arm["overrides"][-1] for arm in request["arms"].values()], {}
    monkeypatch.setattr(arm_process, "facts_of_arms", lambda arms, results: asked.update(arms) or {"A": {}})
    with pytest.raises(KeyError):  # it is enough that the arms' own code is asked about these
        planning.planned(request, tmp_path)
    pinned = [overrides[-1].removeprefix("script.rev=") for _, overrides in asked.values()]
    assert typed == ["script.rev='HEAD~1'", "script.rev=HEAD"]
    assert pinned == [real_runs.git(repository, "rev-parse", name) for name in ("HEAD~1", "HEAD")]


def test_a_repository_whose_settings_name_programs_runs_none_of_them(tmp_path, repository, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))
    root, ran = shutil.copytree(repository, tmp_path / "theirs", symlinks=True), tmp_path / "ran"
    (root / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    touch = f"touch {ran}; false"
    settings = dict.fromkeys(
        ("filter.evil.smudge", "filter.evil.process", "core.fsmonitor", "remote.r.uploadpack"), touch
    )
    settings |= {"remote.r.url": str(root), "remote.r.promisor": "true", "extensions.partialClone": "r"}
    for name, value in settings.items():
        real_runs.git(root, "config", name, value)
    folder, _ = script.checked_out(root, "v1")
    with pytest.raises(ValueError, match="no git repository there has it"):
        script.checked_out(root, "1" * 40)  # git would fetch what is missing, by the program of the remote
    assert (folder / "engine" / "steps.py").is_file() and not ran.exists()


def test_two_revisions_that_differ_in_documentation_and_comments_alone_are_not_raced_for_a_job(tmp_path, repository):
    root, commits = shutil.copytree(repository, tmp_path / "theirs", symlinks=True), []
    for name, text in (("README.md", "how to run"), ("table.bin", "of numbers")):
        (root / name).write_text(text)
        (root / "scripts/base_train.py").write_text((root / "scripts/base_train.py").read_text() + f"\n# {text}\n")
        real_runs.git(root, "add", "-f", name, "scripts/base_train.py")
        real_runs.git(root, "commit", "-qm", name)
        commits.append(real_runs.git(root, "rev-parse", "HEAD").strip())
    program = [f"script.root={root}", *STARTS["module"], *FREE, "n=2", "--anyway", "--fail-on", "slower:1%"]
    documented = [f"A.rev={commits[0]}~1", f"B.rev={commits[0]}"]
    done = real_runs.bench(tmp_path / "results", "race", *documented, *program, timeout_s=60, code=0)
    same = "A and B train the same program: their files differ at most in documentation and comments"
    assert f"{same}: nothing was raced, and no condition of --fail-on holds" in done.stdout
    assert not (tmp_path / "results" / "races").exists()
    (root / "scripts/base_train.py").write_text((root / "scripts/base_train.py").read_text() + '\nREAD = "README.md"\n')
    (root / "README.md").write_text("A prompt")
    real_runs.git(root, "commit", "-qam", "a prompt that is read")
    first = script.content_sha256(script.checked_out(root, "HEAD")[0])
    (root / "README.md").write_text("Another prompt")
    real_runs.git(root, "commit", "-qam", "another")
    assert script.content_sha256(script.checked_out(root, "HEAD")[0]) != first
    every = [f"A.rev={commits[0]}~1", f"B.rev={commits[0]}", f"C.rev={commits[1]}", "--dry-run"]
    done = real_runs.bench(tmp_path / "results", "race", *every, *program[:-2], timeout_s=60, code=0)
    assert "B is omitted: it trains the same program as A" in done.stdout and "2 runs per arm" in done.stdout
    assert "race  C: " in done.stdout and "race  B: " not in done.stdout


@pytest.mark.slow
def test_two_revisions_of_a_program_race(tmp_path, repository):
    arguments = ["A.rev=v1", "B.rev=HEAD", f"script.root={repository}", *STARTS["module"], *FREE, "n=2", "--json"]
    done = real_runs.bench(tmp_path / "results", "race", *arguments, "--anyway", timeout_s=600, code=0)
    against = json.loads(done.stdout)["result"]["against"]["B"]
    assert against["comparable"] and against["val_loss"]["change"] == pytest.approx(-0.1)


@pytest.fixture
def at_work(tmp_path):
    """A copy of the package, another of it in which it runs, and its script."""
    root, work = tmp_path / "mine", tmp_path / "work"
    for folder in (root, work):
        shutil.copytree(PACKAGE, folder)
    config = compose.compose([f"script.root={root}", *STARTS["module"], "hardware=cpu"])
    return root, work, script.from_config(config, [])


def test_the_config_id_is_the_same_in_every_clone_and_an_older_id_is_still_known(at_work, monkeypatch):
    root, work, _ = at_work

    def config_of(folder, *overrides):
        config = compose.compose([f"script.root={folder}", *STARTS["module"], *FREE, *overrides])
        script.from_config(config, [])
        return config

    clone = shutil.copytree(root, root.parent / "elsewhere" / root.name)
    for folder in (root, clone):
        shutil.copy(scripted.SCRIPTS / "odd" / "own_words.yaml", folder / "words.yaml")
    here, there = (config_of(folder, f"script.dialect={folder}/words.yaml") for folder in (root, clone))
    assert identity.config_id(here) == identity.config_id(there) != identity.config_id(config_of(work))
    monkeypatch.setattr(identity, "_in_any_folder", lambda script: script)  # as before
    assert identity.config_id(here) != identity.config_id(there)
    lines, here.script.lines = here.script.lines, None  # which the settings have only since
    earlier, here.script.lines = identity.config_id(here), lines
    monkeypatch.undo()
    assert earlier in identity.config_ids(here)


def test_code_that_runs_from_the_root_itself_is_doubted(at_work):
    root, work, its = at_work
    assert work_folder.doubts(its, work, [str(work / "engine" / "steps.py")]) == []
    (doubt,) = work_folder.doubts(its, work, [str(root / "engine" / "steps.py")])
    assert doubt.startswith("it ran engine/steps.py of script.root itself")


def test_what_a_script_puts_links_to_in_its_folders_place_is_not_removed(at_work):
    root, work, its = at_work
    before = sorted(root.rglob("*"))
    shutil.rmtree(work / "engine")
    (work / "engine").symlink_to(root / "engine")  # the same content, so that no source has changed
    assert work_folder.changed(its, work) == work_folder.tidy(its, work)["files_written"] == []
    assert sorted(root.rglob("*")) == before and not work.exists()
    assert work_folder.tidy(its, work) == {"files_written": []}  # as where the script has removed it
    work.symlink_to(root)
    assert work_folder.tidy(its, work) == {"files_written": []}
    assert sorted(root.rglob("*")) == before


def test_a_record_names_the_first_thousand_files_of_a_script_that_leaves_many(at_work):
    _, work, its = at_work
    for number in range(1200):
        (work / f"{number:04}.tmp").touch()
    facts = work_folder.tidy(its, work)
    assert facts == {"files_written": [f"{number:04}.tmp" for number in range(1000)], "num_files_written": 1200}
    assert "0999.tmp, 200 more" in run_facts._files_written(facts)


HOSTILE = [  # what a script may write where its worker notes its facts
    {"torch": {"torch": ["x"]}},
    {"torch": {"torch": "2.13", "cuda": {}}},
    {"torch": "2.13"},
    {"torch": {"torch": "9" * 201}},
    {"python": "3" * 201},
    {"peak_rss_gib": -1.0},
    {"peak_mem_gib": {"allocated": -1}},
    {"compile_flags": {"a": {"b": 1}}},
    {"packages": {"p" * 201: "1"}},
]


@pytest.mark.parametrize("facts", HOSTILE, ids=str)
def test_facts_of_another_kind_than_a_worker_writes_are_not_believed(tmp_path, facts):
    path = tmp_path / "facts"
    path.write_text(json.dumps({"python": "3.11"} | facts))
    assert outcome._facts(path) == {}


def test_of_a_scripts_facts_none_but_those_of_its_torch_are_of_its_environment(tmp_path):
    rest = {"cpu_model": "fake", "gpus": [{"name": "H200"}], "driver": "1"}
    path = tmp_path / "facts"
    path.write_text(json.dumps({"python": "3.11", "torch": {"torch": "2.13.0"} | rest, "environment": rest} | rest))
    outcome._write_result(tmp_path, [outcome._facts(path)], {}, [], {"summary": {}, "doubts": [], "warnings": []}, {})
    assert json.loads((tmp_path / run_folder.RESULT).read_text())["torch_facts"] == {
        "python": "3.11",
        "torch": "2.13.0",
    }
    assert json.loads((tmp_path / "environment.json").read_text()) == {"packages": {}, "python": "3.11"}


TIMES = [  # printed at steps 1 to 4, where each took 30 ms -> those that count, what is said
    (["30", "60", "90", "120"], [30, 60, 90, 120], None),
    (["-1", "-2", "-3", "-4"], [], "at step 1 it prints -1 ms as a time (4 such lines)"),
    (["30", "60", "90", "-5"], [30, 60, 90], "at step 4 it prints -5 ms as a time (1 such line)"),
    (["30", "1e400", "90", "120"], [30, 90, 120], "at step 2 it prints no number as a time (1 such line)"),
    (["30", "nan", "90", "inf"], [30, 90], "at step 2 it prints no number as a time (2 such lines)"),
    (["30", "60", "90", "1e308"], [30, 60, 90], "at step 4 it prints 1e+308 ms as a time (1 such line)"),
    (["120", "90", "60", "30"], [120], "goes back from 120 to 90 ms at step 2 (3 steps)"),
    (["30", "60", "20", "80"], [30, 60, 80], "goes back from 60 to 20 ms at step 3 (1 step)"),
]
PATTERNS = "step: '^it (?P<step>\\d+) loss (?P<train_loss>\\S+) elapsed (?P<train_time_ms>\\S+)'\n"


@pytest.mark.parametrize(("printed", "counting", "sentence"), TIMES)
def test_a_time_that_no_clock_shows_counts_nowhere_and_is_said(tmp_path, printed, counting, sentence):
    (tmp_path / "own.yaml").write_text(PATTERNS)
    own = dialects.read_yaml(str(tmp_path / "own.yaml"), "own.yaml")
    forms = [
        ("modded-nanogpt", "step:{}/4 train_loss:5.0 train_time:{}ms step_avg:nanms"),
        (own, "it {} loss 5.0 elapsed {}"),
    ]
    for dialect, form in forms:
        lines = [(30_000_000 * step, form.format(step, time_ms)) for step, time_ms in enumerate(printed, 1)]
        read = outcome.read(dialect, lines, schema.GoalConfig(num_steps=4, val_tokens=1, val_every_steps=4))
        doubts = [
            doubt
            for doubt in outcome._doubts_of_lines(read, "val_loss", None, True)
            if "ms" in doubt or "time" in doubt
        ]
        assert [sentence in doubt for doubt in doubts] == [True] if sentence else doubts == []
        if not counting:  # as of a script that prints no time at all
            assert read.is_wall
            continue
        steps_ms = [row["step_ms"] for row in read.rows if row.get("step_ms") is not None]
        assert [row["train_time_ms"] for row in read.rows if row.get("train_time_ms") is not None] == counting
        assert min(steps_ms, default=1) > 0 and sum(steps_ms) <= counting[-1]
        assert read.measured()["train_s_by_rank"] == [counting[-1] / 1e3]


def test_a_nanogpt_whose_last_iteration_is_not_validated_is_doubted():
    goal = schema.GoalConfig(num_steps=20, val_tokens=1, val_every_steps=20)
    for max_iters, doubts in ((20, []), (25, ["its last validation is of step 20, and its last step is 26"])):
        lines = [f"iter {step}: loss 5.0, time 2.00ms, mfu 1.0%" for step in range(max_iters + 1)]
        lines = [f"max_iters = {max_iters}", *lines, "step 20: train loss 4.0, val loss 4.0"]
        read = outcome.read("nanogpt", list(enumerate(lines)), goal)
        assert [*outcome._doubts_of_lines(read, "val_loss", None, False)] == doubts


def test_a_metrics_line_whose_step_is_no_number_is_no_line_of_it():
    rows = [{"step": 2}, {"step": 3}]
    lines = [(0, "accuracy 0.5 at three"), (1, "accuracy 0.6 at 3"), (2, "accuracy 0.7 at ")]
    outcome._add_own_metric(
        rows, lines, dialects.reader_of("modded-nanogpt"), "accuracy", r"accuracy (?P<value>\S+) at (?P<step>\S*)"
    )
    assert rows == [{"step": 2}, {"step": 3, "accuracy": 0.6}]
