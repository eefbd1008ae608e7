"""What the benchmarks share: where they run, how they time, and the layers they time."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


class Shape(NamedTuple):
    """A layer: model dimension, hidden dimension of an expert, experts, routes of a token."""

    D: int
    F: int
    E: int
    K: int


# Qwen3-235B-like is B, OLMoE is C, a fine-grained layer D, a wide one with few routes F.
SHAPES = {
    "A": Shape(2048, 1024, 128, 8),
    "B": Shape(4096, 1536, 128, 8),
    "C": Shape(2048, 1024, 64, 8),
    "D": Shape(2048, 512, 256, 8),
    "F": Shape(2560, 2560, 32, 4),
}


def machine() -> dict[str, str]:
    """Say where, when and on what this ran. ``GIT_COMMIT`` names a tree without history."""
    commit = os.environ.get("GIT_COMMIT") or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": commit or "unknown",
        "device": torch.cuda.get_device_name() if CUDA else f"CPU, {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "command": " ".join(sys.argv),
    }


def milliseconds(function: Callable[[], object], repeat: int, warm_up: int = 2) -> float:
    """Return the median time of a call, by events of the device where there is one.

    Calls are queued without waiting between them, as in training: the host runs ahead, and its
    work counts only where the device waits for it.
    """
    for _ in range(warm_up):
        function()
    if not CUDA:
        times = []
        for _ in range(repeat):
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def copy_bandwidth(gigabytes: float = 2.0) -> float:
    """Return bytes read and written in a second by a large copy, in GB/s."""
    source = torch.empty(int(gigabytes * 1e9), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * gigabytes / milliseconds(lambda: target.copy_(source), 5) * 1e3


def peak_rate() -> float:
    """FLOP/s of a large square product."""
    n = 8192
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / milliseconds(lambda: a @ b, 5) * 1e3


def experts(routing: str, num_tokens: int, E: int, K: int, seed: int = 0) -> Tensor:
    """Return int32 ``expert_TK``.

    Args:
        routing: ``"random"`` (K different experts at random), ``"uniform"`` (forced: counts differ
            by at most one), ``"zipf"`` (Gumbel top-k of the weights 1/rank), ``"one"`` (all tokens
            go to the same K experts).
        num_tokens: T.
        E: Experts.
        K: Routes of a token.
        seed: Of the generator.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)
    if routing == "uniform":
        slot = torch.arange(num_tokens * K, device=DEVICE).view(num_tokens, K)
        return (slot % E).int()
    if routing == "one":
        return torch.arange(K, device=DEVICE).expand(num_tokens, K).int().contiguous()
    noise = torch.rand(num_tokens, E, generator=generator, device=DEVICE)
    scores = -(-noise.log()).log()
    if routing == "zipf":
        scores -= torch.arange(1, E + 1, device=DEVICE).log()
    elif routing != "random":
        raise ValueError(f"routing must be random, uniform, zipf or one, got {routing!r}")
    return scores.topk(K, dim=1).indices.int()


def write(rows: list[dict], where: dict[str, str], path: Path | None) -> None:
    """Write everything as JSON, if asked to."""
    if path:
        path.write_text(json.dumps({"machine": where, "rows": rows}, indent=1) + "\n")
