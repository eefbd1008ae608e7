"""What the grouped products share: which tile a program computes, and windows of rows.

A window is the rows of one expert. The copy engine clips loads and stores to it, so a tile that
reaches past its expert's last row reads zeros there and writes nothing: no masks and no padding.
The descriptor of a window is made once for all experts. It describes a tensor ``[N, C]`` by four
axes with the strides ``(2**34 - S, S, S, 1)``, where S is the stride of a row. The coordinates
``(2**30, start + size, 2**30 - size + row, column)`` then lie at the element

    2**30 * (2**34 - S) + (start + size) * S + (2**30 - size + row) * S + column
    = 2**64 + (start + row) * S + column

and addresses wrap at ``2**64``. The third axis ends at ``2**30``, so ``row < size`` is all that
the hardware lets through. Triton's own ``tools/ragged_tma.py`` describes the same device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # bytes: what the copy engine asks of addresses and strides
WINDOW = 1 << 30


def is_aligned(x: Tensor) -> bool:
    """Tell whether the copy engine can read ``x``: unit stride last, the others aligned."""
    if x.stride(-1) != 1 or x.data_ptr() % ALIGNMENT:
        return False
    return all(s > 0 and s * x.element_size() % ALIGNMENT == 0 for s in x.stride()[:-1])


def aligned(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy of it if the copy engine cannot read it as it lies."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def windows(x_NC: Tensor, block_n: int, block_c: int) -> TensorDescriptor:
    """Describe the rows of ``x_NC`` for ``load_window`` and ``store_window``."""
    step, C = x_NC.stride(0), x_NC.shape[1]
    return TensorDescriptor(
        x_NC,
        [0x7FFF0000, 0x7FFF0000, WINDOW, C],
        [2**34 - step, step, step, 1],
        [1, 1, block_n, block_c],
    )


def blocks(x: Tensor, *block: int) -> TensorDescriptor:
    """Describe ``x`` in blocks, one size an axis."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


@triton.jit
def _coordinates(start, size, row):
    # WINDOW, which a kernel cannot read.
    window: tl.constexpr = 1 << 30  # pyrefly: ignore[bad-assignment]
    return window, start + size, window - size + row


@triton.jit
def load_window(desc, start, size, row, column, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load rows ``start + row`` and on; zeros from ``start + size`` on."""
    z, y, x = _coordinates(start, size, row)
    return tl.reshape(desc.load([z, y, x, column]), (BLOCK_N, BLOCK_C))


@triton.jit
def store_window(desc, start, size, row, column, block):
    """Store rows ``start + row`` and on, up to and without ``start + size``."""
    z, y, x = _coordinates(start, size, row)
    desc.store([z, y, x, column], tl.reshape(block, (1, 1, block.shape[0], block.shape[1])))


@triton.jit
def swizzle(index, rows, columns, SUPER: tl.constexpr):
    """Return the row and the column of the ``index``-th of ``rows * columns`` tiles.

    SUPER neighbouring rows go through all columns together, so that what they share stays in L2.

    Example: rows = 3, columns = 2, SUPER = 2. The order is (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    first = index // (SUPER * columns) * SUPER
    size = tl.minimum(rows - first, SUPER)
    within = index % (SUPER * columns)
    return first + within % size, within // size


@triton.jit
def find_rows(tile, tile_map_ptr, offsets_ptr, N, BLOCK_N: tl.constexpr):
    """Return expert, first row, number of rows of the expert, and where in them the tile begins.

    Example: offsets (0, 5, 5, 8), BLOCK_N = 4. The map holds (expert 0, block 0), (0, 1), (2, 0);
    tile 1 is rows 4:5 of expert 0: (0, 0, 5, 4).
    """
    code = tl.load(tile_map_ptr + tile)
    expert = code & 0xFFF
    start = tl.load(offsets_ptr + expert)
    end = tl.minimum(tl.load(offsets_ptr + expert + 1), N)
    return expert, start, end - start, (code >> 12) * BLOCK_N


@triton.jit
def halve(block):
    """Return the left and the right half of the columns; nothing moves between threads."""
    pairs = tl.reshape(block, (block.shape[0], 2, block.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))
