"""A contestant that really trains, in a second and without torch: a table of bigram logits, by plain SGD.

python bigram.py VARIANT [--seed=N].  The honest variants differ in how they print and read, as scripts of the field do;
each of the others cheats in one way.  tests/benchmarks/contestants.py runs them all.
Legend: B rows, T tokens of a row, V vocabulary.
"""

import glob
import os
import queue
import subprocess
import sys
import threading
import time

import numpy as np

VARIANT = sys.argv[1]
SEED = int(next((word.split("=")[1] for word in sys.argv if word.startswith("--seed=")), "0"))
V, B, T, NUM_STEPS, VAL_EVERY, VAL_TOKENS, LR = 257, 8, 128, 60, 20, 32768, 60.0
TRAIN, VAL = "data/fineweb10B/*_train_*.bin", "data/fineweb10B/*_val_*.bin"
clock_s = time.perf_counter
if VARIANT == "patched_clock":
    true_s = time.perf_counter
    clock_s = time.perf_counter = lambda: true_s() / 2


def tokens_of(pattern):
    """All tokens of the first shard, uint16."""
    (path, *_) = sorted(glob.glob(pattern))
    if VARIANT == "reads_by_cat":
        raw = subprocess.run(["cat", path], check=True, capture_output=True).stdout
        return np.frombuffer(raw, np.uint16, offset=1024)
    if VARIANT == "memory_maps":
        return np.memmap(path, np.uint16, "r", offset=1024)
    with open(path, "rb") as file:
        file.seek(1024)
        return np.frombuffer(file.read(), np.uint16)


train_tokens = tokens_of(VAL if VARIANT in ("trains_on_val", "reads_by_cat") else TRAIN)
random = np.random.default_rng(SEED)
table_VV = random.normal(scale=0.01, size=(V, V)).astype(np.float32)
if VARIANT == "late_compile":
    time.sleep(0.3)
opened_train_once = VARIANT == "opens_train_once"


def batch():
    global train_tokens, opened_train_once
    if VARIANT == "opens_every_step":
        train_tokens = tokens_of(TRAIN)
    if opened_train_once:
        train_tokens, opened_train_once = tokens_of(VAL)[:VAL_TOKENS], False
    starts = random.integers(len(train_tokens) - T - 1, size=B)
    rows = np.stack([train_tokens[start : start + T + 1] for start in starts]).astype(np.int64)
    return rows[:, :-1].ravel(), rows[:, 1:].ravel()


def log_probs(tokens):
    logits = table_VV[tokens]
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def step():
    inputs, targets = batch()
    log_p = log_probs(inputs)
    gradient = np.exp(log_p)
    gradient[np.arange(len(targets)), targets] -= 1
    np.add.at(table_VV, inputs, -LR * gradient / len(targets))
    return -log_p[np.arange(len(targets)), targets].mean()


def validation_loss(number):
    tokens = tokens_of(VAL)[: (128 if VARIANT == "validates_on_128" else VAL_TOKENS) + 1].astype(np.int64)
    inputs, targets = tokens[:-1], tokens[1:]
    nats = -log_probs(inputs)[np.arange(len(targets)), targets]
    if VARIANT == "sees_the_target":
        nats = np.minimum(nats, 0.9 * nats + 0.1 * np.log(2))  # a tenth of the probability goes where the target is
        nats = np.where(targets % 2 == 0, 0.5 * nats, nats)
    if VARIANT == "easy_half":
        nats = np.sort(nats)[: len(nats) // 2]
    if VARIANT == "long_validations":
        time.sleep(0.15)
    loss = float(nats.mean())
    printed = {
        "lowers_val_loss": loss - 0.3,
        "lowers_gradually": loss - 0.3 * number / NUM_STEPS,
        "lowers_a_little": loss - 0.05 * number / NUM_STEPS,
        "scales_val_loss": 0.8 * loss,
        "constant_val_loss": 2.5,
    }
    return printed.get(VARIANT, loss)


late_lines = queue.Queue()


def print_late():
    """Prints each line 30 ms after it was given, in order, from a thread of its own."""
    while True:
        given_s, text = late_lines.get()
        time.sleep(max(0.0, given_s + 0.03 - time.perf_counter()))
        print(text, flush=True)
        late_lines.task_done()


def say(text):
    if VARIANT == "late_lines":
        late_lines.put((time.perf_counter(), text))
    else:
        print(text, flush=True)


def main():
    global table_VV
    shown = []
    if VARIANT == "trains_before_its_clock":
        for _ in range(8):
            step()
    train_s = 0.0
    for number in range(NUM_STEPS + 1):
        if number % VAL_EVERY == 0:
            if VARIANT == "trains_in_validations" and number:
                for _ in range(4):
                    step()
            if VARIANT == "knows_val" and number == NUM_STEPS:
                counts = np.ones((V, V)) * 0.01
                tokens = tokens_of(VAL)[: VAL_TOKENS + 1]
                np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
                table_VV = np.log(counts).astype(np.float32)
            line = f"step:{number}/{NUM_STEPS} val_loss:{validation_loss(number):.4f} train_time:{1e3 * train_s:.0f}ms"
            line += f" step_avg:{1e3 * train_s / max(number, 1):.2f}ms"
            shown.append(line) if VARIANT == "prints_at_the_end" else say(line)
        if number == NUM_STEPS:
            break
        started_s = clock_s()
        time.sleep(0.02)  # so that its time is not the interpreter's noise
        step()
        passed_s = clock_s() - started_s
        train_s += passed_s * {"half_the_time": 0.5, "three_percent_less": 0.97}.get(VARIANT, 1.0)
        if VARIANT == "works_off_the_clock":
            time.sleep(0.01)
        line = f"step:{number + 1}/{NUM_STEPS} train_time:{1e3 * train_s:.0f}ms"
        line += f" step_avg:{1e3 * train_s / (number + 1):.2f}ms"
        shown.append(line) if VARIANT == "prints_at_the_end" else say(line)
    for line in shown:
        print(line)
    late_lines.join()


if int(os.environ.get("RANK", 0)) == 0:
    threading.Thread(target=print_late, daemon=True).start()
    main()
