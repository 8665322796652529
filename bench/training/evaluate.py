"""Mean nats per token over exactly val_tokens, the same tokens at every world size.

Legend: B sequences, T tokens.
"""

import torch


@torch.no_grad()
def evaluate(model, batches, autocast, all_sum, device):
    """batches yields this rank's (tokens_BT, targets_BT), equal shapes -> float, the same on every rank.

    Sums in float64, so that dividing the batches among more ranks changes only the last digits of float32 losses.
    """
    was_training = model.training
    model.eval()
    nats_and_tokens = torch.zeros(2, dtype=torch.float64, device=device)
    for tokens_BT, targets_BT in batches:
        with autocast():
            loss = model(tokens_BT, targets_BT)
        nats_and_tokens[0] += loss.double() * targets_BT.numel()
        nats_and_tokens[1] += targets_BT.numel()
    model.train(was_training)
    nats, num_tokens = all_sum(nats_and_tokens).tolist()
    return nats / num_tokens
