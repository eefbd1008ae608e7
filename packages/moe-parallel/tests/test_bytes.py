"""Bytes that ranks exchange in a step, counted at torch's own operators, beside FSDP2's."""

import functools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from moe_parallel import AdamWConfig, Mesh, ParamSpec, ShardedAdamW, plan_mesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

create_mesh = functools.cache(Mesh.create)
D = 64


class CountBytes(TorchDispatchMode):
    """Adds up the largest tensor of each collective: what all ranks of the group hold together."""

    def __init__(self):
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith("c10d."):
            self.bytes[name.split(".")[1]] += max((t.nbytes for t in tensors(args)), default=0)
        return function(*args, **(kwargs or {}))


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def count_ours(group, micros, wire):
    world = dist.get_world_size(group)
    blocks = model().bfloat16()
    specs = [ParamSpec(n, p, False, True) for n, p in blocks.named_parameters()]
    mesh = create_mesh(plan_mesh(world), group=group)
    optimizer = ShardedAdamW(
        specs, mesh, AdamWConfig(lr=0.1), 1, bucket_elements=8 * D * D, wire=wire
    )
    optimizer.overlap(list(blocks))
    for _ in range(2):  # the second step is like all that follow
        with CountBytes() as counted:
            for micro in range(micros):
                loss = blocks(torch.ones(16, D, dtype=torch.bfloat16)).float().square().mean()
                if micro < micros - 1:
                    loss.backward()
                    optimizer.accumulate()
                    continue
                with optimizer.overlapped():
                    loss.backward()
            optimizer.step()
    optimizer.synchronize()
    return per_parameter(counted, blocks)


def count_fsdp(group, micros, sync_last):
    mesh = DeviceMesh.from_group(group, "cpu")
    blocks = model()
    total = sum(p.numel() for p in blocks.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        # FSDP2 keeps its last block gathered by default; here every block is alike.
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(blocks, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(blocks.parameters())
    for _ in range(2):
        with CountBytes() as counted:
            for micro in range(micros):
                if sync_last:
                    blocks.set_requires_gradient_sync(micro == micros - 1)
                blocks(torch.ones(16, D)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: count / total for name, count in counted.bytes.items() if count > 1000}


def per_parameter(counted, blocks):
    total = sum(p.numel() for p in blocks.parameters())
    return {name: count / total for name, count in counted.bytes.items() if count > 1000}


@pytest.mark.parametrize("micros", [1, 4])
@pytest.mark.parametrize(
    ("wire", "reduction", "bytes_each"),
    [("float32", "_reduce_scatter_base_", 4), ("bfloat16", "alltoall_base_", 2)],
)
def test_resident_parameters_move_once_a_step_however_many_microbatches(
    pool, micros, wire, reduction, bytes_each
) -> None:
    """4 or 2 bytes a gradient and 2 a bfloat16 parameter: of these (W - 1) / W over the wire."""
    for counted in pool.run(count_ours, 2, micros, wire):
        assert counted == {reduction: bytes_each, "_allgather_base_": 2}


@pytest.mark.parametrize("micros", [1, 4])
def test_fsdp_moves_them_for_every_microbatch(pool, micros) -> None:
    """Gathered in forward and backward, 2 bytes each, and reduced in float32."""
    for counted in pool.run(count_fsdp, 2, micros, False):
        assert counted == {"_allgather_base_": 4 * micros, "_reduce_scatter_base_": 4 * micros}
    for counted in pool.run(count_fsdp, 2, micros, True):
        assert counted == {"_allgather_base_": 4 * micros, "_reduce_scatter_base_": 4}
