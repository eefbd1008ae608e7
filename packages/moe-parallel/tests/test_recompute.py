"""Recomputation changes no bit, keeps less, runs a part once more and no further than needed."""

import gc
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from moe_parallel import RecomputeError, recompute, recomputing, replayed, split_linears
from torch import nn

T, D, E = 13, 8, 4
COUNT: Counter[str] = Counter()


class Part(nn.Module):
    """A layer with randomness, a choice between near ties, and something that is counted."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear, self.router = nn.Linear(D, D), nn.Linear(D, E)

    def forward(self, x_TD):
        COUNT[f"{self.kind} again" if recomputing() else self.kind] += 1
        if self.kind == "dropout":
            return F.dropout(self.linear(x_TD).tanh(), 0.4) + x_TD
        if self.kind == "norm":
            return F.rms_norm(x_TD, (D,)) * 1.5
        if self.kind == "views":
            return self.linear(x_TD.T.contiguous().T).view(1, T, D).exp().squeeze(0).sin()
        # Noise decides: a router that ran again would choose others.
        noisy_TE = self.router(x_TD)
        chosen_T = replayed(lambda: (noisy_TE + torch.rand(T, E)).argmax(-1))
        rows = [F.silu(self.linear(x_TD[chosen_T == e])) * (e + 1) for e in range(E)]
        order = chosen_T.argsort(stable=True)
        weight_T1 = noisy_TE.softmax(-1).gather(1, chosen_T[:, None])
        return torch.cat(rows)[order.argsort()] * weight_T1 + x_TD


def run(parts, how, dtype):
    """Return results and gradients of a chain of parts, each recomputed as ``how`` says."""
    torch.manual_seed(3)
    x = torch.randn(T, D, requires_grad=True)
    COUNT.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        y, i = x, 0
        while i < len(parts):
            if how[i] == "plain":
                y, i = parts[i](y), i + 1
            elif how[i] == "block" or i + 1 == len(parts):
                y, i = recompute(parts[i], y), i + 1
            elif how[i] == "nested":
                pair = parts[i], parts[i + 1]
                y, i = recompute(lambda v, p=pair: recompute(p[1], recompute(p[0], v)), y), i + 2
            else:
                y, i = recompute(parts[i], y, then=parts[i + 1]), i + 2
    torch.rand(1)
    y.float().square().sum().backward()
    weights = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *weights], Counter(COUNT)


kinds = st.sampled_from(["dropout", "norm", "views", "experts"])


@given(
    st.lists(st.tuples(kinds, st.sampled_from(["plain", "block", "then", "nested"])), min_size=1,
             max_size=5),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
)  # fmt: skip
def test_no_bit_differs_and_no_part_runs_more_than_once_again(case, dtype, split) -> None:
    torch.manual_seed(1)
    parts = nn.ModuleList(Part(kind) for kind, _ in case)
    if split and dtype == "float32":
        split_linears(parts)
    want, plain = run(parts, ["plain"] * len(case), dtype)
    parts.zero_grad()
    got, counts = run(parts, [how for _, how in case], dtype)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    for kind, count in plain.items():
        assert counts[kind] == count  # what is counted is counted in the first run alone
        assert counts[f"{kind} again"] <= count


def gate_up(x_ND, w_GD):
    gate, up = (x_ND @ w_GD.T).chunk(2, -1)
    return F.silu(gate) * up


def test_an_mlp_up_to_its_inputs_keeps_its_inputs_alone() -> None:
    x, w_up = torch.randn(64, 16, requires_grad=True), torch.randn(256, 16, requires_grad=True)
    w_down = torch.randn(16, 128, requires_grad=True)
    saved: list[torch.Size] = []

    class Down(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, w):
            ctx.save_for_backward(h, w)
            return h @ w.T

        @staticmethod
        def backward(ctx, dy):
            h, w = ctx.saved_tensors
            saved.append(h.shape)
            return dy @ w, dy.T @ h

    released = []

    def part(x):
        h = gate_up(x, w_up)
        weakref.finalize(h.untyped_storage(), released.append, "h")
        return h

    y = recompute(part, x, then=lambda h: Down.apply(h, w_down))
    gc.collect()
    assert released == ["h"]  # nobody holds the hidden rows between forward and backward
    y.sum().backward()
    assert saved == [(64, 128)]
    want = torch.autograd.grad((gate_up(x, w_up) @ w_down.T).sum(), (x, w_up, w_down))
    for got, grad in zip((x, w_up, w_down), want, strict=True):
        assert torch.equal(got.grad, grad)


def test_recomputation_stops_after_the_last_tensor_that_backward_needs() -> None:
    ran = []
    x = torch.ones(3, requires_grad=True)

    def part(x):
        y = x.exp()
        ran.append("needed")
        y = y.sin()
        ran.append("needed too")
        y = y + 1
        ran.append("not needed")
        return y

    recompute(part, x).sum().backward()
    assert ran == ["needed", "needed too", "not needed", "needed"]


def test_a_second_backward_computes_again() -> None:
    x = torch.tensor([0.5], requires_grad=True)
    y = recompute(torch.exp, x, then=torch.sin)
    for _ in range(2):
        (grad,) = torch.autograd.grad(y, x, retain_graph=True)
        torch.testing.assert_close(grad, x.detach().exp().cos() * x.detach().exp())


def test_regions_in_what_consumes_a_part_keep_nothing_of_it_either() -> None:
    x = torch.randn(5, requires_grad=True)
    released = []

    def part(x):
        y = x.exp()
        weakref.finalize(y.untyped_storage(), released.append, "y")
        return y

    y = recompute(part, x, then=lambda h: recompute(torch.sin, h, then=torch.cos))
    gc.collect()
    assert released == ["y"]
    y.sum().backward()
    e = x.detach().exp()
    torch.testing.assert_close(x.grad, -e.sin().sin() * e.cos() * e)


def test_random_numbers_after_a_recomputation_go_on_as_before() -> None:
    x = torch.ones(50, requires_grad=True)
    draws = []
    for again in (False, True):
        torch.manual_seed(0)
        y = recompute(lambda v: F.dropout(v.exp(), 0.5), x) if again else F.dropout(x.exp(), 0.5)
        y.sum().backward()
        draws.append(torch.rand(3))
    assert torch.equal(*draws)


def test_without_gradients_a_part_is_just_called() -> None:
    calls = []
    with torch.no_grad():
        y = recompute(lambda v: calls.append(1) or v + 1, torch.ones(1), then=torch.neg)
    assert (y.item(), calls) == (-2, [1])


def test_aux_losses_and_other_results_of_a_part_have_their_gradients() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def part(x, *, scale):
        return {"y": x.exp() * scale, "aux": (x.square().sum(), 7)}

    for function in (part, lambda x, scale: recompute(part, x, scale=scale)):
        out = function(x, scale=3.0)
        assert out["aux"][1] == 7
        (grad,) = torch.autograd.grad(out["y"].sum() + 0.1 * out["aux"][0], x)
        torch.testing.assert_close(grad, 3 * x.detach().exp() + 0.2 * x.detach())


@pytest.mark.parametrize("change", ["shape", "fewer", "more"])
def test_a_part_that_does_something_else_is_caught(change) -> None:
    x = torch.ones(4, requires_grad=True)
    size = {"shape": (4, 3), "fewer": (4, 4), "more": (4, 4)}[change]
    repeats = {"shape": (2, 2), "fewer": (2, 1), "more": (1, 2)}[change]

    def part(x):
        y = x[: size[recomputing()]]
        for _ in range(repeats[recomputing()]):
            y = y.sin()
        return y

    y = recompute(part, x, then=lambda v: v.cos().sum())  # cos wants all of the output
    with pytest.raises(RecomputeError, match=r"part.*replayed\(\)"):
        y.backward()


def test_asking_for_more_replayed_values_than_there_are_is_caught() -> None:
    def part(x):
        for _ in range(1 + recomputing()):
            replayed(lambda: torch.ones(1))
        return x.exp()

    with pytest.raises(RecomputeError, match="asked for more than the 1 values"):
        recompute(part, torch.ones(1, requires_grad=True)).backward()


def test_a_choice_is_made_once_even_if_it_would_come_out_otherwise() -> None:
    x, made = torch.arange(4.0, requires_grad=True), []

    def part(x):
        made.append(len(made))
        chosen = replayed(lambda: made.append("chosen") or torch.tensor(made.index("chosen")))
        return x[chosen].exp()

    recompute(part, x, then=torch.exp).backward()
    assert made.count("chosen") == 1
    assert x.grad.nonzero().flatten().tolist() == [1]


def accumulates_in_place(x):
    y = recompute(torch.sin, x)
    x += y
    return x


def writes_to_its_input(x):
    return recompute(lambda v: v.mul_(2).sin(), x)


def writes_to_what_it_replays(x):
    def part(v):
        weight = replayed(lambda: torch.ones(3))
        return v * weight.mul_(2)

    return recompute(part, x)


def writes_to_a_parameter(x):
    weight = nn.Parameter(torch.ones(3))
    y = recompute(lambda v: v * weight, x)
    with torch.no_grad():
        weight.add_(1)
    return y


def writes_to_what_follows_keeps(x):
    kept = torch.ones(3)
    y = recompute(torch.exp, x, then=lambda h: h * kept)
    kept.add_(1)
    return y


def writes_to_what_a_choice_keeps(x):
    kept = torch.ones(3)
    y = recompute(lambda v: replayed(lambda: v * kept), x)
    kept.add_(1)
    return y


@pytest.mark.parametrize(
    "function",
    [
        accumulates_in_place,
        writes_to_its_input,
        writes_to_what_it_replays,
        writes_to_a_parameter,
        writes_to_what_follows_keeps,
        writes_to_what_a_choice_keeps,
    ],
)
def test_what_was_changed_in_place_meanwhile_is_refused_as_autograd_does(function) -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RecomputeError, match="was changed in place"):
        function(x * 1.0).sum().backward()


def test_what_follows_may_write_to_the_output_in_place() -> None:
    for then in (lambda h: h.mul_(3).sin(), lambda h: h.relu_() * h):
        grads = []
        for again in (False, True):
            x = torch.tensor([1.0, -1.0, 2.0], requires_grad=True)
            y = recompute(torch.cumsum, x, 0, then=then) if again else then(torch.cumsum(x, 0))
            y.sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


def test_numbers_of_a_generator_of_ones_own_are_drawn_once_in_replayed() -> None:
    grads = []
    for again in (False, True):
        own = torch.Generator().manual_seed(0)
        x = torch.ones(5, requires_grad=True)

        def part(x, own=own):
            return x * replayed(lambda: torch.rand(5, generator=own))

        (recompute(part, x) if again else part(x)).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
