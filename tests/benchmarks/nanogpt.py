"""The harness beside nanoGPT's own model and loop on a CPU: same sizes, data, batch, dtype and threads, interleaved.

    .venv/bin/python tests/benchmarks nanogpt CLONE [NUM_THREADS ...]

CLONE: a clone of https://github.com/karpathy/nanoGPT (MIT licence), whose model.py and configure_optimizers() run as
they are; the loop around them is that of its train.py for one process, without validation and checkpoints.  Ours is
models/gpt2.py with nanoGPT's exact GELU.  A round is a block of steps of each, then again in the other order;
SPEEDRUN_BENCH_ROUNDS=40.  CPU seconds are of all threads, and say more on a loaded machine.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

NUM_BLOCK_STEPS = 4
LR = 6e-4
WHAT = "harness / nanoGPT's own loop (CPU)"


class Theirs:
    """nanoGPT's train.py around nanoGPT's model.  tokens: one shard; a step is one batch [num_seqs, seq_len]."""

    def __init__(self, clone, tokens, vocab_size, num_seqs, seq_len, num_layers, num_heads, width):
        import torch

        spec = importlib.util.spec_from_file_location("nanogpt_model", Path(clone) / "model.py")
        module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sizes = {"n_layer": num_layers, "n_head": num_heads, "n_embd": width}
        torch.manual_seed(1337)
        with contextlib.redirect_stdout(sys.stderr):
            self.model = module.GPT(module.GPTConfig(block_size=seq_len, vocab_size=vocab_size, **sizes))
            self.optimizer = self.model.configure_optimizers(0.1, LR, (0.9, 0.95), "cpu")
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.tokens, self.shape, self.num_steps = tokens, (num_seqs, seq_len), 0
        self.batch = self.get_batch()

    def get_batch(self):
        import torch

        num_seqs, T = self.shape
        starts = torch.randint(len(self.tokens) - T, (num_seqs,))
        x = torch.stack([torch.from_numpy(self.tokens[i : i + T].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(self.tokens[i + 1 : i + 1 + T].astype(np.int64)) for i in starts])
        return x, y

    def step(self):
        import torch

        for group in self.optimizer.param_groups:
            group["lr"] = LR
        _, loss = self.model(*self.batch)
        loss = loss / 1
        self.batch = self.get_batch()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.num_steps % 10 == 0:  # train.py's log_interval in config/train_shakespeare_char.py
            loss.item()
        self.num_steps += 1


def measure(clone, *num_threads):
    """Rows for each number of threads (1, and all), each in a process of its own."""
    for threads in num_threads or ("1", str(os.cpu_count())):
        program = f"from benchmarks import nanogpt; nanogpt.measure_here({str(clone)!r}, {threads})"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": ":".join(sys.path[:2])},
            capture_output=True,
        )
        if done.returncode:
            raise ValueError(f"nanogpt {clone}: failed: {done.stderr.decode()[-500:]}")
        for line in done.stdout.decode().splitlines():
            if line.startswith(WHAT):  # else what else prints
                what, ratio, low, high = line.split("\t")
                yield f"{what}, {threads} threads", float(ratio), "<=", 1.0, (float(low), float(high))


def measure_here(clone, num_threads):
    """Print ratios of wall and CPU time of the two, of this process."""
    from benchmarks import overhead

    overrides = ["track=cpu_nano", "hardware=cpu", f"optim.lr={LR}", "model.args={gelu: none}"]
    overrides.append(f"hardware.num_threads={num_threads}")
    with contextlib.closing(overhead.Loops(overrides, NUM_BLOCK_STEPS)) as loops:
        model, data = loops.config.model, loops.config.data
        sizes = (model.num_layers, model.num_heads, model.width)
        num_seqs = data.batch_tokens // data.seq_len
        theirs = Theirs(clone, loops.tokens, loops.trainer.vocab_size, num_seqs, data.seq_len, *sizes)
        cpu_s = {"ours": 0.0, "theirs": 0.0}
        rounds_s = {name: [] for name in cpu_s}

        def timed(name, block):
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            block()
            cpu_s[name] = time.process_time() - started_cpu_s
            rounds_s[name].append(cpu_s[name])
            return time.perf_counter() - started_s

        def block_of_theirs():
            for _ in range(NUM_BLOCK_STEPS):
                theirs.step()

        block_of_theirs()
        blocks = {
            "ours": lambda: timed("ours", lambda: loops.train(loops.instrumented)),
            "theirs": lambda: timed("theirs", block_of_theirs),
        }
        num_rounds = int(os.environ.get("SPEEDRUN_BENCH_ROUNDS", 40))
        wall = overhead.measured(blocks, num_rounds)
        cpu = {name: [a + b for a, b in zip(all_s[::2], all_s[1::2], strict=True)] for name, all_s in rounds_s.items()}
        for what, seconds in (("wall time", wall), ("CPU time", cpu)):
            _, ratio, _, _, (low, high) = overhead.ratio(what, seconds["ours"], seconds["theirs"])
            median_ms = sorted(seconds["ours"])[len(seconds["ours"]) // 2] / (2 * NUM_BLOCK_STEPS) * 1e3
            print(f"{WHAT}, {what} ({median_ms:.2f} ms a step)", ratio, low, high, sep="\t")
