"""One planned block of memory for the rows that layers keep from forward to backward.

Tensors of rows are as long as the buffer is, since the host does not know how many rows came.
Kept like that, they would cost the worst case in every layer at once. The arena keeps the rows
that came, one after the other, at a cursor on the device; backward gets them back at full length.
"""

from typing import Any

import torch
from torch import Tensor

from moe_dispatch.arena.kernel import pack_kernel, reserve_kernel
from moe_dispatch.rowwise.channel import interpreted_in_turn

UNIT = 16
MAX_BLOCK = 2048
_WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))


class _Packed:
    """A tensor in the arena. What it takes is given back when autograd lets go of it."""

    def __init__(self, arena: "RowArena", rows: Tensor, start_1: Tensor, count_1: Tensor):
        self.arena, self.start_1, self.count_1 = arena, start_1, count_1
        self.shape, self.dtype = rows.shape, rows.dtype

    def __del__(self) -> None:
        self.arena._give_back(self)


class RowArena:
    """Keeps the rows that came, for any experts.

    Rows go in where tensors of R rows are saved for backward within ``saving``, and come out when
    backward asks for them. What is given back last is free at once, all of it when nothing is
    kept any more: backward in the opposite order of forward never fills it up.

    If it overflows, ``overflow`` says so on the device, like that of a dispatcher with ``"retry"``:
    what backward then gets is zeros, and the step is worth nothing.

    Args:
        num_bytes: Room for the rows of all layers in flight.
        device: Of the rows. On a CPU it needs Triton's interpreter.

    Attributes:
        overflow: int64 ``[1]``, on the device: 16-byte units that were missing, at most; sticky.

    Examples:
        >>> arena = RowArena(1024, "cpu")
        >>> x_RD = torch.tensor([[1.0], [2.0], [7.0]], requires_grad=True)  # two rows came
        >>> with arena.saving(3, torch.tensor([2], dtype=torch.int32)):
        ...     y_RD = x_RD * x_RD
        >>> y_RD[:2].sum().backward()
        >>> x_RD.grad.flatten()
        tensor([2., 4., 0.])
    """

    def __init__(self, num_bytes: int, device: str | torch.device):
        self._memory = torch.empty(num_bytes // UNIT * UNIT, dtype=torch.uint8, device=device)
        self._cursor_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.overflow = torch.zeros(1, dtype=torch.int64, device=device)
        self._kept: list[int] = []

    @property
    def used(self) -> Tensor:
        """int64 ``[1]``, on the device: 16-byte units that are taken."""
        return self._cursor_1

    def saving(self, num_rows: int, count_1: Tensor) -> Any:
        """Return a context in which tensors of rows that are saved for backward are packed.

        Args:
            num_rows: R: tensors with so many rows are packed, others are saved as always.
            count_1: int32 ``[1]``: how many rows came, such as ``offsets_e1[-1:]``.
        """

        def pack(tensor: Tensor) -> Tensor | _Packed:
            rows = tensor.ndim > 1 and len(tensor) == num_rows and tensor.numel() > 0
            if not rows or not tensor.is_contiguous() or tensor.device != self._memory.device:
                return tensor
            return self._pack(tensor.detach(), count_1)

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _pack(self, rows: Tensor, count_1: Tensor) -> _Packed:
        units = -(-rows[0].nbytes // UNIT)
        packed = _Packed(self, rows, torch.empty_like(self._cursor_1), count_1.clone())
        self._kept.append(id(packed))
        interpreted_in_turn(
            reserve_kernel, (1,), self._cursor_1, packed.start_1, packed.count_1, self.overflow,
            self._memory.numel() // UNIT, UNITS=units, num_warps=1,
        )  # fmt: skip
        self._copy(rows, packed, units, unpack=False)
        return packed

    def _unpack(self, kept: Tensor | _Packed) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        rows = torch.empty(kept.shape, dtype=kept.dtype, device=self._memory.device)
        self._copy(rows, kept, -(-rows[0].nbytes // UNIT), unpack=True)
        return rows

    def _copy(self, rows: Tensor, packed: _Packed, units: int, unpack: bool) -> None:
        row_bytes = rows[0].nbytes
        size, word = next(pair for pair in _WORDS if row_bytes % pair[0] == 0)
        words = rows.reshape(len(rows), -1).view(word)
        columns = row_bytes // size
        block = min(MAX_BLOCK, max(16, 1 << (columns - 1).bit_length()))
        interpreted_in_turn(
            pack_kernel, (len(rows),), words, self._memory.view(word), packed.start_1,
            packed.count_1, N=columns, UNITS=units, PER_UNIT=UNIT // size, BLOCK=block,
            UNPACK=unpack,
        )  # fmt: skip

    def _give_back(self, packed: _Packed) -> None:
        """Move the cursor back if nothing lies behind; the stream keeps the order of uses."""
        if id(packed) not in self._kept:
            return
        last = self._kept[-1] == id(packed)
        self._kept.remove(id(packed))
        if not self._kept:
            self._cursor_1.zero_()
        elif last:
            torch.where(packed.start_1 < 0, self._cursor_1, packed.start_1, out=self._cursor_1)
