"""How the GPU differentiates SwiGLU and quantises the gradient: one pass over rows.

For bfloat16 it reads ``6*N*F`` bytes and writes ``8.06*N*F``: the gradient twice, in MXFP8 for the
gradient of the rows and as it is for that of the weight, and the activation. Under ``"mxrow"`` the
scale of a row comes from a first pass over it, whose reads the second finds in the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.mxfp8.encode import (
    SHARES,
    amax_bits,
    as_rows,
    bytes_like,
    encode_rows,
    encode_tile,
    has_e4m3,
    magnitude,
    scale_code,
    sigmoid,
    store_rows,
)
from moe_kernels.mxfp8.format import BLOCK
from moe_kernels.scratch import scratch

TILE = 2048  # values of each half that a program of 4 warps holds: 16 a thread
MAX_BLOCK = 512  # columns of a tile


@triton.jit
def _differentiate(
    dact_ptr, h_ptr, n, end, weight, f_start, F, stride_dn, stride_hn,
    HARDWARE: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Return gradients of gate and up, the activation, and its product with its gradient.

    All are float32 ``[BLOCK_N, BLOCK_F]``, the first three times the weight; 0 past the last
    column, and in rows from ``end`` on.
    """
    f = f_start + tl.arange(0, BLOCK_F)[None, :]
    mask = (n < end)[:, None] & (f < F)
    wide = n.to(tl.int64)[:, None]
    at = h_ptr + wide * stride_hn + f
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
    at = dact_ptr + wide * stride_dn + f
    dact = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    share = sigmoid(gate, HARDWARE)
    silu = gate * share
    act = silu * up
    product = dact * act
    dact *= weight
    dgate = dact * up * (share + silu * (1 - share))
    return dgate, dact * silu, act * weight, product


@triton.jit
def _quantize_dswiglu_kernel(
    dact_ptr, h_ptr, offsets_ptr, weight_ptr, slot_of_row_ptr,
    data_ptr, scale_ptr, dh_ptr, act_ptr, dweight_ptr,
    N, F, E, stride_dn, stride_hn,
    SHARE: tl.constexpr, RCEIL: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Differentiate ``weight * silu(gate) * up`` in BLOCK_N rows, quantise, store both.

    Rows past the last offset are not read and give zeros.

    Example: F = 32, weight 2, dact = 1, gate = 0, up = 3: dgate = 2 * 3 / 2 = 3 and dup = 0.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = row.to(tl.int64)
    inside, end = row < N, tl.load(offsets_ptr + E)
    weight = tl.full((BLOCK_N, 1), 1.0, dtype=tl.float32)
    if weight_ptr is not None:
        slot = tl.load(slot_of_row_ptr + n, mask=row < end, other=-1)
        weight = tl.load(weight_ptr + slot, mask=slot >= 0, other=0.0)[:, None]
    code = tl.zeros((BLOCK_N,), dtype=tl.int32)
    if SHARE == 0:
        most = tl.zeros((BLOCK_N,), dtype=tl.uint32)
        for f_start in range(0, F, BLOCK_F):
            dgate, dup, _, _ = _differentiate(
                dact_ptr, h_ptr, n, end, weight, f_start, F, stride_dn, stride_hn,
                HARDWARE, BLOCK_F,
            )  # fmt: skip
            both = tl.maximum(magnitude(dgate), magnitude(dup))
            most = tl.maximum(most, tl.max(both, axis=1))
        code = scale_code(amax_bits(most), RCEIL)
    total = tl.zeros((BLOCK_N, BLOCK_F), dtype=tl.float32)
    for f_start in range(0, F, BLOCK_F):
        dgate, dup, act, product = _differentiate(
            dact_ptr, h_ptr, n, end, weight, f_start, F, stride_dn, stride_hn, HARDWARE, BLOCK_F
        )
        total += product
        if SHARE > 0:
            gate_data, gate_codes = encode_tile(dgate, SHARE, RCEIL, HARDWARE)
            up_data, up_codes = encode_tile(dup, SHARE, RCEIL, HARDWARE)
        else:
            gate_data, gate_codes = encode_rows(dgate, code, HARDWARE)
            up_data, up_codes = encode_rows(dup, code, HARDWARE)
        store_rows(data_ptr, scale_ptr, gate_data, gate_codes, n, inside, f_start, F, 2 * F)
        store_rows(data_ptr, scale_ptr, up_data, up_codes, n, inside, F + f_start, 2 * F, 2 * F)
        dtype = act_ptr.dtype.element_ty
        f = f_start + tl.arange(0, BLOCK_F)[None, :]
        mask = inside[:, None] & (f < F)
        tl.store(act_ptr + n[:, None] * F + f, act.to(dtype), mask=mask)
        at = dh_ptr + n[:, None] * 2 * F + f
        tl.store(at, dgate.to(dtype), mask=mask)
        tl.store(at + F, dup.to(dtype), mask=mask)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + n, tl.sum(total, axis=1), mask=inside)


def launch(F: int, recipe: str) -> dict[str, int]:
    """Return the sizes for F columns: 16 values of each half a thread."""
    block_f = min(max(F & -F, SHARES[recipe], BLOCK), MAX_BLOCK)
    return {"BLOCK_N": TILE // block_f, "BLOCK_F": block_f, "num_warps": 4}


def quantize_dswiglu_triton(
    dact_NF: Tensor,
    h_NG: Tensor,
    offsets_E1: Tensor,
    weight_TK: Tensor | None,
    slot_of_row_N: Tensor | None,
    recipe: str,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return bytes and scales of the gradient, ``dh_NG``, ``act_NF`` and ``dweight_N``."""
    dact, h = as_rows(dact_NF), as_rows(h_NG)
    N, F = dact.shape
    data, scale = bytes_like(h, N, 2 * F)
    dh_NG, act_NF, dweight_N = scratch(h, N, 2 * F), scratch(h, N, F), None
    if weight_TK is not None and slot_of_row_N is not None:
        weight_TK, slot_of_row_N = weight_TK.contiguous(), slot_of_row_N.contiguous()
        dweight_N = scratch(h, N, dtype=torch.float32)
    if N and F:
        sizes = launch(F, recipe)
        _quantize_dswiglu_kernel[(triton.cdiv(N, sizes["BLOCK_N"]),)](
            dact, h, offsets_E1.contiguous(), weight_TK, slot_of_row_N,
            data, scale, dh_NG, act_NF, dweight_N,
            N, F, offsets_E1.shape[0] - 1, dact.stride(0), h.stride(0),
            SHARE=SHARES[recipe], RCEIL=rounding == "rceil", HARDWARE=has_e4m3(h), **sizes,
        )  # fmt: skip
    return data, scale, dh_NG, act_NF, dweight_N
