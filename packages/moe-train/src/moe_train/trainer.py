"""One optimizer step and one validation, on any number of ranks.

Every loss is a sum over this rank's tokens divided by the tokens of the whole batch, so adding
gradients over microbatches and ranks gives the gradient of the mean over all tokens. Nothing is
averaged twice and no number of ranks appears in a loss.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from moe_dispatch import make_dispatcher
from moe_kernels import update_bias
from moe_parallel import AdamWConfig, Mesh, ParamSpec, Shard, ShardedAdamW
from torch import Tensor

from moe_train.clock import StepClock
from moe_train.config import RunConfig
from moe_train.data import SequenceSource, rank_share
from moe_train.data.prefetch import Prefetcher, Request
from moe_train.experts import MoE
from moe_train.model import Sums, Transformer
from moe_train.tape import Tape

_EXPERT_MATRICES = (".moe.gate_up", ".moe.down")


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
        skipped: Whether the update was skipped because a gradient was not finite.
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
        dtype = getattr(torch, config.train.dtype)
        self.model = Transformer(
            config.model,
            config.routing,
            make_dispatcher(config.model.num_experts, mesh.ep_group),
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
        c = config.optimizer
        self.optimizer = ShardedAdamW(
            param_specs(self.model),
            mesh,
            AdamWConfig(
                lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay,
                max_norm=c.max_norm or math.inf,
            ),
            num_experts=config.model.num_experts,
        )  # fmt: skip

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step: linear warm-up, then constant. Steps count from 0."""
        c = self.config.optimizer
        return c.lr * min(1.0, (step + 1) / c.warmup_steps) if c.warmup_steps else c.lr

    def step(self) -> StepResult:
        """Make one update. A collective call."""
        self.clock.start()
        request = self._request()
        batch = self.prefetcher.get(request)
        micros = batch.split(self.config.train.microbatch_size)
        tokens = self._all_reduce(torch.tensor(float(batch.num_tokens), dtype=torch.float64))
        scale, routing = tokens.reciprocal(), self.config.routing
        total = self.bias_LE.new_zeros(())
        self.clock.mark("data")
        place = self.mesh.dp_rank * (self.config.train.batch_size // self.mesh.plan.dp)
        for micro in micros:
            self.tape.before(self.steps_done, place, len(micro.inputs_BS), self.device)
            sums = self.model.sums(micro, self.bias_LE)
            loss = sums.cross_entropy + routing.balance * sums.balance + routing.z * sums.z
            self.clock.mark("forward")
            (loss * scale).backward()
            self.optimizer.accumulate()
            self.clock.mark("backward")
            total = total + _pack(sums)
            self.tape.after(self.steps_done, place, len(micro.inputs_BS))
            place += len(micro.inputs_BS)
        stats = self.optimizer.step(self.learning_rate(self.steps_done))
        self.clock.mark("optimizer")
        result = self._unpack(self._all_reduce(total), scale)
        if routing.bias and routing.bias_rate:
            self._update_bias(result.count_LE, stats.skipped)
        self._update_load(result.count_LE, stats.skipped)
        self.clock.mark("statistics")
        self.steps_done += 1
        self.step_tokens = request.num_tokens()
        self.samples_seen += self.config.train.batch_size
        return result._replace(grad_norm=stats.grad_norm, skipped=stats.skipped)

    @torch.no_grad()
    def evaluate(self, held_out: SequenceSource | None = None) -> tuple[float, int]:
        """Return the mean cross-entropy of held-out sequences, and the tokens of the mean.

        Every rank makes the same number of forward passes, as experts of one may be needed by
        another. A collective call; changes nothing that training depends on.

        Args:
            held_out: The sequences; those that the trainer was made with if left away.
        """
        dp = self.mesh.plan.dp
        held_out = held_out or self.held_out
        numbers = held_out.spread(self.config.train.eval_sequences)
        at_once = dp * max(1, 16 // dp)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for start in range(0, len(numbers), at_once):
            mine = rank_share(numbers[start : start + at_once], self.mesh.dp_rank, dp)
            batch = held_out.batch(mine, self.device)
            sums = self.model.sums(batch, self.bias_LE)
            total += torch.stack([sums.cross_entropy.double(), total.new_tensor(batch.num_tokens)])
        loss, tokens = self._all_reduce(total).tolist()
        return loss / tokens, int(tokens)

    def shards(self) -> list[Shard]:
        """Return the state of this rank, as views: of the optimizer and the routers."""
        shards = self.optimizer.shards()
        if self.mesh.dp_rank == 0:
            layers = self.config.model.moe_layers
            shards += _buffers("router_bias", layers, self.bias_LE)
            if self.config.routing.balance_over == "global":
                shards += _buffers("router_load", layers, self.load_LE)
        return shards

    def loaded(self, *, steps_done: int, samples_seen: int, step_count: int) -> None:
        """Take over state that was written into ``shards()``. A collective call."""
        self.optimizer.loaded(step_count)
        if self.mesh.dp_group is not None:
            dist.broadcast(self.bias_LE, group_src=0, group=self.mesh.dp_group)
            dist.broadcast(self.load_LE, group_src=0, group=self.mesh.dp_group)
        self.steps_done, self.samples_seen = steps_done, samples_seen

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
        sums = sums.to(self.device)
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


def param_specs(model: Transformer) -> list[ParamSpec]:
    """Say of each parameter whether experts divide it and whether it decays.

    Matrices decay; vectors do not, and neither does the router, whose scale sets how decided it is.
    """
    return [
        ParamSpec(
            name,
            parameter,
            is_expert=name.endswith(_EXPERT_MATRICES),
            weight_decay=parameter.ndim > 1 and not name.endswith(".moe.router"),
        )
        for name, parameter in model.named_parameters()
    ]
