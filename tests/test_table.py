"""The results table: rows, groups, filters, forms."""

import csv
import io
import json
import shutil
import subprocess
import sys
import types

import claimed
import pytest
from kept_records import COMPLETE, RECORDS

from bench.base import text_table
from bench.base.paths import REPO
from bench.cli import main, table
from bench.machine import processes
from bench.record import run_folder
from bench.record.rows import METRICS, row_of
from bench.report import table_columns, table_groups, table_text

FAILED = RECORDS / "20261121T031501Z-gpt2-adamw-48623a63-s1"


def add(results, seed, base=COMPLETE, metrics=(), **changes):
    """A run folder with another seed and other numbers."""
    run = json.loads((base / "run.json").read_text())
    run |= {"run_id": f"20261121T03{seed // 60:02d}{seed % 60:02d}Z-x-48623a63-s{seed}", "seed": seed}
    run["started_at"] = f"2026-11-21T03:{seed // 60:02d}:{seed % 60:02d}.000Z"
    run |= changes
    run["metrics"] |= dict(metrics)
    folder = results / run["track"] / run["run_id"]
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run))
    shutil.copyfile(base / "config.yaml", folder / "config.yaml")
    return run["run_id"]


def test_a_row_of_a_complete_run_has_its_numbers_unrounded(answer_of):
    (row,) = answer_of(table, COMPLETE)
    wanted = {
        "run_id": COMPLETE.name,
        "track": "cpu_nano",
        "status": "complete",
        "validity": "valid",
        "seed": 0,
        "config_id": "48623a63",
        "model": "gpt2",
        "optim": "adamw",
        "world_size": 2,
        "num_steps": 4,
        "val_loss": 4.25,
        "train_s": 0.22,
        "step_avg_ms": pytest.approx(160 / 3),
        "tokens_per_s": 19_200.0,
        "mfu": None,
        "peak_mem_gib": 0.5,
        "compile_s": None,
    }
    assert {name: row[name] for name in wanted} == wanted


def test_a_program_without_standard_output_can_ask(monkeypatch):
    """As under pythonw, or with a closed descriptor."""
    monkeypatch.setattr(text_table.sys, "stdout", None)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert text_table.screen_width() is None and text_table.is_terminal() is False
    monkeypatch.setattr(text_table.sys, "stdout", types.SimpleNamespace(write=len, flush=bool))  # as a notebook's tee
    assert text_table.screen_width() is None and text_table.is_terminal() is False


def test_a_failed_run_is_listed_without_numbers(answer_of):
    """Its record knows 3 steps and a val_loss, but these are no result."""
    (row,) = answer_of(table, FAILED)
    assert (row["status"], row["failure"], row["validity"]) == ("failed", "non_finite_loss", "invalid")
    assert {row[name] for name in METRICS} == {None}
    (group,) = answer_of(table, FAILED, "--group")
    assert (group["n"], group["num_failed"], group["val_loss_mean"], group["val_loss_sd"]) == (0, 1, None, None)


def test_a_running_record_of_a_dead_launcher_is_listed_as_aborted(results, answer_of):
    add(
        results,
        0,
        status="running",
        launcher={"pid": 1, "start_ticks": -1, "boot_id_hash": processes.boot_id_hash() or "x"},
    )
    (row,) = answer_of(table)
    assert (row["status"], row["failure"], row["val_loss"]) == ("aborted", "launcher_killed", None)


def test_results_is_the_default_and_an_empty_one_says_what_to_do(results, answer_of, printed):
    assert f"no runs in {results}/ yet: make one with ./run.sh run" in printed(table)
    assert answer_of(table) == []
    add(results, 3)
    assert [row["seed"] for row in answer_of(table)] == [3]


def test_a_folder_that_cannot_be_read_is_named_and_the_rest_is_shown(results, capsys):
    add(results, 1)
    for name, content in (("broken", "{"), ("bare", '{"schema_version": 1, "run_id": "x", "status": "complete"}')):
        (results / name).mkdir()
        (results / name / "run.json").write_text(content)
    assert table.main(["--json"]) == 0
    out, err = capsys.readouterr()
    assert [row["seed"] for row in json.loads(out)] == [1]
    assert "excluded: " in err
    assert "broken" in err
    assert "bare" in err


