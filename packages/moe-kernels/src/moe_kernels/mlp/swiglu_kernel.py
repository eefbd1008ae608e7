"""How the GPU differentiates SwiGLU: one pass over rows, at the speed of memory.

Reads ``3*N*F`` elements and writes ``3*N*F``. It is a kernel of its own, though it could stand
behind the product that gives ``dact``: what a tile's end takes, the tensor cores of Hopper wait
for, and that was longer than this pass (docs/design).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.scratch import scratch


@triton.jit
def _dswiglu_kernel(
    dact_ptr, h_ptr, dh_ptr, act_ptr, dweight_ptr, weight_ptr, slot_of_row_ptr, offsets_ptr,
    N, E, F,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Differentiate ``weight * silu(gate) * up`` in row ``program_id(0)``.

    Writes the gradient of gate and up, the weighted activation (over ``dact``), and the gradient of
    the row's weight: <dy, y> equals <dact, act>, so the output need not be kept. Rows past the last
    offset are left alone.

    weight_ptr: weights of the routes, or None: then they are 1, and ``dweight_ptr`` is None.

    Example: F = 2, weight 2, act = (1, 3), dact = (5, 7). The weight gets 1*5 + 3*7 = 26, and
    the stored activation is (2, 6).
    """
    row = tl.program_id(0)
    if row < tl.load(offsets_ptr + E):
        n = row.to(tl.int64)
        weight = 1.0
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + tl.load(slot_of_row_ptr + n))
        total = tl.zeros((BLOCK_F,), dtype=tl.float32)
        for f_start in range(0, F, BLOCK_F):
            f = f_start + tl.arange(0, BLOCK_F)
            mask = f < F
            gate = tl.load(h_ptr + n * 2 * F + f, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(h_ptr + n * 2 * F + F + f, mask=mask, other=0.0).to(tl.float32)
            dact = tl.load(dact_ptr + n * F + f, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            act = silu * up
            total += dact * act
            dact *= weight
            dgate = dact * up * (sigmoid + silu * (1 - sigmoid))
            dtype = act_ptr.dtype.element_ty
            tl.store(act_ptr + n * F + f, (act * weight).to(dtype), mask=mask)
            tl.store(dh_ptr + n * 2 * F + f, dgate.to(dtype), mask=mask)
            tl.store(dh_ptr + n * 2 * F + F + f, (dact * silu).to(dtype), mask=mask)
        if dweight_ptr is not None:
            tl.store(dweight_ptr + n, tl.sum(total))


def launch(F: int) -> dict[str, int]:
    """Return the sizes for F columns: 8 values a thread, 16 bytes of half precision."""
    block = min(triton.next_power_of_2(F), 512)
    return {"BLOCK_F": block, "num_warps": max(1, block // 256)}


def dswiglu_triton(
    dact_NF: Tensor,
    h_NG: Tensor,
    offsets_E1: Tensor,
    weight_TK: Tensor | None = None,
    slot_of_row_N: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``dh_NG``, the weighted activation (in the memory of ``dact_NF``) and ``dweight_N``.

    Args:
        dact_NF: Gradient of the weighted activation; overwritten.
        h_NG: The saved pre-activation, contiguous.
        offsets_E1: Where each expert's rows begin; rows past the last are left as they are.
        weight_TK: float32 weights of the routes, contiguous, or None: then they are 1.
        slot_of_row_N: Route of each row.
    """
    N, F = dact_NF.shape
    dh_NG = scratch(dact_NF, N, 2 * F)
    dweight_N = None if weight_TK is None else scratch(dact_NF, N, dtype=torch.float32)
    if N and F:
        _dswiglu_kernel[(N,)](
            dact_NF, h_NG, dh_NG, dact_NF, dweight_N, weight_TK, slot_of_row_N, offsets_E1,
            N, offsets_E1.shape[0] - 1, F, **launch(F),
        )  # fmt: skip
    return dh_NG, dact_NF, dweight_N
