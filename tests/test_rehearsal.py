"""A rehearsal for a GPU finds the faults that only a GPU would show, planted one by one.

Each is a process: the made-up device must be there before torch is.  Without Triton it goes as far as AOTAutograd.
"""

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import models
from bench.cli import doctor
from bench.launch import rehearse
from bench.training.rehearsal import device
from models import ladder

REPO = Path(__file__).resolve().parent.parent
VERSION = importlib.metadata.version("torch")
KNOWN = VERSION.startswith("2.13") and VERSION.endswith("+cpu") and shutil.which("g++") is not None
needs_device = pytest.mark.skipif(not KNOWN, reason="needs a CPU build of torch 2.13 and g++")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, as in .ci/run")
SMALL = ["model/size=nano", "data.batch_tokens=16384", "data.seq_len=512", "goal.val_tokens=16384", "goal.num_steps=4"]
RUN = """
import json, sys
from bench.training.rehearsal import device
has_triton, gpu = {triton}, "{gpu}"
device.has_triton = lambda: has_triton
device.load()
import torch
{plant}
from bench.training.rehearsal import rehearse
print(json.dumps(rehearse.rehearse(gpu, 0, sys.argv[1:])))
"""
LOST_MASK = """
from models import masked_attention
def fast(self, q_BHTK, k_BHTK, v_BHTK):  # as when dynamo reads None for the mask
    return masked_attention.flex_attention(q_BHTK, k_BHTK, v_BHTK, block_mask=None, scale=self.scale)
masked_attention.Visible.fast = fast
"""
NEW_GRAPH_EVERY_STEP = """
from models.gpt2 import GPT2 as Model
plain_forward = Model.forward
def forward(self, tokens_BT, targets_BT):
    if self.training:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return plain_forward(self, tokens_BT, targets_BT) * self.num_calls
    return plain_forward(self, tokens_BT, targets_BT)
Model.forward = forward
"""
NO_KERNEL = """
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
plain_logits = Model.logits
def logits(self, tokens_BT):
    logits_BTV = plain_logits(self, tokens_BT)
    return logits_BTV * (2 if logits_BTV.sum().item() > 0 else 1)
Model.logits = logits
"""


ONE_BY_ONE = """
plain_init = torch.optim.AdamW.__init__
def init(self, *args, **options):
    plain_init(self, *args, **options | {"foreach": False, "fused": False})
torch.optim.AdamW.__init__ = init
"""
COPIES_FROM_THE_HOST = """
from bench.training.reducer import Alone
plain_clip = Alone.clip
def clip(self, most_norm):
    torch.tensor(2.0, device="cuda")
    torch.zeros(3).to("cuda")
    torch.zeros(3).to("cuda", non_blocking=True)
    torch.zeros(3, device="cuda").copy_(torch.ones(3))
    plain_clip(self, most_norm)
Alone.clip = clip
"""
OUT_OF_ORDER = """
from bench.training import distributed
from bench.training.trainer import Trainer
plain_update = Trainer.update
def update(self, step):
    if self.ranks.rank > 0:
        distributed.all_sum(torch.zeros(3, device="cuda"))
    plain_update(self, step)
Trainer.update = update
"""
GRAPH_A_WINDOW = """
from models.masked_attention import Visible
from models.windowed import Windowed
def mix(self, tokens_BT):
    near_tokens = torch.full_like(self.near_tokens, self.window_tokens)
    return Visible(tokens_BT, self.eos_token, near_tokens, self.near_blocks, None)
Windowed.windows_are_data, Windowed.mix = True, mix
"""
UNSEEN_LENGTH = """
from models import stages
plain_shape = stages.Portion.shape.fget
stages.Portion.shape = property(lambda portion: plain_shape(portion)[:1])  # so the warm-up skips a later stage's length
"""
LENGTHS = "stages=[{until_step:2,seq_len:256},{seq_len:512}]"
WINDOWS = "stages=[{until_step:1,window_tokens:128},{until_step:2,window_tokens:256},{window_tokens:512}]"
TOO_MUCH_SHARED = """
from models import masked_attention
def fast(self, q, k, v):
    options = {"num_stages": 16, "BLOCK_M": 128, "BLOCK_N": 128}
    mask, scale = self._block_mask, self.scale
    return masked_attention.flex_attention(q, k, v, block_mask=mask, scale=scale, kernel_options=options)
masked_attention.Visible.fast = fast
"""


