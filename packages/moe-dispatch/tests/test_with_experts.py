"""Dispatch together with the expert MLP of moe-kernels, against a plain dense computation."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from hypothesis import given
from moe_dispatch import Dispatcher, LocalDispatcher, make_dispatcher
from moe_dispatch.testing import DispatchCase, dispatch_cases
from moe_kernels import grouped_mlp
from rank_pool import RankPool
from torch import Tensor
from torch.nn.functional import silu

F = 4


class Found(NamedTuple):
    y_TD: Tensor
    dx_TD: Tensor
    dweight_TK: Tensor
    dw_gate_up_eGD: Tensor
    dw_down_eDF: Tensor


def experts_of(case: DispatchCase) -> tuple[Tensor, Tensor]:
    """Return the weights of all experts, gate first."""
    generator = torch.Generator().manual_seed(case.seed)
    E, D = case.num_experts, case.dim
    w_gate_up_EGD = torch.randn(E, 2 * F, D, generator=generator, dtype=torch.float64)
    return w_gate_up_EGD, torch.randn(E, D, F, generator=generator, dtype=torch.float64)


def through(dispatcher: Dispatcher, case: DispatchCase, rank: int) -> Found:
    mine = slice(dispatcher.local_experts.start, dispatcher.local_experts.stop)
    w_gate_up_eGD, w_down_eDF = (w[mine].clone().requires_grad_() for w in experts_of(case))
    x_TD, routing = case.tokens(rank).requires_grad_(), case.routing(rank)
    weight_TK = routing.weight_TK.requires_grad_()
    sent = dispatcher.dispatch(x_TD, routing)
    y_RD = grouped_mlp(sent.x_RD, w_gate_up_eGD, w_down_eDF, sent.offsets_e1)
    y_TD = dispatcher.combine(y_RD, sent)
    leaves = (x_TD, weight_TK, w_gate_up_eGD, w_down_eDF)
    y_TD.backward(case.gradient(rank))
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return Found(y_TD.detach(), *grads)


def on_a_rank(group: dist.ProcessGroup, case: DispatchCase) -> Found:
    return through(make_dispatcher(case.num_experts, group), case, dist.get_rank(group))


def dense(case: DispatchCase) -> list[Found]:
    """Apply every expert to every token of every rank, and weigh most of that with zero."""
    w_gate_up_EGD, w_down_EDF = (w.requires_grad_() for w in experts_of(case))
    found = []
    for rank in range(case.world_size):
        x_TD, routing = case.tokens(rank).requires_grad_(), case.routing(rank)
        weight_TK = routing.weight_TK.requires_grad_()
        y_TD = torch.zeros_like(x_TD)
        for i in range(case.num_experts):
            gate_TF, up_TF = (x_TD @ w_gate_up_EGD[i].T).split(F, dim=1)
            weight_T = (weight_TK * (routing.expert_TK == i)).sum(1)
            y_TD = y_TD + weight_T[:, None] * ((silu(gate_TF) * up_TF) @ w_down_EDF[i].T)
        y_TD.backward(case.gradient(rank))
        found.append((y_TD.detach(), x_TD.grad, weight_TK.grad))
    e = case.experts_per_rank
    dw_WegG = (w_gate_up_EGD.grad.split(e), w_down_EDF.grad.split(e))
    return [Found(*one, *dw) for one, dw in zip(found, zip(*dw_WegG, strict=True), strict=True)]


def assert_near(found: list[Found], case: DispatchCase) -> None:
    for rank, (got, want) in enumerate(zip(found, dense(case), strict=True)):
        for name in Found._fields:
            torch.testing.assert_close(
                getattr(got, name),
                getattr(want, name),
                rtol=1e-11,
                atol=1e-11,
                msg=lambda text, rank=rank, name=name: f"rank {rank}, {name}: {text}",
            )


@given(case=dispatch_cases(max_world_size=4, dtypes=("float64",)))
def test_ranks_with_resident_experts_are_one_dense_layer(
    pool: RankPool, case: DispatchCase
) -> None:
    assert_near(pool.run(on_a_rank, case.world_size, case), case)


@given(case=dispatch_cases(max_world_size=1, dtypes=("float64",)))
def test_one_rank_is_one_dense_layer(case: DispatchCase) -> None:
    assert_near([through(LocalDispatcher(case.num_experts), case, 0)], case)


def test_experts_without_rows_get_the_gradient_zero(pool: RankPool) -> None:
    case = DispatchCase(2, 2, 3, (5, 4), hot_experts=2)
    idle = pool.run(on_a_rank, 2, case)[1]
    assert not idle.dw_gate_up_eGD.any()
    assert not idle.dw_down_eDF.any()
    assert idle.dx_TD.any()