def test_a_run_named_twice_is_listed_once(results, answer_of):
    run_id = add(results, 1)
    assert len(answer_of(table, results, str(results / "cpu_nano" / run_id))) == 1


# ---- what a person sees


def test_the_terminal_view_marks_open_runs_and_doubt_and_fits_into_100_columns(results, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    add(results, 0, name="x" * 20, metrics={"mfu": 0.4512})
    add(results, 1, deviations=["goal.num_steps: 4 instead of 200"])
    add(results, 2, validity="suspect", validity_reasons=["other programs used 1.20 CPU cores"])
    add(results, 3, FAILED)
    head, _, *lines, note = printed(table).splitlines()
    assert note == "(open): the run changed what its track fixes, and is not eligible for it"
    assert head.split()[:5] == ["run_id", "track", "status", "val_loss", "train_s"]
    expected = ["cpu_nano", "cpu_nano (open)", "cpu_nano", "cpu_nano"]
    assert [line.split(maxsplit=1)[1].rsplit("  ")[0].strip() for line in lines] == expected
    assert ["suspect" in line for line in lines] == [False, False, True, False]
    assert lines[3].split()[-1] == "failed"  # and no numbers behind it
    assert all(len(line) <= 100 for line in [head, *lines])
    assert lines[0].split()[0] == "20261121T030000Z-x-48623a63-s0"  # whole: it is pasted into other commands


def test_what_does_not_fit_gives_way_from_the_right(monkeypatch):
    run = run_folder.read(COMPLETE)
    run["metrics"]["mfu"] = 0.4512
    shown = {}
    for columns in ("", "200", "70"):
        monkeypatch.setenv("COLUMNS", columns)
        shown[columns] = table_text.runs_table([row_of(run)]).splitlines()
    assert shown["200"] == shown[""]  # a pipe without COLUMNS: nothing is cut
    assert shown[""][0].split() == [name for name in table_text.SHOWN if name != "certificate"]
    assert shown[""][2].split()[3:] == ["4.2500", "0.22", "53.33", "19,200", "0.451", "0.50"]
    assert shown["70"][0].split() == ["run_id", "track", "status", "val_loss"]
    assert "mfu" not in table_text.runs_table([row_of(run_folder.read(COMPLETE))])  # a column without any value
    assert table_text.runs_table([]) == ""


LONG = "20261121T030000Z-" + "imported_log_of_somebody/" * 4 + "48623a63-s0"


def test_long_ids_are_shortened_in_the_middle_before_a_number_goes(results, printed, monkeypatch):
    add(results, 0, run_id=LONG)
    monkeypatch.setenv("COLUMNS", "120")
    head, _, line = printed(table).splitlines()
    assert head.split() == [name for name in table_text.SHOWN if name not in ("mfu", "certificate")]
    begin, end = line.split()[0].split("…")
    assert LONG.startswith(begin)
    assert LONG.endswith(end)
    assert min(len(begin), len(end)) >= 15
    assert len(line) <= 120
    monkeypatch.delenv("COLUMNS")
    assert LONG in printed(table)


@pytest.mark.parametrize(
    ("argv", "column"),
    [
        (["--sort", "train_s"], "train_s"),
        (["--sort", "-peak_mem_gib"], "peak_mem_gib"),
        (["--where", "tokens_per_s>1"], "tokens_per_s"),
        (["--sort", "world_size"], "world_size"),  # not among the columns that a terminal shows
        (["--group", "--sort", "train_s"], "train_s_mean"),
        (["--group", "--where", "num_steps>0"], "config_id"),  # a group has no such column
    ],
)
@pytest.mark.parametrize("width", ["60", "100"])
def test_a_column_that_was_asked_for_is_always_shown(results, printed, monkeypatch, argv, column, width):
    monkeypatch.setenv("COLUMNS", width)
    add(results, 0, run_id=LONG)
    assert column in printed(table, *argv).splitlines()[0].split()


def test_markdown_and_csv(results, printed):
    add(results, 0, metrics={"val_loss": 4.123456789})
    head, rule, line = printed(table, "--md").splitlines()
    assert head.startswith("| run_id ")
    assert set(rule) == set("|-")
    assert "4.1235" in line
    (row,) = csv.DictReader(io.StringIO(printed(table, "--csv")))
    assert (row["val_loss"], row["mfu"], row["seed"]) == ("4.123456789", "", "0")
    assert tuple(row) == table_columns.COLUMNS


# ---- choosing and sorting


@pytest.mark.parametrize(
    ("where", "seeds"),
    [
        (["seed=1"], [1]),
        (["val_loss<4.2"], [0, 1]),  # the failed run has none: neither below
        (["val_loss>=4.2"], [2]),  # nor above
        (["val_loss="], [3]),
        (["val_loss!="], [0, 1, 2]),
        (["status!=failed"], [0, 1, 2]),
        (["val_loss<=4.1", "seed>0"], [1]),
        (["val_loss <= 4.1", " seed > 0 "], [1]),
        (["target_reached=true"], [0, 1, 2]),
        (["target_reached=no"], []),
        (["target_reached!=true"], [3]),
        (["run_id=20261121T030002Z-x-48623a63-s2"], [2]),
    ],
)
def test_where_chooses_rows(results, answer_of, where, seeds):
    for seed in range(3):
        add(results, seed, metrics={"val_loss": 4.0 + seed / 10})
    add(results, 3, FAILED)
    assert [row["seed"] for row in answer_of(table, "--where", *where)] == seeds


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--where", "speed=1"], "there is no column speed; did you mean seed? ./run.sh table --help lists them"),
        (["--where", "seed"], "use KEY=VALUE"),
        (["--where", "seed=0", "."], "--where .: use KEY=VALUE; put folders before --where"),
        (["--where", "val_loss<low"], "val_loss is a number"),
        (["--where", "target_reached=maybe"], "target_reached is yes or no"),
        (["--group", "--sort", "seed"], "there is no column seed; ./run.sh table --help lists them"),
    ],
)
def test_a_wrong_question_is_refused_with_what_would_be_right(results, capsys, argv, sentence):
    assert main.main(["table", *argv]) == 2  # also where there is nothing to choose from
    assert sentence in capsys.readouterr().err
    add(results, 0)
    assert main.main(["table", *argv]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("order", "seeds"),
    [("val_loss", [2, 0, 1, 3]), ("-val_loss", [1, 0, 2, 3]), ("status,-seed", [2, 1, 0, 3]), ("run_id", [0, 1, 2, 3])],
)
def test_sorting_by_columns_puts_empty_cells_last(results, answer_of, order, seeds):
    for seed, val_loss in enumerate((4.2, 4.3, 4.1)):
        add(results, seed, metrics={"val_loss": val_loss})
    add(results, 3, FAILED)
    assert [row["seed"] for row in answer_of(table, "--sort", order)] == seeds


