"""The optimizer against torch.optim.AdamW, and against itself in other layouts."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_parallel import AdamWConfig, Mesh, ParamSpec, ShardedAdamW, plan_mesh
from torch.nn import Parameter

create_mesh = functools.cache(Mesh.create)  # process groups are costly, and layouts are few
LAYOUTS = [(world, ep) for world in (1, 2, 3, 4) for ep in (1, 2, 3, 4) if world % ep == 0]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@st.composite
def param_cases(draw, dtypes):
    shape = draw(st.sampled_from([(), (1,), (13,), (130,), (3, 5), (13, 39), (2, 3, 7), (0,)]))
    return {
        "shape": shape,
        "dtype": draw(st.sampled_from(dtypes)),
        "is_expert": draw(st.booleans()),
        "weight_decay": draw(st.booleans()),
        # missing: never a gradient. patchy: not on all ranks, not in all microbatches.
        "grad": draw(st.sampled_from(["always", "always", "always", "patchy", "missing"])),
        "trainable": draw(st.sampled_from([True, True, True, False])),
    }


@st.composite
def cases(draw, dtypes=tuple(DTYPES)):
    world, ep = draw(st.sampled_from(LAYOUTS))
    return {
        "world": world,
        "ep": ep,
        "num_experts": 12 * draw(st.integers(1, 2)),  # divides over every ep drawn
        "params": draw(st.lists(param_cases(dtypes), min_size=1, max_size=6)),
        "bucket_elements": draw(st.sampled_from([1, 64, 700, 1 << 20])),
        "micro": draw(st.integers(1, 3)),
        "steps": draw(st.integers(1, 4)),
        "max_norm": draw(st.sampled_from([1.0, 50.0, math.inf])),
        "seed": draw(st.integers(0, 1000)),
        "first": 0,
        "load": None,
        "poison": None,
    }


def global_shape(case, param):
    return (case["num_experts"], *param["shape"]) if param["is_expert"] else param["shape"]


def generator(*key):
    return torch.Generator().manual_seed(hash(key) % 2**63)


def initial(case, i):
    shape, dtype = global_shape(case, case["params"][i]), case["params"][i]["dtype"]
    return torch.randn(shape, generator=generator(case["seed"], i)).to(DTYPES[dtype])


def gradient(case, i, step, micro, replica):
    """Return what a replica adds to the gradient of the whole tensor.

    Numbers with few bits, so that every order of summation gives the same bits.
    """
    param = case["params"][i]
    key = (case["seed"], i, step, micro, replica)
    patch = param["grad"] == "patchy" and sum(key) % 2
    if param["grad"] == "missing" or patch or not param["trainable"]:
        return None
    eighths = torch.randint(-64, 65, global_shape(case, param), generator=generator(*key))
    return eighths.to(DTYPES[param["dtype"]]) / 8


def train(group, case, layout=None):
    """Train on gradients of the case's layout in that or another layout.

    In another layout each rank plays its share of the replicas of the case's layout.
    """
    world, ep = layout or (case["world"], case["ep"])
    mesh = create_mesh(plan_mesh(world, ep=ep), group=group)
    each = case["num_experts"] // ep
    experts = slice(mesh.ep_rank * each, (mesh.ep_rank + 1) * each)
    specs = [make_spec(case, i, experts) for i in range(len(case["params"]))]
    optimizer = ShardedAdamW(
        specs,
        mesh,
        AdamWConfig(lr=0.01, max_norm=case["max_norm"]),
        case["num_experts"],
        bucket_elements=case["bucket_elements"],
    )
    if case["load"] is not None:
        restore(optimizer, *case["load"])
    start = [spec.parameter.detach().clone() for spec in specs]
    stats = []
    for step in range(case["first"], case["first"] + case["steps"]):
        for micro in range(case["micro"]):
            for replica in range(case["world"]):
                set_gradients(case, specs, mesh, experts, (step, micro, replica))
                optimizer.accumulate()
                assert all(spec.parameter.grad is None for spec in specs)
        stats.append([value.item() for value in optimizer.step()])
    return {
        "params": {spec.name: spec.parameter.detach().clone() for spec in specs},
        "start": start,
        "experts": experts,
        "shards": [
            (s.name, s.kind, s.global_shape, s.flat_start, s.flat_stop, s.data.clone())
            for s in optimizer.shards()
        ],
        "stats": stats,
        "step_count": optimizer.step_count,
    }


def make_spec(case, i, experts):
    param = case["params"][i]
    value = initial(case, i)[experts if param["is_expert"] else ...].clone()
    parameter = Parameter(value, requires_grad=param["trainable"])
    return ParamSpec(f"p{i}", parameter, param["is_expert"], param["weight_decay"])


def set_gradients(case, specs, mesh, experts, key):
    """Set the gradients of one microbatch of one replica, where this rank plays it."""
    *_, replica = key
    for i, spec in enumerate(specs):
        if spec.is_expert:
            plays = replica < case["world"] // case["ep"]
            plays &= replica % mesh.plan.edp == mesh.edp_rank
        else:
            plays = replica % mesh.plan.dp == mesh.dp_rank
        grad = gradient(case, i, *key) if plays else None
        if grad is not None:
            grad = grad[experts if spec.is_expert else ...].clone()
            if case["poison"] is not None and (*key, mesh.rank, i) == case["poison"][:5]:
                grad.view(-1)[-1] = case["poison"][5]
            spec.parameter.grad = grad


def restore(optimizer, full, step_count):
    for shard in optimizer.shards():
        saved = full[shard.name, shard.kind].reshape(-1)
        shard.data.copy_(saved[shard.flat_start : shard.flat_stop])
    optimizer.loaded(step_count)


def assemble(case, results):
    """Put the pieces of all ranks together, and check that they tile every tensor once."""
    pieces = {}
    for result in results:
        for name, kind, shape, start, stop, data in result["shards"]:
            pieces.setdefault((name, kind), []).append((start, stop, data))
            assert shape == global_shape(case, case["params"][int(name[1:])])
            assert data.shape == (stop - start,)
    full = {}
    for i, param in enumerate(case["params"]):
        shape = global_shape(case, param)
        kinds = ("master", "exp_avg", "exp_avg_sq") if param["trainable"] else ("master",)
        for kind in kinds:
            position, line = 0, []
            for start, stop, data in sorted(pieces.pop((f"p{i}", kind), []), key=lambda p: p[:2]):
                assert start == position
                position = stop
                line.append(data)
            assert position == math.prod(shape)
            if line:
                full[f"p{i}", kind] = torch.cat(line).view(shape)
    assert not pieces
    return full


def torch_adamw(case):
    """Train with torch.optim.AdamW, in float64, on gradients summed over all replicas."""
    params = [Parameter(initial(case, i).double()) for i in range(len(case["params"]))]
    trained = [i for i, param in enumerate(case["params"]) if param["trainable"]]
    groups = [
        {
            "params": [params[i] for i in trained if case["params"][i]["weight_decay"] == decays],
            "weight_decay": 0.1 * decays,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    norms = []
    for step in range(case["steps"]):
        for i in trained:
            expert = case["params"][i]["is_expert"]
            grad = torch.zeros_like(params[i])
            for micro in range(case["micro"]):
                for replica in range(case["world"] // case["ep"] if expert else case["world"]):
                    part = gradient(case, i, step, micro, replica)
                    grad += 0 if part is None else part
            params[i].grad = grad
        max_norm = case["max_norm"]
        norms.append(torch.nn.utils.clip_grad_norm_([params[i] for i in trained], max_norm).item())
        optimizer.step()
    state = {}
    for i, param in enumerate(params):
        state[f"p{i}", "master"] = param.detach()
        for kind in ("exp_avg", "exp_avg_sq") if i in trained else ():
            state[f"p{i}", kind] = optimizer.state[param][kind]
    return state, norms


@given(cases())
def test_equals_torch_adamw_on_the_summed_gradients(pool, case) -> None:
    results = pool.run(train, case["world"], case)
    full = assemble(case, results)
    want, norms = torch_adamw(case)
    for (name, kind), got in full.items():
        dtype = case["params"][int(name[1:])]["dtype"]
        assert got.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        tolerance = 1e-12 if dtype == "float64" else 1e-6
        torch.testing.assert_close(
            got.double(), want[name, kind], rtol=tolerance, atol=tolerance, msg=f"{name} {kind}"
        )
    for result in results:
        assert result["step_count"] == case["steps"]
        assert result["stats"] == results[0]["stats"]  # the same bits on every rank
        for (norm, coef, skipped, *_), want_norm in zip(result["stats"], norms, strict=True):
            assert norm == pytest.approx(want_norm, rel=1e-12)
            want_coef = min(1.0, case["max_norm"] / (want_norm + 1e-6))
            assert coef == pytest.approx(want_coef, rel=1e-12)
            assert not skipped


@given(cases())
def test_the_layout_does_not_change_a_bit(pool, case) -> None:
    results = pool.run(train, case["world"], case)
    alone = train(None, case, (1, 1))
    assert_same_state(assemble(case, results), assemble(case, [alone]))
    for result in results:
        assert result["stats"] == alone["stats"]
        for i, param in enumerate(case["params"]):
            want = alone["params"][f"p{i}"]
            got = result["params"][f"p{i}"]
            assert got.dtype == DTYPES[param["dtype"]]
            assert torch.equal(got, want[result["experts"]] if param["is_expert"] else want)


@given(cases())
def test_parameters_are_the_rounded_masters_and_frozen_ones_stay(pool, case) -> None:
    results = pool.run(train, case["world"], case)
    full = assemble(case, results)
    for i, param in enumerate(case["params"]):
        for result in results:
            mine = result["experts"] if param["is_expert"] else ...
            got = result["params"][f"p{i}"]
            if got.numel():
                assert torch.equal(got, full[f"p{i}", "master"][mine].to(got.dtype))
            if not param["trainable"]:
                assert torch.equal(got, initial(case, i)[mine])


@given(cases(), st.sampled_from(LAYOUTS), st.sampled_from([1, 64, 700]))
def test_moving_to_another_layout_changes_no_bit(pool, case, layout, bucket_elements) -> None:
    stayed = pool.run(train, case["world"], {**case, "steps": case["steps"] + 2})
    before = pool.run(train, case["world"], case)
    rest = {
        **case,
        "first": case["steps"],
        "steps": 2,
        "load": (assemble(case, before), before[0]["step_count"]),
        "bucket_elements": bucket_elements,
    }
    after = pool.run(train, layout[0], rest, layout)
    kept, moved = assemble_params(case, before), assemble_params(case, stayed)
    assert_same_state(assemble(case, after), assemble(case, stayed))
    assert after[0]["stats"] == stayed[0]["stats"][-2:]
    for result in after:
        assert result["step_count"] == case["steps"] + 2
        for i, param in enumerate(case["params"]):
            mine = result["experts"] if param["is_expert"] else ...
            assert torch.equal(result["start"][i], kept[f"p{i}"][mine])
            assert torch.equal(result["params"][f"p{i}"], moved[f"p{i}"][mine])


@given(
    cases(dtypes=["float32", "float64"]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.data(),
)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_that_step_on_all(
    pool, case, value, data
) -> None:
    # One more expert parameter makes sure that there is a place for the fault.
    expert = {
        "shape": (5,),
        "dtype": "float32",
        "is_expert": True,
        "weight_decay": True,
        "grad": "always",
        "trainable": True,
    }
    case = {**case, "params": [*case["params"], expert], "steps": 2}
    rank = data.draw(st.integers(0, case["world"] - 1))
    micro = data.draw(st.integers(0, case["micro"] - 1))
    bad = len(case["params"]) - 1
    poison = (1, micro, rank // case["ep"], rank, bad, value)
    results = pool.run(train, case["world"], {**case, "steps": 3, "poison": poison})
    # Steps 0 and 2 alone: what remains if step 1 leaves no trace at all.
    first = pool.run(train, case["world"], {**case, "steps": 1})
    load = (assemble(case, first), 1)
    last = pool.run(train, case["world"], {**case, "first": 2, "steps": 1, "load": load})
    assert_same_state(assemble(case, results), assemble(case, last))
    for result in results:
        good, skipped, after = result["stats"]
        assert skipped[1:] == [0.0, True, False, False]
        assert math.isnan(skipped[0])
        assert (good, after) == (first[0]["stats"][0], last[0]["stats"][0])
        assert result["step_count"] == 2


def assemble_params(case, results):
    """Return whole parameters, from the ranks that hold their parts."""
    whole = {}
    for i, param in enumerate(case["params"]):
        whole[f"p{i}"] = initial(case, i)
        for result in results:
            mine = result["experts"] if param["is_expert"] else ...
            whole[f"p{i}"][mine] = result["params"][f"p{i}"]
    return whole


def assert_same_state(got, want) -> None:
    assert got.keys() == want.keys()
    for key, value in got.items():
        assert torch.equal(value, want[key]), key
