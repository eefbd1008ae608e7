"""Memory that a kernel is about to write, filled with NaN on request.

With the environment variable ``MOE_KERNELS_POISON=1`` every buffer that a kernel writes, and every
tail that it leaves, begins as NaN. Results must not change by a bit: a difference is a read of
something that nobody wrote. Costs one fill a buffer.
"""

import os

import torch
from torch import Tensor

POISON = os.environ.get("MOE_KERNELS_POISON", "0") not in ("", "0")


def scratch(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised memory on the device of ``like``, in its dtype or another."""
    buffer = like.new_empty(shape, dtype=dtype or like.dtype)
    if POISON:
        buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)
    return buffer
