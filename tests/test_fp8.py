"""A product in 8-bit floats against float32 of the rounded numbers."""

import torch

from models import fp8


def test_a_product_in_8_bit_floats_is_that_of_the_rounded_numbers():
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(2, 8, 32, generator=generator, dtype=torch.bfloat16).requires_grad_()
    weight_VD = (0.1 * torch.randn(48, 32, generator=generator)).requires_grad_()
    grad_BTV = (1e-4 * torch.randn(2, 8, 48, generator=generator)).bfloat16()
    product_BTV = fp8.linear(x_BTD, weight_VD, fp8.Scales(x=2.0, weight=32.0, grad=2.0**20))
    product_BTV.backward(grad_BTV)

    def rounded(tensor, scale, dtype):
        return (tensor.detach() * scale).to(dtype).float() / scale

    x, weight = rounded(x_BTD, 2.0, torch.float8_e4m3fn), rounded(weight_VD, 32.0, torch.float8_e4m3fn)
    grad = rounded(grad_BTV, 2.0**20, torch.float8_e5m2)
    assert torch.allclose(product_BTV.float(), x @ weight.T, rtol=2**-7, atol=1e-3)
    assert torch.allclose(x_BTD.grad.float(), grad @ weight, rtol=2**-7, atol=1e-6)
    assert torch.allclose(weight_VD.grad, grad.flatten(0, 1).T @ x.flatten(0, 1), rtol=1e-4, atol=1e-8)
    assert not torch.allclose(product_BTV.float(), x_BTD.float() @ weight_VD.T, rtol=2**-7, atol=1e-3)  # 3 bits are few
