"""A finished run's model with its final weights, where the run was made with checkpoint.save=true.  docs/WEIGHTS.md

The code is today's, not the record's: a model whose code changed since is refused where its weights do not fit.
"""

from pathlib import Path

import torch

from bench.config import schema
from bench.config.schema import Config
from bench.data.sources import datasets
from bench.record import run_folder
from bench.training import evaluate, staging, weights
from bench.training.build_model import build_model


def model_of(folder: Path | str, device: torch.device | str = "cpu") -> torch.nn.Module:
    """A run's folder -> its model on that device, in eval mode, in the window of its last validation.

    ValueError: there are no weights, or they do not fit the model that config.yaml gives.
    """
    config, path = schema.read(folder), Path(folder) / weights.FILE
    if not path.is_file():
        raise ValueError(f"{folder}: it has no {weights.FILE}: run again with checkpoint.save=true")
    model = build_model(config, torch.device(device), datasets.chosen(config.data).eos_token)
    try:
        model.load_state_dict(weights.read(path))
    except RuntimeError as error:
        raise ValueError(f"{path}: does not fit the model of config.yaml: {error}") from None
    window_tokens = config.goal.val_window_tokens or _last_window(config, model, path)
    if window_tokens is not None:
        model.set_window(window_tokens)
    return model.eval()


def _last_window(config: Config, model, path):
    return staging.timeline_of(config, model).window_after(int(weights.metadata(path)["step"]))


def val_loss_of(folder: Path | str, device: torch.device | str = "cpu") -> float:
    """Mean nats per token of the run's own validation, by its final weights.

    With the threads and the machine of the run it is the recorded val_loss bit for bit; else rounding differs.
    ValueError as model_of(), and where the validation data are not here.
    """
    config, device = schema.read(folder), torch.device(device)
    shards = datasets.recorded(run_folder.read(folder)["data"])["val"]
    batches = evaluate.batches(config, shards, 0, 1, device)

    def autocast():
        return evaluate.autocast(config, device.type)

    return evaluate.evaluate(model_of(folder, device), batches, autocast, lambda sums: sums, device)
