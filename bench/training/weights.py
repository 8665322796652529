"""Writes and reads a finished run's weights as a safetensors file, without a package for it, and rebuilds its model.

The format (github.com/huggingface/safetensors, README, "Format"): the header's length, 8 bytes, unsigned,
little-endian; the header in JSON, {name: {"dtype", "shape", "data_offsets": [begin, end]}} with strings in
"__metadata__", padded with spaces; then each tensor's bytes, row-major and little-endian, without gaps.

docs/record.md explains their use.  The model's code is today's, not the record's: if it has changed so that the weights
no longer fit, it is refused.

    python -m bench.training.weights FOLDER B T [COPIES]     gives logits to bench/plans/audit/final_weights.py
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bench.base import atomic
from bench.config import schema, user_code
from bench.data.sources import datasets
from bench.record import run_folder
from bench.training.model import autocast, build_model, choose_kernels, timeline_of

FILE = run_folder.WEIGHTS
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNED_BYTES = 8  # the first tensor begins at a multiple, so that a reader can map the file
MAX_HEADER_BYTES = 100_000_000  # the format's limit
METADATA = "__metadata__"


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes the file atomically.  Tensors that share memory are written separately.

    Raises ValueError for a dtype that the format lacks.
    """
    header: dict[str, dict[str, Any]] = {METADATA: dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name}: {tensor.dtype} has no name in the safetensors format")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNED_BYTES)
    path.parent.mkdir(exist_ok=True)
    with atomic.replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read(path: Path | str) -> dict[str, torch.Tensor]:
    """Returns {name: tensor on the CPU}, each with separate memory.  Raises ValueError for a damaged or other file."""
    return _read(Path(path))[0]


def metadata(path: Path | str) -> dict[str, str]:
    """Returns what was written besides the tensors: run_id, config_id, step, val_loss.  Raises what read() raises."""
    return _read(Path(path), tensors_too=False)[1]


def _read(path: Path, tensors_too: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with open(path, "rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= num_bytes <= min(MAX_HEADER_BYTES, os.path.getsize(path) - 8):
                raise ValueError("its first 8 bytes are not the length of a header")
            header = json.loads(file.read(num_bytes))
            about, end = header.pop(METADATA, {}), 0
            extents = sorted(facts["data_offsets"] for facts in header.values())
            for begin, its_end in [*extents, [os.path.getsize(path) - 8 - num_bytes, None]]:  # and the end of the file
                if begin != end:
                    raise ValueError(f"a tensor ends at byte {end}, and what follows it begins at {begin}")
                end = its_end
            tensors = (
                {name: _tensor(file, 8 + num_bytes, facts) for name, facts in header.items()} if tensors_too else {}
            )
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: is not a safetensors file, or is damaged: {error}") from None
    return tensors, about


def _tensor(file: BinaryIO, start: int, facts: dict[str, Any]) -> torch.Tensor:
    dtype, shape, (begin, end) = DTYPES[facts["dtype"]], facts["shape"], facts["data_offsets"]
    num_bytes = math.prod(shape) * dtype.itemsize
    file.seek(start + begin)
    data = bytearray(file.read(end - begin))
    if len(data) != num_bytes:
        raise ValueError(f"{shape} of {facts['dtype']} is not the {end - begin} bytes from {begin} to {end}")
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


def model_of(folder: Path | str, device: torch.device | str = "cpu") -> torch.nn.Module:
    """Returns the model of a run's folder on the device, in eval mode, with the window of its last validation.

    Raises ValueError if there are no weights, or if they do not fit the model that config.yaml describes.
    """
    config, path = schema.read(folder), Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{folder}: it has no {FILE}: run again with checkpoint.save=true")
    model = build_model(config, torch.device(device), datasets.chosen(config.data).eos_token)
    try:
        model.load_state_dict(read(path))
    except RuntimeError as error:
        raise ValueError(f"{path}: does not fit the model of config.yaml: {error}") from None
    window_tokens = config.goal.val_window_tokens
    if window_tokens is None:
        window_tokens = timeline_of(config, model).window_after(int(metadata(path)["step"]))
    if window_tokens is not None:
        model.set_window(window_tokens)
    return model.eval()


def answer(folder: str, num_rows: str, seq_len: str, copies: str | None = None) -> None:
    """Answers each batch of tokens on standard input, [B, T] int64, with its logits, [B, T, V] float32, as bytes.

    Computes as the run's validation does, and knows nothing but these tokens and the weights: no targets, no data.
    copies: the folder of the user's own code, what that prints goes to standard error.
    """
    logits_out, shape_BT = os.fdopen(os.dup(1), "wb"), (int(num_rows), int(seq_len))
    os.dup2(2, 1)
    if copies is not None:
        user_code.use_copies(copies)
    config = schema.read(folder)
    hardware, device = config.hardware, torch.device(config.hardware.device)
    torch.set_num_threads(hardware.num_threads or 1)
    choose_kernels(hardware)
    model: Any = model_of(folder, device)
    with torch.no_grad(), autocast(config, device.type):
        while data := sys.stdin.buffer.read(8 * math.prod(shape_BT)):
            tokens_BT = torch.frombuffer(bytearray(data), dtype=torch.int64).view(shape_BT)
            logits_out.write(model.logits(tokens_BT.to(device)).float().cpu().contiguous().numpy().data)
    logits_out.close()


if __name__ == "__main__":
    answer(*sys.argv[1:])
