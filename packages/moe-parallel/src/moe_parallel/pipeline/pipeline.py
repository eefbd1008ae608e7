"""The pipeline engine: what the user makes once and calls each step."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_parallel.agreement import MismatchError, raise_together
from moe_parallel.gradients import GradientTarget
from moe_parallel.mesh import Mesh
from moe_parallel.pipeline.failure import Failure, StageError
from moe_parallel.pipeline.links import Links
from moe_parallel.pipeline.step import Outcome, Step
from moe_parallel.pipeline.wire import Wire
from moe_parallel.schedule import Op, Schedule, ScheduleError, make_schedule


class Pipeline:
    """Runs microbatches through stages that live on the ranks of a pipeline.

    A stage is a module that is called as ``stage(x, micro)``: ``x`` is what the stage before
    returned (None for the first; a tuple if that returned several tensors), ``micro`` the
    microbatch, the same object for every stage of this rank. It returns activations for the next
    stage, one tensor or a tuple, of shapes that may differ from one microbatch to the next; or a
    ``StageResult``, which also has loss terms and metrics. The last stage returns the loss. Losses
    of all stages and microbatches are summed and nothing is averaged: divide by the global count.

    Gradients are equal, to the bit, to those of one process that runs the microbatches one after
    another (in floating point, a parameter used by two stages may differ in the last bit, as the
    uses are added in another order).

    Weight gradients are put off by operators that ask the parameter for its ``dw_sink``
    (``split_linears`` makes those of a torch model do so). Others compute theirs in ``I``; the
    result is the same and the zero-bubble schedule has less to fill gaps with.

    If a stage raises, every rank of the mesh raises ``StageError``, which says where. (Peers of
    the failing rank that wait for it inside a stage, in a collective of their own, get there when
    that collective gives up.)

    Args:
        stages: The stages of this rank, by number.
        mesh: This rank's place; its ``pp_rank`` is the rank in the schedule.
        target: Takes the gradients: ``ShardedAdamW`` or ``Gradients``.
        schedule: ``1f1b``, ``interleaved``, ``zbv``, or a function from the number of
            microbatches to a ``Schedule``.
        chunks: Stages a rank, for ``interleaved``.
        watch: Called with each operation before it runs, e.g. to tell a heartbeat.

    Raises:
        ScheduleError: On every rank, if ``stages`` of one are not those that the schedule puts
            there, or if a parameter of them needs gradients that ``target`` does not take.

    Examples:
        >>> import torch
        >>> from moe_parallel import Gradients, Mesh, Pipeline, plan_mesh
        >>> class First(torch.nn.Linear):
        ...     def forward(self, x, micro):
        ...         return super().forward(micro)
        >>> class Last(torch.nn.Linear):
        ...     def forward(self, x, micro):
        ...         return super().forward(x).square().sum()
        >>> stages = {0: First(2, 3, bias=False), 1: Last(3, 1, bias=False)}
        >>> weights = {f"{i}.weight": stage.weight for i, stage in stages.items()}
        >>> target = Gradients(weights)
        >>> pipeline = Pipeline(stages, Mesh.create(plan_mesh(1)), target, schedule="zbv")
        >>> outcome = pipeline.step(torch.ones(4, 5, 2))  # four microbatches of five rows
        >>> sorted(outcome.losses)
        [(1, 0), (1, 1), (1, 2), (1, 3)]
        >>> target.main_grads["0.weight"].shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mesh: Mesh,
        target: GradientTarget,
        *,
        schedule: str | Callable[[int], Schedule] = "1f1b",
        chunks: int = 2,
        watch: Callable[[Op], None] | None = None,
    ):
        self._stages, self._mesh, self._target, self._watch = dict(stages), mesh, target, watch
        self._schedule, self._chunks = schedule, chunks
        self._made: dict[int, Schedule] = {}
        probe = self._schedule_for(mesh.plan.pp)
        raise_together(_refusal(probe, mesh, stages, target), mesh.world_group, ScheduleError)
        tensors = [p for stage in stages.values() for p in stage.parameters()]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._links = Links.create(mesh, probe)
        target.attach_sinks()
        uses = Counter(id(p) for stage in stages.values() for p in set(stage.parameters()))
        target.hold(p for p in tensors if uses[id(p)] > 1)

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return self._schedule_for(self._mesh.plan.pp).num_stages

    def step(self, micros: Sequence[Any]) -> Outcome:
        """Run forward and backward of all microbatches. Leaves the gradients in the target.

        A collective call of the mesh, with equally many microbatches on each rank of a pipeline.

        Args:
            micros: What stages are called with. A rank may fill in only what its stages read.

        Raises:
            StageError: On every rank, if a stage raised on any. The gradients of this step are
                dropped then, and another step can follow.
            MismatchError: If ranks of the pipeline were given different numbers of microbatches.
        """
        self._check_same_number(len(micros))
        return self._run(self._schedule_for(len(micros)), micros, self._target)

    def evaluate(self, micros: Sequence[Any]) -> Outcome:
        """Run the forward alone, without gradients. The last stage may return anything.

        Args:
            micros: As in ``step``.

        Raises:
            StageError: On every rank, if a stage raised on any.
            MismatchError: If ranks of the pipeline were given different numbers of microbatches.
        """
        self._check_same_number(len(micros))
        # Some schedules want a multiple of the ranks. A forward can leave the rest out.
        enough = -(-len(micros) // self._mesh.plan.pp) * self._mesh.plan.pp
        schedule = self._schedule_for(enough).forward_only(len(micros))
        return self._run(schedule, micros, None)

    def _schedule_for(self, num_micro: int) -> Schedule:
        if num_micro not in self._made:
            pp = self._mesh.plan.pp
            made = (
                make_schedule(self._schedule, pp, num_micro, chunks=self._chunks)
                if isinstance(self._schedule, str)
                else self._schedule(num_micro)
            )
            if made.num_ranks != pp:
                raise ScheduleError(
                    f"{made.name} is for {made.num_ranks} ranks, the mesh has pp={pp}"
                )
            self._made[num_micro] = made
        return self._made[num_micro]

    def _run(
        self, schedule: Schedule, micros: Sequence[Any], target: GradientTarget | None
    ) -> Outcome:
        rank = self._mesh.pp_rank
        wire = Wire(schedule, self._links, rank, self._device)
        step = Step(schedule, rank, self._stages, micros, wire, target, self._watch)
        failed = step.run()
        try:
            self._settle(failed)
        except StageError as error:
            if target is not None:
                _abandon(target, error)
            raise
        return step.outcome

    def _settle(self, failed: tuple[Failure, BaseException | None] | None) -> None:
        """Raise on every rank if any failed, and say which did. A collective call."""
        group, cause = self._links.status, None
        mine: tuple[Failure, str] | None = None
        if failed is not None and failed[1] is not None:
            cause = failed[1]
            mine = failed[0]._replace(rank=self._mesh.rank), f"{type(cause).__name__}: {cause}"
        told: list[tuple[Failure, str] | None] = [mine]
        if group is not None:
            bad = torch.tensor(int(failed is not None))
            dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
            if not bad:
                return
            told = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, mine, group=group)
        first = next((message for message in told if message is not None), None)
        if mine is not None:
            raise StageError(*mine) from cause
        if first is not None:
            raise StageError(*first)

    def _check_same_number(self, num_micro: int) -> None:
        group = self._links.control
        if num_micro < 1:
            raise ScheduleError(f"a step needs at least 1 microbatch, got {num_micro}")
        if group is None:
            return
        numbers = torch.empty(dist.get_world_size(group), dtype=torch.int64)
        dist.all_gather_into_tensor(numbers, torch.tensor([num_micro]), group=group)
        if (numbers != num_micro).any():
            raise MismatchError(
                f"the ranks of a pipeline were given different numbers of microbatches: "
                f"{numbers.tolist()}"
            )


def _refusal(
    schedule: Schedule, mesh: Mesh, stages: Mapping[int, nn.Module], target: GradientTarget
) -> ScheduleError | None:
    """Return what is wrong with the stages of this rank, if anything."""
    planned = schedule.stages_of(mesh.pp_rank)
    if sorted(stages) != planned:
        return ScheduleError(
            f"{schedule.name} puts stages {planned} on rank "
            f"{mesh.pp_rank} of the pipeline, got stages {sorted(stages)}"
        )
    left_out = [
        f"{name} of stage {number}"
        for number, stage in stages.items()
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad and not target.takes(parameter)
    ]
    if left_out:
        return ScheduleError(
            f"{', '.join(left_out)}: not among the parameters that the target was made for (or "
            "frozen then); its gradients would pile up. Name it there, or freeze it"
        )
    return None


def _abandon(target: GradientTarget, error: StageError) -> None:
    try:
        target.abandon()
    except Exception as another:
        # A broken device, say. What broke it is the news.
        error.add_note(f"the gradients could not be dropped: {type(another).__name__}: {another}")