OF_CALLS = [
    "planted.halved.default has no kernel for this GPU",
    "the optimizer calls addcdiv_",
    "allreduce_(3) on rank 7",
    "the host waits for the GPU in a step: copy from the host, 6 times",  # 3 of 4 copies, in each of 2 steps
]
SHARED_MEMORY = "KiB of shared memory, of 227 a block may have"
TOKENS = 8 * 512 * 2048  # 2,048 sequences of 512 tokens at once: their logits alone are 98 GiB in bfloat16
MUCH_AT_ONCE = [f"data.batch_tokens={TOKENS}", f"goal.val_tokens={TOKENS}", "hardware.micro_batch_seqs=2048"]


def rehearsed(model, plant="", *overrides, gpu="h100", triton=False):
    """What a process found, and what the command says about it."""
    program = RUN.format(plant=plant, gpu=gpu, triton=triton)
    done = subprocess.run(
        [sys.executable, "-c", program, "track=gpt2_small", f"model={model}", *SMALL, *overrides],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    return facts, rehearse.judge(model, facts)


@needs_device
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "overrides", "seqs", "num_collectives"),
    [  # 16,384 tokens / 8 GPUs / 512 or 256; of two steps of warm-up and two others, for each stage
        ("windowed", [], [4], 4 * 3),  # two buckets of gradients, then Muon's updates
        ("gpt2", ["hardware.reducer=shard"], [4], 4 * 6),  # three scattered; two of weights gathered, and Muon's
        ("gpt2", ["optim.muon_batched=compiled", LENGTHS], [8, 4], 8 * 3),
    ],
)
def test_a_model_as_it_is_has_no_fault(model, overrides, seqs, num_collectives):
    facts, (row,) = rehearsed(model, "", *overrides)
    assert row.status == "ok", row
    assert facts["num_flex"] == (8 if model == "windowed" else 0)  # of 4 layers, in two graphs
    assert facts["micro_batch_seqs"] == seqs
    assert facts["collectives"] == num_collectives
    assert "kernels not compiled" in row.found


@needs_device
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plant", "overrides", "machine", "findings"),
    [
        ("windowed", LOST_MASK, [], {}, ["FlexAttention see every token"]),
        ("windowed", GRAPH_A_WINDOW, [WINDOWS], {}, ["graphs compiled after the warm-up"]),
        ("gpt2", UNSEEN_LENGTH, [LENGTHS], {}, ["graphs compiled after the warm-up"]),
        ("gpt2", NEW_GRAPH_EVERY_STEP + HOST_WAITS, [], {}, ["graphs compiled after the warm-up", "graph break"]),
        ("gpt2", NO_KERNEL + ONE_BY_ONE + OUT_OF_ORDER + COPIES_FROM_THE_HOST, ["optim=adamw"], {}, OF_CALLS),
        (
            "gpt2",
            "",
            ["model.arch=r20", "optim=groups", "model.args.fp8_head=true"],
            {"gpu": "a100"},
            ["aten._scaled_mm.default has no k"],
        ),
        pytest.param("windowed", TOO_MUCH_SHARED, [], {"triton": True}, [SHARED_MEMORY], marks=needs_triton),
        pytest.param("gpt2", "", MUCH_AT_ONCE, {"triton": True}, ["GiB live in the"], marks=needs_triton),
    ],
    ids=["mask", "window", "length", "recompiles", "calls", "8 bits on an older GPU", "shared memory", "memory"],
)
def test_a_planted_fault_is_found(model, plant, overrides, machine, findings):
    _, rows = rehearsed(model, plant, *overrides, **machine)
    for finding in findings:
        assert any(row.status != "ok" and finding in row.found for row in rows), rows


WITHOUT_LOGITS = """
from models.gpt2 import GPT2

class Bare(GPT2):
    scores, logits = GPT2.logits, None

    def forward(self, tokens_BT, targets_BT):
        return self.loss(self.scores(tokens_BT), targets_BT)
"""


@needs_device
@pytest.mark.slow
def test_a_model_without_logits_is_rehearsed_where_a_run_accepts_it(tmp_path, monkeypatch, printed):
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    (tmp_path / "bare.py").write_text(WITHOUT_LOGITS)
    arguments = ["--rehearse-gpu", "bare.py:Bare", "optim=adamw", *SMALL]
    with pytest.raises(ValueError, match="model.arch=bare.py:Bare cannot be trained:\n  - it lacks logits"):
        doctor.main(arguments)
    assert "1 of 1 compile for H100 as they are" in printed(doctor, *arguments, "track=free")


