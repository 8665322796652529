"""The identity of the code: what is raced changes it, everything else does not, and it cannot be used to drop runs."""

import ast
import hashlib
import shutil
from types import SimpleNamespace

import claimed
import pytest
from claimed import results  # noqa: F401  a fixture

from bench.api import judging
from bench.base.paths import REPO
from bench.claims.rules import rulebook
from bench.claims.rules import runs as run_rules
from bench.cli import race
from bench.compare import comparison, eligibility
from bench.launch import prepare
from bench.machine import code_copy, code_state
from bench.plans.race import arm_process
from bench.plans.sweep import points
from bench.record import ledger, run_folder
from bench.record.rows import row_of

# Rooms and files that a rank imports, though no change of them changes a run -> why.
NOT_RACED = {
    "bench/base/atomic.py": "writes records",
    "bench/base/reading": "refuses damaged files; what it lets through is as it was",
    "bench/record/validity.py": "rules on finished records",
    "bench/record/outside_clock.py": "names the edges that the launcher stamps, and rules on them",
    "bench/record/shape.py": "the types of a record's fields",
    "bench/base/utc.py": "writes times of day",
    "bench/record/run_folder.py": "writes and reads records, lists and removes their files",
    "bench/record/failures.py": "records how a rank failed",
    "bench/base/private.py": "hides private words in records",
    "bench/base/credentials.py": "hides credentials in records",
    "bench/base/paths.py": "finds folders",
    "bench/machine/code_copy.py": "copies what is run, and hashes it at the end",
    "bench/machine/signals.py": "how a launcher is interrupted",
    "bench/machine/sandbox.py": "confines a script; whether one is confined is a setting of its config",
    "bench/machine/namespaces.py": "the sandbox where bubblewrap is not installed",
    "bench/machine/leases.py": "which of several runs waits for a GPU, before its ranks start",
    "bench/machine/peak_rates.py": "data sheets, for the MFU that is shown",
    "bench/record/metrics.py": "derives numbers of a record, also for the line that a person sees of a run",
    "bench/base/stats.py": "counts with records",
    "bench/analysis/trace": "reads traces after the run",
    "bench/web": "pages of what was recorded",
    "bench/base/escape.py": "how foreign text is shown",
    "bench/base/text_table.py": "how tables are shown",
}
SAMPLE = b'''"""Doc."""
import os, sys as s
async def f(a, /, b: int = 1, *c, d=None, **e) -> "x":
    """Doc."""
    async with a as (p, q), b: yield {**a, "k": [*c, 1.5e300, 2j, ..., b"\\xff", True, None]}
class A(B, metaclass=M):
    'Doc.'
    x: list[int] = [lambda y: y @ -1, "\xc3\xa9" u"\xe2\x98\x83"]
try:
    match s:
        case {"a": 1, **r} | [1, *_] if (n := 2): pass
except* E as e: raise X from e
f"{{a}}{b!r:>{w}}{c = }{d:}" 'e' f"{g:%Y-%m}{{" "\\d"
'''


