"""Make a torch operator of a function."""

import functools
from collections.abc import Callable

import torch


def operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Register a function as the operator ``moe_kernels::name``, for every device.

    Its schema comes from the annotations. Fake and gradient are registered by name, with
    ``torch.library``.

    This is ``torch.library.custom_op`` without its guard against compilation of the body, which
    the operator being opaque makes superfluous, and which imports the whole compiler at the first
    call: 3 seconds on the CPU of a laptop, in every process.

    The body runs on the device of its first argument, a tensor, whatever device is current: Triton
    launches on the current one. And it runs without autocast, which would round inside.

    Args:
        name: Name of the operator.
        mutates: Names of the arguments that it changes in place.
    """

    def register(function: Callable) -> Callable:
        qualified = f"moe_kernels::{name}"
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        torch.library.define(qualified, schema)
        torch.library.impl(qualified, "default", _shielded(function))
        return getattr(torch.ops.moe_kernels, name).default

    return register


def _shielded(function: Callable) -> Callable:
    @functools.wraps(function)
    def run(first: torch.Tensor, *rest: object) -> object:
        with torch.cuda.device_of(first):
            if not torch.is_autocast_enabled(first.device.type):
                return function(first, *rest)
            with torch.autocast(first.device.type, enabled=False):
                return function(first, *rest)

    return run


def not_differentiable(name: str, why: str) -> None:
    """Let the gradient of an operator be an error instead of nothing."""

    def refuse(ctx: object, *grads: torch.Tensor | None) -> None:
        del ctx, grads
        raise RuntimeError(f"moe_kernels::{name} has no derivative: {why}")

    torch.library.register_autograd(f"moe_kernels::{name}", refuse)


def wants_gradient(*tensors: torch.Tensor) -> bool:
    """Tell whether autograd will ask for a gradient of any of these."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
