"""The dense network: SwiGLU (Shazeer 2020), for every token the same."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_train.config import ModelConfig
from moe_train.initial import normal
from moe_train.parts import run_steps


class DenseMLP(nn.Module):
    """A SwiGLU network in place of experts. FLOPs forward: ``6 T D F``."""

    def __init__(self, name: str, config: ModelConfig, seed: int, dtype: torch.dtype):
        super().__init__()
        self.gate_up, self.down = swiglu_weights(f"{name}.", config.dense_dim, config, seed, dtype)

    def forward(self, x_TD: Tensor, *, recomputed: bool) -> Tensor:
        """Return ``y_TD``."""
        return swiglu(x_TD, self.gate_up, self.down, recomputed=recomputed)


def swiglu(x_TD: Tensor, gate_up_GD: Tensor, down_DF: Tensor, *, recomputed: bool) -> Tensor:
    """Return ``(silu(x @ gate.T) * (x @ up.T)) @ down.T``, gate being the first half of the rows.

    Args:
        x_TD: Tokens.
        gate_up_GD: Both projections; G = 2 * F.
        down_DF: The projection back.
        recomputed: Whether backward computes the product of gate and up again.
    """
    h_TG = F.linear(x_TD, gate_up_GD)
    return run_steps([(_glu, partial(F.linear, weight=down_DF))], h_TG, recomputed=recomputed)


def swiglu_weights(
    name: str, width: int, config: ModelConfig, seed: int, dtype: torch.dtype
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return initial ``gate_up_GD`` and ``down_DF`` of F = ``width``, named after ``name``."""
    up_std, down_std = config.dim**-0.5, (2 * config.num_layers * width) ** -0.5
    gate_up = normal(f"{name}gate_up", 2 * width, config.dim, std=up_std, seed=seed, dtype=dtype)
    down = normal(f"{name}down", config.dim, width, std=down_std, seed=seed, dtype=dtype)
    return nn.Parameter(gate_up), nn.Parameter(down)


def _glu(h_TG: Tensor) -> Tensor:
    gate_TF, up_TF = h_TG.chunk(2, -1)
    return F.silu(gate_TF) * up_TF
