"""Arithmetic that is the same on every CPU: within RoundedOnce(), each torch call rounds its exact value once.

CPUs' kernels add in different orders, and some round to bfloat16 between two additions where others do not.  So the
loss of a bfloat16 model differs between instruction sets by as much as bfloat16 itself changes it (figures in
test_ladder.py).  In this mode every torch function is also computed in float64, and that value, rounded to the dtype of
the function's output, replaces the output.  The loss then changes only if the model computes something else or rounds
elsewhere.
"""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

ROUNDED_DTYPES = (torch.bfloat16, torch.float32)


class RoundedOnce(TorchFunctionMode):
    """A mode for forward passes without gradients.  It refuses calls that write into an argument, and autocast, which
    would not convert float64 arguments."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
        inputs = _tensors((args, kwargs or {}))
        versions = [tensor._version for tensor in inputs]
        exact_args, exact_kwargs = tree_map_only(torch.Tensor, _exact_copy, (args, kwargs or {}))
        if func is F.rms_norm and exact_kwargs.get("eps") is None:  # the default is the dtype's; bfloat16 has float32's
            exact_kwargs["eps"] = torch.finfo(torch.float32).eps
        exact = func(*exact_args, **exact_kwargs)
        outputs = func(*args, **(kwargs or {}))
        assert versions == [tensor._version for tensor in inputs], f"{func} writes into an argument"
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        for output, value in zip(_tensors(outputs), _tensors(exact), strict=True):
            is_view = output.untyped_storage().data_ptr() in storages
            if output.dtype in ROUNDED_DTYPES and not is_view:
                output.copy_(value)
        return outputs


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _exact_copy(tensor):
    return tensor.detach().to(torch.float64, copy=True) if tensor.dtype in ROUNDED_DTYPES else tensor
