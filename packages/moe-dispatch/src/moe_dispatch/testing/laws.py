"""What all ranks together must have seen."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_dispatch.testing.case import DispatchCase
from moe_dispatch.testing.trip import Trip


def check_dispatcher(
    run: Callable[[DispatchCase], Sequence[Trip]], case: DispatchCase, roundings: int = 1
) -> None:
    """Run a case twice: both times right, and the second time the same bits.

    Args:
        run: Returns ``travel(dispatcher, case)`` of every rank, in the order of the ranks.
        case: What to run.
        roundings: As in ``check_trips``.

    Raises:
        AssertionError: Naming the law, the rank and the values.

    Examples:
        >>> from moe_dispatch import LocalDispatcher
        >>> from moe_dispatch.testing import travel
        >>> case = DispatchCase(experts_per_rank=4, top_k=2, dim=3, tokens_W=(5,), hot_experts=4)
        >>> check_dispatcher(lambda case: [travel(LocalDispatcher(4), case)], case)
    """
    first, second = run(case), run(case)
    check_trips(case, first, roundings)
    for rank, (one, other) in enumerate(zip(first, second, strict=True)):
        for name in Trip._fields[1:]:
            if not torch.equal(getattr(one, name), getattr(other, name)):
                raise AssertionError(f"rank {rank}: {name} has other bits in the second run")


def check_trips(case: DispatchCase, trips: Sequence[Trip], roundings: int = 1) -> None:
    """Compare what each rank saw with a dense computation in float64.

    The rows must be exactly those of the routing, in the order (expert, source rank, token, k).
    Results and gradients may differ from float64 by the rounding of each row and of the sums.

    Args:
        case: What was run.
        trips: Of every rank.
        roundings: How often a sum is rounded to the dtype of the rows: once at the token's owner,
            and once more where the results of one rank for a token are summed there before.

    Raises:
        AssertionError: Naming the law, the rank and the values.
    """
    owners = [expert for trip in trips for expert in trip.local_experts]
    if owners != list(range(case.num_experts)):
        raise AssertionError(f"the ranks hold the experts {owners}, of {case.num_experts}")
    for rank, trip in enumerate(trips):
        _check_rows(case, rank, trip)
        _check_values(case, rank, trip, roundings)


def _check_rows(case: DispatchCase, rank: int, trip: Trip) -> None:
    """Compare what came to the experts of one rank with what all ranks sent there."""
    ranks = range(case.world_size)
    expert_MK = torch.cat([case.routing(w).expert_TK for w in ranks])
    weight_MK = torch.cat([case.routing(w).weight_TK for w in ranks]).double()
    x_MD = torch.cat([case.tokens(w) for w in ranks])
    dy_MD = torch.cat([case.gradient(w) for w in ranks]).double()
    place_e = [(expert_MK == i).nonzero(as_tuple=True) for i in trip.local_experts]
    token_R, k_R = (torch.cat(part) for part in zip(*place_e, strict=True))

    want_e1 = torch.tensor([0, *(len(token) for token, _ in place_e)]).cumsum(0).int()
    _check_equal(f"rank {rank}: offsets_e1", trip.offsets_e1, want_e1)
    tail = len(trip.x_RD) - len(token_R)
    if tail < 0:
        raise AssertionError(
            f"rank {rank}: {len(token_R)} rows belong to its experts, x_RD has {len(trip.x_RD)}"
        )
    want_RD = torch.cat([x_MD[token_R], x_MD.new_zeros(tail, case.dim)])
    _check_equal(f"rank {rank}: x_RD", trip.x_RD, want_RD)
    want_RD = weight_MK[token_R, k_R][:, None] * dy_MD[token_R]
    want_RD = torch.cat([want_RD, want_RD.new_zeros(tail, case.dim)])
    _check_near(f"rank {rank}: dy_RD", trip.dy_RD, want_RD, want_RD.abs() * _step(case, 1))


def _check_values(case: DispatchCase, rank: int, trip: Trip, roundings: int) -> None:
    """Compare what one rank's tokens became with what they become where all experts are."""
    routing = case.routing(rank)
    x_TD, dy_TD = case.tokens(rank).double(), case.gradient(rank).double()
    gain_TK = (routing.expert_TK + 1).double()  # 0 where masked
    gain_T1 = (routing.weight_TK.double() * gain_TK).sum(1, keepdim=True)
    extra = (roundings - 1) / 2 * torch.finfo(case.torch_dtype).eps
    bound = _step(case, case.top_k) + extra
    want_TD = gain_T1 * x_TD
    _check_near(f"rank {rank}: y_TD", trip.y_TD, want_TD, want_TD.abs() * bound)
    want_TD = gain_T1 * dy_TD
    _check_near(f"rank {rank}: dx_TD", trip.dx_TD, want_TD, want_TD.abs() * bound)
    dot_T1 = (x_TD * dy_TD).sum(1, keepdim=True)
    size_T1 = (x_TD * dy_TD).abs().sum(1, keepdim=True)
    bound_TK = gain_TK * size_T1 * _step(case, case.dim)
    _check_near(f"rank {rank}: dweight_TK", trip.dweight_TK, gain_TK * dot_T1, bound_TK)


def _step(case: DispatchCase, terms: int) -> float:
    """Return the relative error of two roundings of a row and a sum of ``terms`` products."""
    wide = torch.float64 if case.torch_dtype == torch.float64 else torch.float32
    return torch.finfo(case.torch_dtype).eps + (terms + 2) * torch.finfo(wide).eps


def _check_equal(what: str, got: Tensor, want: Tensor) -> None:
    if got.dtype != want.dtype or not torch.equal(got, want):
        raise AssertionError(f"{what} is\n{got}\nand must be exactly\n{want}")


def _check_near(what: str, got: Tensor, want: Tensor, bound: Tensor) -> None:
    if got.shape != want.shape:
        raise AssertionError(f"{what} has the shape {list(got.shape)}, not {list(want.shape)}")
    # A NaN is no closer than anything, so it must not be compared by what is too far.
    if not ((got.double() - want).abs() <= bound).all():
        raise AssertionError(f"{what} is\n{got}\nand must be, to within\n{bound}\n,\n{want}")
