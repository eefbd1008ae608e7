"""How the GPU computes the gate and up projections, with the gather before and SwiGLU behind.

A persistent kernel like those of ``moe_kernels.gemm.kernel``, which says how tiles are found. N
routed rows of D columns, F hidden columns, E experts: ``4*N*D*F`` FLOPs; reads the tokens and
``2*E*D*F`` weights, writes ``3*N*F`` elements.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.config import Config, num_programs
from moe_kernels.gemm.tile import (
    aligned,
    blocks,
    find_rows,
    halve,
    load_window,
    swizzle,
    windows,
)
from moe_kernels.routing.tiles import Tiles
from moe_kernels.scratch import scratch


@triton.jit
def _store_strips(h_ptr, act_ptr, gate, up, start, size, row, f, F, STRIPS: tl.constexpr):
    """Store the pre-activation of some columns, if it is wanted, and their activation.

    One strip of columns after the other, so that few values live at a time. Plain stores: three
    through the copy engine would wait for each other's shared memory.
    """
    if STRIPS > 1:
        gate_0, gate_1 = halve(gate)
        up_0, up_1 = halve(up)
        half: tl.constexpr = gate_0.shape[1]
        _store_strips(h_ptr, act_ptr, gate_0, up_0, start, size, row, f, F, STRIPS // 2)
        _store_strips(h_ptr, act_ptr, gate_1, up_1, start, size, row, f + half, F, STRIPS // 2)
    else:
        dtype = act_ptr.dtype.element_ty
        within = row + tl.arange(0, gate.shape[0])
        n = (start + within).to(tl.int64)[:, None]
        column = (f + tl.arange(0, gate.shape[1]))[None, :]
        mask = (within < size)[:, None] & (column < F)
        if h_ptr is not None:
            h_ptrs = h_ptr + n * 2 * F + column
            tl.store(h_ptrs, gate.to(dtype), mask=mask)
            tl.store(h_ptrs + F, up.to(dtype), mask=mask)
        act = gate * tl.sigmoid(gate) * up
        tl.store(act_ptr + n * F + column, act.to(dtype), mask=mask)


@triton.jit
def _gate_up_kernel(
    x_ptr, x_desc, w_desc, h_ptr, act_ptr,
    slot_of_row_ptr, offsets_ptr, tile_map_ptr, num_tiles_ptr,
    N, D, F, stride_xt,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr, SUPER: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute the pre-activation ``h_NG`` and the activation ``silu(gate) * up`` of each row.

    One product gives gate and up of the same columns side by side: the block of the weight is
    BLOCK_F rows of the gate half and the same rows of the up half.

    K: routes of a token, whose rows are then gathered from ``x_ptr``; 0 if the rows lie sorted by
    expert already, and come from ``x_desc``.

    Example: K = 2, slots of rows (3, 0, ...). Row 0 is token 3 // 2 = 1, row 1 is token 0.
    """
    rows = tl.load(num_tiles_ptr)
    columns = tl.cdiv(F, BLOCK_F)
    for index in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=True):
        tile, f_block = swizzle(index, rows, columns, SUPER)
        expert, start, size, row = find_rows(tile, tile_map_ptr, offsets_ptr, N, BLOCK_N)
        f = f_block * BLOCK_F
        if K > 0:
            # Past the expert's last row: its last one again, read and not stored.
            n = start + tl.minimum(row + tl.arange(0, BLOCK_N), size - 1)
            token = (tl.load(slot_of_row_ptr + n) // K).to(tl.int64)
            d_step = tl.arange(0, BLOCK_D)
            x_ptrs = x_ptr + token[:, None] * stride_xt + d_step[None, :]  # [BLOCK_N, BLOCK_D]
        acc = tl.zeros((BLOCK_N, 2 * BLOCK_F), dtype=tl.float32)
        for d in range(0, D, BLOCK_D):
            if K == 0:
                x = load_window(x_desc, start, size, row, d, BLOCK_N, BLOCK_D)
            elif EVEN_D:
                x = tl.load(x_ptrs + d)
            else:
                x = tl.load(x_ptrs + d, mask=(d + d_step < D)[None, :], other=0.0)
            w = tl.reshape(w_desc.load([expert, 0, f, d]), (2 * BLOCK_F, BLOCK_D))
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        gate, up = halve(acc)
        _store_strips(h_ptr, act_ptr, gate, up, start, size, row, f, F, max(1, BLOCK_F // 32))


def gate_up_triton(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    offsets_E1: Tensor,
    tiles: Tiles,
    config: Config,
    slot_of_row_N: Tensor | None = None,
    top_k: int = 0,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the pre-activation ``h_NG`` and the activation ``act_NF``.

    Args:
        x_TD: Tokens, whose rows the kernel gathers; or the rows themselves, if ``top_k`` is 0.
        w_gate_up_EGD: Weights, gate first.
        offsets_E1: Where each expert's rows begin.
        tiles: The tiles for ``config.block_n``.
        config: Sizes of the tiles.
        slot_of_row_N: Route of each row, with ``top_k`` routes a token.
        top_k: K; 0 without a gather.
        keep: Whether the pre-activation is wanted; if not, it has no rows.
    """
    x, w = aligned(x_TD), aligned(w_gate_up_EGD)
    _, G, D = w.shape
    F = G // 2
    N = x.shape[0] if slot_of_row_N is None else slot_of_row_N.shape[0]
    h_NG, act_NF = scratch(x, N if keep else 0, G), scratch(x, N, F)
    n, f, d = config.block_n, config.block_f, config.block_d
    programs = num_programs(x.device, config)
    if act_NF.numel():
        _gate_up_kernel[(programs,)](
            x, None if top_k else windows(x, n, d), blocks(w.unflatten(1, (2, F)), 1, 2, f, d),
            h_NG if keep else None, act_NF, slot_of_row_N, offsets_E1, *tiles, N, D, F, x.stride(0),
            K=top_k, BLOCK_N=n, BLOCK_F=f, BLOCK_D=d, EVEN_D=D % d == 0,
            SUPER=config.super_n, PROGRAMS=programs, **config.launch,
        )  # fmt: skip
    return h_NG, act_NF
