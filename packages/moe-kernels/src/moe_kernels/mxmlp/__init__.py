"""Expert MLPs and linear layers in MXFP8, and the weights that they keep quantised."""

from torch import Tensor

from moe_kernels.mlp.check import check_expert_mlp, check_grouped_mlp
from moe_kernels.mxfp8 import MXTensor, Recipe, quantize
from moe_kernels.mxmlp import op
from moe_kernels.mxmlp.check import check_carrier, check_mx, check_quantized
from moe_kernels.mxmlp.linear import mx_linear
from moe_kernels.mxmlp.weights import MXWeight, StaleWeightError, WeightCache, quantize_weight
from moe_kernels.operator import wants_gradient
from moe_kernels.routing.groups import group_rows

__all__ = ["MXWeight", "StaleWeightError", "WeightCache", "mx_linear", "quantize_weight"]

Experts = tuple[MXWeight, MXWeight]


def grouped_mlp_mx(
    x: Tensor | MXTensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    offsets_E1: Tensor,
    recipe: Recipe,
    quantized: Experts | None,
    carrier_RD: Tensor | None,
) -> Tensor:
    """Do what ``grouped_mlp`` documents for a recipe."""
    carrier = check_carrier(x, carrier_RD, w_gate_up_EGD)
    check_grouped_mlp(carrier, w_gate_up_EGD, w_down_EDF, offsets_E1)
    check_mx(recipe, carrier.dtype, _sizes(w_down_EDF))
    args = (carrier, w_gate_up_EGD, w_down_EDF)
    keep = wants_gradient(*args)
    weights = _experts(w_gate_up_EGD, w_down_EDF, recipe, quantized, keep)
    rows = _rows(x, weights[0])
    tensors = (*rows, *_tensors(weights, rows))
    return op.grouped_mlp_mx(*args, *tensors, offsets_E1, recipe, weights[0].rounding, keep)[0]


def expert_mlp_mx(
    x: Tensor | MXTensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    recipe: Recipe,
    quantized: Experts | None,
    carrier_TD: Tensor | None,
) -> Tensor:
    """Do what ``expert_mlp`` documents for a recipe."""
    carrier = check_carrier(x, carrier_TD, w_gate_up_EGD)
    check_expert_mlp(carrier, w_gate_up_EGD, w_down_EDF, weight_TK, expert_TK, "swiglu", {})
    check_mx(recipe, carrier.dtype, _sizes(w_down_EDF))
    args = (carrier, w_gate_up_EGD, w_down_EDF, weight_TK)
    keep = wants_gradient(*args)
    weights = _experts(w_gate_up_EGD, w_down_EDF, recipe, quantized, keep)
    rows = _rows(x, weights[0])
    tensors = (*rows, *_tensors(weights, rows))
    groups = group_rows(expert_TK, w_down_EDF.shape[0])
    return op.expert_mlp_mx(*args, *tensors, *groups, recipe, weights[0].rounding, keep)[0]


def _sizes(w_down_EDF: Tensor) -> dict[str, int]:
    return {"D": w_down_EDF.shape[1], "F": w_down_EDF.shape[2]}


def _experts(
    w_gate_up_EGD: Tensor, w_down_EDF: Tensor, recipe: Recipe, quantized: Experts | None, keep: bool
) -> Experts:
    """Return the snapshot that was given, checked, or one made now."""
    if quantized is None:
        return (
            quantize_weight(w_gate_up_EGD, recipe=recipe, columns=keep),
            quantize_weight(w_down_EDF, recipe=recipe, columns=keep),
        )
    gate_up, down = quantized
    check_quantized("quantized[0]", gate_up, w_gate_up_EGD, recipe, keep)
    check_quantized("quantized[1]", down, w_down_EDF, recipe, keep)
    if gate_up.rounding != down.rounding:
        raise ValueError(
            f"rounding differs: quantized[0] has {gate_up.rounding!r}, quantized[1] "
            f"{down.rounding!r}"
        )
    return gate_up, down


def _rows(x: Tensor | MXTensor, like: MXWeight) -> MXTensor:
    """Quantise rows once, and none that are quantised already."""
    if isinstance(x, MXTensor):
        return x
    return quantize(x.detach(), recipe=like.recipe, rounding=like.rounding)


def _tensors(weights: Experts, rows: MXTensor) -> list[Tensor]:
    """Return both weights by rows, then both by columns; empty where no gradient is wanted."""
    none = MXTensor(*(t.new_empty(0) for t in rows))
    by_rows = [t for weight in weights for t in weight.rows]
    return by_rows + [t for weight in weights for t in (weight.columns or none)]
