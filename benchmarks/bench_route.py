"""Time routing and grouping beside plain torch and triton_kernels, in the same run.

Device times come from a CUDA graph that makes the same call on several buffers, which together
are larger than the cache, so that logits come from memory as in training. ``eager_ms`` is the time
of one call from Python when nothing else runs, launches included. The floor is the bytes that must
move over the rate at which this machine copies 1 GiB, measured in the same run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from common import machine
from moe_kernels import route
from moe_kernels.routing import group_rows_and_tiles
from torch import Tensor

OPS = torch.ops.moe_kernels
BLOCK_N = 128


class Shape(NamedTuple):
    """One case: T tokens choose K of E experts."""

    T: int
    E: int
    K: int


SMOKE = [Shape(64, 8, 2)]
CPU = [Shape(4096, 64, 8)]
GPU = [
    Shape(32768, 128, 8),
    Shape(32768, 64, 8),
    Shape(32768, 256, 8),
    Shape(32768, 32, 4),
    Shape(32768, 1024, 16),
    Shape(32768, 128, 128),
    Shape(1024, 128, 8),
    Shape(128, 128, 8),
]
DATA = ("uniform", "zipf", "same")


def eager_milliseconds(function: Callable[[], object], repeat: int) -> float:
    """Return the median time of a call, after two that warm up."""
    cuda = torch.cuda.is_available()
    times = []
    for _ in range(repeat + 2):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def device_milliseconds(calls: Sequence[Callable[[], object]], repeat: int) -> float | str:
    """Return the median time of a call within a graph of all of them, or why there is none."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]  # buffers of their own for each
    except RuntimeError as error:
        torch.cuda.synchronize()
        return f"no graph: {str(error).splitlines()[0]}"
    times = []
    for _ in range(repeat + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    del kept
    return statistics.median(times[2:])


def launches(call: Callable[[], object]) -> int:
    """Count the kernels and memory operations of a call."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA, activity.CPU]) as profile:
        call()
        torch.cuda.synchronize()
    kinds = [event.device_type for event in profile.events()]
    return kinds.count(torch.autograd.DeviceType.CUDA)


def copy_rate() -> float:
    """Return the bytes a second, read and written, at which memory is copied."""
    x = torch.empty(2**28, device="cuda")
    y = torch.empty_like(x)
    milliseconds = device_milliseconds([lambda: y.copy_(x)], 10)
    assert isinstance(milliseconds, float)
    return 2 * x.numel() * 4 / milliseconds * 1e3


def logits_of(shape: Shape, data: str, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Return logits whose top K are spread evenly, by Zipf's law (exponent 1), or all the same."""
    options = {"device": device, "generator": torch.Generator(device).manual_seed(seed)}
    if data == "same":
        return torch.linspace(1, 0, shape.E, device=device).repeat(shape.T, 1).to(dtype)
    noise_TE = torch.rand(shape.T, shape.E, **options).log().neg().log().neg()  # Gumbel
    if data == "zipf":
        noise_TE = noise_TE - torch.arange(1, shape.E + 1, device=device).log()
    return noise_TE.to(dtype)


def plain_route(logits_TE: Tensor, K: int) -> tuple[Tensor, Tensor]:
    score_TE = logits_TE.float().softmax(1)
    weight_TK, expert_TK = score_TE.topk(K, 1)
    return weight_TK / weight_TK.sum(1, keepdim=True), expert_TK


def plain_group(expert_TK: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    sorted_N, slot_of_row_N = expert_TK.flatten().sort(stable=True)
    row_of_slot_N = torch.empty_like(slot_of_row_N)
    row_of_slot_N[slot_of_row_N] = torch.arange(len(sorted_N), device=sorted_N.device)
    bounds_E1 = torch.arange(E + 1, device=sorted_N.device)
    return torch.searchsorted(sorted_N, bounds_E1), slot_of_row_N, row_of_slot_N


def parts(logits_TE: Tensor, shape: Shape) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return for each part the bytes that must move, and the call."""
    T, E, K = shape
    args = (K, "softmax", True, None, 1, 1, 1.0, None)
    weight_TK, expert_TK, score_TE, _ = OPS.route(logits_TE, *args)
    plain_TK = plain_route(logits_TE, K)[1]
    row = logits_TE.element_size() * T * E
    slot = 4 * T * K
    routed, grouped = row + 4 * T * E + 2 * slot, 4 * slot
    back = (weight_TK, score_TE, logits_TE, expert_TK, *args[1:3], 1.0)

    def both() -> object:
        ids_TK = OPS.route(logits_TE, *args)[1]
        return group_rows_and_tiles(ids_TK, E, BLOCK_N)

    def plain_both() -> object:
        return plain_group(plain_route(logits_TE, K)[1], E)

    return {
        "route": (routed, lambda: OPS.route(logits_TE, *args)),
        "group and tiles": (grouped, lambda: group_rows_and_tiles(expert_TK, E, BLOCK_N)),
        "route, group and tiles": (routed + grouped, both),
        "route backward": (2 * row + 4 * T * E + 2 * slot, lambda: OPS.route_backward(*back)),
        "torch: softmax, topk": (routed, lambda: plain_route(logits_TE, K)),
        "torch: sort chain": (grouped, lambda: plain_group(plain_TK, E)),
        "torch: both": (routed + grouped, plain_both),
        **peer(logits_TE, K, routed + grouped),
    }


def peer(logits_TE: Tensor, K: int, moved: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return the routing of triton_kernels, if it is installed and has one."""
    try:
        from triton_kernels.routing import routing  # noqa: PLC0415 - a peer, not a dependency
    except ImportError:
        return {}

    def call() -> object:
        return routing(logits_TE, K)

    return {"triton_kernels: routing": (moved, call)}


def check(logits_TE: Tensor, shape: Shape) -> None:
    """Raise unless both ways of routing and grouping agree; random logits have no ties."""
    if logits_TE.dtype == torch.float32:
        routing = route(logits_TE, shape.K, renormalize=True)
        weight_TK, expert_TK = plain_route(logits_TE, shape.K)
        assert (routing.expert_TK == expert_TK).float().mean() > 1 - 1e-4
        torch.testing.assert_close(routing.weight_TK, weight_TK, rtol=1e-4, atol=1e-5)
        groups, _ = group_rows_and_tiles(routing.expert_TK, shape.E, BLOCK_N)
        want = plain_group(routing.expert_TK, shape.E)
        assert all(torch.equal(g.flatten(), w.int()) for g, w in zip(groups, want, strict=True))


def measure(shape: Shape, data: str, dtype: torch.dtype, rate: float | None, repeat: int):
    """Yield a row for each part."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    size = shape.T * shape.E * 4
    buffers = max(2, min(32, 2**28 // max(size, 1))) if cuda else 1
    logits = [logits_of(shape, data, dtype, device, seed) for seed in range(buffers)]
    check(logits[0], shape)
    every = [parts(logits_TE, shape) for logits_TE in logits]
    for name, (moved, call) in every[0].items():
        row = {"what": name, **shape._asdict(), "data": data}
        row |= {"dtype": str(dtype).removeprefix("torch.")}
        try:
            row["eager_ms"] = round(eager_milliseconds(call, repeat), 4)
            if cuda:
                row["launches"] = launches(call)
                spent = device_milliseconds([case[name][1] for case in every], repeat)
                row["device_ms"] = round(spent, 4) if isinstance(spent, float) else spent
                if rate and isinstance(spent, float):
                    floor = moved / rate * 1e3
                    row |= {"floor_ms": round(floor, 4), "of_floor": round(floor / spent, 3)}
        except Exception as error:  # a peer may refuse a shape in its own way
            if not name.startswith("triton_kernels"):
                raise
            row["skipped"] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        yield row


def sweep(shape: Shape, dtype: torch.dtype, repeat: int):
    """Yield the device times of every way to spread rows and slots."""
    from moe_kernels.routing.choice.kernel import (  # noqa: PLC0415 - triton is optional
        Rows,
        route_backward_triton,
        route_triton,
    )
    from moe_kernels.routing.groups.kernel import Blocks, group_rows_triton  # noqa: PLC0415

    _, E, K = shape
    args = (K, "softmax", True, None, 1, 1, 1.0, None)
    logits = [logits_of(shape, "uniform", dtype, "cuda", seed) for seed in range(8)]
    ids = [OPS.route(x, *args)[:2] for x in logits]
    for t, warps in product((1, 2, 4, 8, 16, 32), (1, 2, 4)):
        rows = Rows(t, warps)
        if not 32 <= t * E <= 2**14:
            continue
        forward = [lambda x=x, r=rows: route_triton(x, *args, rows=r) for x in logits]
        backward = [
            lambda x=x, w=w, i=i, r=rows: route_backward_triton(
                w, None, x, i, "softmax", True, 1.0, rows=r
            )
            for x, (w, i) in zip(logits, ids, strict=True)
        ]
        yield {
            "sweep": "route", **shape._asdict(), **rows._asdict(),
            "forward_ms": device_milliseconds(forward, repeat),
            "backward_ms": device_milliseconds(backward, repeat),
        }  # fmt: skip
    for (n, warps), most, scan in product(
        ((64, 2), (64, 4), (128, 4), (128, 8), (256, 4), (256, 8)), (1024, 2048, 4096), (256, 1024)
    ):
        cut = Blocks(n, most, scan, warps, 8 if scan == 1024 else 4)
        calls = [lambda i=i, c=cut: group_rows_triton(i, E, BLOCK_N, c) for _, i in ids]
        spent = device_milliseconds(calls, repeat)
        yield {"sweep": "group", **shape._asdict(), **cut._asdict(), "device_ms": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one small shape, twice")
    parser.add_argument("--shape", action="append", help="T,E,K; any number of times")
    parser.add_argument("--sweep", action="store_true", help="try every launch; needs a GPU")
    parser.add_argument("--out", type=Path, help="also write everything here, as JSON")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if args.sweep and not cuda:
        parser.error("--sweep needs a CUDA device, and torch sees none")
    shapes = SMOKE if args.smoke else GPU if cuda else CPU
    if args.shape:
        shapes = [Shape(*map(int, text.split(","))) for text in args.shape]
    where, repeat = machine(), 2 if args.smoke else 20
    rate = copy_rate() if cuda else None
    if rate:
        where["copy_tb_per_s"] = f"{rate / 1e12:.2f}"
    print(json.dumps(where))
    rows = []
    for shape, dtype in product(shapes, (torch.float32, torch.bfloat16)):
        for data in DATA if shape == shapes[0] and dtype == torch.float32 else DATA[:1]:
            for row in measure(shape, data, dtype, rate, repeat):
                print(json.dumps(row), flush=True)
                rows.append(row)
        if args.sweep and dtype == torch.float32:
            for row in sweep(shape, dtype, repeat):
                print(json.dumps(row), flush=True)
                rows.append(row)
    if args.out:
        args.out.write_text(json.dumps({"machine": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
