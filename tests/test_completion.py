"""Completion, asked of a real bash as its Tab key does, and what ./run.sh says of itself."""

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
read -ra COMP_WORDS <<<"${2//=/ = }"  # as bash splits it: a word ends at =
[[ $2 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_shtab_run_sh
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "run.bash"
    done = subprocess.run([sys.executable, "-m", "bench", "completion", "bash"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("run.sh ra", {"race"}),
        ("run.sh compare --dif", {"--diff"}),
        ("run.sh run model=", {"gpt2", "modern"}),
        ("run.sh run seed=1 optim=m", {"muon"}),
        ("run.sh run track=cpu", {"cpu_nano", "cpu_floor"}),
        ("run.sh export --to m", {"mllog", "modded-nanogpt"}),
        ("run.sh data ma", {"make"}),
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_tab_offers_what_fits(script, line, offered):
    done = subprocess.run(["bash", "-c", TAB, "tab", script, line], capture_output=True, text=True)
    assert offered <= set(done.stdout.split()), done.stderr
    assert all(word.startswith(line.rpartition(" ")[2].rpartition("=")[2]) for word in done.stdout.split())


def test_zsh_gets_a_script_of_its_own(capsys):
    assert completion.main(["zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef run.sh") and "model=modern" in text


def test_every_verb_is_completed(script):
    done = subprocess.run(["bash", "-c", TAB, "tab", script, "run.sh "], capture_output=True, text=True)
    assert set(VERBS) <= set(done.stdout.split())


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_version_says_what_decides_how_it_runs(word, capsys):
    assert main_module.main([word]) == 0
    words = capsys.readouterr().out
    assert words.startswith(f"speedrun {__version__}") and words.endswith(f"torch {metadata.version('torch')}\n")
