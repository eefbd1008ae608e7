"""What a pipeline carries between stages, and what it does when a stage raises."""

import functools

import pytest
import torch
from moe_parallel import (
    AdamWConfig,
    Gradients,
    Mesh,
    MismatchError,
    ParamSpec,
    Pipeline,
    ScheduleError,
    ShardedAdamW,
    StageError,
    StageResult,
    make_schedule,
    plan_mesh,
)
from moe_parallel.pipeline.links import Links
from torch import nn

create_mesh = functools.cache(Mesh.create)


class Faulty(nn.Module):
    """A linear stage that raises where it is told to."""

    def __init__(self, number, last, fault=None, weight=0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.number, self.last, self.fault = number, last, fault

    def forward(self, x, micro):
        if self.fault == ("F", self.number, micro):
            raise ValueError("bad luck")
        y = (torch.full((2,), float(micro + 1)) if x is None else x) * self.weight
        if self.fault in (("B", self.number, micro), ("I", self.number, micro)):
            y.register_hook(self._raise)
        return y.sum() if self.last else y

    def _raise(self, grad):
        raise ArithmeticError("worse luck")


def run_with_fault(group, name, num_ranks, num_micro, fault):
    """Return what was raised, then what a step without a fault gives on the same groups."""
    mesh = create_mesh(plan_mesh(num_ranks, pp=num_ranks), group=group)
    plan = make_schedule(name, num_ranks, num_micro)
    numbers = plan.stages_of(mesh.pp_rank)
    stages = {i: Faulty(i, i == plan.num_stages - 1, fault) for i in numbers}
    target = Gradients({str(i): stage.weight for i, stage in stages.items()})
    pipeline = Pipeline(stages, mesh, target, schedule=name)
    caught = None
    try:
        pipeline.step(range(num_micro))
    except StageError as error:
        cause = error.__cause__
        caught = (error.rank, error.stage, error.micro, error.kind, str(error), repr(cause))
    for stage in stages.values():
        stage.fault = None
        stage.weight.grad = None
    target.zero()
    pipeline.step(range(num_micro))
    return caught, {name: grad.item() for name, grad in target.main_grads.items()}


FAULTS = [
    ("1f1b", 2, ("F", 0, 0)),
    ("1f1b", 4, ("F", 2, 3)),
    ("1f1b", 4, ("B", 0, 3)),
    ("interleaved", 2, ("F", 3, 1)),
    ("zbv", 2, ("B", 1, 2)),
    ("zbv", 4, ("F", 7, 0)),
]


@pytest.mark.parametrize(("name", "num_ranks", "fault"), FAULTS)
def test_an_exception_on_one_rank_raises_on_all_and_says_where(
    pool, name, num_ranks, fault
) -> None:
    num_micro = 4
    kind, stage, micro = fault
    plan = make_schedule(name, num_ranks, num_micro)
    results = pool.run(run_with_fault, num_ranks, name, num_ranks, num_micro, fault)
    origin = plan.rank_of_stage[stage]
    for rank, (caught, _) in enumerate(results):
        assert caught is not None
        assert caught[:3] == (origin, stage, micro)
        word = "forward" if kind == "F" else "backward"
        reason = "ValueError: bad luck" if kind == "F" else "ArithmeticError: worse luck"
        assert caught[4] == (
            f"rank {origin} raised in the {word} of stage {stage}, microbatch {micro}: {reason}"
        )
        assert ("luck" in caught[5]) == (rank == origin)


@pytest.mark.parametrize(("name", "num_ranks", "fault"), FAULTS)
def test_after_an_exception_the_groups_still_work(pool, name, num_ranks, fault) -> None:
    results = pool.run(run_with_fault, num_ranks, name, num_ranks, 4, fault)
    num_stages = make_schedule(name, num_ranks, 4).num_stages
    grads = {number: grad for _, found in results for number, grad in found.items()}
    # The loss is 2 (1 + 2 + 3 + 4) times the product of the weights, each 1/2.
    assert grads == {str(i): 20 * 0.5 ** (num_stages - 1) for i in range(num_stages)}


def recover(group, fault):
    """Train a step that fails on one replica, then one that does not; return its norm."""
    mesh = create_mesh(plan_mesh(4, pp=2), group=group)
    stage = Faulty(mesh.pp_rank, last=mesh.pp_rank == 1)
    spec = ParamSpec(f"w{mesh.pp_rank}", stage.weight, False, False)
    optimizer = ShardedAdamW([spec], mesh, AdamWConfig(lr=0.0), 1)
    pipeline = Pipeline({mesh.pp_rank: stage}, mesh, optimizer)
    stage.fault = fault if mesh.dp_rank == 0 else None
    caught = None
    try:
        pipeline.step(range(4))
    except StageError as error:
        caught = str(error)
    left = stage.weight.grad
    stage.fault = None
    pipeline.step(range(4))
    stats = optimizer.step()
    return caught, left, stats.grad_norm.item(), stats.desynced.item()


@pytest.mark.parametrize("fault", [("F", 0, 3), ("F", 1, 3), ("B", 0, 3), ("B", 1, 1)])
def test_after_an_exception_on_one_replica_the_optimizer_goes_on(pool, fault) -> None:
    # Two replicas, each with a loss of 2 (1 + 2 + 3 + 4) times two weights of 1/2.
    for caught, left, norm, desynced in pool.run(recover, 4, fault):
        assert "luck" in caught
        assert (left, desynced) == (None, False)
        assert norm == pytest.approx(20 * 2**0.5)


def test_after_an_exception_gradients_of_one_process_are_dropped() -> None:
    stage = Faulty(0, last=True)
    target = Gradients({"w": stage.weight})
    pipeline = Pipeline({0: stage}, Mesh.create(plan_mesh(1)), target)
    stage.fault = ("F", 0, 1)
    with pytest.raises(StageError):
        pipeline.step(range(2))
    assert target.main_grads["w"].item() == 0
    stage.fault = None
    pipeline.step(range(2))
    assert target.main_grads["w"].item() == 2 * (1 + 2)
    with pytest.raises(StageError, match=r"complete already in this step: call zero\(\) between"):
        pipeline.step(range(2))


def test_a_second_step_of_a_pipeline_before_that_of_the_optimizer_is_explained() -> None:
    stage = Faulty(0, last=True)
    optimizer = ShardedAdamW(
        [ParamSpec("w", stage.weight, False, False)],
        Mesh.create(plan_mesh(1)),
        AdamWConfig(lr=0.1),
        1,
    )
    pipeline = Pipeline({0: stage}, Mesh.create(plan_mesh(1)), optimizer)
    pipeline.step(range(2))
    with pytest.raises(StageError, match=r"another Pipeline.step\(\) without the optimizer's"):
        pipeline.step(range(2))


def run_on_own_edges(group, name, pp, world):
    """Give every pair of neighbours a communicator of its own, as on NCCL."""
    mesh = create_mesh(plan_mesh(world, pp=pp), group=group)
    plan = make_schedule(name, pp, 4)
    stages = {i: Faulty(i, i == plan.num_stages - 1) for i in plan.stages_of(mesh.pp_rank)}
    target = Gradients({str(i): stage.weight for i, stage in stages.items()})
    pipeline = Pipeline(stages, mesh, target, schedule=name)
    pipeline._links = Links.create(mesh, plan, own_edges=True)
    pipeline.step(range(4))
    edges = pipeline._links.edges
    different = len({id(edge) for edge in edges.values()}) == len(edges)
    return {n: g.item() for n, g in target.main_grads.items()}, sorted(edges), different


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize(("pp", "world"), [(2, 2), (2, 4), (4, 4)])
def test_pipelines_run_over_a_communicator_for_each_ordered_pair(pool, name, pp, world) -> None:
    plan = make_schedule(name, pp, 4)
    pairs = {(r, to) for r in range(pp) for to, _ in plan.sends(r)}
    grads = {}
    for rank, (found, edges, different) in enumerate(
        pool.run(run_on_own_edges, world, name, pp, world)
    ):
        own = rank // (world // pp)
        assert edges == sorted(pair for pair in pairs if own in pair)
        assert different
        grads |= found
    n = plan.num_stages
    assert grads == {str(i): 20 * 0.5 ** (n - 1) for i in range(n)}


class Mixed(nn.Module):
    """Passes several tensors on: wanted, unwanted, whole numbers, nothing, a scalar."""

    def __init__(self, number, last):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0 + number, dtype=torch.float64))
        self.last = last

    def forward(self, x, micro):
        if x is None:
            x = (
                torch.arange(3.0 + micro, dtype=torch.float64),
                torch.ones(2, 1, dtype=torch.bfloat16),
                torch.tensor([micro, 7]),
                torch.zeros(0, 4),
                torch.tensor(True),
            )
        a, b, c, d, e = x
        assert (b.dtype, d.shape, e.shape) == (torch.bfloat16, (0, 4), ())
        assert (c.tolist(), e.item(), b.requires_grad) == ([micro, 7], True, False)
        if self.last:
            return StageResult(loss=(a * self.scale).sum() * c[0], metrics={"c": c})
        return a * self.scale, b, c, d, e


