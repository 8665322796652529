"""requirements.lock against pyproject.toml, against what is installed, and against what the code imports."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parent.parent
SITE = sysconfig.get_path("purelib")  # not what some package puts on the path at run time
UNLOCKED = (
    "docs",
    "notebook",
    "tensorboard",
    "wandb",
    "mlflow",
    "search",
    "postgres",
    "submitit",
    "joblib",
    "mcp",
    "ssh",
    "s3",
)  # extras that ./run.sh leaves out
MODULES = {"hydra-core": "hydra", "PyYAML": "yaml", "nvidia-ml-py": "pynvml"}  # where the module has another name
PIN = re.compile(r"^(\S+==.*\S) \\\n(?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+    # (.*)$", re.MULTILINE)
inside_venv = pytest.mark.skipif(Path(sys.prefix) != REPO / ".venv", reason="not run by the Python of .venv")


def sections():
    """The lock's pins in its three parts: direct, needed by those, CUDA build; each "PIN  # why"."""
    text = (REPO / "requirements.lock").read_text()
    _, direct, needed, cuda = re.split("\n# (?:direct|needed by those|CUDA build).*\n", text)
    return [[f"{pin}  # {why}" for pin, why in re.findall(PIN, part)] for part in (direct, needed, cuda)]


def pins(lines):
    """Returns {name: exact version}."""
    versions = {}
    for line in lines:
        requirement = Requirement(line.split("#")[0])
        (pin,) = requirement.specifier
        assert pin.operator == "==" and "*" not in pin.version, f"{line}: not an exact version"
        assert requirement.name not in versions, f"{line}: pinned twice"
        versions[canonicalize_name(requirement.name)] = pin.version
    return versions


def declared():
    """Returns {group: requirements} of pyproject.toml; the group without which nothing runs is 'core'."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    groups = {"core": project["dependencies"]} | project["optional-dependencies"]
    return {group: [Requirement(text) for text in texts] for group, texts in groups.items()}


def test_the_direct_pins_are_the_declared_dependencies_and_inside_their_ranges():
    direct = pins(sections()[0])
    locked = [
        needed for group, needed_in_group in declared().items() if group not in UNLOCKED for needed in needed_in_group
    ]
    ranges = {canonicalize_name(needed.name): needed.specifier for needed in locked}
    assert set(direct) == set(ranges)
    for name, version in direct.items():
        assert ranges[name].contains(version), f"{name} {version} is outside {ranges[name]}"


def test_every_line_of_the_lock_is_of_an_exact_pin_with_its_hashes():
    direct, needed, cuda = sections()
    assert len(pins([*direct, *needed, *cuda])) == len(direct) + len(needed) + len(cuda)
    rest = PIN.sub("", (REPO / "requirements.lock").read_text()).splitlines()
    assert [line for line in rest if line and not line.startswith("# ")] == []


@inside_venv
def test_nothing_that_is_installed_lacks_what_it_needs():
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout  # ./run.sh installs with --no-deps


@inside_venv
def test_every_other_pin_is_needed_by_what_its_comment_says():
    for line in sections()[1]:
        pin, reason = line.split("#")
        (name,) = pins([pin])
        for user in reason.split(", and to build")[0].split(","):
            needs = map(Requirement, importlib.metadata.requires(user.strip()) or [])
            assert name in {canonicalize_name(need.name) for need in needs}, f"{user} does not need {name}"


@inside_venv
def test_the_environment_holds_the_pins_and_nothing_else():
    installed = {
        canonicalize_name(package.name): package.version for package in importlib.metadata.distributions(path=[SITE])
    }
    build = importlib.metadata.version("torch").partition("+")[2]  # "cpu", or nothing: the registry's CUDA build
    installed["torch"] = importlib.metadata.version("torch").partition("+")[0]
    del installed["pip"]
    direct, needed, cuda = sections()
    cuda_lines = [] if build == "cpu" or sys.platform != "linux" else cuda
    assert installed == pins([*direct, *needed, *cuda_lines])


def test_the_code_imports_only_what_is_declared():
    modules = {group: {module(need.name) for need in found_in_group} for group, found_in_group in declared().items()}
    program = {"bench", "models"}.union(
        sys.stdlib_module_names, *(modules[group] for group in modules if group != "test")
    )
    program |= {"tiktoken_ext", "triton", "fsspec"}  # they come with tiktoken, with torch's builds for GPUs, with torch
    for path in [*REPO.glob("bench/**/*.py"), *REPO.glob("models/**/*.py")]:
        assert imported(path) <= program, path
    helpers = {
        "benchmarks",
        "planted",
        "stand_in",
        *(path.stem for place in ("tests", "tests/stand_in") for path in REPO.glob(f"{place}/*.py")),
    }
    for path in {*REPO.glob("tests/**/*.py")} - {
        *REPO.glob("tests/planted/scripts/**/*.py")
    }:  # those are scripts of users
        assert imported(path) <= program.union(helpers, modules["test"], {"packaging"}), path  # pytest needs packaging


def module(name):
    return MODULES.get(name, name.replace("-", "_"))


def imported(path):
    """Top-level names of all modules that a file imports, inside functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names
