"""What is refused, what is laid out where, and that ranks must agree."""

import functools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_parallel import AdamWConfig, Mesh, MismatchError, ParamSpec, ShardedAdamW, plan_mesh
from moe_parallel.layout import ALIGNMENT, plan_buckets
from torch.nn import Parameter

create_mesh = functools.cache(Mesh.create)
ALONE = Mesh.create(plan_mesh(1, num_experts=4))


def dense(name="w", value=None, **changes):
    value = torch.zeros(3) if value is None else value
    return ParamSpec(
        name, Parameter(value), **{"is_expert": False, "weight_decay": True, **changes}
    )


TWIN = dense("a")


@pytest.mark.parametrize(
    ("specs", "num_experts", "message"),
    [
        ([], 4, "there are no parameters"),
        ([dense()], 6, "num_experts=6, but the mesh is for 4 experts"),
        ([dense("a"), dense("a")], 4, "the name 'a' occurs twice"),
        (
            [TWIN, ParamSpec("b", TWIN.parameter, False, True)],
            4,
            "'a' and 'b' are one tensor: name it once",
        ),
        (
            [dense(value=torch.zeros(3, dtype=torch.float16))],
            4,
            "w is torch.float16; it must be float32, float64 or bfloat16",
        ),
        (
            [dense("a"), dense("b", torch.zeros(3, device="meta"))],
            4,
            "b is on meta, a on cpu",
        ),
        (
            [dense(value=torch.zeros(3, 2), is_expert=True)],
            4,
            "w has shape (3, 2); its first axis must hold num_experts/ep = 4/1 = 4 experts",
        ),
        (
            [dense(value=torch.zeros(()), is_expert=True)],
            4,
            "w has shape (); its first axis must hold num_experts/ep = 4/1 = 4 experts",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(specs, num_experts, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ShardedAdamW(specs, ALONE, AdamWConfig(lr=0.1), num_experts)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"max_norm": 0.0},
        {"max_norm": float("nan")},
    ],
)
def test_a_config_checks_itself(changes) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"{name} must .*{re.escape(str(value))}"):
        AdamWConfig(**{"lr": 0.1, **changes})


def test_bad_numbers_later_are_refused_too() -> None:
    optimizer = ShardedAdamW([dense()], ALONE, AdamWConfig(lr=0.1), 4)
    with pytest.raises(ValueError, match="lr must be finite, 0 or more, got nan"):
        optimizer.step(lr=float("nan"))
    with pytest.raises(ValueError, match="step_count must be 0 or more, got -1"):
        optimizer.loaded(-1)
    with pytest.raises(ValueError, match="bucket_elements must be positive, got 0"):
        ShardedAdamW([dense()], ALONE, AdamWConfig(lr=0.1), 4, bucket_elements=0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 300),
            st.booleans(),
            st.sampled_from([torch.float32, torch.bfloat16]),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 1000),
)
def test_every_parameter_has_one_aligned_place_of_its_own(drawn, bucket_elements) -> None:
    specs = [
        ParamSpec(f"p{i}", Parameter(torch.zeros(4 * expert or 1, size, dtype=dtype)), expert, wd)
        for i, (size, expert, dtype, wd) in enumerate(drawn)
    ]
    seen = []
    for layout, parameters in plan_buckets(specs, ALONE, 4, bucket_elements):
        end = 0
        for segment, parameter in zip(layout.segments, parameters, strict=True):
            assert segment.start % ALIGNMENT == 0
            assert end <= segment.start < end + ALIGNMENT
            assert segment.numel == parameter.numel()
            assert layout.dtype == parameter.dtype
            end = segment.stop
            seen.append(segment.name)
        assert end <= bucket_elements or len(layout.segments) == 1
    assert sorted(seen) == sorted(spec.name for spec in specs)


def test_parameters_keep_identity_value_and_dtype_and_are_trained_in_place() -> None:
    router = Parameter(torch.randn(4, 8))
    weight = Parameter(torch.randn(8, 8).bfloat16().t())  # not contiguous
    values = [router.detach().clone(), weight.detach().clone()]
    specs = [ParamSpec("router", router, False, False), ParamSpec("weight", weight, False, True)]
    optimizer = ShardedAdamW(specs, ALONE, AdamWConfig(lr=0.1), 4)
    assert torch.equal(router, values[0])
    assert torch.equal(weight, values[1])
    x_TD = torch.randn(16, 8)
    (x_TD.bfloat16() @ weight @ router.bfloat16().t()).float().square().sum().backward()
    optimizer.step()  # takes gradients that were not accumulated yet
    assert (router.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
    assert {s.data.dtype for s in optimizer.shards()} == {torch.float32}
    assert (router != values[0]).all()
    assert (weight != values[1]).any()
    assert router.grad is None


def test_a_step_takes_the_learning_rate_it_is_given() -> None:
    spec = dense(value=torch.ones(3), weight_decay=False)
    optimizer = ShardedAdamW([spec], ALONE, AdamWConfig(lr=0.5), 4)
    for lr, want in ((0.25, 0.75), (None, 0.25), (0.0, 0.25)):
        spec.parameter.grad = torch.full((3,), 0.5)
        optimizer.step(lr)
        torch.testing.assert_close(spec.parameter.detach(), torch.full((3,), want))


def disagree(group, case):
    mesh = create_mesh(plan_mesh(2), group=group)
    odd = mesh.rank == 1
    names = ("b", "a") if odd and case == "order" else ("a", "b")
    specs = [dense(name, weight_decay=not (odd and case == "decay")) for name in names]
    try:
        ShardedAdamW(specs, mesh, AdamWConfig(lr=0.2 if odd and case == "config" else 0.1), 4)
    except MismatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("order", "the list of parameters differs between ranks"),
        ("decay", "the list of parameters differs between ranks"),
        ("config", "the optimizer's configuration differs between ranks"),
        ("nothing", None),
    ],
)
def test_ranks_that_disagree_are_told_at_the_start(pool, case, what) -> None:
    for message in pool.run(disagree, 2, case):
        assert (message is None) if what is None else message.startswith(what)


def different_starts(group):
    mesh = create_mesh(plan_mesh(2), group=group)
    spec = dense(value=torch.full((200,), float(mesh.rank)))
    ShardedAdamW([spec], mesh, AdamWConfig(lr=0.1), 4)
    return spec.parameter.detach().clone()


def test_replicas_start_from_the_owners_values(pool) -> None:
    first, second = pool.run(different_starts, 2)
    assert torch.equal(first, second)
    assert first.tolist() == [0.0] * 128 + [1.0] * 72  # slices of 128 elements
