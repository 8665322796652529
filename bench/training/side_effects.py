"""Does evaluating leave anything behind?  Asked once, after the last validation, off the clock.

A batch of random tokens is evaluated, then some batches of the last validation again, its last one at the end.  Each
gives the loss that it gave then, and everything that can be reached from the model and the optimizer stays:
parameters, buffers, attributes of modules and of what they hold, class attributes and globals of the model's own file.
What each batch overwrites, such as a loss kept to be looked at, is of the same last batch before and after.  Caches of
shapes are full after the validations of the run; a memory of batches is not, of the random one.
"""

import functools
import hashlib
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

NUM_BATCHES = 1  # evaluated again, beside the last one
CHUNK = 2**18  # numbers of a tensor at once
MAX_VALUES = 50_000  # that are compared
MAX_NAMES = 8  # of what changed, in the record
ROUNDINGS = 8  # by which the loss of a batch may differ from what it was, in units of its type's: kernels of a GPU
PLAIN = (int, float, complex, str, bytes, bool, type(None))
OPAQUE = (type, ModuleType, BuiltinFunctionType)


def check(
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batches: Iterable,
    first_losses: Sequence[torch.Tensor],
    roots: Mapping[str, Any],
    seed: int,
) -> dict:
    """What run.json["referee"]["evaluation"] has of one rank.  trained: parameters and optimizer state that changed.

    loss_of: evaluates a batch, in eval mode; batches: those of the last validation; first_losses: what each gave then;
    roots: the model and the optimizer, by name.
    """
    last = len(first_losses) - 1
    chosen = {*random.Random(seed).sample(range(last), min(NUM_BATCHES, last)), last}
    rng = torch.get_rng_state()
    before, losses, is_first = state_of(roots, seed), {}, True
    for index, batch in enumerate(batches):
        if is_first:
            loss_of(*(_shuffled(numbers_BT, seed) for numbers_BT in batch))
            is_first = False
        if index in chosen:
            losses[index] = loss_of(*batch)
    moves_rng = not torch.equal(torch.get_rng_state(), rng)
    torch.set_rng_state(rng)
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


def unknown(why: str) -> dict:
    """What check() gives where it could not be asked."""
    return {"why": why, "num_batches": 0, "trained": [], "changed": []}


def _shuffled(numbers_BT, seed):
    """Other numbers of the same range, in another order: a batch that no file has."""
    order = torch.randperm(numbers_BT.numel(), generator=torch.Generator().manual_seed(seed % 2**63))
    return numbers_BT.flatten()[order.to(numbers_BT.device)].view_as(numbers_BT)


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names of what differs: of the shortest names, without those that another one begins."""
    names = sorted({name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}, key=len)
    shown: list[str] = []
    for name in names:
        if not any(name.startswith((f"{outer}.", f"{outer}[")) for outer in shown):
            shown.append(name)
    return shown


def state_of(roots: Mapping[str, object], seed: int) -> dict[str, object]:
    """{name: value or checksum} of all that can be reached, without what torch keeps for itself."""
    found: dict[str, object] = {}
    seen: set[int] = set()
    waiting = deque(_with_globals(roots))
    kept = []  # alive, so that no id comes twice
    while waiting and len(found) < MAX_VALUES:
        name, value = waiting.popleft()
        if isinstance(value, PLAIN):
            found[name] = repr(value)
            continue
        if id(value) in seen or isinstance(value, OPAQUE):
            continue
        seen.add(id(value))
        kept.append(value)
        if isinstance(value, torch.Tensor):
            found[name] = _checksum(value, seed)
            if value.__dict__:
                waiting.append((name, dict(value.__dict__)))
        elif isinstance(value, torch.Generator):
            found[name] = _checksum(value.get_state(), seed)
        else:
            parts = list(_parts(name, value))
            found[f"{name} (number of its parts)"] = len(parts)
            waiting.extend(parts)
    return found


def _with_globals(roots):
    """The roots, and of the classes of the model's modules, not torch's: their attributes, globals of their files."""
    yield from roots.items()
    modules = roots["model"].modules()
    classes = {kind for module in modules for kind in type(module).__mro__ if _is_users(kind.__module__)}
    for kind in sorted(classes, key=lambda kind: (kind.__module__, kind.__qualname__)):
        yield f"class {kind.__qualname__}", _variables(vars(kind))
    for name in sorted({kind.__module__ for kind in classes}):
        if name in sys.modules:
            yield f"file {name}", _variables(vars(sys.modules[name]))


def _is_users(module_name):
    return module_name.partition(".")[0] not in ("torch", "builtins", "abc", "typing")


def _variables(namespace):
    """Without functions, classes, modules and names of Python's own."""
    code = (*OPAQUE, FunctionType, property, classmethod, staticmethod)
    return {name: value for name, value in namespace.items() if not (name.startswith("__") or isinstance(value, code))}


def _parts(name, value):
    """(name, part) of what an object holds."""
    if isinstance(value, Mapping):
        for index, (key, part) in enumerate(list(value.items())):
            yield f"{name}.{key}" if isinstance(key, str) else f"{name}[{key if _is_number(key) else index}]", part
            if not isinstance(key, PLAIN + (torch.Tensor,)):
                yield f"{name} (key {index})", key
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield f"{name} (elements)", hashlib.sha256(repr(sorted(map(repr, value))).encode()).hexdigest()
    elif isinstance(value, nn.Module):
        yield from _of_module(name, value)
    elif isinstance(value, MethodType):
        yield f"{name} (object)", value.__self__
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())
        yield from ((f"{name} ({variable})", cell.cell_contents) for variable, cell in cells if _has_contents(cell))
        yield f"{name} (defaults)", value.__defaults__
        yield from ((f"{name}.{key}", part) for key, part in vars(value).items())
    elif type(value).__module__ == "numpy":
        yield f"{name} (bytes)", hashlib.sha256(bytes(memoryview(value).cast("B"))).hexdigest()
    elif _is_users(type(value).__module__) or isinstance(value, torch.optim.Optimizer):
        slots = [slot for kind in type(value).__mro__ for slot in _names(getattr(kind, "__slots__", ()))]
        yield from ((f"{name}.{slot}", getattr(value, slot)) for slot in slots if hasattr(value, slot))
        yield from ((f"{name}.{key}", part) for key, part in list(getattr(value, "__dict__", {}).items()))


def _of_module(name, module):
    for key, part in list(vars(module).items()):
        if key in ("_parameters", "_buffers", "_modules"):
            yield from ((f"{name}.{inner}", value) for inner, value in part.items())
        elif key != "training":  # which is set for each validation
            yield f"{name}.{key}", part


def _is_number(key):
    return isinstance(key, (int, float))


def _names(slots):
    return (slots,) if isinstance(slots, str) else slots


def _has_contents(cell):
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@functools.lru_cache(maxsize=2)
def _factors(seed, device):
    """Odd numbers that nobody knows before the run."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randint(-(2**62), 2**62, (CHUNK,), generator=generator).to(device) * 2 + 1


@torch.no_grad()
def _checksum(tensor, seed):
    """Of its bits, each place times a factor of its own."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return str(tensor.layout)
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    width = next(width for width in (8, 4, 2, 1) if len(data) % width == data.storage_offset() % width == 0)
    data = data.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
    total, factors = 0, _factors(seed, tensor.device)
    for number, chunk in enumerate(data.split(CHUNK)):
        total += (chunk.long() * factors[: len(chunk)]).sum().item() * (2 * number + 1)
    return f"{tuple(tensor.shape)} {tensor.dtype} {total % 2**64:x}"
