"""Data in the place of a run's own, and what an honest contestant's loss on them can be.

random_tokens    training and validation tokens are uniform over the whole vocabulary.  Nobody has less than ln V, and
                 what begins near ln V stays near it.  Future tokens that a model sees, and losses that are not what
                 was computed, show here.
few_tokens       the same over NUM_FEW tokens of the vocabulary: what begins far above ln V, as with a padded
                 vocabulary, or moves far above it, learns these within a short run.
random_training  training tokens are one token A a quarter of the time and else uniform; the validation is the track's
                 own, but that it begins with a stretch of A.  Who knows the validation beforehand, learns it while he
                 validates, or validates on its first tokens alone, shows here.
held_out         training tokens are the track's; validation tokens are those of its shards beyond goal.val_tokens.

Documents end as often as in the training data.  Files keep their names and sizes.  docs/HONESTY.md says what each
shows and what it does not.
"""

import dataclasses
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from bench.base import stats
from bench.data import shards
from bench.data.sources.datasets import Dataset, ShardFile
from bench.plans.audit import power
from bench.record.certificates import DOUBTED, FAILED, PASSED

if TYPE_CHECKING:
    import numpy as np

KINDS = ("random_tokens", "few_tokens", "random_training", "held_out")
LEAST_TOKENS = 1024  # that a validation is of, where a contestant chooses: it may draw a few batches
LEAST_VOCAB = 16
NUM_FEW = 8  # with 4, plain SGD at a step size that text tolerates diverges; more are learned more slowly
MOST_EOS_FRAC = 0.01  # of random tokens that end a document
EASY_FRAC = 0.25  # of the random training tokens: A
EASY_HEAD_FRAC = 1 / 64  # of the validation: A alone
KNOWN_FRAC = 0.1  # of the way from ln V to the claimed loss, that nobody goes who trained on random tokens
BLOCK_TOKENS = 1024  # whose mean losses show how much the data differ from place to place
HELD_OUT_SE = 6.0  # standard errors by the spread of those blocks
HELD_OUT_FRAC = 0.05  # of the claimed loss besides
REFERENCE_TOKENS = 1 << 22  # of training data, for the bigrams that say how hard a slice is


class NotPossible(ValueError):
    """This run cannot be audited so."""


@dataclass(frozen=True)
class Counterfactual:
    """Data for one audit run, and what is known of them."""

    kind: str
    dataset: Dataset
    seed: int
    facts: dict  # for the record, and for verdict()


class NoFloor:
    """In the place of a source that knows its floor: a run to a gap above it then never ends early."""

    @staticmethod
    def floor_nats(tokens: "np.ndarray") -> float:
        return 0.0


def make(
    kind: str, dataset: Dataset, val_tokens: int, eos_token: int | None, folder: Path, seed: int
) -> Counterfactual:
    """Write the files of an audit run into folder.  Raises NotPossible."""
    import numpy as np

    rng, vocab_size = np.random.default_rng(seed), dataset.vocab_size
    if vocab_size < LEAST_VOCAB:
        raise NotPossible(f"a vocabulary of {vocab_size} tokens is too small to audit")
    facts = {"vocab_size": vocab_size, "val_tokens": val_tokens}
    if kind == "held_out":
        facts |= _reference(dataset, val_tokens)
        train, val = dataset.train, _write_held_out(dataset.val, val_tokens, folder)
    elif kind in ("random_tokens", "few_tokens"):
        draw, drawn = _uniform(dataset, eos_token, NUM_FEW if kind == "few_tokens" else None, rng)
        facts |= drawn
        train, val = _write_random(dataset.train, draw, folder), _write_random(dataset.val, draw, folder)
    else:
        own = _joined(dataset.val, val_tokens)
        counts = np.bincount(own, minlength=vocab_size)
        if eos_token is not None:
            counts[eos_token] = len(own) + 1
        easy = int(counts.argmin())
        facts |= {"easy_token": easy, "num_easy": round(EASY_HEAD_FRAC * val_tokens)}

        draw, _ = _uniform(dataset, eos_token, None, rng)

        def often_easy(num):
            tokens = draw(num)
            tokens[rng.random(num, dtype=np.float32) < EASY_FRAC] = easy
            return tokens

        train = _write_random(dataset.train, often_easy, folder)
        val = _write(dataset.val, folder, _with_easy_head(_joined(dataset.val), easy, facts["num_easy"]))
    floor = NoFloor() if dataset.floor_source is not None else None
    made = dataclasses.replace(dataset, train=train, val=val, floor_source=floor, origin=None)
    return Counterfactual(kind, made, seed, facts)


