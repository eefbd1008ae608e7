"""Work of a backward pass that can be done at once, or put off and done later in the same order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Parameter

# What an operator's backward hands over instead of a weight gradient: called as
# ``run(out, accumulate)``, it writes the gradient into ``out``, or adds it to what is there.
WeightGradient = Callable[[Tensor, bool], None]


class Deferral:
    """Runs what is submitted at once, or collects it while it is being put off.

    Not tied to a thread, as autograd runs the backward of a GPU in a thread of its own.
    """

    def __init__(self) -> None:
        self._queue: list[Callable[[], None]] | None = None

    def submit(self, call: Callable[[], None]) -> None:
        """Run ``call`` now, or append it to the queue that is open."""
        if self._queue is None:
            call()
        else:
            self._queue.append(call)

    @contextmanager
    def put_off(self) -> Iterator[list[Callable[[], None]]]:
        """Collect what is submitted in the list that this yields."""
        if self._queue is not None:
            raise RuntimeError("work is being put off already")
        self._queue = queue = []
        try:
            yield queue
        finally:
            self._queue = None


def run_queue(queue: list[Callable[[], None]]) -> None:
    """Run everything in a queue in order, letting go of what each call holds as it is done."""
    queue.reverse()
    while queue:
        queue.pop()()


Sink = Callable[[WeightGradient], None]
_SINK = "dw_sink"  # the attribute of a parameter; operators of other packages know it by name


def attach_sink(parameter: Parameter, sink: Sink) -> None:
    """Make operators hand the weight gradients of ``parameter`` to ``sink``."""
    setattr(parameter, _SINK, sink)


def detach_sink(parameter: Parameter) -> None:
    """Undo ``attach_sink``, if it was done: a sink leads to the target that attached it."""
    if hasattr(parameter, _SINK):
        delattr(parameter, _SINK)


def sink_of(parameter: Tensor) -> Sink | None:
    """Return what an operator should hand the weight gradient of ``parameter`` to, if anything.

    An operator with a sink gives it ``run(out, accumulate)`` once in each backward and returns no
    gradient for the weight. Without one it returns the gradient as usual.
    """
    return getattr(parameter, _SINK, None)
