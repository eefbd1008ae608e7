"""One step of one rank: run its operations in order, pass on what others need."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moe_parallel.deferral import run_queue
from moe_parallel.gradients import GradientTarget
from moe_parallel.pipeline.failure import Failure, PeerFailedError
from moe_parallel.pipeline.stage import Activations, as_given, as_tuple, normalize
from moe_parallel.pipeline.wire import Wire
from moe_parallel.schedule import Op, Schedule


class _Kept(NamedTuple):
    """What a backward needs of its forward. The activations themselves live in the graph.

    Attributes:
        inputs: The stage's input, to read gradients from.
        edges: Where the gradients of the output go in; None where none is wanted.
        loss: The loss term of this stage.
    """

    inputs: tuple[Tensor, ...]
    edges: tuple[GradientEdge | None, ...]
    loss: Tensor | None


@dataclass(slots=True)
class Outcome:
    """What a step leaves behind on this rank.

    Attributes:
        losses: Detached loss terms by (stage, microbatch), of the stages of this rank.
        metrics: Their metrics, likewise.
        outputs: In evaluation, the last stage's output by microbatch, on the rank that has it.
    """

    losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    metrics: dict[tuple[int, int], Mapping[str, Tensor]] = field(default_factory=dict)
    outputs: dict[int, Activations] = field(default_factory=dict)


class Step:
    """Executes the operations of this rank.

    Args:
        schedule: What to do.
        rank: This rank in the pipeline.
        stages: The stages of this rank.
        micros: The microbatches, given to every stage as they are.
        wire: Carries what other ranks need.
        target: Takes the gradients; None in evaluation.
        watch: Told of each operation before it runs.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, nn.Module],
        micros: Sequence[Any],
        wire: Wire,
        target: GradientTarget | None,
        watch: Callable[[Op], None] | None,
    ):
        self._schedule, self._ops = schedule, schedule.ops[rank]
        self._stages, self._micros, self._wire, self._target = stages, micros, wire, target
        self._watch = watch
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._handed: dict[Op, list[Tensor]] = {}  # between stages of this rank
        self._put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._consumer = {
            ("F" if op.kind == "F" else "D", op.stage, op.micro): op
            for ops in schedule.ops
            for op in ops
            if op.kind != "W"
        }
        self._left = {s: sum(op.kind in "BW" and op.stage == s for op in self._ops) for s in stages}
        self._last_backward = {op.stage: op for op in self._ops if op.kind in "BI"}
        self.outcome = Outcome()

    def run(self) -> tuple[Failure, BaseException | None] | None:
        """Run everything; return where a stage raised, and the exception if it was here.

        After an exception nothing more is computed, but every message of the schedule is still
        exchanged, so that no rank waits for one that never comes.
        """
        failed: tuple[Failure, BaseException | None] | None = None
        for op in self._ops:
            if failed is None:
                try:
                    self._run_op(op)
                except PeerFailedError as error:
                    failed = error.failure, None
                except Exception as error:
                    failed = Failure(-1, op), error
            if failed is not None:
                self._pass_on(op, failed[0])
        self._wire.finish()
        return failed

    def _run_op(self, op: Op) -> None:
        if self._watch is not None:
            self._watch(op)
        if op.kind == "F":
            self._forward(op)
        elif op.kind == "W":
            run_queue(self._put_off.pop((op.stage, op.micro)))
        else:
            self._backward(op)
        if op.kind in ("B", "W"):
            self._complete(op.stage)

    def _forward(self, op: Op) -> None:
        training = self._target is not None
        inputs = tuple(self._take(op)) if op.stage > 0 else ()
        last = op.stage == self._schedule.num_stages - 1
        with torch.set_grad_enabled(training):
            result = self._stages[op.stage](
                as_given(inputs) if inputs else None, self._micros[op.micro]
            )
        result = normalize(result, last=last, training=training)
        outputs = as_tuple(result.output)
        key = op.stage, op.micro
        if result.loss is not None:
            self.outcome.losses[key] = result.loss.detach()
        self.outcome.metrics[key] = {k: v.detach() for k, v in result.metrics.items()}
        if training:
            # Of the output only its place in the graph is kept: the next stage has the values.
            edges = (
                ()
                if last
                else tuple(get_gradient_edge(y) if y.requires_grad else None for y in outputs)
            )
            loss = result.loss if result.loss is not None and result.loss.requires_grad else None
            self._kept[key] = _Kept(inputs, edges, loss)
        if not last:
            self._give(self._consumer["F", op.stage + 1, op.micro], outputs)
        elif not training and result.output is not None:
            self.outcome.outputs[op.micro] = result.output

    def _backward(self, op: Op) -> None:
        target = self._target
        assert target is not None
        kept = self._kept.pop((op.stage, op.micro))
        roots: list[Any] = [edge for edge in kept.edges if edge is not None]
        grads: list[Tensor | None] = []
        if op.stage + 1 < self._schedule.num_stages:
            grads += self._take(op)
        if kept.loss is not None:
            roots.append(kept.loss)
            grads.append(None)
        is_last = self._last_backward[op.stage] == op
        with (
            target.put_off() if op.kind == "I" else nullcontext([]) as queue,
            target.overlapped() if is_last else nullcontext(),
        ):
            if roots:
                torch.autograd.backward(roots, grads)
        if op.kind == "I":
            self._put_off[op.stage, op.micro] = queue
        if op.stage > 0:
            wanted = [x for x in kept.inputs if x.requires_grad]
            self._give(
                self._consumer["D", op.stage - 1, op.micro],
                [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted],
            )
        target.accumulate(self._stages[op.stage].parameters())

    def _complete(self, stage: int) -> None:
        """Tell the target which parameters are complete once a stage has no work left."""
        self._left[stage] -= 1
        if self._left[stage] or self._target is None:
            return
        unfinished = {
            id(parameter)
            for other, left in self._left.items()
            if left
            for parameter in self._stages[other].parameters()
        }
        own = self._stages[stage].parameters()
        self._target.ready(p for p in own if id(p) not in unfinished)

    def _take(self, op: Op) -> list[Tensor]:
        return self._handed.pop(op) if op in self._handed else self._wire.receive(op)

    def _give(self, op: Op, tensors: Iterable[Tensor]) -> None:
        if op.stage in self._stages:
            self._handed[op] = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        else:
            self._wire.send(op, list(tensors))

    def _pass_on(self, op: Op, failure: Failure) -> None:
        """Exchange the messages of an operation that is not run, as far as they are left."""
        self._wire.discard(op)
        step = {"F": 1, "B": -1, "I": -1}.get(op.kind, 0)
        following = self._consumer.get(("F" if op.kind == "F" else "D", op.stage + step, op.micro))
        if step and following is not None:
            self._wire.send_failure(following, failure)
