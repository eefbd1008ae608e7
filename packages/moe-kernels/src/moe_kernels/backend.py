"""Which implementation runs, and why."""

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

# What tl.dot multiplies with float32 accumulation. float64 takes the reference on every device.
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Backend(NamedTuple):
    """The implementation that CUDA and CPU tensors get in this process.

    Attributes:
        name: ``"triton"`` (kernels on CUDA tensors) or ``"reference"`` (plain torch everywhere).
        reason: Why, in words.
    """

    name: str
    reason: str


def _find_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:  # an import hook may refuse instead of finding nothing
        return False


HAS_TRITON = _find_triton()
_interpreted = False
if not HAS_TRITON:
    logging.getLogger("moe_kernels").warning(
        "triton is not installed: moe_kernels runs its plain torch reference on every device"
    )


def backend() -> Backend:
    """Say which implementation runs in this process.

    Examples:
        >>> backend().name in ("triton", "reference")
        True
    """
    if not HAS_TRITON:
        return Backend("reference", "triton is not installed")
    if not torch.cuda.is_available():
        return Backend("reference", "torch sees no CUDA device")
    return Backend("triton", f"triton and {torch.cuda.get_device_name()} are there")


def runs_kernel(x: Tensor, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> bool:
    """Tell whether an operation on ``x`` goes to a Triton kernel, which has those dtypes."""
    return (x.is_cuda or _interpreted) and HAS_TRITON and x.dtype in dtypes


@contextmanager
def interpreted() -> Iterator[None]:
    """Let Triton's interpreter run the kernels on CPU tensors as well: for tests.

    The process must have started with ``TRITON_INTERPRET=1``. The interpreter multiplies the bit
    patterns of bfloat16 instead of its values (seen in 3.6 to 3.9): use float16 and float32.
    """
    global _interpreted  # noqa: PLW0603 - one switch a process, like the interpreter's own
    _interpreted = True
    try:
        yield
    finally:
        _interpreted = False
