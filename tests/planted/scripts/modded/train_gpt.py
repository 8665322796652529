"""A script of modded-nanogpt's habits, small: reads its own source, writes logs/ where it stands, torchrun's variables,
DDP, a warm-up, a clock that stops for validations.  python -m torch.distributed.run --nproc_per_node=2 train_gpt.py 20
"""

import os
import sys

with open(sys.argv[0]) as file:
    code = file.read()
with open(os.path.join(os.path.dirname(sys.argv[0]), "helper.py")) as file:
    code += file.read()
import glob
import time
import uuid

import numpy as np
import torch
import torch.distributed as dist
from helper import Bigrams
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
LR = float(os.environ.get("TOY_LR", "0.3"))
VAL_EVERY, BATCH, SEQ, VAL_TOKENS = 10, 8, 128, 4096
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert int(os.environ["LOCAL_RANK"]) == rank
dist.init_process_group("gloo")
dist.barrier()
data_path = os.environ.get("DATA_PATH", ".")


def load(pattern):
    (file, *_) = sorted(glob.glob(os.path.join(data_path, pattern)))
    header = np.fromfile(file, dtype=np.int32, count=256)
    assert header[0] == 20240520 and header[1] == 1
    with open(file, "rb") as shard:
        shard.seek(1024)
        return torch.from_numpy(np.frombuffer(shard.read(), dtype=np.uint16).astype(np.int64))


train, val = load("data/fineweb10B/fineweb_train_*.bin"), load("data/fineweb10B/fineweb_val_*.bin")
logfile = None
if rank == 0:
    os.makedirs("logs", exist_ok=True)
    logfile = f"logs/{uuid.uuid4()}.txt"
    print(logfile)


def print0(text, console=False):
    if rank == 0:
        with open(logfile, "a") as file:
            if console:
                print(text)
            print(text, file=file)


print0(code)
print0("=" * 100)
print0(f"Running PyTorch {torch.__version__}")
model = DistributedDataParallel(Bigrams(512))
optimizer = torch.optim.SGD(model.parameters(), lr=100 * LR)
generator = torch.Generator().manual_seed(rank)


def batch():
    starts = torch.randint(len(train) - SEQ - 1, (BATCH,), generator=generator)
    rows = torch.stack([train[start : start + SEQ + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


for _ in range(2):  # warm up, then as before
    model(*batch()).backward()
model.zero_grad(set_to_none=True)
training_time_ms = 0.0
dist.barrier()
t0 = time.perf_counter()
for step in range(STEPS + 1):
    if step == STEPS or step % VAL_EVERY == 0:
        dist.barrier()
        training_time_ms += 1000 * (time.perf_counter() - t0)
        with torch.no_grad():
            tokens = val[: VAL_TOKENS + 1]
            val_loss = model(tokens[:-1].view(-1, SEQ), tokens[1:].view(-1, SEQ))
        print0(
            f"step:{step}/{STEPS} val_loss:{val_loss:.4f} train_time:{training_time_ms:.0f}ms "
            f"step_avg:{training_time_ms / max(step, 1):.2f}ms",
            console=True,
        )
        dist.barrier()
        t0 = time.perf_counter()
    if step == STEPS:
        break
    loss = model(*batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(0.02)
    approx_ms = training_time_ms + 1000 * (time.perf_counter() - t0)
    print0(
        f"step:{step + 1}/{STEPS} train_time:{approx_ms:.0f}ms step_avg:{approx_ms / (step + 1):.2f}ms", console=True
    )
dist.destroy_process_group()
