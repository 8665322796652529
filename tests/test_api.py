"""import speedrun: the answers of the commands as Python objects, in a checkout, a notebook and without matplotlib."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import comparing
import pytest
from browser import Browser, needs_browser

from bench import api
from bench.api import racing
from bench.cli import compare as compare_cli
from bench.cli import explain as explain_cli
from bench.cli import judge as judge_cli
from bench.cli import table as table_cli
from bench.config import overrides

REPO = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((REPO / "docs" / "notebooks").glob("*.ipynb"))
# A race refuses a busy machine, and a machine that runs tests is one.
ANYWAY = "import functools, speedrun; speedrun.race = functools.partial(speedrun.race, anyway=True)"
TIMES_S = ([10.0, 10.1, 9.9, 10.05], [9.0, 9.1, 8.9, 9.05])


@pytest.fixture
def raced(results):
    """Names of the folders of two arms, B 10 % faster; results/ is theirs."""
    arms = comparing.raced(*TIMES_S)
    return [[str(comparing.write(results, run)) for run in runs] for runs in arms]


@pytest.mark.parametrize("name", sorted({*api.__all__, *api._MODULES}))
def test_every_name_is_there_and_listed(name):
    assert getattr(api, name) is not None and name in api.__all__


def test_runs_are_rows_of_the_table_with_settings_steps_and_records(raced, printed):
    runs = api.load()
    assert len(runs) == 8 and [run.id for run in runs[:2]] == [run.id for run in runs][:2]
    first = runs[0]
    assert first.folder == Path(raced[0][0]) and first == api.load(first.id)[0]
    assert first["train_s"] == 10.0 and first["optim.lr"] == first.settings["optim.lr"] == 0.003
    assert first.record["run_id"] == first.id
    assert [row["step"] for row in first.steps()] == [0, 1, 2, 3, 4]
    assert str(runs) == printed(table_cli).rstrip("\n")
    assert len(runs.filter(lambda run: run["train_s"] < 9.5)) == 4 == sum(time_s < 9.5 for time_s in runs["train_s"])
    with pytest.raises(KeyError, match="optim.rate: .* has no such column or setting: to_dict\\(\\) has all"):
        first["optim.rate"]


def test_a_table_is_that_of_the_command(raced, printed):
    options = {"where": ["val_loss<9"], "group": True, "sort": "-train_s_mean"}
    table = api.table(*raced[0], *map(Path, raced[1]), **options)
    arguments = [*raced[0], *raced[1], "--where", "val_loss<9", "--group", "--sort", "-train_s_mean"]
    assert f"{table}\n" == printed(table_cli, *arguments)
    assert table.to_dict() == json.loads(printed(table_cli, *arguments, "--json"))
    assert api.table(columns="run_id,seed").to_dict() == api.table(columns=["run_id", "seed"]).to_dict()
    assert "train_s" in str(api.table(baseline=api.load()[0].id))
    assert api.table(api.load(), **options).to_dict() == table.to_dict()  # Runs are names too
    assert len(api.sql("SELECT 1 FROM runs", api.load()[:3])) == len(api.load(api.load()[:3])) == 3
    with pytest.raises(ValueError, match="<Runs: 0> names no run: give a path"):
        api.table(api.load()[:0])
    assert table.to_markdown() + "\n" == printed(table_cli, *arguments, "--md")
    slow, fast = (row["train_s_mean"] for row in table.to_dict())
    assert (len(table), slow, fast) == (2, pytest.approx(10.0, 0.01), pytest.approx(9.0, 0.01))
    assert "<table" in table._repr_html_()


def test_a_table_of_nothing_and_one_with_an_unknown_key(raced):
    nothing = api.table(where="val_loss>9e9")
    assert (len(nothing), nothing.to_dict(), str(nothing)) == (0, [], "")
    assert len(api.table(api.load()[0])) == 1
    with pytest.raises(ValueError, match="no_such_key"):
        api.table(sort="no_such_key")


def test_tables_of_other_libraries_have_settings_as_columns(raced, tmp_path):
    pandas = pytest.importorskip("pandas")
    runs = api.load()
    frame = runs.to_pandas()
    assert frame.groupby("config_id")["train_s"].mean().round(4).to_dict() == {"aaaaaaaa": 10.0125, "bbbbbbbb": 9.0125}
    assert set(frame["optim.lr"]) == {0.003} and len(runs.to_pandas(steps=True)) == 40
    pytest.importorskip("pyarrow")
    runs.to_parquet(tmp_path / "runs.parquet")
    assert pandas.read_parquet(tmp_path / "runs.parquet")["run_id"].tolist() == [run.id for run in runs]


def test_polars_reads_the_same(raced):
    pytest.importorskip("polars")
    assert api.load().to_polars()["train_s"].to_list() == api.load().to_pandas()["train_s"].to_list()


def test_a_comparison_says_what_the_command_prints(raced, printed, tmp_path):
    a, b = raced
    compared = api.compare(a, b)
    arguments = *a, "vs", *b
    assert compared.to_dict() == json.loads(printed(compare_cli, *arguments, "--json"))
    assert str(compared) == printed(compare_cli, *arguments).rstrip("\n")
    assert compared.to_markdown() == printed(compare_cli, *arguments, "--md").rstrip("\n")
    assert compared.verdict in compared.sentence.replace(" ", "_") or compared.verdict == "faster"
    low, high = compared.ci95_pct
    assert low < compared.change_pct < high < 0
    compared.to_html(tmp_path / "page.html")
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_an_arm_is_a_name_a_run_or_runs(raced):
    a, b = raced
    runs = api.load()
    by_name = api.compare(a, b)
    by_run = api.compare(runs.filter(lambda run: run["train_s"] > 9.5), [run for run in runs if run["train_s"] < 9.5])
    assert by_run.change_pct == by_name.change_pct
    with pytest.raises(ValueError, match="3 names no run: give a path"):
        api.compare(3, runs)
    with pytest.raises(ValueError, match="margin_nats -1: use a number of 0 or more"):
        api.compare(a, b, margin_nats=-1.0)
    several = api.compare(a[:2], b[:2], b[2:])
    assert len(several.against) == 2
    with pytest.raises(ValueError, match="2 candidates, .*read .against"):
        _ = several.verdict


def test_a_judgement_has_the_rules_of_the_command(raced, printed):
    judged = api.judge(raced[1])
    assert judged.accepted is False
    assert judged.to_dict() == json.loads(printed(judge_cli, *raced[1], "--json", code=1))
    assert str(judged).startswith("refused: ") and judged.rules[0]["rule"] in judged.to_markdown()


def test_an_account_adds_up_to_its_step_and_a_difference_is_not_of_one_step(finished_run, bare_run, printed):
    account = api.explain(finished_run)
    assert sum(part["ms"] for part in account.parts) == pytest.approx(account.step_ms)
    assert str(account) == printed(explain_cli, finished_run).rstrip("\n")
    with pytest.raises(ValueError, match="it is not the account of one step: read to_dict"):
        _ = api.explain(finished_run, bare_run).step_ms


def test_a_race_in_a_thread_is_refused_before_it_is_planned(results):
    with ThreadPoolExecutor(1) as threads, pytest.raises(ValueError, match="call it in the main thread"):
        threads.submit(api.race, A="", B="optim=muon").result()
    assert list(results.iterdir()) == []


def test_the_settings_of_an_arm_may_be_values_of_python(monkeypatch, results):
    asked = []
    monkeypatch.setattr(racing.planning, "begin", lambda request, *others: asked.append(request) or results)
    monkeypatch.setattr(racing.runner, "go", lambda *args, **options: None)
    monkeypatch.setattr(racing, "Race", lambda *args: None)
    b = {
        "script.path": "/my runs/train.py",
        "model.tied": False,
        "data.gap": None,
        "script.args": ["--lr", 1, "a b,c'"],
    }
    api.race("track=free", A="", B=b, looks=[2, 4], n=4)
    words = ["script.path=/my runs/train.py", "model.tied=False", "data.gap=null", "script.args=[--lr,1,'a b,c\\'']"]
    assert asked[0]["arms"]["B"]["overrides"] == ["track=free", *words] and asked[0]["looks"] == [2, 4]
    assert overrides.parsed(words[-1]).value() == ["--lr", 1, "a b,c'"]


def test_what_an_optional_package_is_needed_for_says_so(raced, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pandas is not installed: /.* -m pip install pandas"):
        api.load().to_pandas()
    for function in (api.compare, api.judge, api.explain, api.trace):
        with pytest.raises(ValueError, match=f"{function.__name__}.. (has no arms: give two|needs a name: print)"):
            function()


def test_a_trace_is_analysed_and_nothing_is_written(every_instrument_run):
    before = sorted(path for path in every_instrument_run.rglob("*"))
    analysed = api.trace(every_instrument_run)
    assert "ranks" in analysed.to_dict() and "overall" in analysed.to_dict()
    assert sorted(path for path in every_instrument_run.rglob("*")) == before


def test_figures_show_what_the_pages_do(raced):
    pytest.importorskip("matplotlib")
    figure = api.compare(*raced).plot()
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0] == "Train time" and "Step time" in titles
    (change,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert change.get_xdata()[0] == pytest.approx(api.compare(*raced).change_pct)
    assert api.explain(raced[0][0], raced[1][0]).plot().axes[0].get_title() == "What changed in a step"
    curves = api.load().plot(y="train_loss", x="tokens")
    assert len(curves.axes[0].lines) == 8
    with pytest.raises(ValueError, match="y is val_loss, train_loss, step_ms"):
        api.load().plot(y="loss")


def test_an_answer_in_a_notebook_is_a_page_of_its_own(raced):
    markup = api.compare(*raced)._repr_html_()
    assert markup.startswith("<iframe") and markup.count("<iframe") == markup.count("</iframe>") == 1
    assert str(api.load()[0].id) in api.load()._repr_html_()


@needs_browser
def test_a_notebooks_page_draws_its_charts(raced, tmp_path):
    path = tmp_path / "cell.html"
    path.write_text(f"<!DOCTYPE html><html lang=en><title>cell</title><main>{api.compare(*raced)._repr_html_()}</main>")
    with Browser() as browser:
        page = browser.open(path)
        page.until("document.querySelector('iframe').contentDocument.querySelectorAll('.uplot canvas').length >= 2")


def test_import_speedrun_from_anywhere_and_it_is_light(tmp_path):
    heavy = "*(name in sys.modules for name in ('torch', 'numpy'))"
    code = f"import sys, speedrun; speedrun.load; print(speedrun.__version__, {heavy}, 'race' in dir(speedrun))"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PYTHONPATH": str(REPO / "bench" / "api" / "importable")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [api.__version__, "False", "False", "True"]
    (tmp_path / "bench.py").write_text("")  # the user's own
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert f"ImportError: {tmp_path}" in done.stderr and "rename it, or start Python in another folder" in done.stderr


def reader(folder):
    """The environment of somebody who works in this folder and can import speedrun."""
    importable = [str(REPO / "bench" / "api" / "importable"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"SPEEDRUN_RESULTS": str(folder / "results"), "PYTHONPATH": os.pathsep.join(importable)}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(ANYWAY))
    for name, value in reader(tmp_path).items():
        monkeypatch.setenv(name, value)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("iframe" in output.get("data", {}).get("text/html", "") for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_example_of_the_python_page_runs(tmp_path):
    """In a folder whose results/ holds the runs that it names."""
    for package in ("matplotlib", "pandas", "pyarrow"):
        pytest.importorskip(package)
    (example,) = re.findall(r"^```python\n(.*?)^```$", (REPO / "docs/reference/python.md").read_text(), re.M | re.S)
    for arm, runs in zip("ab", comparing.raced(*TIMES_S), strict=True):
        (tmp_path / "results" / arm).mkdir(parents=True)
        for run in runs:
            comparing.write(tmp_path / "written", run).rename(tmp_path / "results" / arm / run["run_id"])
    command = [sys.executable, "-c", f"{ANYWAY}\n{example.replace('n=4', 'n=2')}\nprint(compared.verdict, race.status)"]
    env = os.environ | reader(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("faster complete\n")
    assert (tmp_path / "difference.html").is_file() and (tmp_path / "steps.parquet").is_file()
