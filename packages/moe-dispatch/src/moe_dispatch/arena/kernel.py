"""How rows are packed into an arena whose fill level only the device knows."""

import triton
import triton.language as tl


@triton.jit
def reserve_kernel(cursor_ptr, start_ptr, count_ptr, overflow_ptr, room, UNITS: tl.constexpr):
    """Take room for ``count`` rows of UNITS * 16 bytes, or note how much is missing.

    Example: 3 rows of 2 units at cursor 10 with room for 20: start is 10, the cursor is 16.
    """
    start = tl.load(cursor_ptr)
    end = start + tl.load(count_ptr).to(tl.int64) * UNITS
    fits = end <= room
    tl.store(start_ptr, tl.where(fits, start, -1))
    tl.store(cursor_ptr, tl.where(fits, end, start))
    tl.atomic_max(overflow_ptr, tl.where(fits, end * 0, end - room))


@triton.jit
def pack_kernel(
    rows_ptr, arena_ptr, start_ptr, count_ptr,
    N: tl.constexpr, UNITS: tl.constexpr, PER_UNIT: tl.constexpr, BLOCK: tl.constexpr,
    UNPACK: tl.constexpr,
):  # fmt: skip
    """Program r copies row r into the arena, or out of it; rows that never came become zeros."""
    r = tl.program_id(0).to(tl.int64)
    start = tl.load(start_ptr)
    here = (r < tl.load(count_ptr)) & (start >= 0)
    packed_ptr = arena_ptr + (tl.maximum(start, 0) + r * UNITS) * PER_UNIT
    width = tl.where(here, N, 0)
    for first in tl.static_range(0, N, BLOCK):
        n = first + tl.arange(0, BLOCK)
        if UNPACK:
            row = tl.load(packed_ptr + n, mask=n < width, other=0)
            tl.store(rows_ptr + r * N + n, row, mask=n < N)
        else:
            row = tl.load(rows_ptr + r * N + n, mask=n < width, other=0)
            tl.store(packed_ptr + n, row, mask=n < width)
