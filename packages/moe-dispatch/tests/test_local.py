"""One rank: what is summed how, what is refused, what cannot leak."""

import pytest
import torch
from hypothesis import given
from moe_dispatch import Dispatched, LocalDispatcher, make_dispatcher
from moe_dispatch.testing import DispatchCase, dispatch_cases, gain_experts
from moe_kernels import Routing
from torch import Tensor


def through(dispatcher: LocalDispatcher, x_TD: Tensor, routing: Routing) -> Tensor:
    sent = dispatcher.dispatch(x_TD, routing)
    y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts)
    return dispatcher.combine(y_RD, sent)


def routing_of(expert_TK: list[list[int]], weight: float = 1.0) -> Routing:
    ids_TK = torch.tensor(expert_TK, dtype=torch.int32)
    weight_TK = torch.full(ids_TK.shape, weight)
    return Routing(weight_TK, ids_TK, weight_TK, torch.zeros((), dtype=torch.int32))


@given(case=dispatch_cases(max_world_size=1, max_tokens=4, dtypes=("float64",)))
def test_gradients_are_those_of_finite_differences(case: DispatchCase) -> None:
    dispatcher, routing = LocalDispatcher(case.num_experts), case.routing(0)

    def layer(x_TD: Tensor, weight_TK: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x_TD, routing._replace(weight_TK=weight_TK))
        return dispatcher.combine(sent.x_RD.sin(), sent)

    if case.tokens_W[0]:
        inputs = (case.tokens(0).requires_grad_(), routing.weight_TK.requires_grad_())
        assert torch.autograd.gradcheck(layer, inputs)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("masked", [0.0, 0.5])
def test_a_token_that_is_not_finite_spoils_only_itself(poison: float, masked: float) -> None:
    case = DispatchCase(4, 2, 3, (6,), hot_experts=4, masked=masked)
    dispatcher, routing = LocalDispatcher(4), case.routing(0)
    good_TD = through(dispatcher, case.tokens(0), routing)
    for t in range(6):
        x_TD = case.tokens(0)
        x_TD[t] = poison
        y_TD = through(dispatcher, x_TD, routing)
        others = torch.arange(6) != t
        assert torch.equal(y_TD[others], good_TD[others])


def test_a_masked_route_adds_nothing_even_if_its_weight_is_nan() -> None:
    routing = routing_of([[0, -1], [-1, -1]])
    routing.weight_TK[routing.expert_TK < 0] = torch.nan
    weight_TK = routing.weight_TK.requires_grad_()
    x_TD = torch.tensor([[2.0], [3.0]], requires_grad=True)
    y_TD = through(LocalDispatcher(2), x_TD, routing._replace(weight_TK=weight_TK))
    dx_TD, dweight_TK = torch.autograd.grad(y_TD.sum(), (x_TD, weight_TK))
    assert y_TD.tolist() == [[2.0], [0.0]]
    assert dx_TD.tolist() == [[1.0], [0.0]]
    assert dweight_TK.tolist() == [[2.0, 0.0], [0.0, 0.0]]


def test_bfloat16_rows_are_summed_in_float32_both_ways() -> None:
    # 256 + 7 times 1 is 256 if each sum is rounded to bfloat16, and 264 if only the last one is.
    routing = routing_of([list(range(8))])
    dispatcher = LocalDispatcher(8)
    scale_R1 = torch.tensor([256.0] + [1.0] * 7, dtype=torch.bfloat16)[:, None]
    x_TD = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    sent = dispatcher.dispatch(x_TD, routing)
    y_TD = dispatcher.combine(sent.x_RD * scale_R1, sent)
    (dx_TD,) = torch.autograd.grad(y_TD.sum(), x_TD)
    assert y_TD.dtype == dx_TD.dtype == torch.bfloat16
    assert (y_TD.item(), dx_TD.item()) == (264.0, 264.0)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_rows_are_summed_in_the_order_of_k_whatever_their_experts(order: list[int]) -> None:
    # (2**24 + 1) - 2**24 is 0 in float32, as 2**24 + 1 is rounded. Any other order gives 1.
    dispatcher = LocalDispatcher(3)
    scale_R1 = torch.empty(3, 1)
    scale_R1[order, 0] = torch.tensor([2.0**24, 1.0, -(2.0**24)])
    x_TD = torch.ones(1, 1, requires_grad=True)
    sent = dispatcher.dispatch(x_TD, routing_of([order]))
    y_TD = dispatcher.combine(sent.x_RD * scale_R1, sent)
    (dx_TD,) = torch.autograd.grad(y_TD.sum(), x_TD)
    assert (y_TD.item(), dx_TD.item()) == (0.0, 0.0)


