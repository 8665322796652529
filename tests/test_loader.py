"""Shards and the loader: one stream whatever the world size, exact borders and resume, failures that are heard."""

import dataclasses
import functools
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import real_runs
import torch

from bench.base import atomic
from bench.data import course, shards
from bench.data import loader as rooms
from bench.data.course import BatchShape, Stream
from bench.data.loader import Loader, ValRows
from bench.launch.script import work_folder

SIZES = (7, 1, 30, 12)  # 50 tokens in four shards; token number k is k, so that a batch shows where it came from


@pytest.fixture
def counting(tmp_path):
    """Four shards that hold 0, 1, 2 ... 49."""
    starts = np.cumsum([0, *SIZES])
    return [
        shards.write(tmp_path / f"{number}.bin", np.arange(start, start + size))
        for number, (start, size) in enumerate(zip(starts, SIZES, strict=False))
    ]


@pytest.fixture
def open_loader(monkeypatch):
    """Loader of one shape that reads one step at once and is closed at the end of the test."""
    monkeypatch.setattr(rooms, "BLOCK_TOKENS", 1)
    opened = []

    def make(shards, batch_tokens, seq_len, num_micro_steps, *args, **kwargs):
        opened.append(Loader(shards, [BatchShape(None, batch_tokens, seq_len, num_micro_steps)], *args, **kwargs))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


def test_the_stream_does_not_depend_on_how_much_is_read_at_once(counting, open_loader, monkeypatch):
    stepwise = open_loader(counting, 12, 3, 2, 0, 2, "cpu")
    monkeypatch.setattr(rooms, "BLOCK_TOKENS", 30)
    in_fives = open_loader(counting, 12, 3, 2, 0, 2, "cpu")
    monkeypatch.setattr(rooms, "BLOCK_TOKENS", 1 << 16)
    at_most = open_loader(counting, 12, 3, 2, 0, 2, "cpu")
    loaders = (stepwise, in_fives, at_most)
    for _ in range(600):
        first, *others = (torch.stack(loader.next()) for loader in loaders)
        assert all(torch.equal(first, other) for other in others)
    assert [len(loader._block) for loader in loaders] == [2, 10, 128]  # micro-steps: two a step, 64 steps at most


def test_a_batch_stays_as_it_was_handed_out(counting, open_loader):
    loader = open_loader(counting, 6, 3, 1, 0, 1, "cpu")
    kept = [loader.next() for _ in range(20)]
    for step, (tokens_BT, _) in enumerate(kept):
        assert tokens_BT[0, 0].item() == 6 * step % 50


def test_what_fails_in_the_thread_reaches_next(counting, open_loader, monkeypatch):
    read = Stream.read

    def read_or_fail(self, start, num_tokens):
        if start == 12:
            raise OSError(5, "Input/output error")
        return read(self, start, num_tokens)

    monkeypatch.setattr(Stream, "read", read_or_fail)
    loader = open_loader(counting, 6, 3, 1, 0, 1, "cpu")
    loader.next()
    loader.next()
    for _ in range(2):  # and again, for those who did not listen
        with pytest.raises(OSError, match="Input/output error"):
            loader.next()


def test_waiting_for_the_thread_is_measured_and_forgotten_when_a_state_is_loaded(counting, open_loader, monkeypatch):
    read_pair = rooms._read_pair
    monkeypatch.setattr(rooms, "_read_pair", lambda *args: (time.sleep(0.3), read_pair(*args)))
    loader = open_loader(counting, 6, 3, 1, 0, 1, "cpu")
    loader.next()
    assert 0.01e9 < loader.wait_ns < 5e9  # 300 ms, less what passed before next() was called
    loader.load_state_dict({"step": 3, "micro_step": 0})
    assert loader.next()[0][0].tolist() == [18, 19, 20]
    assert loader.wait_ns == 0


def test_reads_ahead_as_many_steps_as_asked_and_no_more(counting, open_loader):
    loader = open_loader(counting, 6, 3, 1, 0, 1, "cpu", depth=2)
    real_runs.wait_for(lambda: loader._ready.qsize() >= 3, 5, every_s=0.01)
    time.sleep(0.05)
    assert loader._ready.qsize() == 3  # the one that next() will hand out from, and two ahead of it


def test_close_ends_the_thread_and_next_says_so(counting):
    loader = Loader(counting, [BatchShape(None, 6, 3, 1)], 0, 1, "cpu")
    thread = loader._thread
    loader.close()
    loader.close()  # twice does no harm
    assert not thread.is_alive()
    with pytest.raises(ValueError, match="closed"):
        loader.next()


def test_refuses_a_batch_that_cannot_be_divided(counting):
    with pytest.raises(ValueError, match=r"batch_tokens=10: .* = 12"):
        Loader(counting, [BatchShape(None, 10, 3, 2)], 0, 2, "cpu")


# ---- shapes that change, and sequences that begin at documents ----

SHAPES = [BatchShape(3, 24, 3, 1), BatchShape(2, 48, 6, 1), BatchShape(None, 16, 2, 1)]


