"""The transformer: blocks of attention and experts around one residual stream."""

from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from moe_dispatch import Dispatcher
from moe_parallel import recompute
from torch import Tensor, nn

from moe_train.attention import make_attention
from moe_train.config import ModelConfig, RoutingConfig
from moe_train.data import Batch
from moe_train.experts import MoE
from moe_train.initial import normal
from moe_train.loss import cross_entropy_sum
from moe_train.mlp import DenseMLP
from moe_train.parts import run_steps
from moe_train.ranges import part
from moe_train.rotary import rotations
from moe_train.router import RouterStats
from moe_train.sight import Sight, sight_of

Recompute = Literal["none", "selective", "block"]


class Sums(NamedTuple):
    """Sums over the tokens of one microbatch. Divide by the number of tokens of the whole batch.

    L counts the layers that have experts.

    Attributes:
        cross_entropy: 0-dim, nats; differentiable, and free of any auxiliary loss.
        balance: 0-dim, summed over layers too; differentiable.
        z: 0-dim, summed over layers too; differentiable.
        count_LE: int64, tokens that chose each expert.
        kept_LE: int64, those that the expert got.
        share_LE: Scores of each expert, as shares of a token's scores.
        dropped_LK1: int64, tokens of which 0 to K routes were dropped.
        entropy_L: Entropy of the router's scores, nats.
        num_bad: Tokens that some router could not route.
    """

    cross_entropy: Tensor
    balance: Tensor
    z: Tensor
    count_LE: Tensor
    kept_LE: Tensor
    share_LE: Tensor
    dropped_LK1: Tensor
    entropy_L: Tensor
    num_bad: Tensor


class Block(nn.Module):
    """Attention, then experts, each on a normalised input and added to the stream.

    The first ``num_dense_layers`` blocks have a dense network where the others have experts.
    """

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        routing: RoutingConfig,
        dispatcher: Dispatcher,
        seed: int,
        dtype: torch.dtype,
        *,
        recomputed: bool,
    ):
        super().__init__()
        name, self.recomputed = f"layers.{layer}", recomputed
        self.norm = partial(_norm, eps=config.norm_eps)
        self.attention_norm = nn.Parameter(torch.ones(config.dim, dtype=dtype))
        self.attention = make_attention(f"{name}.attention", config, seed, dtype, layer)
        self.moe_norm = nn.Parameter(torch.ones(config.dim, dtype=dtype))
        if layer in config.moe_layers:
            self.moe = MoE(f"{name}.moe", config, routing, dispatcher, seed, dtype)
        else:
            self.mlp = DenseMLP(f"{name}.mlp", config, seed, dtype)

    def forward(
        self,
        x_BSD: Tensor,
        rotation_SC: Tensor,
        sight: Sight,
        bias_E: Tensor | None,
        mask_T: Tensor | None,
    ) -> tuple[Tensor, RouterStats | None]:
        """Return the stream after this block, and what the router did, if it has one."""
        norm = partial(self.norm, self.attention_norm)
        steps = self.attention.steps(norm, rotation_SC, sight)
        with part("attention"):
            x_BSD = x_BSD + run_steps(steps, x_BSD, recomputed=self.recomputed)
        norm, recomputed = partial(self.norm, self.moe_norm), self.recomputed
        if bias_E is None:
            steps = [(norm, partial(self.mlp, recomputed=recomputed))]
            return x_BSD + run_steps(steps, x_BSD, recomputed=recomputed), None
        y_TD, stats = run_steps(
            [(norm, partial(self._route, bias_E, mask_T))], x_BSD, recomputed=recomputed
        )
        return x_BSD + y_TD.view_as(x_BSD), stats

    def _route(
        self, bias_E: Tensor, mask_T: Tensor | None, h_BSD: Tensor
    ) -> tuple[Tensor, RouterStats]:
        h_TD, recomputed = h_BSD.flatten(0, 1), self.recomputed
        return self.moe(h_TD, bias_E, mask_T, h_BSD.shape[1], recomputed=recomputed)


