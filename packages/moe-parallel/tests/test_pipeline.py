"""A mixture of experts through every schedule, against one process, to the bit."""

import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from moe_parallel import (
    Gradients,
    Mesh,
    Pipeline,
    StageResult,
    make_schedule,
    plan_mesh,
    recompute,
    recomputing,
    replayed,
    sink_of,
    split_linears,
)
from torch import nn

create_mesh = functools.cache(Mesh.create)
V, D, E, K, HIDDEN = 11, 8, 4, 2, 6
GEMMS: Counter[str] = Counter()


class Grouped(torch.autograd.Function):
    """A product with one matrix an expert, as an expert layer would bring along."""

    @staticmethod
    def forward(ctx, x_ND, w_EFD, ends, sink):
        GEMMS["forward"] += 1
        ctx.save_for_backward(x_ND, w_EFD)
        ctx.ends, ctx.sink = ends, sink
        return torch.cat([x @ w.T for x, w in zip(x_ND.split(ends), w_EFD, strict=True)])

    @staticmethod
    def backward(ctx, dy_NF):
        x_ND, w_EFD = ctx.saved_tensors
        GEMMS["dgrad"] += 1
        dys = dy_NF.split(ctx.ends)

        def run(out, accumulate):
            GEMMS["wgrad"] += 1
            pairs = zip(dys, x_ND.split(ctx.ends), strict=True)
            dw = torch.stack([dy.T @ x for dy, x in pairs])
            out.copy_(dw + out if accumulate else dw)

        dw_EFD = None
        if ctx.sink is None:
            dw_EFD = torch.empty_like(w_EFD)
            run(dw_EFD, False)
        else:
            ctx.sink(run)
        dx_ND = torch.cat([dy @ w for dy, w in zip(dys, w_EFD, strict=True)])
        return dx_ND, dw_EFD, None, None


