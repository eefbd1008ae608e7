"""Run a schedule on paper: does it end, how long does it take, what does it keep in memory?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moe_parallel.schedule.program import Op, Schedule, ScheduleError

Cost = Mapping[str, float] | Callable[[Op], float]

# What is known of a mixture of experts without measuring: each third of the work weighs the same.
EQUAL_COST: Mapping[str, float] = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule does, in the unit of the costs.

    Attributes:
        makespan: From the first operation's start to the last one's end.
        busy: How long each rank works.
        bubble: Share of all ranks' time in which they wait, between 0 and 1.
        peak_live: For each rank, the most (stage, microbatch) pairs whose activations it keeps
            at once: from the forward to the end of ``B`` or ``W``.
        start: When each operation starts.
    """

    makespan: float
    busy: tuple[float, ...]
    bubble: float
    peak_live: tuple[int, ...]
    start: Mapping[Op, float]


def simulate(schedule: Schedule, cost: Cost = EQUAL_COST, *, latency: float = 0.0) -> Simulation:
    """Execute a schedule with given costs; every rank runs its operations in their order.

    Args:
        schedule: The schedule.
        cost: Duration of each kind of operation, or a function of the operation (uneven stages).
        latency: From the end of an operation to the arrival of its result on another rank.

    Raises:
        ScheduleError: If ranks wait for each other forever. The message says who waits for what.

    Examples:
        >>> from moe_parallel.schedule import one_f_one_b
        >>> result = simulate(one_f_one_b(4, 8))
        >>> result.makespan, round(result.bubble, 3), result.peak_live
        (33.0, 0.273, (4, 3, 2, 1))
    """
    duration = cost if callable(cost) else lambda op: cost[op.kind]
    ends: dict[tuple[str, int, int], float] = {}
    start: dict[Op, float] = {}
    clock = [0.0] * schedule.num_ranks
    position = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            while position[rank] < len(ops):
                op = ops[position[rank]]
                ready = _ready_time(schedule, op, rank, ends, latency)
                if ready is None:
                    break
                start[op] = max(clock[rank], ready)
                clock[rank] = ends[_result(op)] = start[op] + duration(op)
                position[rank] += 1
                moved = True
    stuck = [r for r, ops in enumerate(schedule.ops) if position[r] < len(ops)]
    if stuck:
        waits = ", ".join(f"rank {r} at {schedule.ops[r][position[r]]}" for r in stuck)
        raise ScheduleError(f"{schedule.name}: deadlock, ranks wait for each other: {waits}")
    busy = tuple(sum(duration(op) for op in ops) for ops in schedule.ops)
    makespan = max(clock)
    return Simulation(
        makespan=makespan,
        busy=busy,
        bubble=1 - sum(busy) / (makespan * schedule.num_ranks),
        peak_live=tuple(_peak_live(ops) for ops in schedule.ops),
        start=start,
    )


def _result(op: Op) -> tuple[str, int, int]:
    # I and B give the same thing to the stage before: the gradient of what it passed on.
    return ("D" if op.kind in ("I", "B") else op.kind, op.stage, op.micro)


def _ready_time(
    schedule: Schedule,
    op: Op,
    rank: int,
    ends: Mapping[tuple[str, int, int], float],
    latency: float,
) -> float | None:
    """Return when everything that an operation needs has arrived; None if something never ran."""
    needs: list[tuple[str, int, int]] = []
    if op.kind == "F" and op.stage > 0:
        needs = [("F", op.stage - 1, op.micro)]
    elif op.kind in ("I", "B"):
        needs = [("F", op.stage, op.micro)]
        if op.stage + 1 < schedule.num_stages:
            needs.append(("D", op.stage + 1, op.micro))
    elif op.kind == "W":
        needs = [("D", op.stage, op.micro)]
    ready = 0.0
    for need in needs:
        if need not in ends:
            return None
        travels = schedule.rank_of_stage[need[1]] != rank
        ready = max(ready, ends[need] + latency * travels)
    return ready


def _peak_live(ops: tuple[Op, ...]) -> int:
    live = peak = 0
    for op in ops:
        live += (op.kind == "F") - (op.kind in ("B", "W"))
        peak = max(peak, live)
    return peak
