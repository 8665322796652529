"""export --to postgres, into Debian's PostgreSQL, started here on a unix socket."""

import json
import math
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from comparing import a_run, six_runs, write  # noqa: F401

from bench.cli import export
from bench.record.exporters import postgres

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


@pytest.fixture(scope="module")
def server():
    """URL of a server of its own, which runs as an unprivileged user; it ends with the tests."""
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")
    if not PROGRAMS:
        pytest.skip("needs PostgreSQL's server: apt install postgresql")
    bin_folder, is_root = PROGRAMS[-1].parent, os.geteuid() == 0
    owner = pwd.getpwnam("nobody") if is_root else pwd.getpwuid(os.geteuid())
    with tempfile.TemporaryDirectory(prefix="pg") as base:  # pytest's own folders are closed to others
        os.chown(base, owner.pw_uid, owner.pw_gid)
        user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if is_root else {}

        def call(program, *arguments):
            command = [bin_folder / program, "-D", f"{base}/data", *arguments]
            subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, cwd=base, **user)

        call("initdb", "-A", "trust", "-U", "lab", "--no-sync", "-E", "UTF8", "--locale", "C")
        settings = f"-k {base} -c listen_addresses= -c fsync=off -c max_connections=10 -c shared_buffers=16MB"
        call("pg_ctl", "-w", "-l", f"{base}/log", "-o", settings, "start")
        try:
            yield f"postgresql:///postgres?host={base}&user=lab"
        finally:
            call("pg_ctl", "-w", "-m", "immediate", "stop")


@pytest.fixture
def database(server):
    """URL of an empty database; call it with a query for its rows."""
    import psycopg

    with psycopg.connect(server, autocommit=True) as db:
        db.execute("DROP DATABASE IF EXISTS lab")
        db.execute("CREATE DATABASE lab")
    url = server.replace("///postgres", "///lab")

    def query(text):
        with psycopg.connect(url) as db:
            cursor = db.execute(text)
            return cursor.fetchall() if cursor.description else None

    query.url = url
    return query


def exported(database, *arguments):
    return export.main([*map(str, arguments), "--to", "postgres", "--out", database.url])


def types(database, table="runs"):
    query = f"SELECT column_name, data_type FROM information_schema.columns WHERE table_name = '{table}'"
    return dict(database(query))


def test_settings_are_typed_columns_and_metrics_a_view(six_runs, database, capsys):
    assert exported(database, six_runs, "--steps") == 0
    assert capsys.readouterr().out.startswith("database lab: 7 runs (7 new), 3")
    rows = database(
        "SELECT \"optim.lr\", avg(val_loss), count(*) FROM runs WHERE status = 'complete' GROUP BY 1 ORDER BY 1"
    )
    assert rows == [(0.003, pytest.approx(4.27), 3), (0.006, pytest.approx(4.28), 3)]
    assert database("SELECT sum(value) FROM metrics WHERE metric = 'train_s'") == [(75.0,)]
    assert database("SELECT count(DISTINCT run_id), max(step) FROM steps WHERE val_loss IS NOT NULL") == [(7, 4)]
    names = ("optim.lr", "target_reached", "seed", "model", "instruments.telemetry.rate_hz", "machine_doubts")
    columns = types(database)
    assert [columns.get(name) for name in names[:4]] == ["double precision", "boolean", "bigint", "text"]
    assert columns["machine_doubts"] == "jsonb"
    assert database("SELECT count(*) FROM runs WHERE target_reached") == [(6,)]
    assert types(database, "steps")["step_ms"] == "double precision"


def test_a_second_export_updates_and_adds_and_leaves_what_the_lab_added(six_runs, database, capsys):
    assert exported(database, six_runs) == 0
    database("ALTER TABLE runs ADD COLUMN note text")
    database("UPDATE runs SET note = 'ours', val_loss = 1")
    before = database("SELECT * FROM runs ORDER BY run_id")
    run = six_runs / "cpu_nano" / "20261121T030000Z-x-aaaaaaaa-s0" / "run.json"
    run.write_text(run.read_text().replace('"train_s": 10.0', '"train_s": 70.0'))
    write(six_runs, a_run("A", 20.0, 20))
    capsys.readouterr()
    assert exported(database, six_runs) == 0
    assert capsys.readouterr().out == "database lab: 8 runs (1 new)\n"
    assert database("SELECT train_s, note FROM runs WHERE seed = 0") == [(70.0, "ours")]
    assert database("SELECT count(*) FROM runs WHERE val_loss = 1") == [(0,)]
    after = database("SELECT * FROM runs ORDER BY run_id")
    assert exported(database, six_runs) == 0
    assert database("SELECT * FROM runs ORDER BY run_id") == after != before


def test_a_setting_of_another_type_or_name_widens_the_table(six_runs, database, tmp_path_factory, capsys):
    assert exported(database, six_runs) == 0
    assert (types(database)["optim.lr"], types(database)["model.width"]) == ("double precision", "bigint")
    other = write(tmp_path_factory.mktemp("other"), a_run("C", 10.0, 30))
    text = (other / "config.yaml").read_text()
    text = text.replace("lr: 0.003", "lr: auto").replace("  width: ", "  width: 0.5\n  old_width: ")
    long, strange = "x" * 70, '"; DROP TABLE runs; --'
    (other / "config.yaml").write_text(text.replace("optim:\n", f"optim:\n  {long}: 1\n  '{strange}': 1\n"))
    assert exported(database, other) == 0
    assert f"optim.{long}" in capsys.readouterr().err
    columns = types(database)
    assert (columns["optim.lr"], columns["model.width"]) == ("text", "double precision")
    assert columns[f"optim.{strange}"] == "bigint" and not any("xxx" in name for name in columns)
    assert database('SELECT DISTINCT "optim.lr" FROM runs WHERE seed < 9 ORDER BY 1') == [("0.003",), ("0.006",)]
    assert database('SELECT "optim.lr" FROM runs WHERE seed = 30') == [("auto",)]
    assert exported(database, six_runs) == 0  # and whose types are narrower goes on
    assert database("SELECT count(*) FROM runs") == [(8,)]