def carry(group, num_ranks, name):
    mesh = create_mesh(plan_mesh(num_ranks, pp=num_ranks), group=group)
    plan = make_schedule(name, num_ranks, 2)
    stages = {i: Mixed(i, i == plan.num_stages - 1) for i in plan.stages_of(mesh.pp_rank)}
    target = Gradients({str(i): stage.scale for i, stage in stages.items()})
    outcome = Pipeline(stages, mesh, target, schedule=name).step([0, 1])
    return {n: g.item() for n, g in target.main_grads.items()}, outcome.losses


@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 2), ("1f1b", 4), ("zbv", 2)])
def test_stages_may_pass_on_any_tensors(pool, name, num_ranks) -> None:
    results = pool.run(carry, num_ranks, num_ranks, name)
    num_stages = make_schedule(name, num_ranks, 2).num_stages
    product = torch.tensor([2.0 + i for i in range(num_stages)]).prod().item()
    grads = {n: g for found, _ in results for n, g in found.items()}
    assert grads == {str(i): pytest.approx(6 * product / (2 + i)) for i in range(num_stages)}
    losses = {key: loss.item() for _, found in results for key, loss in found.items()}
    last = num_stages - 1
    assert losses == {(last, 0): 0, (last, 1): pytest.approx(6 * product)}


