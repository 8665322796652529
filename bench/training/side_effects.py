"""Checks that evaluating has no side effects: once, after the last validation, off the clock.

A batch of random tokens is evaluated, then some batches of the last validation again, ending with its last one.  Each
must give the loss that it gave then, and everything that can be reached from the model and the optimizer must stay the
same: parameters, buffers, attributes of modules and of what they hold, class attributes and globals of the model's
file.  What each batch overwrites, such as a loss kept for inspection, comes from the same last batch before and after.
Caches of shapes are full after the run's validations; a memory of batches does not yet have the random one.
"""

import contextlib
import functools
import hashlib
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from bench.training import causality

NUM_BATCHES = 1  # batches evaluated again, besides the last one
CHUNK = 2**18  # numbers of a tensor that are summed at once
MAX_VALUES = 50_000  # values that are compared
MAX_NAMES = 8  # names of changed values in the record
ROUNDINGS = 8  # epsilons of its dtype by which a batch's loss may differ from before, because of GPU kernels
PLAIN = (int, float, complex, str, bytes, bool, type(None))
OPAQUE = (type, ModuleType, BuiltinFunctionType)


def check(
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    first_losses: Sequence[torch.Tensor],
    roots: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Returns a rank's run.json["referee"]["evaluation"]; "trained" names changed parameters and optimizer state.

    loss_of evaluates a batch, in eval mode.  batches are those of the last validation, first_losses their losses then.
    roots are the model and the optimizer, by name.
    """
    last = len(first_losses) - 1
    chosen = {*random.Random(seed).sample(range(last), min(NUM_BATCHES, last)), last}
    device = first_losses[0].device
    rng, before, losses = _random_states(device), state_of(roots, seed), {}
    with causality.forked_rng(device):
        for index, batch in enumerate(batches):
            if index == 0:  # the first batch's numbers in random order: a batch that is in no file
                order = torch.randperm(batch[0].numel(), generator=torch.Generator().manual_seed(seed % 2**63))
                order = order.to(batch[0].device)
                loss_of(*(numbers_BT.flatten()[order].view_as(numbers_BT) for numbers_BT in batch))
            if index in chosen:
                losses[index] = loss_of(*batch).double()
        moves_rng = not all(map(torch.equal, _random_states(device), rng))
    changed = changes(before, state_of(roots, seed))
    parameters = {f"model.{name}" for name, _ in roots["model"].named_parameters(remove_duplicate=False)}
    trained = [name for name in changed if name in parameters or name.startswith("optimizer")]
    pairs = [(first_losses[index].double().item(), loss.item()) for index, loss in losses.items()]
    worst = max(pairs, key=lambda pair: abs(pair[1] - pair[0]) if all(map(math.isfinite, pair)) else math.inf)
    eps = torch.finfo(first_losses[0].dtype).eps
    return {
        "why": None,
        "num_batches": len(pairs),
        "first_nats": worst[0],
        "repeated_nats": worst[1],
        "rounding_nats": ROUNDINGS * eps * abs(worst[0]),
        "trained": trained[:MAX_NAMES],
        "changed": ["torch's random state"] * moves_rng + [name for name in changed if name not in trained][:MAX_NAMES],
    }


def worst(by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the check() of the rank that failed to check, or whose loss moved most, with the changes of all ranks."""

    def moved_nats(rank: dict[str, Any]) -> float:
        """Returns how far the loss moved; infinity if that is unknown or not a number."""
        moved = math.inf if rank["why"] else abs(rank["repeated_nats"] - rank["first_nats"])
        return math.inf if math.isnan(moved) else moved

    names = {kind: sorted({name for rank in by_rank for name in rank[kind]}) for kind in ("trained", "changed")}
    return max(by_rank, key=moved_nats) | names


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """Returns torch's random states on the CPU and on a GPU, from which dropout there draws."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def unknown(why: str) -> dict[str, Any]:
    """Returns the result of a check() that failed to run."""
    return {"why": why, "num_batches": 0, "trained": [], "changed": []}


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Returns the names of values that differ, shortest first, without those inside a value that is named already."""
    names = sorted({name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}, key=len)
    shown: list[str] = []
    for name in names:
        if not any(name.startswith((f"{outer}.", f"{outer}[")) for outer in shown):
            shown.append(name)
    return shown


def state_of(roots: Mapping[str, object], seed: int) -> dict[str, object]:
    """Returns {name: value or checksum} of everything that can be reached, except torch's internals."""
    values: dict[str, object] = {}
    seen: set[int] = set()
    waiting = deque(_with_globals(roots))
    kept = []  # keeps objects alive, so that no id is reused
    while waiting and len(values) < MAX_VALUES:
        name, value = waiting.popleft()
        if isinstance(value, PLAIN):
            values[name] = repr(value)
            continue
        if id(value) in seen or isinstance(value, OPAQUE):
            continue
        seen.add(id(value))
        kept.append(value)
        if isinstance(value, torch.Tensor):
            values[name] = _checksum(value, seed)
            if value.__dict__:
                waiting.append((name, dict(value.__dict__)))
        elif isinstance(value, torch.Generator):
            values[name] = _checksum(value.get_state(), seed)
        else:
            parts = list(_parts(name, value))
            values[f"{name} (number of its parts)"] = len(parts)
            waiting.extend(parts)
    return values


def _with_globals(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the roots, and the class attributes and file globals of the model's modules that are not torch's."""
    yield from roots.items()
    modules = roots["model"].modules()
    classes = {kind for module in modules for kind in type(module).__mro__ if _is_users(kind.__module__)}
    for kind in sorted(classes, key=lambda kind: (kind.__module__, kind.__qualname__)):
        yield f"class {kind.__qualname__}", _variables(vars(kind))
    for name in sorted({kind.__module__ for kind in classes}):
        if name in sys.modules:
            yield f"file {name}", _variables(vars(sys.modules[name]))


def _is_users(module_name: str) -> bool:
    return module_name.partition(".")[0] not in ("torch", "builtins", "abc", "typing")


def _variables(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the namespace without functions, classes, modules and Python's special names."""
    code = (*OPAQUE, FunctionType, property, classmethod, staticmethod)
    return {name: value for name, value in namespace.items() if not (name.startswith("__") or isinstance(value, code))}


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, part) for everything that an object holds."""
    if isinstance(value, Mapping):
        for index, (key, part) in enumerate(list(value.items())):
            place = key if isinstance(key, (int, float)) else index
            yield f"{name}.{key}" if isinstance(key, str) else f"{name}[{place}]", part
            if not isinstance(key, PLAIN + (torch.Tensor,)):
                yield f"{name} (key {index})", key
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield f"{name} (elements)", hashlib.sha256(repr(sorted(map(repr, value))).encode()).hexdigest()
    elif isinstance(value, nn.Module):
        for key, part in list(vars(value).items()):
            if key in ("_parameters", "_buffers", "_modules"):
                yield from ((f"{name}.{inner}", held) for inner, held in part.items())
            elif key != "training":  # set for each validation
                yield f"{name}.{key}", part
    elif isinstance(value, MethodType):
        yield f"{name} (object)", value.__self__
    elif isinstance(value, FunctionType):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            with contextlib.suppress(ValueError):  # an empty cell
                yield f"{name} ({variable})", cell.cell_contents
        yield f"{name} (defaults)", value.__defaults__
        yield from ((f"{name}.{key}", part) for key, part in vars(value).items())
    elif type(value).__module__ == "numpy":
        yield f"{name} (bytes)", hashlib.sha256(bytes(memoryview(value).cast("B"))).hexdigest()
    elif _is_users(type(value).__module__) or isinstance(value, torch.optim.Optimizer):
        declared = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
        slots = [slot for names in declared for slot in ((names,) if isinstance(names, str) else names)]
        yield from ((f"{name}.{slot}", getattr(value, slot)) for slot in slots if hasattr(value, slot))
        yield from ((f"{name}.{key}", part) for key, part in list(getattr(value, "__dict__", {}).items()))


@functools.lru_cache(maxsize=2)
def _factors(seed: int, device: torch.device) -> torch.Tensor:
    """Returns odd numbers that nobody knows before the run."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randint(-(2**62), 2**62, (CHUNK,), generator=generator).to(device) * 2 + 1


@torch.no_grad()
def _checksum(tensor: torch.Tensor, seed: int) -> str:
    """Returns a checksum of the tensor's bits, in which each position has a different factor."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return str(tensor.layout)
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    width = next(width for width in (8, 4, 2, 1) if len(data) % width == data.storage_offset() % width == 0)
    data = data.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
    total, factors = 0, _factors(seed, tensor.device)
    for number, chunk in enumerate(data.split(CHUNK)):
        total += (chunk.long() * factors[: len(chunk)]).sum().item() * (2 * number + 1)
    return f"{tuple(tensor.shape)} {tensor.dtype} {total % 2**64:x}"
