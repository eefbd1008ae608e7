"""Expert MLPs: a SwiGLU feed-forward network for each expert, over the rows routed to it."""

from torch import Tensor

from moe_kernels.mlp import op
from moe_kernels.mlp.check import check_expert_mlp, check_grouped_mlp
from moe_kernels.mlp.rows import RoutedRows, route_rows
from moe_kernels.mlp.unfused import expert_mlp_unfused
from moe_kernels.mxfp8 import MXTensor, Recipe
from moe_kernels.mxmlp import MXWeight, expert_mlp_mx, grouped_mlp_mx
from moe_kernels.mxmlp.check import check_fused, check_named
from moe_kernels.operator import wants_gradient

__all__ = ["expert_mlp", "grouped_mlp"]


def grouped_mlp(
    x_RD: Tensor | MXTensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    offsets_E1: Tensor,
    *,
    recipe: Recipe | None = None,
    quantized: tuple[MXWeight, MXWeight] | None = None,
    carrier_RD: Tensor | None = None,
) -> Tensor:
    """Apply to each group of rows its own expert, ``(silu(x @ g.T) * (x @ u.T)) @ w_down.T``.

    ``g`` and ``u`` are the first and the last F rows of ``w_gate_up_EGD[e]``. Saves the rows and
    the pre-activation for backward. Rows at or past ``offsets_E1[-1]`` are not read and give zeros,
    in the output and in the gradient; weight gradients of experts without rows are exactly zero.

    With a recipe the products that give rows run in float8; see ``expert_mlp``, which says what is
    rounded. Rows that come in MXFP8, as from the wire, are not rounded again.

    Args:
        x_RD: Rows sorted by expert. bfloat16, float16, float32 or float64; or an ``MXTensor``.
        w_gate_up_EGD: Gate and up projection of each expert, gate first; G = 2*F.
        w_down_EDF: Down projection of each expert.
        offsets_E1: int32, starts at 0, does not decrease, ends at or before R. Where reading it
            makes nobody wait (CPU), it is checked.
        recipe: Run in MXFP8, with scales shared so; None for not.
        quantized: Both weights in MXFP8; see ``expert_mlp``.
        carrier_RD: Receives the gradient of rows that come in MXFP8; see ``expert_mlp``.

    Returns:
        ``y_RD``, in the dtype of the weights.

    Raises:
        ValueError: If shapes or devices do not fit together, or D or F is not a multiple of 16 on
            CUDA, or of 32 with a recipe.
        TypeError: If a dtype does not fit.
        RuntimeError: If there is a recipe and the GPU has no float8 products.

    Examples:
        >>> import torch
        >>> w_gate_up_EGD, w_down_EDF = torch.ones(2, 2, 1), torch.ones(2, 1, 1)
        >>> x_RD = torch.ones(3, 1)
        >>> grouped_mlp(x_RD, w_gate_up_EGD, w_down_EDF, torch.tensor([0, 1, 2]).int()).flatten()
        tensor([0.7311, 0.7311, 0.0000])
    """
    check_named(x_RD, recipe, {"quantized": quantized, "carrier_RD": carrier_RD})
    weights = (w_gate_up_EGD, w_down_EDF)
    if recipe is not None:
        return grouped_mlp_mx(x_RD, *weights, offsets_E1, recipe, quantized, carrier_RD)
    assert isinstance(x_RD, Tensor), "check_named refuses others"
    check_grouped_mlp(x_RD, *weights, offsets_E1)
    return op.grouped_mlp(x_RD, *weights, offsets_E1, wants_gradient(x_RD, *weights))[0]


def expert_mlp(
    x_TD: Tensor | MXTensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    *,
    activation: str = "swiglu",
    bias_gate_up_EG: Tensor | None = None,
    bias_down_ED: Tensor | None = None,
    recipe: Recipe | None = None,
    quantized: tuple[MXWeight, MXWeight] | None = None,
    carrier_TD: Tensor | None = None,
) -> Tensor:
    """Send each token through its experts and sum what they say, times the token's weights.

    Gather, MLP and combine in one differentiable operation. Saves the tokens, the pre-activation
    and the routing for backward; nothing if no gradient is asked for. The sum runs in float32
    (float64 for float64) in the order of the K routes, without atomics, so results repeat bit for
    bit. A masked route (-1) adds nothing.

    The fused kernels compute SwiGLU without biases. Anything else runs one operation after the
    other and keeps every intermediate result for backward.

    With a recipe, SwiGLU without biases runs in MXFP8. Each of these is rounded once: tokens,
    weights, activation, gradient of the output and of the pre-activation. The four products that
    give rows are float8 (``scaled_grouped_mm`` says what that is on which machine). The gradients
    of the weights are products in the dtype of the weights, of the tokens as rounded and of the
    rest as it was. Tokens are kept for backward in MXFP8.

    Args:
        x_TD: Tokens. bfloat16, float16, float32 or float64; or an ``MXTensor``, with a recipe.
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
        recipe: Run in MXFP8, with scales shared so: ``"mx32"``, ``"mx128"`` or ``"mxrow"``. None,
            the default, is no rounding to float8.
        quantized: ``w_gate_up_EGD`` and ``w_down_EDF`` in MXFP8, as ``quantize_weight`` makes them
            or a ``WeightCache`` keeps them over the microbatches of a step. Their bytes are what is
            multiplied, fresh or not. If not given, weights are quantised in every call.
        carrier_TD: For an ``MXTensor``, which can carry no gradient: a tensor of its shape and of
            the weights' dtype that receives it. Its values are not read, so one expanded number
            will do.

    Returns:
        ``y_TD``, in the dtype of the weights.

    Raises:
        ValueError: If shapes or devices do not fit together, an id on the CPU is out of range, D or
            F is not a multiple of 16 on CUDA, or of 32 with a recipe, the activation is unknown,
            or the recipe does not go with it.
        TypeError: If a dtype does not fit.
        RuntimeError: If there is a recipe and the GPU has no float8 products.

    Examples:
        >>> import torch
        >>> x_TD = torch.ones(2, 1)
        >>> w_gate_up_EGD, w_down_EDF = torch.ones(2, 2, 1), torch.ones(2, 1, 1)
        >>> weight_TK, expert_TK = torch.tensor([[1.0], [0.5]]), torch.tensor([[1], [0]])
        >>> expert_mlp(x_TD, w_gate_up_EGD, w_down_EDF, weight_TK, expert_TK).flatten()
        tensor([0.7311, 0.3655])
    """
    biases = {"bias_gate_up_EG": bias_gate_up_EG, "bias_down_ED": bias_down_ED}
    check_named(x_TD, recipe, {"quantized": quantized, "carrier_TD": carrier_TD})
    if recipe is not None:
        check_fused(recipe, activation, biases)
        routed = (w_gate_up_EGD, w_down_EDF, weight_TK, expert_TK)
        return expert_mlp_mx(x_TD, *routed, recipe, quantized, carrier_TD)
    assert isinstance(x_TD, Tensor), "check_named refuses others"
    check_expert_mlp(x_TD, w_gate_up_EGD, w_down_EDF, weight_TK, expert_TK, activation, biases)
    rows = RoutedRows(*route_rows(x_TD.detach(), expert_TK, w_down_EDF.shape[0]))
    args = (x_TD, w_gate_up_EGD, w_down_EDF, weight_TK)
    if activation == "swiglu" and bias_gate_up_EG is None and bias_down_ED is None:
        return op.expert_mlp(*args, *rows, wants_gradient(*args))[0]
    return expert_mlp_unfused(*args, rows, activation, bias_gate_up_EG, bias_down_ED)
