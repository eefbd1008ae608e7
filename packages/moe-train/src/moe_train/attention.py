"""Causal self-attention: grouped heads (Ainslie et al. 2023), or latent ones (DeepSeek-V2, 2024).

Both are made of steps: norm and projections, then norms and rotation, then attention itself.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_train.config import ModelConfig
from moe_train.initial import normal
from moe_train.parts import Step
from moe_train.rotary import rotate
from moe_train.sight import Sight, attend

Norm = Callable[[Tensor], Tensor]


class GroupedAttention(nn.Module):
    """Query heads that share key and value heads.

    FLOPs forward: ``2 T (D H C + 2 D H_kv C + H C D)`` for the projections, and those of
    ``attend``.
    """

    def __init__(self, name: str, config: ModelConfig, seed: int, dtype: torch.dtype, window: int):
        super().__init__()
        self.config, self.window = config, window
        D, C = config.dim, config.head_width
        wide, narrow = config.num_heads * C, config.num_kv_heads * C
        matrix = partial(_matrix, name, seed, dtype)
        self.q, self.k = matrix("q", wide, D, D**-0.5), matrix("k", narrow, D, D**-0.5)
        self.v = matrix("v", narrow, D, D**-0.5)
        self.o = matrix("o", D, wide, (2 * config.num_layers * wide) ** -0.5)
        self.q_norm = self.k_norm = None
        if config.qk_norm != "none":
            widths = (C, C) if config.qk_norm == "head" else (wide, narrow)
            self.q_norm, self.k_norm = (
                nn.Parameter(torch.ones(width, dtype=dtype)) for width in widths
            )

    def steps(self, norm: Norm, rotation_SC: Tensor, sight: Sight) -> Sequence[Step]:
        """Return the steps from ``x_BSD`` to what is added to it."""
        return (norm, self._project), (partial(self._prepare, rotation_SC), self._mix(sight))

    def _project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.linear(x_BSD, self.q), F.linear(x_BSD, self.k), F.linear(x_BSD, self.v)

    def _prepare(
        self, rotation_SC: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self._heads(q, self.q_norm, rotation_SC),
            self._heads(k, self.k_norm, rotation_SC),
            v.unflatten(-1, (-1, self.config.head_width)).transpose(1, 2),
        )

    def _heads(self, x_BSN: Tensor, norm: Tensor | None, rotation_SC: Tensor) -> Tensor:
        C, eps = self.config.head_width, self.config.norm_eps
        if norm is not None and self.config.qk_norm == "together":
            x_BSN = F.rms_norm(x_BSN, x_BSN.shape[-1:], norm, eps)
        x_BSHC = x_BSN.unflatten(-1, (-1, C))
        if norm is not None and self.config.qk_norm == "head":
            x_BSHC = F.rms_norm(x_BSHC, (C,), norm, eps)
        neighbours = self.config.rope_pairs == "neighbours"
        return rotate(x_BSHC.transpose(1, 2), rotation_SC, neighbours=neighbours)

    def _mix(self, sight: Sight) -> Callable[..., Tensor]:
        return partial(_mix, self.o, sight, self.window)


class LatentAttention(nn.Module):
    """Keys and values of all heads out of one short vector a token, and one rotated key for all.

    A query and a key are a part of C channels that is not rotated, and R that are. FLOPs forward:
    twice the elements of its matrices for each token, and those of ``attend``.
    """

    def __init__(self, name: str, config: ModelConfig, seed: int, dtype: torch.dtype, window: int):
        super().__init__()
        self.config, self.window = config, window
        D, H, C, R = config.dim, config.num_heads, config.head_width, config.rope_head_dim
        rank, values = config.kv_rank, H * config.value_width
        matrix = partial(_matrix, name, seed, dtype)
        if config.q_rank:
            self.q_a = matrix("q_a", config.q_rank, D, D**-0.5)
            self.q_a_norm = nn.Parameter(torch.ones(config.q_rank, dtype=dtype))
            self.q_b = matrix("q_b", H * (C + R), config.q_rank, config.q_rank**-0.5)
        else:
            self.q = matrix("q", H * (C + R), D, D**-0.5)
        self.kv_a = matrix("kv_a", rank + R, D, D**-0.5)
        self.kv_a_norm = nn.Parameter(torch.ones(rank, dtype=dtype))
        self.kv_b = matrix("kv_b", H * C + values, rank, rank**-0.5)
        self.o = matrix("o", D, values, (2 * config.num_layers * values) ** -0.5)

    def steps(self, norm: Norm, rotation_SC: Tensor, sight: Sight) -> Sequence[Step]:
        """Return the steps from ``x_BSD`` to what is added to it."""
        mix = partial(_mix, self.o, sight, self.window)
        prepare = partial(self._prepare, rotation_SC)
        return (norm, self._down), (self._normalise, self._up), (prepare, mix)

    def _down(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        q = F.linear(x_BSD, self.q_a if self.config.q_rank else self.q)
        return q, F.linear(x_BSD, self.kv_a)

    def _normalise(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        eps, rank = self.config.norm_eps, self.config.kv_rank
        if self.config.q_rank:
            q = F.rms_norm(q, q.shape[-1:], self.q_a_norm, eps)
        kv, rope = kv.split([rank, self.config.rope_head_dim], -1)
        return q, F.rms_norm(kv, (rank,), self.kv_a_norm, eps), rope

    def _up(self, q: Tensor, kv: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.linear(q, self.q_b) if self.config.q_rank else q, F.linear(kv, self.kv_b), rope

    def _prepare(
        self, rotation_SC: Tensor, q: Tensor, kv: Tensor, rope: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        H, C, R = self.config.num_heads, self.config.head_width, self.config.rope_head_dim
        turn = partial(
            rotate, rotation_SC=rotation_SC, neighbours=self.config.rope_pairs == "neighbours"
        )
        plain, turned = q.unflatten(-1, (H, C + R)).transpose(1, 2).split([C, R], -1)
        key, value = (
            kv.unflatten(-1, (H, -1)).transpose(1, 2).split([C, self.config.value_width], -1)
        )
        shared = turn(rope[:, None]).expand(-1, H, -1, -1)
        return torch.cat([plain, turn(turned)], -1), torch.cat([key, shared], -1), value


def make_attention(
    name: str, config: ModelConfig, seed: int, dtype: torch.dtype, layer: int
) -> GroupedAttention | LatentAttention:
    """Return the attention that the configuration asks for in this layer."""
    kind = LatentAttention if config.attention == "latent" else GroupedAttention
    return kind(name, config, seed, dtype, config.window_of(layer))


def _mix(
    o: Tensor, sight: Sight, window: int, q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor
) -> Tensor:
    y_BHSC = attend(q_BHSC, k_BHSC, v_BHSC, sight, window)
    return F.linear(y_BHSC.transpose(1, 2).flatten(2), o)


def _matrix(
    name: str, seed: int, dtype: torch.dtype, kind: str, rows: int, columns: int, std: float
) -> nn.Parameter:
    values = normal(f"{name}.{kind}", rows, columns, std=std, seed=seed, dtype=dtype)
    return nn.Parameter(values)
