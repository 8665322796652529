"""A script of nanoGPT's habits, small: exec of a configurator, memory maps of raw tokens, DDP if torchrun started it.

python train.py --max_iters=10 --seed=3
"""

import os
import time

import numpy as np
import torch
from torch.nn import functional as F

out_dir, dataset, seed = "out", "toy", 1337
eval_interval, eval_iters, log_interval, max_iters = 20, 2, 1, 40
batch_size, block_size, width, learning_rate = 8, 64, 32, 1.0
exec(open("configurator.py").read())  # noqa: SIM115

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    torch.distributed.init_process_group(backend="gloo")
rank = int(os.environ.get("RANK", 0))
if rank == 0:
    os.makedirs(out_dir, exist_ok=True)
print(f"tokens per iteration will be: {batch_size * block_size * int(os.environ.get('WORLD_SIZE', 1)):,}")
torch.manual_seed(seed + rank)
data_dir = os.path.join("data", dataset)


def get_batch(split):
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    rows = torch.stack([torch.from_numpy(data[i : i + block_size + 1].astype(np.int64)) for i in ix])
    return rows[:, :-1], rows[:, 1:]


model = torch.nn.Sequential(torch.nn.Embedding(512, width), torch.nn.Linear(width, 512))
model = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate / 100)


def loss_of(split):
    x, y = get_batch(split)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def estimate_loss():
    return {split: sum(loss_of(split).item() for _ in range(eval_iters)) / eval_iters for split in ("train", "val")}


t0, iter_num = time.time(), 0
while True:
    if iter_num % eval_interval == 0 and rank == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
    loss = loss_of("train")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if iter_num % log_interval == 0 and rank == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {dt * 1000:.2f}ms, mfu 1.00%")
    iter_num += 1
    if iter_num > max_iters:
        break
if rank == 0:
    torch.save(model.state_dict(), os.path.join(out_dir, "ckpt.pt"))
if ddp:
    torch.distributed.destroy_process_group()
