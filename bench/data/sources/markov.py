"""Makes synthetic text whose entropy is known exactly, so that a validation loss below it proves a bug.

The text is a mixture of Markov transitions: the next token is drawn from the mean over j of row x[t - lags[j]] of table
j. Each row holds integer counts that sum to 4096; "before the document's start" has a separate row. Only integers and a
counter-based generator (splitmix64) are used, so the bytes are the same on every platform. Documents of DOC_TOKENS
tokens are drawn side by side; nothing marks their borders.

Why a loss below the floor is a bug: let p be the true probability of the val targets given all that the source knew,
and q what a model gives them, each token predicted only from earlier ones and without having seen this draw. Then q/p
has mean at most 1 under p (it sums q over all texts), so by Markov's inequality q/p >= e**20 has probability at most
e**-20 = 2e-9; and log(q/p) = val_tokens * (floor - val_loss). That is, val_loss < floor - 20 / val_tokens does not
happen to a model that cannot see its targets.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.config.schema import DataConfig
from bench.data import shards
from bench.data.sources.source import Made

ROW_COUNTS = 4096  # sum of the counts of a row
DOC_TOKENS = 4096
NUM_VAL_DOCS = 257  # more than 2**20 targets
DOCS_AT_ONCE = 4096  # 32 MiB of tokens
DEFAULT_VOCAB = 64
MAX_VOCAB = 1024
WEIGHT_BITS = 40  # tokens of a row weigh 1 to 2**39, evenly in the logarithm: with 64 tokens about 2 nats remain
ALGORITHM = 1  # part of the recipe: increase it if the same settings give other bytes

SLACK_NATS = 20.0  # for the whole text; see above
ROUNDING_NATS = 1e-5  # per token, of a mean of float32 losses

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
TABLES, TRAIN, VAL = 0, 1, 2  # streams of random numbers with the same seed


def floor_slack_nats(val_tokens: int) -> float:
    """Returns how far below the floor a val_loss may honestly be, in nats per token, by luck and rounding."""
    return SLACK_NATS / val_tokens + ROUNDING_NATS


class Markov(Made):
    uses = ("train_tokens", "markov_seed", "markov_lags", "train_sha256", "val_sha256")
    needs = ("train_tokens", "markov_seed", "markov_lags")

    def __init__(self, data: DataConfig) -> None:
        self.vocab_size = DEFAULT_VOCAB if data.vocab_size is None else data.vocab_size
        super().__init__(data)
        if not 2 <= self.vocab_size <= MAX_VOCAB:
            raise ValueError(f"data.vocab_size={self.vocab_size}: use 2 to {MAX_VOCAB}")
        lags = data.markov_lags
        assert lags is not None and data.markov_seed is not None and data.train_tokens is not None  # needs
        self._lags, self._seed, self._train_tokens = lags, data.markov_seed, data.train_tokens

    def recipe(self) -> dict[str, Any]:
        return {
            "algorithm": ALGORITHM,
            "vocab_size": self.vocab_size,
            "seed": self._seed,
            "lags": self._lags,
            "train_tokens": self._train_tokens,
            "val_docs": NUM_VAL_DOCS,
        }

    def num_bytes(self) -> int:
        return shards.num_bytes(self._train_tokens) + shards.num_bytes(NUM_VAL_DOCS * DOC_TOKENS)

    def make(self, folder: Path, say: Callable[[str], None]) -> None:
        counts = self.counts()
        for split, stream, num_tokens in (
            ("train", TRAIN, self._train_tokens),
            ("val", VAL, NUM_VAL_DOCS * DOC_TOKENS),
        ):
            tokens = draw(counts, self._lags, self._seed, stream, num_tokens)
            shards.write(folder / f"{split}_000000.bin", tokens)

    def counts(self) -> np.ndarray:
        assert self.vocab_size is not None
        return tables(self.vocab_size, len(self._lags), self._seed)

    @property
    def floor_source(self) -> Any:
        return self

    def floor_nats(self, tokens: np.ndarray) -> float:
        """Returns mean nats of tokens[1:], the first of the val shard, each given those before it in its document."""
        return mean_nats(self.counts(), self._lags, tokens)

    def wrong_hash(self, key: str, wanted: str, digest: str) -> str:
        return (
            f"{super().wrong_hash(key, wanted, digest)}: with other settings than conf/data/markov.yaml's, add "
            "data.train_sha256=null data.val_sha256=null; with the same ones it is a bug of the harness or this machine"
        )


def random_u64(seed: int, stream: int, counters: np.ndarray) -> np.ndarray:
    """Returns numbers number `counters` of a splitmix64 stream. Takes and returns uint64 arrays."""
    key = _mix((seed * GOLDEN + stream + 1) & MASK)
    with np.errstate(over="ignore"):  # overflow at 2**64 is intended
        z = counters * np.uint64(GOLDEN) + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def tables(vocab_size: int, num_lags: int, seed: int) -> np.ndarray:
    """Returns counts [lag, earlier token, next token], int64. Rows sum to 4096; row vocab_size is "before the start".

    Every token gets one count, so that none is impossible; the others go by weights 2**k with k uniform in [0,
    WEIGHT_BITS), and what rounding leaves goes to the heaviest token.
    """
    shape = (num_lags, vocab_size + 1, vocab_size)
    uniform = random_u64(seed, TABLES, np.arange(math.prod(shape), dtype=np.uint64)) >> np.uint64(32)
    exponents = (uniform * np.uint64(WEIGHT_BITS)) >> np.uint64(32)
    weights = (np.uint64(1) << exponents).astype(np.int64).reshape(shape)
    counts = 1 + weights * (ROW_COUNTS - vocab_size) // weights.sum(-1, keepdims=True)  # products stay below 2**52
    heaviest = counts.argmax(-1)[..., None]
    rest = ROW_COUNTS - counts.sum(-1, keepdims=True)
    np.put_along_axis(counts, heaviest, np.take_along_axis(counts, heaviest, -1) + rest, -1)
    assert counts.min() >= 1 and (counts.sum(-1) == ROW_COUNTS).all()
    return np.asarray(counts)


def draw(counts: np.ndarray, lags: Sequence[int], seed: int, stream: int, num_tokens: int) -> np.ndarray:
    """Returns uint16 tokens of a stream of documents; a longer draw begins with the shorter one."""
    num_lags, rows, vocab_size = counts.shape
    # the token of each of a row's 4096 counts, so that drawing is one look-up
    token_of = np.repeat(np.tile(np.arange(vocab_size, dtype=np.uint16), num_lags * rows), counts.reshape(-1))
    num_docs = -(-num_tokens // DOC_TOKENS)
    pieces = []
    for first in range(0, num_docs, DOCS_AT_ONCE):
        docs = np.arange(first, min(num_docs, first + DOCS_AT_ONCE), dtype=np.uint64)
        pieces.append(_draw_docs(token_of, num_lags, vocab_size, lags, seed, stream, docs))
    return np.concatenate(pieces)[:num_tokens]


def _draw_docs(
    token_of: np.ndarray, num_lags: int, vocab_size: int, lags: Sequence[int], seed: int, stream: int, docs: np.ndarray
) -> np.ndarray:
    """Draws all documents side by side, one position after the other."""
    past = max(lags)
    before_start = np.full((past, len(docs)), vocab_size, np.uint16)
    text = np.concatenate([before_start, np.empty((DOC_TOKENS, len(docs)), np.uint16)])
    for position in range(DOC_TOKENS):
        number = random_u64(seed, stream, docs * np.uint64(DOC_TOKENS) + np.uint64(position))
        ticket = number % np.uint64(num_lags * ROW_COUNTS)  # bias below 2**-48
        table, count = (ticket >> np.uint64(12)).astype(np.int64), (ticket & np.uint64(ROW_COUNTS - 1)).astype(np.int64)
        earlier = np.choose(table, [text[past + position - lag] for lag in lags]).astype(np.int64)
        text[past + position] = token_of[(table * (vocab_size + 1) + earlier) * ROW_COUNTS + count]
    return np.ascontiguousarray(text[past:].T).reshape(-1)


def mean_nats(counts: np.ndarray, lags: Sequence[int], tokens: np.ndarray) -> float:
    """Returns the exact mean of -log p over tokens[1:]; tokens begin with the first token of a document."""
    num_lags, _, vocab_size = counts.shape
    tokens = np.asarray(tokens, np.int64)
    position = np.arange(len(tokens)) % DOC_TOKENS
    chances = np.zeros(len(tokens), np.int64)  # p times num_lags * 4096
    for table, lag in enumerate(lags):
        earlier = np.concatenate([np.full(lag, vocab_size), tokens])[: len(tokens)]
        earlier[position < lag] = vocab_size
        chances += counts[table, earlier, tokens]
    how_often = np.bincount(chances[1:], minlength=num_lags * ROW_COUNTS + 1).tolist()
    whole = math.log(num_lags * ROW_COUNTS)
    nats = math.fsum(number * (whole - math.log(chance)) for chance, number in enumerate(how_often) if number)
    return nats / (len(tokens) - 1)


def _mix(z: int) -> int:
    """Computes random_u64's last three lines for one Python integer."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