# ---- groups


def test_a_group_has_mean_and_sd_of_its_repeats_and_counts_what_went_wrong(results, answer_of, printed, monkeypatch):
    for seed, val_loss in enumerate((4.1, 4.2, 4.3)):
        add(results, seed, metrics={"val_loss": val_loss, "train_s": 0.2 + seed / 100})
    add(results, 3, FAILED, comparability_id=None)
    add(results, 4, FAILED, status="aborted")
    add(results, 5, validity="invalid", validity_reasons=["below the floor"], metrics={"val_loss": 0.0})
    monkeypatch.setenv("COLUMNS", "100")
    (group,) = answer_of(table, "--group")
    assert (group["n"], group["num_failed"], group["num_aborted"], group["num_invalid"]) == (3, 1, 1, 1)
    assert group["val_loss_mean"] == pytest.approx(4.2)
    assert group["val_loss_sd"] == pytest.approx(0.1)  # (0.01 + 0 + 0.01) / 2, root
    assert group["train_s_mean"] == pytest.approx(0.21)
    assert (group["step_avg_ms_mean"], group["step_avg_ms_sd"]) == (pytest.approx(160 / 3), 0.0)
    assert len(group["run_ids"]) == 6
    shown = printed(table, "--group")
    assert "3, 1 invalid, 1 failed, 1 aborted" in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    "change",
    [
        {"config_id": "ffffffff"},
        {"comparability_id": "f" * 16},
        {"code": {"source_sha256": "other"}},
        {"track": "free"},
    ],
)
def test_runs_that_are_no_repeats_are_not_pooled(results, answer_of, change):
    add(results, 0)
    add(results, 1, **change)
    assert [group["n"] for group in answer_of(table, "--group")] == [1, 1]


