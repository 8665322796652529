"""What `pip install .` gives: one package with everything in it, and the command, used from a folder of the user's."""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import real_runs

pytestmark = pytest.mark.slow
ROOMS = ("bench", "models", "conf")
PACKAGE = "speedrun_bench"


def call(*command, cwd=None, timeout_s=240, code=0):
    """Runs a command without the variables that say where a checkout's things are.  code: its exit code; None: any."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SPEEDRUN_", "PYTHON", "GIT_"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert code in (None, done.returncode), f"{command}: {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="needs hatchling to build the wheel: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", real_runs.REPO, "--no-deps", "--no-build-isolation", "-w", folder)
    (path,) = folder.iterdir()
    return path


class Installed:
    """A fresh environment with the wheel, which finds this one's packages, and a working folder in a git repository."""

    def __init__(self, folder, wheel):
        venv.create(folder / "venv", symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        self.site = Path(call(self.python, "-c", "import site; print(site.getsitepackages()[0])").stdout.strip())
        self.site.joinpath("these.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
        call(sys.executable, "-m", "pip", "--python", self.python, "install", "--no-deps", "--no-index", wheel)
        self.cwd = folder / "work"
        self.cwd.mkdir()
        call("git", "init", "-q", folder)
        call(
            "git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"
        )
        for name in ROOMS:
            (self.cwd / f"{name}.py").write_text("raise ImportError('a file of the user')\n")

    def speedrun(self, *arguments, code=None):
        return call(self.python.with_name("speedrun"), *arguments, cwd=self.cwd, code=code)

    def files(self):
        return sorted(path for path in (self.site / PACKAGE).rglob("*") if "__pycache__" not in path.parts)


@pytest.fixture(scope="module")
def installed(tmp_path_factory, wheel):
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="module")
def run(installed):
    """Runs the installed command, which writes nothing beside the code.  Returns (its folder, what was printed)."""
    before = installed.files()
    printed = installed.speedrun("run", "track=free", "experiment=smoke", "hardware=cpu", code=0).stdout
    assert installed.files() == before
    (folder,) = real_runs.folders(installed.cwd / "results")
    return folder, printed


def test_the_wheel_holds_every_file_of_its_folders_and_no_other_package(wheel):
    sources = [path for room in ROOMS for path in (real_runs.REPO / room).rglob("*") if path.is_file()]
    wanted = {f"{PACKAGE}/{path.relative_to(real_runs.REPO)}" for path in sources if path.suffix != ".pyc"}
    wanted = wanted - {f"{PACKAGE}/bench/cli/wheel.py"} | {f"{PACKAGE}/__init__.py", f"{PACKAGE}/CHANGELOG.md"}
    wanted |= {f"{PACKAGE}/{path.relative_to(real_runs.REPO)}" for path in (real_runs.REPO / "docs").rglob("*.*")}
    wanted = wanted - {f"{PACKAGE}/bench/api/importable/speedrun.py"} | {"speedrun.py"}
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == wanted
    tops = {PACKAGE, "speedrun.py", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}
    assert {name.split("/")[0] for name in names} == tops
    assert any(name.endswith("/LICENSE") for name in names)


@pytest.mark.parametrize("name", ROOMS)
def test_a_users_own_module_of_that_name_is_not_shadowed(installed, tmp_path, name):
    lines = f"import {PACKAGE}\nimport {name}"
    assert f"No module named '{name}'" in call(installed.python, "-B", "-c", lines, cwd=tmp_path, code=None).stderr
    assert "a file of the user" in call(installed.python, "-B", "-c", lines, cwd=installed.cwd, code=None).stderr


def test_help_and_messages_name_the_command(installed):
    done = installed.speedrun("--help")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: speedrun COMMAND")
    assert "run.sh" not in done.stdout and "  test " not in done.stdout
    assert installed.speedrun("table", "--help").stdout.startswith("usage: speedrun table [-h]")
    unknown = installed.speedrun("tset")
    assert unknown.returncode == 2 and "unknown command" in unknown.stderr and "test" not in unknown.stderr[4:]


def test_a_run_is_recorded_in_the_users_folder_and_verified(installed, run):
    folder, printed = run
    record = real_runs.run_json(folder)
    assert record["status"] == "complete" and record["code"]["files"]
    assert record["code"]["commit"] is None  # the repository around the environment is not the harness's
    assert f"results/free/{folder.name}" in printed and "run.sh" not in printed
    expected = [".data", "bench.py", "conf.py", "models.py", "results"]
    assert sorted(path.name for path in installed.cwd.iterdir()) == expected
    installed.speedrun("verify", f"results/free/{folder.name}", code=0)
    (row,) = json.loads(installed.speedrun("table", "--json").stdout)
    assert row["run_id"] == folder.name


def test_a_run_has_a_page_and_is_published_in_the_users_folder(installed, run):
    folder, _ = run
    page = installed.cwd / "page.html"
    installed.speedrun("report", folder.name, "--out", page, code=0)
    assert (real_runs.REPO / "bench/web/assets/uPlot.min.css").read_text() in page.read_text()
    page.unlink()
    refused = installed.speedrun("table", "--check")
    assert refused.returncode == 2 and "name a Markdown file" in refused.stderr
    installed.speedrun("publish", folder.name, "--name", "mine", code=0)
    assert (installed.cwd / "results/published/mine/free" / folder.name / "run.json").is_file()
    assert installed.speedrun("table", "--check").returncode == 0


def test_revisions_are_refused(installed):
    done = installed.speedrun("race", "A.rev=HEAD", "B=", "track=free", "experiment=smoke")
    assert done.returncode == 2 and "is not in a git repository" in done.stderr


# ---- a program and a project of the user's own


def test_the_snippets_of_profiling_work_in_a_program_of_the_users(installed, tmp_path):
    """docs/profiling.md's own loops, with the wheel's name of the package."""
    page = (real_runs.REPO / "docs/profiling.md").read_text()
    blocks = re.findall(r"```python\n((?:import torch\n\n)?from bench\..*?)```", page, re.S)
    snippets = "\n".join(blocks).replace("from bench.", "from speedrun_bench.")
    names = "model, micro_batches, batch, train, rank, step = float, [1, 2], 0, lambda batch: None, 0, 0\n"
    (tmp_path / "models.py").write_text("mine = True\n")
    (tmp_path / "loop.py").write_text(f"{names}{snippets}\nimport models\nassert models.mine and facts['peak_gb']\n")
    assert "'forward': " in call(installed.python, "-B", "loop.py", cwd=tmp_path).stdout
    assert (tmp_path / "traces" / "summary.md").is_file()


def test_a_module_of_the_users_that_is_in_the_way_is_named(installed, tmp_path):
    (tmp_path / "bench.py").write_text("")
    done = call(installed.python, "-B", "-c", "import speedrun_bench.compat", cwd=tmp_path, code=1)
    assert f"{tmp_path / 'bench.py'}: " in done.stderr and "needs the harness's module bench: rename" in done.stderr


def test_docs_own_md_holds_word_by_word(installed, tmp_path):
    """Its files are written and its commands are run, in its order, by a shell that finds the installed command."""
    page = (installed.site / PACKAGE / "docs/own.md").read_text()
    folder, path = tmp_path, f"{installed.python.parent}:{os.environ['PATH']}"
    num_commands = 0
    for kind, info, text in re.findall(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", page, re.S | re.M):
        if kind in ("python", "yaml"):
            (folder / info).parent.mkdir(parents=True, exist_ok=True)
            (folder / info).write_text(text)
        elif kind == "sh":
            script = f"export PATH={shlex.quote(path)}\n{text}\npwd > {shlex.quote(str(tmp_path / 'folder'))}"
            call("bash", "-ec", script, cwd=folder, timeout_s=900, code=int(info.removeprefix("exit=") or 0))
            folder = Path((tmp_path / "folder").read_text().strip())
            num_commands += len(text.splitlines())
    assert num_commands >= 15
    created = {path.name for path in folder.iterdir() if path.is_dir()}
    assert created - {"__pycache__"} == {".data", "conf", "logs", "results", "shared"}
    records = [real_runs.run_json(path) for path in real_runs.folders(folder / "results")]
    assert {record["status"] for record in records} == {"complete"}
    assert all(
        "own/my_model.py" in record["code"]["files"] for record in records if record["name"].startswith("MyModel")
    )
