"""Count the bytes that a training step moves: resident experts beside FSDP2, on gloo.

The same model, the same tokens a step, cut into microbatches of different size. Counted at torch's
own operators: the tensor that a collective works on, times ``(W - 1) / W``, which is what leaves
or reaches a rank. FSDP2 (``fully_shard`` per block, bfloat16 parameters, float32 reduction) gathers
every parameter twice a microbatch and reduces once: 8 bytes a parameter and microbatch. Resident
parameters move once a step: 6 bytes each (float32 gradient, bfloat16 parameter), experts only among
their replicas; what moves for each token is its rows, four times: dispatch and combine, forward
and backward.
"""

import argparse
import json
import os
import socket
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import machine, write
from moe_dispatch import make_dispatcher
from moe_kernels import grouped_mlp, route
from moe_parallel import AdamWConfig, Mesh, ParamSpec, ShardedAdamW, plan_mesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

WORLD, LAYERS, D, HIDDEN, E, K = 4, 2, 64, 128, 8, 2


class CountBytes(TorchDispatchMode):
    """Adds up the largest tensor of each collective, by the name of the collective."""

    def __init__(self):
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("c10d."):
            name = str(function).split(".")[1]
            self.bytes[name] += max((t.nbytes for t in tensors(args)), default=0)
        return function(*args, **(kwargs or {}))


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


class Block(nn.Module):
    def __init__(self, dispatcher, local_experts: int, dtype: torch.dtype):
        super().__init__()
        self.dispatcher = dispatcher
        self.dense = nn.Linear(D, D, bias=False, dtype=dtype)
        self.router = nn.Linear(D, E, bias=False, dtype=dtype)
        self.up = nn.Parameter(torch.randn(local_experts, 2 * HIDDEN, D, dtype=dtype) * 0.1)
        self.down = nn.Parameter(torch.randn(local_experts, D, HIDDEN, dtype=dtype) * 0.1)

    def forward(self, x_TD):
        x_TD = x_TD + self.dense(x_TD)
        sent = self.dispatcher.dispatch(x_TD, route(self.router(x_TD).float(), K))
        y_RD = grouped_mlp(sent.x_RD, self.up, self.down, sent.offsets_e1)
        return x_TD + self.dispatcher.combine(y_RD, sent)


def resident(rank: int, tokens: int, micros: int) -> Counter:
    mesh = Mesh.create(plan_mesh(WORLD, ep=WORLD, num_experts=E))
    dispatcher = make_dispatcher(E, mesh.ep_group)
    blocks = nn.Sequential(*(Block(dispatcher, E // WORLD, torch.bfloat16) for _ in range(LAYERS)))
    specs = [ParamSpec(n, p, p.ndim == 3, True) for n, p in blocks.named_parameters()]
    optimizer = ShardedAdamW(specs, mesh, AdamWConfig(lr=1e-3), E)
    generator = torch.Generator().manual_seed(rank)
    with CountBytes() as counted:
        for _ in range(micros):
            x_TD = torch.randn(tokens, D, generator=generator).bfloat16().requires_grad_()
            blocks(x_TD).float().square().sum().backward()
            optimizer.accumulate()
        optimizer.step()
    return counted.bytes


def fsdp(rank: int, tokens: int, micros: int) -> Counter:
    mesh = DeviceMesh("cpu", list(range(WORLD)))
    blocks = nn.Sequential(*(Block(make_dispatcher(E), E, torch.float32) for _ in range(LAYERS)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(blocks, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(blocks.parameters())
    generator = torch.Generator().manual_seed(rank)
    with CountBytes() as counted:
        for _ in range(micros):
            x_TD = torch.randn(tokens, D, generator=generator).bfloat16().requires_grad_()
            blocks(x_TD).float().square().sum().backward()
        optimizer.step()
    return counted.bytes


def run(rank: int, port: int, sizes: list[int], total: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    rows = []
    for tokens in sizes:
        counts = {f.__name__: f(rank, tokens, total // tokens) for f in (resident, fsdp)}
        rows.append(row(tokens, total, counts))
    if rank == 0:
        Path(path).write_text(json.dumps(rows))
    dist.destroy_process_group()


def row(tokens: int, total: int, counts: dict[str, Counter]) -> dict:
    """Return bytes a token of each, and what the formulas say."""
    dense = LAYERS * (D * D + E * D)
    experts = LAYERS * E * 3 * D * HIDDEN
    micros, leaves = total // tokens, (WORLD - 1) / WORLD
    wire = {name: leaves * sum(count.values()) for name, count in counts.items()}
    exchanged = sum(n for name, n in counts["resident"].items() if "alltoall" in name)
    return {
        "tokens_per_microbatch": tokens,
        "microbatches": micros,
        "resident_bytes_per_token": round(wire["resident"] / total, 1),
        "of_these_rows": round(leaves * exchanged / total, 1),
        "fsdp_bytes_per_token": round(wire["fsdp"] / total, 1),
        "ratio": round(wire["fsdp"] / wire["resident"], 2),
        # Experts have one replica here, so they are not reduced at all.
        "resident_formula": round(leaves * (6 * dense / total + 4 * LAYERS * K * D * 2), 1),
        "fsdp_formula": round(leaves * 8 * micros * (dense + experts) / total, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two sizes")
    parser.add_argument("--out", type=Path, help="also write everything here, as JSON")
    args = parser.parse_args()
    total = 256 if args.smoke else 4096
    sizes = [128, 256] if args.smoke else [128, 256, 512, 1024, 2048, 4096]
    where = machine()
    print(json.dumps(where))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"bench_parallel_bytes_{os.getpid()}.json"
    mp.spawn(run, args=(port, sizes, total, str(path)), nprocs=WORLD)
    rows = json.loads(path.read_text())
    path.unlink()
    for found in rows:
        print(json.dumps(found))
    write(rows, where, args.out)


if __name__ == "__main__":
    main()
