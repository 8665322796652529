"""Reducers average the gradients of all ranks before the optimizer's step; hardware.reducer chooses one.

null    torch's DistributedDataParallel, after which every rank does the whole update; nothing for a single process
plain   an all-reduce after the backward pass, and every rank does the whole update: the reference for the other two
shard   each rank receives the mean gradients of its share during the backward pass, updates that share, and sends the
        new weights to the others (ZeRO's first stage with the traffic of its second; Rajbhandari et al. 2020,
        arXiv:1910.02054)
"""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.config.schema import Config
from bench.training import buckets, distributed
from bench.training.distributed import Ranks
from models.adam_update import CautiousAdam
from models.together import copy_state

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default
BY_ELEMENT = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    CautiousAdam,
)  # optimizers whose update of an element depends on that element only


def reducer_for(config: Config, model: torch.nn.Module, optimizer: Any, ranks: Ranks) -> "Alone":
    """Returns the reducer that hardware.reducer names.  The optimizer must not have done a step."""
    kind = config.hardware.reducer
    if ranks.world_size == 1:
        return Alone(config, model, optimizer)
    if kind is None:
        return Ddp(config, model, optimizer, ranks)
    return (Plain if kind == "plain" else Shard)(config, model, optimizer, ranks, BUCKET_BYTES)


