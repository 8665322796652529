"""Arithmetic that is the same on every CPU: within RoundedOnce() each torch call rounds its exact value once.

The kernels of a CPU add in an order of their own, and some round to bfloat16 between two additions where others do not.
So the loss of a bfloat16 model differs between instruction sets as much as bfloat16 itself moves it (test_ladder.py has
the figures).  In this mode every torch function is computed in float64 as well, and that value, rounded to the dtype of
the function's own output, takes the output's place.  The loss then changes only if the model computes something else or
rounds it elsewhere.
"""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

ROUNDED_DTYPES = (torch.bfloat16, torch.float32)


class RoundedOnce(TorchFunctionMode):
    """For a forward pass without gradients.  A call that writes into an argument is refused, as is autocast: it would
    leave an argument of float64 as it is."""

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
