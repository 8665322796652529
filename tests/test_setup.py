"""The set-up of ./run.sh, played with a Python and a pip that only pretend."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import real_runs

REPO = Path(__file__).resolve().parent.parent
TOOLS = "bash awk basename cat cksum cp cut df dirname env find grep head mkdir mv readlink rm sed sleep tail touch"

# A Python for the tests.  Questions (-c) are answered by the real one, after FAKE_HEAD set what it believes; what
# it is asked to install or to run is only written down.
PYTHON = r"""#!/usr/bin/env bash
echo "$(basename "$0") ${*%%$'\n'*}" >>"$CALLS"
case "$*" in
    "-c "*)
        code=$2 && shift 2
        head="import sys; sys.modules['pip'] = sys.modules['ensurepip'] = sys"
        case "$0" in *.venv/*) head="$head; sys.prefix = '/venv'" ;; *) head="$head"$'\n'"${FAKE_HEAD:-}" ;; esac
        exec "$REAL_PYTHON" -c "$head"$'\n'"$code" "$@" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install "*) echo "pip says hello"; eval "${FAKE_PIP:-}" ;;
    "-m bench"*) echo "cwd=$PWD asked=$SPEEDRUN_CWD utf8=$PYTHONUTF8 words=${*:3}" ;;
    "-m pytest"*) echo "tests ${*:3}" ;;
esac
"""


class Checkout:
    """A folder with run.sh in it, and nothing on the PATH but the tools of a bare system and the pretended python3."""

    def __init__(self, folder):
        self.repo, self.bin, self.calls = folder / "a check out", folder / "bin", folder / "calls"
        for name in ("run.sh", "speedrun.sh", "pyproject.toml", "requirements.lock"):
            self.repo.mkdir(exist_ok=True)
            shutil.copy(REPO / name, self.repo / name)
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.script("python3", PYTHON)
        self.script("uname", "#!/usr/bin/env bash\necho Linux\n")
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "CALLS": str(self.calls),
            "REAL_PYTHON": sys.executable,
            "SPEEDRUN_TORCH": "cpu",
        }

    def script(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *arguments, script="run.sh", cwd=None, **env):
        return subprocess.Popen(
            [self.repo / script, *arguments],
            cwd=cwd or self.repo,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments, **options):
        process = self.start(*arguments, **options)
        process.out, process.err = process.communicate(timeout=60)
        return process

    def installs(self):
        """Of all pins; what builds two of them is installed before, by a call of its own."""
        return [line for line in self.calls.read_text().splitlines() if "-r .venv/pins.txt" in line]

    def pins(self):
        return (self.repo / ".venv/pins.txt").read_text()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def one_sentence(process):
    """The last line of what a refused set-up said, the only one that does not quote pip."""
    assert process.returncode == 2
    assert "Traceback" not in process.err
    *before, last = process.err.splitlines()
    assert last.startswith("set-up: ") and last.endswith(".")
    return last


def test_the_first_run_installs_the_second_does_not(checkout):
    first = checkout.run("table", "--json")
    assert first.returncode == 0, first.err
    assert "words=table --json" in first.out
    assert "about a minute" in first.err
    (install,) = checkout.installs()
    assert "--require-hashes --no-deps --no-build-isolation -r .venv/pins.txt" in install
    assert checkout.calls.read_text().index("-r .venv/build-pins.txt") < checkout.calls.read_text().index(install)
    assert re.fullmatch(
        r"setuptools==\S+ \\\n +--hash=sha256:\w+\n", (checkout.repo / ".venv/build-pins.txt").read_text()
    )
    assert checkout.pins().startswith("#") and "\ntorch==2.13.0+cpu \\\n    --hash=sha256:" in checkout.pins()
    assert "nvidia-cublas" not in checkout.pins()

    calls = checkout.calls.read_text()
    second = checkout.run("table", "--json")
    assert (second.returncode, second.err) == (0, "")
    assert checkout.calls.read_text() == calls + "python -m bench table --json\n"  # no other Python was started


def test_installs_again_when_the_pins_change(checkout):
    checkout.run()
    with open(checkout.repo / "requirements.lock", "a") as file:
        file.write("another==1.0\n")
    assert "updating .venv" in checkout.run().err
    assert checkout.run().err == ""
    assert len(checkout.installs()) == 2
    assert checkout.calls.read_text().count("-m venv") == 1  # into the same .venv


def test_a_cuda_machine_gets_the_cuda_build_with_its_pins(checkout):
    checkout.run()
    (checkout.bin / "nvidia-smi").symlink_to(shutil.which("true"))
    del checkout.env["SPEEDRUN_TORCH"]
    shutil.rmtree(checkout.repo / ".venv")
    assert "CUDA build" in checkout.run().err
    assert checkout.run().err == ""
    assert len(checkout.installs()) == 2
    # not the CPU build that may be there already, whose version 2.13.0+cpu also answers to ==2.13.0
    assert "\ntorch===2.13.0 \\\n" in checkout.pins() and "\nnvidia-cublas==" in checkout.pins()


def test_another_build_of_torch_is_asked_for_by_name(checkout):
    checkout.run()
    assert "CUDA build" in checkout.run(SPEEDRUN_TORCH="cuda").err
    assert checkout.run(SPEEDRUN_TORCH="cuda").err == ""


def test_looks_for_the_cpu_build_elsewhere_and_then_takes_the_other(checkout):
    lacks = 'echo "ERROR: ... requirement torch==2.13.0+cpu (from versions: 2.12.0, 2.13.0)"; exit 1'
    checkout.env["FAKE_PIP"] = f'case "$*" in *extra-index-url* | *build-pins*) exit 0 ;; esac; {lacks}'
    assert checkout.run(SPEEDRUN_TORCH_INDEX="https://example.org/whl").returncode == 0
    assert checkout.installs()[1].count("--extra-index-url https://example.org/whl") == 1

    shutil.rmtree(checkout.repo / ".venv")
    del checkout.env["SPEEDRUN_TORCH"]
    checkout.env["FAKE_PIP"] = f"grep -q '^torch===' .venv/pins.txt && exit 0; {lacks}"
    assert "taking the CUDA build" in checkout.run().err
    assert checkout.run().err == ""


@pytest.mark.parametrize(
    "pip_says, sentence",
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full: free 3 GiB"),
        ("WARNING: NewConnectionError\nERROR: No matching distribution found for torch", "index cannot be reached"),
        ("ERROR: No matching distribution found for tqdm==9", "no matching distribution found for tqdm==9, on"),
        ("ERROR: something new", "pip failed: its last lines are above"),
    ],
)
def test_a_failing_pip_ends_in_one_sentence_and_is_asked_again(checkout, pip_says, sentence):
    failed = checkout.run(FAKE_PIP=f"echo '{pip_says}'; exit 1")
    assert sentence in one_sentence(failed)
    assert pip_says.splitlines()[-1] in failed.err
    assert not (checkout.repo / ".venv/stamp").exists()
    assert "completing .venv" in checkout.run().err
    assert len(checkout.installs()) == 1  # the first try ended before


def test_a_killed_set_up_is_made_anew(checkout):
    process = checkout.start(FAKE_PIP="touch .venv/half-a-package; sleep 60")
    real_runs.wait_for(lambda: (checkout.repo / ".venv/half-a-package").exists())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert "making .venv" in checkout.run().err
    assert not (checkout.repo / ".venv/half-a-package").exists()
    assert checkout.run().err == ""


def test_two_at_once_install_once(checkout):
    first = checkout.start("table", FAKE_PIP="touch .venv/busy; while [ ! -e .venv/go ]; do sleep 0.02; done")
    real_runs.wait_for(lambda: (checkout.repo / ".venv/busy").exists())
    second = checkout.start("verify")
    waits = second.stderr.readline()
    (checkout.repo / ".venv/go").touch()
    assert "waiting for another set-up" in waits
    assert "words=table" in first.communicate(timeout=60)[0]
    assert "words=verify" in second.communicate(timeout=60)[0]
    assert len(checkout.installs()) == 1


def no_python(checkout):
    (checkout.bin / "python3").unlink()


def full_disk(checkout):
    (checkout.bin / "df").unlink()
    checkout.script("df", "#!/usr/bin/env bash\necho head; echo /dev/x 9999999 0 1048576 99% /\n")  # in KiB


OLD = "import sys; sys.version_info = (3, 10, 13)\n"


@pytest.mark.parametrize(
    ("prepare", "env", "sentence"),
    [
        (None, {"FAKE_HEAD": OLD}, "needs Python 3.11, 3.12 or 3.13.*but python3 is Python 3.10.13"),
        (None, {"FAKE_HEAD": OLD.replace("10, 13", "14, 0")}, "but python3 is Python 3.14.0"),
        (None, {"FAKE_HEAD": "import sys; sys.modules['ensurepip'] = None\n"}, "without ensurepip.*python3-venv"),
        (no_python, {}, "there is none"),
        (None, {"SPEEDRUN_BOOTSTRAP_PYTHON": "/no/python"}, "/no/python does not run"),
        (full_disk, {}, "1024 MiB are free"),
        (None, {"SPEEDRUN_TORCH": "gpu"}, "say cpu or cuda"),
        (None, {"SPEEDRUN_PYTHON": "python3", "FAKE_HEAD": OLD}, "is Python 3.10;"),
        (None, {"SPEEDRUN_PYTHON": "./nope"}, "no such program"),
    ],
)
def test_what_cannot_be_set_up_gets_one_sentence(checkout, prepare, env, sentence):
    if prepare:
        prepare(checkout)
    assert re.search(sentence, one_sentence(checkout.run(**env)))
    assert not (checkout.repo / ".venv/bin").exists()


def test_another_python_that_fits_is_found(checkout):
    checkout.script("python3.12", PYTHON)
    checkout.script("python3", "#!/usr/bin/env bash\necho Python 3.10.13\n")
    assert checkout.run().returncode == 0
    assert "python3.12 -m venv .venv" in checkout.calls.read_text()


def test_runs_from_any_folder_and_says_which(checkout, tmp_path):
    done = checkout.run("run", "seed=1", script="speedrun.sh", cwd=tmp_path)
    assert done.out == f"cwd={checkout.repo} asked={tmp_path} utf8=1 words=speedrun run seed=1\n"
    tests = checkout.run("test", "-k", "a or b", cwd=tmp_path)
    assert tests.out == "tests -n auto --dist loadfile -k a or b\n"


def test_a_link_to_it_works_from_anywhere_and_builds_no_second_environment(checkout, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    for name in ("run.sh", "speedrun.sh"):
        (links / name).symlink_to(os.path.relpath(checkout.repo / name, links))  # relative, as `ln -s` writes it
        done = checkout.run("seed=1", script=links / name, cwd=links)
        verb = "speedrun " if name == "speedrun.sh" else ""
        assert done.out == f"cwd={checkout.repo} asked={links} utf8=1 words={verb}seed=1\n", done.err
    assert sorted(path.name for path in links.iterdir()) == ["run.sh", "speedrun.sh"]


def believing(checkout, **fakes):
    """FAKE_HEAD for a Python in which the pinned versions seem installed, but for fakes: name -> version, or None."""
    installed = dict(re.findall(r"^([\w.-]+)==(\S+)", (REPO / "requirements.lock").read_text(), re.MULTILINE)) | fakes
    (checkout.repo / "installed.json").write_text(json.dumps(installed))
    return """import importlib.metadata, json
def version(name, installed=json.load(open("installed.json"))):
    if installed[name] is None:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed[name]
importlib.metadata.version = version
"""


def test_somebody_elses_environment_is_used_as_it_is(checkout):
    checkout.env |= {"SPEEDRUN_PYTHON": "python3", "FAKE_HEAD": believing(checkout, torch="2.11.0a0+git1")}
    done = checkout.run("run")
    assert (done.returncode, done.err) == (0, "")
    assert checkout.run("test").out == "tests -n auto --dist loadfile\n"
    assert not (checkout.repo / ".venv").exists() and checkout.installs() == []


def test_somebody_elses_environment_that_lacks_something_gets_one_sentence(checkout):
    checkout.env |= {"SPEEDRUN_PYTHON": "python3"}
    fakes = {"torch": "2.10.0+cu130", "hydra-core": "1.4.0", "psutil": None, "pytest": None}
    checkout.env["FAKE_HEAD"] = believing(checkout, **fakes)
    refused = checkout.run("run")
    assert refused.returncode == 2
    assert refused.err == (
        "set-up: SPEEDRUN_PYTHON=python3 has torch 2.10.0+cu130, hydra-core 1.4.0, no psutil; try: "
        "python3 -m pip install 'torch>=2.11,<2.16' 'hydra-core>=1.3.2,<1.4' 'psutil>=5.9'\n"
    )
    assert "no pytest" in checkout.run("test").err
