"""Try and time moe-dispatch on two GPUs of one host, one process each.

    python benchmarks/two_gpus.py --out results.json [--only NAME ...] [--wheels DIR]

Each section runs in processes of its own with a time limit; what failed is said, and the rest goes
on. JSON at the end. GB/s count the bytes that cross between the GPUs in one direction.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_dispatch import check_laws, trip_through_graph
from dispatch_common import ROOT, child_environment, machine, milliseconds, run_ranks, run_section
from dispatch_speed import go_back, random_weights
from moe_dispatch import (
    AllToAllDispatcher,
    PeerError,
    RowPlan,
    apply_experts,
    open_heap,
)
from moe_dispatch.heaps import stop_nvshmem
from moe_dispatch.heaps.cuda_peer import as_tensor
from moe_dispatch.rowwise import Channel, RowwiseDispatcher, launch, warm_up
from moe_dispatch.rowwise import functions as f
from moe_dispatch.testing import DispatchCase, Trip, plan_for, travel
from moe_kernels import Routing, dequantize, expert_mlp, quantize
from torch import Tensor

SCRIPT = str(Path(__file__).resolve())
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Here:
    """This process.

    Attributes:
        rank: Its rank, and its GPU.
        gloo: Both ranks.
        nccl: Both ranks.
        end: When it has to be done, by ``time.monotonic``.
    """

    rank: int
    gloo: Any
    nccl: Any
    end: float

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank)

    def together(self) -> None:
        """Let both ranks begin at once."""
        torch.cuda.synchronize()
        dist.barrier(self.gloo)

    def worst(self, value: float) -> float:
        """Return the larger of both ranks' values."""
        values: list[Any] = [None, None]
        dist.all_gather_object(values, value, group=self.gloo)
        return max(values)

    def late(self) -> bool:
        """Tell whether there is no time left; both ranks say the same."""
        return self.worst(time.monotonic() - self.end) > 0


def laws(kind: Any, here: Here) -> Rows:
    """Every variant, forward and backward, both ranks; then MXFP8 and a CUDA graph."""

    def run(case: DispatchCase, **options: Any) -> list[Trip]:
        plan = plan_for(case, **options)
        warm_up(plan, here.device)
        heap = open_heap(plan.heap_bytes, here.gloo, kind=kind)
        with RowwiseDispatcher(plan, heap, deadline=20.0) as dispatcher:
            trip = travel(dispatcher, case, device=here.device)
            dispatcher.check()
        trips: list[Any] = [None, None]
        dist.all_gather_object(trips, trip, group=here.gloo)
        return trips

    rows = [{**row, "heap": kind} for row in check_laws(run, 2)]
    case = DispatchCase(4, 2, 256, (300, 211), hot_experts=8, dtype="bfloat16")
    plan = plan_for(case, wire="mxfp8")
    warm_up(plan, here.device)
    with RowwiseDispatcher(plan, open_heap(plan.heap_bytes, here.gloo, kind=kind)) as dispatcher:
        with torch.no_grad():
            trip = travel_forward(dispatcher, case, here)
        dispatcher.check()
    rows.append({"laws": "mxfp8 rows are those of quantize", "heap": kind, "ok": trip})
    plan = plan_for(case)
    warm_up(plan, here.device)
    with RowwiseDispatcher(
        plan, open_heap(plan.heap_bytes, here.gloo, kind=kind), deadline=20.0
    ) as dispatcher:
        rows.append({"heap": kind, **trip_through_graph(dispatcher, case, here.rank, replays=5)})
    if kind == "nvshmem":
        stop_nvshmem()
    return rows


