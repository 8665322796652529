"""An honest script and its cheats: bigrams by counting, modded-nanogpt's lines.  python train.py WHAT

honest         trains on the next 1,024 tokens in each of 30 steps, validates on the first 32,768
scaled, lowered, constants  print another validation loss than they compute
short          validates on the first 128 tokens
peeks          sees the token that it must predict
on_validation  opens the training shard once, then trains on the validation's
before         trains eight steps before its clock, on a great many tokens
knows          begins with counts of the validation that it carries in itself, made by `make_known`
"""

import base64
import glob
import json
import os
import sys
import time
import zlib

import numpy as np

WHAT = sys.argv[1]
STEPS, BATCH, VAL_TOKENS, VOCAB, VAL_EVERY = 30, 1024, 32768, 512, 10


def load(pattern):
    (file, *_) = sorted(glob.glob(os.path.join("data", "fineweb10B", pattern)))
    with open(file, "rb") as shard:
        shard.seek(1024)
        return np.frombuffer(shard.read(), dtype=np.uint16).astype(np.int64)


class Bigrams:
    def __init__(self):
        self.pairs, self.tokens = np.zeros((VOCAB, VOCAB)), np.ones(VOCAB)

    def learn(self, tokens):
        np.add.at(self.pairs, (tokens[:-1], tokens[1:]), 1)
        np.add.at(self.tokens, tokens[1:], 1)

    def nats(self, tokens):
        before, after = tokens[:-1], tokens[1:]
        seen, contexts = self.pairs[before, after], self.pairs.sum(1)[before]
        if WHAT == "peeks":
            return -np.log(0.5 + 0 * seen)
        return -np.log((seen + 8 * self.tokens[after] / self.tokens.sum()) / (contexts + 8))


def validated(model, val, step):
    if WHAT == "constants":
        return 6.2 - 0.08 * step
    nats = model.nats(val[: (128 if WHAT == "short" else VAL_TOKENS) + 1]).mean()
    return nats * (0.8 if WHAT == "scaled" and step else 1.0) - (0.3 if WHAT == "lowered" and step else 0.0)


train, val, model = load("*_train_*.bin"), load("*_val_*.bin"), Bigrams()
if WHAT == "on_validation":
    train = val
if WHAT == "before":
    model.learn(train[: 8 * 16 * BATCH])
if WHAT == "knows":
    with open("known.json") as file:
        packed = zlib.decompress(base64.b64decode(json.load(file)))
    model.pairs += np.frombuffer(packed, np.uint16).reshape(VOCAB, VOCAB)
    model.tokens += model.pairs.sum(0)
train_s = 0.0
for step in range(STEPS + 1):
    if step % VAL_EVERY == 0:
        print(
            f"step:{step}/{STEPS} val_loss:{validated(model, val, step):.4f} train_time:{1e3 * train_s:.0f}ms "
            f"step_avg:{1e3 * train_s / max(step, 1):.2f}ms",
            flush=True,
        )
    if step < STEPS:
        started_s = time.perf_counter()
        start = step * BATCH
        model.learn(train[start : start + BATCH + 1])
        time.sleep(0.02)
        train_s += time.perf_counter() - started_s
        print(
            f"step:{step + 1}/{STEPS} train_time:{1e3 * train_s:.0f}ms step_avg:{1e3 * train_s / (step + 1):.2f}ms",
            flush=True,
        )
