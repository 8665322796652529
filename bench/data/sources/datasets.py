"""Finds a data source by name, and makes, fetches and checks its files.

find() trusts no file only because it exists: header, size, sha256 and largest token are checked, and checked again
after a change. prepare() first makes what is missing, or downloads it with fetch.
"""

import contextlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from bench.base.paths import REPO
from bench.config import groups, user_code
from bench.config.schema import DataConfig
from bench.data import shards
from bench.data.shards import CheckFailed, Shard
from bench.data.sources.source import Expected, Made, Source, data_root

SOURCES = {  # {value of data.source: (module, class)}, imported when needed
    "pysource": ("pysource", "PySource"),
    "markov": ("markov", "Markov"),
    "text": ("userfiles", "Text"),
    "shards": ("userfiles", "UserShards"),
    "hub": ("hub", "Hub"),
}


@dataclass(frozen=True)
class ShardFile(Shard):
    """A shard that has passed all checks."""

    sha256: str
    max_token: int
    stamp: list[int] | None = field(default=None, compare=False)  # shards.stamp_of() when the file was hashed


@dataclass(frozen=True)
class Dataset:
    """All shards of a data source, checked. Every token is below vocab_size."""

    name: str
    vocab_size: int
    train: tuple[ShardFile, ...]
    val: tuple[ShardFile, ...]
    floor_source: Any = field(default=None, compare=False)  # knows how the val tokens were drawn; only markov's
    origin: dict[str, Any] | None = field(default=None, compare=False)  # Source.origin
    is_audit: bool = field(default=False, compare=False)  # made for an audit: it has no held-out tokens


def chosen(data: DataConfig) -> Source:
    """Returns the Source of a DataConfig, its settings checked. Raises ValueError, also if a class is not a Source."""
    if user_code.is_import_path(data.source):
        return cast(type[Source], user_code.load("data.source", data.source, Source))(data)
    module, name = SOURCES[groups.known("data.source", data.source, SOURCES)]
    source_class: type[Source] = getattr(importlib.import_module(f"bench.data.sources.{module}"), name)
    return source_class(data)


def content_id(data: DataConfig) -> str:
    """Returns what tells data of equal settings apart, without making any: "" if nothing can be said yet."""
    try:
        source = chosen(data)
        if isinstance(source, Made):
            return source.folder().name
        files = [expected for of_split in source.files().values() for expected in of_split]
        with shards.Facts(data_root()) as facts:
            return " ".join(expected.sha256 or facts.sha256(expected.path) for expected in files)
    except (CheckFailed, OSError, ValueError):
        return ""


def find(data: DataConfig, say: Callable[[str], None] = print) -> Dataset:
    """Returns the Dataset that exists. Raises CheckFailed, which says what is missing or damaged and what to do."""
    return _find(chosen(data), say)


def prepare(data: DataConfig, fetch: bool = False, say: Callable[[str], None] = print) -> Dataset:
    """Returns find() after making what can be made on this machine; uses the network only if fetch."""
    origin = chosen(data)
    origin.obtain(fetch, say)
    return _find(origin, say)


def recorded(data: dict[str, Any], say: Callable[[str], None] = print) -> dict[str, list[Shard]]:
    """Returns {"train": [Shard], "val": [Shard]} of run.json["data"]. Raises CheckFailed unless they are the same."""
    hint = f"./run.sh data show {data['source']} names what is there; SPEEDRUN_DATA=/path names another data folder"
    files: dict[str, list[Shard]] = {"train": [], "val": []}
    with shards.Facts(data_root()) as facts:
        for split, file in [("train", file) for file in data["train"]] + [("val", file) for file in data["val"]]:
            # the path is relative to the data root, or redacted (bench/base/private.py) with a leading ~ or ./
            path = (REPO if file["file"].startswith("./") else data_root()) / os.path.expanduser(file["file"])
            if not path.is_file():
                raise CheckFailed(f"{path}: the shard {file['file']} of run.json is not there: {hint}")
            files[split].append(shards.check(path))
            shards.check_hash(path, facts.sha256(path, say), str(file["sha256"]), hint)
    return files


def floor_nats(dataset: Dataset, val_tokens: int) -> float | None:
    """Returns the exact mean nats per token of the true distribution over the first val_tokens; None if unknown."""
    if dataset.floor_source is None:
        return None
    check_val_tokens(dataset, val_tokens)
    return float(dataset.floor_source.floor_nats(dataset.val[0].tokens()[: val_tokens + 1]))


def check_val_tokens(dataset: Dataset, val_tokens: int) -> None:
    """Raises ValueError if the val shards hold too few tokens: val_tokens targets need one token more."""
    shards.check_val_tokens(sum(file.num_tokens for file in dataset.val), val_tokens)


def changed(dataset: Dataset, gone_too: bool = False) -> list[str]:
    """Returns a sentence for each file whose bytes have changed since it was checked.

    Only files that were written to or replaced since are read again. A deleted file may have been read before, so it
    counts only with gone_too, for a run that failed.
    """
    changes = []
    for file in dataset.train + dataset.val:
        if gone_too and not file.path.exists():
            changes.append(f"{file.path.name}: was removed during the run")
        with contextlib.suppress(OSError):
            if file.stamp is not None and (stamp := shards.stamp_of(file.path)) != file.stamp:
                change = f"{file.path.name}: was changed during the run"
                if stamp[0] != file.stamp[0]:  # not read, because it may have become a huge sparse file
                    changes.append(f"{change}: it has {stamp[0]:,} bytes, and had {file.stamp[0]:,} when it began")
                elif (digest := shards.sha256(file.path)) != file.sha256:
                    changes.append(f"{change}: sha256 {digest}, and was {file.sha256} when it began")
    return changes


def _find(origin: Source, say: Callable[[str], None]) -> Dataset:
    files = origin.files()
    with shards.Facts(data_root()) as facts:
        train, val = (
            tuple(_check(origin, expected, facts, say) for expected in files[split]) for split in ("train", "val")
        )
    for split, files_of_split in (("train", train), ("val", val)):
        if not files_of_split:
            raise CheckFailed(f"data={origin.name} has no {split} shards: {origin.remedy(split)}")
    trained_on = {file.sha256: file for file in train}
    for file in val:
        if (same := trained_on.get(file.sha256)) is not None:
            why = "is also a training shard, so val_loss would be of tokens trained on: leave it out of one"
            raise ValueError(f"data={origin.name}: {file.path.name} has the bytes of {same.path.name}: it {why}")
    fullest = max(train + val, key=lambda file: file.max_token)
    most = fullest.max_token
    if origin.vocab_size is None:
        raise ValueError(f"data.vocab_size is not set: the largest token is {most}: give vocab_size={most + 1} or more")
    if most >= origin.vocab_size:
        why = f"data.vocab_size={origin.vocab_size} allows {origin.vocab_size - 1}: of another vocabulary or damaged"
        raise CheckFailed(f"{fullest.path}: largest token {most}, but {why}; {origin.remedy(fullest.path)}")
    return Dataset(origin.name, origin.vocab_size, train, val, origin.floor_source, origin.origin)


def _check(origin: Source, expected: Expected, facts: shards.Facts, say: Callable[[str], None]) -> ShardFile:
    shard = shards.check(expected.path)
    stamp = shards.stamp_of(shard.path)
    digest, max_token = facts.of(shard, say)
    shards.check_hash(shard.path, digest, expected.sha256, origin.remedy(shard.path))
    return ShardFile(shard.path, shard.num_tokens, shard.num_bytes, digest, max_token, stamp)
