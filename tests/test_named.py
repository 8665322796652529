"""What a word of the user's means, the same in every verb."""

import json
import shutil
from types import SimpleNamespace

import pytest
from comparing import COMPLETE, FAILED

from bench.analysis.projection import links
from bench.cli import judge, race, referee, replay, table, verify
from bench.record import named


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Two runs, a race of them, a claim's folder and a log."""
    for base in (COMPLETE, FAILED):
        shutil.copytree(base, tmp_path / "cpu_nano" / base.name)
    (tmp_path / "races" / "r1").mkdir(parents=True)
    (tmp_path / "races" / "r1" / "race.json").write_text("{}")
    (tmp_path / "claimed").mkdir()
    (tmp_path / "claimed" / "claim.yaml").write_text("track: cpu_nano")
    (tmp_path / "a.log").write_text("step:1/2")
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path))
    monkeypatch.setenv("SPEEDRUN_CWD", "/")
    return tmp_path


def test_a_run_is_a_path_its_run_json_its_id_or_part_of_it(results):
    folder = results / "cpu_nano" / COMPLETE.name
    for name in (str(folder), f"cpu_nano/{folder.name}", f"{folder}/run.json", folder.name, "031500Z"):
        assert named.folder(name) == folder
        assert named.runs([name]) == [folder]


def test_several_runs_are_a_folder_a_glob_a_config_id_or_a_comma_list(results):
    folders = [results / "cpu_nano" / base.name for base in (COMPLETE, FAILED)]
    for name in ("cpu_nano", "cpu_nano/*-s?", "48623a63", "031500Z,031501Z", str(results)):
        assert named.runs([name]) == folders, name
    with pytest.raises(ValueError, match="48623a63: is part of 2 run ids, .* among them"):
        named.folder("48623a63")
    with pytest.raises(ValueError, match="fits 2 paths"):
        named.folder("cpu_nano/*")


def test_a_race_is_its_folder_its_race_json_or_its_id_and_an_arm_is_named_after_it(results):
    folder = results / "races" / "r1"
    for name in ("races/r1", "races/r1/race.json", "r1"):
        assert [(arm.race, arm.arm) for arm in named.find([name, f"{name}:B"])] == [(folder, None), (folder, "B")]


def test_a_claim_and_a_log_are_found_by_path(results):
    (claim, log) = named.find(["claimed", "a.log"])
    assert (claim.claim, claim.race, log.paths, log.claim) == (results / "claimed", None, [results / "a.log"], None)
    assert named.find(["a.log"])[0].path == results / "a.log"
    with pytest.raises(ValueError, match="a.log: is not a folder of runs: .*import reads logs"):
        named.folder("a.log")


def test_a_whole_run_id_wins_over_a_longer_one_that_begins_with_it(results):
    shutil.copytree(results / "cpu_nano" / COMPLETE.name, results / "a-track" / f"{COMPLETE.name}-2")
    assert named.folder(COMPLETE.name) == results / "cpu_nano" / COMPLETE.name


def test_every_verb_refuses_an_unknown_word_in_the_same_words(results, capsys):
    sentence = (
        "nothing-like-it: is not a path, a glob that matches, or part of the id of a run, a race or a sweep: ./run.sh"
    )
    resume = lambda argv: race.main(["--resume", *argv])  # noqa: E731
    for verb in (judge.main, table.main, resume, lambda argv: named.folder(*argv)):
        with pytest.raises(ValueError, match=sentence):
            verb(["nothing-like-it"])
    assert verify.main(["nothing-like-it"]) == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "031500Z,", ",031500Z"])
def test_an_empty_word_is_not_the_folder_that_the_user_stands_in(results, monkeypatch, name):
    monkeypatch.setenv("SPEEDRUN_CWD", str(results))
    for find in (named.find, named.runs):
        with pytest.raises(ValueError, match="an empty word, or a comma too many"):
            find([name])


