"""What memory was for, judged from stacks and phases, on snapshots made by hand."""

import pytest
import snapshots

from bench.analysis.memory import lives, page, uses

MIB = 2**20


CALL = ("torch/nn/modules/module.py:1780 _call_impl", "torch/nn/modules/module.py:1769 _wrapped_call_impl")
STEP = "bench/training/trainer.py:85 step"
INNER = "models/gpt2.py:45 forward"
LINEAR = ("torch/nn/modules/linear.py:125 forward", *CALL)
FORWARD = snapshots.frames(*LINEAR, INNER, *CALL, "elsewhere/net.py:40 forward", *CALL, STEP)
BUILD = snapshots.frames("torch/nn/modules/linear.py:100 __init__", "elsewhere/net.py:12 __init__", STEP)
STATE = snapshots.frames("torch/optim/adamw.py:150 _init_group", "torch/optim/adamw.py:220 step", STEP)
BACKWARD = snapshots.frames("torch/autograd/__init__.py:360 backward", "torch/_tensor.py:630 backward", STEP)


def trained(with_marks, backward=()):
    """Weights of 8 MiB, activations of 6 and a piece of 1 that forward frees, gradients of 8, state of 16."""
    gpu, marks = snapshots.Allocator(segment_bytes=64 * MIB), []

    def mark(name):
        marks.append([gpu.now_us, name])

    gpu.alloc(8 * MIB, BUILD)
    mark("step 1"), mark("forward")
    kept = gpu.alloc(6 * MIB, FORWARD)
    gpu.free(gpu.alloc(MIB, FORWARD))
    mark("backward")
    gradient = gpu.alloc(8 * MIB, backward)
    gpu.free(gpu.alloc(2 * MIB, backward))
    gpu.free(kept)
    mark("optimizer")
    gpu.alloc(16 * MIB, STATE)
    gpu.free(gpu.alloc(3 * MIB, STATE))
    mark("step 2"), mark("forward")
    gpu.free(gradient)
    return gpu.snapshot(**({"speedrun": {"marks": marks}} if with_marks else {}))


@pytest.mark.parametrize("with_marks", [True, False])
@pytest.mark.parametrize("backward", [(), BACKWARD])
def test_each_piece_of_memory_is_counted_under_its_use(with_marks, backward):
    snapshot = trained(with_marks, backward)
    (device,) = lives.devices(snapshot)
    allocations = lives.from_snapshot(snapshot, device)
    held = lives.held_by(allocations, uses.Uses(allocations).of)
    mib = {use: num_bytes / MIB for use, (_, num_bytes) in held.allocated.items()}
    assert mib == {"parameters": 8, "activations": 6, "gradients": 8, "optimizer state": 16, "temporary": 1 + 2 + 3}
    assert held.peak_bytes == (8 + 8 + 16 + 3) * MIB  # activations are gone when the optimizer works
    expected = {"parameters": 8, "gradients": 8, "optimizer state": 16, "temporary": 3}
    assert {use: num_bytes / MIB for use, num_bytes in held.at_peak.items()} == expected


def test_weights_and_state_of_before_the_recording_are_known_by_the_stacks_of_their_blocks():
    gpu = snapshots.Allocator()
    gpu.recording = False
    gpu.alloc(4 * MIB, BUILD), gpu.alloc(5 * MIB, STATE), gpu.alloc(MIB)
    gpu.recording = True
    gpu.free(gpu.alloc(MIB, FORWARD))
    allocations = lives.from_snapshot(gpu.snapshot(), 0)
    held = lives.held_by(allocations, uses.Uses(allocations).of)
    initial = {"parameters": 4 * MIB, "optimizer state": 5 * MIB, "other": MIB}  # the last has no stack: not guessed
    assert held.initial == initial


def test_the_page_and_the_facts_show_uses():
    snapshot = trained(with_marks=True)
    document = page.document_of_snapshot(snapshot, "x")
    html, (facts,) = document.html(), document.data["devices"]
    assert "What memory was for" in html and "Judged from where" in html and 'data-chart="memory-use-0"' in html
    assert facts["uses_at_peak"]["optimizer state"] == 16 * MIB
