"""The experts of moe-kernels behind any dispatcher, by the shortest way that it allows."""

from moe_kernels import Routing, expert_mlp, grouped_mlp
from torch import Tensor

from moe_dispatch.dispatcher import Dispatcher
from moe_dispatch.local import LocalDispatcher


def apply_experts(
    dispatcher: Dispatcher,
    x_TD: Tensor,
    routing: Routing,
    w_gate_up_eGD: Tensor,
    w_down_eDF: Tensor,
) -> Tensor:
    """Send tokens to SwiGLU experts and bring the weighted sums of their results back.

    On one rank nothing has to travel, and the fused ``moe_kernels.expert_mlp`` gathers and
    combines by itself; on several this is ``dispatch``, ``grouped_mlp``, ``combine``.

    Args:
        dispatcher: Of this rank.
        x_TD: Its tokens.
        routing: Their experts and weights.
        w_gate_up_eGD: Gate and up projection of this rank's experts, gate first; G = 2 * F.
        w_down_eDF: Their down projection.

    Returns:
        ``y_TD``.

    Examples:
        >>> import torch
        >>> from moe_kernels import route
        >>> routing = route(torch.zeros(1, 2), top_k=2)
        >>> w_gate_up_eGD, w_down_eDF = torch.ones(2, 2, 1), torch.ones(2, 1, 1)
        >>> args = (routing, w_gate_up_eGD, w_down_eDF)
        >>> apply_experts(LocalDispatcher(2), torch.ones(1, 1), *args)
        tensor([[0.7311]])
    """
    if isinstance(dispatcher, LocalDispatcher):
        return expert_mlp(x_TD, w_gate_up_eGD, w_down_eDF, routing.weight_TK, routing.expert_TK)
    sent = dispatcher.dispatch(x_TD, routing)
    y_RD = grouped_mlp(sent.x_RD, w_gate_up_eGD, w_down_eDF, sent.offsets_e1)
    return dispatcher.combine(y_RD, sent)