class Alone:
    """The reducer for a single process, whose gradients need no reduction; the base class of the others.

    forward is the model to train, compiled if the config says so; evaluated is the model to validate.  A step consists
    of expect(), micro_step() around each forward and backward pass, clip(), step(), and drop_grads() for named parts.
    """

    name: str | None = None  # as recorded in run.json

    def __init__(self, config: Config, model: torch.nn.Module, optimizer: Any):
        self.model, self.optimizer = model, optimizer
        # They are in no loss at first, and so in no bucket; they are reduced separately once they have gradients.
        self._late = [model.get_parameter(name) for name in getattr(model, "late_parameters", ())]
        self.forward: Any
        self.forward = self.evaluated = self._compiled(model) if config.hardware.compile else model

    def set_untied(self, untied: bool, embedding: torch.nn.Parameter, head: torch.nn.Parameter) -> dict[str, Any]:
        """Unties or ties the embedding, on all ranks together.  Returns the state that it takes over from the head."""
        return copy_state(self.optimizer, head, embedding) if untied else {}

    def expect(self, names: Collection[str] | None) -> None:
        """Announces the optimizer's parts that this step updates, None for all; other tensors keep their gradients."""

    def micro_step(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Returns the context of a forward and backward pass; only the last one of a step reduces gradients."""
        return contextlib.nullcontext()

    def clip(self, most_norm: float | None) -> None:
        """Clips the norm of all gradients together to most_norm, unless that is None."""
        if most_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), most_norm)

    def _mean_of_late(self, world_size: int) -> None:
        for tensor in self._late:
            if tensor.grad is not None:
                distributed.all_sum(tensor.grad).div_(world_size)

    def step(self, names: Collection[str] | None = None) -> None:
        """Steps the optimizer, or only its named parts.  Afterwards all ranks have the same weights."""
        self.optimizer.step() if names is None else self.optimizer.step(names)

    def drop_grads(self, names: Collection[str]) -> None:
        """Drops the gradients of the named parts, whether they were updated or not."""
        self.optimizer.zero_grad(set_to_none=True, names=names)

    def close(self) -> None:
        """Drops the models; call it before the process group is destroyed."""
        self.forward = self.evaluated = None

    def _compiled(self, model: torch.nn.Module) -> Any:
        return torch.compile(model, dynamic=False)


class Ddp(Alone):
    """torch's DistributedDataParallel, which overlaps the backward pass; dynamo cuts compiled graphs for it."""

    name = "ddp"

    def __init__(self, config: Config, model: torch.nn.Module, optimizer: Any, ranks: Ranks):
        super().__init__(config, model, optimizer)
        self._world_size = ranks.world_size
        late = {id(tensor) for tensor in self._late}
        names = [name for name, tensor in self.forward.named_parameters() if id(tensor) in late]
        arguments = inspect.signature(DistributedDataParallel.__init__).parameters  # torch 2.13 renamed one
        sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
        # torch's only way to exclude parameters, here those that are in no loss at first
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.forward, names)
        self.forward = DistributedDataParallel(
            self.forward,
            device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
            **{sync_buffers: False},  # the models' buffers are constants
            gradient_as_bucket_view=True,
        )

    def micro_step(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if is_last else self.forward.no_sync()

    def clip(self, most_norm: float | None) -> None:
        self._mean_of_late(self._world_size)
        super().clip(most_norm)


class Plain(Alone):
    """The reference for the other reducers: reduces bucket after bucket once the last backward pass has ended."""

    name = "plain"

    def __init__(self, config: Config, model: torch.nn.Module, optimizer: Any, ranks: Ranks, bucket_bytes: int):
        super().__init__(config, model, optimizer)
        self._world_size, late = ranks.world_size, set(self._late)
        parameters = [weight for weight in model.parameters() if weight.requires_grad and weight not in late]
        layouts = buckets.packed(parameters, ranks.world_size, bucket_bytes)
        self._buckets = [buckets.Reduced(layout, ranks) for layout in layouts]

    def clip(self, most_norm: float | None) -> None:
        _refuse_missing(self.model, self._buckets)
        for bucket in self._buckets:
            bucket.launch()
            bucket.wait()
        self._mean_of_late(self._world_size)
        super().clip(most_norm)


class Shard(Alone):
    """Reduces each bucket as soon as it is full.

    The update is divided among the ranks for the optimizers of BY_ELEMENT, and for an optimizer that exchanges its
    updates itself and has an attribute `shares`: for each rank, the indices of the tensors whose gradients it needs.
    For any other optimizer every rank gets all gradients.
    """

    name = "shard"

    def __init__(self, config: Config, model: torch.nn.Module, optimizer: Any, ranks: Ranks, bucket_bytes: int):
        self._ranks, self._cut_bytes = ranks, bucket_bytes
        super().__init__(config, model, optimizer)
        self._resting = set(self._late)  # in no loss now, and so in no bucket that is due
        parts = getattr(optimizer, "parts", {"": optimizer}).items()
        self._parts = [
            (name, part, list(_buckets_of(part, ranks, bucket_bytes, self._resting))) for name, part in parts
        ]
        self._parts.sort(key=lambda row: hasattr(row[1], "shares"))  # Muon last: weights are gathered while it computes
        self._order = [bucket for *_, group in self._parts for bucket in group]  # the order in which all ranks reduce
        self._due = self._order  # the buckets that this step reduces, in that order
        self._bucket_of = {parameter: bucket for bucket in self._order for parameter in bucket.layout.parameters}
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in self._bucket_of]
        self._is_last, self._num_launched = False, 0
        self._filled: list[buckets.Reduced] = []
        self._knows_order = False

    def set_untied(self, untied: bool, embedding: torch.nn.Parameter, head: torch.nn.Parameter) -> dict[str, Any]:
        self._resting = set() if untied else set(self._late)
        pairs = [(self._bucket_of[tensor], tensor) for tensor in (embedding, head)]
        copied = super().set_untied(untied, *(getattr(bucket, "weights", tensor) for bucket, tensor in pairs))
        (target, _), (source, _) = pairs
        if isinstance(target, buckets.Sliced):
            slots = [next(slot for slot in bucket.layout.slots if slot.parameter is tensor) for bucket, tensor in pairs]
            for name, value in copied.items():
                if isinstance(value, torch.Tensor) and value.ndim:  # a moment, of the elements of the head's slice
                    copied[name] = target.part_from(slots[0], source, slots[1], value)
        return copied

    def expect(self, names: Collection[str] | None) -> None:
        if any(grad is not None for bucket in self._due for grad in bucket.own_grads()):
            remedy = "drop them after every step, or use another hardware.reducer"
            raise RuntimeError(f"hardware.reducer=shard: gradients are left from the step before: {remedy}")
        due = {bucket for name, _, group in self._parts if names is None or name in names for bucket in group}
        resting = {self._bucket_of[parameter] for parameter in self._resting}
        self._due = [bucket for bucket in self._order if bucket in due - resting]

    def micro_step(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        self._is_last = is_last
        return contextlib.nullcontext()

    def clip(self, most_norm: float | None) -> None:
        _refuse_missing(self.model, self._due[self._num_launched :])
        if most_norm is None:
            return
        for bucket in self._due:
            bucket.wait()
        whole = [bucket.layout for bucket in self._due if type(bucket) is buckets.Reduced]
        everywhere = [parameter.grad for layout in whole for parameter in layout.parameters]
        own = [grad for bucket in self._due for grad in bucket.own_grads()]
        square = torch.zeros((), device=self._ranks.device)
        if own:
            square += torch.nn.utils.get_total_norm(own).square()
        distributed.all_sum(square)
        if everywhere:
            square += torch.nn.utils.get_total_norm(everywhere).square()
        if grads := own + everywhere:  # empty if there are only matrices, and fewer of them than ranks
            frac = torch.clamp(most_norm / (square.sqrt() + 1e-6), max=1.0)  # as in torch's clip_grad_norm_
            torch._foreach_mul_(grads, frac)

    def step(self, names: Collection[str] | None = None) -> None:
        for name, part, group in self._parts:
            if names is not None and name not in names:
                continue
            for bucket in group:
                bucket.wait()
            part.step()
            for bucket in group:
                if bucket in self._due:  # what rests has not changed, and nothing would wait for it
                    bucket.publish()
        for bucket in self._due:
            bucket.finish()
        if not self._knows_order and len(self._filled) == len(self._order):
            # from now on, all ranks use the order of rank 0 in the first step of all parts, instead of a guess
            numbers = torch.tensor([self._order.index(bucket) for bucket in self._filled], device=self._ranks.device)
            self._order = [self._order[number] for number in distributed.from_first(numbers).tolist()]
            self._knows_order = True
        self._num_launched, self._filled = 0, []

    def drop_grads(self, names: Collection[str]) -> None:
        super().drop_grads(names)
        for _, _, group in (row for row in self._parts if row[0] in names):
            for parameter in (parameter for bucket in group for parameter in bucket.layout.parameters):
                parameter.grad = None  # the optimizer holds slices of a buffer instead of these tensors

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()

    def _compiled(self, model: torch.nn.Module) -> Any:
        return torch.compile(model, dynamic=False, backend=cut_at(self._cut_bytes))

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        """Called by torch when a gradient is complete.  All ranks reduce buckets in one order, however they fill."""
        bucket = self._bucket_of[parameter]
        if not self._is_last or bucket not in self._due:
            return
        bucket.num_missing -= 1
        if bucket.num_missing == 0:
            self._filled.append(bucket)
        while self._num_launched < len(self._due) and self._due[self._num_launched].num_missing == 0:
            self._due[self._num_launched].launch()
            self._num_launched += 1


def _buckets_of(optimizer: Any, ranks: Ranks, bucket_bytes: int, late: Collection[Any]) -> Iterator[buckets.Reduced]:
    """Yields an optimizer's buckets, one for each late tensor.  Slices replace the tensors of an elementwise one."""
    by_element = type(optimizer) in BY_ELEMENT
    for group in optimizer.param_groups:
        if hasattr(optimizer, "shares"):
            layouts = buckets.owned(group["params"], optimizer.shares, bucket_bytes)
            yield from (buckets.Owned(layout, ranks) for layout in layouts)
            continue
        parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
        alike = [[tensor for tensor in parameters if tensor not in late]]
        alike += [[tensor] for tensor in parameters if tensor in late]
        layouts = [layout for tensors in alike for layout in buckets.packed(tensors, ranks.world_size, bucket_bytes)]
        if by_element:
            sliced = [buckets.Sliced(layout, ranks) for layout in layouts]
            group["params"] = [bucket.weights for bucket in sliced]
            yield from sliced
        else:
            yield from (buckets.Reduced(layout, ranks) for layout in layouts)


def _refuse_missing(model: torch.nn.Module, waiting: Sequence[buckets.Reduced]) -> None:
    """Raises RuntimeError if a bucket still lacks a gradient after the step's last backward pass."""
    missing = {parameter for bucket in waiting for parameter in bucket.layout.parameters if parameter.grad is None}
    if missing:
        names = [name for name, parameter in model.named_parameters() if parameter in missing]
        raise RuntimeError(f"no gradient of {', '.join(names)}: every tensor must take part in the loss of every step")


def cut_at(most_bytes: int, compiler: str = "inductor") -> Callable[..., Any]:
    """Returns a torch.compile backend that cuts the graph into pieces of about most_bytes of parameters for compiler.

    The backward pass of a whole graph yields all gradients at its end, so that no reduction could overlap it.  torch
    cuts graphs for its DistributedDataParallel only; this calls the same code.  A graph without gradients, as in
    validation, stays whole.
    """

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._dynamo import lookup_backend
        from torch._dynamo.backends.distributed import DDPOptimizer  # imports most of the compiler

        class Cut(DDPOptimizer):
            def add_param(self, bucket: Any, param: torch.Tensor, name: str) -> None:
                """Counts the tensor's bytes; torch counts its storage, which many tensors may share here."""
                super().add_param(bucket, param, name)
                bucket.size += param.nbytes - param.untyped_storage().nbytes()

        compile_graph = lookup_backend(compiler)
        if not torch.is_grad_enabled():
            return compile_graph(graph, inputs, **options)
        return Cut(most_bytes, compile_graph, min(most_bytes, 2**20)).compile_fn(graph, inputs, **options)

    return backend
