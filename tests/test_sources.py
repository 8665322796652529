"""Where tokens come from: made once, checked before every run, refused by name with a remedy; and pysource's bytes."""

import hashlib
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from data_settings import QUIET, REPO, conf, root, settings, small_markov  # noqa: F401  root is a fixture

from bench.data import shards
from bench.data.shards import CheckFailed
from bench.data.sources import datasets, markov, pysource
from bench.data.sources import source as base

# ---- what every source does ----


@pytest.mark.parametrize("missing", ["train_tokens", "markov_seed", "markov_lags"])
def test_a_setting_that_a_source_needs_is_asked_for(missing):
    with pytest.raises(ValueError, match=f"data.source=markov needs data.{missing}: give data.{missing}=VALUE"):
        datasets.chosen(small_markov(**{missing: None}))


def test_an_unknown_source_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match="data.source=marcov: .*pysource, markov, text, shards, hub"):
        datasets.chosen(settings(source="marcov"))


def test_a_vocab_size_that_the_source_knows_better_is_refused():
    assert datasets.chosen(conf("pysource", vocab_size=257)).vocab_size == 257  # as a resolved config has it
    with pytest.raises(ValueError, match="data.vocab_size=256: this data has 257"):
        datasets.chosen(conf("pysource", vocab_size=256))


def test_what_is_made_is_found_and_not_made_again(root):
    messages = []
    first = datasets.prepare(small_markov(), say=messages.append)
    assert datasets.prepare(small_markov(), say=messages.append) == first == datasets.find(small_markov(), **QUIET)
    assert len(messages) == 1 and "building markov-" in messages[0]
    assert [(file.num_tokens, file.num_bytes) for file in first.train] == [(5000, 1024 + 2 * 5000)]


def test_other_settings_are_other_data(root):
    first, other = (datasets.prepare(small_markov(markov_seed=seed), **QUIET) for seed in (0, 1))
    assert first.train[0].path.parent != other.train[0].path.parent
    assert first.train[0].sha256 != other.train[0].sha256


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_flipped_bit_is_found_by_its_hash(split):
    dataset = datasets.prepare(small_markov(), **QUIET)
    (file,) = getattr(dataset, split)
    before = os.stat(file.path)
    with open(file.path, "r+b") as damaged:
        damaged.seek(1024)
        byte = damaged.read(1)[0]
        damaged.seek(1024)
        damaged.write(bytes([byte ^ 1]))
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had happened
    with pytest.raises(CheckFailed, match=f"{split}_000000.bin: sha256 .* instead of {file.sha256}.*data make markov"):
        datasets.prepare(small_markov(), **QUIET)
    assert file.path.exists()  # nothing is deleted behind the user's back


def test_a_large_file_is_read_again_only_when_it_changed(monkeypatch):
    monkeypatch.setattr(shards, "ALWAYS_HASHED_BYTES", 0)
    dataset = datasets.prepare(small_markov(), **QUIET)
    monkeypatch.setattr(shards, "max_token", lambda shard: pytest.fail("read although nothing changed"))
    assert datasets.find(small_markov(), **QUIET) == dataset


def test_the_cache_is_not_what_a_file_is_compared_with(root, monkeypatch):
    """The hash of other bytes, written into the cache, gives a refusal, not other bytes."""
    monkeypatch.setattr(shards, "ALWAYS_HASHED_BYTES", 0)
    dataset = datasets.prepare(small_markov(), **QUIET)
    cache = json.loads((root / ".checked.json").read_text())
    cache[str(dataset.val[0].path)]["sha256"] = "0" * 64
    (root / ".checked.json").write_text(json.dumps(cache))
    with pytest.raises(CheckFailed, match=f"sha256 {'0' * 64} instead of {dataset.val[0].sha256}"):
        datasets.find(small_markov(), **QUIET)


def test_a_forged_cache_lets_no_other_bytes_be_taken_for_those_that_are_promised(root, monkeypatch):
    dataset = datasets.prepare(small_markov(), **QUIET)
    shard = dataset.train[0]
    body = bytearray(shard.path.read_bytes())
    body[-2] ^= 1
    shard.path.write_bytes(body)
    forged = {str(file.path): {"stamp": shards.stamp_of(file.path), "sha256": file.sha256} for file in dataset.train}
    cache = root / ".checked.json"
    cache.write_text(json.dumps(forged))
    with pytest.raises(CheckFailed, match=f"sha256 .* instead of {shard.sha256}"):  # read, whatever the cache says
        datasets.find(small_markov(), **QUIET)
    monkeypatch.setattr(shards, "ALWAYS_HASHED_BYTES", 0)  # as of a large file: what others may write is not believed
    for mode in (0o666, 0o664):
        cache.chmod(mode)
        with pytest.raises(CheckFailed, match=f"sha256 .* instead of {shard.sha256}"):
            datasets.find(small_markov(), **QUIET)
        cache.write_text(json.dumps(forged))


@pytest.mark.parametrize("cache", ["", "[]", '{"x": 1}', "not json"])
def test_a_spoilt_cache_costs_only_time(root, cache):
    dataset = datasets.prepare(small_markov(), **QUIET)
    (root / ".checked.json").write_text(cache)
    assert datasets.find(small_markov(), **QUIET) == dataset


