"""Try and time moe-dispatch on one GPU: the laws on every heap, bandwidth, overhead, graphs.

Each section runs in a process of its own with a time limit; what failed is said, and the rest goes
on. JSON at the end. Bytes are counted as read plus written. Without a GPU, ``--smoke`` runs the
kernels in the interpreter on shapes that mean nothing.

    python benchmarks/bench_dispatch.py --out results.json [--only NAME ...] [--wheels DIR]

``--wheels`` (default ``.whl``) may hold ``nvshmem4py_cu13-*.whl`` for machines without it.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dispatch_common import (
    ROOT,
    child_environment,
    join_group,
    machine,
    run_ranks,
    run_section,
)
from dispatch_speed import VARIANTS, bandwidth, launches, overhead, trip_through_graph, tune
from moe_dispatch import open_heap
from moe_dispatch.heaps import Kind, NvshmemHeap, stop_nvshmem
from moe_dispatch.rowwise import RowwiseDispatcher, warm_up
from moe_dispatch.testing import (
    DispatchCase,
    Trip,
    check_dispatcher,
    check_trips,
    plan_for,
    travel,
    travel_on_threads,
)

SCRIPT = str(Path(__file__).resolve())
Section = Callable[[argparse.Namespace], list[dict[str, Any]]]


def law_cases(world_size: int) -> list[Any]:
    """Return cases that break dispatchers, for this many ranks."""

    W = world_size
    tokens = [(7 * w * w + 3 * w) % 61 for w in range(W)]
    cases = [
        DispatchCase(3, 2, 64, tuple(tokens), hot_experts=3 * W, masked=0.1),
        DispatchCase(2, 2, 3, (5, *[0] * (W - 1)), hot_experts=2 * W),
        DispatchCase(2, 1, 16, (9,) * W, hot_experts=1),
        DispatchCase(1, min(2, W), 8, tuple(range(W)), hot_experts=W, masked=1.0),
        DispatchCase(8, 8, 2048, (257,) * W, hot_experts=8 * W),
    ]
    dtypes = ["float32", "float64", "bfloat16", "float32", "bfloat16"]
    return [case._replace(dtype=dtype) for case, dtype in zip(cases, dtypes, strict=True)]


def check_laws(run: Callable[..., Any], world_size: int) -> list[dict[str, Any]]:
    """Check every case with every variant; a row for each variant."""

    rows = []
    for name, options in VARIANTS.items():
        since = time.monotonic()
        # All cases once; compiling the kernels of each takes most of the time.
        for case in law_cases(world_size) if not options else law_cases(world_size)[:1]:
            roundings = 1 + options.get("dedup", False)
            check_dispatcher(lambda case, options=options: run(case, **options), case, roundings)
        seconds = round(time.monotonic() - since, 2)
        rows.append({"laws": name, "ranks": world_size, "ok": True, "seconds": seconds})
    return rows


def threads(world_size: int) -> Section:
    def section(_: argparse.Namespace) -> list[dict[str, Any]]:

        return check_laws(
            lambda case, **options: travel_on_threads(case, "cuda", deadline=20.0, **options),
            world_size,
        )

    return section


def sanitized(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Run under compute-sanitizer; see ``main``."""
    case = law_cases(2)[0]
    for options in VARIANTS.values():
        trips = travel_on_threads(case, "cuda", deadline=100.0, **options)
        check_trips(case, trips, 1 + options.get("dedup", False))
    return [{"memcheck": "clean", "ranks": 2}]


def processes(section_name: str, kind: Kind, mapped: bool = True) -> Section:
    """Two processes on one GPU; not mapped, they reach each other by NVSHMEM's calls alone."""

    def section(args: argparse.Namespace) -> list[dict[str, Any]]:
        if args.rank is None:
            return run_ranks(SCRIPT, section_name, 2, limit=args.limit - 10)[0]
        torch.cuda.set_device(0)
        group = join_group(args.rank, args.world, args.port)
        device = torch.device("cuda", 0)

        def open_dispatcher(case: DispatchCase, **options: Any) -> RowwiseDispatcher:
            plan = plan_for(case, staged=not mapped, **options)
            warm_up(plan, "cuda")
            heap = (
                open_heap(plan.heap_bytes, group, kind=kind)
                if mapped
                else NvshmemHeap(group, plan.heap_bytes, device, direct=False)
            )
            return RowwiseDispatcher(plan, heap, deadline=60.0)

        def run(case: DispatchCase, **options: Any) -> list[Trip]:
            with open_dispatcher(case, **options) as dispatcher:
                trip = travel(dispatcher, case, device="cuda")
                dispatcher.check()
            trips: list[Any] = [None] * args.world
            dist.all_gather_object(trips, trip)
            return trips

        if mapped:
            rows = check_laws(run, args.world)
            with open_dispatcher(law_cases(2)[0]) as dispatcher:
                rank = args.rank
                rows.append(trip_through_graph(dispatcher, law_cases(2)[0], rank, replays=5))
        else:
            case = law_cases(2)[0]
            check_dispatcher(run, case)
            rows = [{"laws": "pull, by NVSHMEM calls", "ranks": args.world, "ok": True}]
        if kind == "nvshmem":
            stop_nvshmem()
        dist.barrier()  # the first rank serves the store
        return rows

    return section


