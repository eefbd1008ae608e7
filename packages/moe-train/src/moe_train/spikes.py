"""Steps whose loss stands far above those before it, to be skipped before they do harm."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Spikes:
    """Compares each loss with the mean and the standard deviation of the last ones.

    A loss is a spike if it is more than ``threshold`` deviations above the mean of the last
    ``window`` finite losses, once there are that many. Spikes enter the window too: a level that
    has risen for good is accepted soon. Losses are alike on all ranks, so the answers are;
    everything stays on the device.

    Args:
        threshold: Deviations above the mean.
        window: Losses that are looked back on.
        device: Where losses are.

    Examples:
        >>> spikes = Spikes(3.0, window=4, device=torch.device("cpu"))
        >>> losses = torch.tensor([2.0, 2.2, 2.0, 2.2, 2.3, 2.9], dtype=torch.float64)
        >>> [bool(spikes.judge(loss)) for loss in losses]
        [False, False, False, False, False, True]
    """

    def __init__(self, threshold: float, window: int, device: torch.device):
        self._threshold = threshold
        self._losses_W = torch.full((window,), math.nan, dtype=torch.float64, device=device)

    def judge(self, loss: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return whether a loss is a spike, and remember it.

        Args:
            loss: 0-dim, float64.
            counts: Whether the loss is one of the run, bool on the device; None: it is.
        """
        before_W = self._losses_W
        deviation, mean = torch.std_mean(before_W, correction=0)  # NaN while the window fills
        spiked = loss > mean + self._threshold * deviation
        remembered = loss.isfinite() if counts is None else loss.isfinite() & counts
        after_W = torch.cat([before_W[1:], loss.view(1)])
        self._losses_W = torch.where(remembered, after_W, before_W)
        return spiked & loss.isfinite()

    def losses(self) -> list[float]:
        """Return what is remembered, the last loss at the end. Waits for the device."""
        return [loss for loss in self._losses_W.tolist() if not math.isnan(loss)]

    def load(self, losses: Sequence[float]) -> None:
        """Remember these losses, or the last of them."""
        window = len(self._losses_W)
        kept = list(losses)[-window:]
        filled = [math.nan] * (window - len(kept)) + kept
        self._losses_W.copy_(torch.tensor(filled, dtype=torch.float64))
