"""Makes data in place of a run's own, and bounds the loss that an honest contestant can have on them.

random_tokens    training and validation tokens are uniform over the whole vocabulary.  No honest loss is below ln V,
                 and a loss that begins near ln V stays near it.  This exposes models that see future tokens, and losses
                 that are not what was computed.
few_tokens       the same over NUM_FEW tokens of the vocabulary: a model whose loss begins far above ln V, as with a
                 padded vocabulary, or moves far above it, learns these within a short run.
random_training  training tokens are one token A a quarter of the time and else uniform; the validation is the track's
                 own, but begins with a stretch of A.  This exposes models that know the validation beforehand, learn it
                 while they validate, or validate on its first tokens alone.
held_out         training tokens are the track's; validation tokens are those of its shards beyond goal.val_tokens.

Documents end as often as in the training data. Files keep their names and sizes. docs/record.md says what each kind
shows and what it does not.
"""

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.base import stats
from bench.data import shards
from bench.data.sources.datasets import Dataset, ShardFile
from bench.record.certificates import DOUBTED, FAILED, PASSED

if TYPE_CHECKING:
    import numpy as np

Draw = Callable[[int], "np.ndarray[Any, Any]"]
KINDS = ("random_tokens", "few_tokens", "random_training", "held_out")
LEAST_TOKENS = 1024  # assumed size of a validation whose batches the contestant chooses: it may draw few
LEAST_VOCAB = 16
NUM_FEW = 8  # with 4, plain SGD diverges at step sizes that text tolerates; more are learned more slowly
MOST_EOS_FRAC = 0.01  # the largest part of random tokens that end a document
EASY_FRAC = 0.25  # part of the random training tokens that is A
EASY_HEAD_FRAC = 1 / 64  # part of the validation that is A alone
KNOWN_FRAC = 0.1  # of the way from ln V to the claimed loss; honest training on random tokens stays below
BLOCK_TOKENS = 1024  # the spread of these blocks' mean losses shows how much the data vary
HELD_OUT_SE = 6.0  # standard errors, by the spread of those blocks
HELD_OUT_FRAC = 0.05  # of the claimed loss, in addition
REFERENCE_TOKENS = 1 << 22  # training data for the bigrams that measure how hard a slice is


class NotPossible(ValueError):
    """Raised if a run cannot be audited with this kind of data."""


class NoFloor:
    """Replaces a source that knows its floor: a run that ends at a gap above it then never ends early."""

    @staticmethod
    def floor_nats(tokens: "np.ndarray[Any, Any]") -> float:
        return 0.0


def possible(num_tokens: int, val_tokens: int) -> tuple[str, ...]:
    """Returns the kinds that validation shards of num_tokens tokens allow for validations of val_tokens."""
    return KINDS if num_tokens >= 2 * val_tokens + 2 else KINDS[:-1]


def make(
    kind: str, dataset: Dataset, val_tokens: int, eos_token: int | None, folder: Path, seed: int
) -> tuple[Dataset, dict[str, Any]]:
    """Writes the files of an audit run into folder. Returns (its data, their facts, for the record and for verdict()).

    Raises NotPossible.
    """
    import numpy as np

    rng, vocab_size = np.random.default_rng(seed), dataset.vocab_size
    if vocab_size < LEAST_VOCAB:
        raise NotPossible(f"a vocabulary of {vocab_size} tokens is too small to audit")
    facts: dict[str, Any] = {"vocab_size": vocab_size, "val_tokens": val_tokens}
    if kind == "held_out":
        facts |= _reference(dataset, val_tokens)
        tokens = _joined(dataset.val)
        beyond = np.resize(tokens[val_tokens + 1 :], len(tokens))  # repeated, so that none of the validation is left
        train, val = dataset.train, _write(dataset.val, folder, beyond)
    elif kind in ("random_tokens", "few_tokens"):
        draw, drawn = _uniform(dataset, eos_token, NUM_FEW if kind == "few_tokens" else None, rng)
        facts |= drawn
        train, val = _write_random(dataset.train, draw, folder), _write_random(dataset.val, draw, folder)
    else:
        own = _joined(dataset.val)
        counts = np.bincount(own[:val_tokens], minlength=vocab_size)
        if eos_token is not None:
            counts[eos_token] = len(own) + 1
        easy = int(counts.argmin())
        facts |= {"easy_token": easy, "num_easy": round(EASY_HEAD_FRAC * val_tokens)}

        draw, _ = _uniform(dataset, eos_token, None, rng)

        def often_easy(num: int) -> "np.ndarray[Any, Any]":
            tokens = draw(num)
            tokens[rng.random(num, dtype=np.float32) < EASY_FRAC] = easy
            return tokens

        train = _write_random(dataset.train, often_easy, folder)
        head = np.full(facts["num_easy"], easy, own.dtype)
        val = _write(dataset.val, folder, np.concatenate([head, own])[: len(own)])
    floor = NoFloor() if dataset.floor_source is not None else None
    return dataclasses.replace(dataset, train=train, val=val, floor_source=floor, origin=None, is_audit=True), facts


