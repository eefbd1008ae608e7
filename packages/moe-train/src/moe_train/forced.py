"""Experts that a router did not choose, for benchmarks: forced, or recorded and replayed.

A run with forced experts measures the machinery around the router. Its losses are those of no
model, and everything that it writes says so.
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

Given = Callable[[int, Tensor | None, torch.device], Tensor | None]
"""From the number of tokens, the mask of real ones and the device to ``expert_TK``, or None."""


def uniform_experts(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    rank: int,
    num_ranks: int,
    mask_T: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Give every expert, and every rank, as many rows, to within one.

    Routes are numbered through all ranks, and route i goes to rank ``i % W``, there to the experts
    in turn. So neighbouring routes go to different ranks, and any run of routes is spread evenly
    over ranks and experts alike. With E = 4, W = 2 and K = 2, tokens go to 0 and 2, 1 and 3, ...

    Args:
        num_tokens: T, of this rank; all ranks should have as many.
        top_k: K, at most E, so that no token gets an expert twice.
        num_experts: E, a multiple of W.
        rank: Of this rank among those that share the experts.
        num_ranks: W.
        mask_T: True for real tokens; the others get -1 and leave no hole.
        device: Of the result.

    Examples:
        >>> uniform_experts(2, 2, 4, rank=0, num_ranks=2)
        tensor([[0, 2],
                [1, 3]], dtype=torch.int32)
    """
    every_T = torch.arange(num_tokens, device=device)
    place_T = every_T if mask_T is None else mask_T.cumsum(0) - 1
    first = rank * num_tokens * top_k
    slot_TK = first + place_T[:, None] * top_k + torch.arange(top_k, device=device)
    slot_TK = slot_TK % num_experts
    expert_TK = slot_TK % num_ranks * (num_experts // num_ranks) + slot_TK // num_ranks
    if mask_T is not None:
        expert_TK = expert_TK.masked_fill(~mask_T[:, None], -1)
    return expert_TK.int()


def random_experts(num_tokens: int, top_k: int, num_experts: int, seed: int) -> Tensor:
    """Draw K different experts for each token, all alike, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    keys_TE = torch.rand(num_tokens, num_experts, generator=generator)
    return keys_TE.argsort(dim=1)[:, :top_k].int()


def force(kind: str, name: str, top_k: int, num_experts: int, local_experts: range) -> Given | None:
    """Return what forces the experts of one layer, or None if the router chooses.

    What it gives depends on the place of a token alone, so a forward that is computed again gets
    the same. It is kept, so a benchmark does not pay for it at every step.

    Args:
        kind: As ``routing.forced``; replayed experts come from elsewhere.
        name: Of the layer; decides what is drawn, together with the rank.
        top_k: K.
        num_experts: E.
        local_experts: The experts of this rank.
    """
    if kind not in ("uniform", "random"):
        return None
    ranks = num_experts // len(local_experts)
    rank = local_experts.start // len(local_experts)
    kept: dict[int, Tensor] = {}

    def of_place(num_tokens: int, device: torch.device) -> Tensor:
        if num_tokens not in kept:
            if kind == "uniform":
                made = uniform_experts(num_tokens, top_k, num_experts, rank, ranks)
            else:
                seed = zlib.crc32(f"{name} {rank} {num_tokens}".encode())
                made = random_experts(num_tokens, top_k, num_experts, seed)
            kept[num_tokens] = made.to(device)
        return kept[num_tokens]

    def give(num_tokens: int, mask_T: Tensor | None, device: torch.device) -> Tensor:
        if mask_T is None:
            return of_place(num_tokens, device)
        if kind == "uniform":
            return uniform_experts(num_tokens, top_k, num_experts, rank, ranks, mask_T, device)
        return of_place(num_tokens, device).masked_fill(~mask_T[:, None], -1)

    return give