class Transformer(nn.Module):
    """A decoder-only language model.

    Args:
        config: The shape.
        routing: How tokens choose experts.
        dispatcher: Carries rows to the ranks of their experts.
        seed: Decides the initial weights, the same for every layout.
        dtype: Of parameters and activations; routers are never narrower than float32.
        recompute: What backward computes again instead of keeping it. ``selective``: norms,
            rotations and the activations of dense networks, but no product of matrices;
            ``block``: each block from its input, but for the choice of experts. What is counted
            comes out of the first forward alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        routing: RoutingConfig,
        dispatcher: Dispatcher,
        *,
        seed: int,
        dtype: torch.dtype,
        recompute: Recompute = "none",
    ):
        super().__init__()
        self.config, self.recompute = config, recompute
        V, D = config.vocab_size, config.dim
        # Tied, the same rows are logits of standard deviation 1/2: the loss starts near ln V.
        std = 0.5 * D**-0.5 if config.tie_embeddings else 1.0
        self.embedding = nn.Parameter(normal("embedding", V, D, std=std, seed=seed, dtype=dtype))
        # Named by their place in the whole model, which a pipeline stage holds a part of.
        make = partial(Block, recomputed=recompute == "selective")
        self.layers = nn.ModuleDict(
            {
                str(i): make(i, config, routing, dispatcher, seed, dtype)
                for i in range(config.num_layers)
            }
        )
        self.norm = nn.Parameter(torch.ones(D, dtype=dtype))
        if not config.tie_embeddings:
            # Zero: training starts at ln V exactly, whatever the rest of the model does.
            self.head = nn.Parameter(torch.zeros(V, D, dtype=dtype))

    @property
    def head_weight(self) -> Tensor:
        """``[V, D]``, what predicts tokens: the head, or the embedding if they are tied."""
        return self.embedding if self.config.tie_embeddings else self.head

    def forward(
        self, inputs_BS: Tensor, bias_LE: Tensor, mask_T: Tensor | None = None
    ) -> tuple[Tensor, list[RouterStats]]:
        """Return ``logits_BSV`` and what each layer's router did."""
        h_BSD, stats = self.hidden(inputs_BS, bias_LE, mask_T)
        return F.linear(h_BSD, self.head_weight), stats

    def hidden(
        self,
        inputs_BS: Tensor,
        bias_LE: Tensor,
        mask_T: Tensor | None = None,
        sight: Sight | None = None,
    ) -> tuple[Tensor, list[RouterStats]]:
        """Return what the head reads, ``h_BSD``, and what each layer's router did.

        Args:
            inputs_BS: Tokens.
            bias_LE: Selection bias of each layer that has experts.
            mask_T: True for real tokens; None if all are.
            sight: What tokens see; without it, all before them in their row.
        """
        config, x_BSD = self.config, F.embedding(inputs_BS, self.embedding)
        sight = sight or Sight((inputs_BS.shape[0], inputs_BS.shape[1]), inputs_BS.device)
        rotation_SC = rotations(inputs_BS.shape[1], config.rotated_width, config.rope_theta, x_BSD)
        biases = dict(zip(config.moe_layers, bias_LE, strict=True))
        stats = []
        for layer, block in self.layers.items():
            arguments = (x_BSD, rotation_SC, sight, biases.get(int(layer)), mask_T)
            whole = self.recompute == "block"
            x_BSD, routed = recompute(block, *arguments) if whole else block(*arguments)
            if routed is not None:
                stats.append(routed)
        return F.rms_norm(x_BSD, (config.dim,), self.norm, config.norm_eps), stats

    def sums(self, batch: Batch, bias_LE: Tensor) -> Sums:
        """Return the losses and statistics of a microbatch, as sums over its tokens."""
        h_BSD, stats = self.hidden(batch.inputs_BS, bias_LE, batch.mask_T, sight_of(batch))
        targets_T = batch.targets_BS.flatten()
        return Sums(
            cross_entropy=cross_entropy_sum(h_BSD.flatten(0, 1), self.head_weight, targets_T),
            balance=torch.stack([layer.balance for layer in stats]).sum(),
            z=torch.stack([layer.z for layer in stats]).sum(),
            count_LE=torch.stack([layer.count_E for layer in stats]),
            kept_LE=torch.stack([layer.kept_E for layer in stats]),
            share_LE=torch.stack([layer.share_E for layer in stats]),
            dropped_LK1=torch.stack([layer.dropped_K1 for layer in stats]),
            entropy_L=torch.stack([layer.entropy for layer in stats]),
            num_bad=torch.stack([layer.num_bad for layer in stats]).sum(),
        )


def _norm(weight_D: Tensor, x_BSD: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_BSD, x_BSD.shape[-1:], weight_D, eps)
