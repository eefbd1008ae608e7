"""A linear layer in MXFP8: rounded once each way, and the gradients that belong to that."""

from contextlib import nullcontext

import pytest
import torch
from moe_kernels import dequantize, mx_linear, quantize, quantize_weight
from moe_kernels.backend import interpreted
from moe_kernels.testing import randn


def rounded(x: torch.Tensor, recipe: str) -> torch.Tensor:
    return dequantize(quantize(x, recipe=recipe)).double()


@pytest.mark.parametrize("recipe", ["mx32", "mx128", "mxrow"])
@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("leading", [(5, 7), (35,), (0,), ()], ids=str)
def test_product_and_gradients_are_exact_after_one_rounding(recipe, kernel, leading) -> None:
    x, w = randn(*leading, 160, seed=0).requires_grad_(), randn(64, 160, seed=1).requires_grad_()
    dy = randn(*leading, 64, seed=2)
    with interpreted() if kernel else nullcontext():
        y = mx_linear(x, w, recipe=recipe)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
    xq, flat = rounded(x.detach(), recipe), dy.reshape(-1, 64).double()
    want = (
        xq @ rounded(w.detach(), recipe).T,
        rounded(dy, recipe) @ rounded(w.detach().T.contiguous(), recipe).T,
        flat.T @ xq.reshape(-1, 160),
    )
    for got, exact in zip((y, dx, dw), want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


def test_a_snapshot_stands_for_the_weight_and_frozen_tensors_get_nothing() -> None:
    x, w = randn(9, 32, seed=0), randn(64, 32, seed=1)
    quantized = quantize_weight(w, recipe="mx128")
    x.requires_grad_()
    y = mx_linear(x, torch.zeros_like(w), recipe="mx128", quantized=quantized)
    assert torch.equal(y, mx_linear(x, w, recipe="mx128"))
    (dx,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(mx_linear(x, w, recipe="mx128").sum(), x)
    assert torch.equal(dx, want)
    w.requires_grad_()
    (dw,) = torch.autograd.grad(mx_linear(x.detach(), w, recipe="mx128").sum(), w)
    torch.testing.assert_close(dw[0], dequantize(quantize(x.detach(), recipe="mx128")).sum(0))


def test_it_compiles_whole() -> None:
    x, w = randn(9, 32, seed=0), randn(64, 32, seed=1)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: mx_linear(x, w, recipe="mx32"), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x, w), mx_linear(x, w, recipe="mx32"))


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"D differs: x has shape \(3, 64\), w_FD \(32, 32\)"):
        mx_linear(randn(3, 64, seed=0), randn(32, 32, seed=1), recipe="mx32")
    with pytest.raises(ValueError, match="multiples of 32, got D=32, F=48"):
        mx_linear(randn(3, 32, seed=0), randn(48, 32, seed=1), recipe="mx32")
