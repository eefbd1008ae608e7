"""Rotary positions, after Su et al. (2021): pairs of channels turn with the position.

Scores depend on differences of positions alone, so positions run on through a row that holds
several documents.
"""

import torch
from torch import Tensor


def rotations(length: int, head_dim: int, theta: float, like: Tensor) -> Tensor:
    """Return cosines and sines for positions ``0..length-1``, side by side: ``[S, head_dim]``.

    They are computed in float64 and kept in at least float32: in bfloat16 neighbouring positions
    of a long sequence would get the same angle.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=like.device) / head_dim
    positions = torch.arange(length, dtype=torch.float64, device=like.device)
    angles = positions[:, None] * theta**-exponents
    kept = torch.promote_types(like.dtype, torch.float32)
    return torch.cat([angles.cos(), angles.sin()], -1).to(kept)


def rotate(x_BHSC: Tensor, rotation_SC: Tensor, *, neighbours: bool = False) -> Tensor:
    """Rotate pairs of each head's channels by the angle of their position.

    Args:
        x_BHSC: Heads.
        rotation_SC: From ``rotations``.
        neighbours: Channel 2i is rotated with channel 2i + 1, and the first of each pair come out
            in the first half; otherwise channel i with channel i + C / 2. Where queries and keys
            are treated alike, the order in which channels come out does not matter.
    """
    cos, sin = rotation_SC.chunk(2, -1)
    a, b = (x_BHSC[..., ::2], x_BHSC[..., 1::2]) if neighbours else x_BHSC.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x_BHSC.dtype)
