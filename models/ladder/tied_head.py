"""Records 48 to 53, December 2025: scalars on weights, offset keys, embedding and head tied and parted again.

B batch, T tokens, D width, H heads, K head width
"""

import torch
import torch.nn.functional as F
from torch import nn

from models.base import constant_, normal_
from models.ladder.backout import R45
from models.ladder.fp8_head import FP8_LARGEST
from models.ladder.long_sequences import R14Block
from models.ladder.short_sequences import uniform_
from models.ladder.yarn import R28Attention


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
    """Record 48, 2025-12-11: 2.193 (record 47) -> 2.170 minutes.  Learnt scalars on weights, NorMuon along its rows.

    A layer's scalar multiplies the weights of q, k and v where it multiplied the values (record 47: the same but for
    rounding, since q and k are normed), and a second one the projection's, where it multiplied the value embeddings; it
    begins at 1.  The record also stores its matrices the other way round.  Here they lie as they did; what followed
    from it is conf/experiment/r48.yaml's: updates of q, k, v, projection and gates are evened out over rows, attention
    has twice the learning rate and the MLP's second matrix four times.
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
        turned, _, turned_too, _ = k_BHTK.chunk(4, dim=-1)  # the turned ones of each half
        _, still, _, still_too = before_BHTK.chunk(4, dim=-1)
        return torch.cat((turned, still, turned_too, still_too), dim=-1)


class R49Block(R14Block):
    is_first = False

    def mixed(self, x_BTD, embedded_BTD):
        if self.is_first and self.stream_mix is not None:
            # its stream is the embedding: one rounding in bfloat16 instead of two
            return (self.stream_mix[0] + self.stream_mix[1]) * x_BTD
        return super().mixed(x_BTD, embedded_BTD)


class R49(R48):
    """Record 49, 2025-12-14: 2.170 -> 2.146 minutes.  Keys with a part of the token before; value embeddings at zero.

    In the layers with a long window the half of a key that has no position is that of the token before, whatever
    document it is of: what followed a token can be found by one layer.  The record counts eleven layers from here on;
    the first of our twelve has been empty since record 35.
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

    It is drawn as a head, small, and learns as one; the scales of its 8-bit product are the record's of its numbers
    then.
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
    """Record 52, 2025-12-21: 2.075 -> 2.037 minutes.  Learnt scalars move evenly, and rest where the batch changes.

    Their Adam looks back farther, except for that of what a block takes of the embedding, which is a tensor of its own
    here; for 40 steps after each change they stay as they are and their gradients are dropped.  The smear gate is
    Adam's now, at a hundredth of its learning rate (conf/experiment/r52.yaml).
    """

    begins = {"stream_mix.0": 1.1, "stream_mix.1": 0.0}

    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks:
            if block.stream_mix is not None:
                del block.stream_mix  # torch lets no list take the place of a tensor
                block.stream_mix = nn.ParameterList([torch.tensor(1.1), torch.tensor(0.0)])


class R53(R52):
    """Record 53, 2025-12-22: 2.037 -> 1.988 minutes.  Several tokens ahead; embedding and head part at two thirds.

    The loss is of the next three tokens in the first third of the run, of two in the second, and what the farthest
    weighs falls to nothing on the way (stages[].ahead_weights of conf/experiment/r53.yaml).  At two thirds the
    embedding becomes a matrix of its own, which begins as the head's, with its state of Adam (stages[].untied).  The
    first q, k and v are twice as large.
    """

    late_parameters = ("embedding.weight",)

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = nn.Embedding(*self.head.weight.shape, dtype=self.head.weight.dtype)
        self.untied = False

    @torch.no_grad()
    def set_untied(self, untied: bool) -> tuple[nn.Parameter, nn.Parameter]:
        """Whether tokens are looked up in the embedding, which begins as the head is, or in the head."""
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
