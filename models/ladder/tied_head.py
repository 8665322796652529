"""Records 34 to 53, September to December 2025: what is mixed into the residual stream between the layers; scalars on
weights, offset keys, embedding and head tied and untied again.

B batch, T tokens, D width, H heads, K head width, V vocabulary
"""

import torch
import torch.nn.functional as F
from torch import nn

from models.base import constant_, normal_
from models.ladder.fp8_head import FP8_LARGEST
from models.ladder.long_sequences import R14Block
from models.ladder.short_sequences import Linear, uniform_
from models.ladder.yarn import GATE_INPUTS, R33, R28Attention


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


class R48Attention(R28Attention):
    def merged_weights(self, x_BTD):
        weights = super().merged_weights(x_BTD)
        return weights if self.value_mix is None else self.value_mix[0] * weights

    def with_embedded(self, v_BHTK, embedded_BHTK):
        return v_BHTK if embedded_BHTK is None else v_BHTK + embedded_BHTK

    def projected(self, mixed_BTD):
        weight = self.proj.weight.type_as(mixed_BTD)
        return F.linear(mixed_BTD, weight if self.value_mix is None else self.value_mix[1] * weight)


class R48(R45):
    """Record 48, 2025-12-11: 2.193 (record 47) -> 2.170 minutes.  Learned scalars on weights, NorMuon along rows.

    A layer's scalar multiplies the weights of q, k and v instead of the values (record 47; the same up to rounding, as
    q and k are normed); a second one, which begins at 1, multiplies the projection's weights instead of the value
    embeddings.  The record also transposes its matrices.  Here they stay as they were, and conf/experiment/r48.yaml has
    the consequences: updates of q, k, v, projection and gates are normalised by rows, and the learning rate is twice as
    large for attention and four times for the MLP's second matrix.
    """

    Attention = R48Attention
    begins = {"value_mix": [0.5, 1.0]}


class R49Attention(R48Attention):
    offsets_keys = False

    def positioned_keys(self, k_BHTK, rotary):
        k_BHTK = super().positioned_keys(k_BHTK, rotary)
        if not self.offsets_keys:
            return k_BHTK
        before_BHTK = torch.cat((k_BHTK[:, :, :1], k_BHTK[:, :, :-1]), dim=2)
        turned, _, turned_too, _ = k_BHTK.chunk(4, dim=-1)  # the rotated numbers of each half
        _, still, _, still_too = before_BHTK.chunk(4, dim=-1)
        return torch.cat((turned, still, turned_too, still_too), dim=-1)


class R49Block(R14Block):
    is_first = False

    def mixed(self, x_BTD, embedded_BTD):
        if self.is_first and self.stream_mix is not None:
            # the stream is the embedding itself: one rounding in bfloat16 instead of two
            return (self.stream_mix[0] + self.stream_mix[1]) * x_BTD
        return super().mixed(x_BTD, embedded_BTD)


class R49(R48):
    """Record 49, 2025-12-14: 2.170 -> 2.146 minutes.  Keys with a part of the previous token's; zero value embeddings.

    In the layers with a long window, the half of a key without a position is that of the previous token, whatever its
    document: so a single layer can find what followed a token.  From here on the records count eleven layers; the first
    of our twelve has been empty since record 35.
    model.args: key_offset, and those of record 31.
    """

    Attention, Block = R49Attention, R49Block

    def __init__(self, *, key_offset: bool = True, **options):
        super().__init__(**options)
        self.blocks[1].is_first = True
        for index, block in enumerate(self.blocks):
            if block.attention is not None:
                block.attention.offsets_keys = key_offset and self.has_long_window(index)

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for table in self.value_embeddings or ():
            constant_(table.weight, 0.0)


class R51(R49):
    """Record 51, 2025-12-19: 2.128 -> 2.075 minutes.  Embedding and head are one matrix again.

    It is initialised as a head, with small weights, and has a head's learning rate; its 8-bit scales are the record's.
    """

    WEIGHT_SCALE = FP8_LARGEST / 1.5
    GRAD_SCALE = FP8_LARGEST / 0.75

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding.weight = self.head.weight

    def x_scale(self, width: int) -> float:
        return FP8_LARGEST / 100

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        normal_(self.head.weight, 0.005, generator)


class R52(R51):
    """Record 52, 2025-12-21: 2.075 -> 2.037 minutes.  Smoother learned scalars, frozen after changes of the batch.

    Their Adam averages over more steps, except for a block's factor of the embedding, which is a separate tensor here.
    For 40 steps after each change of batch or window they are frozen and their gradients dropped.  Adam now updates the
    smear gate too, with a hundredth of its learning rate (conf/experiment/r52.yaml).
    """

    begins = {"stream_mix.0": 1.1, "stream_mix.1": 0.0}

    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks:
            if block.stream_mix is not None:
                del block.stream_mix  # torch does not let a list replace a parameter
                block.stream_mix = nn.ParameterList([torch.tensor(1.1), torch.tensor(0.0)])


class R53(R52):
    """Record 53, 2025-12-22: 2.037 -> 1.988 minutes.  Several tokens ahead; embedding and head untied at two thirds.

    The loss is over the next three tokens in the first third of the run and two in the second, and the farthest one's
    weight falls to 0 meanwhile (stages[].ahead_weights of conf/experiment/r53.yaml).  At two thirds the embedding
    becomes a separate matrix, a copy of the head's, as does its state of Adam (stages[].untied).  The initial q, k and
    v are twice as large.
    """

    late_parameters = ("embedding.weight",)

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = nn.Embedding(*self.head.weight.shape, dtype=self.head.weight.dtype)
        self.untied = False

    @torch.no_grad()
    def set_untied(self, untied: bool) -> tuple[nn.Parameter, nn.Parameter]:
        """Makes tokens be looked up in the embedding, which begins as a copy of the head, or in the head."""
        if untied and not self.untied:
            self.embedding.weight.copy_(self.head.weight)
        self.untied = untied
        return self.embedding.weight, self.head.weight

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for block in self.blocks:
            if block.attention is not None:
                for layer in (block.attention.query, block.attention.key, block.attention.value):
                    uniform_(layer.weight, 3**0.5 * layer.in_features**-0.5, generator)

    def looked_up(self, tokens_BT):
        return self.embedding(tokens_BT) if self.untied else F.embedding(tokens_BT, self.head.weight)
