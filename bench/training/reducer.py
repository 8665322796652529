"""How ranks come to one update from the gradients of each: hardware.reducer.

null    torch's DistributedDataParallel; every rank then does the whole update.  Of one process: nothing
plain   all-reduce when the backward pass has ended; every rank does the whole update.  What the others must agree with
shard   each rank gets the mean of the gradients of its share while the backward pass still runs, updates its share,
        and gives the others the result (ZeRO's first stage with the traffic of its second; Rajbhandari et al. 2020,
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

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default
BY_ELEMENT = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    CautiousAdam,
)  # an element's update needs that element alone


def reducer_for(config: Config, model: torch.nn.Module, optimizer: Any, ranks: Ranks) -> "Alone":
    """The reducer that hardware.reducer names; optimizer must not have made a step."""
    kind = config.hardware.reducer
    if ranks.world_size == 1:
        return Alone(config, model, optimizer)
    if kind is None:
        return Ddp(config, model, optimizer, ranks)
    return (Plain if kind == "plain" else Shard)(config, model, optimizer, ranks, BUCKET_BYTES)


class Alone:
    """One process: gradients are as backward leaves them.  The others differ from it.

    forward: the model, compiled where the config asks for it; evaluated: the same for validation.
    A step: expect(), micro_step() around each forward and backward pass, clip(), step(), and with names drop_grads().
    """

    name: str | None = None  # in run.json

    def __init__(self, config: Config, model: torch.nn.Module, optimizer: Any):
        self.model, self.optimizer = model, optimizer
        # in no loss at first, and so in no bucket: reduced by themselves once they have gradients
        self._late = [model.get_parameter(name) for name in getattr(model, "late_parameters", ())]
        self.forward: Any
        self.forward = self.evaluated = self._compiled(model) if config.hardware.compile else model

    def expect(self, names: Collection[str] | None) -> None:
        """Parts of the optimizer that the step will update, None: all; the tensors of others keep their gradients."""

    def micro_step(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are reduced in the last micro-step of a step only."""
        return contextlib.nullcontext()

    def clip(self, most_norm: float | None) -> None:
        """All gradients together to the norm most_norm; None: not."""
        if most_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), most_norm)

    def _mean_of_late(self, world_size: int) -> None:
        for tensor in self._late:
            if tensor.grad is not None:
                distributed.all_sum(tensor.grad).div_(world_size)

    def step(self, names: Collection[str] | None = None) -> None:
        """The optimizer's step, of those parts of it alone if any are named; then all ranks have the same weights."""
        self.optimizer.step() if names is None else self.optimizer.step(names)

    def drop_grads(self, names: Collection[str]) -> None:
        """Of those parts, updated or not."""
        self.optimizer.zero_grad(set_to_none=True, names=names)

    def close(self) -> None:
        """Before the process group goes."""
        self.forward = self.evaluated = None

    def _compiled(self, model: torch.nn.Module) -> Any:
        return torch.compile(model, dynamic=False)


