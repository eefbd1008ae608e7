"""One optimizer step and one validation, on any number of ranks.

Every loss is a sum over this rank's tokens divided by the tokens of the whole batch, so adding
gradients over microbatches and ranks gives the gradient of the mean over all tokens. Nothing is
averaged twice and no number of ranks appears in a loss.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from moe_kernels import update_bias
from moe_parallel import AdamWConfig, Mesh, Shard, ShardedAdamW
from torch import Tensor

from moe_train.clock import StepClock
from moe_train.config import RunConfig
from moe_train.data import IGNORED, Batch, SequenceSource
from moe_train.data.prefetch import Prefetcher, Request
from moe_train.ema import Averages
from moe_train.evaluation import Evaluation, evaluate
from moe_train.exchange import Exchange
from moe_train.experts import MoE
from moe_train.model import Sums, Transformer
from moe_train.parameters import param_specs
from moe_train.schedule import learning_rate, planned_total
from moe_train.spikes import Spikes
from moe_train.tape import Tape

T = TypeVar("T")
MIN_BUCKET, MAX_BUCKET = 1 << 20, 1 << 25
"""Elements of a buffer whose gradients are reduced at once: as many as a block has, if between."""


class StepResult(NamedTuple):
    """What a step did: 0-dim tensors on the device unless said otherwise, alike on all ranks.

    Attributes:
        loss: Cross-entropy of the batch before the update, nats a token, float64.
        balance_loss: Balance loss, mean over tokens and layers; 1 when the load is even.
        z_loss: Mean over tokens and layers of the squared log-partition.
        entropy_L: Entropy of the router's scores, nats, mean over tokens.
        load_LE: Fraction of the routed rows that each expert got.
        count_LE: int64, rows that each expert was asked to take.
        kept_LE: int64, those that it got: fewer where rows were dropped.
        share_LE: Scores of each expert, as shares of a token's scores, summed over tokens.
        dropped_LK1: int64, tokens of which 0 to K routes were dropped.
        num_bad: Tokens that could not be routed since their scores were not finite.
        grad_norm: Global norm of the gradient before clipping.
        skipped: Whether the update was skipped because a gradient was not finite, or the loss a
            spike.
        spiked: Whether the loss was a spike, see ``spikes.py``.
        overflowed: Whether a buffer was too small, so that the step does not stand and will be
            repeated; nothing else of this then means anything. See ``exchange.py``.
    """

    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    entropy_L: Tensor
    load_LE: Tensor
    count_LE: Tensor
    kept_LE: Tensor
    share_LE: Tensor
    dropped_LK1: Tensor
    num_bad: Tensor
    grad_norm: Tensor
    skipped: Tensor
    spiked: Tensor
    overflowed: Tensor


class Trainer:
    """Model, optimizer and data of one rank.

    Args:
        config: The run.
        mesh: This rank's place. Its world divides ``config.train.batch_size``.
        device: Where to compute.
        train: Sequences to train on.
        held_out: Sequences to validate on.

    Attributes:
        steps_done: Optimizer steps made, skipped ones included.
        samples_seen: Sequences that all ranks together were given.
        step_tokens: Tokens of the last step, padding excluded, of all ranks.
        first_target: Step at which the first start of the run was to end.
        averages: Of the weights, if ``config.train.ema`` asks for them.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        device: torch.device,
        train: SequenceSource,
        held_out: SequenceSource,
    ):
        config.check_batch(mesh.plan.dp)
        self.config, self.mesh, self.device = config, mesh, device
        self.train_sequences: SequenceSource = train
        self.held_out: SequenceSource = held_out
        self.prefetcher = Prefetcher(device, config.data.prefetch)
        self.steps_done = self.samples_seen = self.step_tokens = 0
        self.first_target = config.train.steps
        dtype = getattr(torch, config.train.dtype)
        self.exchange = Exchange(config, mesh, device)
        self.model = Transformer(
            config.model,
            config.routing,
            self.exchange.dispatcher,
            seed=config.train.seed,
            dtype=dtype,
            recompute=config.train.recompute,
        ).to(device)
        # Control state: never cast with the model, never touched by a gradient.
        shape = len(config.model.moe_layers), config.model.num_experts
        self.bias_LE = torch.zeros(
            shape, dtype=torch.promote_types(dtype, torch.float32), device=device
        )
        self.moes = [m for m in self.model.modules() if isinstance(m, MoE)]
        self.load_LE = torch.stack([moe.load_E for moe in self.moes])
        for moe, load_E in zip(self.moes, self.load_LE, strict=True):
            moe.load_E = load_E  # a view: what is written here, the layer reads
        self.tape = Tape(config, self.moes)
        self.clock = StepClock(device)
        self.optimizer = self._make_optimizer()
        ema, spikes = config.train.ema, config.train.skip_spikes
        self.averages = Averages(self.optimizer, ema) if ema else None
        self.spikes = Spikes(spikes, config.train.spike_window, device) if spikes else None

    def _make_optimizer(self) -> ShardedAdamW:
        c, blocks = self.config.optimizer, list(self.model.layers.values())
        block = max(sum(p.numel() for p in b.parameters()) for b in blocks)
        optimizer = ShardedAdamW(
            param_specs(self.model, c),
            self.mesh,
            AdamWConfig(
                lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay,
                max_norm=c.max_norm or math.inf,
            ),
            num_experts=self.config.model.num_experts,
            bucket_elements=min(max(block, MIN_BUCKET), MAX_BUCKET),
        )  # fmt: skip
        if self.config.mesh.overlap and self.mesh.world_group is not None:
            optimizer.overlap(blocks)
        return optimizer

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, counted from 0, see ``schedule.py``."""
        c = self.config.optimizer
        return learning_rate(c, step, planned_total(c, self.first_target))

    def step(self) -> StepResult:
        """Make one update. A collective call, in which the host waits for nothing.

        If a buffer turns out to have been too small for the step before the last, or an earlier
        one, it is this step that is made. Call ``settle`` before a result is relied on.
        """
        self.settle(unknown=1)
        self.clock.start()
        request = self._request()
        batch = self.prefetcher.get(request)
        micros = batch.split(self.config.train.microbatch_size)
        scale, routing = self._all_reduce(_count_tokens(batch)).reciprocal(), self.config.routing
        total = self.bias_LE.new_zeros(())
        self.clock.mark("data")
        place = self.mesh.dp_rank * (self.config.train.batch_size // self.mesh.plan.dp)
        for i, micro in enumerate(micros):
            self.tape.before(self.steps_done, place, len(micro.inputs_BS), self.device)
            sums = self.model.sums(micro, self.bias_LE)
            loss = sums.cross_entropy + routing.balance * sums.balance + routing.z * sums.z
            self.clock.mark("forward")
            last = i == len(micros) - 1
            with self.optimizer.overlapped() if last else nullcontext():
                (loss * scale).backward()
            self.optimizer.accumulate()
            self.clock.mark("backward")
            total = total + _pack(sums)
            self.tape.after(self.steps_done, place, len(micro.inputs_BS))
            place += len(micro.inputs_BS)
        summed = self._all_reduce(torch.cat([total, self.exchange.overflow().view(1)]))
        result, overflowed = self._unpack(summed[:-1], scale), summed[-1] > 0
        spiked = torch.zeros_like(overflowed)
        if self.spikes is not None:
            spiked = self.spikes.judge(result.loss, counts=~overflowed) & ~overflowed
        self.exchange.note(self.steps_done, self.samples_seen, summed[-1])
        stats = self.optimizer.step(self.learning_rate(self.steps_done), veto=spiked | overflowed)
        if self.averages is not None:
            self.averages.update(stats.skipped)
        self.clock.mark("optimizer")
        if routing.bias and routing.bias_rate:
            self._update_bias(result.count_LE, stats.skipped)
        self._update_load(result.count_LE, stats.skipped)
        self.clock.mark("statistics")
        self.steps_done += 1
        self.step_tokens = request.num_tokens()
        self.samples_seen += self.config.train.batch_size
        return result._replace(
            grad_norm=stats.grad_norm, skipped=stats.skipped, spiked=spiked, overflowed=overflowed
        )

    def settle(self, unknown: int = 0) -> bool:
        """Find out whether the steps so far stand, and go back to the first that does not.

        A collective call; waits for the device unless steps may stay unknown.

        Args:
            unknown: How many of the last steps may stay so.

        Returns:
            False if steps have to be repeated: ``steps_done`` and ``samples_seen`` are then those
            before them, and the buffer is larger.
        """
        failed = self.exchange.first_failed(unknown)
        if failed is None:
            return True
        self.steps_done, self.samples_seen = failed
        self.exchange.grow(self.model)
        return False

    def repeated(self, forward: Callable[[], T]) -> T:
        """Return what ``forward`` returns once no buffer is too small for it. Collective; waits."""
        result = forward()
        while self.exchange.can_overflow and bool(self._all_reduce(self.exchange.overflow())):
            self.exchange.grow(self.model)
            result = forward()
        return result

    def evaluate(self, held_out: SequenceSource | None = None) -> Evaluation:
        """Return the mean cross-entropy of held-out sequences, and the tokens of the mean.

        A collective call; changes nothing that training depends on.

        Args:
            held_out: The sequences; those that the trainer was made with if left away.
        """
        source, number = held_out or self.held_out, self.config.train.eval_sequences
        return self.repeated(lambda: evaluate(self, source, number))

    def shards(self) -> list[Shard]:
        """Return the state of this rank, as views: of the optimizer, averages and the routers."""
        shards = self.optimizer.shards()
        if self.averages is not None:
            shards += self.averages.shards
        if self.mesh.dp_rank == 0:
            layers = self.config.model.moe_layers
            shards += _buffers("router_bias", layers, self.bias_LE)
            if self.config.routing.balance_over == "global":
                shards += _buffers("router_load", layers, self.load_LE)
        return shards

    def counters(self) -> dict[str, Any]:
        """Return the state that is no tensor, as JSON. Waits for the device."""
        return {
            "steps_done": self.steps_done,
            "samples_seen": self.samples_seen,
            "step_count": self.optimizer.step_count,
            "first_target": self.first_target,
            "losses": [] if self.spikes is None else self.spikes.losses(),
        }

    def loaded(
        self,
        *,
        steps_done: int,
        samples_seen: int,
        step_count: int,
        first_target: int = 0,
        losses: Sequence[float] = (),
        new_averages: bool = False,
    ) -> None:
        """Take over state that was written into ``shards()``, and counters. A collective call.

        Args:
            steps_done: As ``counters`` returned it, like the others.
            samples_seen: Likewise.
            step_count: Likewise.
            first_target: Likewise; 0 if no start of the run was made before this one.
            losses: Likewise.
            new_averages: Whether averages of weights were not among what was written.
        """
        self.optimizer.loaded(step_count)
        if self.mesh.dp_group is not None:
            dist.broadcast(self.bias_LE, group_src=0, group=self.mesh.dp_group)
            dist.broadcast(self.load_LE, group_src=0, group=self.mesh.dp_group)
        self.steps_done, self.samples_seen = steps_done, samples_seen
        self.first_target = first_target or self.config.train.steps
        if self.spikes is not None:
            self.spikes.load(losses)
        if self.averages is not None and new_averages:
            self.averages.restart()

    def _request(self) -> Request:
        """Say which sequences of the run this rank is given next."""
        return Request(
            source=self.train_sequences,
            first=self.samples_seen,
            number=self.config.train.batch_size,
            seed=self.config.data.seed,
            rank=self.mesh.dp_rank,
            size=self.mesh.plan.dp,
        )

    def _update_bias(self, count_LE: Tensor, skipped: Tensor) -> None:
        """Move the selection bias once for the whole step, unless the step was skipped."""
        rate = self.config.routing.bias_rate
        moved = [update_bias(b, n, rate) for b, n in zip(self.bias_LE, count_LE, strict=True)]
        self.bias_LE.copy_(torch.where(skipped, self.bias_LE, torch.stack(moved)))

    def _update_load(self, count_LE: Tensor, skipped: Tensor) -> None:
        """Keep the load of this step for the next, unless the step was skipped or had no rows."""
        total_L1 = count_LE.sum(1, keepdim=True)
        kept = skipped | (total_L1 == 0)
        load_LE = (count_LE / total_L1.clamp(min=1)).to(self.load_LE.dtype)
        self.load_LE.copy_(torch.where(kept, self.load_LE, load_LE))

    def _all_reduce(self, sums: Tensor) -> Tensor:
        if self.mesh.world_group is not None:
            dist.all_reduce(sums, group=self.mesh.world_group)
        return sums

    def _unpack(self, sums: Tensor, scale: Tensor) -> StepResult:
        L, E = self.bias_LE.shape
        K1 = self.config.model.top_k + 1
        head, entropy_L, *parts = sums.split([4, L, L * E, L * E, L * E, L * K1])
        count_LE, kept_LE, share_LE, dropped_LK1 = (part.view(L, -1) for part in parts)
        return StepResult(
            loss=head[0] * scale,
            balance_loss=head[1] * scale / L,
            z_loss=head[2] * scale / L,
            entropy_L=entropy_L * scale,
            load_LE=count_LE / count_LE.sum(1, keepdim=True),
            count_LE=count_LE.round().long(),
            kept_LE=kept_LE.round().long(),
            share_LE=share_LE,
            dropped_LK1=dropped_LK1.round().long(),
            num_bad=head[3],
            grad_norm=head.new_zeros(()),
            skipped=head.new_zeros((), dtype=torch.bool),
            spiked=head.new_zeros((), dtype=torch.bool),
            overflowed=head.new_zeros((), dtype=torch.bool),
        )


def _pack(sums: Sums) -> Tensor:
    """Put all sums into one float64 vector, which holds counts exactly up to 2^53."""
    head = [sums.cross_entropy, sums.balance, sums.z, sums.num_bad]
    parts = [
        torch.stack([x.detach().double() for x in head]),
        sums.entropy_L, sums.count_LE, sums.kept_LE, sums.share_LE, sums.dropped_LK1,
    ]  # fmt: skip
    return torch.cat([part.double().flatten() for part in parts])


def _buffers(name: str, layers: Sequence[int], value_LE: Tensor) -> list[Shard]:
    """Return control state of the routers as shards, one for each layer."""
    return [
        Shard(
            name=f"layers.{i}.moe.{name}", kind="buffer",
            global_shape=tuple(value_E.shape), flat_start=0, flat_stop=value_E.numel(),
            data=value_E,
        )
        for i, value_E in zip(layers, value_LE, strict=True)
    ]  # fmt: skip


def _count_tokens(batch: Batch) -> Tensor:
    """Return the real tokens of a batch, float64 on its device; the host does not wait."""
    targets_BS = batch.targets_BS
    if not batch.padded:
        number = targets_BS.numel()
        return torch.full((), number, dtype=torch.float64, device=targets_BS.device)
    return (targets_BS != IGNORED).sum(dtype=torch.float64)
