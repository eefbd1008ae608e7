"""Sums that run during backward and shares that run during forward change no bit."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_parallel import Mesh, plan_mesh
from moe_train import trainer as module
from moe_train.config import MeshConfig, RunConfig
from moe_train.data import Sequences
from moe_train.trainer import Trainer


def train(group: dist.ProcessGroup, config: RunConfig, overlap: bool) -> dict:
    """Take three steps, with a validation between them, and return all that came of it."""
    mesh = config.mesh
    plan = plan_mesh(dist.get_world_size(group), ep=mesh.ep, num_experts=4)
    text = Sequences(np.arange(900, dtype=np.uint8), 16)
    config = replace(config, mesh=replace(mesh, overlap=overlap))
    with mock.patch.object(module, "MIN_BUCKET", 1):
        trainer = Trainer(config, Mesh.create(plan, group=group), torch.device("cpu"), text, text)
    original, early, losses = trainer.optimizer.step, [], []

    def step(*arguments, **options):
        early.append(len(trainer.optimizer.launches()))
        return original(*arguments, **options)

    trainer.optimizer.step = step
    for _ in range(3):
        result = trainer.step()
        losses += [float(result.loss), float(result.grad_norm), trainer.evaluate()]
    shards = [(s.name, s.kind, s.flat_start, s.data.tolist()) for s in trainer.shards()]
    weights = [p.tolist() for p in trainer.model.parameters()]
    return {"losses": losses, "shards": shards, "weights": weights, "early": min(early)}


@pytest.mark.parametrize(
    ("ranks", "ep", "changes"),
    [
        (2, 1, {"dtype": "float32"}),
        (2, 2, {"dtype": "float32", "microbatch_size": 2, "ema": 0.5}),
        (4, 2, {"dtype": "bfloat16", "recompute": "block"}),
    ],
)
def test_overlap_changes_no_bit_of_a_run(pool, tiny_config, ranks, ep, changes) -> None:
    config = replace(
        tiny_config, mesh=MeshConfig(ep=ep), train=replace(tiny_config.train, **changes)
    )
    with_overlap, without = (pool.run(train, ranks, config, way) for way in (True, False))
    for got, want in zip(with_overlap, without, strict=True):
        assert got.pop("early") > 0  # sums had begun before the optimizer asked for them
        assert want.pop("early") == 0
        assert got == want
