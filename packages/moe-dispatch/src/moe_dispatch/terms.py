"""What the ranks must agree on before rows can travel.

A rank tells its terms to every other rank together with its counts, so this costs no message
and no wait of its own, and ranks that do not fit together all raise the same error instead of
waiting for bytes that never come.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Self

import torch
from torch import Tensor

from moe_dispatch.check import DTYPES


class Gradient(IntEnum):
    """What a rank wants of autograd. All ranks want none, or each wants one of the other two."""

    NONE = 0
    OF_EXPERTS = 1
    OF_TOKENS = 2


class Terms(NamedTuple):
    """The terms of one rank.

    Attributes:
        num_bad: How many of its expert ids belong to no expert.
        gradient: A ``Gradient``.
        dim: D.
        dtype: The place of the dtype of ``x_TD`` in ``DTYPES``.
    """

    num_bad: int
    gradient: int
    dim: int
    dtype: int

    @classmethod
    def of(cls, x_TD: Tensor) -> Self:
        """Return the terms of this rank, but for ``num_bad``, which only its device knows."""
        gradient = Gradient.NONE
        if torch.is_grad_enabled():
            gradient = Gradient.OF_TOKENS if x_TD.requires_grad else Gradient.OF_EXPERTS
        return cls(0, gradient, x_TD.shape[1], DTYPES.index(x_TD.dtype))


def check_terms(terms_W: Sequence[Terms], num_experts: int) -> None:
    """Refuse ranks that cannot exchange rows. Raises the same on all of them.

    Raises:
        ValueError: Naming each rank and what it has.
    """
    bad = {w: terms.num_bad for w, terms in enumerate(terms_W) if terms.num_bad}
    if bad:
        found = ", ".join(f"rank {w} has {count} others" for w, count in bad.items())
        raise ValueError(f"expert_TK must hold -1 (masked) or 0..{num_experts - 1}: {found}")
    _check_same("D differs between ranks", [str(terms.dim) for terms in terms_W])
    _check_same("the dtype of x_TD differs between ranks", [str(DTYPES[t.dtype]) for t in terms_W])
    on_off = ["off" if terms.gradient == Gradient.NONE else "on" for terms in terms_W]
    _check_same("gradients must be on or off (torch.no_grad) on all ranks", on_off)


def _check_same(rule: str, value_W: Sequence[str]) -> None:
    if len(set(value_W)) > 1:
        found = ", ".join(f"rank {w} has {value}" for w, value in enumerate(value_W))
        raise ValueError(f"{rule}: {found}")