def travel_forward(dispatcher: RowwiseDispatcher, case: DispatchCase, here: Here) -> bool:
    """Tell whether rows that came in MXFP8 are the rounded tokens, bit for bit."""
    routing = case.routing(here.rank)
    on_gpu = Routing(*(tensor.to(here.device) for tensor in routing))
    sent = dispatcher.dispatch(case.tokens(here.rank).to(here.device), on_gpu)
    expert_MK = torch.cat([case.routing(w).expert_TK for w in range(2)])
    x_MD = torch.cat([dequantize(quantize(case.tokens(w))).bfloat16() for w in range(2)])
    token_R = torch.cat([(expert_MK == i).nonzero()[:, 0] for i in dispatcher.local_experts])
    same = torch.equal(sent.x_RD[: len(token_R)].cpu(), x_MD[token_R])
    dispatcher.combine(sent.x_RD, sent)
    return same


def draw(T: int, D: int, E: int, K: int, routing: str, here: Here) -> tuple[Tensor, Routing]:
    """Return tokens and a routing: experts all alike, or popular by Zipf's law (exponent 1)."""
    generator = torch.Generator(here.device).manual_seed(here.rank)
    options: dict[str, Any] = {"device": here.device, "generator": generator}
    x_TD = torch.randn(T, D, **options).bfloat16()
    score_TE = torch.rand(T, E, **options).log().neg()  # Gumbel's trick without the outer log
    if routing == "zipf":
        order_E = torch.randperm(E, device=here.device, generator=torch.Generator(
            here.device).manual_seed(9))  # fmt: skip
        score_TE = score_TE * (order_E + 1)
    expert_TK = score_TE.topk(K, dim=1, largest=False).indices.int()
    weight_TK = torch.rand(T, K, **options)
    bad = torch.zeros((), dtype=torch.int32, device=here.device)
    return x_TD, Routing(weight_TK, expert_TK, score_TE, bad)


def copy_engine(here: Here, num_bytes: int = 1 << 28) -> float:
    """Return GB/s of a plain copy into the other GPU's memory, both ways at once."""
    heap = open_heap(num_bytes, here.gloo, kind="cuda_peer")
    peer = as_tensor(int(heap.bases_W[1 - here.rank]), num_bytes, here.device)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=here.device)
    here.together()
    ms = here.worst(milliseconds(partial(peer.copy_, source)))
    heap.close()
    return num_bytes / ms / 1e6


def bandwidth(here: Here) -> Rows:
    """Put and pull alone beside the copy engine; dispatch and combine beside NCCL."""
    rows: Rows = []
    peak = copy_engine(here)
    settings = [
        (T, D, E, routing, dedup)
        for routing in ("uniform", "zipf")
        for E in (64, 128)
        for T in (8192, 128, 4096, 32768)
        for D in (4096, 2048, 7168)
        for dedup in (False, True)
    ]
    for T, D, E, routing, dedup in settings:
        if here.late():
            rows.append({"not run": [T, D, E, routing, dedup]})
            continue
        rows.append(one_exchange(T, D, E, routing, dedup, peak, here))
    return rows