def verdict(kind: str, facts: Mapping[str, Any], claimed_nats: float, nats: Sequence[float]) -> dict[str, Any]:
    """Returns {"outcome", "why", "nats", "least_nats", ...} for the validation losses that an audit run printed.

    claimed_nats: the last validation loss of the audited run.
    """
    if not nats or not all(map(math.isfinite, nats)):
        return _verdict(FAILED, "it printed no finite validation loss", None)
    if kind in ("random_tokens", "few_tokens"):
        return _judge_random_tokens(facts, nats)
    if kind == "random_training":
        return _judge_random_training(facts, claimed_nats, min(nats))
    return _judge_held_out(facts, claimed_nats, nats[-1])


def _verdict(outcome: str, why: str, nats: float | None, least: float | None = None) -> dict[str, Any]:
    return {"outcome": outcome, "why": why, "nats": nats, "least_nats": least}


def _judge_random_tokens(facts: Mapping[str, Any], nats: Sequence[float]) -> dict[str, Any]:
    """Fails a loss that is too far below the tokens' entropy to be luck (base/stats.py). A run claims its last loss."""
    num_tokens, lowest, last = min(facts["val_tokens"], LEAST_TOKENS), min(nats), nats[-1]
    floor = floor_nats(facts["num_alphabet"], facts["eos_frac"], num_tokens)
    rounding_nats = 0.5 * 10.0 ** int(Decimal(repr(lowest)).as_tuple().exponent)  # half of the last printed digit
    least = stats.least_nats(floor, num_tokens) - rounding_nats
    finding = f"its loss on tokens drawn from {facts['num_alphabet']} is {lowest:.4f}"
    if lowest < least:
        why = f"{finding}, below the bound of {least:.4f}: it sees future tokens, or prints a loss that is not its own"
        return _verdict(FAILED, why, lowest, least)
    why = f"{finding}, above the bound of {least:.4f}; a last loss {last - least:.4f} nats lower, or a leak of "
    why += f"{1 - least / last:.2%} of the tokens, would not have been noticed"
    return _verdict(PASSED, why, lowest, least) | {"unnoticed_nats": last - least}


def floor_nats(num_alphabet: int, eos_frac: float, num_tokens: int) -> float:
    """Returns the least mean of -ln p over any num_tokens of the tokens that _uniform() draws.

    A contestant chooses on which tokens it validates, so the number that end documents is not known. If these are more
    likely than the others, there are at most as many as Bernstein's inequality allows at stats.E_VALUE_ALPHA.
    """
    others_nats = math.log(num_alphabet / (1 - eos_frac))
    if eos_frac == 0 or -math.log(eos_frac) >= others_nats:
        return others_nats
    expected = eos_frac * num_tokens
    most = expected + math.sqrt(2 * expected * stats.MIN_LOG_E_VALUE) + stats.MIN_LOG_E_VALUE / 3
    return others_nats - (others_nats + math.log(eos_frac)) * min(1.0, most / num_tokens)


def _judge_random_training(facts: Mapping[str, Any], claimed_nats: float, lowest: float) -> dict[str, Any]:
    """Fails a loss too far below ln V, which random training leaves on the track's validation; its easy head has 0."""
    ln_v = math.log(facts["vocab_size"])
    if claimed_nats > 0.95 * ln_v:
        return _verdict(DOUBTED, f"its loss {claimed_nats:.4f} is too close to ln V = {ln_v:.4f} to tell", lowest)
    least = (ln_v - KNOWN_FRAC * (ln_v - claimed_nats)) * (1 - facts["num_easy"] / facts["val_tokens"])
    finding = f"trained on random tokens, its validation loss is {lowest:.4f}"
    if lowest >= least:
        return _verdict(PASSED, f"{finding}: above the bound of {least:.4f}", lowest, least)
    why = f"{finding}, below the bound of {least:.4f}: it has seen the validation data, or validates on a part of them"
    return _verdict(FAILED, why, lowest, least)


