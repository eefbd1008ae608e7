"""Compile and load every kernel of a plan, before one rank has to wait for another in a kernel.

A rank that compiles keeps its peers waiting, up to their deadline. And where ranks share a GPU,
loading a kernel can have to wait for kernels that run, among them those that wait for this rank.
"""

import torch
from moe_kernels import Routing, group_rows
from torch import Tensor

from moe_dispatch.plan import RowPlan
from moe_dispatch.rowwise.channel import Channel
from moe_dispatch.rowwise.dispatcher import RowwiseDispatcher

LONG_AGO = 1 << 40
"""An epoch that every wait is content with."""


class Loop:
    """A heap on which every rank is this one, to compile and to count by."""

    kind, reason, rank = "loop", "to compile", 0

    def __init__(self, plan: RowPlan, device: torch.device):
        self.world_size = plan.world_size
        self.local = torch.zeros(plan.heap_bytes, dtype=torch.uint8, device=device)
        base = torch.full((), self.local.data_ptr(), dtype=torch.int64, device=device)
        self.bases_W = base.repeat(plan.world_size)

    def host_gather(self, data: bytes) -> list[bytes]:
        return [data] * self.world_size

    def host_barrier(self) -> None:
        pass

    def close(self) -> None:
        self.local = self.local.new_empty(0)


def warm_up(plan: RowPlan, device: str | torch.device, num_tokens: int | None = None) -> None:
    """Go through one exchange, forward and backward, with this rank in the place of all others.

    Takes ``plan.heap_bytes`` more memory while it runs. Also fills the allocator of the current
    stream with blocks of the right sizes. Waits for the device at the end.

    Args:
        plan: The sizes.
        device: Of this rank.
        num_tokens: T of the exchange; ``plan.max_tokens`` if None.
    """
    T = plan.max_tokens if num_tokens is None else num_tokens
    # Triton compiles a kernel anew for a size that is 1 or a multiple of 16, so a rank with another
    # number of tokens could still come upon a kernel that is not there.
    for shape in ((0, 1), (1, 1), (16, 1), (17, 1), (max(T - 1, 0), plan.top_k)):
        ids_TK = torch.zeros(shape, dtype=torch.int32, device=device)
        group_rows(ids_TK, plan.num_experts)
    channel = Channel(plan, Loop(plan, torch.device(device)))
    channel.views["signals"].fill_(LONG_AGO)
    dispatcher = RowwiseDispatcher.on(channel, "warm-up")
    x_TD = torch.zeros(T, plan.dim, dtype=plan.dtype, device=device)
    k_K = torch.arange(plan.top_k, dtype=torch.int32, device=device)
    weight_TK = torch.ones(T, plan.top_k, dtype=plan.weight_dtype, device=device)
    score_TE = torch.ones(T, plan.num_experts, device=device)
    num_bad = torch.zeros((), dtype=torch.int32, device=device)
    routing = Routing(weight_TK, k_K.expand(T, -1), score_TE, num_bad)
    with torch.no_grad():
        sent = dispatcher.dispatch(x_TD, routing)
        dispatcher.combine(sent.x_RD, sent)
    with torch.enable_grad():
        x_TD.requires_grad_()
        weight_TK.requires_grad_()
        for weighted in (False, True):
            sent = dispatcher.dispatch(x_TD, routing)
            y_RD = _times_weight(sent.x_RD, sent.weight_R) if weighted else sent.x_RD
            dispatcher.combine(y_RD, sent, weighted=weighted).sum().backward()
    channel.abort()
    if x_TD.is_cuda:
        torch.cuda.current_stream(x_TD.device).synchronize()
    channel.close()


def _times_weight(x_RD: Tensor, weight_R: Tensor | None) -> Tensor:
    assert weight_R is not None, "this dispatcher sends weights along"
    return (x_RD * weight_R[:, None]).to(x_RD.dtype)
