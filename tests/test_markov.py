"""The synthetic source: the same bytes everywhere, and a floor that is exact."""

import hashlib
import math

import numpy as np
import pytest
from data_settings import QUIET, conf, root, small_markov  # noqa: F401  root is a fixture

from bench.data import shards
from bench.data.sources import datasets, markov


def test_the_random_numbers_are_splitmix64():
    """Its first outputs for seed 1234567, as published with the algorithm."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [(1234567 + number * markov.GOLDEN) & markov.MASK for number in range(1, 6)]
    assert [markov._mix(state) for state in states] == published
    counters = np.array([0, 1, 2, 2**40, 2**64 - 1], np.uint64)  # and as an array
    key = markov._mix((7 * markov.GOLDEN + 2 + 1) & markov.MASK)
    plain = [markov._mix((key + int(counter) * markov.GOLDEN) & markov.MASK) for counter in counters]
    assert markov.random_u64(7, 2, counters).tolist() == plain


@pytest.mark.parametrize("vocab_size", [2, 64, 1024])
def test_every_row_of_counts_sums_to_4096_and_allows_every_token(vocab_size):
    counts = markov.tables(vocab_size, 2, 5)
    assert counts.shape == (2, vocab_size + 1, vocab_size)
    assert (counts.sum(-1) == 4096).all() and counts.min() == 1


def test_markov_has_the_bytes_that_the_repository_promises():
    data = conf("markov")
    dataset = datasets.prepare(data, **QUIET)
    assert [file.sha256 for file in dataset.train + dataset.val] == [data.train_sha256, data.val_sha256]
    assert dataset.val[0].num_tokens == 257 * 4096


@pytest.mark.parametrize(
    "lags, digest", [([1], "7a84dcd9290521ca"), ([1, 3], "023c6d9ca3d79f78"), ([7, 2, 4], "ae95edc85cb6eb62")]
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


@pytest.mark.parametrize(
    ("counts", "lags", "tokens", "nats"),
    [  # rows: after token 0, after token 1, before the start of a document
        # 0 -> 0 or 1 evenly, 1 -> 0 always, a document begins with 1
        ([[[2048, 2048], [4096, 0], [0, 4096]]], [1], [1, 0, 1, 0, 0], 2 * math.log(2) / 4),
        # a mixture: p(second 0) = (0.5 + 1) / 2 with no token two before, p(1) = (0.5 + 0.25) / 2
        (
            [[[2048, 2048], [2048, 2048], [4096, 0]], [[3072, 1024], [2048, 2048], [4096, 0]]],
            *([1, 2], [0, 0, 1], -(math.log(0.75) + math.log(0.375)) / 2),
        ),
        # a new document knows nothing of the one before: p(1) = 0.25
        ([[[4096, 0], [2048, 2048], [3072, 1024]]], [1], [0] * 4096 + [1], math.log(4) / 4096),
    ],
)
def test_the_floor_of_a_text_worked_out_by_hand(counts, lags, tokens, nats):
    assert markov.mean_nats(np.array(counts), lags, tokens) == pytest.approx(nats, rel=1e-12)


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
    dataset = datasets.prepare(small_markov(markov_lags=[1, 3]), **QUIET)
    tokens = shards.check(dataset.val[0].path).tokens()[:129]
    expected = markov.mean_nats(markov.tables(64, 2, 0), [1, 3], tokens)
    assert datasets.floor_nats(dataset, 128) == expected
    assert datasets.floor_nats(dataset, 256) != expected
    with pytest.raises(ValueError, match="goal.val_tokens=2000000"):
        datasets.floor_nats(dataset, 2_000_000)


def test_the_slack_is_twenty_nats_for_the_whole_text_and_rounding():
    assert markov.floor_slack_nats(65536) == pytest.approx(0.00030517578125 + 0.00001)


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        ({"markov_lags": []}, "data.markov_lags=.*such as"),
        ({"markov_lags": [1, 1]}, "different distances"),
        ({"markov_lags": [0]}, "of 1 to"),
        ({"markov_lags": ["a"]}, "data.markov_lags=.*of 1 to 8 different distances"),
        ({"vocab_size": 1}, "data.vocab_size=1: use 2 to 1024"),
        ({"vocab_size": 1025}, "data.vocab_size=1025"),
        ({"train_tokens": 0}, "data.train_tokens=0"),
        ({"markov_seed": -1}, "data.markov_seed=-1"),
    ],
)
def test_impossible_markov_settings_are_refused(wrong, complaint):
    with pytest.raises(ValueError, match=complaint):
        datasets.chosen(small_markov(**wrong))
