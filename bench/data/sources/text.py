"""Any text files as tokens: a file is a document, its bytes or its GPT-2 tokens, one token that marks it before each.

The made dataset is named after the contents of the files in their order and the tokenizer: a changed, added or removed
file gives another dataset.  The old one stays in the data root until you delete it.
"""

import hashlib

import numpy as np

from bench.data import shards
from bench.data.shards import CheckFailed
from bench.data.sources import checked, gpt2_tokens
from bench.data.sources.source import Made, data_root
from bench.data.sources.userfiles import split_globs

BYTES_VOCAB = 257
BYTES_DOCUMENT = 256
SHARD_TOKENS = 100_000_000  # as in fineweb10B


class Text(Made):
    uses = needs = ("train_glob", "val_glob", "tokenizer")

    def __init__(self, data):
        is_gpt2 = data.tokenizer == "gpt2"
        self.vocab_size = gpt2_tokens.VOCAB_SIZE if is_gpt2 else BYTES_VOCAB
        self.eos_token = gpt2_tokens.DOCUMENT if is_gpt2 else BYTES_DOCUMENT
        super().__init__(data)
        self._paths = self._recipe = None

    def paths(self):
        if self._paths is None:
            self._paths = split_globs(self.data)
        return self._paths

    def recipe(self):
        if self._recipe is None:
            with checked.Facts(data_root()) as facts:
                digests = {split: [facts.sha256(path) for path in paths] for split, paths in self.paths().items()}
            self._recipe = {"tokenizer": self.data.tokenizer, "shard_tokens": SHARD_TOKENS} | digests
        return self._recipe

    def num_bytes(self):
        """Two bytes a token, and never more tokens than bytes and documents."""
        paths = [path for split in self.paths().values() for path in split]
        return 2 * sum(path.stat().st_size + 1 for path in paths) + shards.HEADER_BYTES * (2 + len(paths))

    def make(self, folder, say):
        encode = _encoder(self.data.tokenizer)
        for split, paths in self.paths().items():
            read = zip(paths, self.recipe()[split], strict=True)
            tokens = (encode(path, _read(path, digest)) for path, digest in read)
            for number, piece in enumerate(_in_pieces(tokens, SHARD_TOKENS)):
                shard = shards.write(folder / f"{split}_{number:06d}.bin", piece)
                say(f"made {shard.path.name}, {shard.num_tokens} tokens")


def _read(path, digest):
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != digest:
        raise CheckFailed(f"{path}: it changed while it was read: wait until no program writes it and try again")
    return text


def _encoder(tokenizer):
    """(path, its bytes) -> uint16 tokens of that document."""
    if tokenizer == "bytes":
        return lambda path, text: _marked(BYTES_DOCUMENT, np.frombuffer(text, np.uint8))
    encode = gpt2_tokens.encoder()
    return lambda path, text: _marked(gpt2_tokens.DOCUMENT, encode(_decoded(path, text)))


def _marked(mark, tokens):
    return np.concatenate([np.array([mark], np.uint16), np.asarray(tokens, np.uint16)])


def _decoded(path, text):
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        hint = "convert it, exclude it or use data.tokenizer=bytes"
        raise CheckFailed(f"{path}: not UTF-8 ({error}): {hint}") from error


def _in_pieces(arrays, length):
    """Arrays, joined in order -> arrays of that length, the last one shorter."""
    waiting, num_waiting = [], 0
    for array in arrays:
        while num_waiting + len(array) >= length:
            num_missing = length - num_waiting
            yield np.concatenate([*waiting, array[:num_missing]])
            array, waiting, num_waiting = array[num_missing:], [], 0
        if len(array):
            waiting.append(array)
            num_waiting += len(array)
    if waiting:
        yield np.concatenate(waiting)
