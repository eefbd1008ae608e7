"""One dispatch over several ranks, small enough to print and to send to other processes."""

from typing import NamedTuple

import torch
from moe_kernels import Routing
from torch import Tensor


class DispatchCase(NamedTuple):
    """Sizes and a seed. The tensors are made from them, the same on every process.

    Attributes:
        experts_per_rank: e.
        top_k: K, at most the number of experts.
        dim: D.
        tokens_W: T of each rank. Zeros are welcome.
        hot_experts: Only the first ``hot_experts`` experts are chosen. At least K.
        masked: The share of routes that are masked, from 0 to 1.
        seed: For the values.
        dtype: The name of the dtype of the tokens, such as ``"float64"``.
    """

    experts_per_rank: int
    top_k: int
    dim: int
    tokens_W: tuple[int, ...]
    hot_experts: int
    masked: float = 0.0
    seed: int = 0
    dtype: str = "float64"

    @property
    def world_size(self) -> int:
        """W."""
        return len(self.tokens_W)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.world_size * self.experts_per_rank

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the tokens."""
        return getattr(torch, self.dtype)

    def tokens(self, rank: int) -> Tensor:
        """Return ``x_TD`` of one rank."""
        return self._randn(rank, 0)

    def gradient(self, rank: int) -> Tensor:
        """Return ``dy_TD``, the gradient that comes back to the ``y_TD`` of one rank."""
        return self._randn(rank, 1)

    def routing(self, rank: int) -> Routing:
        """Return the routing of one rank. Weights of masked routes are zero."""
        generator = self._generator(rank, 2)
        T, K = self.tokens_W[rank], self.top_k
        score_TE = torch.rand(T, self.num_experts, generator=generator, dtype=torch.float64)
        expert_TK = score_TE[:, : self.hot_experts].topk(K, dim=1).indices.int()
        masked_TK = torch.rand(T, K, generator=generator) < self.masked
        weight_TK = torch.rand(T, K, generator=generator, dtype=torch.float64)
        wide = torch.float64 if self.torch_dtype == torch.float64 else torch.float32
        return Routing(
            weight_TK=weight_TK.masked_fill(masked_TK, 0).to(wide),
            expert_TK=expert_TK.masked_fill(masked_TK, -1),
            score_TE=score_TE.to(wide),
            num_bad=torch.zeros((), dtype=torch.int32),
        )

    def alone(self) -> "DispatchCase":
        """Return the case with the sizes of one rank that owns all experts and all tokens.

        Its tensors are other ones: use ``torch.cat`` of those of the ranks.
        """
        return self._replace(experts_per_rank=self.num_experts, tokens_W=(sum(self.tokens_W),))

    def _randn(self, rank: int, stream: int) -> Tensor:
        shape = (self.tokens_W[rank], self.dim)
        generator = self._generator(rank, stream)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.torch_dtype)

    def _generator(self, rank: int, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 3 + stream) * 1000 + rank)
