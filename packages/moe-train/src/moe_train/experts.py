"""The Mixture-of-Experts layer: route, send rows to experts, bring the results back.

The way of a token is in ``MoE.forward``. On one rank the fused ``expert_mlp`` gathers and combines
by itself; on several the dispatcher carries rows between ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from moe_dispatch import Dispatcher, LocalDispatcher
from moe_kernels import (
    Routing,
    balance_loss,
    count_experts,
    expert_mlp,
    grouped_mlp,
    grouped_mm,
    route,
    z_loss,
)
from moe_kernels.mlp.unfused import ACTIVATIONS, GATED
from moe_parallel import replayed
from torch import Tensor, nn

from moe_train.config import ModelConfig, RoutingConfig
from moe_train.initial import normal, normal_experts
from moe_train.mlp import swiglu, swiglu_weights


class RouterStats(NamedTuple):
    """What one layer's router did with the tokens of one microbatch.

    Attributes:
        balance: 0-dim, balance loss summed over tokens; differentiable.
        z: 0-dim, squared log-partition summed over tokens; differentiable.
        count_E: int64, tokens that chose each expert.
        entropy: 0-dim, entropy of the scores in nats, summed over tokens.
        num_bad: int32, tokens that could not be routed since their scores were not finite.
    """

    balance: Tensor
    z: Tensor
    count_E: Tensor
    entropy: Tensor
    num_bad: Tensor


class MoE(nn.Module):
    """A router, E experts of which this rank holds ``dispatcher.local_experts``, a shared expert.

    Weights are K-major: ``gate_up`` is ``[e, 2F, D]`` with the gate first (``[e, F, D]`` without a
    gate), ``down`` is ``[e, D, F]``. With ``latent_dim`` D is that, and ``latent_down`` and
    ``latent_up`` lead there and back. FLOPs forward: ``6 T K D F`` for the experts.
    """

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
        self.config, self.routing, self.dispatcher = config, routing, dispatcher
        routing.check_experts(config.num_experts, config.top_k)
        D, F_, experts = config.dim, config.expert_dim, dispatcher.local_experts
        N, G = config.latent_dim or D, 2 * F_ if config.activation in GATED else F_
        matrix, expert_matrices = (
            partial(_drawn, draw, name, seed) for draw in (normal, normal_experts)
        )
        wide = torch.promote_types(dtype, torch.float32)
        self.router = matrix("router", config.num_experts, D, std=D**-0.5, dtype=wide)
        if config.latent_dim:
            self.latent_down = matrix("latent_down", N, D, std=D**-0.5, dtype=dtype)
            self.latent_up = matrix("latent_up", D, N, std=N**-0.5, dtype=dtype)
        down_std = (2 * config.num_layers * F_) ** -0.5
        self.gate_up = expert_matrices("gate_up", experts, G, N, std=N**-0.5, dtype=dtype)
        self.down = expert_matrices("down", experts, N, F_, std=down_std, dtype=dtype)
        if config.shared_dim:
            self.shared_gate_up, self.shared_down = swiglu_weights(
                f"{name}.shared_", config.shared_dim, config, seed, dtype
            )
        if config.shared_gate:  # a vector, so that it does not decay: its scale is a decision
            self.shared_gate = nn.Parameter(torch.zeros(D, dtype=dtype))

    def forward(
        self,
        x_TD: Tensor,
        bias_E: Tensor,
        mask_T: Tensor | None,
        tokens_per_sequence: int,
        *,
        recomputed: bool = False,
    ) -> tuple[Tensor, RouterStats]:
        """Return ``y_TD`` and what the router did.

        ``recomputed`` says whether the shared expert's activation is computed again in backward.
        Where this whole layer is, the choice of experts is not: it is made once.
        """
        logits_TE = F.linear(x_TD.to(self.router.dtype), self.router)
        routing = replayed(
            lambda: route(
                logits_TE,
                self.config.top_k,
                score=self.routing.score,
                renormalize=self.routing.renormalize,
                bias_E=bias_E if self.routing.bias else None,
                num_groups=self.routing.num_groups,
                top_groups=self.routing.top_groups,
                scale=self.routing.scale,
                mask_T=mask_T,
            )
        )
        z_TD = F.linear(x_TD, self.latent_down) if self.config.latent_dim else x_TD
        y_TD = self._experts(z_TD, routing)
        if self.config.latent_dim:
            y_TD = F.linear(y_TD, self.latent_up)
        if self.config.shared_dim:
            y_TD = y_TD + self._shared(x_TD, recomputed=recomputed)
        return y_TD, self._stats(logits_TE, routing, mask_T, tokens_per_sequence)

    def _shared(self, x_TD: Tensor, *, recomputed: bool) -> Tensor:
        y_TD = swiglu(x_TD, self.shared_gate_up, self.shared_down, recomputed=recomputed)
        if self.config.shared_gate:
            y_TD = y_TD * torch.sigmoid(x_TD @ self.shared_gate)[:, None]
        return y_TD

    def _experts(self, x_TD: Tensor, routing: Routing) -> Tensor:
        activation = self.config.activation
        if isinstance(self.dispatcher, LocalDispatcher):
            weights = routing.weight_TK, routing.expert_TK
            return expert_mlp(x_TD, self.gate_up, self.down, *weights, activation=activation)
        sent = self.dispatcher.dispatch(x_TD, routing)
        if activation == "swiglu":
            y_RD = grouped_mlp(sent.x_RD, self.gate_up, self.down, sent.offsets_e1)
        else:
            h_RG = grouped_mm(sent.x_RD, self.gate_up, sent.offsets_e1)
            act_RF = ACTIVATIONS[activation](h_RG.to(routing.weight_TK.dtype)).to(x_TD.dtype)
            y_RD = grouped_mm(act_RF, self.down, sent.offsets_e1)
        return self.dispatcher.combine(y_RD, sent)

    def _stats(
        self, logits_TE: Tensor, routing: Routing, mask_T: Tensor | None, tokens_per_sequence: int
    ) -> RouterStats:
        with torch.no_grad():
            total_T1 = routing.score_TE.sum(-1, keepdim=True)
            p_TE = routing.score_TE / total_T1.where(total_T1 > 0, 1)  # masked rows are zero
            entropy = -torch.special.xlogy(p_TE, p_TE).sum()
        return RouterStats(
            balance=balance_loss(
                routing.score_TE,
                routing.expert_TK,
                tokens_per_sequence=tokens_per_sequence,
                mask_T=mask_T,
            ),
            z=z_loss(logits_TE, mask_T=mask_T),
            count_E=count_experts(routing.expert_TK, self.config.num_experts),
            entropy=entropy,
            num_bad=routing.num_bad,
        )


def _drawn(
    draw: Callable[..., Tensor], name: str, seed: int, kind: str, *shape: Any, **how: Any
) -> nn.Parameter:
    return nn.Parameter(draw(f"{name}.{kind}", *shape, seed=seed, **how))
