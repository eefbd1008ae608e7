"""Take one case through a dispatcher, forward and backward, on one rank."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_dispatch.dispatcher import Dispatcher
from moe_dispatch.testing.case import DispatchCase


class Trip(NamedTuple):
    """What one rank saw, on the CPU.

    Attributes:
        local_experts: The ids of its experts.
        offsets_e1: As dispatched.
        x_RD: As dispatched.
        dy_RD: The gradient that reached the results of its experts.
        y_TD: As combined.
        dx_TD: The gradient of its tokens.
        dweight_TK: The gradient of its routing weights.
    """

    local_experts: range
    offsets_e1: Tensor
    x_RD: Tensor
    dy_RD: Tensor
    y_TD: Tensor
    dx_TD: Tensor
    dweight_TK: Tensor


def gain_experts(x_RD: Tensor, offsets_e1: Tensor, local_experts: range) -> Tensor:
    """Multiply the rows of expert i by i + 1, so that a stray row has another value.

    Rows past ``offsets_e1[-1]`` belong to no expert and become NaN: whoever uses them is found.

    Examples:
        >>> gain_experts(torch.ones(4, 1), torch.tensor([0, 1, 3]), range(2, 4)).flatten()
        tensor([3., 4., 4., nan])
    """
    index_R = torch.arange(len(x_RD), device=x_RD.device)
    local_R = torch.searchsorted(offsets_e1[1:].long(), index_R, right=True)
    gain_R = (local_R + local_experts.start + 1).to(x_RD.dtype)
    gain_R = gain_R.masked_fill(local_R == len(local_experts), torch.nan)
    return x_RD * gain_R[:, None]


def travel(
    dispatcher: Dispatcher,
    case: DispatchCase,
    rank: int | None = None,
    device: str | torch.device = "cpu",
) -> Trip:
    """Dispatch, apply ``gain_experts``, combine, and go back with ``case.gradient``.

    Args:
        dispatcher: That of this rank, for ``case.num_experts`` experts.
        case: The same on all ranks.
        rank: This rank. Without it, the one whose experts the dispatcher holds.
        device: Where the tensors live.
    """
    if rank is None:
        rank = dispatcher.local_experts.start // case.experts_per_rank
    x_TD = case.tokens(rank).to(device).requires_grad_()
    routing = case.routing(rank)
    weight_TK = routing.weight_TK.to(device).requires_grad_()
    routing = routing._replace(weight_TK=weight_TK, expert_TK=routing.expert_TK.to(device))
    # Before any rank waits on the device: a copy would queue up behind waits of other ranks.
    dy_TD = case.gradient(rank).to(device)
    sent = dispatcher.dispatch(x_TD, routing)
    y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts)
    y_RD.retain_grad()
    y_TD = dispatcher.combine(y_RD, sent)
    y_TD.backward(dy_TD)
    found = (sent.offsets_e1, sent.x_RD, y_RD.grad, y_TD, x_TD.grad, weight_TK.grad)
    return Trip(dispatcher.local_experts, *(_on_cpu(tensor) for tensor in found))


def _on_cpu(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise AssertionError("a tensor that needs a gradient got none")
    return tensor.detach().cpu()
