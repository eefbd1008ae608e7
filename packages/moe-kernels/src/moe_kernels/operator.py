"""Make a torch operator of a function."""

from collections.abc import Callable

import torch


def operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Register a function as the operator ``moe_kernels::name``, for every device.

    Its schema comes from the annotations. Fake and gradient are registered by name, with
    ``torch.library``.

    This is ``torch.library.custom_op`` without its guard against compilation of the body, which
    the operator being opaque makes superfluous, and which imports the whole compiler at the first
    call: 3 seconds on the CPU of a laptop, in every process.

    Args:
        name: Name of the operator.
        mutates: Names of the arguments that it changes in place.
    """

    def register(function: Callable) -> Callable:
        qualified = f"moe_kernels::{name}"
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        torch.library.define(qualified, schema)
        torch.library.impl(qualified, "default", function)
        return getattr(torch.ops.moe_kernels, name).default

    return register
