"""What transformers calls in place of the forward of a model's experts."""

import torch
from torch import Tensor

from moe_kernels.gemm.check import DTYPES
from moe_kernels.integrations.transformers.plan import Experts, name_of, plan_experts
from moe_kernels.mlp import expert_mlp


def experts_forward(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Send each token through its experts; the signature is that of transformers.

    Computes in the dtype of autocast where that is on, otherwise in that of the weights.

    Args:
        self: The experts, whose parameters are ``gate_up_proj`` (or ``up_proj``), ``down_proj``
            and their biases, all experts of a layer in one tensor each.
        hidden_states: Tokens, ``[T, D]``.
        top_k_index: Ids of experts, ``[T, K]``. The number of experts itself marks a route that
            is computed on another rank, and adds nothing here.
        top_k_weights: ``[T, K]``, of any floating dtype; the weighted sum runs in float32.

    Returns:
        ``[T, D]``, in the dtype of ``hidden_states``.

    Raises:
        ValueError: If the kernels do not compute these experts, or the shapes do not fit.
        TypeError: If a dtype does not fit, as that of quantized weights.
    """
    device = hidden_states.device.type
    weight_dtype = self.down_proj.dtype
    if weight_dtype not in DTYPES:
        raise TypeError(
            f"moe_kernels does not compute {name_of(self)} with down_proj in {weight_dtype}: "
            "weights must be bfloat16, float16, float32 or float64"
        )
    if not torch.is_autocast_enabled(device) or weight_dtype == torch.float64:
        return _compute(self, hidden_states, top_k_index, top_k_weights, weight_dtype)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return _compute(self, hidden_states, top_k_index, top_k_weights, dtype)


def _compute(
    module: Experts, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    plan = plan_experts(module)
    w_gate_up_EGD, w_down_EDF = getattr(module, plan.up).to(dtype), module.down_proj.to(dtype)
    if module.is_transposed:
        w_gate_up_EGD, w_down_EDF = w_gate_up_EGD.mT, w_down_EDF.mT
    bias_gate_up_EG = bias_down_ED = None
    if module.has_bias:
        bias_gate_up_EG = getattr(module, f"{plan.up}_bias").to(dtype)
        bias_down_ED = module.down_proj_bias.to(dtype)
    if plan.interleaved:
        w_gate_up_EGD = gate_first(w_gate_up_EGD)
        bias_gate_up_EG = None if bias_gate_up_EG is None else gate_first(bias_gate_up_EG)
    try:
        y_TD = expert_mlp(
            x_TD.to(dtype),
            w_gate_up_EGD,
            w_down_EDF,
            weight_TK.to(torch.promote_types(dtype, torch.float32)),
            expert_TK.masked_fill(expert_TK == w_down_EDF.shape[0], -1),
            activation=plan.activation,
            bias_gate_up_EG=bias_gate_up_EG,
            bias_down_ED=bias_down_ED,
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"moe_kernels cannot run {name_of(module)}: {error}") from error
    return y_TD.to(x_TD.dtype)


def gate_first(w_EGX: Tensor) -> Tensor:
    """Copy rows that alternate between gate and up so that the gate's come first.

    Examples:
        >>> gate_first(torch.tensor([[0, 10, 1, 11]]))
        tensor([[ 0,  1, 10, 11]])
    """
    return w_EGX.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
