"""The laws are trusted to find faults, so they are shown dispatchers that have one each."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from moe_dispatch import Dispatched, LocalDispatcher
from moe_dispatch.testing import DispatchCase, check_dispatcher, travel
from moe_kernels import Routing
from torch import Tensor

CASE = DispatchCase(4, 2, 3, (6,), hot_experts=4, masked=0.2)


def same(value: object) -> object:
    return value


def same_result(y_TD: Tensor, sent: Dispatched) -> Tensor:
    return y_TD


@dataclass
class Faulty:
    """Does everything right, but for what is given."""

    before: Callable[[Routing], Routing] = same  # type: ignore[assignment]
    after: Callable[[Dispatched], Dispatched] = same  # type: ignore[assignment]
    result: Callable[[Tensor, Dispatched], Tensor] = same_result
    num_experts: int = CASE.num_experts
    local_experts: range = range(CASE.num_experts)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        return self.after(LocalDispatcher(4).dispatch(x_TD, self.before(routing)))

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        return self.result(LocalDispatcher(4).combine(y_RD, dispatched), dispatched)


def swap_two_rows(sent: Dispatched) -> Dispatched:
    order_R = torch.arange(len(sent.x_RD))
    order_R[[0, 1]] = order_R[[1, 0]]
    return replace(sent, x_RD=sent.x_RD[order_R])


def shift_an_expert(sent: Dispatched) -> Dispatched:
    offsets_e1 = sent.offsets_e1.clone()
    offsets_e1[1] += 1
    return replace(sent, offsets_e1=offsets_e1)


def swap_weights(routing: Routing) -> Routing:
    return routing._replace(weight_TK=routing.weight_TK.flip(1))


def weigh_twice(sent: Dispatched) -> Dispatched:
    return replace(sent, weight_TK=sent.weight_TK**2)


def forget_weight_gradient(sent: Dispatched) -> Dispatched:
    return replace(sent, weight_TK=sent.weight_TK.detach() + 0 * sent.weight_TK)


def forget_token_gradient(sent: Dispatched) -> Dispatched:
    return replace(sent, x_RD=sent.x_RD.detach() + 0 * sent.x_RD)


def lose_a_token(y_TD: Tensor, sent: Dispatched) -> Tensor:
    return torch.cat([torch.zeros_like(y_TD[:1]), y_TD[1:]])


def use_the_tail(y_TD: Tensor, sent: Dispatched) -> Tensor:
    return y_TD + 0 * torch.nan


def change_from_run_to_run() -> Callable[[Tensor, Dispatched], Tensor]:
    calls = []

    def result(y_TD: Tensor, sent: Dispatched) -> Tensor:
        calls.append(1)
        return y_TD if len(calls) == 1 else y_TD * (1 + 2.0**-52)

    return result


FAULTS = {
    "two rows swapped": (Faulty(after=swap_two_rows), "rank 0: x_RD is"),
    "a row given to the wrong expert": (Faulty(after=shift_an_expert), "rank 0: offsets_e1 is"),
    "weights of other routes": (Faulty(before=swap_weights), "rank 0: dy_RD is"),
    "weights applied twice": (Faulty(after=weigh_twice), "rank 0: dy_RD is"),
    "no weight gradient": (Faulty(after=forget_weight_gradient), "rank 0: dweight_TK is"),
    "no token gradient": (Faulty(after=forget_token_gradient), "rank 0: dx_TD is"),
    "a lost token": (Faulty(result=lose_a_token), "rank 0: dy_RD is"),
    "a result that is not a number": (Faulty(result=use_the_tail), "rank 0: y_TD is"),
    "other bits each time": (
        Faulty(result=change_from_run_to_run()),
        "rank 0: .* has other bits in the second run",
    ),
    "a missing expert": (
        Faulty(local_experts=range(3)),
        r"the ranks hold the experts \[0, 1, 2\], of 4",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_a_law(fault: str) -> None:
    dispatcher, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        check_dispatcher(lambda case: [travel(dispatcher, case)], CASE)


def test_without_a_fault_no_law_is_broken() -> None:
    check_dispatcher(lambda case: [travel(Faulty(), case)], CASE)