def test_the_table_imports_no_heavy_library():
    code = "import sys; from bench.cli import table; table.main(sys.argv[1:]); print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(RECORDS)], cwd=REPO, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "bench.cli.table" in loaded
    assert not loaded & {"torch", "numpy", "hydra", "omegaconf", "jsonschema", "scipy", "pynvml", "rich"}


def test_the_help_names_every_column(capsys):
    with pytest.raises(SystemExit) as ended:
        table.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(column in shown for column in (*table_columns.COLUMNS, *table_groups.GROUP_COLUMNS))


@pytest.mark.parametrize("options", [["--json"], ["--csv"], ["--group"], ["--sort", "seed"]])
def test_what_the_leaderboard_cannot_do_is_refused(results, options):
    with pytest.raises(ValueError, match=f"{options[0]} with --leaderboard: they cannot be combined"):
        table.main(["--leaderboard", *options])


def test_the_warm_up_run_of_a_race_is_listed_as_such_and_enters_no_mean(results, answer_of, printed):
    place = {"race_id": "r", "arm": "A", "position": 0, "attempt": 1}
    add(results, 0, race=place | {"discarded": True}, metrics={"train_s": 99.0})
    for seed in (1, 2):
        add(results, seed, race=place | {"discarded": False}, metrics={"train_s": 10.0 + seed})
    (group,) = answer_of(table, "--group")
    assert (group["n"], group["train_s_mean"]) == (2, 11.5)
    assert [row["seed"] for row in answer_of(table, "--where", "discarded=yes")] == [0]
    assert printed(table).count("warm-up") == 1


def test_a_run_costs_its_wall_time_at_its_price_and_the_price_is_no_part_of_its_config(tmp_path):
    results = claimed.Results(tmp_path)
    price = "hardware.price_usd_per_hour=36"
    priced, free = results.add(0, train_s=30.0, overrides=[price]), results.add(1)
    rows = [row_of(run_folder.read(folder)) for folder in (priced, free)]
    assert [row["cost_usd"] for row in rows] == [0.5, None]  # 50 s of 36 USD an hour
    assert rows[0]["config_id"] == rows[1]["config_id"]


def test_a_run_that_ends_at_its_target_costs_its_training_until_then(tmp_path):
    folder = claimed.Results(tmp_path).add(0, 30.0, overrides=["hardware.price_usd_per_hour=36"])
    runs = []
    for stops, reached in [(True, True), (True, False), (False, True)]:
        run = run_folder.read(folder)
        run["goal"]["stop_at_target"] = stops
        run["metrics"] |= {"target_reached": reached, "energy_j": 4500.0}
        runs.append(run)
    costs = [(row["cost_usd_to_target"], row["energy_kj_to_target"]) for row in map(row_of, runs)]
    assert costs == [(0.3, 4.5), (None, None), (None, None)]  # 30 s of 36 USD an hour


def test_the_energy_of_a_resumed_run_is_unknown_and_not_that_of_its_last_segment(tmp_path):
    run = run_folder.read(claimed.Results(tmp_path).add(0, 30.0))
    run["goal"]["stop_at_target"] = run["metrics"]["target_reached"] = True
    run["metrics"] |= {"energy_j": None, "mean_power_w": None}
    run["instrument_summaries"] = {"telemetry": {"energy_j": 1000.0, "mean_power_w": 100.0, "by_device": {}}}
    resumed = run | {"segments": [{"from_step": 0, "train_s": 20.0}, {"from_step": 5, "train_s": 10.0}]}
    names = ("energy_j", "mean_power_w", "energy_kj_to_target")
    assert [row_of(run)[name] for name in names] == [1000.0, 100.0, 1.0]
    assert [row_of(resumed)[name] for name in names] == [None] * 3
