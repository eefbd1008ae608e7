"""Time moe-dispatch on one GPU: the kernels beside a copy, a layer beside the fused layer."""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from dispatch_common import milliseconds
from moe_dispatch import LocalDispatcher, RowPlan, apply_experts, open_heap
from moe_dispatch.rowwise import RowwiseDispatcher, launch
from moe_dispatch.rowwise import functions as f
from moe_dispatch.rowwise.channel import Channel
from moe_dispatch.rowwise.warm import LONG_AGO, Loop
from moe_dispatch.testing import gain_experts
from moe_kernels import Routing, expert_mlp, grouped_mlp
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

VARIANTS: dict[str, dict[str, Any]] = {
    "pull": {},
    "push": {"combine": "push"},
    "dedup": {"dedup": True},
    "dedup push": {"dedup": True, "combine": "push"},
    "capacity": {"overflow": "capacity", "capacity_factor": 64.0},
}
BLOCKS = (512, 1024, 2048, 4096, 8192)


def random_tokens(T: int, D: int, E: int, K: int) -> tuple[Tensor, Routing]:
    """Return tokens that learn and a routing of random experts."""
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "generator": generator}
    x_TD = torch.randn(T, D, **options).bfloat16().requires_grad_()
    score_TE = torch.rand(T, E, **options)
    weight_TK, expert_TK = score_TE.topk(K, dim=1)
    weight_TK = weight_TK.contiguous().requires_grad_()
    bad = torch.zeros((), dtype=torch.int32, device="cuda")
    return x_TD, Routing(weight_TK, expert_TK.int(), score_TE, bad)


def trip_through_graph(dispatcher: Any, case: Any, rank: int, replays: int) -> dict[str, Any]:
    """Capture forward and backward, replay them, compare with eager bit for bit."""

    x_TD = case.tokens(rank).cuda().requires_grad_()
    routing = case.routing(rank)
    weight_TK = routing.weight_TK.cuda().requires_grad_()
    routing = routing._replace(weight_TK=weight_TK, expert_TK=routing.expert_TK.cuda())
    dy_TD = case.gradient(rank).cuda()

    def trip() -> list[torch.Tensor]:
        sent = dispatcher.dispatch(x_TD, routing)
        y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts)
        y_TD = dispatcher.combine(y_RD, sent)
        dx_TD, dweight_TK = torch.autograd.grad(y_TD, (x_TD, weight_TK), dy_TD)
        return [y_TD.detach(), dx_TD, dweight_TK]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            want = [tensor.clone() for tensor in trip()]
        stream.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        trip()
        torch.cuda.set_sync_debug_mode("default")
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            got = trip()
        for _ in range(replays):
            for tensor in got:
                tensor.fill_(float("nan"))
            graph.replay()
        stream.synchronize()
        dispatcher.check()
    same = all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert same, "a replayed graph gives other bits than eager"
    return {"graph": "captured", "replays": replays, "bits": "those of eager", "host_waits": 0}


