"""A linear layer whose weight gradient can be computed later than the rest of its backward."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_parallel.deferral import WeightGradient, sink_of


class SplitLinear(nn.Linear):
    """``nn.Linear``, except that its weight gradient goes to the weight's ``dw_sink`` if any.

    Backward reads x, dy and the weight, 2*N*D*F FLOPs for each of the two gradients; those of the
    weight can wait, which is what a zero-bubble schedule fills its gaps with. Under autocast it
    computes what ``nn.Linear`` does.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear has
        """Return ``input @ weight.T + bias``."""
        return _Linear.apply(input, self.weight, self.bias, sink_of(self.weight))


def split_linears(module: nn.Module) -> nn.Module:
    """Turn every ``nn.Linear`` in ``module`` into a ``SplitLinear``, in place, and return it.

    Parameters, their names and values stay. Subclasses of ``nn.Linear`` are left alone.

    Examples:
        >>> model = split_linears(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
        >>> type(model[0]).__name__
        'SplitLinear'
    """
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = SplitLinear
    return module


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, sink: Any) -> Tensor:
        ctx.sink, ctx.dtype = sink, _product_dtype(x, weight_FD)
        # Autocast keeps a cast copy of the weight for backward; here backward casts again.
        ctx.save_for_backward(x.to(ctx.dtype or x.dtype), weight_FD)
        return nn.functional.linear(x, weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight_FD = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        x_ND, dy_NF = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        # Under autocast these are of its dtype; autograd brings them to those of the inputs.
        dx = (dy_NF @ weight_FD.to(ctx.dtype or weight_FD.dtype)).view_as(x) if needs_x else None
        dw_FD = None
        if needs_weight and ctx.sink is None:
            dw_FD = dy_NF.T @ x_ND
        elif needs_weight:
            ctx.sink(_weight_gradient(x_ND, dy_NF))
        return dx, dw_FD, dy_NF.sum(0) if needs_bias else None, None


def _product_dtype(x: Tensor, weight_FD: Tensor) -> torch.dtype | None:
    """Return what autocast casts the factors to; None if it leaves them alone."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or torch.float64 in (x.dtype, weight_FD.dtype):
        return None
    return torch.get_autocast_dtype(kind)


def _weight_gradient(x_ND: Tensor, dy_NF: Tensor) -> WeightGradient:
    def run(out_FD: Tensor, accumulate: bool) -> None:
        # The product is rounded before it is added, as autograd does it, so that the sum over
        # microbatches has the same bits whether or not the gradient was put off.
        with torch.no_grad():
            dw_FD = dy_NF.T @ x_ND
            if accumulate:
                out_FD.add_(dw_FD)
            else:
                out_FD.copy_(dw_FD)

    return run
