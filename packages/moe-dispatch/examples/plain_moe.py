"""Train a plain torch MoE on ranks that share its experts out: its loss is that of one rank.

    python plain_moe.py                                       # one rank
    torchrun --nproc-per-node 2 plain_moe.py                  # two ranks, gloo

Only ``MoE.forward`` knows that experts may be elsewhere. Each rank has its share of the batch.
"""

import os

import torch
import torch.distributed as dist
from moe_dispatch import Dispatcher, make_dispatcher
from moe_kernels import route
from torch import Tensor, nn

T, D, F, E, K, STEPS = 64, 16, 32, 8, 2, 20


class Expert(nn.Module):
    """Any module of rows will do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x_RD: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x_RD)))


class MoE(nn.Module):
    """A router, and of all experts those that this rank holds."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()
        everything = [Expert() for _ in range(E)]  # so that all ranks draw the same weights
        self.router, self.dispatcher = nn.Linear(D, E), dispatcher
        self.experts = nn.ModuleList(everything[i] for i in dispatcher.local_experts)

    def forward(self, x_TD: Tensor) -> Tensor:
        sent = self.dispatcher.dispatch(x_TD, route(self.router(x_TD), K, renormalize=True))
        counts = sent.offsets_e1.diff().tolist()
        parts = sent.x_RD[: sum(counts)].split(counts)
        rows = [expert(x_RD) for expert, x_RD in zip(self.experts, parts, strict=True)]
        y_RD = torch.cat([*rows, sent.x_RD[sum(counts) :]])
        return self.dispatcher.combine(y_RD, sent)


def train(group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the loss of each step, over the tokens of all ranks."""
    torch.manual_seed(0)
    model = MoE(make_dispatcher(E, group))
    x_TD, teacher_DD = torch.randn(T, D), torch.randn(D, D)
    y_TD = torch.sin(x_TD @ teacher_DD)
    if group is not None:  # this rank's share
        shares = dist.get_world_size(group)
        x_TD, y_TD = (t.chunk(shares)[dist.get_rank(group)] for t in (x_TD, y_TD))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x_TD) - y_TD).square().sum() / (T * D)
        loss.backward()
        if group is not None:  # experts have seen all tokens; the router only ours
            for parameter in model.router.parameters():
                dist.all_reduce(parameter.grad, group=group)
            dist.all_reduce(loss.detach_(), group=group)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    losses = train(dist.group.WORLD if dist.is_initialized() else None)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")  # noqa: T201
    if dist.is_initialized():
        dist.destroy_process_group()
