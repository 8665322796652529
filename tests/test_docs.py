"""The commands of the documentation: those with printed output are run and compared, the others must be understood."""

import fnmatch
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli.main import CHECKOUT_VERBS, VERBS
from bench.config import overrides
from bench.launch.prepare import requested_config

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.S | re.M)
CONSOLE = [(page.name, block) for page in PAGES for kind, block in BLOCK.findall(page.read_text()) if kind == "console"]
COMMANDS = sorted(
    {
        (page.name, line)
        for page in PAGES
        for kind, block in BLOCK.findall(page.read_text())
        if kind in ("", "bash", "sh")
        for line in block.splitlines()
        if line.startswith(("./run.sh ", "speedrun "))
    }
)
# of a run whose settings need files of the user's, a package that is no dependency, or GPUs
OF_USER = re.compile(r"=mine|=ours|two_stages|load|sums|script|my_|cluster|exporters|=gpt2_|empty|/|rendezvous|optuna")


@pytest.mark.parametrize(("page", "block"), CONSOLE, ids=[f"{page}-{block[:40]!r}" for page, block in CONSOLE])
def test_a_command_prints_what_the_documentation_shows(page, block, tmp_path):
    """A line of three dots stands for any lines, three dots within a line for any text."""
    env = os.environ | {"SPEEDRUN_PYTHON": sys.executable, "SPEEDRUN_RESULTS": str(tmp_path), "COLUMNS": "200"}
    command, *shown = block.removeprefix("$ ").splitlines()
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=REPO, env=env)
    assert done.returncode == 0, done.stderr
    wanted = "\n".join("*" if line == "..." else glob(line) for line in shown)
    assert fnmatch.fnmatchcase("\n".join(map(str.rstrip, done.stdout.splitlines())), wanted), done.stdout


RUNS = sorted(map(str, (REPO / "results/published/cpu_nano-gpt2-adamw/cpu_nano").glob("2*")))
OF_RUNS = {
    line.partition("#")[0].strip()
    for _, line in COMMANDS
    if re.match(r"\./run\.sh (verify|explain|judge) (RUN|A B)(\.\.\.)?( --html \S+)?( +#|$)", line)
}


@pytest.mark.parametrize("line", sorted(OF_RUNS))
def test_a_command_about_runs_does_its_work_on_published_ones(line, tmp_path):
    """RUN..., RUN, A and B stand for runs of results/published."""
    words, meant = line.split()[1:], {"RUN...": RUNS, "RUN": RUNS[:1], "A": RUNS[:1], "B": RUNS[1:2]}
    command = [sys.executable, "-m", "bench", *(part for word in words for part in meant.get(word, [word]))]
    env = os.environ | {"SPEEDRUN_CWD": str(tmp_path), "SPEEDRUN_RESULTS": str(tmp_path / "results")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=env)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout
    assert all((tmp_path / word).is_file() for word in words if word.endswith(".html"))


def hatch_metadata():
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_metadata", REPO / ".ci/hatch_metadata.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@github.com:owner/name.git", "https://github.com/owner/name"),
        ("https://user:secret@github.com/owner/name", "https://github.com/owner/name"),
        ("/srv/git/name", None),
    ],
)
def test_a_wheels_page_links_to_the_repository_and_never_tells_a_password(remote, address, monkeypatch):
    metadata = hatch_metadata()
    monkeypatch.setenv("SPEEDRUN_URL", remote)
    assert metadata.repository(REPO) == address
    text = metadata.readme("![a](docs/a.png) [Start](docs/start.md) [x](https://x.org)", address)
    if address:
        assert (
            text == f"![a]({address}/raw/HEAD/docs/a.png) [Start]({address}/blob/HEAD/docs/start.md) [x](https://x.org)"
        )
    else:
        assert text == " Start (`docs/start.md`) [x](https://x.org)"


def glob(line):
    return re.sub(r"([\[*?])", r"[\1]", line).replace("...", "*")


def test_every_page_that_shows_output_is_compared():
    assert len(CONSOLE) >= 5 and len(COMMANDS) >= 90


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_of_the_documentation_is_understood(page, line):
    """Its verb and options are known, and the settings of a run can be composed."""
    command = re.split(r"  +(?=\S)|;|\s#|\[or", line)[0].rstrip("\\ ")
    _, verb, *words = shlex.split(command.partition(" -- ")[0])
    if verb in CHECKOUT_VERBS or verb.startswith("-"):
        return
    assert verb in VERBS, verb
    parser = importlib.import_module(f"bench.cli.{VERBS[verb][0]}")._parser()
    if verb == "data" or "--help" in words:
        return
    given = parser.parse_intermixed_args(overrides.spelled(words))
    if verb == "run" and not given.multirun and not OF_USER.search(line):
        requested_config(given.overrides)