class Frozen(nn.Module):
    """A stage that needs no gradient, one that ignores its input, and one that has a loss."""

    def __init__(self, number):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2), requires_grad=number != 0)
        self.number = number

    def forward(self, x, micro):
        if self.number == 0:
            return self.weight * micro
        if self.number == 1:
            return StageResult(self.weight * 3, loss=self.weight.sum())
        if self.number == 2:
            return x * self.weight
        return (x * self.weight).sum()


def train_frozen(group):
    mesh = create_mesh(plan_mesh(4, pp=4), group=group)
    stage = Frozen(mesh.pp_rank)
    target = Gradients({"w": stage.weight})
    outcome = Pipeline({mesh.pp_rank: stage}, mesh, target).step([1.0, 2.0])
    return {n: g.tolist() for n, g in target.main_grads.items()}, len(outcome.losses)


def test_stages_without_gradient_and_with_losses_of_their_own_fit_in(pool) -> None:
    assert pool.run(train_frozen, 4) == [
        ({}, 0),
        ({"w": [2 * (3.0 + 1)] * 2}, 2),
        ({"w": [6.0, 6.0]}, 0),
        ({"w": [6.0, 6.0]}, 2),
    ]


class Evaluated(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.last = last

    def forward(self, x, micro):
        assert not torch.is_grad_enabled()
        y = self.weight * (micro if x is None else x)
        return StageResult(y, metrics={"norm": y.norm()}) if self.last else y


def evaluate(group, name, num_ranks, num_micro):
    mesh = create_mesh(plan_mesh(num_ranks, pp=num_ranks), group=group)
    plan = make_schedule(name, num_ranks, num_ranks)
    stages = {i: Evaluated(i == plan.num_stages - 1) for i in plan.stages_of(mesh.pp_rank)}
    target = Gradients({str(i): stage.weight for i, stage in stages.items()})
    pipeline = Pipeline(stages, mesh, target, schedule=name)
    assert pipeline.num_stages == plan.num_stages
    outcome = pipeline.evaluate([torch.tensor([1.0 + m]) for m in range(num_micro)])
    assert all(stage.weight.grad is None for stage in stages.values())
    assert not any(grad.any() for grad in target.main_grads.values())
    return {m: y.item() for m, y in outcome.outputs.items()}


@pytest.mark.parametrize("num_micro", [1, 3, 4])
@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 4), ("interleaved", 2), ("zbv", 4)])
def test_evaluation_runs_any_number_of_microbatches_forward(
    pool, name, num_ranks, num_micro
) -> None:
    plan = make_schedule(name, num_ranks, num_ranks)
    results = pool.run(evaluate, num_ranks, name, num_ranks, num_micro)
    want = {m: (1.0 + m) * 2.0**plan.num_stages for m in range(num_micro)}
    last = plan.rank_of_stage[-1]
    assert results == [want if rank == last else {} for rank in range(num_ranks)]


