"""./run.sh sql and speedrun.sql(): results by a query that can change nothing."""

import _thread
import json
import threading

import pytest
from comparing import a_run, six_runs, write  # noqa: F401

from bench import api
from bench.cli import export, sql
from bench.record import ledger


def test_a_setting_is_a_column_by_its_dotted_name(six_runs, capsys):
    query = "SELECT optim.lr, avg(val_loss) AS loss, count(*) AS n FROM runs WHERE status = 'complete' GROUP BY 1"
    assert sql.main([query]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "optim.lr  loss  n",
        "--------  ----  -",
        "   0.003  4.27  3",
        "   0.006  4.28  3",
    ]
    assert api.sql(query).to_dict() == [
        {"optim.lr": 0.003, "loss": pytest.approx(4.27), "n": 3},
        {"optim.lr": 0.006, "loss": pytest.approx(4.28), "n": 3},
    ]
    table = api.sql("SELECT r.optim.lr AS lr FROM runs r JOIN metrics m USING (run_id) WHERE m.metric = 'train_s'")
    assert sorted(row["lr"] for row in table.to_dict()) == [0.003] * 3 + [0.006] * 3
    assert api.sql("SELECT 'optim.lr is 1' AS text, optim.lr FROM runs LIMIT 1").to_dict()[0]["text"] == "optim.lr is 1"


def test_metrics_steps_and_columns_are_tables(six_runs):
    assert api.sql("SELECT sum(value) AS total FROM metrics WHERE metric = 'train_s'").to_dict() == [{"total": 75.0}]
    steps = api.sql(
        "SELECT count(DISTINCT run_id) AS runs, max(step) AS step FROM steps WHERE val_loss NOTNULL", "aaaaaaaa"
    )
    assert steps.to_dict() == [{"runs": 3, "step": 4}]
    kinds = {(row["table_name"], row["name"]): row["type"] for row in api.sql("SELECT * FROM columns").to_dict()}
    keys = [("runs", "optim.lr"), ("runs", "target_reached"), ("runs", "seed"), ("runs", "model"), ("steps", "step_ms")]
    assert [kinds[key] for key in keys] == ["REAL", "BOOLEAN", "INTEGER", "TEXT", "REAL"]


def test_names_choose_the_runs(six_runs):
    assert api.sql("SELECT count(*) AS n FROM runs", "bbbbbbbb").to_dict() == [{"n": 3}]
    assert api.sql("SELECT count(*) AS n FROM runs", six_runs / "cpu_nano").to_dict() == [{"n": 7}]


def test_lists_are_read_as_json(six_runs):
    text = "SELECT count(*) AS n FROM runs, json_each(runs.machine_doubts)"
    assert json.loads(api.sql(text, six_runs).to_json()) == [{"n": 0}]
    table = api.sql("SELECT value FROM json_each('[1, 2]')", six_runs)
    assert json.loads(table.to_json()) == [{"value": 1}, {"value": 2}]


def test_forms(six_runs, capsys):
    query = "SELECT config_id, max(seed) AS seed, NULL AS none, 1, 1 FROM runs WHERE seed < 6 GROUP BY 1"
    for form in ("--json", "--csv", "--md"):
        assert sql.main([query, form]) == 0
    first = {"config_id": "aaaaaaaa", "seed": 4, "none": None, "1": 1, "1:1": 1}
    output = capsys.readouterr().out
    assert json.loads(output[: output.index("]") + 1])[0] == first
    assert "config_id,seed,none,1,1:1\naaaaaaaa,4,,1,1\n" in output.replace("\r", "")
    assert "| aaaaaaaa  |    4 |      |   1 |   1 |" in output


@pytest.mark.parametrize(
    "query, message",
    [
        ("SELECT val_los FROM runs", "there is no column val_los; did you mean val_loss"),
        ("SELECT lr FROM runs", "there is no column lr; did you mean optim.lr[?]"),
        ('SELECT "optim.lrr" FROM runs', 'there is no column "optim.lrr"; did you mean optim.lr'),
        ('SELECT run_id FROM runs WHERE model = "gpt2"', 'there is no column "gpt2".* single quotes'),
        ("SELECT * FROM run", "there is no table run; did you mean runs"),
        ("SELECT medina(val_loss) FROM runs", "there is no function medina"),
        ("SELECT 1; SELECT 2", "several statements"),
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("", "no query"),
        ("DELETE FROM _rows", "read only"),
        ("INSERT INTO columns VALUES (1, 2, 3)", "read only"),
        ("ATTACH '/tmp/other.sqlite' AS other", "read only"),
        ("PRAGMA journal_mode = WAL", "read only"),
        ("VACUUM INTO '/tmp/other.sqlite'", "read only"),
        ("SELECT load_extension('/tmp/x')", "not authorized|read only|no function"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_try(six_runs, query, message):
    with pytest.raises(ValueError, match=message):
        api.sql(query)


def test_ctrl_c_ends_an_endless_query(six_runs):
    threading.Timer(0.5, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        api.sql("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT max(x) FROM c")


def test_what_json_does_not_have_is_text_or_null(six_runs, capsys):
    assert sql.main(["SELECT x'00ff' AS bytes, 1e999 AS infinite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"bytes": "00ff", "infinite": None}]


def test_steps_of_too_many_runs_are_not_read(six_runs, monkeypatch):
    from bench.api import queries

    monkeypatch.setattr(queries, "MAX_STEPS_RUNS", 6)
    with pytest.raises(ValueError, match="steps: 7 runs have a file each: name at most 6"):
        api.sql("SELECT * FROM steps")


def test_a_query_sees_what_changed_in_files_since(six_runs):
    run = six_runs / "cpu_nano" / "20261121T030000Z-x-aaaaaaaa-s0" / "run.json"
    before = api.sql("SELECT sum(train_s) AS total FROM runs").to_dict()
    run.write_text(run.read_text().replace('"train_s": 10.0', '"train_s": 70.0'))
    assert before == [{"total": 75.0}] and api.sql("SELECT sum(train_s) AS total FROM runs").to_dict() == [
        {"total": 135.0}
    ]


def test_without_a_run_there_are_tables_without_rows(results):
    assert api.sql("SELECT run_id FROM runs").to_dict() == []
    ledger.append(results, "plan")
    assert api.sql("SELECT count(*) AS n FROM steps").to_dict() == [{"n": 0}]


def test_parquet_has_a_typed_column_for_every_setting(six_runs, tmp_path_factory):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path_factory.mktemp("out") / "runs.parquet"
    assert export.main([str(six_runs), "--to", "parquet", "--out", str(path)]) == 0
    table = parquet.read_table(path)
    types = {name: str(table.schema.field(name).type) for name in ("optim.lr", "model.width", "seed", "target_reached")}
    assert types == {"optim.lr": "double", "model.width": "int64", "seed": "int64", "target_reached": "bool"}
    assert sorted(table.column("optim.lr").to_pylist())[1:6:4] == [0.003, 0.006]
    assert "config" not in table.column_names and "identity_version" not in table.column_names
