"""AdamW whose state is divided among the replicas of each parameter (ZeRO-1 and ZeRO-2)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from moe_parallel.adamw import AdamWConfig
from moe_parallel.adamw.config import check_lr
from moe_parallel.adamw.update import step_scalars, update_adamw
from moe_parallel.bucket import Bucket
from moe_parallel.deferral import Deferral, WeightGradient, attach_sink, detach_sink
from moe_parallel.gradients import refuse_stranger
from moe_parallel.layout import BucketLayout, ParamSpec, plan_buckets
from moe_parallel.mesh import Mesh, stages_groups
from moe_parallel.muon import MuonConfig, update_muon
from moe_parallel.optimizer_checks import check_together, device_of, digest_of
from moe_parallel.overlap import Blocks, Launcher
from moe_parallel.reduction import Wire
from moe_parallel.self_check import check_same
from moe_parallel.shard import Shard
from moe_parallel.step_stats import StepStats, measure


class ShardedAdamW:
    """AdamW over a mesh, equal to ``torch.optim.AdamW`` on the summed gradients of all ranks.

    Gradients are summed, over DP for dense parameters and over EDP for experts, and never
    averaged: the loss of every rank is to be divided by a count that is global already.

    Parameters keep their identity but move into flat buffers, and at the start every rank takes
    the values of each slice's owner, so replicas cannot start out different. Values that are
    later written into parameters from outside last only where they are the master weights.

    A parameter without a gradient counts as one with gradient zero: moments decay, and so does
    its weight. (``torch.optim.AdamW`` leaves it alone; but whether *some* rank has a gradient is
    not known without asking.) One with ``requires_grad=False`` at the start is never changed
    and has a master shard only.

    Args:
        specs: The parameters of this rank, in the order of the forward, the same on every rank
            of a stage. In a mesh of several ranks a stage may have none. Sinks that an earlier
            optimizer attached are taken off.
        mesh: Where this rank stands.
        config: Hyperparameters, the same on every rank.
        num_experts: Experts of a layer over the whole model.
        bucket_elements: How many elements a buffer may hold, if more than one parameter.
        muon: Hyperparameters for parameters with ``rule="muon"``.
        wire: What of float32 gradients goes over the network: ``float32``, or ``bfloat16``, which
            halves the bytes; sums are made in float32 either way.
        zero: 1 divides the optimizer state. 2 divides the gradients too: a bucket's exist as a
            whole only from the first of them to their reduction. That saves memory if a step has
            one backward, in ``overlapped()``.

    Raises:
        ValueError: If a parameter does not fit, see the message; on every rank if on one.
        MismatchError: If ranks disagree on the configuration or the parameters.

    Examples:
        >>> import torch
        >>> from moe_parallel import Mesh, ParamSpec, plan_mesh
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> spec = ParamSpec("weight", weight, is_expert=False, weight_decay=True)
        >>> config = AdamWConfig(lr=0.5, weight_decay=0.0)
        >>> optimizer = ShardedAdamW([spec], Mesh.create(plan_mesh(1)), config, num_experts=1)
        >>> weight.mul(torch.tensor([1.0, 2.0, 2.0])).sum().backward()
        >>> optimizer.accumulate()
        >>> stats = optimizer.step()
        >>> stats.grad_norm.item(), stats.skipped.item(), weight.tolist()
        (3.0, False, [0.5, 0.5, 0.5])
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        mesh: Mesh,
        config: AdamWConfig,
        num_experts: int,
        *,
        bucket_elements: int = 1 << 25,
        muon: MuonConfig | None = None,
        wire: Wire = "float32",
        zero: Literal[1, 2] = 1,
    ):
        check_together(specs, mesh, num_experts, bucket_elements, wire, zero)
        for spec in specs:
            detach_sink(spec.parameter)
        self.mesh, self.config, self.muon = mesh, config, muon or MuonConfig()
        self._wire: Wire = wire
        self._zero = zero
        specs = [replace(s, weight_decay=_decay(s, config)) for s in specs]
        planned = list(plan_buckets(specs, mesh, num_experts, bucket_elements))
        settings = repr((config, self.muon, wire, zero))
        check_same(settings, "the optimizer's configuration", mesh)
        check_same(
            digest_of([layout for layout, _ in planned]),
            "the list of parameters",
            mesh,
            among="stage",
        )
        shared = {layout.shared_by for layout, _ in planned if layout.shared_by is not None}
        self._stages_groups = stages_groups(mesh, sorted(shared))
        self._buckets = [self._make_bucket(layout, own) for layout, own in planned]
        self._trained = [bucket for bucket in self._buckets if bucket.layout.trainable]
        self._places = {
            id(parameter): (bucket, i)
            for bucket in self._trained
            for i, parameter in enumerate(bucket.parameters)
        }
        self._frozen = {id(s.parameter) for s in specs} - self._places.keys()
        self._launcher = _launcher(self._trained, specs)
        self._deferral = Deferral()
        self._blocks: Blocks | None = None
        self._held: set[int] = set()
        self._in_last_backward = False
        self._device = specs[0].parameter.device if specs else device_of(mesh)
        # On the device, as whether a step counts is known only there.
        self._step = torch.zeros((), dtype=torch.float32, device=self._device)
        self._gather(self._buckets)

    def _make_bucket(self, layout: BucketLayout, parameters: list[Parameter]) -> Bucket:
        mesh = self.mesh
        make = partial(Bucket, layout, parameters, wire=self._wire, transient=self._zero == 2)
        if layout.is_expert:
            return make(mesh.edp_group, mesh.edp_rank, mesh.plan.edp)
        if layout.shared_by is None:
            return make(mesh.dp_group, mesh.dp_rank, mesh.plan.dp)
        group = self._stages_groups[layout.shared_by]
        what = f"the list of parameters shared by stages {layout.shared_by}"
        check_same(digest_of([layout]), what, mesh, among=group)
        rank = layout.shared_by.index(mesh.pp_rank) * mesh.plan.dp + mesh.dp_rank
        return make(group, rank, len(layout.shared_by) * mesh.plan.dp)

    @property
    def step_count(self) -> int:
        """Updates made so far; skipped steps do not count. Reading it waits for the device."""
        return int(self._step)

    def overlap(self, blocks: Sequence[nn.Module]) -> None:
        """Reduce gradients while backward still runs, and gather parameters during the forward.

        To be called once. Every block gets a hook on its forward. Backward then reduces the
        buckets of the blocks that it has passed, if it runs in ``overlapped()``; and ``step``
        no longer waits for the blocks' parameters, but the forward of each block does. Whoever
        else reads parameters after a step calls ``synchronize`` first.

        Each block runs once in a forward. Buckets end where they are full, so make
        ``bucket_elements`` no larger than a block to have one reduced per block.

        Args:
            blocks: Modules, in the order of the forward.
        """
        if self._blocks is not None:
            raise RuntimeError("overlap() has been called already")
        self._blocks = Blocks(blocks, self._wait_for, self._on_backward)

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Wrap the last backward before ``step``: its gradients are reduced as it goes."""
        self._in_last_backward = True
        try:
            yield
        finally:
            self._in_last_backward = False

    def attach_sinks(self) -> None:
        """Give every trained parameter a ``dw_sink``: operators add weight gradients themselves."""
        for bucket in self._trained:
            for i, parameter in enumerate(bucket.parameters):
                attach_sink(parameter, self._sink(bucket, i))

    def takes(self, parameter: Parameter) -> bool:
        """Return whether this optimizer trains a parameter."""
        return id(parameter) in self._places

    def put_off(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """Collect weight gradients that come through sinks instead of computing them."""
        return self._deferral.put_off()

    def hold(self, parameters: Iterable[Parameter]) -> None:
        """Name parameters that blocks do not know all uses of: a tied embedding, say.

        They are reduced when ``ready`` or ``step`` says so, and ``step`` waits for their values.
        """
        self._held |= {id(p) for p in parameters}

    def accumulate(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Add ``.grad`` into the main gradients and clear it: after every backward.

        Args:
            parameters: Only these; None takes all.

        Raises:
            RuntimeError: If a parameter was replaced, or moved to other memory, since the start.
        """
        if parameters is None:
            for bucket in self._trained:
                bucket.accumulate(range(len(bucket.parameters)))
            return
        for parameter in parameters:
            place = self._places.get(id(parameter))
            if place is not None:
                place[0].accumulate([place[1]])
            elif parameter.grad is not None and id(parameter) not in self._frozen:
                refuse_stranger(parameter)

    def ready(self, parameters: Iterable[Parameter]) -> None:
        """Take note that these gradients are complete; their buckets are reduced in their turn.

        A parameter that is never named is reduced by ``step``.
        """
        self._launcher.ready(parameters)

    @torch.no_grad()
    def step(self, lr: float | None = None, *, veto: Tensor | None = None) -> StepStats:
        """Sum the gradients over ranks, clip them, update, and share the new parameters.

        A collective call: every rank makes it. Nothing in it waits for the device. Gradients
        that are still in ``.grad`` are accumulated first.

        Args:
            lr: Learning rate of this step; None takes the configured one.
            veto: 0-dim bool on the device. If it is true on any rank, no rank changes anything,
                as if a gradient had not been finite.
        """
        lr = self.config.lr if lr is None else lr
        check_lr(lr)
        for bucket in self._buckets:
            bucket.check_places()
        self.accumulate()
        self._launcher.flush()
        for bucket in self._trained:
            bucket.wait_reduce()
        stats = measure(
            (bucket.grad_S for bucket in self._trained),
            self.mesh,
            self._device,
            max_norm=self.config.max_norm,
            veto=veto,
            launch_hash=self._launcher.hash,
        )
        self._update(lr, stats)
        self._gather(self._trained)
        self.zero_grad()
        return stats

    def _update(self, lr: float, stats: StepStats) -> None:
        """Update this rank's slices, with clipping and skipping inside the kernels."""
        found_inf = stats.skipped.float()
        self._step += 1
        scalars_4 = step_scalars(stats.clip_coef, stats.skipped, self._step, self.config)
        for bucket in self._trained:
            rate = lr * bucket.layout.lr_scale
            if bucket.layout.matrix is not None:
                update_muon(
                    bucket, coef=stats.clip_coef, skipped=stats.skipped, lr=rate, config=self.muon
                )
                continue
            update_adamw(
                bucket,
                coef=stats.clip_coef,
                found_inf=found_inf,
                step=self._step,
                scalars_4=scalars_4,
                lr=rate,
                config=self.config,
            )
        self._step -= found_inf

    def _gather(self, buckets: Sequence[Bucket]) -> None:
        """Share the new parameters; wait for those that no block waits for."""
        awaited = set() if self._blocks is None else self._blocks.known() - self._held
        for bucket in buckets:
            bucket.start_gather()
        for bucket in buckets:
            if not all(id(p) in awaited for p in bucket.parameters):
                bucket.wait_gather()

    def synchronize(self) -> None:
        """Wait until all parameters have their values (on a GPU: let the stream wait)."""
        for bucket in self._buckets:
            bucket.wait_gather()

    def zero_grad(self) -> None:
        """Forget the gradients of this step. ``step`` does so itself.

        A collective call if some have been reduced already, as others take part in that.
        """
        for bucket in self._trained:
            bucket.zero_grad()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None  # of a backward that nobody accumulated
        self._launcher.restart()
        if self._blocks is not None:
            self._blocks.restart()

    @torch.no_grad()
    def abandon(self) -> None:
        """Drop the gradients of a step that some rank did not finish; a pipeline does so itself.

        A collective call of all ranks. Each begins what it has not begun yet, as others may wait
        in sums that it never came to, and drops the results.
        """
        for bucket in self._trained:
            for parameter in bucket.parameters:
                parameter.grad = None
        self._launcher.flush()
        self.zero_grad()

    def launches(self) -> list[tuple[str, int]]:
        """Return what this rank has begun to reduce in this step, in order: names and elements."""
        return list(self._launcher.history)

    def shards(self) -> list[Shard]:
        """Return this rank's state as views, for a checkpoint to read or to write into.

        Over all ranks they cover every element of every parameter exactly once.
        """
        self.synchronize()
        return [shard for bucket in self._buckets for shard in bucket.shards()]

    @torch.no_grad()
    def share(self) -> None:
        """Give parameters the values of their masters, after something was written into these.

        A collective call. Call ``synchronize`` before writing: others may still be reading.
        """
        self._gather(self._buckets)

    @torch.no_grad()
    def loaded(self, step_count: int) -> None:
        """Take over state that was written into ``shards()``.

        A collective call: every rank makes it. Parameters get the values of their masters, and
        gradients that were being accumulated are dropped.

        Args:
            step_count: Updates made before the state was saved.
        """
        if step_count < 0:
            raise ValueError(f"step_count must be 0 or more, got {step_count}")
        self._step.fill_(step_count)
        self.share()
        self.zero_grad()

    def _sink(self, bucket: Bucket, index: int) -> Callable[[WeightGradient], None]:
        def sink(run: WeightGradient) -> None:
            self._deferral.submit(lambda: bucket.add(index, run))

        return sink

    def _wait_for(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            place = self._places.get(id(parameter))
            if place is not None:
                place[0].wait_gather()

    def _on_backward(self, index: int) -> None:
        if self._in_last_backward:
            # After the weight gradients of the block, wherever these are now.
            self._deferral.submit(lambda: self._finish_block(index))

    @torch.no_grad()
    def _finish_block(self, index: int) -> None:
        blocks = self._blocks
        if blocks is None:
            return
        self.accumulate(blocks.parameters(index))
        self.ready(p for p in blocks.finish(index) if id(p) not in self._held)


def _decay(spec: ParamSpec, config: AdamWConfig) -> float:
    if isinstance(spec.weight_decay, bool):
        return config.weight_decay if spec.weight_decay else 0.0
    return spec.weight_decay


def _launcher(trained: Sequence[Bucket], specs: Sequence[ParamSpec]) -> Launcher:
    """Order buckets as backward completes them: by their earliest parameter, the last first.

    Those that several stages share come at the end, so that no stage waits for another with
    buckets of its own left to begin.
    """
    position = {id(spec.parameter): i for i, spec in enumerate(specs)}

    def key(bucket: Bucket) -> tuple[bool, int]:
        first = min(position[id(p)] for p in bucket.parameters)
        return bucket.layout.shared_by is not None, -first

    ordered = sorted(trained, key=key)
    return Launcher(ordered, [bucket.layout.segments[0].name for bucket in ordered])
