"""What rank 0 alone keeps in a checkpoint is everywhere after a load."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_parallel import Mesh, plan_mesh
from moe_train.config import DataConfig, ModelConfig, RoutingConfig, RunConfig, TrainConfig
from moe_train.data import Sequences
from moe_train.trainer import Trainer

CONFIG = RunConfig(
    model=ModelConfig(
        dim=16, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=4, expert_dim=8
    ),
    routing=RoutingConfig(bias=True),
    data=DataConfig(sequence_length=16),
    train=TrainConfig(batch_size=4, dtype="float64", device="cpu", threads=1),
)


def load(group: dist.ProcessGroup, ep: int) -> tuple[torch.Tensor, int, int]:
    """Write into the shards as a checkpoint does, and return bias and counters."""
    mesh = Mesh.create(plan_mesh(2, ep=ep, num_experts=4), group=group)
    text = Sequences(np.arange(200, dtype=np.uint8), 16)
    trainer = Trainer(CONFIG, mesh, torch.device("cpu"), text, text)
    for shard in trainer.shards():
        if shard.name.endswith("router_bias"):
            layer = int(shard.name.split(".")[1])
            shard.data.copy_(torch.arange(4) + 4 * layer)
    trainer.loaded(steps_done=3, samples_seen=12, step_count=2)
    return trainer.bias_LE, trainer.steps_done, trainer.samples_seen


@pytest.mark.parametrize("ep", [1, 2])
def test_after_a_load_every_rank_has_the_saved_bias_and_cursor(pool, ep) -> None:
    for bias_LE, steps_done, samples_seen in pool.run(load, 2, ep):
        assert bias_LE.flatten().tolist() == list(range(8))
        assert (steps_done, samples_seen) == (3, 12)
