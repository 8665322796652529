"""The user's own shards: data.train_glob and data.val_glob, read where they lie.

What they should hash to is not known; their sha256 goes into the record.  Also here: the globs, which text shares.
"""

import glob
import os
import re
from pathlib import Path

from bench.base.paths import of_user
from bench.data.shards import CheckFailed
from bench.data.sources.source import Expected, Source, with_numbers

NUMBER = re.compile(r"(\d+)\.bin")  # at the end of a shard's name, fineweb_train_000003.bin


class UserShards(Source):
    needs = ("train_glob", "val_glob")
    uses = (*needs, "shards", "eos_token")

    def __init__(self, data):
        super().__init__(data)
        self.vocab_size = data.vocab_size  # None is refused when the largest token is known, so that it can be named

    @property
    def eos_token(self):
        return self.data.eos_token

    def files(self):
        paths = split_globs(self.data)
        if (numbers := self.data.shard_numbers) is not None:
            where = f"data.train_glob={self.data.train_glob}"
            paths["train"] = with_numbers(paths["train"], numbers, _number, where)
        return {split: [Expected(path, None) for path in paths[split]] for split in paths}

    def remedy(self, path):
        return "make or get it again, or choose other files with data.train_glob and data.val_glob"


def _number(path):
    match = NUMBER.search(path.name)
    return int(match[1]) if match else None


def split_globs(data):
    """DataConfig -> {"train": [Path], "val": [Path]}, sorted by name.  A file that both globs name is val's alone."""
    val = _matches("val_glob", data.val_glob)
    val_paths = {path.resolve() for path in val}
    train = [path for path in _matches("train_glob", data.train_glob) if path.resolve() not in val_paths]
    if not train:
        why = "all its files are in data.val_glob too"
        raise ValueError(f"data.train_glob={data.train_glob}: {why}: leave some to train on")
    return {"train": train, "val": val}


def _matches(name, pattern):
    pattern = str(of_user(pattern))
    paths = [Path(path) for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path)]
    if not paths:
        raise CheckFailed(f"data.{name}={pattern}: no file matches: check the pattern, and quote it for the shell")
    return paths
