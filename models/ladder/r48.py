"""Record 48, 2025-12-11: 2.193 (record 47) -> 2.170 minutes.  Learnt scalars on weights, NorMuon along its rows.

A layer's scalar multiplies the weights of q, k and v where it multiplied the values (record 47: the same but for
rounding, since q and k are normed), and a second one the projection's, where it multiplied the value embeddings; it
begins at 1.  The record also stores its matrices the other way round.  Here they lie as they did; what followed from it
is conf/experiment/r48.yaml's: updates of q, k, v, projection and gates are evened out over rows, attention has twice
the learning rate and the MLP's second matrix four times.
model.args: those of record 31.
"""

import torch
import torch.nn.functional as F

from models.base import constant_
from models.ladder import r28, r30
from models.ladder.r45 import R45


class Attention(r28.Attention):
    def merged_weights(self, x_BTD):
        weights = super().merged_weights(x_BTD)
        return weights if self.value_mix is None else self.value_mix[0] * weights

    def with_embedded(self, v_BHTK, embedded_BHTK):
        return v_BHTK if embedded_BHTK is None else v_BHTK + embedded_BHTK

    def projected(self, mixed_BTD):
        weight = self.proj.weight.type_as(mixed_BTD)
        return F.linear(mixed_BTD, weight if self.value_mix is None else self.value_mix[1] * weight)


class Block(r30.Block):
    Attention = Attention


class R48(R45):
    Block = Block

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith("value_mix"):
                constant_(parameter[1], 1.0)


MODEL = R48
