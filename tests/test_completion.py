"""Completion, asked of a real bash as its Tab key does, and what ./run.sh says of itself."""

import os
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from bench import __version__
from bench.cli import completion
from bench.cli import main as main_module
from bench.cli.main import VERBS

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
    found = tab(line)
    assert offered <= found
    assert all(name.startswith(word.rpartition("=")[2]) for name in found)


@pytest.mark.parametrize("line", ["run.sh explain nothing-such", "run.sh nonsense x", "run.sh run seed="])
def test_tab_offers_nothing_where_nothing_fits(tab, line):
    assert tab(line) == set()


@pytest.mark.parametrize(("shell", "begin"), [("zsh", "#compdef run.sh"), ("fish", "for name in run.sh")])
def test_other_shells_get_a_script_that_asks_the_program(shell, begin, capsys):
    assert completion.main([shell]) == 0
    text = capsys.readouterr().out
    assert text.startswith(begin) and "completion --line" in text


def test_every_verb_is_completed(tab):
    assert set(VERBS) <= tab("run.sh ")


def test_every_verb_completes_its_options():
    for verb in VERBS:
        assert "--help" in completion.candidates(f"run.sh {verb} --")


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_says_what_decides_how_it_runs(word, capsys):
    assert main_module.main([word]) == 0
    words = capsys.readouterr().out
    assert words.startswith(f"speedrun {__version__}") and words.endswith(f"torch {metadata.version('torch')}\n")
