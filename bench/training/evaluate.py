"""Mean nats per token over exactly val_tokens, the same tokens at every world size.

Legend: B sequences, T tokens.
"""

import contextlib

import torch

from bench.config.schema import Config
from bench.config.stages import val_seq_len
from bench.data.loader import ValRows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def autocast(config: Config, device_type: str) -> contextlib.AbstractContextManager:
    """What a forward pass of the run is in, as hardware.dtype says."""
    dtype = DTYPES[config.hardware.dtype]
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device_type, dtype=dtype)


def val_rows(config: Config, shards, rank: int, world_size: int, device: torch.device) -> ValRows:
    """Those of a validation of the run, of this rank."""
    seq_len, rank_tokens = val_seq_len(config), config.hardware.micro_batch_seqs * config.data.seq_len
    shape = (seq_len, max(1, rank_tokens // seq_len))
    return ValRows(shards, config.goal.val_tokens, *shape, rank, world_size, device)


def batches(config: Config, shards, rank: int, world_size: int, device: torch.device):
    """The same as an iterator of (tokens_BT, targets_BT)."""
    rows = val_rows(config, shards, rank, world_size, device)
    return rows.at(rows.places)


@torch.no_grad()
def evaluate(model, batches, autocast, all_sum, device, losses=None):
    """batches yields this rank's (tokens_BT, targets_BT), equal shapes -> float, the same on every rank.

    losses: a list that receives the loss of each batch, still on the device.
    Sums in float64, so that dividing the batches among more ranks changes only the last digits of float32 losses.
    """
    was_training = model.training
    model.eval()
    nats_and_tokens = torch.zeros(2, dtype=torch.float64, device=device)
    for tokens_BT, targets_BT in batches:
        with autocast():
            loss = model(tokens_BT, targets_BT)
        if losses is not None:
            losses.append(loss.detach().clone())
        nats_and_tokens[0] += loss.double() * targets_BT.numel()
        nats_and_tokens[1] += targets_BT.numel()
    model.train(was_training)
    nats, num_tokens = all_sum(nats_and_tokens).tolist()
    return nats / num_tokens
