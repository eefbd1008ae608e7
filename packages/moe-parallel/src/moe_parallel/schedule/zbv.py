"""Zero bubble in a V: two stages a rank, weight gradients in what would be idle time."""

from moe_parallel.schedule.program import Kind, Op, Schedule, v_placement


def zbv(num_ranks: int, num_micro: int) -> Schedule:
    """Schedule two stages a rank, placed down and up again, with weight gradients put off.

    Rank r holds stage r (*down*) and stage ``2 P - 1 - r`` (*up*). It fills the pipe with forwards
    on the way down, mixes in those on the way up, works in a steady rhythm in which every
    operation's input is there just in time, and drains with input gradients only, since those
    are what other ranks wait for; the weight gradients that were put off fill the end. If
    forward, input and weight gradient take equally long, a step idles for ``(P - 1) / 6`` of a
    microbatch's whole work on a rank, and every rank keeps at most ``2 P`` stage activations, as
    much as the first rank of 1F1B.

    Method: Qi, Wan, Huang and Lin, *Zero Bubble Pipeline Parallelism* (2023), section 6.
    """
    # With fewer microbatches than the rhythm needs, plan for enough and leave the rest out.
    planned = max(num_micro, 2 * num_ranks - 1)
    programs = []
    for rank in range(num_ranks):
        plan = _Plan(rank, 2 * num_ranks - 1 - rank)
        _fill(plan, rank, num_ranks)
        while plan.done["F", plan.up] < planned:
            if plan.done["F", plan.down] < planned:
                plan.add("F", plan.down)
            plan.add("I", plan.down)
            plan.add("W", plan.down)
            plan.add("F", plan.up)
            plan.add("I", plan.up)
            plan.add("W", plan.up)
        _drain(plan, rank, num_ranks)
        programs.append(tuple(op for op in plan.ops if op.micro < num_micro))
    return Schedule(
        name="ZBV",
        num_micro=num_micro,
        rank_of_stage=v_placement(num_ranks),
        ops=tuple(programs),
    )


class _Plan:
    """The operations of one rank so far; the next of a kind takes the next microbatch."""

    def __init__(self, down: int, up: int):
        self.down, self.up = down, up
        self.ops: list[Op] = []
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        self.done = {(kind, stage): 0 for kind in kinds for stage in (down, up)}

    def add(self, kind: Kind, stage: int) -> None:
        self.ops.append(Op(kind, stage, self.done[kind, stage]))
        self.done[kind, stage] += 1


def _fill(plan: _Plan, rank: int, num_ranks: int) -> None:
    """Run forwards until the first gradient can come back through the V."""
    for _ in range(2 * (num_ranks - rank) - 1):
        plan.add("F", plan.down)
    for _ in range(rank):
        plan.add("F", plan.up)
        plan.add("F", plan.down)
    for _ in range(num_ranks - rank):
        plan.add("F", plan.up)
        plan.add("I", plan.up)
        plan.add("W", plan.up)


def _drain(plan: _Plan, rank: int, num_ranks: int) -> None:
    """Give others what they wait for first, then run the weight gradients that are left."""
    for _ in range(rank):
        plan.add("I", plan.down)
        plan.add("I", plan.up)
    for _ in range(num_ranks - rank):
        plan.add("I", plan.down)
        plan.add("W", plan.down)
    for stage in (plan.up, plan.down):
        while plan.done["W", stage] < plan.done["I", stage]:
            plan.add("W", stage)
