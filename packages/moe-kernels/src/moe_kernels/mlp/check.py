"""Argument checks of the expert MLPs. They read metadata only, except ids on the CPU."""

import torch
from torch import Tensor

from moe_kernels.gemm.check import (
    check_multiples,
    check_offsets,
    check_same_device,
    check_same_dtype,
    check_shapes,
)
from moe_kernels.mlp.unfused import ACTIVATIONS, GATED
from moe_kernels.routing.check import check_ids


def check_weights(
    x: Tensor, name: str, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, gated: bool = True
) -> None:
    """Raise unless both weights fit each other and the columns of ``x``."""
    E, G, D = w_gate_up_EGD.shape
    E_down, D_down, F = w_down_EDF.shape
    if E < 1 or E_down != E:
        raise ValueError(
            f"E differs: w_gate_up_EGD holds {E} experts, w_down_EDF holds {E_down}, and there "
            "must be at least one"
        )
    rule = "2*F" if gated else "F, as nothing gates"
    if (2 * F if gated else F) != G:
        raise ValueError(
            f"G must be {rule}: w_gate_up_EGD has {G} rows an expert, w_down_EDF has F={F} columns"
        )
    if not x.shape[1] == D == D_down:
        raise ValueError(
            f"D differs: {name} has {x.shape[1]} columns, w_gate_up_EGD has {D} columns, "
            f"w_down_EDF has {D_down} rows an expert"
        )
    check_same_dtype({name: x, "w_gate_up_EGD": w_gate_up_EGD, "w_down_EDF": w_down_EDF})
    check_multiples(x, {"D": D, "F": F})


def check_grouped_mlp(
    x_RD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, offsets_E1: Tensor
) -> None:
    """Raise unless the arguments of ``grouped_mlp`` fit together."""
    weights = {"w_gate_up_EGD": (w_gate_up_EGD, 3), "w_down_EDF": (w_down_EDF, 3)}
    check_shapes("grouped_mlp", {"x_RD": (x_RD, 2), **weights, "offsets_E1": (offsets_E1, 1)})
    check_weights(x_RD, "x_RD", w_gate_up_EGD, w_down_EDF)
    check_offsets(offsets_E1, w_down_EDF.shape[0], "w_down_EDF")
    check_same_device(
        {
            "x_RD": x_RD,
            "w_gate_up_EGD": w_gate_up_EGD,
            "w_down_EDF": w_down_EDF,
            "offsets_E1": offsets_E1,
        }
    )


def check_expert_mlp(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    activation: str,
    biases: dict[str, Tensor | None],
) -> None:
    """Raise unless the arguments of ``expert_mlp`` fit together."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    weights = {"w_gate_up_EGD": (w_gate_up_EGD, 3), "w_down_EDF": (w_down_EDF, 3)}
    routing = {"weight_TK": (weight_TK, 2), "expert_TK": (expert_TK, 2)}
    check_shapes("expert_mlp", {"x_TD": (x_TD, 2), **weights, **routing})
    check_weights(x_TD, "x_TD", w_gate_up_EGD, w_down_EDF, activation in GATED)
    given = {name: bias for name, bias in biases.items() if bias is not None}
    for name, bias in given.items():
        of = w_gate_up_EGD if name == "bias_gate_up_EG" else w_down_EDF
        if bias.shape != of.shape[:2]:
            raise ValueError(
                f"{name} must have shape {tuple(of.shape[:2])}, one entry for each row of its "
                f"weight, got {tuple(bias.shape)}"
            )
        check_same_dtype({"x_TD": x_TD, name: bias})
    if weight_TK.shape != expert_TK.shape or weight_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(
            f"T or K differs: weight_TK has shape {tuple(weight_TK.shape)}, expert_TK "
            f"{tuple(expert_TK.shape)}, x_TD {tuple(x_TD.shape)}"
        )
    if weight_TK.shape[1] < 1:
        raise ValueError(f"K must be at least 1, got weight_TK of shape {tuple(weight_TK.shape)}")
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    if weight_TK.dtype != wide:
        raise TypeError(
            f"weight_TK must be {wide} for x_TD in {x_TD.dtype}, got {weight_TK.dtype}: the "
            "router runs in float32, or in float64 with the model"
        )
    check_same_device(
        {
            "x_TD": x_TD,
            "w_gate_up_EGD": w_gate_up_EGD,
            "w_down_EDF": w_down_EDF,
            "weight_TK": weight_TK,
            "expert_TK": expert_TK,
            **given,
        }
    )
    check_ids(expert_TK, w_down_EDF.shape[0])
