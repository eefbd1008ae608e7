"""The loss of a model on held-out text, on any number of ranks."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_train.data import SequenceSource, rank_share
from moe_train.trained import ModelHolder

AT_ONCE = 16
"""Sequences of all ranks together in one forward pass, at least one a rank."""


class Evaluation(NamedTuple):
    """What a validation found.

    Attributes:
        loss: Mean cross-entropy, nats a token.
        tokens: How many tokens it is the mean of.
    """

    loss: float
    tokens: int


def share_at_once(dp: int) -> int:
    """Return the sequences of one of ``dp`` ranks in one forward pass."""
    return max(1, AT_ONCE // dp)


@torch.no_grad()
def evaluate(holder: ModelHolder, held_out: SequenceSource, number: int) -> Evaluation:
    """Return the mean cross-entropy of up to ``number`` sequences, spread evenly over all.

    Every rank makes the same number of forward passes, as experts of one may be needed by
    another. A collective call; changes nothing that training depends on.
    """
    mesh, dp = holder.mesh, holder.mesh.plan.dp
    numbers = held_out.spread(number)
    at_once = dp * share_at_once(dp)
    total = torch.zeros(2, dtype=torch.float64, device=holder.device)
    for start in range(0, len(numbers), at_once):
        mine = rank_share(numbers[start : start + at_once], mesh.dp_rank, dp)
        batch = held_out.batch(mine, holder.device)
        sums = holder.model.sums(batch, holder.bias_LE)
        total += torch.stack([sums.cross_entropy.double(), total.new_tensor(batch.num_tokens)])
    if mesh.world_group is not None:
        dist.all_reduce(total, group=mesh.world_group)
    loss, tokens = total.tolist()
    return Evaluation(loss / tokens, int(tokens))
