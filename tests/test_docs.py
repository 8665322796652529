"""The commands of the documentation: those with printed output are run and compared, the others must be understood."""

import fnmatch
import os
import pickle
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import real_runs
import snapshots
import yaml

from bench.cli.main import CHECKOUT_VERBS, VERBS, module_of
from bench.config import overrides
from bench.launch.prepare import requested_config
from bench.plans import shares
from bench.plans.queue import Queue
from bench.record.importers import dialects

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", REPO / "AGENTS.md", *sorted((REPO / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.S | re.M)
OTHER_KINDS = ("text", "python", "yaml", "toml")  # without commands; every other kind of block counts as commands
CONSOLE = [(page.name, block) for page in PAGES for kind, block in BLOCK.findall(page.read_text()) if kind == "console"]
LINES_OF_BLOCKS = [
    (page.name, kind, line)
    for page in PAGES
    for kind, block in BLOCK.findall(page.read_text())
    if kind not in ("console", *OTHER_KINDS)
    for line in block.splitlines()
    if line.strip()
]
COMMANDS = sorted({(page, line) for page, _, line in LINES_OF_BLOCKS if line.startswith(("./run.sh ", "speedrun "))})
# settings that need files of the user's, a package that is no dependency, or GPUs
OF_USER = re.compile(r"=mine|=ours|two_stages|load|sums|script|my_|cluster|exporters|=gpt2_|empty|/|rendezvous|optuna")


@pytest.mark.parametrize(("page", "block"), CONSOLE, ids=[f"{page}-{block[:40]!r}" for page, block in CONSOLE])
def test_a_command_prints_what_the_documentation_shows(page, block, tmp_path):
    """A line of three dots stands for any lines, three dots within a line for any text."""
    env = os.environ | {"SPEEDRUN_PYTHON": sys.executable, "SPEEDRUN_RESULTS": str(tmp_path), "COLUMNS": "200"}
    command, *shown = block.removeprefix("$ ").splitlines()
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=REPO, env=env)
    assert done.returncode == 0, done.stderr
    wanted = "\n".join("*" if line == "..." else glob(line) for line in shown)
    # whether a dataset has yet to be built depends on what ran before
    lines = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("    data  building ")]
    assert fnmatch.fnmatchcase("\n".join(lines), wanted), done.stdout


# ---- what the blocks show is done, for real or as a dry run

# but of own.md: tests/test_wheel.py does all of it, word by word
OF_SHELL = [line for page, _, line in LINES_OF_BLOCKS if page != "own.md"]
LINES = sorted({re.split(r"  +#| # ", line)[0].rstrip() for line in OF_SHELL})
NOT_RUN = {  # what no test of this file can do, and why, with the file that tests it
    r"^torchrun|^srun|hardware\.(nodes|num_processes)|cluster=": "ranks on a cluster, or eight: test_nodes, test_slurm",
    r"nsys|--capture|project (RUN|traces)": "a GPU, or what was measured on one: test_projection",
    r"sweeper=optuna|exporters=|dashboard|postgres|^pip": "packages: test_sweep_runs, test_dashboards, test_wheel",
    r"data fetch|collect me@|--clone|records/track_1_short|LOG\.\.\.": "the network, or a clone: test_collect, test_pr",
    r"optim=mine|(base|mine)/train|script=train\.py": "files of the reader: test_wheel, test_scripts",
    r"my_record|rank1\.json|pr FOLDER|CLONE": "files of the reader: test_pr, test_explain, test_public_records",
    r"=\.\.\.": "a pattern of a command",
    r"^\./run\.sh (test|lint)|^\.ci/|^\./speedrun|^\.venv/": "what runs this test, or is tested by .ci/run",
    r"--(resume|abandon|look|page|claim|replayed)|judge DIR": "what stopped or was claimed: test_races, test_judge",
    r"publish": "what git does not have yet: test_publish",
    r"^\./run\.sh history|judge RACE": "runs of several commits, or a claim: test_history, test_judge",
    r"ladder( goal.*)?$": "the plan of ladder --dry-run again",
    r"study|referee|--times|replay (--all|[A-Z])|doctor": "minutes: test_study, test_referee, test_replay, test_doctor",
    r"SPEEDRUN_RESULTS=|submit --gpus|^\./run\.sh agent": "it waits for a queue's entries: test_queue",
}
DRY = re.compile(r"\./run\.sh (run|race|ladder) ")  # these begin nothing: settings are composed, plans are made
ARE_SHORT = ("./run.sh run track=free experiment=smoke",)
DONE = [line for line in LINES if not any(re.search(pattern, line) for pattern in NOT_RUN)]