def kinds_of_layers(arch, num_layers):
    """What layers of a model have and lack, one set for each property."""
    model = models.load(arch)(vocab_size=64, seq_len=256, num_layers=num_layers, num_heads=2, width=64)
    blocks = model.blocks
    properties = [{(type(block.attention), type(block.mlp)) for block in blocks}]
    if hasattr(model, "has_long_window"):
        properties.append({model.has_long_window(index) for index in range(num_layers)})
    if hasattr(model, "values") and getattr(model, "value_embeddings", None) is not None:
        values = model.values(torch.zeros(1, 256, dtype=torch.int64))
        properties.append({value is None for value in values})
    return properties


def test_the_layers_rehearsed_are_of_every_kind():
    for arch in (name for name in ladder.CLASSES if name.startswith("r")):
        assert kinds_of_layers(arch, rehearse.NUM_LAYERS) == kinds_of_layers(arch, 12), arch


def test_what_a_kernel_takes_too_much_of_is_a_finding():
    fine = {"graph_breaks": [], "graphs_after_warmup": [], "recompiles_after_warmup": [], "without_kernel": []}
    fine |= {"too_large": [], "num_maskless": 0, "num_flex": 0, "syncs": [], "memory_gib": 79.6, "has_triton": True}
    fine |= {
        "peak_gib": {"step": 20.0, "step validation": 60.0},
        "num_graphs": 3,
        "num_kernels": 50,
        "largest_shared_bytes": 65536,
    }
    fine |= {"collectives": 28, "out_of_order": None, "one_by_one": {}, "estimated_gib": 23.5, "num_layers": 4}
    fine["estimated_val_gib"] = 58.0
    fine["shared_limit_bytes"] = 227 * 1024
    fine["per_step"] = {"0": {"triton_kernels": 200, "other_operators": 100}}
    (row,) = rehearse.judge("gpt2", fine)
    assert row.found == (
        "3 graphs, 300 launches a step, 28 collectives, 50 Triton kernels, of shared memory at most 64 KiB, "
        "at most 20.0 GiB in a step (23.5 estimated), 60.0 GiB in a validation (58.0 estimated) with 4 layers"
    )
    _, row = rehearse.judge("gpt2", fine | {"peak_gib": {"step": 60.0, "step validation": 60.0}})
    assert row.status == "warn" and row.found == "60.0 GiB live in a step, above the 23.5 that choose micro-batches"
    kernel = {"name": "triton_tem_0", "config": "BLOCK_M: 256", "shared_bytes": 256 * 1024}
    (row,) = rehearse.judge("gpt2", fine | {"too_large": [kernel]})
    assert row.status == "fail" and "256 KiB of shared memory, of 227" in row.found
    row, _ = rehearse.judge("gpt2", fine | {"peak_gib": {"step": 90.0}})
    assert row.status == "fail" and "90.0 GiB live in the step" in row.found


@pytest.mark.parametrize(
    ("version", "cuda", "message"),
    [
        ("2.13.0+cu130", "13.0", "torch 2.13.0\\+cu130 is a build for GPUs"),
        ("2.12.1+cpu", None, "torch 2.12.1\\+cpu is untried, the rehearsal is made for torch 2.13"),
    ],
)
def test_other_builds_of_torch_are_refused_in_a_sentence(version, cuda, message):
    with pytest.raises(device.Unavailable, match=message):
        device.refuse_unknown(version, cuda)
    device.refuse_unknown("2.13.0+cpu", None)


def test_names_are_experiments_and_models_and_others_are_refused():
    assert rehearse.overrides_of("r53") == ["experiment=r53"]
    assert rehearse.overrides_of("my_model.py:MyModel") == ["track=gpt2_small", "model.arch=my_model.py:MyModel"]
    assert rehearse.overrides_of("gpt2") == ["track=gpt2_small", "model=gpt2"]
    assert rehearse.overrides_of("shard") == ["track=gpt2_small", "model=gpt2", "optim=muon", "hardware.reducer=shard"]
    with pytest.raises(ValueError, match="doctor --rehearse-gpu r99: unknown; choose from r01"):
        doctor.main(["--rehearse-gpu", "r99"])
