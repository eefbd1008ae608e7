"""Expert MLPs: a SwiGLU feed-forward network for each expert, over the rows routed to it."""

from torch import Tensor

from moe_kernels.mlp import op
from moe_kernels.mlp.check import check_expert_mlp, check_grouped_mlp
from moe_kernels.mlp.rows import RoutedRows, route_rows
from moe_kernels.mlp.unfused import expert_mlp_unfused

__all__ = ["expert_mlp", "grouped_mlp"]


def grouped_mlp(
    x_RD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, offsets_E1: Tensor
) -> Tensor:
    """Apply to each group of rows its own expert, ``(silu(x @ g.T) * (x @ u.T)) @ w_down.T``.

    ``g`` and ``u`` are the first and the last F rows of ``w_gate_up_EGD[e]``. Saves the rows and
    the pre-activation for backward. Rows at or past ``offsets_E1[-1]`` are not read and give zeros,
    in the output and in the gradient; weight gradients of experts without rows are exactly zero.

    Args:
        x_RD: Rows sorted by expert. bfloat16, float16, float32 or float64.
        w_gate_up_EGD: Gate and up projection of each expert, gate first; G = 2*F.
        w_down_EDF: Down projection of each expert.
        offsets_E1: int32, starts at 0, does not decrease, ends at or before R. Where reading it
            makes nobody wait (CPU), it is checked.

    Returns:
        ``y_RD``, in ``x_RD.dtype``.

    Raises:
        ValueError: If shapes or devices do not fit together, or D or F is not a multiple of 16 on
            CUDA.
        TypeError: If a dtype does not fit.

    Examples:
        >>> import torch
        >>> w_gate_up_EGD, w_down_EDF = torch.ones(2, 2, 1), torch.ones(2, 1, 1)
        >>> x_RD = torch.ones(3, 1)
        >>> grouped_mlp(x_RD, w_gate_up_EGD, w_down_EDF, torch.tensor([0, 1, 2]).int()).flatten()
        tensor([0.7311, 0.7311, 0.0000])
    """
    check_grouped_mlp(x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1)
    keep = op.wants_gradient(x_RD, w_gate_up_EGD, w_down_EDF)
    return op.grouped_mlp(x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1, keep)[0]


def expert_mlp(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    *,
    activation: str = "swiglu",
    bias_gate_up_EG: Tensor | None = None,
    bias_down_ED: Tensor | None = None,
) -> Tensor:
    """Send each token through its experts and sum what they say, times the token's weights.

    Gather, MLP and combine in one differentiable operation. Saves the tokens, the pre-activation
    and the routing for backward; nothing if no gradient is asked for. The sum runs in float32
    (float64 for float64) in the order of the K routes, without atomics, so results repeat bit for
    bit. A masked route (-1) adds nothing.

    The fused kernels compute SwiGLU without biases. Anything else runs one operation after the
    other and keeps every intermediate result for backward.

    Args:
        x_TD: Tokens. bfloat16, float16, float32 or float64.
        w_gate_up_EGD: Gate and up projection of each expert, gate first; G = 2*F. Without a gate
            (``relu2``) the up projection alone; G = F.
        w_down_EDF: Down projection of each expert.
        weight_TK: float32 (float64 for float64 tokens), as ``route`` gives it.
        expert_TK: int32 or int64 ids, -1 for masked routes.
        activation: ``"swiglu"``; ``"clamped_swiglu"``, that of gpt-oss: ``min(gate, 7)`` times its
            sigmoid at slope 1.702, times ``clamp(up, -7, 7) + 1``; or ``"relu2"``, the square of
            the positive part.
        bias_gate_up_EG: Added to the pre-activation, in ``x_TD.dtype``.
        bias_down_ED: Added to each expert's output before weighting, in ``x_TD.dtype``.

    Returns:
        ``y_TD``, in ``x_TD.dtype``.

    Raises:
        ValueError: If shapes or devices do not fit together, an id on the CPU is out of range, D or
            F is not a multiple of 16 on CUDA, or the activation is unknown.
        TypeError: If a dtype does not fit.

    Examples:
        >>> import torch
        >>> x_TD = torch.ones(2, 1)
        >>> w_gate_up_EGD, w_down_EDF = torch.ones(2, 2, 1), torch.ones(2, 1, 1)
        >>> weight_TK, expert_TK = torch.tensor([[1.0], [0.5]]), torch.tensor([[1], [0]])
        >>> expert_mlp(x_TD, w_gate_up_EGD, w_down_EDF, weight_TK, expert_TK).flatten()
        tensor([0.7311, 0.3655])
    """
    biases = {"bias_gate_up_EG": bias_gate_up_EG, "bias_down_ED": bias_down_ED}
    check_expert_mlp(x_TD, w_gate_up_EGD, w_down_EDF, weight_TK, expert_TK, activation, biases)
    rows = RoutedRows(*route_rows(x_TD.detach(), expert_TK, w_down_EDF.shape[0]))
    args = (x_TD, w_gate_up_EGD, w_down_EDF, weight_TK)
    if activation == "swiglu" and bias_gate_up_EG is None and bias_down_ED is None:
        return op.expert_mlp(*args, *rows, op.wants_gradient(*args))[0]
    return expert_mlp_unfused(*args, rows, activation, bias_gate_up_EG, bias_down_ED)
