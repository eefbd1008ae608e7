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
from dispatch_speed import VARIANTS, bandwidth, launches, overhead, trip_through_graph
from moe_dispatch import open_heap
from moe_dispatch.heaps import stop_nvshmem
from moe_dispatch.rowwise import RowwiseDispatcher, warm_up
from moe_dispatch.testing import (
    DispatchCase,
    Trip,
    check_dispatcher,
    plan_for,
    travel,
    travel_on_threads,
)

SCRIPT = str(Path(__file__).resolve())


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
        for case in law_cases(world_size):
            check_dispatcher(lambda case, options=options: run(case, **options), case)
        seconds = round(time.monotonic() - since, 2)
        rows.append({"laws": name, "ranks": world_size, "ok": True, "seconds": seconds})
    return rows


def threads(world_size: int) -> Callable[[argparse.Namespace], list[dict[str, Any]]]:
    def section(_: argparse.Namespace) -> list[dict[str, Any]]:

        return check_laws(
            lambda case, **options: travel_on_threads(case, "cuda", deadline=20.0, **options),
            world_size,
        )

    return section


def sanitized(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Run under compute-sanitizer; see ``main``."""

    for options in VARIANTS.values():
        case = law_cases(4)[0]
        check_dispatcher(
            lambda case, options=options: travel_on_threads(case, "cuda", deadline=60.0, **options),
            case,
        )
    return [{"memcheck": "clean", "ranks": 4}]


def processes(kind: str) -> Callable[[argparse.Namespace], list[dict[str, Any]]]:
    """Two processes on one GPU."""
    section_name = {"cuda_peer": "ipc2", "nvshmem": "nvshmem2"}[kind]

    def section(args: argparse.Namespace) -> list[dict[str, Any]]:
        if args.rank is None:
            rows = run_ranks(SCRIPT, section_name, 2, limit=args.limit - 10)
            return rows[0]
        torch.cuda.set_device(0)
        group = join_group(args.rank, args.world, args.port)

        def run(case: Any, **options: Any) -> list[Trip]:
            plan = plan_for(case, **options)
            warm_up(plan, "cuda")
            heap = open_heap(plan.heap_bytes, group, kind=kind)
            with RowwiseDispatcher(plan, heap, deadline=20.0) as dispatcher:
                trip = travel(dispatcher, case, device="cuda")
                dispatcher.check()
            trips: list[Any] = [None] * args.world
            dist.all_gather_object(trips, trip)
            return trips

        rows = check_laws(run, args.world)
        rows.append(capture_on_processes(group, kind))
        if kind == "nvshmem":
            stop_nvshmem()
        dist.barrier()  # the first rank serves the store
        return rows

    return section


def capture_on_processes(group: dist.ProcessGroup, kind: str) -> dict[str, Any]:

    case = law_cases(2)[0]
    plan = plan_for(case)
    warm_up(plan, "cuda")
    rank = dist.get_rank(group)
    with RowwiseDispatcher(
        plan, open_heap(plan.heap_bytes, group, kind=kind), deadline=20.0
    ) as dispatcher:
        return trip_through_graph(dispatcher, case, rank, replays=5)


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


SECTIONS: dict[str, tuple[float, Callable[[argparse.Namespace], list[dict[str, Any]]]]] = {
    "bandwidth": (60, bandwidth),
    "overhead": (90, overhead),
    "graph": (60, graph),
    "launches": (60, launches),
    "threads4": (90, threads(4)),
    "threads8": (120, threads(8)),
    "ipc2": (100, processes("cuda_peer")),
    "nvshmem2": (120, processes("nvshmem")),
    "sanitizer": (150, sanitized),
    "smoke": (120, smoke),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="the interpreter, small shapes")
    parser.add_argument("--out", type=Path, help="also write everything here, as JSON")
    parser.add_argument("--only", nargs="*", help="run these sections")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl")
    for name, kind in (("section", str), ("rows", Path), ("rank", int), ("world", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        args.limit, section = SECTIONS[args.section]
        args.rows.write_text(json.dumps(section(args)))
        sys.stdout.flush()
        os._exit(0)  # threads and groups of a section need no farewell
    names = ["smoke"] if args.smoke else args.only or [n for n in SECTIONS if n != "smoke"]
    environment = child_environment(args.wheels)
    if args.smoke:
        environment["TRITON_INTERPRET"] = "1"
    where = machine()
    sys.stdout.write(json.dumps(where) + "\n")
    found = []
    for name in names:
        prefix: list[str] = []
        if name == "sanitizer":
            tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
            if not Path(tool).exists():
                found.append({"section": name, "ok": False, "code": "no compute-sanitizer here"})
                continue
            prefix = [tool, "--tool=memcheck", "--error-exitcode=9"]
        found.append(run_section(SCRIPT, name, SECTIONS[name][0], environment, prefix))
        if args.out:
            args.out.write_text(json.dumps({"machine": where, "sections": found}, indent=1) + "\n")
    bad = [one["section"] for one in found if not one["ok"]]
    sys.stdout.write(f"{len(found) - len(bad)} sections ok, failed: {bad or 'none'}\n")
    raise SystemExit(bool(bad) and args.smoke)


if __name__ == "__main__":
    main()
