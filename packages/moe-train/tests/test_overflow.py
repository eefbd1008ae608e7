"""A run whose buffers were too small, and that repeated steps, is one whose buffers were not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_parallel import Mesh, plan_mesh
from moe_train.config import MeshConfig, RoutingConfig, RunConfig
from moe_train.counts import Counts
from moe_train.data import Sequences
from moe_train.trainer import Trainer

ROWWISE = MeshConfig(ep=2, dispatcher="rowwise")
STEPS = 3


def train(group: dist.ProcessGroup, config: RunConfig) -> dict:
    """Train to a step, whatever has to be repeated, and return all that came of it."""
    plan = plan_mesh(dist.get_world_size(group), ep=config.mesh.ep, num_experts=4)
    text = Sequences(np.arange(900, dtype=np.uint8), 8)
    trainer = Trainer(config, Mesh.create(plan, group=group), torch.device("cpu"), text, text)
    with trainer.exchange:
        counts, losses, calls = Counts(*torch.zeros(5, dtype=torch.int64)), {}, 0
        while trainer.steps_done < STEPS:
            result = trainer.step()
            counts, calls = counts.after(result), calls + 1
            losses[trainer.steps_done] = [float(result.loss), float(result.grad_norm)]
            if trainer.steps_done == STEPS:
                trainer.settle()
        validation = trainer.evaluate()
        return {
            "losses": losses,
            "validation": validation,
            "counters": trainer.counters(),
            "counts": [int(counts.in_a_row), int(counts.skipped), int(counts.unrouted)],
            "shards": [(s.name, s.kind, s.flat_start, s.data.tolist()) for s in trainer.shards()],
            "repeated": int(counts.repeated),
            "calls": calls,
            "notes": trainer.exchange.take_notes(),
        }


def small(config: RunConfig, mesh: MeshConfig) -> RunConfig:
    return replace(
        config, mesh=mesh,
        model=replace(config.model, num_layers=1),
        routing=RoutingConfig(bias=True, bias_rate=0.05),
        data=replace(config.data, sequence_length=8),
        train=replace(
            config.train, batch_size=4, ema=0.5, skip_spikes=9.0, spike_window=2, eval_sequences=4
        ),
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_that_repeats_steps_is_bit_for_bit_one_that_need_not(
    pool, tiny_config, ranks
) -> None:
    retry = replace(ROWWISE, overflow="retry", capacity_factor=0.05)
    repeating, exact, carried = (
        pool.run(train, ranks, small(tiny_config, mesh))
        for mesh in (retry, ROWWISE, MeshConfig(ep=2))
    )
    for got, want, other in zip(repeating, exact, carried, strict=True):
        assert want.pop("repeated") == other.pop("repeated") == 0
        assert want.pop("calls") == other.pop("calls") == STEPS
        assert want.pop("notes") == other.pop("notes") == []
        assert got.pop("repeated") >= 2  # the one that overflowed, and the one under way meanwhile
        assert got.pop("calls") > STEPS
        assert any("rows came to a rank with room for" in n for n in got.pop("notes")) or ranks > 2
        assert got == want
        assert other["losses"][STEPS] == pytest.approx(want["losses"][STEPS], rel=1e-9)
