"""A rehearsal for a GPU finds the faults that only a GPU would show, planted one by one; without Triton's kernels.

Each is a process: the made-up device must be there before torch is.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import doctor
from bench.launch import rehearse

REPO = Path(__file__).resolve().parent.parent
KNOWN = importlib.metadata.version("torch").startswith("2.13") and importlib.metadata.version("torch").endswith("+cpu")
needs_device = pytest.mark.skipif(not KNOWN or shutil.which("g++") is None, reason="torch 2.13 for CPUs and g++")
SMALL = ["model/size=nano", "data.batch_tokens=16384", "data.seq_len=512", "goal.val_tokens=16384", "goal.num_steps=4"]
RUN = """
import json, sys
from bench.training.rehearsal import device
device.has_triton = lambda: False
device.load()
{plant}
from bench.training.rehearsal import rehearse
print(json.dumps(rehearse.rehearse(sys.argv[1:])))
"""
LOST_MASK = """
from models import masked_attention
def fast(self, q_BHTK, k_BHTK, v_BHTK):  # as when dynamo reads None for the mask
    return masked_attention.flex_attention(q_BHTK, k_BHTK, v_BHTK, block_mask=None, scale=self.scale)
masked_attention.Visible.fast = fast
"""
NEW_GRAPH_EVERY_STEP = """
from models.gpt2 import GPT2 as Model
plain = Model.forward
def forward(self, tokens_BT, targets_BT):
    if self.training:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return plain(self, tokens_BT, targets_BT) * self.num_calls
    return plain(self, tokens_BT, targets_BT)
Model.forward = forward
"""
NO_KERNEL = """
import torch
from models.gpt2 import GPT2 as Model
@torch.library.custom_op("planted::halved", mutates_args=(), device_types="cpu")
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2
halved.register_fake(torch.empty_like)
halved.register_autograd(lambda context, grad: grad / 2)
plain = Model.logits
Model.logits = lambda self, tokens_BT: halved(plain(self, tokens_BT))
"""
HOST_WAITS = """
from models.gpt2 import GPT2 as Model
plain = Model.logits
def logits(self, tokens_BT):
    logits_BTV = plain(self, tokens_BT)
    return logits_BTV * (2 if logits_BTV.sum().item() > 0 else 1)
Model.logits = logits
"""


def rehearsed(model, plant="", *overrides):
    """What a process found, and what the command says about it."""
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(plant=plant), "track=gpt2_small", f"model={model}", *SMALL, *overrides],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return found, rehearse.judge(model, found)


@needs_device
@pytest.mark.parametrize("model", ["windowed", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_model_as_it_is_has_no_fault(model):
    found, (row,) = rehearsed(model)
    assert row.status == "ok", row
    assert found["num_graphs"] == 3  # validation, forward, backward
    assert found["num_flex"] == (0 if model == "gpt2" else 8)  # of 4 layers, in two graphs
    assert found["micro_batch_seqs"] == [4]  # 16,384 tokens / 8 GPUs / 512
    assert "kernels not compiled" in row.found


@needs_device
@pytest.mark.parametrize(
    ("model", "plant", "words"),
    [
        ("windowed", LOST_MASK, "FlexAttention see every token"),
        pytest.param("gpt2", NEW_GRAPH_EVERY_STEP, "graphs compiled after the warm-up", marks=pytest.mark.slow),
        pytest.param("gpt2", NO_KERNEL, "planted.halved.default has no kernel for CUDA", marks=pytest.mark.slow),
        pytest.param("gpt2", HOST_WAITS, "graph break", marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_found(model, plant, words):
    _, rows = rehearsed(model, plant)
    assert any(row.status == "fail" and words in row.found for row in rows), rows


def test_what_a_kernel_takes_too_much_of_is_a_finding():
    fine = {"graph_breaks": [], "graphs_after_warmup": [], "recompiles_after_warmup": [], "without_kernel": []}
    fine |= {"too_large": [], "num_maskless": 0, "num_flex": 0, "syncs": [], "memory_gib": 79.6, "has_triton": True}
    fine |= {"peak_gib": {"step": 60.0}, "num_graphs": 3, "num_kernels": 50, "largest_shared_bytes": 65536}
    fine["per_step"] = {"0": {"triton_kernels": 200, "other_operators": 100}}
    (row,) = rehearse.judge("gpt2", fine)
    assert (
        row.found == "3 graphs, 300 launches a step, 50 Triton kernels, of shared memory at most 64 KiB, peak 60.0 GiB"
    )
    kernel = {"name": "triton_tem_0", "config": "BLOCK_M: 256", "shared_bytes": 256 * 1024}
    (row,) = rehearse.judge("gpt2", fine | {"too_large": [kernel]})
    assert row.status == "fail" and "256 KiB of shared memory, of 227" in row.found
    (row,) = rehearse.judge("gpt2", fine | {"peak_gib": {"step": 90.0}})
    assert row.status == "fail" and "90.0 GiB live in the step" in row.found


def test_names_are_experiments_and_models_and_others_are_refused():
    assert rehearse.overrides_of("r53") == ["experiment=r53"]
    assert rehearse.overrides_of("gpt2") == ["track=gpt2_small", "model=gpt2"]
    with pytest.raises(ValueError, match="doctor --rehearse-gpu r99: unknown; choose from r01"):
        doctor.main(["--rehearse-gpu", "r99"])
