"""The table as a comparison: settings as columns, conditions, a baseline, pivots; numbers worked out by hand."""

import csv
import io
import json

import pytest
import yaml
from claimed import config as claimed_config
from kept_records import COMPLETE

from bench.base.paths import REPO
from bench.cli import main, table
from bench.config import schema, typed
from bench.record import configs
from bench.report import table_columns

# (optim.lr, model.num_layers, seed): (val_loss, train_s).  Means over seeds: 4.1 and 4.3 below, 3.9 and 4.6 above.
GRID = {
    (0.001, 2, 0): (4.0, 10.0),
    (0.001, 2, 1): (4.2, 10.2),
    (0.001, 4, 0): (4.3, 20.0),
    (0.001, 4, 1): (4.3, 20.4),
    (0.003, 2, 0): (3.8, 10.0),
    (0.003, 2, 1): (4.0, 10.2),
    (0.003, 4, 0): (4.5, 20.0),
    (0.003, 4, 1): (4.7, 20.4),
}


def add(results, number, lr, layers, seed, val_loss, train_s, optim="adamw", **changes):
    """A complete run with these settings, started in that minute."""
    run = json.loads((COMPLETE / "run.json").read_text())
    config_id = f"{round(lr * 1e4):04d}{layers:02d}{optim[:2].encode().hex()[:2]}"
    run |= {"config_id": config_id, "seed": seed, "optim": optim, "started_at": f"2026-11-21T05:{number:02d}:00.000Z"}
    run["run_id"] = f"20261121T05{number:02d}00Z-x-{config_id}-s{seed}"
    run["metrics"] |= {"val_loss": val_loss, "train_s": train_s, "num_flagged_steps": 0}
    run |= changes
    values = yaml.safe_load((COMPLETE / "config.yaml").read_text())
    values["optim"] |= {"lr": lr, "name": optim}
    values["model"]["num_layers"] = layers
    folder = results / run["track"] / run["run_id"]
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "config.yaml").write_text(yaml.safe_dump(values | {"seed": seed}, sort_keys=False))
    return run["run_id"]


@pytest.fixture
def grid(results):
    for number, ((lr, layers, seed), (val_loss, train_s)) in enumerate(GRID.items()):
        add(results, number, lr, layers, seed, val_loss, train_s)
    return results


def shown(capsys, *argv, code=0):
    assert main.main(["table", *argv]) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def rows(capsys, *argv):
    return json.loads(shown(capsys, *argv, "--json"))


# ---- settings


@pytest.mark.parametrize(
    "path",
    sorted([*REPO.glob("tests/records/*/config.yaml"), *REPO.glob("results/published/*/*/*/config.yaml")]),
    ids=lambda path: path.parent.name,
)
def test_the_settings_are_those_of_the_yaml(path):
    """The reader takes groups apart; a plain reading of the whole, upgraded, says the same."""
    values = schema.upgraded(yaml.safe_load(path.read_text()))
    plain = {key: value for key, value in typed.leaves(values) if key not in ("name", "seed") and value != {}}
    settings = configs.settings(configs.read(str(path.parent)))
    assert {key: settings[key] for key in plain} == plain
    assert all(value is True for key, value in settings.items() if key not in plain)  # instruments that are on


def test_yaml_with_an_alias_is_read_as_a_whole():
    both = ["a", "b"]
    text = yaml.safe_dump({"data": {"args": both}, "model": {"args": both}})
    assert "&id001" in text
    assert configs.settings(configs.parse(text)) == {"data.args": both, "model.args": both}


def test_todays_config_is_found_whole(results):
    config = claimed_config()
    text = yaml.safe_dump(schema.to_dict(config), sort_keys=False)
    settings = configs.settings(configs.parse(text))
    assert (settings["optim.lr"], settings["model.num_layers"]) == (config.optim.lr, config.model.num_layers)
    assert settings["instruments.telemetry"] is True and "exporters" not in settings


