"""Buckets: the gradients of many tensors in one flat buffer, which a single collective reduces.

A buffer has a part for each rank, all of the same length.  There are three kinds of buckets:
  Reduced   is all-reduced: every rank has all gradients, and updates all tensors
  Sliced    is reduce-scattered for elementwise updates: a rank's part may begin and end within a tensor, so that all
            parts are full.  The weights are in such a buffer too: each rank updates its part, and then the parts are
            gathered in place
  Owned     is reduce-scattered for Muon: a part holds whole tensors, which only that rank updates
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from bench.training import distributed
from bench.training.distributed import Ranks

ALIGN = 64  # in elements, where tensors begin: 128 bytes in bfloat16; inductor's kernels need 16 bytes


@dataclass(frozen=True)
class Slot:
    """The place of a tensor's elements in a buffer."""

    parameter: torch.nn.Parameter
    start: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a view of the tensor's elements in flat, with its shape and strides: fused AdamW needs equal ones."""
        strides = torch.empty_like(self.parameter, device="meta").stride()  # the tensor itself may have gaps
        return flat[self.start : self.start + self.parameter.numel()].as_strided(self.parameter.shape, strides)


@dataclass(frozen=True)
class Layout:
    """The slots of a buffer with part_len elements for each rank."""

    slots: tuple[Slot, ...]
    part_len: int

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [slot.parameter for slot in self.slots]