def _judge_held_out(facts: Mapping[str, Any], claimed_nats: float, last: float) -> dict[str, Any]:
    """Compares with the claimed loss: doubted beyond the spread of two slices, failed beyond that of four blocks."""

    def limit(num_blocks: int) -> float:
        spread_nats = HELD_OUT_SE * float(facts["sd_of_blocks_nats"]) * math.sqrt(2 / num_blocks)
        return spread_nats + HELD_OUT_FRAC * claimed_nats + max(0.0, facts["harder_nats"])

    num_blocks, rise = max(1, facts["val_tokens"] // BLOCK_TOKENS), last - claimed_nats
    finding = f"its loss is {last:.4f} on a held-out slice, and it claims {claimed_nats:.4f} on the validation data"
    if rise <= limit(num_blocks):
        why = f"{finding}: within the limit of {limit(num_blocks):.4f} that two slices may differ by"
        return _verdict(PASSED, why, last)
    outcome = FAILED if rise > limit(min(4, num_blocks)) else DOUBTED
    return _verdict(outcome, f"{finding}, {rise:.4f} higher; two slices may differ by {limit(num_blocks):.4f}", last)


# ---- files


def _uniform(
    dataset: Dataset, eos_token: int | None, num_alphabet: int | None, rng: "np.random.Generator"
) -> tuple[Draw, dict[str, Any]]:
    """Returns (a function that draws that many tokens as uint16, their facts), uniform over num_alphabet tokens or all.

    The token that ends documents is none of these: loaders and models look for it, so it is as frequent as in the data.
    """
    import numpy as np

    alphabet, eos_frac = np.arange(dataset.vocab_size, dtype=np.uint16), 0.0
    if eos_token is not None:
        alphabet = alphabet[alphabet != eos_token]
        eos_frac = min(MOST_EOS_FRAC, float(np.mean(_joined(dataset.train[:1], REFERENCE_TOKENS) == eos_token)))
    if num_alphabet is not None:
        alphabet = np.sort(rng.choice(alphabet, num_alphabet, replace=False))

    def draw(num: int) -> "np.ndarray[Any, Any]":
        tokens = alphabet[rng.integers(len(alphabet), size=num, dtype=np.uint16)]
        tokens[rng.random(num, dtype=np.float32) < eos_frac] = eos_token or 0
        return tokens

    return draw, {"num_alphabet": len(alphabet), "eos_frac": eos_frac}


def _write_random(files: Sequence[ShardFile], draw: Draw, folder: Path) -> tuple[ShardFile, ...]:
    """Writes random files. Files of one size are links to one file, because nothing is gained by remembering it."""
    by_size: dict[int, Path] = {}
    written = []
    for file in files:
        path = _path(folder, file)
        if file.num_tokens in by_size:
            os.link(by_size[file.num_tokens], path)
        else:
            shards.write(path, draw(file.num_tokens))
            by_size[file.num_tokens] = path
        written.append(_shard(path))
    return tuple(written)


def _write(files: Sequence[ShardFile], folder: Path, tokens: "np.ndarray[Any, Any]") -> tuple[ShardFile, ...]:
    """Writes the tokens of all files together into files of the same names and sizes."""
    written, start = [], 0
    for file in files:
        path = _path(folder, file)
        shards.write(path, tokens[start : start + file.num_tokens])
        written.append(_shard(path))
        start += file.num_tokens
    return tuple(written)


def _joined(files: Sequence[ShardFile], most: int | None = None) -> "np.ndarray[Any, Any]":
    import numpy as np

    return np.concatenate([np.asarray(shards.check(file.path).tokens()) for file in files])[:most]


def _path(folder: Path, file: ShardFile) -> Path:
    """Returns a path in a new folder, because files of the same name may lie in several folders."""
    return Path(tempfile.mkdtemp(dir=folder)) / file.path.name


def _shard(path: Path) -> ShardFile:
    shard = shards.check(path)
    return ShardFile(path, shard.num_tokens, shard.num_bytes, shards.sha256(path), shards.max_token(shard))


# ---- how hard a slice is


def _reference(dataset: Dataset, val_tokens: int) -> dict[str, float]:
    """Returns how much harder the held-out slice is for bigrams of the training data, and how much blocks differ."""
    import numpy as np

    tokens = _joined(dataset.val)
    if "held_out" not in possible(len(tokens), val_tokens):
        raise NotPossible(f"goal.val_tokens={val_tokens} leaves too few of {len(tokens)} tokens for another validation")
    nats = bigram_nats(_joined(dataset.train[:1], REFERENCE_TOKENS), dataset.vocab_size)
    val, held_out = nats(tokens[: val_tokens + 1]), nats(tokens[val_tokens + 1 : 2 * val_tokens + 2])
    num = max(1, val_tokens // BLOCK_TOKENS)
    blocks = [block.mean() for part in (val, held_out) for block in np.array_split(part, num)]
    sd_nats = float(np.std(blocks, ddof=1))
    return {"harder_nats": float(held_out.mean() - val.mean()), "sd_of_blocks_nats": sd_nats}


def bigram_nats(
    tokens: "np.ndarray[Any, Any]", vocab_size: int
) -> Callable[["np.ndarray[Any, Any]"], "np.ndarray[Any, Any]"]:
    """Returns a function of tokens: nats of all but the first, by bigrams and unigrams learnt from `tokens`."""
    import numpy as np

    tokens = tokens.astype(np.int64)
    unigrams = (np.bincount(tokens, minlength=vocab_size) + 1.0) / (len(tokens) + vocab_size)
    contexts = np.bincount(tokens[:-1], minlength=vocab_size)
    pairs, counts = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)

    def nats(others: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        others = others.astype(np.int64)
        before, after = others[:-1], others[1:]
        wanted = before * vocab_size + after
        places = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
        seen = np.where(pairs[places] == wanted, counts[places], 0)
        return -np.log((seen + 2 * unigrams[after]) / (contexts[before] + 2))

    return nats
