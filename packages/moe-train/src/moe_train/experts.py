"""The Mixture-of-Experts layer: route, send rows to experts, bring the results back.

The way of a token is in ``MoE.forward``. On one rank the fused ``expert_mlp`` gathers and combines
by itself; on several the dispatcher carries rows between ranks.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from moe_dispatch import Dispatcher, LocalDispatcher
from moe_kernels import (
    Routing,
    balance_loss,
    count_experts,
    expert_mlp,
    grouped_mlp,
    route,
    z_loss,
)
from torch import Tensor, nn

from moe_train.config import ModelConfig, RoutingConfig
from moe_train.initial import normal, normal_experts


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

    Weights are K-major: ``gate_up`` is ``[e, 2F, D]`` with the gate first, ``down`` is
    ``[e, D, F]``. FLOPs forward: ``6 T K D F`` for the experts.
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
        D, F_, experts = config.dim, config.expert_dim, dispatcher.local_experts
        self.router = nn.Parameter(
            normal(
                f"{name}.router", config.num_experts, D,
                std=D**-0.5, seed=seed, dtype=torch.promote_types(dtype, torch.float32),
            )
        )  # fmt: skip
        up_std, down_std = D**-0.5, (2 * config.num_layers * F_) ** -0.5
        self.gate_up = nn.Parameter(
            normal_experts(
                f"{name}.gate_up", experts, 2 * F_, D, std=up_std, seed=seed, dtype=dtype
            )
        )
        self.down = nn.Parameter(
            normal_experts(f"{name}.down", experts, D, F_, std=down_std, seed=seed, dtype=dtype)
        )
        if config.shared_dim:
            S = config.shared_dim
            down_std = (2 * config.num_layers * S) ** -0.5
            self.shared_gate_up = nn.Parameter(
                normal(f"{name}.shared_gate_up", 2 * S, D, std=up_std, seed=seed, dtype=dtype)
            )
            self.shared_down = nn.Parameter(
                normal(f"{name}.shared_down", D, S, std=down_std, seed=seed, dtype=dtype)
            )

    def forward(
        self, x_TD: Tensor, bias_E: Tensor, mask_T: Tensor | None, tokens_per_sequence: int
    ) -> tuple[Tensor, RouterStats]:
        """Return ``y_TD`` and what the router did."""
        logits_TE = F.linear(x_TD.to(self.router.dtype), self.router)
        routing = route(
            logits_TE,
            self.config.top_k,
            score=self.routing.score,
            renormalize=self.routing.renormalize,
            bias_E=bias_E if self.routing.bias else None,
            mask_T=mask_T,
        )
        y_TD = self._experts(x_TD, routing)
        if self.config.shared_dim:
            gate, up = F.linear(x_TD, self.shared_gate_up).chunk(2, -1)
            y_TD = y_TD + F.linear(F.silu(gate) * up, self.shared_down)
        return y_TD, self._stats(logits_TE, routing, mask_T, tokens_per_sequence)

    def _experts(self, x_TD: Tensor, routing: Routing) -> Tensor:
        if isinstance(self.dispatcher, LocalDispatcher):
            return expert_mlp(x_TD, self.gate_up, self.down, routing.weight_TK, routing.expert_TK)
        sent = self.dispatcher.dispatch(x_TD, routing)
        y_RD = grouped_mlp(sent.x_RD, self.gate_up, self.down, sent.offsets_e1)
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
