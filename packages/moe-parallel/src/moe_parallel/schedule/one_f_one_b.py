"""One forward, one backward: a stage a rank."""

from moe_parallel.schedule.program import Op, Schedule, loop_placement


def one_f_one_b(num_ranks: int, num_micro: int) -> Schedule:
    """Schedule a pipeline in which each rank alternates forwards and backwards.

    Rank r runs ``num_ranks - 1 - r`` forwards ahead, so that the first backward reaches it when
    it has nothing else to do. Idle time is ``(P - 1) / (M + P - 1)`` of the step; rank r keeps
    ``min(M, P - r)`` microbatches. Method: PipeDream-Flush (Narayanan et al., 2021).

    Examples:
        >>> print(one_f_one_b(2, 3))
        1F1B: 2 stages, 3 microbatches
        rank 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
        rank 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """
    programs = []
    for rank in range(num_ranks):
        ahead = min(num_ranks - 1 - rank, num_micro)
        ops = [Op("F", rank, micro) for micro in range(ahead)]
        for micro in range(num_micro):
            if ahead + micro < num_micro:
                ops.append(Op("F", rank, ahead + micro))
            ops.append(Op("B", rank, micro))
        programs.append(tuple(ops))
    return Schedule(
        name="1F1B",
        num_micro=num_micro,
        rank_of_stage=loop_placement(num_ranks, 1),
        ops=tuple(programs),
    )
