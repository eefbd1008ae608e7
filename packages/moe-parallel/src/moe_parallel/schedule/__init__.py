"""Pipeline schedules as data, and a simulator for them."""

from moe_parallel.schedule.interleaved import interleaved
from moe_parallel.schedule.one_f_one_b import one_f_one_b
from moe_parallel.schedule.program import (
    Op,
    Schedule,
    ScheduleError,
    loop_placement,
    v_placement,
)
from moe_parallel.schedule.simulate import EQUAL_COST, Simulation, simulate
from moe_parallel.schedule.zbv import zbv

__all__ = [
    "EQUAL_COST",
    "Op",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "interleaved",
    "loop_placement",
    "make_schedule",
    "one_f_one_b",
    "simulate",
    "v_placement",
    "zbv",
]

NAMES = ("1f1b", "interleaved", "zbv")


def make_schedule(name: str, num_ranks: int, num_micro: int, *, chunks: int = 2) -> Schedule:
    """Make a schedule by name: ``1f1b``, ``interleaved`` or ``zbv``.

    Args:
        name: Which one.
        num_ranks: Ranks of the pipeline.
        num_micro: Microbatches of a step.
        chunks: Stages a rank, for ``interleaved``; the others have 1 and 2.

    Raises:
        ScheduleError: If the name is unknown or the numbers do not fit the schedule.

    Examples:
        >>> schedule = make_schedule("zbv", num_ranks=8, num_micro=32)
        >>> round(simulate(schedule).bubble, 3), max(simulate(schedule).peak_live)
        (0.035, 16)
    """
    if name == "1f1b":
        return one_f_one_b(num_ranks, num_micro)
    if name == "interleaved":
        return interleaved(num_ranks, num_micro, chunks)
    if name == "zbv":
        return zbv(num_ranks, num_micro)
    raise ScheduleError(f"no schedule is called {name!r}; there are {', '.join(NAMES)}")
