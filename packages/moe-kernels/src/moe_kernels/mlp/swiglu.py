"""SwiGLU and its gradient, from the pre-activation alone.

Inputs may be half precision; arithmetic and results are float32 then (float64 for float64).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.gemm.reference import accumulator


def swiglu(h_NG: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of the two halves of ``h_NG``, gate first."""
    gate_NF, up_NF = h_NG.to(accumulator(h_NG.dtype)).chunk(2, dim=1)
    return F.silu(gate_NF).mul_(up_NF)


class SwigluGrad(NamedTuple):
    """What the backward of a weighted SwiGLU gives.

    Attributes:
        dh_NG: Gradient of the pre-activation.
        act_NF: The activation, times the row's weight if it has one.
        dweight_N: Gradient of the row's weight; None if it has none.
    """

    dh_NG: Tensor
    act_NF: Tensor
    dweight_N: Tensor | None


def swiglu_grad(h_NG: Tensor, dact_NF: Tensor, weight_N: Tensor | None) -> SwigluGrad:
    """Recompute the activation and differentiate ``weight * swiglu(h)``.

    ``dact_NF`` is the gradient of the weighted activation; it is overwritten if it is wide. The
    gradient of a row's weight, <dy, y>, equals <dact, act>: so the output is never needed.
    """
    wide = accumulator(h_NG.dtype)
    gate_NF, up_NF = h_NG.to(wide).chunk(2, dim=1)
    dact_NF = dact_NF.to(wide)
    silu_NF = F.silu(gate_NF)
    act_NF = silu_NF * up_NF
    dweight_N = None
    if weight_N is not None:
        dweight_N = (dact_NF * act_NF).sum(dim=1)
        dact_NF.mul_(weight_N[:, None])
        act_NF.mul_(weight_N[:, None])
    dh_NG = torch.empty_like(h_NG, dtype=wide)
    dgate_NF, dup_NF = dh_NG.chunk(2, dim=1)
    torch.mul(dact_NF, silu_NF, out=dup_NF)
    torch.ops.aten.silu_backward.grad_input(dact_NF.mul_(up_NF), gate_NF, grad_input=dgate_NF)
    return SwigluGrad(dh_NG, act_NF, dweight_N)