def test_a_race_of_another_results_folder_is_not_resumed_here(results, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "races" / "r2"
    other.mkdir(parents=True)
    (other / "plan.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="r2: is not a race of"):
        race.main(["--resume", str(other)])


@pytest.fixture
def raced(results):
    """A race that has ended, of one run an arm, and one under way whose only run says so itself."""
    done, running = (f"20261101T{time}Z-race-{end}" for time, end in (("010000", "aaaa1111"), ("020000", "bbbb2222")))
    arms = {"A": {"runs": [f"cpu_nano/{COMPLETE.name}"]}, "B": {"runs": [f"cpu_nano/{FAILED.name}"]}}
    for name in (done, running):
        (results / "races" / name).mkdir()
        (results / "races" / name / "plan.json").write_text("{}")
    (results / "races" / done / "race.json").write_text(json.dumps({"arms": arms}))
    path = results / "cpu_nano" / FAILED.name / "run.json"
    run = json.loads(path.read_bytes()) | {"race": {"race_id": running, "arm": "B", "discarded": False}}
    path.write_text(json.dumps(run))
    return done, running


def test_part_of_a_race_id_means_the_race_and_after_a_colon_its_arm(results, raced):
    for name in (raced[0], "race-aaaa1111", "aaaa1111", "20261101T01"):
        (arm,) = named.find([name])
        assert (arm.race.name, arm.arm) == (raced[0], None)
        (arm,) = named.find([f"{name}:B"])
        assert (arm.race.name, arm.arm) == (raced[0], "B")
    with pytest.raises(ValueError, match="20261101: is part of 2 race ids: .*aaaa1111, .*bbbb2222"):
        named.find(["20261101"])


def test_where_a_verb_wants_runs_a_race_gives_those_of_its_arms(results, raced):
    complete, failed = (results / "cpu_nano" / base.name for base in (COMPLETE, FAILED))
    assert named.runs(["aaaa1111"]) == [complete, failed]
    assert named.runs(["aaaa1111:A"]) == [complete]
    assert named.runs(["bbbb2222"]) == [failed]  # it has not ended: the run's own record says where it belongs
    with pytest.raises(ValueError, match="aaaa1111:C: the race has no arm C; choose from A, B"):
        named.runs(["aaaa1111:C"])


def test_a_race_and_its_arm_are_understood_by_the_verbs_that_take_runs(results, raced, answer_of, capsys):
    assert verify.main(["aaaa1111:A", "--json"]) in (0, 1)
    assert [record["run_id"] for record in json.loads(capsys.readouterr().out)] == [COMPLETE.name]
    assert {row["run_id"] for row in answer_of(table, "aaaa1111")} == {COMPLETE.name, FAILED.name}


def test_options_take_paths_from_the_folder_in_which_they_were_typed(results, monkeypatch):
    """./run.sh changes the working folder to the checkout, as here."""
    mine = results / "mine"
    search = mine / "searches" / "s1"
    search.mkdir(parents=True)
    for path in (search / "ledger.jsonl", mine / "notes.md", mine / "link.txt"):
        path.touch()
    monkeypatch.setenv("SPEEDRUN_CWD", str(mine))
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(mine))
    assert table.main(["--check", "notes.md"]) == 0
    with pytest.raises(ValueError, match="no table of nccl-tests"):
        links.read("link.txt", 1)
    args = replay._parser().parse_args(["--all", "../cpu_nano"])
    assert [folder.name for folder in replay._folders(args)] == [COMPLETE.name]
    sockets = []
    monkeypatch.setattr(referee.searches, "read", lambda folder: SimpleNamespace(name=folder.name, folder=folder))
    monkeypatch.setattr(referee.serving, "serve", lambda search, socket: sockets.append(socket))
    assert referee.main(["serve", "searches/s1", "--socket", "socket"]) == 0
    assert sockets == [mine / "socket"]
