"""Reductions during backward and gathers during the forward: when they begin, what they give."""

import functools
import gc
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from moe_parallel import (
    AdamWConfig,
    Mesh,
    ParamSpec,
    ShardedAdamW,
    plan_mesh,
    recompute,
    split_linears,
)
from torch import nn

create_mesh = functools.cache(Mesh.create)
D, BLOCKS, STEPS = 6, 5, 2


class Block(nn.Module):
    """A dense layer and four small matrices, of which a forward may leave one out."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(D, D)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(D, D) * 0.1) for _ in range(4)])
        self.frozen = nn.Parameter(torch.randn(D), requires_grad=False)

    def forward(self, x, skip):
        y = torch.tanh(self.dense(x)) + self.frozen
        for i, w in enumerate(self.parts):
            if i != skip:
                y = y + torch.tanh(y @ w) * 0.1
        return x + y


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Linear(D, D, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(D, D, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x, skips, recomputed=False):
        x = self.embedding(x)
        for block, skip in zip(self.blocks, skips, strict=True):
            x = recompute(block, x, skip) if recomputed else block(x, skip=skip)
        return self.head(x)


def data(step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randn(7, D, generator=generator)
    return x, [(rank + step + k) % 6 for k in range(BLOCKS)]  # 4 and 5 leave nothing out


def train(group, options):
    """Train; return parameters, what was launched when, and the steps' statistics."""
    world = dist.get_world_size(group)
    mesh = create_mesh(plan_mesh(world), group=group)
    torch.manual_seed(0)
    model = Model(options["tied"])
    if options["split"]:
        split_linears(model)
    specs = [ParamSpec(n, p, False, True) for n, p in model.named_parameters()]
    optimizer = ShardedAdamW(
        specs, mesh, AdamWConfig(lr=0.05, max_norm=1.0), 1,
        bucket_elements=options["bucket_elements"], zero=options["zero"], wire=options["wire"],
    )  # fmt: skip
    if options["blocks"]:
        optimizer.overlap([*model.blocks, model.head] if options["tied"] else model.blocks)
        # The embedding is no block, and a tied one is used there as well.
        optimizer.hold([model.embedding.weight])
    if options["split"]:
        optimizer.attach_sinks()
    early, stats, orders = [], [], []
    for step in range(STEPS):
        for micro in range(options["micro"]):
            x, skips = data(step, micro, mesh.rank)
            loss = model(x, skips, options["recomputed"]).square().mean() / options["micro"] / world
            if micro == options["micro"] - 1:
                with optimizer.overlapped():
                    loss.backward()
                early.append(len(optimizer.launches()))
            else:
                loss.backward()
                assert optimizer.launches() == []
            optimizer.accumulate()
        launches = optimizer._launcher.history
        stats.append([value.item() for value in optimizer.step()])
        orders.append(list(launches))
    optimizer.synchronize()
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return parameters, early, orders, stats


def reference(world, options):
    """Train with torch.optim.AdamW in one process on everybody's data."""
    torch.manual_seed(0)
    model = Model(options["tied"])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        for p in trained:
            p.grad = torch.zeros_like(p)
        for rank in range(world):
            for micro in range(options["micro"]):
                x, skips = data(step, micro, rank)
                (model(x, skips).square().mean() / options["micro"] / world).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return dict(model.named_parameters())


BASE = {
    "tied": False, "split": False, "zero": 1, "wire": "float32", "blocks": True,
    "micro": 1, "recomputed": False, "bucket_elements": 1,
}  # fmt: skip


@given(
    st.fixed_dictionaries(
        {
            "tied": st.booleans(),
            "split": st.booleans(),
            "zero": st.sampled_from([1, 2]),
            "wire": st.just("float32"),
            "blocks": st.booleans(),
            "micro": st.integers(1, 3),
            "recomputed": st.booleans(),
            "bucket_elements": st.sampled_from([1, 100, 400, 1 << 20]),
        }
    ),
    st.integers(1, 4),
)
def test_training_with_overlap_is_training_without(pool, options, world) -> None:
    results = pool.run(train, world, options)
    want = reference(world, options)
    for parameters, early, orders, stats in results:
        for name, value in parameters.items():
            torch.testing.assert_close(value, want[name], rtol=2e-5, atol=2e-6, msg=name)
        assert orders == results[0][2]  # the same sums in the same order on every rank
        assert stats == results[0][3]
        assert not any(skipped or desynced for _, _, skipped, _, desynced in stats)
        assert options["blocks"] or early == [0] * STEPS


@pytest.mark.parametrize("world", [2, 4])
def test_four_of_five_buckets_are_reduced_before_backward_ends(pool, world) -> None:
    """Though in every block, on some rank, a parameter gets no gradient."""
    # 6 tensors of a block take a place of 64 each; the embedding and the head have their own.
    options = {**BASE, "bucket_elements": 384}
    for parameters, early, orders, _ in pool.run(five_blocks, world, options):
        assert early == [4, 4, 4]  # the first block's input needs no gradient: no mark
        assert [name for name, _ in orders[0]] == [
            f"blocks.{i}.dense.weight" for i in (4, 3, 2, 1, 0)
        ]
        assert len(parameters) == 5 * 7


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x, skips):
        for block, skip in zip(self.blocks, skips, strict=True):
            x = block(x, skip)
        return x