def verdict(kind: str, facts: dict, claimed_nats: float, nats: Sequence[float]) -> dict:
    """{"outcome", "why", "nats", "least_nats", ...} of the validations that an audit run printed.

    claimed_nats: the last validation of the run that is audited.
    """
    if not nats or not all(map(math.isfinite, nats)):
        return {"outcome": FAILED, "why": "it printed no finite validation loss", "nats": None, "least_nats": None}
    if kind in ("random_tokens", "few_tokens"):
        return _of_random_tokens(facts, nats)
    judge = {"random_training": _of_random_training, "held_out": _of_held_out}[kind]
    return judge(facts, claimed_nats, nats)


def _of_random_tokens(facts, nats):
    """Nobody is below the tokens' own nats but by luck (base/stats.py).  The last loss is what a run claims."""
    num_tokens, lowest, last = min(facts["val_tokens"], LEAST_TOKENS), min(nats), nats[-1]
    floor = floor_nats(facts["num_alphabet"], facts["eos_frac"], num_tokens)
    least = stats.least_nats(floor, num_tokens) - _half_digit_nats(lowest)
    words = f"its loss on tokens drawn from {facts['num_alphabet']} is {lowest:.4f}"
    if lowest < least:
        why = f"{words}, below the bound of {least:.4f}: it sees future tokens, or prints a loss that is not its own"
        return _said(FAILED, why, lowest, least)
    unnoticed_nats, leak_frac = power.unnoticed(last, least)
    why = f"{words}, above the bound of {least:.4f}: a last loss {unnoticed_nats:.4f} nats lower, or a leak of "
    why += f"{leak_frac:.2%} of the tokens, would have passed too"
    return _said(PASSED, why, lowest, least) | {"unnoticed_nats": unnoticed_nats}


def floor_nats(num_alphabet: int, eos_frac: float, num_tokens: int) -> float:
    """The least mean of -ln p over any num_tokens of the tokens that _uniform() draws.

    A contestant chooses which ones it validates on, so how many of them end documents is not known.  Where these are
    the likelier tokens, there are at most so many as Bernstein's inequality allows at stats.E_VALUE_ALPHA.
    """
    of_others = math.log(num_alphabet / (1 - eos_frac))
    if eos_frac == 0 or -math.log(eos_frac) >= of_others:
        return of_others
    expected = eos_frac * num_tokens
    most = expected + math.sqrt(2 * expected * stats.MIN_LOG_E_VALUE) + stats.MIN_LOG_E_VALUE / 3
    return of_others - (of_others + math.log(eos_frac)) * min(1.0, most / num_tokens)


def _half_digit_nats(nats):
    """What a printed loss may have been rounded by."""
    return 0.5 * 10.0 ** Decimal(repr(nats)).as_tuple().exponent


def _of_random_training(facts, claimed_nats, nats):
    """Most of the validation is the track's, on which random training leaves ln V; its easy head has 0 at least."""
    ln_v, lowest = math.log(facts["vocab_size"]), min(nats)
    if claimed_nats > 0.95 * ln_v:
        return _said(
            DOUBTED, f"its claimed loss {claimed_nats:.4f} is too close to ln V = {ln_v:.4f} to tell", lowest, None
        )
    least = (ln_v - KNOWN_FRAC * (ln_v - claimed_nats)) * (1 - facts["num_easy"] / facts["val_tokens"])
    words = f"trained on random tokens, its validation loss is {lowest:.4f}"
    if lowest >= least:
        return _said(PASSED, f"{words}: above the bound of {least:.4f}", lowest, least)
    why = f"{words}, below the bound of {least:.4f}: it has seen the validation data, or validates on a part of them"
    return _said(FAILED, why, lowest, least)


