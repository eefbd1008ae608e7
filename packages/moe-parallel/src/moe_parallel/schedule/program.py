"""A pipeline schedule as plain data: who does what to which microbatch, in which order."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class ScheduleError(ValueError):
    """A schedule that cannot be, or a request for one. The message names what is wrong."""


class Op(NamedTuple):
    """One piece of work of one rank.

    Attributes:
        kind: ``F`` forward; ``B`` the whole backward; ``I`` the backward without the weight
            gradients that can be put off; ``W`` those weight gradients.
        stage: Which stage of the model, counted from the input.
        micro: Which microbatch.
    """

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The work of every rank, in order. It checks itself when made.

    Nothing here says when to send or receive: that follows from the order, see ``sends``.

    Attributes:
        name: How it is called in messages.
        num_micro: Microbatches of a step.
        rank_of_stage: Which rank of the pipeline holds each stage.
        ops: The operations of each rank.
    """

    name: str
    num_micro: int
    rank_of_stage: tuple[int, ...]
    ops: tuple[tuple[Op, ...], ...]

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ops)

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.rank_of_stage)

    @property
    def splits_backward(self) -> bool:
        """Whether some weight gradients are computed apart from the rest of the backward."""
        return any(op.kind == "W" for ops in self.ops for op in ops)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, from the input to the output."""
        return [stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank]

    def sends(self, rank: int) -> list[tuple[int, Op]]:
        """Return what a rank sends, in order: the receiver and the operation that needs it.

        The output of a forward goes to the next stage's ``F``, the gradient of a stage's input to
        the previous stage's ``B`` or ``I``. Between stages of one rank nothing is sent.
        """
        backward = {
            (op.stage, op.micro): op for ops in self.ops for op in ops if op.kind in ("B", "I")
        }
        messages: list[tuple[int, Op]] = []
        for op in self.ops[rank]:
            if op.kind == "F" and op.stage + 1 < self.num_stages:
                needed = Op("F", op.stage + 1, op.micro)
            elif op.kind in ("B", "I") and op.stage > 0:
                needed = backward[op.stage - 1, op.micro]
            else:
                continue
            to = self.rank_of_stage[needed.stage]
            if to != rank:
                messages.append((to, needed))
        return messages

    def forward_only(self, num_micro: int | None = None) -> "Schedule":
        """Return the same placement and order without any backward, for evaluation.

        No forward waits for a backward, so what is left cannot deadlock if the whole cannot.

        Args:
            num_micro: How many of the microbatches to keep; None keeps all.
        """
        num_micro = self.num_micro if num_micro is None else num_micro
        return Schedule(
            name=f"{self.name}, forward only",
            num_micro=num_micro,
            rank_of_stage=self.rank_of_stage,
            ops=tuple(
                tuple(op for op in ops if op.kind == "F" and op.micro < num_micro)
                for ops in self.ops
            ),
        )

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.num_stages} stages, {self.num_micro} microbatches"]
        lines += [f"rank {r}: {' '.join(map(str, ops))}" for r, ops in enumerate(self.ops)]
        return "\n".join(lines)


def loop_placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage when stages go round the ranks ``chunks`` times.

    Examples:
        >>> loop_placement(3, 2)
        (0, 1, 2, 0, 1, 2)
    """
    return tuple(stage % num_ranks for stage in range(num_ranks * chunks))


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage when stages go to the last rank and come back.

    The first and the last stage share a rank, and so can a tied embedding.

    Examples:
        >>> v_placement(3)
        (0, 1, 2, 2, 1, 0)
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _check(schedule: Schedule) -> None:
    """Refuse a schedule in which something is missing, double, or at the wrong place."""
    name, stages, micros = schedule.name, schedule.num_stages, schedule.num_micro
    if micros < 1:
        raise ScheduleError(f"{name}: needs at least 1 microbatch, got {micros}")
    if set(schedule.rank_of_stage) != set(range(schedule.num_ranks)):
        raise ScheduleError(
            f"{name}: every one of the {schedule.num_ranks} ranks needs a stage, "
            f"got rank_of_stage={schedule.rank_of_stage}"
        )
    for rank, ops in enumerate(schedule.ops):
        for op in ops:
            if not (0 <= op.stage < stages and 0 <= op.micro < micros):
                raise ScheduleError(
                    f"{name}: {op} on rank {rank} is outside of {stages} stages, "
                    f"{micros} microbatches"
                )
            if schedule.rank_of_stage[op.stage] != rank:
                raise ScheduleError(
                    f"{name}: {op} is on rank {rank}, but stage {op.stage} is on rank "
                    f"{schedule.rank_of_stage[op.stage]}"
                )
    counts = Counter(op for ops in schedule.ops for op in ops)
    trains = any(op.kind != "F" for op in counts)
    for stage in range(stages):
        for micro in range(micros):
            found = "".join(k * counts[Op(k, stage, micro)] for k in ("F", "B", "I", "W"))
            if found not in (("FB", "FIW") if trains else ("F",)):
                raise ScheduleError(
                    f"{name}: stage {stage}, microbatch {micro} has operations {found or 'none'}; "
                    f"it needs {'F and either B, or I and W' if trains else 'F'}"
                )
