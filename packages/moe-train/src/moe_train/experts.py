"""The Mixture-of-Experts layer: route, send rows to experts, bring the results back.

The way of a token is in ``MoE.forward``. On one rank the fused ``expert_mlp`` gathers and combines
by itself; on several the dispatcher carries rows between ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from moe_dispatch import Dispatcher, LocalDispatcher
from moe_kernels import Routing, expert_mlp, grouped_mlp, grouped_mm
from moe_kernels.mlp.unfused import ACTIVATIONS, GATED
from moe_parallel import replayed
from torch import Tensor, nn

from moe_train.config import ModelConfig, RoutingConfig
from moe_train.forced import force
from moe_train.initial import normal, normal_experts
from moe_train.mlp import swiglu, swiglu_weights
from moe_train.ranges import part
from moe_train.router import RouterStats, choose, router_stats


class MoE(nn.Module):
    """A router, E experts of which this rank holds ``dispatcher.local_experts``, a shared expert.

    Weights are K-major: ``gate_up`` is ``[e, 2F, D]`` with the gate first (``[e, F, D]`` without a
    gate), ``down`` is ``[e, D, F]``. With ``latent_dim`` D is that, and ``latent_down`` and
    ``latent_up`` lead there and back. FLOPs forward: ``6 T K D F`` for the experts.

    Attributes:
        load_E: Buffer, fraction of the rows that each expert got on all ranks in the step before;
            even until somebody says otherwise.
        replayed_TK: Experts to take in the next forward passes instead of the router's; or None.
        keeps_choice: Whether each forward leaves its ``expert_TK`` in ``chosen_TK``.
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
        E = config.num_experts
        self.register_buffer("load_E", torch.full((E,), 1 / E, dtype=wide), persistent=False)
        self.given = force(routing.forced, name, config.top_k, E, experts)
        self.replayed_TK: Tensor | None = None
        self.chosen_TK: Tensor | None = None
        self.keeps_choice = False
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
        top_k, given_TK = self.config.top_k, self.replayed_TK
        if given_TK is None and self.given is not None:
            given_TK = self.given(len(x_TD), mask_T, x_TD.device)
        with part("moe.route"):
            logits_TE = F.linear(x_TD.to(self.router.dtype), self.router)
            routing = replayed(
                lambda: choose(self.routing, logits_TE, top_k, bias_E, mask_T, given_TK)
            )
        if self.keeps_choice:
            self.chosen_TK = routing.expert_TK
        z_TD = F.linear(x_TD, self.latent_down) if self.config.latent_dim else x_TD
        y_TD, kept_TK = self._experts(z_TD, routing)
        if self.config.latent_dim:
            y_TD = F.linear(y_TD, self.latent_up)
        if self.config.shared_dim:
            with part("moe.shared"):
                y_TD = y_TD + self._shared(x_TD, recomputed=recomputed)
        stats = router_stats(
            self.routing,
            logits_TE,
            routing,
            mask_T,
            kept_TK=kept_TK,
            load_E=self.load_E,
            tokens_per_sequence=tokens_per_sequence,
        )
        return y_TD, stats

    def _shared(self, x_TD: Tensor, *, recomputed: bool) -> Tensor:
        y_TD = swiglu(x_TD, self.shared_gate_up, self.shared_down, recomputed=recomputed)
        if self.config.shared_gate:
            y_TD = y_TD * torch.sigmoid(F.linear(x_TD, self.shared_gate[None]))
        return y_TD

    def _experts(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None]:
        """Return what the experts make of the tokens, and which routes were not dropped."""
        activation = self.config.activation
        if isinstance(self.dispatcher, LocalDispatcher):
            weights = routing.weight_TK, routing.expert_TK
            with part("moe.experts"):
                y_TD = expert_mlp(x_TD, self.gate_up, self.down, *weights, activation=activation)
            return y_TD, None
        with part("moe.dispatch"):
            sent = self.dispatcher.dispatch(x_TD, routing)
        with part("moe.experts"):
            if activation == "swiglu":
                y_RD = grouped_mlp(sent.x_RD, self.gate_up, self.down, sent.offsets_e1)
            else:
                h_RG = grouped_mm(sent.x_RD, self.gate_up, sent.offsets_e1)
                act_RF = ACTIVATIONS[activation](h_RG.to(routing.weight_TK.dtype)).to(x_TD.dtype)
                y_RD = grouped_mm(act_RF, self.down, sent.offsets_e1)
        with part("moe.combine"):
            return self.dispatcher.combine(y_RD, sent), sent.kept_TK


def _drawn(
    draw: Callable[..., Tensor], name: str, seed: int, kind: str, *shape: Any, **how: Any
) -> nn.Parameter:
    return nn.Parameter(draw(f"{name}.{kind}", *shape, seed=seed, **how))
