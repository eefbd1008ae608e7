"""What happened since the last record, counted on the device so that no step waits."""

from typing import NamedTuple

import torch

from moe_train.trainer import StepResult


class Counts(NamedTuple):
    """What is counted at every step, int64 without axes.

    Attributes:
        in_a_row: Updates skipped up to now because a gradient was not finite, without another
            step between them.
        skipped: Updates skipped since the last record, for whatever reason.
        spikes: Those of them whose loss was a spike.
        repeated: Steps since the last record that did not stand, see ``exchange.py``.
        unrouted: Tokens that a router could not route since the last record.
    """

    in_a_row: torch.Tensor
    skipped: torch.Tensor
    spikes: torch.Tensor
    repeated: torch.Tensor
    unrouted: torch.Tensor

    def after(self, result: StepResult) -> "Counts":
        """Return the counts after one more step."""
        stands = (~result.overflowed).long()
        skipped, spiked = result.skipped * stands, result.spiked * stands
        in_a_row = (self.in_a_row + 1) * (skipped - spiked)
        return Counts(
            in_a_row=torch.where(result.overflowed, self.in_a_row, in_a_row),
            skipped=self.skipped + skipped,
            spikes=self.spikes + spiked,
            repeated=self.repeated + 1 - stands,
            unrouted=self.unrouted + result.num_bad.round().long() * stands,
        )