def one_exchange(
    T: int, D: int, E: int, routing_name: str, dedup: bool, peak: float, here: Here
) -> dict[str, Any]:
    K = 8
    x_TD, routing = draw(T, D, E, K, routing_name, here)
    plan = RowPlan(
        world_size=2, num_experts=E, max_tokens=T, top_k=K, dim=D, dedup=dedup,
        overflow="capacity", capacity_factor=1.3 if routing_name == "uniform" else 2.0,
    )  # fmt: skip
    heap = open_heap(plan.heap_bytes, here.gloo, kind="cuda_peer")
    channel = Channel(plan, heap, deadline=20.0)
    weight_TK = routing.weight_TK
    with torch.no_grad():
        slots = f.meet(channel, routing.expert_TK)
        x_RD, arrived = f.send_tokens(channel, x_TD, weight_TK, slots)
        f.bring_results(channel, x_RD, slots, arrived, weight_TK)
        channel.check()
        crossing = int((slots.to_TK == 1 - here.rank).sum()) * D * 2
        out_TD = torch.empty_like(x_TD)
        put = partial(launch.put, channel, x_TD, slots, weight_TK, x_RD, arrived.weight_R)
        pull = partial(launch.pull, channel, x_RD, None, slots, weight_TK, out_TD, None)
        times = {}
        for name, call in (("put", put), ("pull", pull)):
            here.together()
            times[name] = here.worst(milliseconds(call, 10))

        def both() -> None:
            slots = f.meet(channel, routing.expert_TK)
            rows_RD, arrived = f.send_tokens(channel, x_TD, weight_TK, slots)
            f.bring_results(channel, rows_RD, slots, arrived, weight_TK)

        here.together()
        end_to_end = here.worst(milliseconds(both, 10))
        channel.check()
        dropped = int(channel.state[channel.agree.DROPPED.value])
        channel.close()
        nccl = AllToAllDispatcher(E, here.nccl)

        def exchange() -> None:
            sent = nccl.dispatch(x_TD, routing)
            nccl.combine(sent.x_RD, sent)

        here.together()
        beside = here.worst(milliseconds(exchange, 5))
    put_rate, pull_rate = (crossing / times[name] / 1e6 for name in ("put", "pull"))
    return {
        "T": T, "D": D, "E": E, "K": K, "routing": routing_name, "dedup": dedup,
        "put_ms": round(times["put"], 4), "put_GB_s": round(put_rate, 1),
        "pull_ms": round(times["pull"], 4), "pull_GB_s": round(pull_rate, 1),
        "copy_engine_GB_s": round(peak, 1), "put_of_copy": round(put_rate / peak, 3),
        "pull_of_copy": round(pull_rate / peak, 3),
        "dispatch_combine_ms": round(end_to_end, 4), "nccl_ms": round(beside, 4),
        "over_nccl": round(beside / end_to_end, 2), "dropped": dropped,
    }  # fmt: skip