def test_float64_rows_are_not_rounded_to_float32() -> None:
    x_TD = torch.tensor([[1.0 + 2.0**-40]], dtype=torch.float64)
    assert torch.equal(through(LocalDispatcher(1), x_TD, routing_of([[0]])), x_TD)


def test_what_experts_make_of_rows_past_the_last_offset_is_ignored() -> None:
    dispatcher = LocalDispatcher(2)
    sent = dispatcher.dispatch(torch.ones(2, 1), routing_of([[1, -1], [-1, 0]]))
    assert sent.offsets_e1.tolist() == [0, 1, 2]
    assert sent.x_RD.tolist() == [[1.0], [1.0], [0.0], [0.0]]
    y_RD = torch.tensor([[3.0], [5.0], [torch.nan], [torch.inf]])
    assert dispatcher.combine(y_RD, sent).tolist() == [[5.0], [3.0]]


X = torch.ones(3, 4)
GOOD = routing_of([[0, 1], [1, -1], [2, 0]])


@pytest.mark.parametrize(
    ("x_TD", "routing", "message"),
    [
        (X[0], GOOD, r"x_TD must have 2 axes, got the shape \[4\]"),
        (X[:2], GOOD, "T differs: x_TD has 2 rows, expert_TK has 3"),
        (X.int(), GOOD, "the dtype of x_TD must be one of .*, got torch.int32"),
        (X.to("meta"), GOOD, "devices differ: x_TD is on meta, expert_TK is on cpu"),
        (
            X,
            GOOD._replace(expert_TK=GOOD.expert_TK.flatten()),
            r"expert_TK must have 2 axes, got the shape \[6\]",
        ),
        (
            X,
            GOOD._replace(weight_TK=GOOD.weight_TK[:, :1]),
            r"weight_TK and expert_TK must have one shape, got \[3, 1\] and \[3, 2\]",
        ),
        (
            X,
            GOOD._replace(weight_TK=GOOD.weight_TK.bfloat16()),
            "weight_TK must be float32 or float64, got torch.bfloat16",
        ),
        (
            X,
            GOOD._replace(expert_TK=GOOD.expert_TK.long()),
            "expert_TK must be int32, got torch.int64",
        ),
        (
            X,
            routing_of([[0, 1, 2, 0]] * 3),
            r"K must be in 1..num_experts \(3\), expert_TK has 4 columns",
        ),
        (
            X,
            routing_of([[0, 3], [1, 2], [-2, 7]]),
            r"expert_TK must hold -1 \(masked\) or 0..2, got -2..7",
        ),
    ],
)
def test_tokens_and_routing_that_do_not_fit_are_refused(
    x_TD: Tensor, routing: Routing, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LocalDispatcher(3).dispatch(x_TD, routing)


@pytest.mark.parametrize(
    ("y_RD", "message"),
    [
        (torch.ones(5, 4), "R differs: y_RD has 5 rows, dispatch gave 6"),
        (torch.ones(6, 3), "D differs: y_RD has 3 columns, x_RD has 4"),
        (torch.ones(24), r"y_RD must have 2 axes, got the shape \[24\]"),
        (torch.ones(6, 4).bfloat16(), "dtypes differ: y_RD is torch.bfloat16, x_RD is torch.float"),
        (torch.ones(6, 4, device="meta"), "devices differ: y_RD is on meta, x_RD is on cpu"),
    ],
)
def test_results_that_are_not_those_of_the_rows_are_refused(y_RD: Tensor, message: str) -> None:
    dispatcher = LocalDispatcher(3)
    sent = dispatcher.dispatch(X, GOOD)
    with pytest.raises(ValueError, match=message):
        dispatcher.combine(y_RD, sent)


def test_the_plan_of_another_dispatcher_is_refused() -> None:
    sent = LocalDispatcher(3).dispatch(X, GOOD)
    foreign = Dispatched(
        x_RD=sent.x_RD, offsets_e1=sent.offsets_e1, weight_TK=sent.weight_TK, plan="mine"
    )
    with pytest.raises(TypeError, match="LocalDispatcher cannot combine with a str"):
        LocalDispatcher(3).combine(sent.x_RD, foreign)


def test_without_experts_there_is_no_dispatcher() -> None:
    with pytest.raises(ValueError, match="num_experts must be at least 1, got 0"):
        make_dispatcher(0)
