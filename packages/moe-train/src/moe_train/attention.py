"""Causal self-attention with rotary positions and shared key-value heads.

Grouped queries after Ainslie et al. (2023), rotary embedding after Su et al. (2021), in the
half-split form: channel i is rotated with channel i + head_dim / 2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_train.config import ModelConfig
from moe_train.initial import normal


class Attention(nn.Module):
    """One attention layer. FLOPs forward: ``2 T D (2 D + 2 D_kv) + 2 T S D`` for causal S."""

    def __init__(self, name: str, config: ModelConfig, seed: int, dtype: torch.dtype):
        super().__init__()
        D, self.head_dim = config.dim, config.dim // config.num_heads
        D_kv = self.head_dim * config.num_kv_heads
        self.eps = config.norm_eps

        def matrix(kind: str, rows: int, columns: int, std: float) -> nn.Parameter:
            values = normal(f"{name}.{kind}", rows, columns, std=std, seed=seed, dtype=dtype)
            return nn.Parameter(values)

        self.q, self.k = matrix("q", D, D, D**-0.5), matrix("k", D_kv, D, D**-0.5)
        self.v = matrix("v", D_kv, D, D**-0.5)
        self.o = matrix("o", D, D, (2 * config.num_layers * D) ** -0.5)
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(self.head_dim, dtype=dtype))
            self.k_norm = nn.Parameter(torch.ones(self.head_dim, dtype=dtype))
        else:
            self.q_norm = self.k_norm = None

    def forward(self, x_BSD: Tensor, rotation_SC: Tensor) -> Tensor:
        """Mix each sequence's tokens with those before them. Returns ``y_BSD``."""
        q = self._heads(x_BSD, self.q, self.q_norm, rotation_SC)
        k = self._heads(x_BSD, self.k, self.k_norm, rotation_SC)
        v = F.linear(x_BSD, self.v).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(2), self.o)

    def _heads(
        self, x_BSD: Tensor, weight: Tensor, norm: Tensor | None, rotation_SC: Tensor
    ) -> Tensor:
        x_BSHC = F.linear(x_BSD, weight).unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            x_BSHC = F.rms_norm(x_BSHC, (self.head_dim,), norm, self.eps)
        return rotate(x_BSHC.transpose(1, 2), rotation_SC)


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


def rotate(x_BHSC: Tensor, rotation_SC: Tensor) -> Tensor:
    """Rotate the two halves of each head's channels by the angle of their position."""
    cos, sin = rotation_SC.chunk(2, -1)
    a, b = x_BHSC.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x_BHSC.dtype)
