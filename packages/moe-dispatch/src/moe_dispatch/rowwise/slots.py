"""Where every route goes, and what came: the objects that pass between the functions."""

from typing import NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Where the rows of this rank go, and how many come.

    Attributes:
        rank_TK: int32, the rank of each route's expert; -1 if it goes nowhere.
        row_TK: int32, its row among those that the experts of that rank are given; -1 likewise.
        to_TK: int32, ``rank_TK``, but with dedup -1 for all but the first route to a rank.
        place_TK: int32, its place in the receive buffer of that rank; -1 likewise.
        offsets_e1: int32, where the rows of each of this rank's experts begin.
        places_1: int32, how many places of this rank's receive buffer are taken.
        epoch: Of the dispatch, as the host counts.
    """

    rank_TK: Tensor
    row_TK: Tensor
    to_TK: Tensor
    place_TK: Tensor
    offsets_e1: Tensor
    places_1: Tensor
    epoch: int

    @property
    def kept(self) -> Tensor:
        """Return bool ``[T, K]``, False for routes that are masked or were dropped."""
        return self.rank_TK >= 0

    @property
    def count_1(self) -> Tensor:
        """Return int32, how many rows the experts of this rank are given."""
        return self.offsets_e1[-1:]


class Arrived(NamedTuple):
    """What came with the rows, for the way back.

    Attributes:
        weight_R: Routing weight of each of the experts' rows; zero past the last.
        row_PK: int32, the experts' rows that each place stands for, -1 for none. Dedup only.
        weight_PK: Their weights. Dedup only.
        origin_P: int32, where each place came from: ``rank * max_tokens * K + slot``. Push only.
    """

    weight_R: Tensor
    row_PK: Tensor
    weight_PK: Tensor
    origin_P: Tensor


def first_of_rank(rank_TK: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Tell which route is the first of its token to its rank, and how many tokens went before.

    Args:
        rank_TK: The rank of each route, -1 for none.
        world_size: W.

    Returns:
        bool ``[T, K]``, and int32 ``[T + 1, W]``: how many of the tokens before t go to each rank.

    Examples:
        >>> first, before = first_of_rank(torch.tensor([[1, 1, 0], [-1, 1, 1]]).int(), 2)
        >>> first.tolist()
        [[True, False, True], [False, True, False]]
        >>> before.tolist()
        [[0, 0], [1, 1], [1, 2]]
    """
    T, K = rank_TK.shape
    column_TK = torch.where(rank_TK < 0, world_size, rank_TK).long()
    k_TK = torch.arange(K, device=rank_TK.device).expand(T, K)
    first_TW = column_TK.new_full((T, world_size + 1), K)
    first_TW.scatter_reduce_(1, column_TK, k_TK, "amin")
    first_TK = (first_TW.gather(1, column_TK) == k_TK) & (rank_TK >= 0)
    goes_TW = (first_TW[:, :world_size] < K).to(torch.int32)
    before_TW = torch.nn.functional.pad(goes_TW.cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
    return first_TK, before_TW
