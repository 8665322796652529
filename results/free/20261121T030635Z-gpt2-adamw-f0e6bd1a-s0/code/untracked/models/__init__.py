"""What is raced: architectures, optimizers and learning rate schedules, by the names that conf/ uses.

A model is `MODELS[arch](vocab_size, seq_len, num_layers, num_heads, width)`, an optimizer
`OPTIMIZERS[name](model, optim, rank, world_size, device_type)`, a schedule
`SCHEDULES[name](step, num_steps, warmup_frac, cooldown_frac, final_lr_frac)`.
A new architecture is a new file and a line here, never a flag in another file.
"""

from models.adamw import build_adamw
from models.gpt2 import GPT2
from models.modern import Modern
from models.muon import build_muon
from models.schedules import constant, cosine, trapezoid

MODELS = {"gpt2": GPT2, "modern": Modern}
OPTIMIZERS = {"adamw": build_adamw, "muon": build_muon}
SCHEDULES = {"constant": constant, "cosine": cosine, "trapezoid": trapezoid}
