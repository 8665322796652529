"""Observes a rehearsal: graphs, breaks and their reasons, kernels, live bytes, collectives.

Call install() after device.install(), then run everything inside `with watch.mode:`.
"""

import functools
import importlib
import itertools
import logging
import re
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.compile_fx
import torch.distributed._tools.fake_collectives  # registers the collectives' rules for FakeTensors
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

ROUND_BYTES = 512  # granularity of CUDA's caching allocator
SINCE = {"aten::_scaled_mm": (8, 9)}  # compute capability that an operator needs, whatever torch was built with
ALLOCATIONS = ("aten::empty_strided", "aten::empty", "aten::detach", "aten::empty_like")  # these launch nothing
COPIES = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}  # {operator: index of its source}
KERNEL_OF = ("CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


class Watch:
    """Collects what happens.  The rehearsal sets .phase, which every finding names, and .part and .rank.

    gpu is a value of device.GPUS.  Without with_kernels, compilation stops at AOTAutograd's graphs.
    """

    def __init__(self, gpu: SimpleNamespace, with_kernels: bool) -> None:
        self.gpu, self.with_kernels = gpu, with_kernels
        self.phase, self.part, self.rank = "", "", 0
        self.graphs: list[tuple[str, str]] = []  # (phase, "forward", "backward" or "inference")
        self.recompiles: list[tuple[str, str]] = []  # (phase, reason)
        self.syncs: Counter[tuple[str, str]] = Counter()  # (phase, operator)
        self.launches: Counter[str] = Counter()  # {phase: launches of Triton kernels}
        # calls of operators that torch or a library computes: (part of a step, operator)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.operators: set[Any] = set()  # operators that ran on the device
        self.first_order: list[int] = []  # order of the buckets of hardware.reducer=shard on rank 0
        self.collectives: dict[int, list[str]] = {}  # {rank: its collectives in order}
        self.kernels: dict[str, list[dict[str, Any]]] = {}  # {source: facts of each configuration tried}
        self.num_flex = self.num_maskless = 0  # FlexAttention calls in graphs, and those whose mask hides nothing
        self.live_bytes, self.peaks = 0, Counter[str]()
        self.mode = _Mode(self)

    def at(self, phase: str) -> None:
        """Begins a phase, to which everything that follows belongs."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.live_bytes)

    def hold(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's storage in live_bytes for as long as it is alive."""
        storage = tensor.untyped_storage()
        if tensor.device.type != "cuda" or getattr(storage, "is_counted", False):
            return
        storage.is_counted = True
        size = -(-storage.nbytes() // ROUND_BYTES) * ROUND_BYTES
        self.live_bytes += size
        self.peaks[self.phase] = max(self.peaks[self.phase], self.live_bytes)
        weakref.finalize(storage, self._free, size).atexit = False

    def _free(self, size: int) -> None:
        self.live_bytes -= size

    def install(self) -> None:
        """Installs the observers for the rest of this process."""
        for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):  # lets FakeTensors use foreach kernels
            foreach: Any = importlib.import_module(module)
            foreach._foreach_supported_types.append(FakeTensor)
        self._watch_recompiles()
        for operator in (flex_attention, flex_attention_backward):  # their rules are looked up by the mode's class
            operator.python_key_table[_Mode] = operator.python_key_table[FakeTensorMode]
        if self.with_kernels:
            self._watch_graphs()
            self._compile_kernels()
        else:
            self._compile_without_inductor()

    def graph_breaks(self) -> list[str]:
        """Returns the reasons of graph breaks, each once."""
        return [re.sub(r"\s+", " ", reason)[:300] for reason in counters["graph_break"]]

    def without_kernel(self) -> list[str]:
        """Returns the operators that ran on the device but are known to have no kernel for this GPU."""
        native, capability = _native_functions(), (self.gpu.major, self.gpu.minor)
        return sorted(
            str(operator)
            for operator in self.operators
            if not _has_kernel(operator, native) or SINCE.get(operator._schema.name, (0, 0)) > capability
        )

    def one_by_one(self, calls: Counter[tuple[str, str]]) -> dict[str, int]:
        """Returns {operator: the optimizer's calls} for those with a foreach form, which takes many tensors at once."""
        aten = torch.ops.aten
        return {
            name: count
            for (part, name), count in calls.items()
            if part == "optimizer" and not name.startswith("_") and hasattr(aten, f"_foreach_{name}")
        }

    def out_of_order(self) -> str | None:
        """Returns a sentence about the first collective in which two ranks differ, or None."""
        if len(self.collectives) < 2:
            return None
        (first, ours), (other, theirs) = self.collectives.items()
        for number, (our_call, their_call) in enumerate(itertools.zip_longest(ours, theirs, fillvalue="none"), 1):
            if our_call != their_call:
                return f"collective {number} is {our_call} on rank {first} and {their_call} on rank {other}"
        return None

    def too_large(self) -> list[dict[str, Any]]:
        """Returns the kernels without a configuration that compiles and fits into a block's shared memory."""
        tried = self.kernels.values()
        return [configs[-1] for configs in tried if not any(self._fits(config) for config in configs)]

    def _fits(self, config: dict[str, Any]) -> bool:
        return "error" not in config and config["shared_bytes"] <= self.gpu.shared_memory_per_block_optin

    def _watch_recompiles(self) -> None:
        watch = self

        class Reasons(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                watch.recompiles.append((watch.phase, re.sub(r"\s+", " ", record.getMessage())[:400]))

        torch._logging.set_logs(recompiles=True)
        logger = logging.getLogger("torch._dynamo.guards.__recompiles")
        logger.handlers, logger.propagate = [Reasons()], False

    def _watch_graphs(self) -> None:
        from torch._inductor.graph import GraphLowering

        lowering: Any = GraphLowering
        compiled = lowering.compile_to_module

        @functools.wraps(compiled)
        def counted(graph: Any, *args: Any, **kwargs: Any) -> Any:
            kind = "backward" if graph.is_backward else "inference" if graph.is_inference else "forward"
            self._saw_graph(kind, graph.module)
            return compiled(graph, *args, **kwargs)

        lowering.compile_to_module = counted

    def _saw_graph(self, kind: str, module: Any) -> None:
        self.graphs.append((self.phase, kind))
        for node in module.graph.nodes if kind != "backward" else ():
            if getattr(node.target, "__name__", "") == "flex_attention":
                self.num_flex += 1
                self.num_maskless += _hides_nothing(module, node.args[4][-1])

    def _compile_without_inductor(self) -> None:
        """Without Triton, stops at AOTAutograd's graphs, whose operators are then called one by one."""
        from torch._dynamo.backends.common import aot_autograd

        def make(kind: str) -> Any:
            def compiler(module: Any, inputs: Any) -> Any:
                self._saw_graph(kind, module)

                def called(args: Any) -> Any:
                    outputs = module(*args)
                    args.clear()
                    return outputs

                run: Any = called
                run._boxed_call = True
                return run

            return compiler

        backend: Any = aot_autograd(
            fw_compiler=make("forward"), bw_compiler=make("backward"), inference_compiler=make("inference")
        )
        inductor: Any = torch._inductor.compile_fx
        inductor.compile_fx = lambda module, inputs, **options: backend(module, inputs)

    def _compile_kernels(self) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        tuner: Any = CachingAutotuner
        compile_one = tuner._precompile_config

        def precompile(kernel: Any, *args: Any, **kwargs: Any) -> None:
            tried = self.kernels.setdefault(kernel.fn.src, [])
            for config in kernel.configs if not tried else ():  # a GPU times all that fit; here the first is enough
                tried.append(_compiled(compile_one, kernel, config))
                if self._fits(tried[-1]):
                    break

        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self.launches[self.phase] += 1

        tuner.precompile, tuner.run = precompile, run


def _compiled(compile_one: Any, kernel: Any, config: Any) -> dict[str, Any]:
    """Compiles a configuration of a kernel to machine code; returns its facts, or the error."""
    facts = {"name": kernel.inductor_meta.get("kernel_name") or kernel.fn.__name__, "config": str(config)}
    try:
        binary = compile_one(kernel, config).kernel
    except Exception as error:  # Triton's and ptxas's errors have no common type
        return facts | {"error": f"{type(error).__name__}: {str(error).strip()[-300:]}"}
    return facts | {"shared_bytes": binary.metadata.shared, "cubin_bytes": len(binary.asm["cubin"])}


class _Mode(FakeTensorMode):
    """A FakeTensorMode that counts storages, operators and syncs, and in which item() returns 1."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._watch = watch

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if TracingContext.try_get() is not None:  # dynamo, AOTAutograd and inductor trace with this mode too
            return super().dispatch(func, types, args, kwargs or {})
        watch = self._watch
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].device.type == "cuda":
                watch.syncs[watch.phase, "item()"] += 1
            return 1.0 if args[0].dtype.is_floating_point else 1
        returned = self._rule(func, types, args, kwargs or {})
        if getattr(func, "namespace", "") == "c10d":
            sizes = ", ".join(str(arg.numel()) for arg in _flat(args) if isinstance(arg, torch.Tensor))
            watch.collectives.setdefault(watch.rank, []).append(f"{func._schema.name.removeprefix('c10d::')}({sizes})")
            return returned
        outputs = list(_flat([returned]))
        on_device = [out for out in outputs if isinstance(out, torch.Tensor) and out.device.type == "cuda"]
        for out in on_device:
            watch.hold(out)
        takes = any(isinstance(arg, torch.Tensor) and arg.device.type == "cuda" for arg in _flat(args))
        if not isinstance(func, torch._ops.OpOverload):  # FlexAttention, for which inductor writes kernels
            watch.calls[watch.part, str(func)] += 1
        elif (on_device or takes) and not func.is_view and func.namespace != "prim":
            watch.operators.add(func)
            if func._schema.name not in ALLOCATIONS:
                watch.calls[watch.part, func._schema.name.removeprefix("aten::")] += 1
        if takes and any(isinstance(out, torch.Tensor) and out.device.type == "cpu" for out in outputs):
            watch.syncs[watch.phase, str(func)] += 1
        is_copied = on_device and func in COPIES and args[COPIES[func]].device.type == "cpu"
        if is_copied and not (kwargs or {}).get("non_blocking", args[2:] == (True,)):  # the memory is not pinned
            watch.syncs[watch.phase, "copy from the host"] += 1
        return returned

    def _rule(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns a call's FakeTensors.  Raises NotImplementedError if torch has no rule for the operator."""
        try:
            return super().dispatch(func, types, args, kwargs)
        except NotImplementedError as error:
            if getattr(func, "_overloadname", "") != "out":
                raise NotImplementedError(f"{func} in {self._watch.phase}: {str(error)[:200]}") from None
        into = kwargs.pop("out")  # an out variant without a rule (_scaled_mm): use that of the functional variant
        super().dispatch(func.overloadpacket.default, types, args, kwargs)
        return into


def _hides_nothing(module: Any, mask_mod: Any) -> bool:
    """Whether a FlexAttention mask depends on nothing, neither positions nor documents."""
    graph = getattr(module, mask_mod.target).graph
    todo, seen = [node for node in graph.nodes if node.op == "output"], set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes if "new_ones" not in str(node.target) else []
    return not any(node.op in ("placeholder", "get_attr") for node in seen)


def _flat(args: Any) -> Any:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from arg
        else:
            yield arg


@functools.cache
def _native_functions() -> dict[str, str] | None:
    """Returns {aten operator: dispatch keys} from torch's native_functions.yaml; None if this torch has none."""
    import yaml

    try:
        torchgen: Any = importlib.import_module("torchgen")

        path = Path(torchgen.__path__[0]) / "packaged/ATen/native/native_functions.yaml"
        rows = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (ImportError, OSError):
        return None
    keys_by_name: dict[str, str] = {}
    for row in rows:
        name, dispatch = row["func"].partition("(")[0], row.get("dispatch")
        keys = "CompositeImplicitAutograd" if dispatch is None else ", ".join(dispatch)
        keys += ", CUDA" * ("ufunc_inner_loop" in row)  # generated for CPU and CUDA
        keys_by_name[name] = row.get("structured_delegate", keys)
    return keys_by_name


def _has_kernel(operator: Any, native: dict[str, str] | None) -> bool:
    """Whether torch's table lists a CUDA kernel for an aten operator; for others, whether one is registered."""
    name, overload = operator._schema.name, operator._schema.overload_name
    if name.startswith("aten::") and native is not None:
        row = native.get(name.removeprefix("aten::") + (f".{overload}" if overload else ""))
        if row is None:  # generated from another operator (functional and out variants)
            return True
        row = native.get(row, row)  # the row of the operator that it delegates to
        return any(key in re.split(r"[,\s]+", row) for key in KERNEL_OF)
    full = f"{name}.{overload}" if overload else name
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in KERNEL_OF)
