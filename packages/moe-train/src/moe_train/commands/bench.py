"""``moe-train bench``: how fast training steps of a model are here, on random tokens."""

import gc
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from moe_parallel import Mesh, plan_mesh
from numpy.typing import NDArray

from moe_train.commands.options import read_options, say, say_json
from moe_train.commands.start import start
from moe_train.config import RunConfig
from moe_train.config.rules import require_positive
from moe_train.data import Batch
from moe_train.environment import environment
from moe_train.flops import train_flops_per_token
from moe_train.ranks import RankInfo, join, pick_device
from moe_train.trainer import Trainer

NATURAL, FORCED = "natural", "forced uniform"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions(RunConfig):
    """What to time.

    Attributes:
        measured: Steps that are timed, for each routing.
        warmup: Steps before them, in which kernels are compiled and memory is found.
        json: Print JSON.
    """

    measured: int = 10
    warmup: int = 3
    json: bool = False

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        require_positive(measured=self.measured, warmup=self.warmup)


FLAGS = {"": BenchOptions}
EXAMPLES = (
    "moe-train bench                                   # the default model",
    "moe-train bench --config a.toml --train.dtype bfloat16 --train.microbatch-size 4",
    "moe-train bench --nproc 8 --mesh.ep 8 --preset NAME --json",
)


class RandomSequences:
    """Sequences of random tokens, each a function of its number.

    Args:
        vocab_size: V.
        length: S.
    """

    count = 1 << 30

    def __init__(self, vocab_size: int, length: int):
        self.vocab_size, self.length = vocab_size, length

    def order(self, first: int, number: int, seed: int) -> NDArray[np.int64]:
        """Return the numbers of the positions themselves."""
        return np.arange(first, first + number, dtype=np.int64)

    def batch(self, numbers: NDArray[np.int64], device: torch.device | None = None) -> Batch:
        """Return the sequences of these numbers."""
        size = self.length + 1
        rows = [np.random.default_rng(n).integers(0, self.vocab_size, size) for n in numbers]
        tokens_BS = torch.from_numpy(np.stack(rows) if rows else np.zeros((0, size), np.int64))
        tokens_BS = tokens_BS.to(device)
        return Batch(tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous())

    def num_tokens(self, numbers: NDArray[np.int64]) -> int:
        """Return how many tokens these sequences have."""
        return len(numbers) * self.length

    def spread(self, number: int) -> NDArray[np.int64]:
        """Return the first numbers."""
        return np.arange(number, dtype=np.int64)


def main(argv: list[str]) -> int:
    """Time steps with natural and with forced routing, and print both."""
    options = read_options(
        BenchOptions, argv, prog="moe-train bench", examples=EXAMPLES,
        about="Time whole training steps of a model on random tokens, optimizer included: first "
        "as its router routes, then with as many rows forced on each expert. Nothing is saved.",
    ).config  # fmt: skip
    return start("bench", argv, options, _work, _plan)


def _plan(options: RunConfig, world_size: int) -> Any:
    plan = plan_mesh(
        world_size, ep=options.mesh.ep, num_experts=options.model.num_experts,
        nvlink_domain=options.mesh.nvlink_domain,
    )  # fmt: skip
    options.check_batch(plan.dp)
    return plan


def _work(options: BenchOptions, info: RankInfo) -> None:
    plan, device = _plan(options, info.world_size), pick_device(options, info)
    join(info, device)
    mesh = Mesh.create(plan)
    facts = environment(device, info.world_size)
    rows = []
    for name, forced in ((NATURAL, "none"), (FORCED, "uniform")):
        routing = replace(options.routing, forced=forced, replay=None)
        rows.append(measure(name, replace(options, routing=routing), mesh, device))
    if info.rank:
        return
    if options.json:
        say_json({"environment": facts, "rows": rows})
        return
    say(f"{facts['device']}, {facts['ranks']} ranks, {facts['threads']} threads, {facts['date']}")
    say(f"torch {facts['torch']}, triton {facts['triton']}, commit {facts['commit']}")
    say(f"{options.train.dtype}, {options.measured} steps of {rows[0]['tokens']:,} tokens")
    for row in rows:
        say(
            f"{row['routing']:15} {row['tokens_per_second']:12,.0f} tokens/s  "
            f"{row['model_tflops']:10.4g} model TFLOP/s a rank  "
            f"{row['milliseconds']:9.2f} ms a step  {_memory(row)}"
            f"max/mean load {row['imbalance']:.2f}"
        )
    say("random tokens: no figures of learning; forced routing: none of a router either")


def measure(name: str, options: BenchOptions, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """Return what steps of one routing take. A collective call."""
    sequences = RandomSequences(options.model.vocab_size, options.data.sequence_length)
    trainer = Trainer(options, mesh, device, sequences, sequences)
    cuda = device.type == "cuda"
    for _ in range(options.warmup):
        trainer.step()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times, result = [], None
    for _ in range(options.measured):
        _wait(device)
        begin = time.perf_counter()
        result = trainer.step()
        _wait(device)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    tokens = options.train.batch_size * options.data.sequence_length
    flops = train_flops_per_token(options.model, options.data.sequence_length) * tokens
    load_LE = result.load_LE if result is not None else torch.ones(1, 1)
    row = {
        "routing": name,
        "tokens": tokens,
        "milliseconds": seconds * 1e3,
        "fastest_milliseconds": min(times) * 1e3,
        "tokens_per_second": tokens / seconds,
        "model_tflops": flops / seconds / mesh.plan.world_size / 1e12,
        "memory_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "imbalance": float(load_LE.max()) * load_LE.shape[1],
    }
    del trainer, result
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return row


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(row: dict[str, Any]) -> str:
    found = row["memory_bytes"]
    return "" if found is None else f"{found / 2**30:.1f} GiB  "