class Block(nn.Module):
    """Attention, then a dense layer or experts, with everything that can go wrong in them."""

    def __init__(self, experts):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(D))
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.dropout = nn.Dropout(0.1)
        self.experts = experts
        if experts:
            self.router = nn.Linear(D, E, bias=False)
            self.up = nn.Parameter(torch.randn(E, HIDDEN, D) / 3)
            self.down = nn.Parameter(torch.randn(E, D, HIDDEN) / 3)
        else:
            self.mlp = nn.Sequential(nn.Linear(D, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, D))

    def attend(self, x_BSD):
        q, k, v = self.qkv(F.rms_norm(x_BSD, (D,), self.norm)).unsqueeze(1).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x_BSD + self.dropout(self.out(y))

    def forward(self, x_BSD):
        h_BSD = self.attend(x_BSD)
        if not self.experts:
            return h_BSD + self.mlp(h_BSD), h_BSD.new_zeros(()), torch.zeros(E)
        h_TD = h_BSD.flatten(0, 1)
        score_TE = self.router(h_TD).softmax(-1)
        chosen_TK = replayed(lambda: score_TE.topk(K, -1).indices)
        order = chosen_TK.flatten().sort(stable=True).indices
        ends = torch.bincount(chosen_TK.flatten(), minlength=E).tolist()
        rows = Grouped.apply(h_TD[order // K], self.up, ends, sink_of(self.up)).tanh()
        rows = Grouped.apply(rows, self.down, ends, sink_of(self.down))
        weight_TK = score_TE.gather(1, chosen_TK)
        back = rows[order.argsort()].view(-1, K, D)
        y_BSD = h_BSD + (weight_TK[:, :, None] * back).sum(1).view_as(h_BSD)
        count_E = torch.tensor(ends)
        balance = E * (count_E / sum(ends) * score_TE.mean(0)).sum()
        if not recomputing():
            GEMMS["counted"] += 1
        return y_BSD, balance, count_E


class Stage(nn.Module):
    def __init__(self, blocks, first, last, recomputed, aux):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.embedding = nn.Embedding(V, D) if first else None
        self.head = nn.Linear(D, V, bias=False) if last else None
        self.recomputed, self.aux, self.tokens = recomputed, aux, 1

    def forward(self, x_BSD, micro):
        inputs_BS, targets_BS = micro
        if self.embedding is not None:
            x_BSD = self.embedding(inputs_BS)
        balances, counts = [], []
        for block in self.blocks:
            x_BSD, balance, count_E = recompute(block, x_BSD) if self.recomputed else block(x_BSD)
            balances.append(balance)
            counts.append(count_E)
        loss = 0.01 * sum(balances) * inputs_BS.numel() / self.tokens if self.aux else None
        metrics = {"count_LE": torch.stack(counts)} if counts else {}
        if self.head is None:
            return StageResult(x_BSD, loss, metrics)
        logits = self.head(x_BSD).flatten(0, 1)
        main = F.cross_entropy(logits, targets_BS.flatten(), reduction="sum") / self.tokens
        return StageResult(logits, main if loss is None else main + loss, metrics)


def build(num_stages, recomputed=False, aux=True, tied=False):
    """Make all stages: uneven, the second without experts."""
    torch.manual_seed(5)
    stages = [
        Stage(
            [Block(experts=i != 1) for _ in range(1 + i % 2)],
            i == 0, i == num_stages - 1, recomputed, aux,
        )
        for i in range(num_stages)
    ]  # fmt: skip
    if tied:
        stages[-1].head.weight = stages[0].embedding.weight
    return stages


def microbatches(num, seed):
    """Microbatches of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3 + (seed + i) % 4) for i in range(num)]
    return [torch.randint(0, V, (2, *shape), generator=generator).unbind(0) for shape in shapes]


def reset(stages, micros):
    GEMMS.clear()
    for stage in stages:
        stage.tokens = sum(micro[0].numel() for micro in micros)


def sequential(stages, micros, target):
    """Run everything in one process, one microbatch after another."""
    losses, metrics = [], {}
    for m, micro in enumerate(micros):
        x, loss = None, 0.0
        for s, stage in enumerate(stages):
            torch.manual_seed(1000 * s + m)
            x, term, metrics[s, m] = stage(x, micro)
            loss = loss if term is None else loss + term
        loss.backward()
        target.accumulate()
        losses.append(loss.item())
    return sum(losses), metrics


class Seeded(nn.Module):
    """Gives every call of a stage random numbers of its own, wherever it runs."""

    def __init__(self, stage, number, micros):
        super().__init__()
        self.stage, self.number, self.micros = stage, number, micros

    def forward(self, x, micro):
        m = next(i for i, other in enumerate(self.micros) if other is micro)
        torch.manual_seed(1000 * self.number + m)
        return self.stage(x, micro)


def named(stages):
    return {f"{s}.{n}": p for s, stage in stages.items() for n, p in stage.named_parameters()}


def train(group, name, num_ranks, recomputed, aux, numbers, tied=False):
    """Run steps of different sizes in a pipeline; return what each left on this rank."""
    mesh = create_mesh(plan_mesh(num_ranks, pp=num_ranks), group=group)
    plan = make_schedule(name, num_ranks, num_ranks)
    stages = build(plan.num_stages, recomputed, aux, tied)
    own = {i: split_linears(stages[i]) for i in plan.stages_of(mesh.pp_rank)}
    ready: Counter[str] = Counter()
    parameters = named(own)
    if tied and 0 in own and plan.num_stages - 1 in own:
        del parameters[f"{plan.num_stages - 1}.head.weight"]
    target = Gradients(parameters, lambda n, _: ready.update([n]))
    results = []
    for seed, num in enumerate(numbers):
        micros = microbatches(num, seed)
        reset(stages, micros)
        wrapped = {i: Seeded(stage, i, micros) for i, stage in own.items()}
        pipeline = Pipeline(wrapped, mesh, target, schedule=name)
        evaluated = pipeline.evaluate(micros[:1])
        assert not evaluated.losses or plan.num_stages - 1 in own or aux
        GEMMS.clear()
        outcome = pipeline.step(micros)
        results.append(
            {
                "grads": {n: g.clone() for n, g in target.main_grads.items()},
                "loss": sum(loss.item() for loss in outcome.losses.values()),
                "metrics": outcome.metrics,
                "gemms": dict(GEMMS),
                "ready": dict(ready),
                "left": [n for n, p in parameters.items() if p.grad is not None],
            }
        )
        target.zero()
        ready.clear()
    return results


def train_alone(group, num_stages, aux, numbers, tied=False):
    """Run the same steps in one process, without pipeline, sinks or recomputation."""
    stages = build(num_stages, aux=aux, tied=tied)
    parameters = named(dict(enumerate(stages)))
    if tied:
        del parameters[f"{num_stages - 1}.head.weight"]
    target = Gradients(parameters)
    results = []
    for seed, num in enumerate(numbers):
        micros = microbatches(num, seed)
        reset(stages, micros)
        target.zero()
        loss, metrics = sequential(stages, micros, target)
        grads = {n: g.clone() for n, g in target.main_grads.items()}
        results.append({"grads": grads, "loss": loss, "metrics": metrics})
    return results


@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_gradients_are_those_of_one_process_with_no_gemm_twice(
    pool, name, num_ranks, recomputed, aux
) -> None:
    # The number of microbatches and their lengths change from step to step.
    numbers = [2 * num_ranks, num_ranks]
    ranks = pool.run(train, num_ranks, name, num_ranks, recomputed, aux, numbers)
    num_stages = make_schedule(name, num_ranks, num_ranks).num_stages
    (alone,) = pool.run(train_alone, 1, num_stages, aux, numbers)
    experts = sum(block.experts for stage in build(num_stages) for block in stage.blocks)
    for step, num in enumerate(numbers):
        got, want = [rank[step] for rank in ranks], alone[step]
        grads = {n: g for rank in got for n, g in rank["grads"].items()}
        assert grads.keys() == want["grads"].keys()
        for parameter, grad in grads.items():
            assert torch.equal(grad, want["grads"][parameter]), parameter
            assert grad.any()
        assert sum(rank["loss"] for rank in got) == pytest.approx(want["loss"], rel=1e-6)
        metrics = {key: values for rank in got for key, values in rank["metrics"].items()}
        assert metrics.keys() == want["metrics"].keys()
        for key, values in metrics.items():
            assert torch.equal(values["count_LE"], want["metrics"][key]["count_LE"])
        for rank in got:
            assert rank["ready"] == dict.fromkeys(rank["grads"], 1)
            assert rank["left"] == []
        calls = 2 * num * experts
        assert sum((Counter(rank["gemms"]) for rank in got), Counter()) == {
            "forward": calls * (1 + recomputed),
            "dgrad": calls,
            "wgrad": calls,
            "counted": calls // 2,
        }


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("name", "num_ranks"), [("zbv", 1), ("zbv", 2), ("1f1b", 2), ("1f1b", 4)])
def test_a_tied_embedding_gets_the_gradients_of_both_uses(
    pool, name, num_ranks, recomputed
) -> None:
    ranks = pool.run(train, num_ranks, name, num_ranks, recomputed, True, [2 * num_ranks], True)
    num_stages = make_schedule(name, num_ranks, num_ranks).num_stages
    ((alone,),) = pool.run(train_alone, 1, num_stages, True, [2 * num_ranks], True)
    tied = ("0.embedding.weight", f"{num_stages - 1}.head.weight")
    total = sum(g for (rank,) in ranks for n, g in rank["grads"].items() if n in tied)
    # In the V it is one tensor on one rank; in the loop each end has its part of the sum.
    holders = [n for (rank,) in ranks for n in rank["grads"] if n in tied]
    assert holders == list(tied[: 1 + (name == "1f1b")])
    torch.testing.assert_close(total, alone["grads"][tied[0]], rtol=1e-5, atol=1e-7)
    for (rank,) in ranks:
        assert rank["ready"] == dict.fromkeys(rank["grads"], 1)