def packed(parameters: list[torch.nn.Parameter], world_size: int, most_bytes: int) -> list[Layout]:
    """Packs tensors into buffers of about most_bytes, the last ones first, as the backward pass finishes them."""
    layouts: list[Layout] = []
    slots: list[Slot] = []
    end = 0
    for parameter, following in itertools.pairwise([*reversed(parameters), None]):
        slots.append(Slot(parameter, end))
        end += _aligned(parameter.numel())
        is_full = end * parameter.element_size() >= most_bytes
        if following is None or following.dtype != parameter.dtype or is_full:
            layouts.append(Layout(tuple(slots), _aligned(-(-end // world_size))))
            slots, end = [], 0
    return layouts


def owned(parameters: list[torch.nn.Parameter], indices_by_rank: list[list[int]], most_bytes: int) -> list[Layout]:
    """Packs tensors of the same size side by side, one for each rank, into buffers of about most_bytes in all."""
    by_kind: dict[tuple[torch.dtype, int], list[list[int]]] = {}
    for rank, indices in enumerate(indices_by_rank):
        for index in indices:
            kind = (parameters[index].dtype, parameters[index].numel())
            by_kind.setdefault(kind, [[] for _ in indices_by_rank])[rank].append(index)
    rows = [(*kind, row) for kind, columns in by_kind.items() for row in itertools.zip_longest(*columns)]
    rows.sort(key=lambda row: min(index for index in row[2] if index is not None), reverse=True)
    buffers: list[list[tuple[torch.dtype, int, tuple[int | None, ...]]]] = []  # a row has an index per rank, or None
    part_len = 0
    for dtype, num_elements, row in rows:
        is_full = part_len * dtype.itemsize * len(indices_by_rank) >= most_bytes
        if not buffers or dtype != buffers[-1][0][0] or is_full:
            buffers.append([])
            part_len = 0
        buffers[-1].append((dtype, num_elements, row))
        part_len += _aligned(num_elements)
    layouts = []
    for buffer in buffers:
        part_len, offset, slots = sum(_aligned(num_elements) for _, num_elements, _ in buffer), 0, []
        for _, num_elements, row in buffer:
            places = [(index, rank * part_len + offset) for rank, index in enumerate(row) if index is not None]
            slots += [Slot(parameters[index], start) for index, start in places]
            offset += _aligned(num_elements)
        layouts.append(Layout(tuple(slots), part_len))
    return layouts


def _aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGN) * ALIGN


class Reduced:
    """An all-reduced bucket: call launch() once all gradients are complete; after wait() tensors have the mean ones."""

    def __init__(self, layout: Layout, ranks: Ranks):
        self.layout, self.ranks, self.num_missing = layout, ranks, len(layout.slots)
        first = layout.slots[0].parameter
        self.grads = torch.zeros(ranks.world_size * layout.part_len, dtype=first.dtype, device=first.device)
        self._places = [slot.of(self.grads) for slot in layout.slots]
        self._work: Any = None  # torch.distributed's handle of the running collective

    @property
    def own(self) -> slice:
        """The slice of the buffer that is this rank's part."""
        return slice(self.ranks.rank * self.layout.part_len, (self.ranks.rank + 1) * self.layout.part_len)

    @torch.no_grad()
    def launch(self) -> None:
        """Moves the gradients from the tensors into the buffer, and starts to reduce them."""
        parameters = self.layout.parameters
        torch._foreach_copy_(self._places, [parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
        self._work = self._begin()

    def wait(self) -> None:
        """Makes the device, not the host, wait for the reduction.  A second call in a step does nothing."""
        if self._work is None:
            return
        self._work.wait()
        self._work, self.num_missing = None, len(self.layout.slots)
        self._hand_over()

    def own_grads(self) -> list[torch.Tensor]:
        """Returns, after wait(), the gradients that only this rank has: over all ranks, each appears once."""
        return []

    def publish(self) -> None:
        """Starts to send this rank's updated weights to the others."""

    def finish(self) -> None:
        """Waits for the transfer that publish() started."""

    def _begin(self) -> Any:
        return distributed.all_mean(self.grads)

    def _hand_over(self) -> None:
        distributed.as_mean(self.grads, self.ranks)
        for slot, place in zip(self.layout.slots, self._places, strict=True):
            slot.parameter.grad = place


class _Scattered(Reduced):
    def __init__(self, layout: Layout, ranks: Ranks):
        super().__init__(layout, ranks)
        self.part = torch.zeros_like(self.grads[self.own])

    def _begin(self) -> Any:
        return distributed.scatter_mean(self.part, self.grads)


class Sliced(_Scattered):
    """A bucket for elementwise updates; .weights is this rank's part, which the optimizer gets instead of tensors."""

    def __init__(self, layout: Layout, ranks: Ranks):
        super().__init__(layout, ranks)
        self._everyones = torch.zeros_like(self.grads)
        for slot in layout.slots:
            place = slot.of(self._everyones)
            place.copy_(slot.parameter.detach())
            slot.parameter.data = place
        self.weights = torch.nn.Parameter(self._everyones[self.own])
        self._gathering: Any = None  # torch.distributed's handle of the gathering

    def own_grads(self) -> list[torch.Tensor]:
        return [self.weights.grad]

    def part_from(self, slot: Slot, other: Reduced, place: Slot, part: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a buffer that holds, in slot, the elements that another bucket has in place, and
        otherwise zeros.  part is this rank's part of the other's buffer.  All ranks call it together."""
        buffer, everyones = part.new_zeros(self.grads.shape), part.new_empty(other.grads.shape)
        distributed.gather_in_place(everyones, part).wait()
        slot.of(buffer).copy_(place.of(everyones))
        return buffer[self.own].clone()

    def publish(self) -> None:
        self._gathering = distributed.gather_in_place(self._everyones, self._everyones[self.own])

    def finish(self) -> None:
        self._gathering.wait()

    def _hand_over(self) -> None:
        self.weights.grad = distributed.as_mean(self.part, self.ranks)


class Owned(_Scattered):
    def __init__(self, layout: Layout, ranks: Ranks):
        super().__init__(layout, ranks)
        first = self.own.start
        mine = [slot for slot in layout.slots if self.own.start <= slot.start < self.own.stop]
        self._mine = [(slot.parameter, Slot(slot.parameter, slot.start - first).of(self.part)) for slot in mine]

    def own_grads(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter, _ in self._mine]

    def _hand_over(self) -> None:
        distributed.as_mean(self.part, self.ranks)
        for parameter, place in self._mine:
            parameter.grad = place
