"""Ending a run between two steps, on every rank at the same one."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from moe_train.launch import ONE_REQUEST

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """Remembers that somebody asked for the end. The second Ctrl-C does not wait for a step."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._asked, self._raised = 0.0, False

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Take SIGINT, SIGTERM, SIGHUP and SIGUSR1 as requests while the block runs.

        What the caller ignores stays ignored: SIGHUP under nohup. SIGUSR1 is what schedulers send
        some time before they end a job.
        """
        asked = [s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        before = {s: signal.signal(s, self._ask) for s in asked}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._asked = signal.Signals(number), time.monotonic()
        elif not self._raised and time.monotonic() - self._asked > ONE_REQUEST:
            self._raised = True  # a third one would hit the handling of the second
            raise KeyboardInterrupt
