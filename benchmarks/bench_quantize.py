"""Time the quantising kernels of MXFP8 beside a copy of as many bytes, in the same run.

Each case runs on several buffers in turn, together larger than the cache. ``of_copy`` is the share
of the rate at which this machine copies 2 GB: bytes that must be read and written, over the time.
Under ``mxrow``, columns have to be read twice; the bytes are counted once all the same. Without a
GPU the plain torch reference is timed, on small shapes, and there is nothing to compare it with.

Peers: ``torch.compile`` of the reference (``--compiled``), and torchao's kernels where it is
installed and has them.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
from common import CUDA, DEVICE, SHAPES, copy_bandwidth, experts, machine, milliseconds, write
from moe_kernels import (
    dequantize,
    group_rows,
    quantize,
    quantize_both,
    quantize_columns,
    quantize_dswiglu,
    quantize_routed,
    quantize_swiglu,
)
from moe_kernels.mxfp8.reference import quantize_reference
from torch import Tensor

RECIPES = ("mx32", "mx128", "mxrow")
BYTES_8 = 33 / 32  # of a float8 value and its share of a scale
BYTES_16 = 2.0
CACHE = 2**28  # bytes, more than any GPU's L2


class Case(NamedTuple):
    """A call to time: what it is, the bytes that it must move, and one call for each buffer."""

    name: str
    moved: float
    calls: list[Callable[[], object]]


def buffers(values: int, make: Callable[[int], object]) -> list:
    """Make enough of them that they do not fit into the cache together."""
    count = max(1, min(16, CACHE // (2 * max(values, 1)) + 1)) if CUDA else 1
    return [make(seed) for seed in range(count)]


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).bfloat16()


def plain_cases(N: int, D: int, recipe: str) -> Iterator[Case]:
    """Yield rows, columns and both of a matrix, and back."""
    xs = buffers(N * D, lambda seed: normal(N, D, seed=seed))
    one, two = N * D * (BYTES_16 + BYTES_8), N * D * (BYTES_16 + 2 * BYTES_8)
    yield Case("rows", one, [lambda x=x: quantize(x, recipe=recipe) for x in xs])
    yield Case("columns", one, [lambda x=x: quantize_columns(x, recipe=recipe) for x in xs])
    yield Case("both", two, [lambda x=x: quantize_both(x, recipe=recipe) for x in xs])
    back = [quantize(x, recipe=recipe) for x in xs]
    yield Case("dequantize", one, [lambda x=x: dequantize(x, dtype=torch.bfloat16) for x in back])


def layer_cases(T: int, shape: str, recipe: str) -> Iterator[Case]:
    """Yield what a layer does with its N = T*K rows, and with its weights."""
    D, F, E, K = SHAPES[shape]
    N = T * K
    groups = group_rows(experts("random", T, E, K), E)
    offsets_E1, slots_N = groups.offsets_E1, groups.slot_of_row_N
    weight_TK = torch.rand(T, K, device=DEVICE)
    hs = buffers(2 * N * F, lambda seed: normal(N, 2 * F, seed=seed))
    dacts = buffers(N * F, lambda seed: normal(N, F, seed=seed))
    how = {"recipe": recipe}
    yield Case(
        "swiglu", N * F * (2 * BYTES_16 + BYTES_8),
        [lambda h=h: quantize_swiglu(h, offsets_E1=offsets_E1, **how) for h in hs],
    )  # fmt: skip
    yield Case(
        "dswiglu", N * F * (6 * BYTES_16 + 2 * BYTES_8),
        [
            lambda h=h, d=d: quantize_dswiglu(
                d, h, offsets_E1, weight_TK=weight_TK, slot_of_row_N=slots_N, **how
            )
            for h, d in zip(hs, cycle(dacts), strict=False)
        ],
    )  # fmt: skip
    tokens = buffers(T * D, lambda seed: normal(T, D, seed=seed))
    yield Case(
        "weighted rows", T * D * BYTES_16 + N * D * BYTES_8,
        [lambda x=x: quantize_routed(x, slots_N, weight_TK, **how) for x in tokens],
    )  # fmt: skip
    yield Case(
        "grouped columns", N * F * (BYTES_16 + BYTES_8),
        [lambda d=d: quantize_columns(d, offsets_E1=offsets_E1, **how) for d in dacts],
    )  # fmt: skip
    w_EGD = normal(E, 2 * F, D, seed=0)
    moved = w_EGD.numel() * (BYTES_16 + 2 * BYTES_8)
    yield Case("weights, both", moved, [lambda: quantize_both(w_EGD, **how)])


def compiled_cases(N: int, D: int, recipe: str) -> Iterator[Case]:
    """Yield the reference as torch.compile makes it."""
    function = torch.compile(quantize_reference, fullgraph=True)
    xs = buffers(N * D, lambda seed: normal(N, D, seed=seed))
    calls = [lambda x=x: function(x, recipe, "rceil") for x in xs]
    yield Case("rows, torch.compile", N * D * (BYTES_16 + BYTES_8), calls)


def torchao_cases(N: int, D: int) -> Iterator[Case]:
    """Yield torchao's quantise kernel, if it is installed and takes this machine."""
    try:
        from torchao.prototype.mx_formats.kernels import (  # noqa: PLC0415 - a peer
            triton_to_mxfp8_dim0,
        )
    except ImportError:
        return
    xs = buffers(N * D, lambda seed: normal(N, D, seed=seed))
    calls = [lambda x=x: triton_to_mxfp8_dim0(x, 32) for x in xs]
    yield Case("rows, torchao", N * D * (BYTES_16 + BYTES_8), calls)


