"""Where the time of a step goes."""

import time
from itertools import pairwise

import torch


class StepClock:
    """Adds up the time between marks, by name.

    On a GPU marks are events in its stream, so a part counts what the device did, and no step
    waits; reading them does.

    Args:
        device: Where steps are computed.

    Examples:
        >>> clock = StepClock(torch.device("cpu"))
        >>> clock.start(); clock.mark("forward"); clock.mark("backward"); clock.mark("forward")
        >>> sorted(clock.read()), clock.read()
        (['backward', 'forward'], {})
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._steps: list[list[tuple[str, float | torch.cuda.Event]]] = []

    def start(self) -> None:
        """Begin a step."""
        self._steps.append([("", self._now())])

    def mark(self, name: str) -> None:
        """End a part of a step; what passed since the mark before counts as ``name``."""
        self._steps[-1].append((name, self._now()))

    def read(self) -> dict[str, float]:
        """Return the seconds of each part of one step, a mean since the last reading."""
        steps, self._steps = self._steps, []
        seconds: dict[str, float] = {}
        for marks in steps:
            for (_, before), (name, after) in pairwise(marks):
                seconds[name] = seconds.get(name, 0.0) + _between(before, after)
        return {name: total / len(steps) for name, total in seconds.items()}

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
        after.synchronize()
        return before.elapsed_time(after) / 1e3
    assert not isinstance(before, torch.cuda.Event)
    assert not isinstance(after, torch.cuda.Event)
    return after - before
