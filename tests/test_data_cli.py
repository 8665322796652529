"""./run.sh data: what it prints, what it gives to programs, and its exit codes."""

import json

import pytest

from bench.cli import data as data_cli
from bench.data import shards

SMALL = ["data.train_tokens=5000", "data.train_sha256=null", "data.val_sha256=null"]


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """A data root of the test's own, and the folder that the user called from."""
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    return tmp_path


def call(capsys, *arguments):
    """Calls the verb -> (exit code, stdout, stderr)."""
    code = data_cli.main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_what_was_made_is_shown_to_people_and_to_programs(capsys):
    code, out, err = call(capsys, "make", "markov", *SMALL)
    assert code == 0 and "building markov-" in err
    assert "markov: vocab_size 64, 1 train and 1 val shards, checked" in out
    assert call(capsys, "show", "markov", *SMALL) == (0, out, "")
    code, out, err = call(capsys, "make", "markov", *SMALL, "--json")
    facts = json.loads(out)
    assert code == 0 and json.loads(call(capsys, "show", "markov", *SMALL, "--json")[1]) == [facts]
    assert facts["name"] == "markov" and facts["vocab_size"] == 64
    (file,) = facts["train"]
    assert (file["num_tokens"], file["num_bytes"], file["max_token"]) == (5000, 11024, 63)
    assert file["sha256"] == shards.sha256(file["file"])


def test_shows_the_header_of_any_shard(capsys, root):
    shards.write(root / "a_train_1.bin", [5, 50256, 7, 1, 2, 3, 4, 8, 9, 10])
    code, out, _ = call(capsys, "show", "a_train_1.bin", "--json")
    header = {"magic": 20240520, "version": 1, "num_tokens": 10, "num_bytes": 1044}
    tokens = {"max_token": 50256, "first_tokens": [5, 50256, 7, 1, 2, 3, 4, 8]}
    file = root / "a_train_1.bin"
    assert (code, json.loads(out)) == (0, [{"file": str(file), "sha256": shards.sha256(file)} | header | tokens])
    code, out, _ = call(capsys, "show", "a_train_1.bin")
    assert code == 0 and "first_tokens  [5, 50256, 7, 1, 2, 3, 4, 8]" in out


def test_lists_all_data_and_what_to_do_for_those_that_are_not_there(capsys):
    code, out, _ = call(capsys, "show", "--json")
    listed = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert set(listed) == {"pysource", "markov", "text", "shards", "fineweb10B", "finewebedu10B"}
    why = "data=pysource does not exist yet: ./run.sh data make pysource"
    assert listed["pysource"] == {"name": "pysource", "there": False, "why": why}
    assert call(capsys, "show", "pysource")[0] == 1  # it is not there
    assert "./run.sh data fetch fineweb10B" in listed["fineweb10B"]["why"]
    assert "data.train_glob" in listed["text"]["why"]
    call(capsys, "make", "pysource")
    code, out, _ = call(capsys, "show")
    assert "pysource       2 shards, 1,184,821 train tokens, 2.5 MiB, checked" in out.splitlines()


def test_a_damaged_file_is_exit_code_1(capsys, root):
    (root / "bad.bin").write_bytes(b"x" * 2000)
    code, out, err = call(capsys, "show", "bad.bin")
    assert (code, out) == (1, "") and err.startswith("data: ") and "bad.bin: magic" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["make", "nonsense"], "nonsense: unknown data; choose from fineweb10B, finewebedu10B, markov"),
        (["make"], "data: make: name one of fineweb10B"),
        (["make", "fineweb10B"], "downloaded, not made: use ./run.sh data fetch fineweb10B"),
        (["make", "markov", "data.typo=3"], "unknown setting data.typo=3"),
        (["make", "markov", "data.train_tokens=many"], "data.train_tokens=many: use a whole number from 2 to"),
        (["make", "markov", "data.train_tokens"], "a setting is data.KEY=VALUE"),
        (["make", "markov", "data.markov_lags=[1"], "data.markov_lags=[1: the value is not yaml"),
        (["make", "markov", "data.train_glob=x"], "data.train_glob=x: it has no effect with source markov"),
        (["show", "data.train_glob=x"], "show data.train_glob=x: name one of"),
        (["show", "nonsense"], "nonsense: unknown data"),
        (["show", "nosuch.bin"], "nosuch.bin: there is no such file; name one, or one of fineweb10B"),
        (["show", "notes.txt"], "notes.txt: a file, and not a .bin of tokens; choose from"),
    ],
)
def test_wrong_use_is_exit_code_2(capsys, root, arguments, complaint):
    (root / "notes.txt").write_text("no tokens")
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert complaint in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_a_verb_that_does_not_exist_is_refused(arguments):
    with pytest.raises(ValueError, match="VERB"):
        data_cli.main(arguments)


def test_without_network_fetch_is_exit_code_1_and_one_line(capsys, monkeypatch, root):
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: pip install huggingface_hub")
    from bench.data.sources import hub

    monkeypatch.setattr(hub, "LOCKS", root)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no server listens there
    code, out, err = call(capsys, "fetch", "finewebedu10B")
    assert (code, out) == (1, "")
    assert "data=finewebedu10B could not be fetched" in err and err.count("\n") == 1
    assert "data=pysource" in err and "data=shards" in err  # what to try


def test_the_settings_of_a_dataset_can_be_changed():
    data = data_cli.data_config("fineweb10B", ["data.num_train_shards=2"])
    assert (data.source, data.num_train_shards) == ("hub", 2)
    assert data_cli.data_config("markov", ["data.markov_lags=[1,3]"]).markov_lags == [1, 3]
