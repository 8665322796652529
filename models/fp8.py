"""A matrix product in 8-bit floating point with fixed scales, and its gradients, for compute capability 8.9 and later.

Activations and weights become float8_e4m3fn (largest 448), gradients float8_e5m2 (largest 57,344, fewer digits).  Each
is multiplied by its scale before it is rounded, and the product is divided by both scales.  Values that a scale pushes
beyond the largest number are lost, so scales are specific to a model, its batch and its way of taking the mean.
N rows, I inputs, O outputs
"""

from typing import Any, NamedTuple

import torch


class Scales(NamedTuple):
    """Factors by which tensors are multiplied before they are rounded."""

    x: float
    weight: float
    grad: float


@torch.compiler.assume_constant_result
def is_fast_on(device_type: str) -> bool:
    """Whether this machine's GPU multiplies 8-bit floats.  False on a CPU, which multiplies them in float32."""
    return device_type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def linear(x: torch.Tensor, weight_OI: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Returns x @ weight.T, [..., O] bfloat16; the gradient of weight is float32.  N, I and O are multiples of 16."""
    return _Linear.apply(x.flatten(0, -2), weight_OI, scales).view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: torch.Tensor, weight_OI: torch.Tensor, scales: Scales) -> torch.Tensor:
        x8_NI = (x_NI * scales.x).to(torch.float8_e4m3fn)
        weight8_OI = (weight_OI * scales.weight).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x8_NI, weight8_OI)
        ctx.scales = scales
        return _product(x8_NI, weight8_OI.t(), scales.x, scales.weight, torch.bfloat16, True)

    @staticmethod
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x8_NI, weight8_OI = ctx.saved_tensors
        scales = ctx.scales
        grad8_NO = (grad_NO * scales.grad).to(torch.float8_e5m2)
        # the kernel needs its first factor row-major and its second column-major
        weight8_by_columns, grad8_by_columns = (factor.t().contiguous().t() for factor in (weight8_OI, grad8_NO))
        grad_x_NI = _product(grad8_NO, weight8_by_columns, scales.grad, scales.weight, torch.bfloat16, False)
        x8_IN = x8_NI.t().contiguous()
        grad_weight_IO = _product(x8_IN, grad8_by_columns, scales.x, scales.grad, torch.float32, False)
        return grad_x_NI, grad_weight_IO.t(), None


def _product(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scale: float,
    right_scale: float,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> torch.Tensor:
    if left.device.type == "cpu":  # few CPUs have a kernel; products of 8-bit floats are exact in float32
        return (left.float() @ right.float() / (left_scale * right_scale)).to(dtype)
    scale_a, scale_b = (
        torch.full((), 1 / scale, dtype=torch.float32, device=left.device) for scale in (left_scale, right_scale)
    )
    return torch._scaled_mm(
        left, right, out_dtype=dtype, scale_a=scale_a, scale_b=scale_b, use_fast_accum=fast_accumulation
    )