def launches(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Count kernels and copies of a layer's forward and backward, world 4 and 1."""

    rows = []
    for world_size in (1, 4):
        for name, options in VARIANTS.items():
            plan = RowPlan(
                world_size=world_size, num_experts=16, max_tokens=256, top_k=4, dim=512, **options
            )
            channel = Channel(plan, Loop(plan, torch.device("cuda")))
            channel.views["signals"].fill_(LONG_AGO)
            dispatcher = RowwiseDispatcher.on(channel)
            x_TD, routing = random_tokens(256, 512, 16, 4)
            counts = []
            for _ in range(2):
                with profile(activities=[ProfilerActivity.CUDA]) as forward:
                    sent = dispatcher.dispatch(x_TD, routing)
                    y_TD = dispatcher.combine(sent.x_RD, sent)
                    torch.cuda.synchronize()
                with profile(activities=[ProfilerActivity.CUDA]) as backward:
                    y_TD.backward(y_TD.detach())
                    torch.cuda.synchronize()
                counts = [count_kernels(one) for one in (forward, backward)]
            rows.append(
                {"ranks": world_size, "variant": name, "forward": counts[0], "backward": counts[1]}
            )
    return rows


def count_kernels(profiled: Any) -> int:
    events = profiled.events()
    return sum(1 for e in events if str(e.device_type).endswith("CUDA") and e.device_time > 0)


class Alone(Channel):
    """One rank that takes the way of several."""

    direct = False


def bandwidth(_: argparse.Namespace) -> list[dict[str, Any]]:
    """One rank alone, through the kernels of several: put, take, give and pull beside a copy."""
    shapes = ((8192, 2048), (8192, 4096), (4096, 7168))
    return [row for T, D in shapes for row in kernels_beside_copy(T, D, K=8, E=64)]


def kernels_beside_copy(T: int, D: int, K: int, E: int) -> list[dict[str, Any]]:
    plan = RowPlan(world_size=1, num_experts=E, max_tokens=T, top_k=K, dim=D)
    channel = Alone(plan, open_heap(plan.heap_bytes, device="cuda"))
    x_TD, routing = random_tokens(T, D, E, K)
    x_TD, weight_TK = x_TD.detach(), routing.weight_TK.detach()
    slots = f.meet(channel, routing.expert_TK)
    x_RD, arrived = f.send_tokens(channel, x_TD, weight_TK, slots)
    y_RD, out_TD = torch.empty_like(x_RD), torch.empty_like(x_TD)
    many, few = x_RD.nbytes, x_TD.nbytes
    peak = 2 * many / milliseconds(lambda: y_RD.copy_(x_RD)) / 1e6
    put = partial(launch.put, channel, x_TD, slots, weight_TK, x_RD, arrived.weight_R)
    pull = partial(launch.pull, channel, x_RD, None, slots, weight_TK, out_TD, None)
    take = partial(launch.take, channel, y_RD, arrived.weight_R, slots)
    give = partial(launch.give, channel, x_RD, None, slots)
    default, rows = launch.MAX_BLOCK, []
    for name, moved, call, blocks in (
        ("put", few + many, put, BLOCKS),
        ("pull", few + many, pull, BLOCKS),
        ("take", 2 * many, take, (default,)),
        ("give", 2 * many, give, (default,)),
    ):
        for block in blocks:
            launch.MAX_BLOCK = block
            ms = milliseconds(call)
            launch.MAX_BLOCK = default
            rows.append(
                {
                    "what": name, "T": T, "D": D, "K": K, "block": block,
                    "default": block == default, "ms": round(ms, 4),
                    "GB_s": round(moved / ms / 1e6), "copy_GB_s": round(peak),
                    "of_copy": round(moved / ms / 1e6 / peak, 3),
                }
            )  # fmt: skip
    channel.close()
    return rows


def overhead(_: argparse.Namespace) -> list[dict[str, Any]]:
    """A whole layer, forward and backward, with one rank, beside the fused layer."""
    shapes = ((8192, 2048, 1024, 128, 8), (4096, 7168, 2048, 32, 8))
    return [row for shape in shapes for row in layers_beside_fused(*shape)]


def random_weights(*shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    w = torch.randn(*shape, device="cuda", generator=generator)
    return (w * shape[-1] ** -0.5).bfloat16().requires_grad_()


def layers_beside_fused(T: int, D: int, F: int, E: int, K: int) -> list[dict[str, Any]]:
    x_TD, routing = random_tokens(T, D, E, K)
    w_up, w_down = random_weights(E, 2 * F, D), random_weights(E, D, F)
    dy_TD, leaves = torch.randn_like(x_TD), (x_TD, routing.weight_TK, w_up, w_down)
    plan = RowPlan(world_size=1, num_experts=E, max_tokens=T, top_k=K, dim=D)
    dispatcher = RowwiseDispatcher(plan, open_heap(plan.heap_bytes, device="cuda"))
    local = LocalDispatcher(E)

    def plain() -> Tensor:
        sent = local.dispatch(x_TD, routing)
        return local.combine(grouped_mlp(sent.x_RD, w_up, w_down, sent.offsets_e1), sent)

    layers: dict[str, Callable[[], Tensor]] = {
        "fused": lambda: expert_mlp(x_TD, w_up, w_down, routing.weight_TK, routing.expert_TK),
        "apply_experts, LocalDispatcher": lambda: apply_experts(local, x_TD, routing, w_up, w_down),
        "dispatch and combine, LocalDispatcher": plain,
        "row-wise": lambda: apply_experts(dispatcher, x_TD, routing, w_up, w_down),
    }
    both: dict[str, list[float]] = {name: [] for name in layers}
    forward: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(25):  # turn about, so that a GPU that grows warm or slow does so for all
        order = list(layers) if turn % 2 else list(layers)[::-1]
        for name in order:
            step = partial(go_back, layers[name], leaves, dy_TD)
            both[name].append(milliseconds(step, 1, warm=3 * (not turn)))
            with torch.no_grad():
                forward[name].append(milliseconds(layers[name], 1, warm=3 * (not turn)))
    dispatcher.check()
    dispatcher.close()
    return [
        {
            "layer": name, "T": T, "D": D, "F": F, "E": E, "K": K,
            "forward_backward_ms": round(statistics.median(both[name]), 4),
            "over_fused": over(both[name], both["fused"]),
            "forward_ms": round(statistics.median(forward[name]), 4),
            "forward_over_fused": over(forward[name], forward["fused"]),
        }
        for name in layers
    ]  # fmt: skip


def over(times: list[float], base: list[float]) -> float:
    """Return the median of what each turn took more than the fused layer in the same turn."""
    return round(statistics.median(t / b for t, b in zip(times, base, strict=True)) - 1, 4)


def tune(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Try cache hints and warps of the two kernels that the link waits for."""
    rows = []
    kept = launch.PUT_TUNING, launch.PULL_WARPS
    for T, D in ((8192, 2048), (4096, 7168)):
        plan = RowPlan(world_size=1, num_experts=64, max_tokens=T, top_k=8, dim=D)
        channel = Alone(plan, open_heap(plan.heap_bytes, device="cuda"))
        x_TD, routing = random_tokens(T, D, 64, 8)
        x_TD, weight_TK = x_TD.detach(), routing.weight_TK.detach()
        slots = f.meet(channel, routing.expert_TK)
        x_RD, arrived = f.send_tokens(channel, x_TD, weight_TK, slots)
        out_TD = torch.empty_like(x_TD)
        put = partial(launch.put, channel, x_TD, slots, weight_TK, x_RD, arrived.weight_R)
        pull = partial(launch.pull, channel, x_RD, None, slots, weight_TK, out_TD, None)
        filled = 1e-6 * x_RD.nbytes / milliseconds(lambda x=x_RD: x.fill_(0))
        rate = (x_RD.nbytes + x_TD.nbytes) / 1e6
        for warps in (1, 2, 4, 8):
            row: dict[str, Any] = {"D": D, "warps": warps, "fill_GB_s": round(filled)}
            for cache in ("", ".cs", ".cg", ".wt"):
                launch.PUT_TUNING = (cache, warps)
                row[f"put{cache}"] = round(rate / milliseconds(put))
            launch.PULL_WARPS = warps
            row["pull"] = round(rate / milliseconds(pull))
            rows.append(row)
        launch.PUT_TUNING, launch.PULL_WARPS = kept
        channel.close()
    return rows


def go_back(layer: Callable[[], Tensor], leaves: tuple[Tensor, ...], dy_TD: Tensor) -> None:
    torch.autograd.grad(layer(), leaves, dy_TD)
