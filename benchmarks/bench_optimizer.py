"""Time one optimizer step (norm, clip, AdamW, bfloat16 parameters) beside the floor and torch.

The floor is the bytes that must move over the rate of a large copy in the same run: 4 bytes a
parameter for the norm (gradient) and 30 for the update (16 read: gradient, weight, two moments; 14
written: weight, moments, bfloat16 parameter). The peer is ``clip_grad_norm_`` and torch's fused
AdamW on float32 weights, and a copy to bfloat16.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from common import CUDA, DEVICE, copy_bandwidth, machine, milliseconds, write
from moe_parallel import AdamWConfig, Mesh, ParamSpec, ShardedAdamW, plan_mesh, sink_of
from torch.nn import Parameter

BYTES = 34


def shapes(total: int) -> list[tuple[int, ...]]:
    """Return the shapes of a model of about ``total`` elements: matrices, and vectors between."""
    width = 4096 if total >= 1 << 26 else 256
    return [shape for _ in range(total // width**2) for shape in ((width, width), (width,))]


def ours(total: int, bucket_elements: int, repeat: int) -> dict:
    """Time ``ShardedAdamW.step`` with gradients already in the main gradients."""
    specs = [
        ParamSpec(
            f"p{i}",
            Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)),
            is_expert=False,
            weight_decay=len(shape) > 1,
        )
        for i, shape in enumerate(shapes(total))
    ]
    count = sum(spec.parameter.numel() for spec in specs)
    optimizer = ShardedAdamW(
        specs, Mesh.create(plan_mesh(1)), AdamWConfig(lr=1e-3), 1, bucket_elements=bucket_elements
    )
    optimizer.attach_sinks()
    sinks = [sink_of(spec.parameter) for spec in specs]

    def fill(out: torch.Tensor, accumulate: bool) -> None:
        out.fill_(1e-3)

    def keep(out: torch.Tensor, accumulate: bool) -> None:
        """Leave what is there: the gradients of the step before."""

    def step(run=keep) -> None:
        for sink in sinks:
            sink(run)
        optimizer.step()

    step(fill)
    ms = milliseconds(step, repeat)
    if CUDA:
        torch.cuda.set_sync_debug_mode("error")  # raises if the host waits for the device
        step()
        torch.cuda.set_sync_debug_mode("default")
    return {"what": "moe_parallel", "parameters": count, "step_ms": ms}


def theirs(total: int, repeat: int) -> dict:
    """Time what torch offers for the same."""
    weights = [Parameter(torch.zeros(shape, device=DEVICE)) for shape in shapes(total)]
    copies = [weight.detach().bfloat16() for weight in weights]
    decayed, plain = ([w for w in weights if (w.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, weights)

    count = sum(weight.numel() for weight in weights)
    return {"what": "torch", "parameters": count, "step_ms": milliseconds(step, repeat)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small model, twice")
    parser.add_argument("--out", type=Path, help="also write everything here, as JSON")
    args = parser.parse_args()
    total = 1_000_000_000 if CUDA and not args.smoke else 1 << 20
    repeat = 2 if args.smoke else 20
    where = machine()
    print(json.dumps(where))
    bandwidth = copy_bandwidth(2.0 if CUDA else 0.02)
    rows = []
    for what in ("moe_parallel, buckets of 2^25", "moe_parallel, one bucket", "torch"):
        if what == "torch":
            row = theirs(total, repeat)
        else:
            row = ours(total, 1 << 25 if "2^25" in what else 1 << 40, repeat)
        if CUDA:
            torch.cuda.empty_cache()
        rate = BYTES * row["parameters"] / row["step_ms"] / 1e6
        row |= {
            "what": what,
            "step_ms": round(row["step_ms"], 3),
            "ms_for_1e9": round(row["step_ms"] / row["parameters"] * 1e9, 3),
            "gb_per_s": round(rate, 1),
            "copy_gb_per_s": round(bandwidth, 1),
            "share_of_copy": round(rate / bandwidth, 3),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    write(rows, where, args.out)
    if CUDA and not args.smoke:
        best = max(row["share_of_copy"] for row in rows[:2])
        print(f"bar: 0.80 of copy bandwidth; reached: {best}" + " (missed)" * (best < 0.8))
    if not all(math.isfinite(row["step_ms"]) for row in rows):
        raise SystemExit("a time is not finite")


if __name__ == "__main__":
    main()
