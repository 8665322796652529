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
    "places": ((), False),
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
    "sources": (("shards", "config", "units", "places"), False),
    "loader": (("shards",), True),
    "atomic": (("units",), False),
    "ledger": (("atomic",), False),
    "private": ((), False),
    "steps": (("atomic",), False),
    "record": (("atomic", "private", "places"), False),
    "gpus": (("private", "units"), False),
    "codestate": (("atomic", "units"), False),
    "metrics": (("hardware", "stats", "units"), False),
    "environment": (("gpus", "private", "record", "units"), LAZY),
    "preflight": (("environment", "units"), False),
    "collector": ((), False),
    "peaks": (("environment", "units"), LAZY),
    "memory_recording": (("private",), LAZY),
    "memory_monitor": (("memory_recording", "peaks", "units"), LAZY),
    "memory_rules": ((), False),
    "dashboards": (("atomic", "private", "record", "steps"), False),
    "web": ((), False),
    "snapshot": (("atomic", "record", "units", "web", "places"), False),
    "flight": ((), LAZY),
    "skew": (("stats",), False),
    "stalls": ((), False),
    "causes": (("skew", "stalls"), False),
    "costs": (("causes", "skew", "stalls", "steps"), False),
    "probe": (("distributed", "environment", "failures", "flight", "units"), LAZY),
    "doctor": (
        ("compose", "config", "environment", "flight", "gpus", "preflight", "resolve", "record", "units", "watchdog"),
        False,
    ),
    "trace": ((), False),
    "profiling_rules": ((), False),
    "compose": (("config", "memory_rules", "profiling_rules"), False),
    "profiling": (("hardware", "profiling_rules", "trace", "units"), True),
    "telemetry": (("gpus", "units", "watchdog"), False),
    "instruments": (
        ("dashboards", "memory_recording", "memory_rules", "peaks", "private", "profiling", "profiling_rules", "telemetry", "units"),
        True,
    ),
    "steplog": ((), True),
    "scribe": (("atomic", "record", "steps"), False),
    "failures": (("atomic", "private", "record", "steps"), False),
    "verdict": (("stats", "sources"), False),
    "progress": (("record",), False),
    "trainer": (("config", "distributed", "evaluate", "loader"), True),
    "result": (("atomic", "environment", "record", "steps"), False),
    "agent": ((), True),
    "worker": (
        (
            "atomic", "clock", "collector", "config", "distributed", "environment", "failures", "flight", "hardware", "instruments", "loop", "peaks",
            "progress", "record", "result", "scribe", "shards", "sources", "steplog", "steps", "timers", "trainer", "units", "watchdog",
        ),
        LAZY,
    ),
    "resolve": (("config",), False),
    "job": (("compose", "config", "environment", "gpus", "places", "private", "profiling_rules", "resolve", "sources"), False),
    "opening": (
        ("atomic", "clock", "codestate", "collector", "config", "environment", "ledger", "private", "record", "sources", "steps"),
        False,
    ),
    "launch": (
        (
            "atomic", "costs", "dashboards", "environment", "failures", "flight", "ledger", "metrics", "opening", "preflight", "private",
            "progress", "record", "steps", "verdict", "watchdog",
        ),
        False,
    ),
    "grid": ((), False),
    "rows": ((), False),
    "index": (("atomic", "record", "rows"), False),
    "comparable": (("stats",), False),
    "effects": (("stats",), False),
    "differences": ((), False),
    "code_change": (("codestate",), False),
    "comparison": (("comparable", "differences", "effects", "grid", "rows", "stats"), False),
    "calibration": (("comparison", "record", "stats"), False),
    "diagnosis": (("stalls", "stats"), False),
    "arms": (("comparable", "importers", "index", "record", "rows", "places"), False),
    "diagnosis_text": (("grid",), False),
    "compare_text": (("diagnosis_text", "grid"), False),
    "compare_csv": (("compare_text",), False),
    "trace_change": (("trace",), False),
    "compare": (
        ("arms", "calibration", "code_change", "compare_csv", "compare_text", "comparison", "diagnosis", "differences", "steps", "trace_change"),
        False,
    ),
    "calibrate": (("arms", "atomic", "calibration", "grid", "job", "launch", "progress", "record", "rows"), False),
    "plan": ((), False),
    "worktrees": ((), False),
    "racers": (("codestate", "environment", "job", "launch", "places", "record", "sources", "watchdog"), False),
    "race_request": (("plan",), False),
    "race_state": (("ledger", "plan", "record"), False),
    "race_plan": (("atomic", "codestate", "ledger", "plan", "race_state", "racers", "worktrees"), False),
    "race_report": (("atomic", "compare_text", "grid", "report"), False),
    "race": (
        (
            "arms", "atomic", "codestate", "compare", "ledger", "plan", "progress", "race_plan", "race_report", "race_request",
            "race_state", "racers", "record", "worktrees",
        ),
        False,
    ),
    "claims": (("compose", "config", "ledger", "race_state", "record"), False),
    "rules": (("arms", "compare", "compose", "config", "integrity", "ledger", "plan", "verdict"), False),
    "generated": (("atomic", "record"), False),
    "publication": (("generated", "integrity", "ledger", "private", "race_state", "record"), False),
    "claim_folder": (("claims", "generated", "grid", "publication", "record", "rows", "stats"), False),
    "publish": (("claim_folder", "generated", "progress", "publication", "record", "table"), False),
    "judge": (("claim_folder", "claims", "grid", "ledger", "race_state", "record", "rules"), False),
    "leaderboard": (("claims", "grid", "index", "ledger", "record", "rules", "stats"), False),
    "choosing": (("rows",), False),
    "table_text": (("grid",), False),
    "table": (("choosing", "comparable", "generated", "index", "leaderboard", "record", "stats", "table_text"), False),
    "importers": (("metrics", "record", "units"), False),
    "import_cli": (("atomic", "importers", "record", "steps", "places"), False),
    "export": (("atomic", "record", "steps", "table", "places"), False),
    "analyze_text": ((), False),
    "analyze": (("analyze_text", "atomic", "hardware", "record", "trace", "places"), False),
    "report": (("atomic", "diagnosis_text", "record", "snapshot", "stats", "steps", "table", "units", "web", "places"), False),
    "integrity": (("config", "metrics", "private", "record", "steps", "verdict"), False),
    "verify": (("integrity", "record"), False),
    "run": (("codestate", "compose", "config", "environment", "gpus", "job", "launch", "progress", "record"), False),
    "speedrun": (("compose", "environment", "job", "launch", "preflight", "progress", "record", "rows", "table_text", "units", "verdict"), False),
    "data_cli": (("config", "shards", "sources", "units", "places"), False),
    "bench_results": (("index",), False),
    "bench_trace": (("trace", "units"), False),
    "bench_import": (("importers",), False),
    "bench_telemetry": (("gpus",), False),
    "bench_loop": (
        ("clock", "distributed", "gpus", "hardware", "instruments", "job", "loop", "shards", "stats", "steplog", "timers", "trainer"),
        LAZY,
    ),
    "bench_self": (
        ("bench_import", "bench_loop", "bench_results", "bench_telemetry", "bench_trace", "loader", "shards"),
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


@pytest.mark.parametrize("verb", [["--help"], ["table", "--help"], ["run", "--help"], ["run", "--cfg", "job"], ["compare", "--help"], ["calibrate", "--help"]])
def test_answers_without_importing_torch(verb):
    """-X importtime lists every import; torch is not among them."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "bench", *verb], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert not any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())
