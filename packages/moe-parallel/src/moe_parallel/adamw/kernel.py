"""AdamW and the sum of squares as Triton kernels: one pass over memory each.

Cost per element, float32 state and bfloat16 parameters, in bytes: 4 read for the norm; for the
update 16 read (gradient, weight, two moments) and 14 written (weight, moments, parameter).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Eight elements for each thread of four warps: two loads of 16 bytes of each operand.
BLOCK = 1024
CHUNK = tl.constexpr(64)  # elements that share one weight decay: parameters start at multiples


@triton.jit
def adamw_kernel(
    master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, parameter_ptr, decay_ptr, scalars_ptr,
    S, lr, beta1, beta2, eps,
    HAS_COPY: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Update BLOCK_S elements; if the step is skipped, touch none.

    ``scalars_ptr`` holds what only the device knows, four float32: the clip coefficient, 1 if the
    step is skipped, and the corrections ``1 / (1 - beta1**t)`` and ``1 / sqrt(1 - beta2**t)``.

    Example: w = 1, g = 0.5, both moments 0, t = 1, lr = 0.1, no decay. m = 0.1 * 0.5 = 0.05 and
    v = 0.05 * 0.25 = 0.0125; corrected 0.5 and 0.25, so w becomes 1 - 0.1 * 0.5 / 0.5 = 0.9.
    """
    if tl.load(scalars_ptr + 1) == 0.0:
        coef = tl.load(scalars_ptr)
        correction1 = tl.load(scalars_ptr + 2)
        correction2 = tl.load(scalars_ptr + 3)
        # 64-bit: a slice may have more than 2**31 elements.
        at_S = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
        inside_S = at_S < S
        grad_S = tl.load(grad_ptr + at_S, mask=inside_S, other=0.0) * coef
        exp_avg_S = tl.load(exp_avg_ptr + at_S, mask=inside_S, other=0.0)
        exp_avg_sq_S = tl.load(exp_avg_sq_ptr + at_S, mask=inside_S, other=0.0)
        master_S = tl.load(master_ptr + at_S, mask=inside_S, other=0.0)
        decay_S = tl.load(decay_ptr + at_S // CHUNK, mask=inside_S, other=0.0)
        exp_avg_S = beta1 * exp_avg_S + (1 - beta1) * grad_S
        exp_avg_sq_S = beta2 * exp_avg_sq_S + (1 - beta2) * grad_S * grad_S
        root_S = tl.sqrt(exp_avg_sq_S) * correction2
        master_S -= lr * decay_S * master_S
        master_S -= lr * correction1 * exp_avg_S / (root_S + eps)
        tl.store(exp_avg_ptr + at_S, exp_avg_S, mask=inside_S)
        tl.store(exp_avg_sq_ptr + at_S, exp_avg_sq_S, mask=inside_S)
        tl.store(master_ptr + at_S, master_S, mask=inside_S)
        if HAS_COPY:
            parameter_S = master_S.to(parameter_ptr.dtype.element_ty)
            tl.store(parameter_ptr + at_S, parameter_S, mask=inside_S)


@triton.jit
def squares_kernel(x_ptr, partial_ptr, N, BLOCK_N: tl.constexpr, STEPS: tl.constexpr):
    """Write the sum of squares of STEPS * BLOCK_N elements, added in float64, to one place.

    Each program has its own place and nothing is added atomically, so the sum repeats bit by bit.
    Example: x = [3, 4], one program: partial = [25].
    """
    total = tl.zeros([BLOCK_N], dtype=tl.float64)
    start = tl.program_id(0).to(tl.int64) * (BLOCK_N * STEPS)
    for step in range(STEPS):
        at_N = start + step * BLOCK_N + tl.arange(0, BLOCK_N)
        x_N = tl.load(x_ptr + at_N, mask=at_N < N, other=0.0).to(tl.float64)
        total += x_N * x_N
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, axis=0))


def launch_adamw(
    master_S: Tensor,
    grad_S: Tensor,
    exp_avg_S: Tensor,
    exp_avg_sq_S: Tensor,
    parameter_S: Tensor | None,
    decay_C: Tensor,
    scalars_4: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update a slice, and its copy in the dtype of the parameters if there is one."""
    size = master_S.numel()
    grid = (triton.cdiv(size, BLOCK),)
    adamw_kernel[grid](
        master_S, grad_S, exp_avg_S, exp_avg_sq_S,
        master_S if parameter_S is None else parameter_S, decay_C, scalars_4,
        size, lr, betas[0], betas[1], eps,
        HAS_COPY=parameter_S is not None, BLOCK_S=BLOCK,
    )  # fmt: skip


def launch_squares(x_N: Tensor) -> Tensor:
    """Return the sum of squares, 0-dim float64."""
    steps = 8
    programs = triton.cdiv(x_N.numel(), BLOCK * steps)
    partial_B = torch.empty(programs, dtype=torch.float64, device=x_N.device)
    squares_kernel[(programs,)](x_N, partial_B, x_N.numel(), BLOCK_N=BLOCK, STEPS=steps)
    return partial_B.sum()
