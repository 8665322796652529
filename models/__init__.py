"""Architectures, optimizers and learning rate schedules, each found by the name of its file.

  models/NAME.py             MODEL(vocab_size, seq_len, num_layers, num_heads, width)   model=NAME
  models/ladder/             the models of the speedrun's records, found by its table   experiment=r09
  models/optimizers/NAME.py  Config: its settings and build()                           optim=NAME
  models/updates/NAME.py     Config: settings and build() of a group of optim=groups    optim.groups.GROUP.name=NAME
  models/stages.py           what changes in the course of a run                        stages=[...]
  models/schedules/NAME.py   Config: its settings and lr_frac()                         optim/schedule=NAME

Add one as such a file and a yaml of the same name in conf/ (a rung of the ladder in conf/experiment/), never as a flag
in another file.  Settings are read without torch: an optimizer imports torch inside build().
"""

import importlib
import importlib.util


def find(arch: str) -> str | None:
    """Returns the name of a model's module, without importing it; None if there is none."""
    modules = (f"models.{arch}", f"models.ladder.{_in_ladder(arch)[0]}")
    return next((module for module in modules if importlib.util.find_spec(module)), None)


def load(arch: str) -> type:
    """Returns the model class of this name, a models.base.LanguageModel."""
    module = find(arch) or f"models.{arch}"
    name = _in_ladder(arch)[1] if module.startswith("models.ladder.") else "MODEL"
    return getattr(importlib.import_module(module), name)


def _in_ladder(arch: str) -> tuple[str, str]:
    """Returns (file, class) of a rung in models/ladder/; for another name, (name, "MODEL")."""
    from models import ladder

    return ladder.CLASSES.get(arch, (arch, "MODEL"))
