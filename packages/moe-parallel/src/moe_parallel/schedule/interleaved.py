"""One forward, one backward, with several stages a rank."""

from moe_parallel.schedule.program import Op, Schedule, ScheduleError, loop_placement


def interleaved(num_ranks: int, num_micro: int, chunks: int = 2) -> Schedule:
    """Schedule a pipeline whose stages go round the ranks ``chunks`` times.

    Microbatches move in groups of ``num_ranks``: a group passes through a rank's first stage,
    then through its second, and so on; backwards go the other way. A rank's steps are shorter by
    ``chunks``, and so is the idle time: ``(P - 1) / chunks`` of a microbatch's whole work on a
    rank. Method: Narayanan et al., 2021 (Megatron-LM).

    Raises:
        ScheduleError: If ``num_micro`` is not a multiple of ``num_ranks``.
    """
    if num_micro % num_ranks:
        below = num_micro // num_ranks * num_ranks
        near = [n for n in (below, below + num_ranks) if n > 0]
        raise ScheduleError(
            f"interleaved: num_micro={num_micro} is not a multiple of num_ranks={num_ranks}; "
            f"usable near it: {near}"
        )
    total = num_micro * chunks

    def nth(kind: str, rank: int, n: int) -> Op:
        group, within = divmod(n, num_ranks * chunks)
        chunk, member = divmod(within, num_ranks)
        micro = group * num_ranks + member
        if kind == "F":
            return Op("F", chunk * num_ranks + rank, micro)
        return Op("B", (chunks - 1 - chunk) * num_ranks + rank, micro)

    programs = []
    for rank in range(num_ranks):
        # One chunk needs no group to pass before the first backward.
        spacing = 2 if chunks > 1 else 1
        ahead = min(total, spacing * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks)
        ops = [nth("F", rank, n) for n in range(ahead)]
        for n in range(total):
            if ahead + n < total:
                ops.append(nth("F", rank, ahead + n))
            ops.append(nth("B", rank, n))
        programs.append(tuple(ops))
    return Schedule(
        name=f"interleaved x{chunks}",
        num_micro=num_micro,
        rank_of_stage=loop_placement(num_ranks, chunks),
        ops=tuple(programs),
    )
