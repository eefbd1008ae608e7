"""Train a small pipeline on NCCL ranks, one GPU each; every rank checks its gradients.

torchrun --standalone --nproc-per-node 2 two_gpus.py
"""

import os
import sys

import torch
import torch.distributed as dist
from moe_parallel import (
    AdamWConfig,
    Gradients,
    Mesh,
    ParamSpec,
    Pipeline,
    ShardedAdamW,
    StageError,
    make_schedule,
    plan_mesh,
    split_linears,
)
from torch import nn


class Stage(nn.Module):
    def __init__(self, number: int, last: bool):
        super().__init__()
        torch.manual_seed(number)
        self.linear, self.last, self.fault = nn.Linear(64, 64), last, None

    def forward(self, x, micro):
        if micro is self.fault:
            raise ValueError("bad luck")
        y = torch.tanh(self.linear(micro if x is None else x))
        return y.square().sum() if self.last else y


def alone(num_stages: int, micros: list) -> dict[int, list]:
    stages = [Stage(i, i == num_stages - 1).cuda() for i in range(num_stages)]
    for stage in stages:
        split_linears(stage)
    for micro in micros:
        x = None
        for stage in stages:
            x = stage(x, micro)
        x.backward()
    return {i: [p.grad for p in stage.parameters()] for i, stage in enumerate(stages)}


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    mesh = Mesh.create(plan_mesh(world, pp=world))
    for name in ("1f1b", "interleaved", "zbv"):
        plan = make_schedule(name, world, 2 * world)
        last = plan.num_stages - 1
        stages = {i: Stage(i, i == last).cuda() for i in plan.stages_of(mesh.pp_rank)}
        for stage in stages.values():
            split_linears(stage)
        target = Gradients(
            {f"{i}.{n}": p for i, stage in stages.items() for n, p in stage.named_parameters()}
        )
        pipeline = Pipeline(stages, mesh, target, schedule=name)
        generator = torch.Generator().manual_seed(0)
        for step in range(3):  # lengths change within a step and between steps
            micros = [
                torch.randn(8 + 4 * step + m, 64, generator=generator).cuda()
                for m in range(2 * world)
            ]
            target.zero()
            pipeline.step(micros)
            want = alone(plan.num_stages, micros)
            for i, stage in stages.items():
                for (n, _), grad in zip(stage.named_parameters(), want[i], strict=True):
                    got = target.main_grads[f"{i}.{n}"]
                    torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-4)
        if 0 in stages:
            stages[0].fault = micros[1]
        try:
            pipeline.step(micros)
        except StageError as error:
            if (error.stage, error.micro) != (0, 1):
                raise
        else:
            raise AssertionError("no rank was told of the exception")
        sys.stdout.write(f"rank {rank}: {name} ok\n")
    optimize(world)
    sys.stdout.write(f"rank {rank}: all ok\n")
    dist.destroy_process_group()


def optimize(world: int) -> None:
    """Overlapped reductions of both wires leave replicas equal, and nearly the same."""
    mesh, results = Mesh.create(plan_mesh(world)), []
    for wire in ("float32", "bfloat16"):
        torch.manual_seed(0)
        blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda().bfloat16()
        specs = [ParamSpec(n, p, False, True) for n, p in blocks.named_parameters()]
        optimizer = ShardedAdamW(
            specs, mesh, AdamWConfig(lr=1e-2), 1, bucket_elements=5000, wire=wire
        )
        optimizer.overlap(list(blocks))
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + mesh.rank)
            x = torch.randn(16, 64, generator=generator).cuda().bfloat16()
            with optimizer.overlapped():
                blocks(x).float().square().sum().backward()
            stats = optimizer.step()
            if stats.skipped or stats.desynced:
                raise AssertionError(f"step {step}: {stats}")
        optimizer.synchronize()
        flat = torch.cat([p.detach().float().flatten() for p in blocks.parameters()])
        others = [torch.empty_like(flat) for _ in range(world)]
        dist.all_gather(others, flat)
        for other in others:
            torch.testing.assert_close(other, flat, rtol=0, atol=0)
        results.append(flat)
    torch.testing.assert_close(*results, rtol=0.05, atol=0.02)


if __name__ == "__main__":
    main()