@pytest.mark.parametrize(
    ("texts", "varied"),
    [
        (["optim: {lr: 1.0, b: 2}", "optim: {lr: 2.0, b: 2}"], ["optim.lr"]),
        (["optim: {lr: 1.0}", "optim: {lr: 1.0, momentum: 0.9}"], []),  # only one has it: nothing to compare
        (["optim: {lr: 1.0}", "optim: {lr: 1.0, fused: true}"], []),  # and that is no switch either
        (["optim: {clip: null}", "optim: {clip: 1.0}"], ["optim.clip"]),  # off is a value
        (["x: {y: 1}\ninstruments: {a: {}}", "x: {y: 1}\ninstruments: {}"], ["instruments.a"]),  # on in one alone
        (["track: {p_value: 0.1}", "track: {p_value: 0.2}"], []),  # the track's own column says it
        (["optim: {lr: 1}", "optim: {lr: 1}"], []),
        ([f"script: {{path: a.py}}\ngoal: {{num_steps: {n}, val_tokens: {n}}}" for n in (1, 2)], ["goal.val_tokens"]),
    ],
)
def test_what_differs_among_rows(texts, varied):
    assert configs.varied([{"config": configs.parse(text)} for text in [*texts, ""]]) == varied


def test_settings_that_differ_are_shown_by_themselves_in_every_form(grid, capsys):
    head, _, first, *_ = shown(capsys).splitlines()
    assert head.split()[:6] == ["run_id", "track", "status", "model.num_layers", "optim.lr", "val_loss"]
    assert first.split()[3:6] == ["2", "0.001", "4.0000"]
    assert shown(capsys, "--md").splitlines()[0].split(" | ")[3].strip() == "model.num_layers"
    (line, *_) = csv.DictReader(io.StringIO(shown(capsys, "--csv")))
    assert (line["optim.lr"], line["model.num_layers"]) == ("0.001", "2")
    assert tuple(line) == (*table_columns.COLUMNS, "model.num_layers", "optim.lr")
    assert [row["optim.lr"] for row in rows(capsys)] == [0.001] * 4 + [0.003] * 4


def test_a_narrow_terminal_keeps_what_tells_the_runs_apart(grid, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "95")
    head = shown(capsys).splitlines()[0].split()
    assert head == ["run_id", "track", "status", "model.num_layers", "optim.lr", "val_loss"]
    monkeypatch.setenv("COLUMNS", "70")
    assert "model.num_layers" in shown(capsys).splitlines()[0] or "val_loss" in shown(capsys).splitlines()[0]


def test_columns_are_chosen_by_name_and_glob(grid, capsys):
    expected = ["seed", "val_loss", "model.num_layers"]
    assert shown(capsys, "--columns", "seed,val_loss", "model.num_l*").splitlines()[0].split() == expected
    assert list(rows(capsys, "--columns", "seed")[0]) == ["seed"]
    assert {"optim.lr", "goal.num_steps", "seed"} <= set(rows(capsys, "--columns", "*")[0])


@pytest.mark.parametrize(
    ("where", "num"),
    [
        (["optim.lr<0.003"], 4),
        (["optim.lr>=0.003"], 4),
        (["optim.lr=1e-3"], 4),
        (["optim.lr!=0.003", "model.num_layers=4"], 2),
        (["optim.lr=0.001,0.003"], 8),
        (["optim.lr!=0.001,0.003"], 0),
        (["model=g*"], 8),
        (["model!=g*"], 0),
        (["optim.name=sgd,adam?"], 8),
        (["data.markov_lags=null"], 8),
        (["optim.lr="], 0),
        (["goal.stop_at_target=no"], 8),
        (["track.fixed=[data,goal]"], 8),
        (["instruments.regions=yes"], 8),
    ],
)
def test_where_takes_settings_globs_and_alternatives(grid, capsys, where, num):
    assert len(rows(capsys, "--where", *where)) == num