def five_blocks(group, options):
    mesh = create_mesh(plan_mesh(dist.get_world_size(group)), group=group)
    torch.manual_seed(0)
    model = Blocks()
    specs = [ParamSpec(n, p, False, True) for n, p in model.named_parameters()]
    optimizer = ShardedAdamW(
        specs, mesh, AdamWConfig(lr=0.1), 1, bucket_elements=options["bucket_elements"]
    )
    optimizer.overlap(model.blocks)
    early, orders = [], []
    for step in range(3):
        x, skips = data(step, 0, mesh.rank)
        with optimizer.overlapped():
            model(x, skips).square().mean().backward()
        early.append(len(optimizer.launches()))
        history = optimizer._launcher.history
        optimizer.step()
        orders.append(list(history))
    optimizer.synchronize()
    return {n: p.detach() for n, p in model.named_parameters()}, early, orders, None


def gather_in_forward(group):
    """Return which blocks still waited for their parameters, as each block's forward began."""
    mesh = create_mesh(plan_mesh(2), group=group)
    model = Blocks()
    specs = [ParamSpec(n, p, False, True) for n, p in model.named_parameters()]
    optimizer = ShardedAdamW(specs, mesh, AdamWConfig(lr=0.1), 1, bucket_elements=384)
    optimizer.overlap(model.blocks)
    optimizer.step()
    waiting = []
    trained = optimizer._trained
    for block in model.blocks:  # hooks run in the order in which they were made
        block.register_forward_pre_hook(
            lambda *_: waiting.append([i for i, b in enumerate(trained) if b._gathering])
        )
    model(*data(0, 0, 0))
    return waiting


def test_each_block_waits_for_its_own_parameters_when_it_runs(pool) -> None:
    for waiting in pool.run(gather_in_forward, 2):
        assert waiting == [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4], []]


def used_outside(group):
    mesh = create_mesh(plan_mesh(1))
    model = Model(tied=True)
    specs = [ParamSpec(n, p, False, True) for n, p in model.named_parameters()]
    optimizer = ShardedAdamW(specs, mesh, AdamWConfig(lr=0.1), 1, bucket_elements=1)
    optimizer.overlap([*model.blocks, model.head])  # and the embedding is not held
    x, skips = data(0, 0, 0)
    with optimizer.overlapped():
        model(x.requires_grad_(), skips).sum().backward()
    optimizer.step()


def test_a_gradient_that_comes_too_late_is_an_error_and_not_lost() -> None:
    with pytest.raises(RuntimeError, match=r"\(embedding\.weight\).*used outside of the blocks"):
        used_outside(None)
    optimizer = ShardedAdamW(
        [ParamSpec("w", nn.Parameter(torch.ones(1)), False, True)],
        Mesh.create(plan_mesh(1)), AdamWConfig(lr=0.1), 1,
    )  # fmt: skip
    optimizer.overlap([])
    with pytest.raises(RuntimeError, match="has been called already"):
        optimizer.overlap([])


def main_gradient_bytes(group, zero):
    """Return the most bytes of whole gradients that were there at once in a backward."""
    mesh = create_mesh(plan_mesh(2), group=group)
    model = Blocks()
    specs = [ParamSpec(n, p, False, True) for n, p in model.named_parameters()]
    optimizer = ShardedAdamW(specs, mesh, AdamWConfig(lr=0.1), 1, bucket_elements=384, zero=zero)
    optimizer.overlap(model.blocks)
    most = 0

    def look(*_):
        nonlocal most
        held = [b._main_grad_P for b in optimizer._trained if b._main_grad_P is not None]
        most = max(most, sum(g.numel() * 4 for g in held))

    for block in model.blocks:
        block.register_full_backward_hook(look)
    for step in range(2):
        most = 0
        x, skips = data(step, 0, mesh.rank)
        with optimizer.overlapped():
            model(x.requires_grad_(), skips).square().mean().backward()
        optimizer.step()
    gc.collect()
    return most, sum(b._main_grad_P is not None for b in optimizer._trained)


def test_with_zero_2_gradients_are_whole_in_a_few_buckets_only(pool) -> None:
    bucket = 384 * 4
    for most, left in pool.run(main_gradient_bytes, 2, 2):
        assert bucket < most <= 3 * bucket
        assert left == 0
    for most, left in pool.run(main_gradient_bytes, 2, 1):
        assert (most, left) == (5 * bucket, 5)


