"""The leaderboard: what stands, how a record came down, and that a stale committed table is found."""

import json
import re

import claimed
import pytest
from claimed import results  # noqa: F401  a fixture

from bench.claims import claim as claims
from bench.claims import leaderboard
from bench.cli import table


def entries(results):
    from bench.record import store

    return leaderboard.by_track(store.read_rows([results.folder])).get("cpu_nano", [])


def progression(results, judge=lambda entry: None, races=()):
    ranked = entries(results)
    return leaderboard.progression(ranked, claims.track_rules("cpu_nano"), races, judge), ranked


def three(results, train_s, seeds=range(3), **facts):
    for seed in seeds:
        results.add(seed, train_s=train_s + 0.01 * seed, val_loss=2.74 + 0.01 * seed, **facts)


def test_an_entry_is_repeats_and_its_numbers_were_worked_out_by_hand(results):
    three(results, 10)
    (entry,) = entries(results)
    assert entry.times_s == [10.0, 10.01, 10.02]
    assert entry.train_s == pytest.approx(10.01)
    assert entry.last_run == claimed.at(2)
    assert entry.losses["p"] < 0.01 and entry.losses["passed"]


def test_a_record_comes_down_only_by_faster_runs_that_reach_the_target(results):
    three(results, 10, source="11")
    three(results, 11, source="22")  # slower
    three(results, 9, source="33", seeds=range(2))  # too few
    for seed in range(3):
        results.add(seed, train_s=5.0 + 0.01 * seed, val_loss=3.2 + 0.01 * seed, source="44")  # misses the target
    three(results, 8, source="55")
    records, ranked = progression(results)
    assert [entry.train_s for entry, _, _ in records] == pytest.approx([10.01, 8.01])
    assert [entry.status for entry in sorted(ranked, key=lambda entry: entry.since)] == [
        "was a record",
        "slower than the record",
        "too few runs, 2 of 3",
        "target not reached",
        "record",
    ]
    assert records[1][2]["change_pct"] == pytest.approx(100 * (8.01 / 10.01 - 1))
    assert records[1][2]["measured"] == "not in one session"


def test_later_runs_of_an_old_record_make_it_no_younger(results):
    three(results, 10, source="11")
    three(results, 8, source="22")
    three(results, 10, source="11", seeds=range(3, 6))  # raced against once more
    records, _ = progression(results)
    assert [(entry.since, len(entry.rows)) for entry, _, _ in records] == [(claimed.at(2), 6), (claimed.at(5), 3)]


def test_the_same_config_and_code_in_a_later_session_or_setting_is_no_new_record(results):
    three(results, 10, source="11")
    three(results, 8, source="22")
    for source in ("11", "22"):  # of another version of torch
        newer = lambda run: run["environment"].update(torch="9.9")  # noqa: E731
        three(results, 7, seeds=range(3, 6), source=source, change=newer)
    records, ranked = progression(results)
    assert len(ranked) == 4 and [entry.train_s for entry, _, _ in records] == pytest.approx([10.01, 8.01])
    assert {entry.status for entry in ranked} >= {"repeats the record", "repeats an earlier record"}


def test_a_record_of_another_environment_says_that_it_was_not_raced(results):
    three(results, 10, source="11")
    three(results, 8, source="22", change=lambda run: run["environment"].update(torch="9.9"))
    assert progression(results)[0][1][2]["measured"] == "times of two environments"


def test_the_baseline_of_a_race_is_no_record_because_its_machine_is_faster(results):
    in_race = {"race_id": "r", "position": 0, "attempt": 1, "discarded": False}
    three(results, 10, source="11")
    three(results, 9, source="22", race=in_race | {"arm": "A"})  # today's default
    three(results, 8, source="33", race=in_race | {"arm": "B"})
    race = {"race_id": "r", "baseline": "A", "arms": {}, "result": {"against": {}}}
    records, ranked = progression(results, races=[race])
    assert [entry.train_s for entry, _, _ in records] == pytest.approx([10.01, 8.01])
    assert {entry.status for entry in ranked} == {"was a record", "the baseline of a race", "record"}


def test_what_judge_refuses_is_no_record(results):
    three(results, 10, source="11")
    three(results, 8, source="22")
    records, ranked = progression(results, judge=lambda entry: "a rule" if entry.train_s < 9 else None)
    assert len(records) == 1
    assert {entry.status for entry in ranked} == {"record", "refused: a rule"}


