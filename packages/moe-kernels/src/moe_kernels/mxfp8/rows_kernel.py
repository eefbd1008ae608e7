"""How the GPU quantises rows: one pass at the speed of memory.

Reads a value (two for SwiGLU) and writes a byte, and one more for 32 of them: 3.03 bytes for a
bfloat16 value, 5.03 for SwiGLU. Under ``"mxrow"`` a row is held by one program; rows of more than
``MAX_ROW`` columns are read twice.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.mxfp8.encode import (
    SHARES,
    amax_bits,
    as_rows,
    blocks_of,
    bytes_like,
    encode_rows,
    encode_tile,
    has_e4m3,
    magnitude,
    scale_code,
    sigmoid,
    store_rows,
)

TILE = 4096  # values of a program of 4 warps: 32 a thread
MAX_ROW = 16384  # columns of a row that one program holds


@triton.jit
def _load(
    x_ptr, row, live, token, weight, d_start, D, stride_xn,
    SOURCE: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return columns ``d_start`` and on of the rows to quantise, float32 ``[BLOCK_N, BLOCK_D]``."""
    d = d_start + tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d[None, :] < D)
    if SOURCE == "routed":
        row = token
    n = row.to(tl.int64)
    x = tl.load(x_ptr + n[:, None] * stride_xn + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if SOURCE == "swiglu":
        up = tl.load(x_ptr + n[:, None] * stride_xn + D + d[None, :], mask=mask, other=0.0)
        x = x * sigmoid(x, HARDWARE) * up.to(tl.float32)
    if SOURCE == "routed":
        x = x * weight[:, None]
    return x


@triton.jit
def _quantize_rows_kernel(
    x_ptr, slot_of_row_ptr, weight_ptr, offsets_ptr, data_ptr, scale_ptr,
    N, D, E, stride_xn,
    SOURCE: tl.constexpr, K: tl.constexpr, SHARE: tl.constexpr, RCEIL: tl.constexpr,
    HARDWARE: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Quantise BLOCK_N rows: BLOCK_D of their columns, or all where rows share a scale.

    SOURCE says what a row is: ``"plain"`` a row of ``x``; ``"swiglu"`` the activation of a row of
    ``x``, which has 2*D columns; ``"routed"`` the token of the row's slot, times the slot's weight.
    Rows past the last offset, if there are offsets, and rows of no slot give zeros. WHOLE: a tile
    holds whole rows.

    Example: one row (1, 2, .., 32), RCEIL. Its largest value is 32 = 1 * 2**5, so the code is
    5 - 8 + 127 = 124; the scale is 1/8 and the bytes are those of 8, 16, .., 256.
    """
    if SHARE > 0:
        tiles = tl.cdiv(D, BLOCK_D)
        n_tile, d_start = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_D
    else:
        n_tile, d_start = tl.program_id(0), 0
    row = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n, inside = row.to(tl.int64), row < N
    live, token, weight = inside, row, 1.0
    if offsets_ptr is not None:
        live = inside & (row < tl.load(offsets_ptr + E))
    if SOURCE == "routed":
        slot = tl.load(slot_of_row_ptr + row, mask=inside, other=-1)
        live = slot >= 0
        token = slot // K
        weight = tl.load(weight_ptr + slot, mask=live, other=0.0)
    if SHARE > 0 or WHOLE:
        share: tl.constexpr = SHARE if SHARE > 0 else BLOCK_D  # pyrefly: ignore
        x = _load(x_ptr, row, live, token, weight, d_start, D, stride_xn, SOURCE, HARDWARE, BLOCK_D)
        data, codes = encode_tile(x, share, RCEIL, HARDWARE)
        store_rows(data_ptr, scale_ptr, data, codes, n, inside, d_start, D, D)
    else:
        most = tl.zeros((BLOCK_N,), dtype=tl.uint32)
        for d_start in range(0, D, BLOCK_D):
            x = _load(
                x_ptr, row, live, token, weight, d_start, D, stride_xn, SOURCE, HARDWARE, BLOCK_D
            )
            most = tl.maximum(most, tl.max(magnitude(x), axis=1))
        code = scale_code(amax_bits(most), RCEIL)
        for d_start in range(0, D, BLOCK_D):
            x = _load(
                x_ptr, row, live, token, weight, d_start, D, stride_xn, SOURCE, HARDWARE, BLOCK_D
            )
            data, codes = encode_rows(x, code, HARDWARE)
            store_rows(data_ptr, scale_ptr, data, codes, n, inside, d_start, D, D)


def launch(D: int, recipe: str) -> dict[str, int | bool]:
    """Return the sizes for D columns: 32 values a thread, whole rows if they share a scale."""
    if recipe == "mxrow":
        block_d = min(triton.next_power_of_2(D), MAX_ROW)
    else:
        block_d = min(max(D & -D, SHARES[recipe]), 1024)  # no column is masked, if that can be
    block_n = max(1, TILE // block_d)
    return {
        "WHOLE": block_d >= D,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "num_warps": max(1, block_n * block_d // 1024),
    }


def _run(
    source: str,
    x: Tensor,
    num_rows: int,
    D: int,
    recipe: str,
    rounding: str,
    routes: tuple[Tensor, Tensor] | None = None,
    offsets_E1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch, and return bytes and scales ``[num_rows, D]``."""
    data, scale = bytes_like(x, num_rows, D)
    if num_rows and D:
        slot_of_row_N, weight_TK = routes if routes else (None, None)
        sizes = launch(D, recipe)
        across = triton.cdiv(D, sizes["BLOCK_D"]) if SHARES[recipe] else 1
        _quantize_rows_kernel[(triton.cdiv(num_rows, sizes["BLOCK_N"]) * across,)](
            x, slot_of_row_N, weight_TK, offsets_E1, data, scale,
            num_rows, D, 0 if offsets_E1 is None else offsets_E1.shape[0] - 1, x.stride(0),
            SOURCE=source, K=1 if weight_TK is None else weight_TK.shape[1], SHARE=SHARES[recipe],
            RCEIL=rounding == "rceil", HARDWARE=has_e4m3(x), **sizes,
        )  # fmt: skip
    return data, scale


def quantize_triton(x_ND: Tensor, recipe: str, rounding: str) -> tuple[Tensor, Tensor]:
    """Return bytes and scales of ``x_ND``, of any number of axes, along the last."""
    rows = as_rows(x_ND)
    N, D = rows.shape
    data, scale = _run("plain", rows, N, D, recipe, rounding)
    return data.view(x_ND.shape), scale.view(blocks_of(x_ND.shape))


def quantize_swiglu_triton(
    h_NG: Tensor, recipe: str, rounding: str, offsets_E1: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return bytes and scales of the activation; zeros past the last offset."""
    h = as_rows(h_NG)
    N, G = h.shape
    if offsets_E1 is not None:
        offsets_E1 = offsets_E1.contiguous()
    return _run("swiglu", h, N, G // 2, recipe, rounding, offsets_E1=offsets_E1)


def quantize_routed_triton(
    x_TD: Tensor, slot_of_row_N: Tensor, weight_TK: Tensor, recipe: str, rounding: str
) -> tuple[Tensor, Tensor]:
    """Return bytes and scales of each row's weighted token; zeros for a slot of -1."""
    routes = (slot_of_row_N.contiguous(), weight_TK.contiguous())
    x = as_rows(x_TD)
    return _run("routed", x, len(slot_of_row_N), x.shape[1], recipe, rounding, routes)