class Ddp(Alone):
    """torch's own: it reduces beside the backward pass, also of a compiled model, whose graph dynamo cuts for it."""

    name = "ddp"

    def __init__(self, config: Config, model: torch.nn.Module, optimizer: Any, ranks: Ranks):
        super().__init__(config, model, optimizer)
        self._world_size = ranks.world_size
        late = {id(tensor) for tensor in self._late}
        names = [name for name, tensor in self.forward.named_parameters() if id(tensor) in late]
        arguments = inspect.signature(DistributedDataParallel.__init__).parameters  # torch 2.13 gave one another name
        sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
        # the one way that torch has to leave to us what is in no loss at first
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
    """The reference: buckets are reduced one after the other when the last backward pass has ended."""

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
    """Buckets are reduced as they fill; an optimizer of which nothing is known gets all gradients on every rank.

    Known are BY_ELEMENT, and an optimizer with `shares`: for each rank the indices of the tensors whose gradients that
    rank needs, and which gives the other ranks the updates itself.
    """

    name = "shard"

    def __init__(self, config: Config, model: torch.nn.Module, optimizer: Any, ranks: Ranks, bucket_bytes: int):
        self._ranks, self._cut_bytes = ranks, bucket_bytes
        parts = getattr(optimizer, "parts", {"": optimizer}).items()
        self._parts = [(name, part, list(_buckets_of(part, ranks, bucket_bytes))) for name, part in parts]
        self._parts.sort(key=lambda row: hasattr(row[1], "shares"))  # weights are gathered beside Muon's products
        super().__init__(config, model, optimizer)
        self._order = [bucket for *_, group in self._parts for bucket in group]  # in which all ranks reduce
        self._due = self._order  # those of them that this step reduces, in that order
        self._bucket_of = {parameter: bucket for bucket in self._order for parameter in bucket.layout.parameters}
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in self._bucket_of]
        self._is_last, self._num_launched = False, 0
        self._filled: list[buckets.Reduced] = []
        self._knows_order = False

    def expect(self, names: Collection[str] | None) -> None:
        self._refuse_left()
        due = {bucket for name, _, group in self._parts if names is None or name in names for bucket in group}
        self._due = [bucket for bucket in self._order if bucket in due]

    def _refuse_left(self) -> None:
        """RuntimeError: what the step before has updated has gradients still."""
        if any(grad is not None for bucket in self._due for grad in bucket.own_grads()):
            remedy = "drop them after every step, or use another hardware.reducer"
            raise RuntimeError(f"hardware.reducer=shard: gradients are left from the step before: {remedy}")

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
        if grads := own + everywhere:  # more ranks than matrices, and nothing but matrices: this rank has none
            frac = torch.clamp(most_norm / (square.sqrt() + 1e-6), max=1.0)  # as torch's clip_grad_norm_
            torch._foreach_mul_(grads, frac)

    def step(self, names: Collection[str] | None = None) -> None:
        for name, part, group in self._parts:
            if names is not None and name not in names:
                continue
            for bucket in group:
                bucket.wait()
            part.step()
            for bucket in group:
                bucket.publish()
        for bucket in self._due:
            bucket.finish()
        if not self._knows_order and len(self._filled) == len(self._order):
            # rank 0's order of the first step of all parts from now on, in place of the guess
            numbers = torch.tensor([self._order.index(bucket) for bucket in self._filled], device=self._ranks.device)
            self._order = [self._order[number] for number in distributed.from_first(numbers).tolist()]
            self._knows_order = True
        self._num_launched, self._filled = 0, []

    def drop_grads(self, names: Collection[str]) -> None:
        super().drop_grads(names)
        for _, _, group in (row for row in self._parts if row[0] in names):
            for parameter in (parameter for bucket in group for parameter in bucket.layout.parameters):
                parameter.grad = None  # of what rests: its optimizer has parts of a buffer in the tensors' place

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()

    def _compiled(self, model: torch.nn.Module) -> Any:
        return torch.compile(model, dynamic=False, backend=cut_at(self._cut_bytes))

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        """A gradient is there: every rank begins the collectives in one order, whatever order buckets fill in."""
        bucket = self._bucket_of[parameter]
        if not self._is_last or bucket not in self._due:
            return
        bucket.num_missing -= 1
        if bucket.num_missing == 0:
            self._filled.append(bucket)
        while self._num_launched < len(self._due) and self._due[self._num_launched].num_missing == 0:
            self._due[self._num_launched].launch()
            self._num_launched += 1


def _buckets_of(optimizer: Any, ranks: Ranks, bucket_bytes: int) -> Iterator[buckets.Reduced]:
    """The buckets of an optimizer's tensors; of one by element, its tensors are replaced by this rank's parts."""
    by_element = type(optimizer) in BY_ELEMENT
    for group in optimizer.param_groups:
        if hasattr(optimizer, "shares"):
            layouts = buckets.owned(group["params"], optimizer.shares, bucket_bytes)
            yield from (buckets.Owned(layout, ranks) for layout in layouts)
            continue
        parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
        layouts = buckets.packed(parameters, ranks.world_size, bucket_bytes)
        if by_element:
            sliced = [buckets.Sliced(layout, ranks) for layout in layouts]
            group["params"] = [bucket.weights for bucket in sliced]
            yield from sliced
        else:
            yield from (buckets.Reduced(layout, ranks) for layout in layouts)


def _refuse_missing(model: torch.nn.Module, waiting: Sequence[buckets.Reduced]) -> None:
    """RuntimeError where a bucket still waits for a gradient when all of a step's backward passes are over."""
    missing = {parameter for bucket in waiting for parameter in bucket.layout.parameters if parameter.grad is None}
    if missing:
        names = [name for name, parameter in model.named_parameters() if parameter in missing]
        raise RuntimeError(f"no gradient of {', '.join(names)}: every tensor must take part in the loss of every step")


def cut_at(most_bytes: int, compiler: str = "inductor") -> Callable[..., Any]:
    """A backend for torch.compile: that of the name compiler, with a graph for about most_bytes of parameters each.

    One compiled graph has one backward pass, which hands over all gradients at its end: nothing is left to reduce them
    beside.  torch cuts a graph by itself for its own DistributedDataParallel only; this asks the same code for it.
    What is compiled without gradients, the validation's forward pass, stays whole.
    """

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._dynamo import lookup_backend
        from torch._dynamo.backends.distributed import DDPOptimizer  # imports most of the compiler

        class Cut(DDPOptimizer):
            def add_param(self, bucket: Any, param: torch.Tensor, name: str) -> None:
                """torch counts a tensor's storage, which here may be a buffer that many tensors share."""
                super().add_param(bucket, param, name)
                bucket.size += param.nbytes - param.untyped_storage().nbytes()

        compile_graph = lookup_backend(compiler)
        if not torch.is_grad_enabled():
            return compile_graph(graph, inputs, **options)
        return Cut(most_bytes, compile_graph, min(most_bytes, 2**20)).compile_fn(graph, inputs, **options)

    return backend
