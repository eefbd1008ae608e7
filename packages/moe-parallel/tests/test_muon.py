"""Muon on each matrix by itself, however experts and ranks divide them."""

import functools
import math
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_parallel import AdamWConfig, Mesh, MuonConfig, ParamSpec, ShardedAdamW, plan_mesh
from moe_parallel.muon import orthogonalize
from torch.nn import Parameter

create_mesh = functools.cache(Mesh.create)
E = 4
SHAPES = {
    "dense": (6, 10), "other": (6, 10), "tall": (9, 4),
    "experts": (E, 6, 10), "narrow": (E, 5, 3), "bias": (7,),
}  # fmt: skip
MUON = MuonConfig(dtype=torch.float64)
CONFIG = AdamWConfig(lr=0.02, max_norm=2.0, weight_decay=0.1)


def value(name, *key):
    generator = torch.Generator().manual_seed(zlib.crc32(repr((name, *key)).encode()))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def is_expert(name):
    return len(SHAPES[name]) == 3


def train(group, world, ep, bucket_elements, poisoned):
    mesh = create_mesh(plan_mesh(world, ep=ep), group=group)
    own = slice(mesh.ep_rank * E // ep, (mesh.ep_rank + 1) * E // ep)
    specs = []
    for name in SHAPES:
        start = value(name)[own if is_expert(name) else ...].clone()
        rule = "adamw" if name == "bias" else "muon"
        specs.append(ParamSpec(name, Parameter(start), is_expert(name), name != "tall", rule))
    optimizer = ShardedAdamW(specs, mesh, CONFIG, E, muon=MUON, bucket_elements=bucket_elements)
    stats = []
    for step in range(3):
        for spec in specs:
            replicas = mesh.plan.edp if spec.is_expert else mesh.plan.dp
            grad = value(spec.name, step)[own if spec.is_expert else ...] / replicas
            spec.parameter.grad = grad.clone()
            if (step, mesh.rank, spec.name) == (poisoned, 0, "experts"):
                spec.parameter.grad[0, 0, 0] = math.nan
        stats.append(optimizer.step())
    shards = [(s.name, s.kind, s.flat_start, s.data.clone()) for s in optimizer.shards()]
    return shards, [s.skipped.item() for s in stats], [s.grad_norm.item() for s in stats]


def reference(poisoned):
    """Update every matrix alone, with the polar factor's iteration written out."""
    weights = {name: value(name) for name in SHAPES}
    momenta = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in SHAPES}
    bias = Parameter(weights["bias"].clone())
    adamw = torch.optim.AdamW([bias], lr=CONFIG.lr, betas=CONFIG.betas, weight_decay=0.1)
    norms = []
    for step in range(3):
        grads = {name: value(name, step) for name in SHAPES}
        norm = math.sqrt(sum(g.square().sum().item() for g in grads.values()))
        norms.append(norm)
        if step == poisoned:
            continue
        coef = min(1.0, CONFIG.max_norm / (norm + 1e-6))
        for name in SHAPES:
            if name == "bias":
                bias.grad = grads[name] * coef
                adamw.step()
                weights[name] = bias.detach()
                continue
            matrices = weights[name].view(-1, *SHAPES[name][-2:])
            for i, w in enumerate(matrices):
                g = grads[name].view_as(matrices)[i] * coef
                m = momenta[name].view_as(matrices)[i]
                m.mul_(0.95).add_(0.05 * g)
                u = 0.05 * g + 0.95 * m
                u = u / (u.norm() + 1e-7)
                for _ in range(5):
                    s = u @ u.T
                    u = 3.4445 * u - 4.775 * s @ u + 2.0315 * s @ s @ u
                w.mul_(1 - CONFIG.lr * (0.0 if name == "tall" else 0.1))
                w.sub_(CONFIG.lr * 0.2 * math.sqrt(max(w.shape)) * u)
    return weights, momenta, norms


@given(
    st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4)]),
    st.sampled_from([1, 100, 1 << 20]),
    st.sampled_from([None, 0, 1]),
)
def test_each_matrix_is_updated_as_if_it_were_alone(pool, layout, elements, poisoned) -> None:
    world, ep = layout
    results = pool.run(train, world, world, ep, elements, poisoned)
    weights, momenta, norms = reference(poisoned)
    pieces = {}
    for shards, skipped, got_norms in results:
        assert skipped == [step == poisoned for step in range(3)]
        for step, norm in enumerate(got_norms):
            assert norm == pytest.approx(norms[step], rel=1e-10) or step == poisoned
        for name, kind, start, data in shards:
            pieces.setdefault((name, kind), []).append((start, data))
    for name, shape in SHAPES.items():
        states = {"master": weights[name]}
        if name != "bias":
            states["momentum"] = momenta[name]
        for kind, want in states.items():
            ordered = sorted(pieces[name, kind], key=lambda piece: piece[0])
            got = torch.cat([data for _, data in ordered]).view(shape)  # tiles it exactly
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10, msg=f"{name} {kind}")


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 20), (2, 20, 5)])
def test_singular_values_come_close_to_one_and_directions_stay(shape) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = orthogonalize(x, 5, torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    rotated = u.mT @ y @ v.mT  # diagonal, as each singular value moves by itself
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(rotated, torch.diag_embed(diagonal), rtol=0, atol=1e-8)
    clear = diagonal[s > 0.05 * s.amax(-1, keepdim=True)]
    assert ((clear > 0.6) & (clear < 1.3)).all()
    assert not orthogonalize(torch.zeros(1, 3, 3), 5, torch.float32).any()


def test_equals_torch_muon_on_a_matrix() -> None:
    weight, twin = (Parameter(torch.ones(8, 16)) for _ in range(2))
    spec = ParamSpec("w", weight, False, True, "muon")
    config = AdamWConfig(lr=0.1, max_norm=math.inf)
    ours = ShardedAdamW([spec], Mesh.create(plan_mesh(1)), config, 1)
    theirs = torch.optim.Muon(
        [twin], lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        grad = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        weight.grad, twin.grad = grad.clone(), grad.clone()
        ours.step()
        theirs.step()
    # Both iterate in bfloat16.
    torch.testing.assert_close(weight, twin, rtol=2e-2, atol=2e-2)
    assert (weight - 1).abs().max() > 0.1


@pytest.mark.parametrize(
    ("shape", "expert", "message"),
    [
        ((4, 3), True, r"w has shape \(4, 3\); Muon is for matrices, so it needs 3 axes"),
        ((4,), False, r"needs 2 axes"),
        ((0, 4), False, r"none of length 0"),
    ],
)
def test_what_is_no_matrix_is_refused(shape, expert, message) -> None:
    spec = ParamSpec("w", Parameter(torch.zeros(shape)), expert, True, "muon")
    with pytest.raises(ValueError, match=message):
        ShardedAdamW([spec], Mesh.create(plan_mesh(1)), CONFIG, 4)


@pytest.mark.parametrize("changes", [{"momentum": 1.0}, {"steps": 0}, {"dtype": torch.int8}])
def test_a_config_checks_itself(changes) -> None:
    ((name, bad),) = changes.items()
    with pytest.raises(ValueError, match=f"{name} must be .*{bad}"):
        MuonConfig(**changes)
