"""One optimizer step and one validation, on any number of ranks.

Every loss is a sum over this rank's tokens divided by the tokens of the whole batch, so adding
gradients over microbatches and ranks gives the gradient of the mean over all tokens. Nothing is
averaged twice and no number of ranks appears in a loss.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from moe_dispatch import make_dispatcher
from moe_kernels import update_bias
from moe_parallel import AdamWConfig, Mesh, ParamSpec, Shard, ShardedAdamW
from numpy.typing import NDArray
from torch import Tensor

from moe_train.config import RunConfig
from moe_train.data import SequenceSource, rank_share
from moe_train.model import Sums, Transformer

_EXPERT_MATRICES = (".moe.gate_up", ".moe.down")


class StepResult(NamedTuple):
    """What a step did: 0-dim tensors on the device unless said otherwise, alike on all ranks.

    Attributes:
        loss: Cross-entropy of the batch before the update, nats a token, float64.
        balance_loss: Balance loss, mean over tokens and layers; 1 when the load is even.
        z_loss: Mean over tokens and layers of the squared log-partition.
        entropy_L: Entropy of the router's scores, nats, mean over tokens.
        load_LE: Fraction of the routed rows that each expert got.
        num_bad: Tokens that could not be routed since their scores were not finite.
        grad_norm: Global norm of the gradient before clipping.
        skipped: Whether the update was skipped because a gradient was not finite.
    """

    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    entropy_L: Tensor
    load_LE: Tensor
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
        self.steps_done = self.samples_seen = 0
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
        batch = self.train_sequences.batch(self._next_samples(), self.device)
        micros = batch.split(self.config.train.microbatch_size)
        tokens = self._all_reduce(torch.tensor(float(batch.num_tokens), dtype=torch.float64))
        scale, routing = tokens.reciprocal(), self.config.routing
        total = self.bias_LE.new_zeros(())
        for micro in micros:
            sums = self.model.sums(micro, self.bias_LE)
            loss = sums.cross_entropy + routing.balance * sums.balance + routing.z * sums.z
            (loss * scale).backward()
            self.optimizer.accumulate()
            total = total + _pack(sums)
        stats = self.optimizer.step(self.learning_rate(self.steps_done))
        result, count_LE = self._unpack(self._all_reduce(total), scale)
        if routing.bias and routing.bias_rate:
            self._update_bias(count_LE, stats.skipped)
        self.steps_done += 1
        self.samples_seen += self.config.train.batch_size
        return result._replace(grad_norm=stats.grad_norm, skipped=stats.skipped)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, int]:
        """Return the mean cross-entropy of the held-out sequences, and the tokens of the mean.

        Every rank makes the same number of forward passes, as experts of one may be needed by
        another. A collective call; changes nothing that training depends on.
        """
        dp = self.mesh.plan.dp
        numbers = self.held_out.spread(self.config.train.eval_sequences)
        at_once = dp * max(1, 16 // dp)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for start in range(0, len(numbers), at_once):
            mine = rank_share(numbers[start : start + at_once], self.mesh.dp_rank, dp)
            batch = self.held_out.batch(mine, self.device)
            sums = self.model.sums(batch, self.bias_LE)
            total += torch.stack([sums.cross_entropy.double(), total.new_tensor(batch.num_tokens)])
        loss, tokens = self._all_reduce(total).tolist()
        return loss / tokens, int(tokens)

    def shards(self) -> list[Shard]:
        """Return the state of this rank, as views: optimizer state and the routers' bias."""
        shards = self.optimizer.shards()
        if self.mesh.dp_rank == 0:
            shards += [
                Shard(
                    name=f"layers.{i}.moe.router_bias", kind="buffer",
                    global_shape=tuple(bias_E.shape), flat_start=0, flat_stop=bias_E.numel(),
                    data=bias_E,
                )
                for i, bias_E in zip(self.config.model.moe_layers, self.bias_LE, strict=True)
            ]  # fmt: skip
        return shards

    def loaded(self, *, steps_done: int, samples_seen: int, step_count: int) -> None:
        """Take over state that was written into ``shards()``. A collective call."""
        self.optimizer.loaded(step_count)
        if self.mesh.dp_group is not None:
            dist.broadcast(self.bias_LE, group_src=0, group=self.mesh.dp_group)
        self.steps_done, self.samples_seen = steps_done, samples_seen

    def _next_samples(self) -> NDArray[np.int64]:
        c = self.config
        numbers = self.train_sequences.order(self.samples_seen, c.train.batch_size, c.data.seed)
        return rank_share(numbers, self.mesh.dp_rank, self.mesh.plan.dp)

    def _update_bias(self, count_LE: Tensor, skipped: Tensor) -> None:
        """Move the selection bias once for the whole step, unless the step was skipped."""
        rate = self.config.routing.bias_rate
        moved = [update_bias(b, n, rate) for b, n in zip(self.bias_LE, count_LE, strict=True)]
        self.bias_LE.copy_(torch.where(skipped, self.bias_LE, torch.stack(moved)))

    def _all_reduce(self, sums: Tensor) -> Tensor:
        sums = sums.to(self.device)
        if self.mesh.world_group is not None:
            dist.all_reduce(sums, group=self.mesh.world_group)
        return sums

    def _unpack(self, sums: Tensor, scale: Tensor) -> tuple[StepResult, Tensor]:
        L, E = self.bias_LE.shape
        head, entropy_L, count = sums.split([4, L, L * E])
        count_LE = count.view(L, E)
        result = StepResult(
            loss=head[0] * scale,
            balance_loss=head[1] * scale / L,
            z_loss=head[2] * scale / L,
            entropy_L=entropy_L * scale,
            load_LE=count_LE / count_LE.sum(1, keepdim=True),
            num_bad=head[3],
            grad_norm=head.new_zeros(()),
            skipped=head.new_zeros((), dtype=torch.bool),
        )
        return result, count_LE.round().long()


def _pack(sums: Sums) -> Tensor:
    """Put all sums into one float64 vector, which holds counts exactly up to 2^53."""
    head = [sums.cross_entropy, sums.balance, sums.z, sums.num_bad]
    parts = [torch.stack([x.detach().double() for x in head]), sums.entropy_L, sums.count_LE]
    return torch.cat([part.double().flatten() for part in parts])


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