def test_sort_takes_settings_and_a_sign_turns_it_round(grid, capsys):
    def order(*argv):
        return [(row["optim.lr"], row["seed"]) for row in rows(capsys, *argv, "--where", "model.num_layers=2")]

    assert order("--sort", "-optim.lr,seed") == [(0.003, 0), (0.003, 1), (0.001, 0), (0.001, 1)]
    assert order("--sort", "-started_at") == [(0.003, 1), (0.003, 0), (0.001, 1), (0.001, 0)]  # the newest first


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--where", "optim.lr<low"], "optim.lr is a number and 'low' is not: give a number"),
        (["--columns", "nothing*"], "there is no column nothing*"),
        (["--columns", "seed", "/tmp"], "there is no column /tmp; put folders before --columns"),
        (["--baseline", "optim.lr=0.001"], "it matches 4 of 8 rows"),
        (["--baseline", "nothing"], "it matches no row"),
        (["--baseline", "optim.lr<0.002"], "a baseline is one row: use KEY=VALUE"),
        (["--baseline", "goal.stop_at_target=no", "optim.name=adamw"], "it matches 8 of 8 rows"),
        (["--pivot", "a", "b", "c"], "one or two keys"),
        (["--pivot", "optim.lr", "--value", "name"], "it is not a number"),
        (["--sweep", "nothing"], "(SPEEDRUN_RESULTS); choose from none"),
    ],
)
def test_a_wrong_question_says_what_to_try(grid, capsys, argv, sentence):
    assert sentence in shown(capsys, *argv, code=2)


def test_other_columns_say_size_epochs_power_and_throttling(results, capsys):
    telemetry = {"mean_power_w": 350.5, "by_device": {"0": {"slowed_frac": 0.0}, "1": {"slowed_frac": 0.25}}}
    data = {"train": [{"sha256": "a", "num_tokens": 1000}, {"sha256": "b", "num_tokens": 1000}], "val": []}
    add(
        *(results, 0, 0.001, 2, 0, 4.0, 10.0),
        instrument_summaries={"telemetry": telemetry | {"energy_j": 7000.0}},
        data=json.loads((COMPLETE / "run.json").read_text())["data"] | data,
        model={"arch": "gpt2", "num_params": 123456},
    )
    (row,) = rows(capsys)
    assert (row["size"], row["num_params"], row["num_shards"]) == ("2x64", 123456, 2)
    assert row["epochs"] == 4 * 1024 / 2000  # 4 steps of 1,024 tokens over two shards of 1,000
    assert (row["energy_j"], row["mean_power_w"], row["throttled_frac"]) == (7000.0, 350.5, 0.25)


# ---- against a baseline


def test_a_baseline_run_gives_each_change_without_an_interval(grid, capsys):
    table_rows = rows(capsys, "--baseline", "20261121T050000Z", "--where", "seed=0")
    assert [row["train_s_change_pct"] for row in table_rows] == [None, pytest.approx(100.0), 0.0, pytest.approx(100.0)]
    assert [row["score_change"] for row in table_rows] == [None, *map(pytest.approx, (0.3, -0.2, 0.5))]
    assert {row["train_s_ci95_pct"] for row in table_rows} == {None}


def test_a_baseline_of_repeats_gives_the_interval_of_compare(grid, capsys):
    """val_loss 4.0, 4.2 against 3.8, 4.0: -0.2, se sqrt(0.02/2 + 0.02/2) = 0.1414, df 2, t(0.975, 2) = 4.3027."""
    table_rows = rows(capsys, "--group", "--baseline", "optim.lr=0.001", "model.num_layers=2")
    (other,) = [row for row in table_rows if (row["optim.lr"], row["model.num_layers"]) == (0.003, 2)]
    assert table_rows[0]["score_change"] is None and table_rows[0]["optim.lr"] == 0.001
    assert other["score_change"] == pytest.approx(-0.2)
    half_width = 4.302652729696142 * 0.02**0.5
    assert other["score_ci95"] == pytest.approx([-0.2 - half_width, -0.2 + half_width])
    assert (other["n"], other["train_s_change_pct"]) == (2, pytest.approx(0.0))
    assert "[-0.8085, +0.4085]" in shown(capsys, "--group", "--baseline", "optim.lr=0.001", "model.num_layers=2")


