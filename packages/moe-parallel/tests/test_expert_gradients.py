"""Gradients of a mixture of experts over a mesh against one process, in float64."""

import functools

import pytest
import torch
import torch.distributed as dist
from moe_parallel import AdamWConfig, Mesh, ParamSpec, ShardedAdamW, plan_mesh
from torch.nn import Parameter

create_mesh = functools.cache(Mesh.create)
E, D, F, T, MICRO = 8, 5, 7, 24, 2  # experts, model and hidden size, tokens, microbatches
GRID = [(ep, edp) for ep in (1, 2, 4) for edp in (1, 2, 4) if ep * edp <= 4]
NAMES = ("router", "w_up", "w_down")


def weights_and_tokens():
    generator = torch.Generator().manual_seed(3)
    shapes = ((E, D), (E, F, D), (E, D, F), (T, D), (T, D))
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def mixture(x_TD, router_ED, w_up_eFD, w_down_eDF, experts):
    """Return the sum over some experts of gate times MLP."""
    gate_TE = (x_TD @ router_ED.T).softmax(-1)
    hidden_TeF = torch.einsum("td,efd->tef", x_TD, w_up_eFD).tanh()
    y_TeD = torch.einsum("tef,edf->ted", hidden_TeF, w_down_eDF)
    return (gate_TE[:, experts, None] * y_TeD).sum(1)


def gradients(group, ep, edp):
    """Return the gradient pieces of one step: with beta1 = 0 they are the first moment."""
    mesh = create_mesh(plan_mesh(ep * edp, ep=ep, num_experts=E), group=group)
    router_ED, w_up_EFD, w_down_EDF, x_TD, target_TD = weights_and_tokens()
    experts = slice(mesh.ep_rank * E // ep, (mesh.ep_rank + 1) * E // ep)
    values = (router_ED, w_up_EFD[experts], w_down_EDF[experts])
    parameters = [Parameter(value.clone()) for value in values]
    specs = [ParamSpec(n, p, n != "router", True) for n, p in zip(NAMES, parameters, strict=True)]
    config = AdamWConfig(lr=0.1, betas=(0.0, 0.9), max_norm=float("inf"))
    optimizer = ShardedAdamW(specs, mesh, config, E, bucket_elements=100)
    # Each EP group works on its own tokens; each of its ranks adds the part of its experts.
    tokens = slice(mesh.edp_rank * T // edp, (mesh.edp_rank + 1) * T // edp)
    for x_tD, target_tD in zip(
        x_TD[tokens].chunk(MICRO), target_TD[tokens].chunk(MICRO), strict=True
    ):
        part_tD = mixture(x_tD, *parameters, experts)
        y_tD = part_tD.detach().clone()
        if mesh.ep_group is not None:
            dist.all_reduce(y_tD, group=mesh.ep_group)
        part_tD.backward(2 * (y_tD - target_tD) / T)  # of sum((y - target)^2) / all tokens
        optimizer.accumulate()
    optimizer.step()
    return [
        (s.name, s.flat_start, s.data.clone()) for s in optimizer.shards() if s.kind == "exp_avg"
    ]


@pytest.mark.parametrize(("ep", "edp"), GRID)
def test_gradients_equal_those_of_one_process(pool, ep, edp) -> None:
    *values, x_TD, target_TD = weights_and_tokens()
    parameters = [Parameter(value) for value in values]
    loss = (mixture(x_TD, *parameters, slice(None)) - target_TD).square().sum() / T
    loss.backward()
    results = pool.run(gradients, ep * edp, ep, edp)
    pieces = [piece for result in results for piece in result]
    for name, parameter in zip(NAMES, parameters, strict=True):
        ordered = sorted(piece[1:] for piece in pieces if piece[0] == name)
        got = torch.cat([data for _, data in ordered]).view(parameter.shape)
        torch.testing.assert_close(got, parameter.grad, rtol=1e-10, atol=0)