def graph(_: argparse.Namespace) -> list[dict[str, Any]]:
    """One rank, so that it also runs where processes cannot share memory."""

    rows = []
    for name, options in VARIANTS.items():
        case = law_cases(1)[0]._replace(tokens_W=(57,))
        plan = plan_for(case, **options)
        with RowwiseDispatcher(plan, open_heap(plan.heap_bytes, device="cuda")) as dispatcher:
            rows.append({"variant": name, **trip_through_graph(dispatcher, case, 0, replays=5)})
    return rows


def smoke(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the laws once in the interpreter."""

    case = DispatchCase(2, 2, 4, (2, 1), hot_experts=4)
    check_dispatcher(travel_on_threads, case)
    return [{"laws": "pull", "ranks": 2, "ok": True, "device": "interpreter"}]


SECTIONS: dict[str, tuple[float, Section]] = {
    "bandwidth": (60, bandwidth),
    "overhead": (90, overhead),
    "graph": (60, graph),
    "launches": (60, launches),
    "threads4": (90, threads(4)),
    "threads8": (120, threads(8)),
    "tune": (40, tune),
    "ipc2": (100, processes("ipc2", "cuda_peer")),
    "nvshmem2": (120, processes("nvshmem2", "nvshmem")),
    "nvshmem2_calls": (150, processes("nvshmem2_calls", "nvshmem", mapped=False)),
    "sanitizer": (150, sanitized),
    "smoke": (120, smoke),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="the interpreter, small shapes")
    parser.add_argument("--out", type=Path, help="also write everything here, as JSON")
    parser.add_argument("--only", nargs="*", help="run these sections")
    parser.add_argument("--together", nargs="*", default=[], help="run these first, all at once")
    parser.add_argument("--limit", type=float, help="seconds of a section, at most")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl")
    for name, kind in (("section", str), ("rows", Path), ("rank", int), ("world", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        limit, section = SECTIONS[args.section]
        args.limit = args.limit or limit
        args.rows.write_text(json.dumps(section(args)))
        sys.stdout.flush()
        os._exit(0)  # threads and groups of a section need no farewell
    everything = [] if args.together else [name for name in SECTIONS if name != "smoke"]
    names = ["smoke"] if args.smoke else args.only or everything
    environment = child_environment(args.wheels)
    if args.smoke:
        environment["TRITON_INTERPRET"] = "1"
    where = machine()
    sys.stdout.write(json.dumps(where) + "\n")
    found: list[dict[str, Any]] = []

    def run(name: str) -> None:
        limit = min(SECTIONS[name][0], args.limit or SECTIONS[name][0])
        prefix: list[str] = []
        if name == "sanitizer":
            tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
            if not Path(tool).exists():
                found.append({"section": name, "ok": False, "code": "no compute-sanitizer here"})
                return
            prefix = [tool, "--tool=memcheck", "--error-exitcode=9"]
        found.append(run_section(SCRIPT, name, limit, environment, prefix))
        if args.out:
            args.out.write_text(json.dumps({"machine": where, "sections": found}, indent=1) + "\n")

    with ThreadPoolExecutor(max(1, len(args.together))) as pool:
        list(pool.map(run, args.together))
    for name in names:
        run(name)
    bad = [one["section"] for one in found if not one["ok"]]
    sys.stdout.write(f"{len(found) - len(bad)} sections ok, failed: {bad or 'none'}\n")
    raise SystemExit(bool(bad) and args.smoke)


if __name__ == "__main__":
    main()