def refusals(group):
    mesh = create_mesh(plan_mesh(2, pp=2), group=group)
    messages = []
    stage = Faulty(mesh.pp_rank, last=mesh.pp_rank == 1)
    target = Gradients({"w": stage.weight})
    for attempt in (
        lambda: Pipeline({7: stage}, mesh, target),
        lambda: Pipeline({mesh.pp_rank: stage}, mesh, target, schedule="gpipe"),
        lambda: Pipeline(
            {mesh.pp_rank: stage}, mesh, target, schedule=lambda m: make_schedule("1f1b", 3, m)
        ),
        lambda: Pipeline({mesh.pp_rank: stage}, mesh, target).step([]),
        lambda: Pipeline({mesh.pp_rank: stage}, mesh, target).step(range(2 + mesh.pp_rank)),
    ):
        try:
            attempt()
        except (ScheduleError, MismatchError) as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_is_refused_on_every_rank(pool) -> None:
    for rank, messages in enumerate(pool.run(refusals, 2)):
        assert messages == [
            f"1F1B puts stages [{rank}] on rank {rank} of the pipeline, got stages [7]",
            "no schedule is called 'gpipe'; there are 1f1b, interleaved, zbv",
            "1F1B is for 3 ranks, the mesh has pp=2",
            "a step needs at least 1 microbatch, got 0",
            "the ranks of a pipeline were given different numbers of microbatches: [2, 3]",
        ]


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x, micro):
        return self.value


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (None, torch.zeros(()), "must return activations, got None"),
        ("text", torch.zeros(()), "must be a tensor or a tuple of them, got str"),
        (torch.zeros(1), torch.zeros(3), r"0-dim tensor, got a tensor of shape \(3,\)"),
        (torch.zeros(1), StageResult(torch.zeros(1)), "the last stage returned no loss"),
        (StageResult(torch.zeros(1), 3.0), torch.zeros(()), "0-dim tensor, got float"),
    ],
)
def test_a_stage_that_returns_something_else_is_told(first, last, message) -> None:
    mesh = Mesh.create(plan_mesh(1))
    pipeline = Pipeline({0: Returns(first), 1: Returns(last)}, mesh, Gradients({}), schedule="zbv")
    with pytest.raises(StageError, match=message):
        pipeline.step([0])


class Passes(nn.Module):
    def forward(self, x, micro):
        return micro if x is None else tuple(x for _ in range(9)) if micro.ndim == 9 else x.sum()


def send_too_much(group, shape):
    mesh = create_mesh(plan_mesh(2, pp=2), group=group)
    pipeline = Pipeline({mesh.pp_rank: Passes()}, mesh, Gradients({}))
    try:
        pipeline.step([torch.ones(shape, dtype=torch.complex64 if len(shape) == 1 else None)])
    except StageError as error:
        return str(error)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1,) * 9, "may have 8 axes, got 9"), ((1,), "torch.complex64 cannot be sent")],
)
def test_what_does_not_fit_into_a_message_is_named(pool, shape, message) -> None:
    for error in pool.run(send_too_much, 2, shape):
        assert message in error
