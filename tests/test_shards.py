"""The .bin shard: what is written is what is read, and a file that is not a whole shard is refused by its name."""

import functools
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from bench.base import atomic
from bench.data import made_copies, shards

THREE = struct.pack("<256i", 20240520, 1, 3, *[0] * 253) + struct.pack("<3H", 7, 65535, 256)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some_train_000001.bin"


def test_writes_the_bytes_that_llm_c_writes_and_reads_them_for_reading_alone(path):
    assert shards.write(path, [7, 65535, 256]) == shards.check(path)
    assert path.read_bytes() == THREE
    shard = shards.check(path)
    assert (shard.path, shard.num_tokens, shard.num_bytes) == (path, 3, 1030)  # 256 * 4 + 3 * 2
    assert shard.tokens().dtype == np.uint16 and shard.tokens().tolist() == [7, 65535, 256]
    with pytest.raises(ValueError, match="read-only"):
        shard.tokens()[0] = 1


@pytest.mark.parametrize(
    "damaged, complaint",
    [
        (THREE[:-1], "truncated"),
        (THREE[:1024], "truncated"),
        (THREE + b"\0", "longer than its header says"),
        (THREE[:1000], "truncated or no shard"),
        (b"", "truncated or no shard"),
        (b"\x89PNG" + THREE[4:], "no shard of this format"),
        (struct.pack("<i", 20240801) + THREE[4:], "llama"),
        (THREE[1024:] * 400, "no shard of this format"),  # tokens without a header, as nanoGPT writes them
        (struct.pack("<2i", 20240520, 2) + THREE[8:], "version 2"),
        (struct.pack("<3i", 20240520, 1, 4) + THREE[12:], "4 tokens need 1032"),
        (struct.pack("<3i", 20240520, 1, 2) + THREE[12:], "2 tokens need 1028"),
        (struct.pack("<3i", 20240520, 1, 0) + THREE[12:1024], "counts 0 tokens"),
        (struct.pack("<3i", 20240520, 1, -3) + THREE[12:], "counts -3 tokens"),
    ],
)
def test_refuses_by_name_what_is_not_a_whole_shard(path, damaged, complaint):
    path.write_bytes(damaged)
    with pytest.raises(shards.CheckFailed, match=complaint) as refusal:
        shards.check(path)
    assert str(path) in str(refusal.value)


def test_refuses_a_missing_file_by_name(path):
    with pytest.raises(shards.CheckFailed, match="some_train_000001.bin: cannot be read"):
        shards.check(path)


@pytest.mark.parametrize("tokens", [[65536], [-1], [], [[1, 2]], [1.5]])
def test_never_writes_what_does_not_fit(path, tokens):
    with pytest.raises(AssertionError):
        shards.write(path, tokens)
    assert os.listdir(path.parent) == []


def test_a_file_is_the_old_one_until_the_new_one_is_whole_also_when_writing_is_interrupted(path):
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic.replacing(path) as file:
        file.write(b"half of the n")
        raise KeyboardInterrupt
    assert os.listdir(path.parent) == [path.name]
    with atomic.replacing(path) as file:
        file.write(THREE)
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == THREE


def test_finds_the_largest_token_wherever_it_is(path, monkeypatch):
    monkeypatch.setattr(shards, "SCAN_BYTES", 8)  # four tokens at once, so that 10 tokens need three reads
    for position in range(10):
        tokens = np.ones(10, np.uint16)
        tokens[position] = 50257
        assert shards.max_token(shards.write(path, tokens)) == 50257


def test_of_the_files_made_of_shards_those_used_last_are_kept_and_all_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(made_copies, "KEPT", 2)
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    make = functools.partial(made_copies.made_of, [Path(__file__)], write=Path.touch)
    made = [make(f"val-{number}-0") for number in range(4)]
    for path in made[1:]:  # the first, the oldest, stays in use
        made_copies._used.pop(path).close()
    os.utime(made[1], (2**32, 0))
    (tmp_path / "raw-0123456789ab.bin").symlink_to("gone")  # as if another process had removed it while this one looks
    left, new, other = (tmp_path / f".{name}.7.abc.tmp" for name in ("raw-1.bin", "raw-2.bin", "train-1.bin"))
    for path in (left, new, other):  # of a killed process, of one that writes, and of something else
        path.touch()
        os.utime(path, (0, 0) if path != new else None)
    assert [path.exists() for path in [make("raw"), *made]] == [True, True, True, False, False]
    assert [path.exists() for path in (left, new, other)] == [False, True, True]
