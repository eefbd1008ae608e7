"""An average of the weights that follows them slowly, divided among the ranks as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from moe_parallel import Shard, ShardedAdamW
from torch import Tensor


class Averages:
    """An exponential moving average of this rank's master weights, in their precision.

    After every update that is not skipped, ``average = decay * average + (1 - decay) * weight``.
    It begins as a copy of the weights. Memory: 4 bytes for each element of this rank's masters.

    Args:
        optimizer: Whose master weights are averaged.
        decay: Above 0 and below 1.

    Attributes:
        shards: The averages, of the kind ``ema``, each beside a ``master`` of its name.
    """

    def __init__(self, optimizer: ShardedAdamW, decay: float):
        self._optimizer, self._decay = optimizer, decay
        masters = [shard for shard in optimizer.shards() if shard.kind == "master"]
        self._masters = [shard.data for shard in masters]  # views, which stay where they are
        self.shards: list[Shard] = [replace(s, kind="ema", data=s.data.clone()) for s in masters]

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again from the weights as they are."""
        self._optimizer.synchronize()
        for shard, master in zip(self.shards, self._masters, strict=True):
            shard.data.copy_(master)

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Follow the weights by one step, unless the step was skipped.

        Args:
            skipped: bool on the device, read there alone.
        """
        weight = torch.where(skipped, 0.0, 1 - self._decay)
        for shard, master in zip(self.shards, self._masters, strict=True):
            shard.data.lerp_(master, weight.to(master.dtype))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the parameters have the averages' values while the block runs. Collective.

        The weights come back bit for bit. Nothing may be saved, loaded or updated meanwhile.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self._optimizer.synchronize()
        for shard, master in zip(self.shards, self._masters, strict=True):
            kept = master.clone()
            master.copy_(shard.data)
            shard.data.copy_(kept)
        self._optimizer.share()