def test_a_row_that_may_not_be_compared_says_why(grid, capsys):
    add(grid, 9, 0.005, 2, 0, 3.0, 5.0, session_id="another")
    assert table.main(["--baseline", "20261121T050000Z", "--where", "seed=0"]) == 0
    out, err = capsys.readouterr()
    assert "1 row without a change of time: 2 sessions" in err
    assert "-1.0000" in out  # losses are compared all the same


# ---- pivots


def test_a_pivot_has_mean_sd_n_and_marks_the_best(grid, capsys):
    add(grid, 10, 0.003, 4, 2, 0.0, 1.0, status="failed", failure={"kind": "out_of_memory"}, validity="invalid")
    head, _, low, high, _, about = shown(capsys, "--pivot", "optim.lr", "model.num_layers").splitlines()
    assert head.split() == ["optim.lr", "\\", "model.num_layers", "2", "4"]
    assert low.split() == ["0.001", "4.1000", "±0.1414", "n=2", "4.3000", "±0.0000", "n=2"]
    assert high.split() == ["0.003", "*", "3.9000", "±0.1414", "n=2", "4.6000", "±0.1414", "n=2,", "1", "failed"]
    assert about == "val_loss: mean ± sd, n runs; * the best; over seed; failed: also aborted or invalid"


def test_a_pivot_counts_no_warm_up_and_says_what_lacks_the_value(grid, capsys):
    warm_up = {"race_id": "r", "arm": "A", "position": 0, "attempt": 1, "discarded": True}
    add(grid, 11, 0.001, 2, 3, 1.0, 9.0, race=warm_up)
    assert "failed" not in shown(capsys, "--pivot", "optim.lr")
    *_, low, high, _, about = shown(capsys, "--pivot", "optim.lr", "--value", "mfu").splitlines()
    assert low.split() == ["0.001", "0,", "4", "without"] and high.split() == ["0.003", "0,", "4", "without"]
    assert about.endswith("; without: of no mfu")
    goal = {"metric": {"name": "accuracy", "unit": None, "direction": "higher"}, "target": None}
    metrics = json.loads((COMPLETE / "run.json").read_text())["metrics"] | {"accuracy": 0.9, "score": 0.9}
    add(grid, 12, 0.001, 2, 4, 1.0, 9.0, goal=goal, metrics=metrics)
    with pytest.raises(ValueError, match="--value score: of accuracy and val_loss: add --where metric=accuracy"):
        table.main(["--pivot", "optim.lr", "--value", "score"])


def test_a_pivot_of_one_key_says_what_its_means_are_over(grid, capsys):
    out = shown(capsys, "--pivot", "optim.lr", "--value", "train_s")
    assert out.splitlines()[2].split()[:2] == ["0.001", "15.15"]  # (10 + 10.2 + 20 + 20.4) / 4
    assert out.splitlines()[-1] == "train_s: mean, sd, n; over seed, model.num_layers"
    table_rows = rows(capsys, "--pivot", "optim.lr")
    expected = [(0.001, pytest.approx(4.2), 4, True), (0.003, pytest.approx(4.25), 4, False)]
    assert [(row["optim.lr"], row["val_loss_mean"], row["n"], row["best"]) for row in table_rows] == expected
    assert shown(capsys, "--pivot", "optim.lr", "--csv").startswith(
        "optim.lr,val_loss_mean,val_loss_sd,n,num_lost,num_without,best"
    )


@pytest.mark.parametrize("options", [["--group"], ["--sort", "seed"], ["--baseline", "x"], ["--columns", "seed"]])
def test_what_a_pivot_cannot_do_is_refused(grid, options):
    with pytest.raises(ValueError, match=f"{options[0]} with --pivot: they cannot be combined"):
        table.main(["--pivot", "optim.lr", *options])