def test_every_line_of_the_docs_is_done_or_has_a_reason():
    assert len(DONE) >= 30 and len(CONSOLE) >= 5 and len(COMMANDS) >= 90
    hidden = rf"^ *~~~|^ +```|^```({'|'.join(OTHER_KINDS)})[^\n]*\n([^`]*\n)?(\$ )?(\./run\.sh|speedrun) "
    assert [page.name for page in PAGES if re.search(hidden, page.read_text(), re.M)] == []
    unused = [pattern for pattern in NOT_RUN if not any(re.search(pattern, line) for line in LINES)]
    assert unused == []
    files = re.findall(r"test_\w+", " ".join(NOT_RUN.values()))
    assert [name for name in files if not (REPO / f"tests/{name}.py").is_file()] == []


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with what a reader has by then: a run with a look and its memory, a race, folders of traces."""
    folder = tmp_path_factory.mktemp("docs")
    results = folder / "results"
    for arguments in (
        ["run", "look=on", "instruments=[regions,memory_history]"],
        ["race", "A=", "B=optim=muon", "n=2", "look=on", "--anyway"],
    ):
        real_runs.bench(results, *arguments, *real_runs.SHORT, code=0)
    first = min((results / "free").iterdir())
    for to in ("traces", "traces/before", "traces/after"):
        shutil.copytree(first / "traces", folder / to, ignore=shutil.ignore_patterns("ops"), dirs_exist_ok=True)
    (race,) = (results / "races").iterdir()
    runs = sorted(map(str, (REPO / "results/published/cpu_nano-gpt2-adamw/cpu_nano").glob("2*")))
    (folder / "some.pickle").write_bytes(pickle.dumps(snapshots.training()))
    stand_ins = {"RUN": [str(first)], "RUN...": runs, "RACE": [race.name], "A": runs[:1], "B": runs[1:2]}
    arms = {f"RACE:{arm}": [f"{race.name}:{arm}"] for arm in "AB"}
    return folder, stand_ins | arms | {"PLACE...": ["results"], "DIR": ["dir"]}


@pytest.mark.slow
@pytest.mark.parametrize("line", DONE)
def test_a_line_of_the_docs_does_its_work(line, made):
    """RUN, RACE, A and the like stand for what was made; what would train for longer is a dry run."""
    folder, stand_ins = made
    if "judge" in line or "verify" in line or "publish" in line:
        stand_ins = stand_ins | {"RUN": stand_ins["A"]}
    arguments = [part for argument in shlex.split(line)[1:] for part in stand_ins.get(argument, [argument])]
    if DRY.match(line) and line not in ARE_SHORT and "--dry-run" not in arguments:
        arguments += ["--dry-run", *["--anyway"] * ("HEAD" in arguments)]  # commits may differ in documentation alone
    done = real_runs.bench(folder / "results", *arguments, SPEEDRUN_CWD=str(folder))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert done.stdout + done.stderr
    assert all((folder / argument).exists() for argument in arguments if argument.endswith((".html", ".svg")))


def test_the_yaml_of_the_docs_is_what_its_readers_take(tmp_path):
    """An experiment with a sweep, the files of CI, budgets and a dialect; test_wheel.py has those of own.md."""
    files = {page.name: [text for kind, text in BLOCK.findall(page.read_text()) if kind == "yaml"] for page in PAGES}
    sweep, github, pages, gitlab = files.pop("race.md")
    for path, text in (("experiment/lr.yaml", sweep), ("queue/budgets.yaml", *files.pop("clusters.md"))):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    options = ("run", "-m", "experiment=lr", "--config-dir", str(tmp_path), "--dry-run")
    assert "plan  9 runs" in real_runs.bench(tmp_path, *options, code=0).stdout
    assert shares.budgets(Queue(tmp_path / "queue")).users == {"ann": shares.Limits(gpu_hours=2000.0)}
    (tmp_path / "my.yaml").write_text(*files.pop("scripts.md"))
    assert dialects.reader_of(dialects.read_yaml(str(tmp_path / "my.yaml"), "my.yaml"))
    jobs = yaml.safe_load(github)["jobs"]
    step = jobs["speed"]["steps"][1]
    assert yaml.safe_load(pages)["pages"]["needs"] in jobs
    inputs = yaml.safe_load((REPO / ".ci/action.yml").read_text())["inputs"].keys()
    template = yaml.safe_load((REPO / ".ci/gitlab.yml").read_text())
    variables = template["variables"].keys()  # a job's own would win over those of the file that includes it
    assert step["with"].keys() < inputs and yaml.safe_load(gitlab)["variables"].keys() < variables
    assert not variables & template["speedrun"]["variables"].keys()
    page = next(page for page in PAGES if page.name == "race.md").read_text()
    table = page.partition("| input on GitHub |")[2].partition("\n\n")[0]
    assert {*inputs, *variables, "SPEEDRUN_TOKEN"} - {*re.findall("`([^` ]+)`", table)} == set()
    assert [name for name, texts in files.items() if texts] == ["own.md", "ladder.md"]  # ladder.md has a head's pattern


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@github.com:owner/name.git", "https://github.com/owner/name"),
        ("https://user:secret@github.com/owner/name", "https://github.com/owner/name"),
        ("/srv/git/name", None),
    ],
)
def test_a_wheels_page_links_to_the_repository_and_never_tells_a_password(remote, address, monkeypatch):
    pytest.importorskip("hatchling")
    metadata = runpy.run_path(str(REPO / ".ci/hatch_metadata.py"))
    monkeypatch.setenv("SPEEDRUN_URL", remote)
    assert metadata["repository"](REPO) == address
    text = metadata["readme"]("![a](docs/a.png) [Start](docs/start.md) [x](https://x.org)", address)
    linked = f"![a]({address}/raw/HEAD/docs/a.png) [Start]({address}/blob/HEAD/docs/start.md)"
    assert text == f"{linked if address else ' Start (`docs/start.md`)'} [x](https://x.org)"


def glob(line):
    return re.sub(r"([\[*?])", r"[\1]", line).replace("...", "*")


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_of_the_documentation_is_understood(page, line):
    """Its verb and options are known, and the settings of a run can be composed."""
    command = re.split(r"  +(?=\S)|;|\s#|\[or", line)[0].rstrip("\\ ")
    _, verb, *arguments = shlex.split(command.partition(" -- ")[0])
    if verb in CHECKOUT_VERBS or verb.startswith("-"):
        return
    assert verb in VERBS, verb
    parser = module_of(verb)._parser()
    if verb == "data" or "--help" in arguments:
        return
    parsed = parser.parse_intermixed_args(overrides.spelled(arguments))
    if verb == "run" and not parsed.multirun and not OF_USER.search(line):
        requested_config(parsed.overrides)
