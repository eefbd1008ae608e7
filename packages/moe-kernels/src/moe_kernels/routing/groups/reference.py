"""What the order of routed rows and the map of tiles are, in plain torch."""

import torch
from torch import Tensor

EXPERT_BITS = 12


def group_rows_reference(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of ``Groups`` by one stable sort, without reading a value on the host."""
    flat_N = expert_TK.reshape(-1)
    masked_N = (flat_N < 0) | (flat_N >= num_experts)
    sorted_N, slot_of_row_N = torch.where(masked_N, num_experts, flat_N).sort(stable=True)
    experts_E1 = torch.arange(num_experts + 1, device=flat_N.device, dtype=sorted_N.dtype)
    row_N = torch.arange(flat_N.shape[0], device=flat_N.device, dtype=torch.int32)
    row_of_slot_N = torch.empty_like(row_N).scatter_(0, slot_of_row_N, row_N)
    return (
        torch.searchsorted(sorted_N, experts_E1, out_int32=True),
        slot_of_row_N.to(torch.int32).masked_fill(sorted_N == num_experts, -1),
        row_of_slot_N.masked_fill(masked_N, -1).view(expert_TK.shape),
    )


def tile_rows_reference(offsets_E1: Tensor, num_rows: int, block_n: int) -> tuple[Tensor, Tensor]:
    """Return the fields of ``Tiles``: the expert of a tile is found in the sums of tiles before."""
    E = offsets_E1.shape[0] - 1
    tiles_E = -(offsets_E1.diff().long().neg() // block_n)  # rounded up
    passed_E = tiles_E.cumsum(0)
    t = torch.arange(num_rows // block_n + E, device=offsets_E1.device)
    expert = torch.searchsorted(passed_E, t, right=True).clamp(max=E - 1)
    block = t - (passed_E - tiles_E)[expert]
    entry = torch.where(t < passed_E[-1], expert | (block << EXPERT_BITS), -1)
    return entry.to(torch.int32), passed_E[-1:].clamp(max=t.shape[0]).to(torch.int32)
