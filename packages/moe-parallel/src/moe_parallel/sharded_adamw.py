"""AdamW whose state is divided among the replicas of each parameter (ZeRO-1)."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_parallel.bucket import Bucket
from moe_parallel.layout import BucketLayout, ParamSpec, check_specs, plan_buckets
from moe_parallel.mesh import Mesh
from moe_parallel.norm import sum_of_squares
from moe_parallel.self_check import check_same
from moe_parallel.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """Hyperparameters, with the meaning they have in ``torch.optim.AdamW``.

    Attributes:
        lr: Learning rate, unless a step is given another.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the parameters that ask for it, per unit of learning rate.
        max_norm: Gradients with a larger global norm are scaled down to it; ``inf``: never.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ValueError(f"eps must be positive and finite, got {self.eps}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay must be finite, 0 or more, got {self.weight_decay}")
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive (inf: no clipping), got {self.max_norm}")


class StepStats(NamedTuple):
    """What a step did. 0-dim tensors on the parameters' device: reading one waits for it.

    Attributes:
        grad_norm: Global norm before clipping, float64, the same bits on every rank; NaN if
            the step was skipped.
        clip_coef: What the gradients were multiplied by, float64; 0 if skipped.
        skipped: bool. A gradient was not finite on some rank, and no rank changed anything.
    """

    grad_norm: Tensor
    clip_coef: Tensor
    skipped: Tensor


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
        specs: The parameters of this rank, in the same order on every rank of a stage.
        mesh: Where this rank stands.
        config: Hyperparameters, the same on every rank.
        num_experts: Experts of a layer over the whole model.
        bucket_elements: How many elements a buffer may hold, if more than one parameter.

    Raises:
        ValueError: If a parameter does not fit, see the message.
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
    ):
        if bucket_elements < 1:
            raise ValueError(f"bucket_elements must be positive, got {bucket_elements}")
        check_specs(specs, mesh, num_experts)
        self.mesh, self.config = mesh, config
        planned = list(plan_buckets(specs, mesh, num_experts, bucket_elements))
        check_same(repr(config), "the optimizer's configuration", mesh)
        check_same(
            _digest([layout for layout, _ in planned]),
            "the list of parameters",
            mesh,
            among="stage",
        )
        self._buckets = [self._make_bucket(layout, own) for layout, own in planned]
        self._trained = [bucket for bucket in self._buckets if bucket.layout.trainable]
        self._device = specs[0].parameter.device
        # On the device, as whether a step counts is known only there.
        self._step = torch.zeros((), dtype=torch.float32, device=self._device)
        self._gather()

    def _make_bucket(self, layout: BucketLayout, parameters: list) -> Bucket:
        mesh = self.mesh
        if layout.is_expert:
            return Bucket(layout, parameters, mesh.edp_group, mesh.edp_rank, mesh.plan.edp)
        return Bucket(layout, parameters, mesh.dp_group, mesh.dp_rank, mesh.plan.dp)

    @property
    def step_count(self) -> int:
        """Updates made so far; skipped steps do not count. Reading it waits for the device."""
        return int(self._step)

    def accumulate(self) -> None:
        """Add each ``.grad`` into the main gradients and clear it: after every backward."""
        for bucket in self._trained:
            bucket.accumulate()

    @torch.no_grad()
    def step(self, lr: float | None = None) -> StepStats:
        """Sum the gradients over ranks, clip them, update, and share the new parameters.

        A collective call: every rank makes it. Nothing in it waits for the device. Gradients
        that are still in ``.grad`` are accumulated first.

        Args:
            lr: Learning rate of this step; None takes the configured one.
        """
        lr = self.config.lr if lr is None else lr
        _check_lr(lr)
        self.accumulate()
        for bucket in self._trained:
            bucket.start_reduce()
        for bucket in self._trained:
            bucket.wait()
        stats = self._measure()
        self._update(lr, stats)
        self._gather()
        for bucket in self._trained:
            bucket.zero_grad()
        return stats

    def _measure(self) -> StepStats:
        """Find the norm with one reduction over the world.

        Every element of the model has one owner, so a plain sum over ranks counts it once.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for bucket in self._trained:
            total += sum_of_squares(bucket.grad_S)
        finite = total.isfinite()
        sums = torch.stack([torch.where(finite, total, 0.0), (~finite).double()])
        if self.mesh.world_group is not None:
            dist.all_reduce(sums, group=self.mesh.world_group)
        # A sum of finite parts can still overflow.
        skipped = (sums[1] > 0) | ~sums[0].isfinite()
        norm = torch.where(skipped, math.nan, sums[0].sqrt())
        coef = (self.config.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return StepStats(norm, torch.where(skipped, 0.0, coef), skipped)

    def _update(self, lr: float, stats: StepStats) -> None:
        """Run AdamW on this rank's slices, with clipping and skipping inside the kernel."""
        (beta1, beta2), eps = self.config.betas, self.config.eps
        found_inf = stats.skipped.float()
        grad_scale = stats.clip_coef.reciprocal().float()
        self._step += 1
        for bucket in self._trained:
            scale = grad_scale
            if bucket.grad_S.dtype == torch.float64:
                # The kernel's scale is float32, which would cost half of the digits.
                bucket.grad_S.mul_(stats.clip_coef)
                scale = None
            for decays in (True, False):
                masters, grads, exp_avgs, exp_avg_sqs = bucket.runs(decays)
                if not masters:
                    continue
                torch._fused_adamw_(
                    masters,
                    grads,
                    exp_avgs,
                    exp_avg_sqs,
                    [],
                    [self._step] * len(masters),
                    lr=lr,
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=self.config.weight_decay if decays else 0.0,
                    eps=eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=scale,
                    found_inf=found_inf,
                )
        self._step -= found_inf

    def _gather(self) -> None:
        for bucket in self._buckets:
            bucket.start_gather()
        for bucket in self._buckets:
            bucket.wait()

    def shards(self) -> list[Shard]:
        """Return this rank's state as views, for a checkpoint to read or to write into.

        Over all ranks they cover every element of every parameter exactly once.
        """
        return [shard for bucket in self._buckets for shard in bucket.shards()]

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
        self._gather()
        for bucket in self._trained:
            bucket.zero_grad()


def _check_lr(lr: float) -> None:
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be finite, 0 or more, got {lr}")


def _digest(layouts: list[BucketLayout]) -> str:
    # Where a rank's experts begin is the one thing that differs by right.
    plain = [
        (b.is_expert, b.dtype, b.trainable, [(s.name, s.shape, s.weight_decay) for s in b.segments])
        for b in layouts
    ]
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]