def test_an_interrupted_make_leaves_nothing_under_the_final_name(root, monkeypatch):
    def interrupted(self, folder, say):
        shards.write(folder / "train_000000.bin", [1, 2, 3])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(markov.Markov, "make", interrupted)
        datasets.prepare(small_markov(), **QUIET)
    assert os.listdir(root) == []
    assert datasets.prepare(small_markov(), **QUIET).train[0].num_tokens == 5000


def test_a_disk_too_full_is_said_before_anything_is_written(root, monkeypatch):
    monkeypatch.setattr(base.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    with pytest.raises(CheckFailed, match=r"needs 2.0 MiB in .*1.0 MiB free: make room, or .*SPEEDRUN_DATA"):
        datasets.prepare(small_markov(), **QUIET)
    assert os.listdir(root) == []


def test_a_promised_hash_is_kept_or_refused():
    dataset = datasets.prepare(small_markov(), **QUIET)
    promise = {"train_sha256": dataset.train[0].sha256, "val_sha256": dataset.val[0].sha256}
    assert datasets.prepare(small_markov(**promise), **QUIET) == dataset
    with pytest.raises(CheckFailed, match="data.val_sha256=abc: .* has the hash .*data.train_sha256=null"):
        datasets.prepare(small_markov(**promise | {"val_sha256": "abc"}), **QUIET)
    with pytest.raises(CheckFailed, match="data.train_sha256=abc"):
        datasets.prepare(small_markov(train_tokens=6000, train_sha256="abc"), **QUIET)


def test_a_run_needs_one_val_token_more_than_it_predicts():
    dataset = datasets.prepare(small_markov(), **QUIET)
    datasets.check_val_tokens(dataset, 257 * 4096 - 1)
    with pytest.raises(ValueError, match="goal.val_tokens=1052672: the val shards hold 1052672 tokens"):
        datasets.check_val_tokens(dataset, 257 * 4096)


def test_the_data_root_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEEDRUN_DATA", "here")
    assert base.data_root() == tmp_path / "here"
    monkeypatch.setenv("SPEEDRUN_DATA", "~/there")
    assert base.data_root() == base.Path.home() / "there"
    monkeypatch.delenv("SPEEDRUN_DATA")
    assert base.data_root() == REPO / ".data"


# ---- pysource ----


def test_pysource_has_the_bytes_that_the_repository_promises():
    data = conf("pysource")
    dataset = datasets.prepare(data, **QUIET)
    assert [file.sha256 for file in dataset.train + dataset.val] == [data.train_sha256, data.val_sha256]
    assert [file.num_tokens for file in dataset.train + dataset.val] == [1184821, 133980]
    assert dataset.vocab_size == 257 and dataset.val[0].max_token == 256
    tokens = shards.check(dataset.val[0].path).tokens()
    assert tokens[0] == 256
    documents = bytes(tokens[tokens < 256].astype(np.uint8)).decode()
    assert "import" in documents and "def " in documents


@pytest.mark.parametrize(
    ("hydra", "cause"),
    [
        ("1.3.2", "made from hydra-core==1.3.8, .*found hydra-core==1.3.2, .*requirements.lock"),
        ("1.3.8", "hydra-core==1.3.8, .* are the right versions, so a .py file in them was changed"),
    ],
)
def test_pysource_says_whether_the_versions_or_a_file_is_wrong(monkeypatch, hydra, cause):
    versions = {"hydra-core": hydra, "omegaconf": "2.3.1", "antlr4-python3-runtime": "4.9.3"}
    monkeypatch.setattr(pysource.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(pysource, "read_packages", lambda packages: dict.fromkeys("ab", b"x" * 200000))
    with pytest.raises(CheckFailed, match=cause):
        datasets.prepare(conf("pysource"), **QUIET)


def test_pysource_names_a_package_that_is_missing():
    with pytest.raises(CheckFailed, match="no-such-thing==1.0, which is not installed"):
        pysource.read_packages({"no_such_thing": "no-such-thing==1.0"})


def test_documents_are_ordered_by_the_hash_of_their_path():
    names = ["hydra/main.py", "hydra/types.py", "omegaconf/nodes.py"]
    by_hand = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert by_hand != names
    assert pysource.ordered({name: name.encode() for name in names}) == [name.encode() for name in by_hand]


def test_val_takes_whole_documents_until_it_is_long_enough():
    documents = [b"aaa", b"", b"bb", b"c"]  # 4 + 1 + 3 + 2 tokens with their marks
    assert pysource.split(documents, 4) == ([b"aaa"], [b"", b"bb", b"c"])
    assert pysource.split(documents, 5) == ([b"aaa", b""], [b"bb", b"c"])
    assert pysource.split(documents, 6) == ([b"aaa", b"", b"bb"], [b"c"])
    with pytest.raises(CheckFailed, match="10 tokens, too few"):
        pysource.split(documents, 9)


def test_a_document_is_its_mark_and_its_bytes():
    assert pysource.as_tokens([b"\x00\xff", b"", b"A\r\n"]).tolist() == [256, 0, 255, 256, 256, 65, 13, 10]