def test_what_no_column_can_hold_costs_no_other_run(six_runs, database):
    bad = write(six_runs, a_run("A", 10.0, 40) | {"name": "a\0b", "seed": 2**70})
    run = (bad / "run.json").read_text()
    (bad / "run.json").write_text(run.replace('"train_s": 10.0', '"train_s": NaN'))
    assert exported(database, six_runs) == 0
    assert database("SELECT count(*) FROM runs WHERE seed < 9") == [(6,)]


@pytest.mark.parametrize(
    ("value", "kept"),
    [({"a\0": "x\0y"}, {"a": "xy"}), ({"a": r"C:\u0000"}, {"a": r"C:\u0000"}), ([math.inf, "\\\0"], [None, "\\"])],
)
def test_json_keeps_all_that_postgresql_can_hold(value, kept):
    assert json.loads(postgres._cell(json.dumps(value), "jsonb")) == kept


@pytest.mark.parametrize("name", ["m" * 70, "xmin", "ctid", "a\0b", ""])
def test_steps_and_settings_whose_names_no_column_can_have_are_named_and_cost_nothing_else(
    six_runs, database, capsys, name
):
    folder = next((six_runs / "cpu_nano").glob("*-s0"))
    head, *lines = (folder / "steps.csv").read_text().splitlines()
    (folder / "steps.csv").write_text(
        "".join(f"{line}\n" for line in (f"{head},{name}", *(f"{line},1.5" for line in lines)))
    )
    if name == "xmin":
        with open(folder / "config.yaml", "a") as file:
            file.write("xmin: 3\n")
    for _ in range(2):
        assert exported(database, six_runs, "--steps") == 0
        assert "PostgreSQL has no columns with such names" in capsys.readouterr().err
    assert database("SELECT count(*) FROM runs") == [(7,)]
    assert not any("mmm" in name for name in types(database, "steps"))


def test_numbers_of_over_64_bits_in_steps_cost_no_other_step(six_runs, database):
    assert exported(database, six_runs, "--steps") == 0
    before = database("SELECT count(*) FROM steps")[0][0]
    steps = next((six_runs / "cpu_nano").glob("*-s0")) / "steps.csv"
    head, *lines = steps.read_text().splitlines()
    lines[-1] = f"{2**63},{lines[-1].partition(',')[2]}"
    steps.write_text("\n".join([f"{head},t_ns", *(f"{line},{2**63}" for line in lines)]) + "\n")
    assert exported(database, six_runs, "--steps") == 0
    assert database("SELECT count(*), max(t_ns) FROM steps") == [(before - 1, None)]


def test_steps_that_a_run_no_longer_has_go(six_runs, database):
    folder = next((six_runs / "cpu_nano").glob("*-s0"))
    assert exported(database, six_runs, "--steps") == 0
    (folder / "steps.csv").write_text("".join((folder / "steps.csv").read_text().splitlines(keepends=True)[:3]))
    assert exported(database, six_runs, "--steps") == 0
    assert database(f"SELECT count(*) FROM steps WHERE run_id = '{folder.name}'") == [(2,)]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://lab:s3cret pw@h:x/x",
        "postgresql://lab:s3cret/pw@h/x",
        "postgresql://lab:s3cret@s3cret@h/x",
        "postgresql://lab:%zzs3cret@h/x",
        "host=/nowhere password=my s3cret",
        "postgresql://lab:s3cret@/lab?host=/nowhere/s3cret",
    ],
)
def test_no_refusal_shows_a_password(six_runs, url):
    pytest.importorskip("psycopg")
    with pytest.raises(ValueError, match="nothing was exported") as refused:
        export.main([str(six_runs), "--to", "postgres", "--out", url])
    assert "s3cret" not in str(refused.value)


def test_a_database_that_refuses_is_a_sentence_and_nothing_is_changed(six_runs, database):
    assert exported(database, six_runs) == 0
    database('CREATE VIEW mine AS SELECT "optim.lr" FROM runs')  # of whose column the type cannot be changed
    folder = next((six_runs / "cpu_nano").iterdir())
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.00", "lr: about 0.00"))
    write(six_runs, a_run("C", 10.0, 50))
    with pytest.raises(ValueError, match="cannot alter type of a column used by a view.*nothing was exported"):
        exported(database, six_runs)
    assert database("SELECT count(*) FROM runs") == [(7,)]

    with pytest.raises(ValueError, match="--out postgresql://"):
        export.main([str(six_runs), "--to", "postgres"])


def test_exports_at_once_follow_each_other(six_runs, database, tmp_path_factory):
    other = shutil.copytree(six_runs, tmp_path_factory.mktemp("machine") / "results")
    commands = []
    for folder in [six_runs, other] * 2:
        command = [sys.executable, "-m", "bench", "export", folder, "--to", "postgres", "--out", database.url]
        commands.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    outputs = [command.communicate(timeout=120)[0] for command in commands]
    assert sorted(outputs) == ["database lab: 7 runs (0 new)\n"] * 3 + ["database lab: 7 runs (7 new)\n"]
