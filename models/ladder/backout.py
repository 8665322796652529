"""Records 34 to 45, September to November 2025: what is mixed into the residual stream between the layers.

B batch, T tokens, D width, V vocabulary
"""

import torch
import torch.nn.functional as F
from torch import nn

from models.ladder.short_sequences import Linear
from models.ladder.yarn import GATE_INPUTS, R33


class R34(R33):
    """Record 34, 2025-09-18: 2.565 -> 2.547 minutes.  Smear: a part of the previous token's embedding is added.

    Its factor is the sigmoid of a gate on 12 numbers of the token's embedding, times a learned scalar, at first 0.
    """

    begins = {"smear_weight": 0.0}

    def __init__(self, **options):
        super().__init__(**options)
        self.smear_gate = Linear(GATE_INPUTS, 1).to(self.dtype)
        self.smear_weight = nn.Parameter(torch.tensor(0.0))

    def looked_up(self, tokens_BT):
        """Returns each token's row of the embedding table, [B, T, D]."""
        return self.embedding(tokens_BT)

    def embed(self, tokens_BT):
        x_BTD = self.looked_up(tokens_BT)
        gate_BT1 = self.smear_weight * torch.sigmoid(self.smear_gate(x_BTD[:, 1:, :GATE_INPUTS]))
        return self.norm(torch.cat((x_BTD[:, :1], x_BTD[:, 1:] + gate_BT1 * x_BTD[:, :-1]), dim=1))


class R35(R34):
    """Record 35, 2025-09-21: 2.547 -> 2.527 minutes.  No first layer; 40 more steps at the last learning rate.

    The first layer keeps its number but is skipped, and the last layer has no skip connection.  In the last validation
    every long window is 20 blocks.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[0].attention = self.blocks[0].stream_mix = None
        self.skip_weights.data = self.skip_weights.data[: len(self.blocks) // 2 - 1]

    def reaches_far(self, index: int) -> bool:
        return True

    def entered(self, index: int, x_BTD, outputs):
        """Returns the stream that enters a block; outputs are those of the blocks before it, None for the first."""
        half, last = len(self.blocks) // 2, len(self.blocks) - 1
        if not half <= index < last:
            return x_BTD
        return x_BTD + self.skip_factor(index - half) * outputs[last - index]

    def left(self, outputs):
        """Returns the stream after the last block."""
        return outputs[-1]

    def stack(self, x_BTD, values, mixes):
        """Applies all blocks but the first, and the last norm."""
        embedded_BTD, outputs = x_BTD, [None]
        for index, block in list(enumerate(self.blocks))[1:]:
            x_BTD = self.entered(index, x_BTD, outputs)
            x_BTD = block(x_BTD, self.rotary, values[index], embedded_BTD, mixes[index])
            outputs.append(x_BTD)
        return self.norm(self.left(outputs))


class R37(R35):
    """Record 37, 2025-09-27: 2.495 (record 36, Muon's work divided differently) -> 2.483 minutes.  Bfloat16 loss.

    In training, logits and each token's cross entropy stay in bfloat16; only the mean is float32.
    """

    def to_logits(self, x_BTD):
        logits_BTV = self.capped(self.uncapped(x_BTD))
        return logits_BTV if self.training else logits_BTV.float()

    def loss(self, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Returns mean nats per token, float32."""
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none").float().mean()


class R40(R37):
    """Record 40, 2025-10-04: 2.447 -> 2.358 minutes.  Backout: the ninth layer's output is subtracted before the head.

    It is multiplied by a learned scalar that begins at 0.5: the head need not see what only the middle layers needed.
    """

    begins = {"backout_weight": 0.5}

    def __init__(self, **options):
        super().__init__(**options)
        self.backout_weight = nn.Parameter(torch.tensor(0.5))

    def left(self, outputs):
        return outputs[-1] - self.backout_weight * outputs[len(outputs) * 8 // 12]


class R45(R40):
    """Record 45, 2025-11-18: 2.269 (record 44, communication) -> 2.248 minutes.  One skip instead of five, 4 to 7.

    The eighth layer, which has no attention, receives the fifth's output.  The factor of the stream begins at 1.1.
    """

    begins = {"stream_mix": [1.1, 0.0]}

    def __init__(self, **options):
        super().__init__(**options)
        num_layers = len(self.blocks)
        if num_layers < 4:
            raise ValueError(f"model.num_layers={num_layers}: the skip begins after the first layer: use 4 or more")
        self.skip_weights.data = self.skip_weights.data[:1]

    def entered(self, index: int, x_BTD, outputs):
        num_layers = len(self.blocks)
        if index != num_layers * 7 // 12:
            return x_BTD
        return x_BTD + self.skip_factor(0) * outputs[num_layers * 4 // 12]