def reference_steps(shapes, num_steps):
    """Returns [(step, its shape)] of all steps."""
    shape_of_step = [shape for shape in shapes for _ in range(shape.num_steps or num_steps)]
    return list(enumerate(shape_of_step[:num_steps]))


@pytest.mark.parametrize("num_micro_steps", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_together_read_one_stream_in_shapes_that_change(counting, world_size, num_micro_steps):
    """Rank r has the r-th block of a step's rows, its micro-step m the m-th slice of that."""
    shapes = [dataclasses.replace(shape, num_micro_steps=num_micro_steps) for shape in SHAPES]
    ranks = [Loader(counting, shapes, rank, world_size, "cpu") for rank in range(world_size)]
    position = 0
    for _, shape in reference_steps(SHAPES, 9):
        read = [rank.next() for rank in ranks for _ in range(num_micro_steps)]
        expected = [token % 50 for token in range(position, position + shape.batch_tokens)]
        assert torch.cat([tokens_BT for tokens_BT, _ in read]).flatten().tolist() == expected
        targets = torch.cat([targets_BT for _, targets_BT in read]).flatten().tolist()
        assert targets == [(token + 1) % 50 for token in expected]
        rows = shape.num_seqs // world_size // num_micro_steps
        assert {tensor.shape for batch in read for tensor in batch} == {(rows, shape.seq_len)}
        assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for batch in read for tensor in batch)
        position += shape.batch_tokens
    assert ranks[0].state_dict() == {"step": 9, "micro_step": 0}
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("eos_token", [None, 7])
def test_resumes_exactly_in_every_shape(tmp_path, eos_token):
    shards_of_documents = documents(tmp_path, every=5)
    shapes = [dataclasses.replace(shape, num_micro_steps=2) for shape in SHAPES]
    whole = Loader(shards_of_documents, shapes, 1, 2, "cpu", eos_token=eos_token)
    states, read = zip(*[(whole.state_dict(), torch.stack(whole.next()).tolist()) for _ in range(18)], strict=True)
    assert states[7] == {"step": 3, "micro_step": 1}
    other = Loader(shards_of_documents, shapes, 1, 2, "cpu", eos_token=eos_token)
    for number in (11, 0, 6, 7, 17, 3):
        other.load_state_dict(states[number])
        assert torch.stack(other.next()).tolist() == read[number]
    whole.close(), other.close()


def documents(folder, every, num_tokens=200):
    """Two shards of random tokens above 7, with a 7 before each of some documents of every tokens on average."""
    draws = np.random.default_rng(0)
    tokens = np.where(draws.random(num_tokens) < 1 / every, 7, draws.integers(8, 1000, num_tokens))
    return [
        shards.write(folder / f"documents{number}.bin", piece)
        for number, piece in enumerate((tokens[:83], tokens[83:]))
    ]


def brute_force_starts(tokens, seq_lens):
    """Position after position: each sequence begins at the first 7 that is not in the one before it."""
    starts, position = [], 0
    for seq_len in seq_lens:
        while tokens[position % len(tokens)] != 7:
            position += 1
        starts.append(position)
        position += seq_len
    return starts


@pytest.mark.parametrize("every", [2, 5, 40])  # a document shorter than every sequence, about as long, and longer
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_sequence_begins_at_the_first_document_after_the_one_before_it(tmp_path, monkeypatch, world_size, every):
    monkeypatch.setattr(course, "SCAN_TOKENS", 11)
    files = documents(tmp_path, every)
    tokens = np.concatenate([np.asarray(file.tokens()) for file in files])
    steps = reference_steps(SHAPES, 8)
    seq_lens = [shape.seq_len for _, shape in steps for _ in range(shape.num_seqs)]
    starts = brute_force_starts(tokens, seq_lens)
    expected = [
        [tokens[(start + offset) % len(tokens)] for offset in range(seq_len + 1)]
        for start, seq_len in zip(starts, seq_lens, strict=True)
    ]
    ranks = [Loader(files, SHAPES, rank, world_size, "cpu", eos_token=7) for rank in range(world_size)]
    for _ in steps:
        for tokens_BT, targets_BT in [rank.next() for rank in ranks]:
            for row, targets in zip(tokens_BT.tolist(), targets_BT.tolist(), strict=True):
                sequence = expected.pop(0)
                assert (row, targets) == (sequence[:-1], sequence[1:])
                assert row[0] == 7
    assert expected == []
    for rank in ranks:
        rank.close()


def test_data_without_a_document_are_refused_and_not_searched_for_ever(counting):
    loader = Loader(counting, [BatchShape(None, 6, 3, 1)], 0, 1, "cpu", eos_token=99)
    with pytest.raises(ValueError, match="no token 99 in all the training data"):
        loader.next()
    loader.close()


# ---- validation ----


def val_batches(*args):
    """All that one rank validates on."""
    rows = ValRows(*args)
    return rows.at(rows.places)