def swapped(group, numbers):
    """Reduce two equal buckets in an order of this rank's own."""
    mesh = create_mesh(plan_mesh(2), group=group)
    specs = [ParamSpec(n, nn.Parameter(torch.zeros(64)), False, True) for n in ("a", "b")]
    optimizer = ShardedAdamW(specs, mesh, AdamWConfig(lr=0.1), 1, bucket_elements=64)
    order = numbers[mesh.rank]
    if order is not None:
        launcher = optimizer._launcher
        launcher._buckets = [launcher._buckets[i] for i in order]
        launcher._labels = [launcher._labels[i] for i in order]
    for i, spec in enumerate(specs):
        spec.parameter.grad = torch.full((64,), 10.0**i)
    history = optimizer._launcher.history
    stats = optimizer.step()
    return stats.desynced.item(), stats.skipped.item(), specs[0].parameter[0].item(), list(history)


def test_sums_in_another_order_are_noticed_before_they_are_used(pool) -> None:
    for rank, (desynced, skipped, weight, history) in enumerate(
        pool.run(swapped, 2, [None, (1, 0)])
    ):
        assert (desynced, skipped, weight) == (True, True, 0.0)
        assert history == [("b", 128), ("a", 128)][:: 1 - 2 * rank]
    for desynced, skipped, weight, _ in pool.run(swapped, 2, [None, None]):
        assert (desynced, skipped) == (False, False)
        assert weight == pytest.approx(-0.1, rel=1e-5)


def wire_errors(group, wire):
    """Return the relative error of the sum of random gradients, and of that of rounded ones."""
    world = dist.get_world_size(group)
    mesh = create_mesh(plan_mesh(world), group=group)
    spec = ParamSpec("w", nn.Parameter(torch.zeros(5000)), False, True)
    config = AdamWConfig(lr=0.1, betas=(0.0, 0.9), max_norm=math.inf)
    optimizer = ShardedAdamW([spec], mesh, config, 1, wire=wire)

    def gradient(rank):
        return torch.randn(5000, generator=torch.Generator().manual_seed(rank))

    spec.parameter.grad = gradient(mesh.rank)
    optimizer.step()
    (moment,) = (s for s in optimizer.shards() if s.kind == "exp_avg")
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        want = sum(gradient(rank).to(dtype).double() for rank in range(world))
        want = want[moment.flat_start : moment.flat_stop]
        errors.append(((moment.data - want).norm() / want.norm()).item())
    return errors


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bfloat16_on_the_wire_rounds_once_whatever_the_number_of_ranks(pool, world) -> None:
    assert all(exact < 2e-7 for exact, _ in pool.run(wire_errors, world, "float32"))
    for exact, rounded in pool.run(wire_errors, world, "bfloat16"):
        # 8 bits: a rounding is off by up to 2**-9 of the value, and the sum adds nothing to it.
        assert 5e-4 < exact < 2.5e-3
        assert rounded < 2e-7


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_veto_of_one_rank_leaves_no_trace_on_any(pool, who) -> None:
    for before, after, stats in pool.run(vetoed_step, 3, who):
        assert torch.equal(before, after)
        assert stats == [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]


def vetoed_step(group, who):
    mesh = create_mesh(plan_mesh(3), group=group)
    spec = ParamSpec("w", nn.Parameter(torch.ones(300)), False, True)
    optimizer = ShardedAdamW([spec], mesh, AdamWConfig(lr=0.1), 1)
    state, seen = [], []
    for veto in (None, torch.tensor(mesh.rank == who)):
        spec.parameter.grad = torch.full((300,), 1.0 + mesh.rank)
        stats = optimizer.step(veto=veto)
        state.append(torch.cat([s.data.clone() for s in optimizer.shards()]))
        seen.append([float(optimizer.step_count == len(seen) + 1), stats.skipped.item(),
                     stats.vetoed.item()])  # fmt: skip
    return *state, seen


@pytest.mark.parametrize(
    ("changes", "pp", "message"),
    [
        ({"wire": "float16"}, 1, "wire must be 'float32' or 'bfloat16', got 'float16'"),
        ({"zero": 3}, 1, "zero must be 1 or 2, got 3"),
    ],
)
def test_unknown_settings_are_refused(changes, pp, message) -> None:
    spec = ParamSpec("w", nn.Parameter(torch.ones(1)), False, True)
    with pytest.raises(ValueError, match=message):
        ShardedAdamW([spec], Mesh.create(plan_mesh(pp)), AdamWConfig(lr=0.1), 1, **changes)


@given(st.permutations(range(6)))
def test_the_order_of_sums_does_not_depend_on_the_order_of_gradients(order) -> None:
    weights = [nn.Parameter(torch.ones(64)) for _ in range(6)]
    specs = [ParamSpec(str(i), w, False, True) for i, w in enumerate(weights)]
    optimizer = ShardedAdamW(
        specs, Mesh.create(plan_mesh(1)), AdamWConfig(lr=0.1), 1, bucket_elements=64
    )
    ready: set[int] = set()
    for i in order:
        optimizer.ready([weights[i]])
        ready.add(i)
        # Of the last, those are begun that follow each other without a gap.
        begun = next(n for n in range(7) if 5 - n not in ready)
        assert optimizer.launches() == [(str(5 - n), 64) for n in range(begun)]