def test_other_devices_have_their_own_record_and_open_runs_and_warm_ups_have_none(results):
    three(results, 10)
    three(results, 12, change=lambda run: run["environment"].update(cpu_model="Slow CPU"))
    three(results, 1, overrides=["goal.val_tokens=16384"])
    results.add(7, train_s=1.0, race={"race_id": "r", "arm": "A", "position": 0, "attempt": 1, "discarded": True})
    records, ranked = progression(results)
    assert [(entry.first["device"], before) for entry, before, _ in records] == [
        ("Example CPU", None),
        ("Slow CPU", None),
    ]
    assert [len(entry.rows) for entry in ranked] == [3, 3]


def test_a_suspect_runs_time_is_no_time_and_a_lost_run_is_counted(results):
    three(results, 10)
    results.add(3, train_s=1.0, change=lambda run: run.update(validity="suspect", validity_reasons=["other programs"]))
    results.add(4, status="failed")
    (entry,) = entries(results)
    assert (len(entry.times_s), len(entry.rows), entry.num_lost) == (3, 4, 1)


def test_the_change_of_a_record_is_that_of_the_race_against_the_one_before(results, monkeypatch):
    folder = results.kept_race(monkeypatch)
    records, ranked = progression(results, judge=leaderboard.failed_rule, races=leaderboard.races_of([results.folder]))
    (_, first, _), (second, before, against) = records[0], records[-1]
    assert (len(records), first, second.status, before.status) == (2, None, "record", "was a record")
    time = json.loads((folder / "race.json").read_text())["result"]["against"]["B"]["time"]
    assert against["change_pct"] == time["change_pct"]
    assert against["measured"] == f"raced, 95 % {time['ci95_pct'][0]:+.2f} to {time['ci95_pct'][1]:+.2f}"


def test_the_leaderboard_is_text_for_a_terminal_and_markdown(results, printed):
    assert f"no runs in {results.folder}/ yet" in printed(table, "--leaderboard")
    three(results, 10)
    out = printed(table, "--leaderboard", "--md")
    assert "## cpu_nano on Example CPU\n" in out and "| record |" in out and out.count(" gpt2-adamw ") == 2
    assert "cpu_nano on Example CPU\n\nbyte-level Python source" in printed(table, "--leaderboard")
    own = results.add(9, overrides=("optim.lr=0.002", "name=mine"))
    (own / "overrides.yaml").write_text("[track=cpu_nano, name=mine, optim.lr=0.002, seed=9]")
    assert re.search(r"^entry +settings .*\n.*\n(.*\n)*mine +optim.lr=0.002  ", printed(table, "--leaderboard"), re.M)


def test_runs_none_of_which_counts_are_counted_with_the_reason(results, capsys):
    for seed in range(3):
        results.add(seed, change=lambda run, seed=seed: run.update(track="track_1_short" if seed else "free"))
    assert table.main(["--leaderboard"]) == 0
    sentence = "3 runs, none of them counts: 2 on tracks that conf/track/ does not have; 1 on free, which has no"
    assert sentence in capsys.readouterr().out


def test_check_fails_when_a_committed_table_is_stale_and_write_mends_it(results, tmp_path, capsys):
    three(results, 10)
    file = tmp_path / "README.md"
    for command in (f"table {results.folder}", f"table --leaderboard --md {results.folder}"):
        file.write_text(f"# Mine\n\n<!-- ./run.sh {command} -->\n<!-- end of ./run.sh -->\n\nand more\n")
        assert table.main(["--check", str(file)]) == 1
        assert f"stale: ./run.sh {command}" in capsys.readouterr().err
        assert table.main(["--write", str(file)]) == 0
        assert table.main(["--check", str(file)]) == 0
        text = file.read_text()
        assert text.startswith("# Mine\n") and text.endswith("\n\nand more\n") and "gpt2-adamw" in text
        three(results, 9, seeds=range(5, 8))
        assert table.main(["--check", str(file)]) == 1


def test_only_tables_may_be_written_into_a_file(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("<!-- ./run.sh run seed=1 -->\n<!-- end of ./run.sh -->\n")
    with pytest.raises(ValueError, match="only tables of ./run.sh table"):
        table.main(["--write", str(file)])


def test_the_committed_tables_are_up_to_date(monkeypatch, capsys):
    monkeypatch.delenv("SPEEDRUN_RESULTS", raising=False)
    assert table.main(["--check"]) == 0, capsys.readouterr().err
