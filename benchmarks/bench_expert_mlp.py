"""Time a whole MoE layer beside the same layer from torch's grouped_mm, in the same run.

A layer runs from tokens, expert ids and routing weights to tokens: grouping, gather, gate and up
projection, SwiGLU, down projection, weighted combine. FLOPs of T tokens: ``6*T*K*D*F`` forward and
twice that backward. Floor: the larger of FLOPs over the rate of a large matrix product and of bytes
over the rate of a large copy, both measured here, kernel by kernel. Times are medians. A GPU that
has worked for seconds lowers its clock, and what is timed last looks slower: ``--rest`` lets it
stand idle before each measurement, ours and the peer's alike.

    python benchmarks/bench_expert_mlp.py --shapes A,B --routing random,zipf
    python benchmarks/bench_expert_mlp.py --shapes A --tokens 128,1024 --graph
    python benchmarks/bench_expert_mlp.py --layer 2560,1536,8,4
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import (
    CUDA,
    DEVICE,
    SHAPES,
    Shape,
    copy_bandwidth,
    experts,
    machine,
    milliseconds,
    peak_rate,
    write,
)
from moe_kernels import expert_mlp
from torch import Tensor
from torch.nn import functional as F

Layer = Callable[..., Tensor]
MIB = 2**20


def torch_layer(
    x_TD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, weight_TK: Tensor, expert_TK: Tensor
) -> Tensor:
    """The layer in torch: sort, gather, two grouped products with SwiGLU between, scatter-add."""
    E, K = w_down_EDF.shape[0], expert_TK.shape[1]
    flat_N = expert_TK.view(-1)
    order_N = flat_N.argsort(stable=True)
    ends_E = torch.histc(flat_N.float(), bins=E, min=0, max=E - 1).cumsum(0).int()
    token_N1 = (order_N // K)[:, None]
    x_ND = x_TD.gather(0, token_N1.expand(-1, x_TD.shape[1]))
    gate_NF, up_NF = F.grouped_mm(x_ND, w_gate_up_EGD.mT, offs=ends_E).chunk(2, dim=1)
    y_ND = F.grouped_mm(F.silu(gate_NF) * up_NF, w_down_EDF.mT, offs=ends_E)
    weight_N1 = weight_TK.view(-1).index_select(0, order_N)[:, None]
    y_ND = (y_ND.float() * weight_N1).to(x_TD.dtype)
    return torch.zeros_like(x_TD).scatter_add(0, token_N1.expand_as(y_ND), y_ND)


def floors(T: int, shape: Shape, flops: float, bandwidth: float) -> tuple[float, float]:
    """Least milliseconds forward, and forward and backward: each kernel at its own limit."""
    D, H, E, K = shape
    N, w = T * K, E * D * H

    def least(gemm: float, elements: float) -> float:
        return max(2 * gemm * N * D * H / flops, 2 * elements / bandwidth) * 1e3

    rows = N * D
    forward = [
        least(2, rows + 2 * w + 3 * N * H), least(1, N * H + w + rows), least(0, rows + T * D),
    ]  # fmt: skip
    backward = [
        least(1, rows + w + 5 * N * H), least(1, N * H + rows + w),
        least(2, 2 * N * H + rows + 2 * w), least(2, 2 * N * H + 2 * w + rows),
        least(0, rows + T * D),
    ]  # fmt: skip
    return sum(forward), sum(forward) + sum(backward)


class Case:
    """Tensors of a layer, and a step on them."""

    def __init__(self, T: int, shape: Shape, routing: str) -> None:
        D, H, E, K = shape
        torch.manual_seed(0)
        options = {"device": DEVICE, "dtype": torch.bfloat16 if CUDA else torch.float32}
        self.x = torch.randn(T, D, **options).requires_grad_()
        self.w_gate_up = (torch.randn(E, 2 * H, D, **options) * D**-0.5).requires_grad_()
        self.w_down = (torch.randn(E, D, H, **options) * H**-0.5).requires_grad_()
        self.weight = torch.rand(T, K, device=DEVICE).requires_grad_()
        self.leaves = (self.x, self.w_gate_up, self.w_down, self.weight)
        self.expert_TK = experts(routing, T, E, K)
        self.dy = torch.randn(T, D, **options)

    def forward(self, layer: Layer) -> Tensor:
        with torch.no_grad():
            return layer(*self.leaves, self.expert_TK)

    def both(self, layer: Layer) -> tuple[Tensor, ...]:
        y = layer(*self.leaves, self.expert_TK)
        return torch.autograd.grad(y, self.leaves, self.dy)

    def memory(self, layer: Layer) -> tuple[float, float]:
        """MiB saved for backward beside the arguments, and at the peak of a step."""
        if not CUDA:
            return 0.0, 0.0
        before = torch.cuda.memory_allocated()
        y = layer(*self.leaves, self.expert_TK)
        saved = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(y, self.leaves, self.dy)
        del y
        return saved / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


def graphed(function: Callable[[], object]) -> Callable[[], object]:
    """Capture a call in a CUDA graph and return its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def kernels(function: Callable[[], object], calls: int = 3) -> list[tuple[str, float, int]]:
    """Return name, milliseconds and launches of every kernel of a call, the longest first."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - slow to import

    function()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    events = [event for event in record.key_averages() if event.device_time_total > 0]
    events.sort(key=lambda event: -event.device_time_total)
    return [
        (event.key, event.device_time_total / calls / 1e3, event.count // calls) for event in events
    ]


def measure(
    name: str, layer: Layer, case: Case, T: int, shape: Shape, least: tuple[float, float],
    repeat: int, graph: bool, rest: float,
) -> dict:  # fmt: skip
    """Time one layer on one case."""
    D, H, _, K = shape
    wrap = graphed if graph else lambda function: function
    saved, peak = case.memory(layer)
    once_forward, once_both = wrap(lambda: case.forward(layer)), wrap(lambda: case.both(layer))
    time.sleep(rest)
    forward = milliseconds(once_forward, repeat)
    time.sleep(rest)
    both = milliseconds(once_both, repeat)
    flops = 6 * T * K * D * H
    row = {
        "what": name, "T": T, **shape._asdict(),
        "forward_ms": round(forward, 4), "both_ms": round(both, 4),
        "forward_tflops": round(flops / forward / 1e9, 1),
        "both_tflops": round(3 * flops / both / 1e9, 1),
        "forward_of_floor": round(least[0] / forward, 3),
        "both_of_floor": round(least[1] / both, 3),
        "saved_mib": round(saved, 1), "peak_mib": round(peak, 1),
    }  # fmt: skip
    if CUDA and not graph:
        row["forward_launches"] = sum(k[2] for k in kernels(lambda: case.forward(layer)))
        parts = kernels(lambda: case.both(layer))
        row["both_launches"] = sum(k[2] for k in parts)
        row["kernels"] = {}
        for kernel, ms, _ in parts:  # instances of one template count together
            short = kernel[:60]
            row["kernels"][short] = round(row["kernels"].get(short, 0.0) + ms, 4)
    return row


def difference(case: Case) -> float:
    """Largest relative difference between the two layers' results, in norm."""
    pairs = zip(case.both(expert_mlp), case.both(torch_layer), strict=True)
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="A,B,C,D,F" if CUDA else "")
    parser.add_argument("--layer", action="append", default=[], help="another: D,F,E,K")
    parser.add_argument("--tokens", default="32768" if CUDA else "256")
    parser.add_argument("--routing", default="random", help="of random, uniform, zipf, one")
    parser.add_argument("--graph", action="store_true", help="replay CUDA graphs as well")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds idle before each timing")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="one small layer, twice")
    parser.add_argument("--out", type=Path, help="also write everything here, as JSON")
    args = parser.parse_args()
    shapes = [SHAPES[name] for name in args.shapes.split(",") if name]
    shapes += [Shape(*map(int, text.split(","))) for text in args.layer]
    if args.smoke:
        shapes, args.tokens, args.repeat = [Shape(64, 32, 8, 2)], "64", 2
    where = machine()
    flops, bandwidth = (peak_rate(), copy_bandwidth() * 1e9) if CUDA else (1e11, 1e10)
    where |= {"peak_tflops": f"{flops / 1e12:.0f}", "copy_gb_per_s": f"{bandwidth / 1e9:.0f}"}
    print(json.dumps(where), flush=True)
    layers = {"moe_kernels": expert_mlp} | ({} if args.only_ours else {"torch": torch_layer})
    rows = []
    for shape in shapes:
        for T in map(int, args.tokens.split(",")):
            for routing in args.routing.split(","):
                case = Case(T, shape, routing)
                least = floors(T, shape, flops, bandwidth)
                for graph in (False, True) if args.graph else (False,):
                    for name, layer in layers.items():
                        row = measure(
                            name, layer, case, T, shape, least, args.repeat, graph, args.rest
                        )
                        row = {**row, "routing": routing, "graph": graph}
                        if len(layers) > 1:
                            row["difference"] = round(difference(case), 5)
                        print(json.dumps(row), flush=True)
                        rows.append(row)
                del case
                torch.cuda.empty_cache()
    write(rows, where, args.out)


if __name__ == "__main__":
    main()