@pytest.mark.parametrize("micro_batch_seqs", [1, 2, 3, 100])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_validation_reads_exactly_val_tokens_in_the_largest_equal_batches(counting, world_size, micro_batch_seqs):
    """16 rows on 2 ranks are 8 each; at most 3 at once is 2, because 3 does not divide 8."""
    ranks = [
        list(val_batches(counting, 48, 3, micro_batch_seqs, rank, world_size, "cpu")) for rank in range(world_size)
    ]
    read = [batch for rank in ranks for batch in rank]
    assert torch.cat([tokens_BT for tokens_BT, _ in read]).reshape(-1).tolist() == list(range(48))
    assert torch.cat([targets_BT for _, targets_BT in read]).reshape(-1).tolist() == list(range(1, 49))
    assert len({len(rank) for rank in ranks}) == 1
    assert len({tokens_BT.shape for tokens_BT, _ in read}) == 1
    rows_of_rank = 16 // world_size
    assert len(read[0][0]) == (2 if micro_batch_seqs == 3 else min(micro_batch_seqs, rows_of_rank))


def test_validation_needs_one_token_more_than_val_tokens(counting):
    assert len(list(val_batches(counting, 49, 7, 7, 0, 1, "cpu"))) == 1
    with pytest.raises(ValueError, match="val_tokens=50: the val shards hold 50 tokens: use 40 or fewer"):
        val_batches(counting, 50, 10, 1, 0, 1, "cpu")


@pytest.mark.parametrize("val_tokens", [0, 10])
def test_validation_refuses_a_number_that_cannot_be_divided(counting, val_tokens):
    with pytest.raises(ValueError, match=f"val_tokens={val_tokens}: use a multiple of world_size \\* seq_len = 6"):
        val_batches(counting, val_tokens, 3, 1, 0, 2, "cpu")


@pytest.mark.gpu
def test_a_gpu_gets_the_same_batches(counting, open_loader):
    """The sister of the tests above; more steps than pinned blocks, so that each is written again and again."""
    device = torch.device("cuda", 0)
    on_cpu, on_gpu = (open_loader(counting, 12, 3, 2, 0, 1, where) for where in ("cpu", device))
    assert all(block.is_pinned() for block in on_gpu._buffers)
    busy = torch.randn(4096, 4096, device=device)
    kept = []
    for _ in range(50):
        kept.append((on_cpu.next(), on_gpu.next()))
        busy = busy @ busy  # compute that a copy must not wait for, nor be overtaken by
    for expected, batch in kept:
        assert all(tensor.device == device for tensor in batch)
        assert torch.equal(torch.stack(expected), torch.stack(batch).cpu())
    for expected, batch in zip(
        *(val_batches(counting, 48, 3, 4, 0, 1, where) for where in ("cpu", device)), strict=True
    ):
        assert torch.equal(torch.stack(expected), torch.stack(batch).cpu())


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
        (THREE[:1000], "truncated"),
        (b"", "no shard of this format"),
        (b"\x89PNG" + THREE[4:], "no shard of this format"),
        (struct.pack("<i", 20240801) + THREE[4:], "llama"),
        (THREE[1024:] * 400, "no shard of this format"),  # tokens without a header, as nanoGPT writes them
        (struct.pack("<2i", 20240520, 2) + THREE[8:], "version 2"),
        (struct.pack("<3i", 20240520, 1, 4) + THREE[12:], "4 tokens, which need 1032"),
        (struct.pack("<3i", 20240520, 1, 2) + THREE[12:], "2 tokens, which need 1028"),
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
    monkeypatch.setattr(work_folder, "NUM_KEPT", 2)
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    make = functools.partial(work_folder.made_of, [Path(__file__)], write=Path.touch)
    made = [make(f"val-{number}-0") for number in range(4)]
    for path in made[1:]:  # the first, the oldest, stays in use
        work_folder._used.pop(path).close()
    os.utime(made[1], (2**32, 0))
    (tmp_path / "raw-0123456789ab.bin").symlink_to("gone")  # as if another process had removed it while this one looks
    left, new, other = (tmp_path / f".{name}.7.abc.tmp" for name in ("raw-1.bin", "raw-2.bin", "train-1.bin"))
    for path in (left, new, other):  # of a killed process, of one that writes, and of something else
        path.touch()
        os.utime(path, (0, 0) if path != new else None)
    assert [path.exists() for path in [make("raw"), *made]] == [True, True, True, False, False]
    assert [path.exists() for path in (left, new, other)] == [False, True, True]


def test_a_file_made_of_shards_that_is_used_again_has_not_changed_and_written_to_it_has(tmp_path, monkeypatch):
    """Else a run would be warned of a change when another run, or its own sandbox, uses the same file."""
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    make = functools.partial(work_folder.made_of, [Path(__file__)], "raw", lambda path: path.write_bytes(b"1"))
    made = make()
    before = work_folder.stamp(made)
    assert make() == made and work_folder.stamp(made) == before
    made.write_bytes(b"2")
    assert work_folder.stamp(made) != before
