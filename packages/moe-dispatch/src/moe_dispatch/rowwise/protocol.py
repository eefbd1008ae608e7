"""Who waits for whom: the steps of each exchange, as data.

A rank runs the steps in order, each as a kernel launch. The simulator in ``moe_dispatch.testing``
runs the very same steps on 64 virtual ranks.

A *clock* counts the exchanges of one sort on this rank, from 1; its value is the epoch. All ranks
make the same exchanges in the same order, so that epochs agree. The buffers of an epoch are those
of its parity. A *signal* of some kind writes the epoch into the memory of every rank; epochs only
grow, so nothing is ever cleared, and a wait is over when every rank's signal is at least what is
waited for. A signal is a release and a wait an acquire: what a rank stored before its signal is
there for whoever waited for it.

*Credit*: a buffer is written again two epochs later, so its writers first wait until its reader
has signalled that it is done with the epoch before the last.
"""

from enum import IntEnum
from typing import NamedTuple


class Clock(IntEnum):
    """What is counted: rows sent to experts, and results brought home."""

    PUTS = 0
    RETURNS = 1


class Kind(IntEnum):
    """What a signal says. One word for each kind and source in the memory of every rank."""

    COUNTS = 0
    ROWS = 1
    ROWS_FREE = 2
    RESULTS = 3
    RESULTS_FREE = 4


class Op(IntEnum):
    """What a step does."""

    ADVANCE = 0
    WAIT = 1
    SIGNAL = 2
    TELL_COUNTS = 3
    PLAN = 4
    PUT_ROWS = 5
    TAKE_ROWS = 6
    GIVE_RESULTS = 7
    PULL_RESULTS = 8
    PUSH_RESULTS = 9
    SUM_RESULTS = 10


class Step(NamedTuple):
    """One launch.

    Attributes:
        op: What it does.
        kind: Of the signal or wait.
        lag: How many epochs before the present one a wait or signal means.
    """

    op: Op
    kind: Kind | None = None
    lag: int = 0


MEET = (
    Step(Op.ADVANCE),
    Step(Op.WAIT, Kind.ROWS_FREE, lag=2),
    Step(Op.TELL_COUNTS),
    Step(Op.SIGNAL, Kind.COUNTS),
    Step(Op.WAIT, Kind.COUNTS),
    Step(Op.PLAN),
)
"""Tell everyone how many rows come, and learn where they go: the same offsets on every rank."""

MEET_AGAIN = (
    Step(Op.ADVANCE),
    Step(Op.WAIT, Kind.ROWS_FREE, lag=2),
)
"""The same with places that are known, in backward."""

PUT = (
    Step(Op.PUT_ROWS),
    Step(Op.SIGNAL, Kind.ROWS),
    Step(Op.WAIT, Kind.ROWS),
)
"""Store each row where it belongs, and wait for those of the others."""

TAKE = (Step(Op.TAKE_ROWS),)
"""Copy the rows out of the receive buffer."""

FREE_ROWS = (Step(Op.SIGNAL, Kind.ROWS_FREE),)
"""Let the others have the receive buffer again."""

PULL = (
    Step(Op.ADVANCE),
    Step(Op.WAIT, Kind.RESULTS_FREE, lag=2),
    Step(Op.GIVE_RESULTS),
    Step(Op.SIGNAL, Kind.RESULTS),
    Step(Op.WAIT, Kind.RESULTS),
    Step(Op.PULL_RESULTS),
    Step(Op.SIGNAL, Kind.RESULTS_FREE),
)
"""Lay results out; their owners fetch and sum them."""

PUSH = (
    Step(Op.ADVANCE),
    Step(Op.WAIT, Kind.RESULTS_FREE, lag=2),
    Step(Op.PUSH_RESULTS),
    Step(Op.SIGNAL, Kind.RESULTS),
    Step(Op.WAIT, Kind.RESULTS),
    Step(Op.SUM_RESULTS),
    Step(Op.SIGNAL, Kind.RESULTS_FREE),
)
"""Store results into the memory of their owners, who sum them."""


def parity(epoch: int) -> int:
    """Return which of two buffers an epoch uses."""
    return epoch & 1
