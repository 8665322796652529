"""What is trained: architectures, optimizers and learning rate schedules, each found by the name of its file.

  models/NAME.py             MODEL(vocab_size, seq_len, num_layers, num_heads, width)   model=NAME
  models/optimizers/NAME.py  Config: its settings and build()                          optim=NAME
  models/schedules/NAME.py   Config: its settings and lr_frac()                        optim/schedule=NAME

A new one is such a file and a yaml of the same name in conf/, never a flag in another file.  Settings are read without
torch: an optimizer imports torch inside build().
"""

import importlib


def load(arch: str) -> type:
    """The model class of models/ARCH.py, a models.base.LanguageModel."""
    return importlib.import_module(f"models.{arch}").MODEL