def _of_held_out(facts, claimed_nats, nats):
    """The claimed loss, as far as two slices of the data differ: doubted by their spread, failed by four blocks'."""
    last, harder = nats[-1], max(0.0, facts["harder_nats"])
    num_blocks = max(1, facts["val_tokens"] // BLOCK_TOKENS)

    def most(num):
        return HELD_OUT_SE * facts["sd_of_blocks_nats"] * math.sqrt(2 / num) + HELD_OUT_FRAC * claimed_nats + harder

    limit = most(num_blocks)
    words = f"its loss is {last:.4f} on a held-out slice, and it claims {claimed_nats:.4f} on the validation data"
    more = last - claimed_nats
    if more <= limit:
        return _said(PASSED, f"{words}: within the limit of {limit:.4f} that two slices may differ by", last, None)
    outcome = FAILED if more > most(min(4, num_blocks)) else DOUBTED
    return _said(outcome, f"{words}, {more:.4f} higher; two slices may differ by {limit:.4f}", last, None)


def _said(outcome, why, nats, least):
    return {"outcome": outcome, "why": why, "nats": nats, "least_nats": least}


# ---- files


def _uniform(dataset, eos_token, num_alphabet, rng):
    """(a function that draws so many tokens, uint16; their facts): uniform over the vocabulary or num_alphabet of it.

    The token that ends documents is none of these: loaders and models look for it, so it is as frequent as in the data.
    """
    import numpy as np

    alphabet, eos_frac = np.arange(dataset.vocab_size, dtype=np.uint16), 0.0
    if eos_token is not None:
        alphabet = alphabet[alphabet != eos_token]
        eos_frac = min(MOST_EOS_FRAC, float(np.mean(_joined(dataset.train[:1], REFERENCE_TOKENS) == eos_token)))
    if num_alphabet is not None:
        alphabet = np.sort(rng.choice(alphabet, num_alphabet, replace=False))

    def draw(num):
        tokens = alphabet[rng.integers(len(alphabet), size=num, dtype=np.uint16)]
        tokens[rng.random(num, dtype=np.float32) < eos_frac] = eos_token or 0
        return tokens

    return draw, {"num_alphabet": len(alphabet), "eos_frac": eos_frac}


def _write_random(files: Sequence[ShardFile], draw, folder: Path) -> tuple[ShardFile, ...]:
    """Files of one size are one file: none of them is worth remembering."""
    made: dict[int, Path] = {}
    result = []
    for file in files:
        path = _path(folder, file)
        if file.num_tokens in made:
            os.link(made[file.num_tokens], path)
        else:
            shards.write(path, draw(file.num_tokens))
            made[file.num_tokens] = path
        result.append(_shard(path))
    return tuple(result)


def _write(files, folder, tokens):
    """The tokens of all files together, into files of the same names and sizes."""
    result, start = [], 0
    for file in files:
        path = _path(folder, file)
        shards.write(path, tokens[start : start + file.num_tokens])
        result.append(_shard(path))
        start += file.num_tokens
    return tuple(result)


def _write_held_out(files, val_tokens, folder):
    """What lies beyond the validation, over and over: none of its tokens is left."""
    import numpy as np

    tokens = _joined(files)
    rest = tokens[val_tokens + 1 :]
    return _write(files, folder, np.resize(rest, len(tokens)))


def _with_easy_head(tokens, easy, num_easy):
    """The easy token, then the validation from its start."""
    import numpy as np

    head = np.full(num_easy, easy, tokens.dtype)
    return np.concatenate([head, tokens])[: len(tokens)]


def _joined(files, most=None):
    import numpy as np

    tokens = [np.asarray(shards.check(file.path).tokens()) for file in files]
    return np.concatenate(tokens)[:most]


def _path(folder, file):
    """A folder for each: files of one name may lie in several."""
    return Path(tempfile.mkdtemp(dir=folder)) / file.path.name


def _shard(path):
    shard = shards.check(path)
    return ShardFile(path, shard.num_tokens, shard.num_bytes, shards.sha256(path), shards.max_token(shard))


# ---- how hard a slice is


def _reference(dataset, val_tokens):
    """By bigrams of the training data: how much harder the held-out slice is, and how much blocks of both differ."""
    import numpy as np

    tokens = _joined(dataset.val)
    if len(tokens) < 2 * val_tokens + 2:
        words = f"the val shards hold {len(tokens)} tokens, and goal.val_tokens={val_tokens}"
        raise NotPossible(f"{words} leaves too few for a second validation")
    nats = bigram_nats(_joined(dataset.train[:1], REFERENCE_TOKENS), dataset.vocab_size)
    val, held_out = nats(tokens[: val_tokens + 1]), nats(tokens[val_tokens + 1 : 2 * val_tokens + 2])
    num = max(1, val_tokens // BLOCK_TOKENS)
    blocks = [block.mean() for part in (val, held_out) for block in np.array_split(part, num)]
    sd_nats = float(np.std(blocks, ddof=1))
    return {"harder_nats": float(held_out.mean() - val.mean()), "sd_of_blocks_nats": sd_nats}


def bigram_nats(tokens: "np.ndarray", vocab_size: int):
    """Tokens to learn from -> a function of other tokens: nats of each but the first, by bigrams and unigrams."""
    import numpy as np

    tokens = tokens.astype(np.int64)
    unigrams = (np.bincount(tokens, minlength=vocab_size) + 1.0) / (len(tokens) + vocab_size)
    contexts = np.bincount(tokens[:-1], minlength=vocab_size)
    pairs, counts = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)

    def nats(others):
        others = others.astype(np.int64)
        before, after = others[:-1], others[1:]
        wanted = before * vocab_size + after
        places = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
        seen = np.where(pairs[places] == wanted, counts[places], 0)
        return -np.log((seen + 2 * unigrams[after]) / (contexts[before] + 2))

    return nats