def measure(case: Case, recipe: str, shape: str, rate: float | None, repeat: int) -> dict:
    """Return a row of the table."""
    calls = cycle(case.calls)

    def call() -> object:
        return next(calls)()

    row = {"what": case.name, "recipe": recipe, "shape": shape}
    try:
        spent = milliseconds(call, repeat, warm_up=len(case.calls) + 1)
    except Exception as error:  # a peer may refuse a machine in its own way
        if "torchao" not in case.name:
            raise
        return row | {"skipped": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
    row |= {"ms": round(spent, 4), "gb_per_s": round(case.moved / spent / 1e6, 1)}
    if rate:
        row["of_copy"] = round(case.moved / spent / 1e6 / rate, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one small shape, twice")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="any number of times")
    parser.add_argument("--tokens", type=int, default=32768 if CUDA else 64)
    parser.add_argument("--compiled", action="store_true", help="also torch.compile's kernel")
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    where, repeat = machine(), 2 if options.smoke else 30
    rate = copy_bandwidth() if CUDA else None
    where["copy_gb_per_s"] = f"{rate:.0f}" if rate else "not measured"
    print(*(f"{key}: {value}" for key, value in where.items()), sep="\n")
    if options.smoke:
        cases = [("smoke", "mx32", case) for case in plain_cases(64, 128, "mx32")]
        everything = iter(cases)
    else:
        everything = every_case(options)
    rows = []
    for shape, recipe, case in everything:
        rows.append(measure(case, recipe, shape, rate, repeat))
        print(rows[-1], flush=True)
    write(rows, where, options.out)


def every_case(options: argparse.Namespace) -> Iterator[tuple[str, str, Case]]:
    """Yield shape, recipe and case, a shape's buffers at a time."""
    for shape in options.shape or (SHAPES if CUDA else ("D",)):
        D, T = SHAPES[shape].D, options.tokens
        for recipe in RECIPES:
            for case in plain_cases(T, D, recipe):
                yield shape, recipe, case
            if CUDA:
                for case in layer_cases(T, shape, recipe):
                    yield shape, recipe, case
            if options.compiled:
                for case in compiled_cases(T, D, recipe):
                    yield shape, recipe, case
        for case in torchao_cases(T, D):
            yield shape, "mx32", case


if __name__ == "__main__":
    main()
