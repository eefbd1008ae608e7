"""What happened since the last record, counted on the device so that no step waits."""

from typing import NamedTuple

import torch

from moe_train.trainer import StepResult


class Counts(NamedTuple):
    """What is counted at every step, int64 without axes.

    Attributes:
        in_a_row: Updates skipped up to now, without one between them that was not.
        skipped: Updates skipped since the last record.
        unrouted: Tokens that a router could not route since the last record.
    """

    in_a_row: torch.Tensor
    skipped: torch.Tensor
    unrouted: torch.Tensor

    def after(self, result: StepResult) -> "Counts":
        """Return the counts after one more step."""
        skipped = result.skipped.long()
        unrouted = self.unrouted + result.num_bad.round().long()
        return Counts((self.in_a_row + 1) * skipped, self.skipped + skipped, unrouted)
