"""The transformer: blocks of attention and experts around one residual stream."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from moe_dispatch import Dispatcher
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_train.attention import Attention, rotations
from moe_train.config import ModelConfig, RoutingConfig
from moe_train.data import IGNORED, Batch
from moe_train.experts import MoE, RouterStats
from moe_train.initial import normal


class Sums(NamedTuple):
    """Sums over the tokens of one microbatch. Divide by the number of tokens of the whole batch.

    Attributes:
        cross_entropy: 0-dim, nats; differentiable, and free of any auxiliary loss.
        balance: 0-dim, summed over layers too; differentiable.
        z: 0-dim, summed over layers too; differentiable.
        count_LE: int64, tokens that chose each expert.
        entropy_L: Entropy of the router's scores, nats.
        num_bad: Tokens that some router could not route.
    """

    cross_entropy: Tensor
    balance: Tensor
    z: Tensor
    count_LE: Tensor
    entropy_L: Tensor
    num_bad: Tensor


class Block(nn.Module):
    """Attention, then experts, each on a normalised input and added to the stream."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        routing: RoutingConfig,
        dispatcher: Dispatcher,
        seed: int,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.eps = config.norm_eps
        self.attention_norm = nn.Parameter(torch.ones(config.dim, dtype=dtype))
        self.attention = Attention(f"{name}.attention", config, seed, dtype)
        self.moe_norm = nn.Parameter(torch.ones(config.dim, dtype=dtype))
        self.moe = MoE(f"{name}.moe", config, routing, dispatcher, seed, dtype)

    def forward(
        self, x_BSD: Tensor, rotation_SC: Tensor, bias_E: Tensor, mask_T: Tensor | None
    ) -> tuple[Tensor, RouterStats]:
        """Return the stream after this block, and what the router did."""
        D = x_BSD.shape[-1:]
        h_BSD = F.rms_norm(x_BSD, D, self.attention_norm, self.eps)
        x_BSD = x_BSD + self.attention(h_BSD, rotation_SC)
        h_BSD = F.rms_norm(x_BSD, D, self.moe_norm, self.eps)
        y_TD, stats = self.moe(h_BSD.flatten(0, 1), bias_E, mask_T, x_BSD.shape[1])
        return x_BSD + y_TD.view_as(x_BSD), stats


class Transformer(nn.Module):
    """A decoder-only language model.

    Args:
        config: The shape.
        routing: How tokens choose experts.
        dispatcher: Carries rows to the ranks of their experts.
        seed: Decides the initial weights, the same for every layout.
        dtype: Of parameters and activations; routers are never narrower than float32.
        recompute: Compute each block again in backward instead of keeping its activations. What
            is counted comes out of the first forward alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        routing: RoutingConfig,
        dispatcher: Dispatcher,
        *,
        seed: int,
        dtype: torch.dtype,
        recompute: bool = False,
    ):
        super().__init__()
        self.config, self.recompute = config, recompute
        V, D = config.vocab_size, config.dim
        self.embedding = nn.Parameter(normal("embedding", V, D, std=1.0, seed=seed, dtype=dtype))
        # Named by their place in the whole model, which a pipeline stage holds a part of.
        self.layers = nn.ModuleDict(
            {
                str(i): Block(f"layers.{i}", config, routing, dispatcher, seed, dtype)
                for i in range(config.num_layers)
            }
        )
        self.norm = nn.Parameter(torch.ones(D, dtype=dtype))
        # Zero: training starts at ln V exactly, whatever the rest of the model does.
        self.head = nn.Parameter(torch.zeros(V, D, dtype=dtype))

    def forward(
        self, inputs_BS: Tensor, bias_LE: Tensor, mask_T: Tensor | None = None
    ) -> tuple[Tensor, list[RouterStats]]:
        """Return ``logits_BSV`` and what each layer's router did."""
        x_BSD = F.embedding(inputs_BS, self.embedding)
        head_dim = self.config.dim // self.config.num_heads
        rotation_SC = rotations(inputs_BS.shape[1], head_dim, self.config.rope_theta, x_BSD)
        stats = []
        for block, bias_E in zip(self.layers.values(), bias_LE, strict=True):
            arguments = (x_BSD, rotation_SC, bias_E, mask_T)
            if self.recompute and torch.is_grad_enabled():
                x_BSD, layer = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x_BSD, layer = block(*arguments)
            stats.append(layer)
        x_BSD = F.rms_norm(x_BSD, (self.config.dim,), self.norm, self.config.norm_eps)
        return F.linear(x_BSD, self.head), stats

    def sums(self, batch: Batch, bias_LE: Tensor) -> Sums:
        """Return the losses and statistics of a microbatch, as sums over its tokens."""
        logits_BSV, stats = self(batch.inputs_BS, bias_LE, batch.mask_T)
        wide = torch.promote_types(logits_BSV.dtype, torch.float32)
        return Sums(
            cross_entropy=F.cross_entropy(
                logits_BSV.flatten(0, 1).to(wide),
                batch.targets_BS.flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            ),
            balance=torch.stack([layer.balance for layer in stats]).sum(),
            z=torch.stack([layer.z for layer in stats]).sum(),
            count_LE=torch.stack([layer.count_E for layer in stats]),
            entropy_L=torch.stack([layer.entropy for layer in stats]),
            num_bad=torch.stack([layer.num_bad for layer in stats]).sum(),
        )