@pytest.fixture
def code(tmp_path):
    """A copy of bench/ and models/ that may be edited."""
    for name in ("bench", "models"):
        shutil.copytree(REPO / name, tmp_path / "code" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "code"


def with_code(code):
    """A change(run) that makes it a record of the code in this folder, which is in no repository."""
    facts = {name: value for name, value in code_state.state(code).items() if value is not None}
    return lambda run: run["code"].update(facts)


def add(results, code, seed, **options):
    """Adds a run of the code in this folder -> its folder."""
    return results.add(seed, change=with_code(code), **options)


def three(results, code):
    """Adds three runs that reach the target, with seeds that nothing else here has."""
    return [add(results, code, seed, val_loss=2.74 + 0.01 * seed) for seed in range(5, 8)]


def comment(code, name="bench/report/run_page.py"):
    path = code / name
    path.write_text(path.read_text().replace("\n\n\n", "\n\n\n# a better word\n", 1))


def statement(code, name="models/schedules/cosine.py"):
    path = code / name
    path.write_text(path.read_text() + "\nNOTHING = 0\n")


def no_run_was_left_out(folders):
    """(passed, evidence) of the rule, and what else fails."""
    ((_, claim),) = judging.claims_of([str(folder) for folder in folders])
    checked = {rule["rule"]: rule for rule in rulebook.check(claim)}
    rule = checked.pop("no run was left out")
    assert [name for name, other in checked.items() if other["passed"] is False] == []
    return rule["passed"], rule["evidence"]


# ---- what the hash covers


def linked(code):
    (code.parent / "mine").mkdir()
    (code.parent / "mine" / "layers.py").write_text("a = 1\n")
    (code / "models" / "mine").symlink_to(code.parent / "mine")


def kernel(code):
    (code / "models" / "fused.cu").write_text("__global__ void add() {}  // built while it trains: byte by byte")
    (code / "models" / "notes.txt").write_text("no source")


def moved(code):
    (code / "models" / "muon_update.py").rename(code / "models" / "moon.py")


@pytest.mark.parametrize(
    ("edit", "differing"),
    [
        *((lambda code, name=name: comment(code, name), []) for name in ("bench/training/run.py", "models/gpt2.py")),
        (lambda code: statement(code, "bench/report/run_page.py"), []),
        (statement, ["models/schedules/cosine.py"]),
        (lambda code: statement(code, "bench/data/sources/markov.py"), ["bench/data/sources/markov.py"]),
        (linked, ["models/mine/layers.py"]),
        (moved, ["models/moon.py", "models/muon_update.py"]),
        (kernel, ["models/fused.cu"]),
    ],
)
def test_statements_and_files_of_what_is_raced_count_and_nothing_else_does(code, edit, differing):
    before = code_state.state(code)
    edit(code)
    after = code_state.state(code)
    assert (after["source_sha256"] != before["source_sha256"]) == bool(differing)
    assert (code_state.differing_files(before, after) or []) == differing


def test_an_edit_of_a_kernel_and_of_a_linked_file_counts(code):
    linked(code), kernel(code)
    before = code_state.state(code)
    for path in (code / "models" / "fused.cu", code.parent / "mine" / "layers.py"):
        path.write_text(path.read_text() + "# other\n" * (path.suffix == ".cu") + "b = 2\n")
    names = ["models/fused.cu", "models/mine/layers.py"]
    assert code_state.differing_files(before, code_state.state(code)) == names


SOURCE = 'def f(x):\n    """Doc."""\n    y = x * 2  # twice\n    return "a", y\n'


@pytest.mark.parametrize(
    "edited",
    [
        SOURCE.replace("Doc.", "Another."),
        SOURCE.replace('    """Doc."""\n', ""),
        SOURCE.replace("  # twice", ""),
        SOURCE.replace('"a"', "'a'").replace("x * 2", "(x\n        * 2)"),
        SOURCE.replace("\n", "\r\n"),
        '"""The module."""\n\n\n' + SOURCE,
    ],
)
def test_docstrings_comments_and_format_are_no_syntax(edited):
    assert edited != SOURCE
    assert code_state.normalised(edited.encode()) == code_state.normalised(SOURCE.encode())


@pytest.mark.parametrize(
    "edited",
    [
        SOURCE.replace("2", "3"),
        SOURCE.replace("2", "2.0"),
        SOURCE.replace('"a"', 'b"a"'),
        SOURCE.replace("y", "z"),
        SOURCE.replace("x * 2", "x + 2"),
        SOURCE.replace("return", "yield"),
        SOURCE.replace("    return", "return").replace("y\n", "0\n"),
        SOURCE + '"""The end."""\n',
    ],
)
def test_whatever_python_does_differently_is_syntax(edited):
    assert code_state.normalised(edited.encode()) != code_state.normalised(SOURCE.encode())


@pytest.mark.parametrize("reads", ["print(__doc__)", "from docopt import docopt", "inspect.getdoc(f)"])
def test_docstrings_that_a_source_reads_are_code(reads):
    whole = f'"""Usage: a [--b=1]"""\n{SOURCE}{reads}  # x\n'
    for old, new in (("--b=1", "--b=2"), ("Doc.", "Another.")):
        assert code_state.normalised(whole.encode()) != code_state.normalised(whole.replace(old, new).encode())
    assert code_state.normalised(whole.encode()) == code_state.normalised(whole.replace("# x", "# y").encode())


def test_what_is_no_python_is_hashed_as_it_is():
    assert code_state.normalised(b"def f(:  # a\n") == b"def f(:  # a\n"
    assert code_state.normalised(b"a = 0x" + b"f" * 9000) == b"a = 0x" + b"f" * 9000  # Python cannot print it


def test_a_deep_expression_is_written_at_any_depth_of_the_caller():
    syntax = code_state.normalised(b"a = " + b" + ".join([b"1"] * 900))
    assert syntax.count(b"Constant(1)") == 900

    def deeper(times):
        return deeper(times - 1) if times else code_state.normalised(b"a = " + b" + ".join([b"1"] * 900))

    assert deeper(600) == syntax


def test_every_python_writes_the_same_syntax():
    """The hash is that of 3.11.7, 3.12.1 and 3.13.0."""
    expected = "6082ef46ad4b5ce12acdde348501ae330dd0294bb9fe8f5d619e0890e9a4bc03"
    assert hashlib.sha256(code_state.normalised(SAMPLE)).hexdigest() == expected


# ---- the list


def test_every_entry_of_the_list_is_there_and_named_once():
    assert [name for name in code_state.RACED if not (REPO / name).exists()] == []
    num_sources = [len(list(code_state._sources(REPO / name))) for name in code_state.RACED]
    assert len(code_state.raced_files()) == sum(num_sources)


def test_all_that_a_rank_imports_is_raced_or_excluded_with_a_reason():
    started = ["training/worker.py", "launch/guard.py", "launch/ranks.py", "machine/telemetry/sampler.py"]
    files, waiting = set(), [REPO / "bench" / name for name in started]
    waiting += REPO.glob("bench/training/instruments/*.py")
    while waiting:
        path = waiting.pop()
        if path not in files:
            files.add(path)
            waiting += _imports(path)
    names = {path.relative_to(REPO).as_posix() for path in files}
    excluded = {name for name in names for start in NOT_RACED if name == start or name.startswith(f"{start}/")}
    assert names - set(code_state.raced_files()) == excluded
    assert [start for start in NOT_RACED if not any(name.startswith(start) for name in excluded)] == []


def _imports(path):
    """Our files that this file imports, also inside functions, and the packages that they are in."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    for module in modules:
        parts = module.split(".")
        files = [REPO.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts) + 1)]
        files.append(REPO.joinpath(*parts).with_suffix(".py"))
        yield from (file for file in files if parts[0] in ("bench", "models") and file.is_file() and _has_code(file))


def _has_code(path):
    """False for the __init__ of a room that is only a docstring."""
    return len(ast.parse(path.read_text()).body) > 1


# ---- judge


def test_runs_that_missed_are_not_dropped_by_editing_a_comment(results, code):
    missed = [add(results, code, seed, val_loss=3.3) for seed in range(5)]
    comment(code)
    passed, evidence = no_run_was_left_out(three(results, code))
    assert not passed
    assert all(f"cpu_nano/{folder.name} (complete)" in evidence for folder in missed)


def test_runs_of_other_code_are_named_with_the_files_that_differ(results, code):
    missed = [add(results, code, seed, val_loss=3.3) for seed in range(5)]
    shutil.rmtree(missed[0])
    statement(code)
    passed, evidence = no_run_was_left_out(three(results, code))
    assert passed
    named = ", ".join(f"cpu_nano/{folder.name} (complete)" for folder in missed[:2])
    assert evidence.endswith(f"(differing: models/schedules/cosine.py): {named} and 3 more")


def test_where_no_folder_of_other_code_is_left_its_files_are_unknown(results, code):
    missed = add(results, code, 9, val_loss=3.3)
    shutil.rmtree(missed)
    statement(code)
    passed, evidence = no_run_was_left_out(three(results, code))
    assert passed and f"(no folder says which files differ): cpu_nano/{missed.name} (complete)" in evidence


def test_of_another_identity_version_it_is_unknown_whether_the_code_is_the_same(results, code, monkeypatch):
    """The run and its line in the ledger are as they were before there were versions."""
    append = ledger.append
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "append", lambda *where, identity_version=None, **facts: append(*where, **facts))
        old = results.add(9, val_loss=3.3)
    written = [run_folder.read(old)["code"], *ledger.read(results.folder).lines]
    assert not any("identity_version" in facts for facts in written)
    passed, evidence = no_run_was_left_out(three(results, code))
    assert passed
    assert f"of identity version 1 (whether it is the same code is unknown): cpu_nano/{old.name} (complete)" in evidence


def test_a_claim_of_two_identity_versions_is_refused_because_it_is_unknown_whether_the_code_is_the_same(results, code):
    folders = [results.add(0), add(results, code, 1), add(results, code, 2)]
    ((_, claim),) = judging.claims_of([str(folder) for folder in folders])
    passed, evidence = run_rules.the_runs_share_config_and_code(claim)
    assert not passed and evidence.endswith("identity versions 1, 2: whether the code is the same is unknown")


def test_a_race_whose_code_changed_names_the_file(code):
    run = {"code": code_state.state(code)}
    assert arm_process.changed_files(code, (), run) == arm_process.changed_files(code, (), None) == []
    statement(code)
    assert arm_process.changed_files(code, (), run) == ["models/schedules/cosine.py"]


# ---- sweep, race, compare


def test_a_sweep_repeats_a_run_for_a_statement_and_not_for_a_comment(results, code):
    config = claimed.config(0)
    train, val = (SimpleNamespace(sha256=sha256) for sha256 in (config.data.train_sha256, config.data.val_sha256))
    job = prepare.Job(config, SimpleNamespace(train=[train], val=[val]), [], [], code=code)
    assert run_folder.read(add(results, code, 0))["config_id"] == job.config_id
    comment(code)
    comment(code, "models/gpt2.py")
    assert points.complete_before([job])[0]["seed"] == 0
    statement(code)
    assert points.complete_before([job]) == {}


@pytest.mark.parametrize(("edit", "num_started"), [(comment, 6), (statement, 2)])
def test_a_race_under_way_is_stopped_by_a_statement_and_not_by_a_comment(results, code, monkeypatch, edit, num_started):
    source_sha256, add_run = arm_process.source_sha256, results.add
    monkeypatch.setattr(results, "add", lambda *args: add_run(*args, change=with_code(code)))
    arms = claimed.Racers(results, lambda arm, seed: 10.0 + 0.01 * seed)
    arms.install(monkeypatch)
    monkeypatch.setattr(arm_process, "source_sha256", lambda folder, own: source_sha256(code, own))
    planned, places = code_state.source_sha256(code), set()
    monkeypatch.setattr(arm_process, "facts", lambda *args: arms.facts(*args) | {"source_sha256": planned})

    def start(folder, *args, **options):
        arms.start(folder, *args, **options)
        places.add(folder)
        if arms.num_started == 2:
            edit(code)

    monkeypatch.setattr(arm_process, "start", start)
    if edit is comment:
        assert race.main(["A=", "B=", "n=2", "--anyway"]) == 0
    else:
        with pytest.raises(ValueError, match="changed while the race was running"):
            race.main(["A=", "B=", "n=2", "--anyway"])
    assert arms.num_started == num_started
    (place,) = places  # for all runs the copy of the checkout that was made when the race began
    assert code_copy.is_copy(place) and place != REPO and code_copy.is_whole(place)


def test_an_arm_of_two_identity_versions_is_marked_and_nothing_is_said_of_its_code(results, code):
    old, new, other = (run_folder.read(folder) for folder in (results.add(0), add(results, code, 1), results.add(2)))
    judged = eligibility.judge([row_of(old), row_of(new)], [row_of(other)])
    assert "mixed-code" in judged.flags and not any("different code" in remark for remark in judged.remarks)
    assert any("(identity versions 1, 2): whether it is the same is unknown" in remark for remark in judged.remarks)
    differences = comparison.differences_of([comparison.facts(old)], [comparison.facts(new)])
    versions = [(change["a"], change["b"]) for change in differences if change["what"] == "identity_version"]
    assert versions == [([1], [2])]
    assert code_state.differing_files(old["code"], new["code"]) is None


def test_an_arm_of_two_codes_of_one_identity_version_mixes_code(results, code):
    first = run_folder.read(add(results, code, 0))
    statement(code)
    second = run_folder.read(add(results, code, 1))
    judged = eligibility.judge([row_of(first), row_of(second)], [row_of(first | {"run_id": "b"})])
    assert "mixed-code" in judged.flags and "A mixes runs of different code" in judged.remarks
    assert not any("identity version" in remark for remark in judged.remarks)
