"""The same laws on a GPU: the kernel beside the reference, no wait for the device, recomputation.

Bounds are relative to float32: sums of two products and one root, some roundings of 2**-24 each.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from moe_parallel import (
    AdamWConfig,
    Mesh,
    MuonConfig,
    ParamSpec,
    ShardedAdamW,
    plan_mesh,
    recompute,
    replayed,
    split_linears,
)
from moe_parallel.norm import sum_of_squares
from torch import nn
from torch.nn import Parameter

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_elements", [1, 5000, 1 << 25])
def test_the_kernel_is_the_fused_loop_of_the_cpu(dtype, bucket_elements) -> None:
    states = []
    for device in ("cuda", "cpu"):
        generator = torch.Generator().manual_seed(0)
        specs = [
            ParamSpec(
                f"p{i}",
                Parameter(torch.randn(n, generator=generator).to(device, dtype)),
                is_expert=False,
                weight_decay=decay,
            )
            for i, (n, decay) in enumerate([(7, True), (100_003, False), (64, 0.3), (4096, True)])
        ]
        optimizer = ShardedAdamW(
            specs, Mesh.create(plan_mesh(1)), AdamWConfig(lr=0.01, max_norm=2.0), 1,
            bucket_elements=bucket_elements,
        )  # fmt: skip
        for step in range(4):
            for spec in specs:
                grad = torch.randn(spec.parameter.shape, generator=generator)
                if step == 2 and spec.name == "p1":
                    grad[-1] = float("nan")
                spec.parameter.grad = grad.to(device, dtype)
            stats = optimizer.step()
            assert stats.skipped.item() == (step == 2)
        assert optimizer.step_count == 3
        states.append([s.data.cpu() for s in optimizer.shards()])
        for spec, shard in zip(
            specs, (s for s in optimizer.shards() if s.kind == "master"), strict=False
        ):
            assert torch.equal(spec.parameter.detach().flatten(), shard.data.to(dtype))
    for ours, reference in zip(*states, strict=True):
        torch.testing.assert_close(ours, reference, rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("size", [1, 1000, 8192, 8193, 1_000_003])
def test_the_sum_of_squares_is_that_of_float64(size) -> None:
    x_N = torch.randn(size, device="cuda") * 1e20
    want = x_N.double().square().sum().item()
    assert sum_of_squares(x_N).item() == pytest.approx(want, rel=1e-12)
    x_N[-1] = float("inf")
    assert not sum_of_squares(x_N).isfinite()


def test_a_step_waits_for_no_device() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).cuda()
    split_linears(blocks)
    specs = [
        ParamSpec(n, p, False, True, "muon" if p.ndim == 2 and "1" in n else "adamw")
        for n, p in blocks.named_parameters()
    ]
    optimizer = ShardedAdamW(
        specs, Mesh.create(plan_mesh(1)), AdamWConfig(lr=0.1), 1, muon=MuonConfig()
    )
    optimizer.overlap(list(blocks))
    optimizer.attach_sinks()
    x = torch.randn(8, 64, device="cuda")
    veto = torch.zeros((), dtype=torch.bool, device="cuda")
    for step in range(3):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first one compiles
        try:
            with optimizer.overlapped():
                blocks(x).square().sum().backward()
            optimizer.step(veto=veto)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.step_count == 3


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x, how):
        def hidden(x):
            chosen = replayed(lambda: torch.rand(x.shape[0], device=x.device).argsort())
            return F.dropout(F.silu(self.up(F.rms_norm(x, (256,))))[chosen], 0.1)

        if how == "plain":
            return x + self.down(hidden(x))
        if how == "then":
            return x + recompute(hidden, x, then=self.down)
        return recompute(lambda x: x + self.down(hidden(x)), x)


def test_recomputation_changes_no_bit_and_keeps_less() -> None:
    torch.manual_seed(0)
    parts = nn.ModuleList(Part() for _ in range(3)).cuda().bfloat16()
    results, kept = [], []
    for how in ("plain", "then", "block"):
        parts.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = x
        for part in parts:
            y = part(y, how)
        kept.append(torch.cuda.memory_allocated() - before)
        after = torch.rand(3, device="cuda")
        y.float().square().sum().backward()
        results.append([y.detach(), after, x.grad, *(p.grad.clone() for p in parts.parameters())])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)
    assert kept[1] < 0.5 * kept[0]
    assert kept[2] < 0.4 * kept[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_pipelines_and_reductions_run_on_nccl() -> None:
    program = Path(__file__).parent / "programs" / "two_gpus.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(program)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all ok") == 2
