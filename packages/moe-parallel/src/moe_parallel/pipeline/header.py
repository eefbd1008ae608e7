"""The few numbers that go ahead of each message and say what it is: shapes, or a failure."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_parallel.pipeline.failure import Failure

MAX_TENSORS, MAX_DIMS = 8, 8
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_PER_TENSOR = 3 + MAX_DIMS
LENGTH = 1 + MAX_TENSORS * _PER_TENSOR
_FAILED = -1


class Form(NamedTuple):
    """What a tensor looks like.

    Attributes:
        dtype: Its dtype.
        requires_grad: Whether its sender wants a gradient for it.
        shape: Its shape.
    """

    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]


def write_header(tensors: Sequence[Tensor]) -> Tensor:
    """Return int64 numbers that describe ``tensors``.

    Raises:
        ValueError: If there are more tensors or axes, or another dtype, than a header has room for.
    """
    if len(tensors) > MAX_TENSORS:
        raise ValueError(f"a stage may pass on {MAX_TENSORS} tensors, got {len(tensors)}")
    numbers = [len(tensors)]
    for tensor in tensors:
        if tensor.ndim > MAX_DIMS:
            raise ValueError(f"a tensor between stages may have {MAX_DIMS} axes, got {tensor.ndim}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{tensor.dtype} cannot be sent between stages; usable: {DTYPES}")
        numbers += [DTYPES.index(tensor.dtype), tensor.requires_grad, tensor.ndim, *tensor.shape]
        numbers += [0] * (MAX_DIMS - tensor.ndim)
    return _pad(numbers)


def write_failure(failure: Failure) -> Tensor:
    """Return int64 numbers that tell of a failure instead."""
    return _pad([_FAILED, *failure.encode()])


def read_header(header: Tensor) -> list[Form] | Failure:
    """Read what ``write_header`` or ``write_failure`` wrote."""
    numbers = header.tolist()
    if numbers[0] == _FAILED:
        return Failure.decode(numbers[1:5])
    forms = []
    for i in range(numbers[0]):
        dtype, requires_grad, ndim, *shape = numbers[1 + i * _PER_TENSOR :][:_PER_TENSOR]
        forms.append(Form(DTYPES[dtype], bool(requires_grad), tuple(shape[:ndim])))
    return forms


def _pad(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers + [0] * (LENGTH - len(numbers)), dtype=torch.int64)
