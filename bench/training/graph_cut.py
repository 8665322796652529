"""A compiled model in pieces, so that gradients of its last layers are there before backward has ended.

One compiled graph has one backward pass, which hands over all gradients at its end: nothing is left to reduce them
beside.  torch cuts a graph by itself for its own DistributedDataParallel only; this asks the same code for it.
"""

from collections.abc import Callable

import torch


def cut_at(most_bytes: int, compiler: str = "inductor") -> Callable:
    """A backend for torch.compile: that of the name compiler, with a graph for about most_bytes of parameters each.

    What is compiled without gradients, the validation's forward pass, stays whole.
    """

    def backend(graph, inputs, **options):
        from torch._dynamo import lookup_backend
        from torch._dynamo.backends.distributed import DDPOptimizer  # imports most of the compiler

        class Cut(DDPOptimizer):
            def add_param(self, bucket, param, name):
                """torch counts a tensor's storage, which here may be a buffer that many tensors share."""
                super().add_param(bucket, param, name)
                bucket.size += param.nbytes - param.untyped_storage().nbytes()

        compile_graph = lookup_backend(compiler)
        if not torch.is_grad_enabled():
            return compile_graph(graph, inputs, **options)
        return Cut(most_bytes, compile_graph, min(most_bytes, 2**20)).compile_fn(graph, inputs, **options)

    return backend
