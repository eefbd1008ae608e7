"""Initial weights that depend on names and the seed, never on how the ranks divide the model.

Every matrix has a generator of its own, and every expert is a matrix: expert 5 of block 2 starts
the same whichever rank holds it and however many ranks there are. Values are drawn in float32 and
then converted, so a float64 run starts where the float32 run does. On torch's meta device nothing
is drawn: a model of any size can be made there to be looked at.
"""

import hashlib

import torch
from torch import Tensor


def normal(name: str, *shape: int, std: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Return normal values that only ``name``, ``shape`` and ``seed`` decide."""
    if torch.get_default_device().type == "meta":
        return torch.empty(*shape, dtype=dtype)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return (torch.randn(*shape, generator=generator) * std).to(dtype)


def normal_experts(
    name: str, experts: range, *shape: int, std: float, seed: int, dtype: torch.dtype
) -> Tensor:
    """Return one matrix for each expert of ``experts``, which are global numbers."""
    if torch.get_default_device().type == "meta":
        return torch.empty(len(experts), *shape, dtype=dtype)
    return torch.stack(
        [normal(f"{name}/{e}", *shape, std=std, seed=seed, dtype=dtype) for e in experts]
    )
