"""A linear layer with a deferred weight gradient is torch's, to the bit, under autocast too."""

import copy

import pytest
import torch
from moe_parallel import Gradients, split_linears
from torch import nn


def gradients(model, target, x, autocast):
    """Return the output and the gradients of the input and of all parameters in two backwards."""
    x = x.clone().requires_grad_()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().sum().backward()
        target.accumulate()
    return [y, x.grad, *target.main_grads.values()]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_split_linear_has_the_bits_of_torchs_linear(autocast, sinks, dtype, bias) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(5, 7, bias=bias), nn.ReLU(), nn.Linear(7, 3, bias=bias)
    plain = nn.Sequential(*layers).to(dtype)
    split = split_linears(copy.deepcopy(plain))
    targets = [Gradients(dict(model.named_parameters())) for model in (plain, split)]
    if sinks:
        targets[1].attach_sinks()
    x = torch.randn(2, 4, 5, dtype=dtype)
    want = gradients(plain, targets[0], x, autocast)
    got = gradients(split, targets[1], x, autocast)
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in want]
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
