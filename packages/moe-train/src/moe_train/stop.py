"""Ending a run between two steps, on every rank at the same one."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist
from moe_parallel import Mesh

from moe_train.launch import ONE_REQUEST

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Remembers that somebody asked for the end. The second Ctrl-C does not wait for a step."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._asked, self._raised = 0.0, False

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Take SIGINT, SIGTERM and SIGHUP as requests while the block runs.

        What the caller ignores stays ignored: SIGHUP under nohup.
        """
        asked = [s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        before = {s: signal.signal(s, self._ask) for s in asked}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self, mesh: Mesh, device: torch.device) -> bool:
        """Return on every rank whether any rank was asked.

        A collective call; with several ranks it waits for the device.
        """
        asked = self.signal is not None
        if mesh.world_group is None:
            return asked
        flag = torch.tensor(float(asked), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.world_group)
        return bool(flag)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._asked = signal.Signals(number), time.monotonic()
        elif not self._raised and time.monotonic() - self._asked > ONE_REQUEST:
            self._raised = True  # a third one would hit the handling of the second
            raise KeyboardInterrupt
