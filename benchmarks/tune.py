"""Choose the sizes of the kernels on this GPU and write them as a table.

Every candidate is compiled and checked in processes of its own, against float32 products of
unit-scale data, on rows that leave experts empty and tiles partly filled. What is wrong, or does
not fit, is reported and never timed. Then all that are right run in turns, so that a GPU that grows
hot slows them alike. A candidate's score is its time over the best of its shape, summed over the
shapes.

    python benchmarks/tune.py --out sm_90.toml
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from common import SHAPES, Shape, experts, machine, milliseconds
from moe_kernels import config as table
from moe_kernels.config import Config
from moe_kernels.gemm.kernel import grouped_mm_dw_triton, grouped_mm_triton
from moe_kernels.mlp.kernel import gate_up_triton
from moe_kernels.mxfp8 import MXTensor, dequantize, quantize
from moe_kernels.mxgemm.kernel import scaled_mm_triton
from moe_kernels.mxgemm.native_kernel import native_mm_triton
from moe_kernels.routing.tiles import group_rows_and_tiles
from torch import Tensor

BOUND = 2e-2  # of bfloat16 results against float32 products, relative to their norm


class Layer:
    """Tensors of one layer, and each operation on them."""

    def __init__(self, num_tokens: int, shape: Shape, seed: int = 0, empty: int = 0) -> None:
        D, F, E, K = shape
        torch.manual_seed(seed)
        self.shape = shape
        expert_TK = experts("random", num_tokens, E - empty, K, seed)
        self.groups, _ = group_rows_and_tiles(expert_TK, E, 128)
        N = num_tokens * K
        self.num_rows = N
        half = {"device": "cuda", "dtype": torch.bfloat16}
        self.x, self.dy = torch.randn(num_tokens, D, **half), torch.randn(N, D, **half)
        self.h, self.act = torch.randn(N, 2 * F, **half), torch.randn(N, F, **half)
        self.w_gate_up = torch.randn(E, 2 * F, D, **half) * D**-0.5
        self.w_down = torch.randn(E, D, F, **half) * F**-0.5
        self.weight = torch.rand(num_tokens, K, device="cuda")
        self.tiles = {}
        self.mx = {}
        self.expert_TK = expert_TK

    def run(self, operation: str, config: Config) -> list[Tensor]:
        n = config.block_n
        if operation != "wgrad" and n not in self.tiles:
            self.tiles[n] = group_rows_and_tiles(self.expert_TK, self.shape.E, n)[1]
        offsets, slots, _ = self.groups
        match operation:
            case "forward":
                out = [self.product(self.act, self.w_down, config)]
            case "dgrad":
                out = [self.product(self.h, self.w_gate_up.mT, config)]
            case "wgrad":
                out = [
                    grouped_mm_dw_triton(self.dy, self.h, offsets, config=config),
                    grouped_mm_dw_triton(self.act, self.dy, offsets, config=config),
                ]
            case recipe if recipe in table.SCALED:
                out = self.scaled(recipe, config)
            case "gate_up":
                rows = (slots, self.shape.K)
                out = list(
                    gate_up_triton(self.x, self.w_gate_up, offsets, self.tiles[n], config, *rows)
                )
        return out

    def in_mxfp8(self, recipe: str) -> tuple[MXTensor, MXTensor, MXTensor, MXTensor]:
        """Quantise tokens, activations and weights, once."""
        if recipe not in self.mx:
            tensors = (self.x, self.act, self.w_gate_up, self.w_down)
            self.mx = {recipe: tuple(quantize(t, recipe=recipe) for t in tensors)}
        return self.mx[recipe]

    def scaled(self, recipe: str, config: Config) -> list[Tensor]:
        """The gathered product of a layer in MXFP8 and the other; the other if native."""
        x, act, w_gate_up, w_down = self.in_mxfp8(recipe)
        offsets, slots, _ = self.groups
        more = {"tiles": self.tiles[config.block_n], "config": config}
        if table.has_block_scales(self.x):
            return [native_mm_triton(act, w_down, offsets, recipe, torch.bfloat16, **more)]
        rows = {"slot_of_row_N": slots, "top_k": self.shape.K}
        return [
            scaled_mm_triton(x, w_gate_up, offsets, recipe, torch.bfloat16, **more, **rows),
            scaled_mm_triton(act, w_down, offsets, recipe, torch.bfloat16, **more),
        ]

    def product(self, x: Tensor, w: Tensor, config: Config) -> Tensor:
        return grouped_mm_triton(
            x, w, self.groups.offsets_E1, tiles=self.tiles[config.block_n], config=config
        )

    def reference(self, operation: str) -> list[Tensor]:
        """The same in float32."""
        offsets, slots, _ = self.groups
        ends = offsets.tolist()
        spans = [slice(a, b) for a, b in itertools.pairwise(ends)]

        def product(x: Tensor, w: Tensor) -> Tensor:
            parts = [x[s].float() @ w[e].float().T for e, s in enumerate(spans)]
            return torch.cat(parts)

        def sums(x: Tensor, dy: Tensor) -> Tensor:
            return torch.stack([dy[s].float().T @ x[s].float() for s in spans])

        def swiglu(h: Tensor) -> Tensor:
            gate, up = h.chunk(2, 1)
            return torch.nn.functional.silu(gate) * up

        match operation:
            case "forward":
                return [product(self.act, self.w_down)]
            case "dgrad":
                return [product(self.h, self.w_gate_up.mT)]
            case "wgrad":
                return [sums(self.dy, self.h), sums(self.act, self.dy)]
            case recipe if recipe in table.SCALED:
                x, act, w_gate_up, w_down = (dequantize(t) for t in self.in_mxfp8(recipe))
                down = product(act, w_down)
                if table.has_block_scales(self.x):
                    return [down]
                return [product(x[slots.long() // self.shape.K], w_gate_up), down]
            case _:
                h = product(self.x[slots.long() // self.shape.K], self.w_gate_up)
                return [h, swiglu(h)]


def candidates(operation: str, rows: str) -> Iterator[Config]:
    """What is tried. 128 x 256 is what keeps the tensor cores of Hopper busy from shared memory."""
    names = ("block_n", "block_f", "block_d", "num_warps", "num_stages", "programs_per_sm")

    def config(*sizes: int, super_n: int = 8, halves: bool = False) -> Config:
        return Config(**dict(zip(names, sizes, strict=True)), super_n=super_n, halves=halves)

    if rows == "few":
        for f, d, stages, per_sm in itertools.product((64, 128, 256), (64, 128), (3, 4), (1, 2)):
            if operation == "wgrad":
                if f <= 128:
                    yield config(64, f, d, 4, stages, per_sm)
            elif operation != "gate_up" or f <= 128:
                yield config(64, f, d, 4, stages, per_sm)
        return
    for stages, super_n in itertools.product((3, 4), (4, 8, 16)):
        if operation == "wgrad":
            yield config(64, 128, 256, 8, stages, 1, super_n=super_n)
        elif operation == "gate_up":
            yield config(128, 128, 64, 8, stages, 1, super_n=super_n)
        else:
            yield config(128, 256, 64, 8, stages, 1, super_n=super_n, halves=stages == 4)
    if operation == "wgrad":
        yield config(64, 256, 128, 8, 4, 1)
        yield config(64, 128, 128, 4, 3, 2)
    else:
        yield config(128, 64 if operation == "gate_up" else 128, 64, 4, 3, 2)


def scaled_candidates(recipe: str, rows: str, native: bool) -> Iterator[Config]:
    """What is tried for MXFP8. Promotion keeps two tiles in registers, so its tiles are smaller."""
    d = 128 if native else table.SCALED[recipe] or 128
    for stages, per_sm in itertools.product((3, 4), (1, 2)):
        for f in (128, 256):
            for halves in (False, True):
                if native:
                    sizes = [(128, f, 4), (128, f, 8)]
                elif rows == "few":
                    sizes = [(64, f // 2, 4), (64, f, 4 if f == 128 else 8)]
                else:
                    sizes = [(64, f, 8), (128, f, 8)]
                for n, columns, warps in sizes:
                    yield Config(
                        block_n=n, block_f=columns, block_d=d, num_warps=warps,
                        num_stages=stages, programs_per_sm=per_sm, halves=halves,
                    )  # fmt: skip


def work(wanted: list[tuple[str, str]]) -> list[tuple[str, str, Config]]:
    native = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10
    return [
        (op, rows, config)
        for op, rows in wanted
        for config in (
            scaled_candidates(op, rows, native) if op in table.SCALED else candidates(op, rows)
        )
    ]


def check(index: int, count: int, wanted: list[tuple[str, str]], path: Path) -> None:
    """Compile and check every ``count``-th candidate."""
    layer = Layer(200, Shape(512, 384, 6, 3), empty=2)
    for number, (operation, _, config) in enumerate(work(wanted)):
        if number % count != index:
            continue
        try:
            got = layer.run(operation, config)
            errors = [
                ((g.float() - w).norm() / w.norm()).item()
                for g, w in zip(got, layer.reference(operation), strict=True)
            ]
            row = {"number": number, "error": max(errors) if max(errors) == max(errors) else 9.0}
        except Exception as error:
            row = {"number": number, "error": 9.0, "why": str(error).splitlines()[0][:120]}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def check_all(wanted: list[tuple[str, str]], processes: int, limit: float) -> set[int]:
    """Return the numbers of the candidates that compute the right thing."""
    path = Path(tempfile.mkdtemp()) / "checked.jsonl"
    ops = ",".join(f"{op}.{rows}" for op, rows in wanted)
    command = [sys.executable, __file__, "--ops", ops, "--checked", str(path), "--check"]
    running = [subprocess.Popen([*command, f"{i}/{processes}"]) for i in range(processes)]
    deadline = time.monotonic() + limit
    for process in running:
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["number"]: row for row in rows}
    for number, (operation, regime, config) in enumerate(work(wanted)):
        row = found.get(number, {"error": 9.0, "why": "did not finish"})
        if row["error"] > BOUND:
            print("left out:", operation, regime, tuple(asdict(config).values()), row)
    return {row["number"] for row in rows if row["error"] <= BOUND}


def measure(
    wanted: list[tuple[str, str]], right: set[int], layers: dict[str, Callable[[], Layer]],
    rows: str, rounds: int,
) -> dict[int, dict[str, float]]:  # fmt: skip
    """Time the candidates of one regime in turns, on each layer."""
    times: dict[int, dict[str, float]] = {}
    for name, make in layers.items():
        layer = make()
        runs: dict[int, list[float]] = {}
        for _ in range(rounds):
            for number, (operation, regime, config) in enumerate(work(wanted)):
                if number in right and regime == rows:
                    call = partial(layer.run, operation, config)
                    runs.setdefault(number, []).append(milliseconds(call, 2, 1))
        for number, values in runs.items():
            times.setdefault(number, {})[name] = statistics.median(values)
        del layer
        torch.cuda.empty_cache()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table here, as TOML")
    parser.add_argument("--json", type=Path, help="write every time here")
    parser.add_argument("--ops", help="what to tune, as gate_up.many,mx128.few; all if not given")
    parser.add_argument("--shapes", default="A,B,C,D,F")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--limit", type=float, default=150, help="seconds for compiling")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--checked", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    operations = [*table.OPERATIONS]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= table.FLOAT8_CAPABILITY:
        operations += table.SCALED
    every = [f"{op}.{rows}" for op in operations for rows in table.ROWS]
    names = args.ops.split(",") if args.ops else every
    wanted = [(name.split(".")[0], name.split(".")[1]) for name in names]
    if args.check:
        index, count = map(int, args.check.split("/"))
        check(index, count, wanted, args.checked)
        return
    where = machine()
    print(json.dumps(where), flush=True)
    architecture = table.architecture_of(torch.cuda.get_device_capability())
    right = check_all(wanted, args.processes, args.limit)
    shapes = {name: SHAPES[name] for name in args.shapes.split(",")}
    many = {name: (lambda s=shape: Layer(args.tokens, s)) for name, shape in shapes.items()}
    few = {f"A, T={T}": (lambda T=T: Layer(T, SHAPES["A"])) for T in (128, 1024)}
    times = measure(wanted, right, many, "many", args.rounds)
    times |= measure(wanted, right, few, "few", args.rounds)
    chosen, rows = dict(table.configs_of(architecture)), []
    for operation, regime in wanted:
        numbers = [n for n, (o, r, _) in enumerate(work(wanted)) if (o, r) == (operation, regime)]
        numbers = [n for n in numbers if n in times]
        best = {name: min(times[n][name] for n in numbers) for name in times[numbers[0]]}
        scores = {n: sum(times[n][s] / best[s] for s in best) / len(best) for n in numbers}
        for n in sorted(numbers, key=scores.__getitem__):
            config = work(wanted)[n][2]
            rows.append(
                {"operation": operation, "rows": regime, "score": round(scores[n], 4),
                 "ms": {s: round(t, 4) for s, t in times[n].items()}, **asdict(config)}
            )  # fmt: skip
        winner = min(numbers, key=scores.__getitem__)
        kind = "scaled.{}" if operation in table.SCALED else "{}.half"
        chosen[f"{kind.format(operation)}.{regime}"] = work(wanted)[winner][2]
        for row in [r for r in rows if (r["operation"], r["rows"]) == (operation, regime)][:4]:
            print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": where, "rows": rows}, indent=1) + "\n")
    if args.out:
        header = f"Sizes of the kernels on {architecture}, by benchmarks/tune.py.\n" + "\n".join(
            f"{key}: {value}" for key, value in where.items()
        )
        args.out.write_text(table.write_configs(chosen, header))


if __name__ == "__main__":
    main()
