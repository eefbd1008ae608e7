"""Arguments, checked by what the host knows of them: no check waits for a GPU."""

import torch
from moe_kernels import Routing
from torch import Tensor

from moe_dispatch.dispatcher import Dispatched

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_num_experts(num_experts: int, world_size: int) -> None:
    """Refuse experts that cannot be shared out evenly.

    Raises:
        ValueError: Naming both numbers, and the sizes that would do.
    """
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    if num_experts % world_size:
        sizes = ", ".join(str(w) for w in range(1, num_experts + 1) if num_experts % w == 0)
        below = num_experts // world_size * world_size
        experts = " or ".join(str(n) for n in (below, below + world_size) if n)
        raise ValueError(
            f"num_experts ({num_experts}) must be a multiple of the group's size ({world_size}): "
            f"use a group of {sizes} ranks, or {experts} experts"
        )


def check_dispatch(x_TD: Tensor, routing: Routing, num_experts: int) -> None:
    """Refuse tokens and a routing that do not belong together.

    Raises:
        ValueError: If shapes, dtypes or devices are not those that ``Dispatcher.dispatch`` asks
            for.
    """
    weight_TK, expert_TK = routing.weight_TK, routing.expert_TK
    for name, tensor in (("x_TD", x_TD), ("expert_TK", expert_TK), ("weight_TK", weight_TK)):
        if tensor.ndim != 2:
            raise ValueError(f"{name} must have 2 axes, got the shape {list(tensor.shape)}")
        if tensor.device != x_TD.device:
            raise ValueError(
                f"devices differ: x_TD is on {x_TD.device}, {name} is on {tensor.device}"
            )
    if expert_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(
            f"T differs: x_TD has {x_TD.shape[0]} rows, expert_TK has {expert_TK.shape[0]}"
        )
    if weight_TK.shape != expert_TK.shape:
        raise ValueError(
            f"weight_TK and expert_TK must have one shape, "
            f"got {list(weight_TK.shape)} and {list(expert_TK.shape)}"
        )
    if not 1 <= expert_TK.shape[1] <= num_experts:
        raise ValueError(
            f"K must be in 1..num_experts ({num_experts}), "
            f"expert_TK has {expert_TK.shape[1]} columns"
        )
    if expert_TK.dtype != torch.int32:
        raise ValueError(f"expert_TK must be int32, got {expert_TK.dtype}")
    if x_TD.dtype not in DTYPES:
        raise ValueError(f"the dtype of x_TD must be one of {list(DTYPES)}, got {x_TD.dtype}")
    if weight_TK.dtype not in {torch.float32, torch.float64}:
        raise ValueError(f"weight_TK must be float32 or float64, got {weight_TK.dtype}")


def check_combine(y_RD: Tensor, dispatched: Dispatched) -> None:
    """Refuse results that are not one row for each dispatched row.

    The width and the dtype have to be those of ``x_RD``, because ``dispatch`` made sure that
    they are the same on every rank. A rank without rows could otherwise expect other bytes than
    the rest send, and wait.

    Raises:
        ValueError: If the rows, their width, dtype or device differ from those of ``x_RD``.
    """
    x_RD = dispatched.x_RD
    if y_RD.ndim != 2:
        raise ValueError(f"y_RD must have 2 axes, got the shape {list(y_RD.shape)}")
    if len(y_RD) != len(x_RD):
        raise ValueError(
            f"R differs: y_RD has {len(y_RD)} rows, dispatch gave {len(x_RD)}; "
            "combine needs one result for each row of x_RD, in its order"
        )
    if y_RD.shape[1] != x_RD.shape[1]:
        raise ValueError(f"D differs: y_RD has {y_RD.shape[1]} columns, x_RD has {x_RD.shape[1]}")
    if y_RD.dtype != x_RD.dtype:
        raise ValueError(f"dtypes differ: y_RD is {y_RD.dtype}, x_RD is {x_RD.dtype}")
    if y_RD.device != x_RD.device:
        raise ValueError(f"devices differ: y_RD is on {y_RD.device}, x_RD is on {x_RD.device}")
