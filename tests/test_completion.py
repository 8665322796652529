"""Completion, asked of a real bash, zsh and fish as their Tab keys do, and what ./run.sh says of itself."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from bench import __version__
from bench.cli import completion
from bench.cli import main as main_module
from bench.cli.main import VERBS
from bench.config import groups

REPO = Path(__file__).resolve().parent.parent
ENV = os.environ | {"SPEEDRUN_PYTHON": sys.executable}
TAB = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2}
_speedrun "$3"
printf '%s\\n' "${COMPREPLY[@]}"
"""
COMMAND = f'#!/bin/sh\nexec {sys.executable} -m bench "$@"\n'


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    """What a real bash offers for a line, in a results folder with one run and one race."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "results/free/20261124T001015Z-gpt2-adamw-5e00e291-s0").mkdir(parents=True)
    (folder / "results/races/20261124T000501Z-race-82a31f89").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-m", "bench", "completion", "bash"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "run.bash").write_text(done.stdout)
    (folder / "run.sh").write_text(COMMAND)
    (folder / "run.sh").chmod(0o755)
    env = os.environ | {"SPEEDRUN_RESULTS": str(folder / "results")}

    def offered(line):
        command = ["bash", "-c", TAB, "tab", folder / "run.bash", line, folder / "run.sh"]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0 and "not found" not in done.stderr, done.stderr
        return set(done.stdout.split())

    return offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("run.sh ra", {"race"}),
        ("run.sh compare --dif", {"--diff"}),
        ("run.sh run model=", {"gpt2", "modern"}),
        ("run.sh run seed=1 optim=m", {"muon"}),
        ("run.sh run track=cpu", {"cpu_nano", "cpu_floor"}),
        ("run.sh run optim.l", {"optim.lr="}),
        ("run.sh run hardware.dtype=", {"float32", "bfloat16", "null"}),
        ("run.sh run hardware.compile=t", {"true"}),
        ("run.sh race A= B=optim=m", {"muon"}),
        ("run.sh race A= B=optim.muon_m", {"optim.muon_momentum="}),
        ("run.sh explain 2026", {"20261124T001015Z-gpt2-adamw-5e00e291-s0", "20261124T000501Z-race-82a31f89"}),
        ("run.sh export --to m", {"mllog", "modded-nanogpt"}),
        ("run.sh data ma", {"make"}),
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_tab_offers_what_fits(tab, line, offered):
    word = line.rpartition(" ")[2]
    if word.count("=") == 1 and word[0].isupper():
        word = word.partition("=")[2]
    offers = tab(line)
    assert offered <= offers
    assert all(name.startswith(word.rpartition("=")[2]) for name in offers)


@pytest.mark.parametrize("line", ["run.sh explain nothing-such", "run.sh nonsense x", "run.sh run seed="])
def test_tab_offers_nothing_where_nothing_fits(tab, line):
    assert tab(line) == set()


def test_a_name_that_a_shell_would_run_is_not_offered(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "choices", lambda group: ["zz-plain", "zz$(touch pwned)", "zz;ls", "zz`ls`"])
    assert completion.candidates("run.sh run experiment=zz") == ["experiment=zz-plain"]
    (tmp_path / "20261124T001015Z-$(touch pwned)").mkdir()
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path))
    assert completion.candidates("run.sh explain 2026") == []


ZSH = """zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z 'PS1=; autoload -Uz compinit; compinit -u -D; source {script}; cd {repo}; echo rea''dy'
zpty -r -m z out '*ready*'
zpty -w -n z $'{line}\\t'
zpty -r -m z out '*{whole}*' && print -r -- "{whole}"
zpty -d z
"""


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_offers_what_fits_and_files_where_nothing_does(tmp_path, capsys):
    script = script_of("fish", tmp_path, capsys)
    lines = {
        "./run.sh hist": ["history"],
        "./run.sh run model=gp": ["model=gpt2"],
        "./run.sh verify READ": ["README.md"],
    }
    commands = "; ".join(f"complete -C '{line}'; echo ." for line in lines)
    done = subprocess.run(
        ["fish", "-c", f"source {script}; {commands}"], cwd=REPO, env=ENV, capture_output=True, text=True
    )
    assert done.stderr == "" and [part.split() for part in done.stdout.split("\n.\n")[:-1]] == [*lines.values()]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(("line", "whole"), [("./run.sh hist", "history"), ("./run.sh run model=gp", "model=gpt2")])
def test_zsh_completes_a_line_at_tab(line, whole, tmp_path, capsys):
    script = script_of("zsh", tmp_path, capsys)
    (tmp_path / "try.zsh").write_text(ZSH.format(script=script, repo=REPO, line=line, whole=whole))
    command = ["timeout", "60", "zsh", "-f", str(tmp_path / "try.zsh")]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True)
    assert done.stdout.split() == [whole], done.stderr


def script_of(shell, folder, capsys):
    """A file with the completion of a shell."""
    assert completion.main([shell]) == 0
    (folder / "completion").write_text(capsys.readouterr().out)
    return folder / "completion"


def test_every_verb_is_completed_and_completes_its_options(tab):
    assert set(VERBS) <= tab("run.sh ")
    for verb in VERBS:
        assert "--help" in completion.candidates(f"run.sh {verb} --")


@pytest.mark.parametrize("option", ["--version", "-V", "version"])
def test_the_version_says_what_decides_how_it_runs(option, printed):
    output = printed(main_module, option)
    assert output.startswith(f"speedrun {__version__}") and output.endswith(f"torch {metadata.version('torch')}\n")