def layer(here: Here) -> Rows:
    """One layer, forward and backward, on two GPUs beside the fused layer on one."""
    rows: Rows = []
    for name, T, D, F, E, K in (
        ("A", 8192, 2048, 1024, 128, 8), ("d7168", 4096, 7168, 2048, 32, 8),
    ):  # fmt: skip
        x_TD, routing = draw(T, D, E, K, "uniform", here)
        x_TD.requires_grad_()
        routing = routing._replace(weight_TK=routing.weight_TK.requires_grad_())
        dy_TD = torch.randn_like(x_TD)
        w_up, w_down = random_weights(E, 2 * F, D), random_weights(E, D, F)
        leaves = (x_TD, routing.weight_TK, w_up, w_down)
        fused = partial(expert_mlp, x_TD, w_up, w_down, routing.weight_TK, routing.expert_TK)
        here.together()
        alone = here.worst(milliseconds(partial(go_back, fused, leaves, dy_TD), 10))
        mine = slice(here.rank * E // 2, (here.rank + 1) * E // 2)
        up, down = (w.detach()[mine].clone().requires_grad_() for w in (w_up, w_down))
        del w_up, w_down, leaves, fused
        torch.cuda.empty_cache()
        for dedup in (False, True):
            plan = RowPlan(
                world_size=2, num_experts=E, max_tokens=T, top_k=K, dim=D, dedup=dedup,
                overflow="capacity", capacity_factor=1.1,
            )  # fmt: skip
            heap = open_heap(plan.heap_bytes, here.gloo, kind="cuda_peer")
            dispatcher = RowwiseDispatcher(plan, heap, deadline=20.0)
            on_two = partial(apply_experts, dispatcher, x_TD, routing, up, down)
            step = partial(go_back, on_two, (x_TD, routing.weight_TK, up, down), dy_TD)
            step()
            here.together()
            ms = here.worst(milliseconds(step, 10))
            row = {
                "layer": name, "T": T, "D": D, "F": F, "E": E, "K": K, "dedup": dedup,
                "one_gpu_ms": round(alone, 3), "two_gpus_ms": round(ms, 3),
                "of_one_gpu": round(alone / ms, 3),
            }  # fmt: skip
            row.update(overlap(dispatcher, x_TD, routing, up, down, F, here))
            dispatcher.check()
            row["dropped"] = int(dispatcher.num_dropped)
            dispatcher.close()
            rows.append(row)
    return rows


def overlap(
    dispatcher: RowwiseDispatcher, x_TD: Tensor, routing: Routing, up: Tensor, down: Tensor,
    F: int, here: Here,
) -> dict[str, Any]:  # fmt: skip
    """Forward with a shared expert, after the exchange and beside it on another stream."""
    D = x_TD.shape[1]
    shared_up, shared_down = random_weights(2 * F, D), random_weights(D, F)
    side = torch.cuda.Stream()

    def shared() -> Tensor:
        gate, value = torch.nn.functional.linear(x_TD, shared_up).chunk(2, -1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, shared_down)

    def one_after_the_other() -> Tensor:
        return apply_experts(dispatcher, x_TD, routing, up, down) + shared()

    def beside() -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            s_TD = shared()
        y_TD = apply_experts(dispatcher, x_TD, routing, up, down)
        torch.cuda.current_stream().wait_stream(side)
        return y_TD + s_TD

    times = {}
    with torch.no_grad():
        for name, call in (("after", one_after_the_other), ("beside", beside)):
            here.together()
            times[name] = here.worst(milliseconds(call, 10))
    return {
        "forward_shared_after_ms": round(times["after"], 3),
        "forward_shared_beside_ms": round(times["beside"], 3),
    }


def overflow(here: Here) -> Rows:
    """A router that sends everything to one expert: capacity drops, retry loses nothing."""
    T, D, E, K = 4096, 2048, 64, 8
    x_TD, routing = draw(T, D, E, K, "uniform", here)
    k_K = torch.arange(K, dtype=torch.int32, device=here.device)
    routing = routing._replace(expert_TK=k_K.expand(T, K).contiguous())  # all to rank 0
    plan = RowPlan(
        world_size=2, num_experts=E, max_tokens=T, top_k=K, dim=D,
        overflow="capacity", capacity_factor=1.25,
    )  # fmt: skip
    rows: Rows = []
    with RowwiseDispatcher(plan, open_heap(plan.heap_bytes, here.gloo)) as dispatcher:
        with torch.no_grad():
            sent = dispatcher.dispatch(x_TD, routing)
            dispatcher.combine(sent.x_RD, sent)
        dispatcher.check()
        assert sent.kept_TK is not None
        kept = sent.kept_TK.float().mean(0).tolist()
        rows.append(
            {
                "overflow": "capacity", "dropped": int(dispatcher.num_dropped),
                "of": T * K, "share": round(int(dispatcher.num_dropped) / T / K, 4),
                "kept_by_expert": [round(share, 4) for share in kept],
            }
        )  # fmt: skip
    results = []
    for start in (0.25, 64.0):
        current = dataclasses.replace(plan, overflow="retry", capacity_factor=start)
        tries = 0
        while True:
            tries += 1
            with RowwiseDispatcher(current, open_heap(current.heap_bytes, here.gloo)) as dispatcher:
                with torch.no_grad():
                    sent = dispatcher.dispatch(x_TD, routing)
                    y_TD = dispatcher.combine(sent.x_RD, sent)
                dispatcher.check()
                over, most = int(dispatcher.overflow), int(dispatcher.most_rows)
            if not over:
                break
            current = current.grown(most)
        results.append(y_TD)
        rows.append({"overflow": "retry", "capacity_factor": start, "tries": tries})
    rows.append({"retry": "bits of a large buffer", "ok": bool(torch.equal(*results))})
    return rows


def killed(here: Here) -> Rows:
    """Rank 1 is killed between dispatch and combine; rank 0 says so in time."""
    case = DispatchCase(4, 2, 256, (64, 64), hot_experts=8, dtype="bfloat16")
    plan = plan_for(case)
    warm_up(plan, here.device)
    heap = open_heap(plan.heap_bytes, here.gloo, kind="cuda_peer")
    dispatcher = RowwiseDispatcher(plan, heap, deadline=3.0, layer="blocks.5")
    routing = Routing(*(tensor.to(here.device) for tensor in case.routing(here.rank)))
    x_TD = case.tokens(here.rank).to(here.device)
    with torch.no_grad():
        sent = dispatcher.dispatch(x_TD, routing)
        dispatcher.check()
        if here.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        since = time.monotonic()
        try:
            dispatcher.combine(sent.x_RD, sent)
            dispatcher.check()
        except PeerError as error:
            return [
                {
                    "raised": str(error), "names": error.source,
                    "seconds": round(time.monotonic() - since, 2), "deadline": 3.0,
                }
            ]  # fmt: skip
    raise AssertionError("nobody noticed")


SECTIONS: dict[str, tuple[float, Callable[[Here], Rows]]] = {
    "laws": (120, partial(laws, "cuda_peer")),
    "killed": (60, killed),
    "overflow": (60, overflow),
    "layer": (110, layer),
    "bandwidth": (170, bandwidth),
    "nvshmem": (120, partial(laws, "nvshmem")),
}


def on_a_rank(args: argparse.Namespace, limit: float) -> None:
    """Run a section as one of its ranks."""
    end = time.monotonic() + limit - 40
    torch.cuda.set_device(args.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{args.port}", rank=args.rank,
        world_size=2, device_id=torch.device("cuda", args.rank),
    )  # fmt: skip
    gloo, nccl = dist.new_group(backend="gloo"), dist.new_group(backend="nccl")
    found = SECTIONS[args.section][1](Here(args.rank, gloo, nccl, end))
    args.rows.write_text(json.dumps(found))
    torch.cuda.synchronize()
    if args.section != "killed":
        dist.barrier(gloo)  # the first rank serves the store
    sys.stdout.flush()
    os._exit(0)


def kill_one(limit: float) -> Rows:
    """Start both ranks of ``killed``, of which one is meant to die."""
    port = str(29871 + os.getpid() % 1000)
    out = Path(f"/tmp/killed-{os.getpid()}.json")
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "--section", "killed", "--rank", str(rank), "--world", "2",
             "--port", port, "--rows", str(out)]
        )
        for rank in range(2)
    ]  # fmt: skip
    codes = [process.wait(limit) for process in processes]
    assert codes[1] == -signal.SIGKILL, codes
    assert codes[0] == 0, codes
    found = json.loads(out.read_text())
    out.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write everything here, as JSON")
    parser.add_argument("--only", nargs="*", help="run these sections")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl")
    for name, kind in (("section", str), ("rows", Path), ("rank", int), ("world", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        limit = SECTIONS[args.section][0]
        if args.rank is not None:
            on_a_rank(args, limit)
        if args.section == "killed":
            found = kill_one(limit - 10)
        else:
            found = run_ranks(SCRIPT, args.section, 2, limit - 10)[0]
        args.rows.write_text(json.dumps(found))
        return
    if torch.cuda.device_count() < 2:
        raise SystemExit(f"needs two GPUs, sees {torch.cuda.device_count()}")
    environment = child_environment(args.wheels)
    where = machine()
    sys.stdout.write(json.dumps(where) + "\n")
    found = []
    for name in args.only or SECTIONS:
        found.append(run_section(SCRIPT, name, SECTIONS[name][0], environment))
        if args.out:
            args.out.write_text(json.dumps({"machine": where, "sections": found}, indent=1) + "\n")
    bad = [one["section"] for one in found if not one["ok"]]
    sys.stdout.write(f"{len(found) - len(bad)} sections ok, failed: {bad or 'none'}\n")


if __name__ == "__main__":
    main()
