"""The same bits from the same run, on a GPU too."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

_MEMORY: Any = deterministic  # its switch is a property that type checkers do not see


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Let torch refuse what may give other bits in another run, while the block runs.

    Our own kernels are deterministic always; this is for torch's. cuBLAS has to be told before its
    first product. New memory is not filled, which would cost a pass over each tensor and which
    nothing here depends on.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _MEMORY.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    _MEMORY.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _MEMORY.fill_uninitialized_memory = before[2]
