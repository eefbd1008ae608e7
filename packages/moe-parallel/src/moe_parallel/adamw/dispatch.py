"""Where the Triton kernels run: the one file that knows that Triton may be missing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

try:
    from moe_parallel.adamw import kernel
except ImportError:
    kernel = None

_interpreted = False


def find_kernel(x: Tensor):
    """Return the kernels if they run on a tensor: float32 on CUDA, where Triton is installed."""
    wanted = x.dtype == torch.float32 and (x.is_cuda or _interpreted)
    return kernel if wanted else None


@contextmanager
def interpreted() -> Iterator[None]:
    """Let Triton's interpreter run the kernels on CPU tensors: for tests.

    The process must have started with ``TRITON_INTERPRET=1``.
    """
    global _interpreted  # noqa: PLW0603 - one switch a process, like the interpreter's own
    _interpreted = True
    try:
        yield
    finally:
        _interpreted = False
