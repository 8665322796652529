"""The architecture is this table: which room may import which, and which may load torch.

Read from the sources, imports inside functions included, so that nothing hides.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
LAZY = "lazily: only inside a function that a worker calls"

# room of bench/: (our rooms it may import, whether it may import torch)
TABLE = {
    "units": ((), False),
    "config": ((), False),
    "stats": ((), False),
    "hardware": ((), False),
    "shards": ((), False),
    "clock": ((), False),
    "loop": ((), False),
    "watchdog": ((), False),
    "timers": ((), LAZY),
    "evaluate": ((), True),
    "distributed": ((), True),
    "sources": (("shards", "config", "units"), False),
    "loader": (("shards",), True),
    "atomic": (("units",), False),
    "private": ((), False),
    "steps": (("atomic",), False),
    "record": (("atomic", "private"), False),
    "gpus": (("private", "units"), False),
    "codestate": (("atomic", "units"), False),
    "metrics": (("hardware", "stats", "units"), False),
    "environment": (("gpus", "private", "record", "units"), LAZY),
    "preflight": (("environment", "units"), False),
    "compose": (("config",), False),
    "instruments": (("units",), True),
    "steplog": ((), True),
    "scribe": (("atomic", "record", "steps"), False),
    "failures": (("atomic", "private", "record"), False),
    "verdict": (("stats", "sources"), False),
    "progress": (("record",), False),
    "trainer": (("config", "distributed", "evaluate", "loader"), True),
    "result": (("atomic", "environment", "record", "steps"), False),
    "agent": ((), True),
    "worker": (
        (
            "atomic", "clock", "config", "distributed", "environment", "failures", "hardware", "instruments", "loop",
            "progress", "record", "result", "scribe", "shards", "sources", "steplog", "timers", "trainer", "units", "watchdog",
        ),
        LAZY,
    ),
    "launch": (
        (
            "atomic", "clock", "codestate", "compose", "config", "environment", "failures", "gpus", "metrics", "private",
            "progress", "record", "sources", "steps", "verdict", "watchdog",
        ),
        False,
    ),
    "grid": ((), False),
    "rows": ((), False),
    "index": (("atomic", "record", "rows"), False),
    "table": (("grid", "index", "record", "rows", "units", "stats"), False),
    "report": (("atomic", "record", "stats", "steps", "table", "units"), False),
    "verify": (("config", "metrics", "private", "record", "steps", "verdict"), False),
    "run": (("codestate", "compose", "config", "environment", "gpus", "launch", "progress", "record"), False),
    "speedrun": (("environment", "launch", "preflight", "progress", "record", "table", "units", "verdict"), False),
    "data_cli": (("config", "shards", "sources", "units"), False),
    "bench_self": (
        (
            "clock", "distributed", "gpus", "hardware", "instruments", "launch", "loader", "loop", "shards", "steplog",
            "timers", "trainer",
        ),
        LAZY,
    ),
    "__init__": ((), False),
    "__main__": ((), False),
}


def rooms():
    found = {}
    for path in sorted((REPO / "bench").rglob("*.py")):
        parts = path.relative_to(REPO / "bench").with_suffix("").parts
        found.setdefault(parts[0], []).append(path)
    return found


def imports(path, lazily_too=True):
    """Dotted names that a file imports."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if lazily_too else _outside_functions(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _outside_functions(tree):
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            todo.extend(ast.iter_child_nodes(node))


def test_every_room_is_in_the_table_and_every_row_has_a_room():
    assert set(rooms()) == set(TABLE)


@pytest.mark.parametrize("room", sorted(TABLE))
def test_a_room_imports_only_what_the_table_allows(room):
    allowed, torch_allowed = TABLE[room]
    for path in rooms()[room]:
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("bench.") and name.split(".")[1] in TABLE}
        assert ours - {room} <= set(allowed), path
        assert torch_allowed or not any(name.split(".")[0] == "torch" for name in imports(path)), path
        if torch_allowed == LAZY:
            assert not any(name.split(".")[0] == "torch" for name in imports(path, lazily_too=False)), path


def test_imports_point_one_way():
    """The table has no circle."""
    done, todo = set(), dict(TABLE)
    while todo:
        free = [room for room, (allowed, _) in todo.items() if set(allowed) <= done]
        assert free, f"a circle among {sorted(todo)}"
        done.update(free)
        for room in free:
            del todo[room]


def test_models_know_nothing_of_the_harness():
    for path in (REPO / "models").rglob("*.py"):
        assert not any(name.split(".")[0] == "bench" for name in imports(path)), path


def test_only_compose_knows_hydra():
    for path in (REPO / "bench").rglob("*.py"):
        knows = any(name.split(".")[0] in ("hydra", "omegaconf") for name in imports(path) if name)
        assert not knows or path.name == "compose.py", path


@pytest.mark.parametrize("verb", [["--help"], ["table", "--help"], ["run", "--help"], ["run", "--cfg", "job"]])
def test_answers_without_importing_torch(verb):
    """-X importtime lists every import; torch is not among them."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "bench", *verb], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert not any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())
