"""Measure what the recipes of MXFP8 cost in accuracy. Arithmetic only: a CPU is enough.

Five kinds of rows. ``normal``: independent, variance 1. ``heavy tails``: Student's t of 3 degrees
of freedom, whose largest value in a row is far above the others. ``outlier channels``: normal, but
1 % of the columns are 50 times as large, as the residual stream of a language model has them.
``massive channels``: the same, but 2 columns are 10,000 times as large. ``many sizes``: normal
times ``2**(6 * normal)``, value by value: sizes span some 40 powers of two.

Columns of the table, all relative: ``values`` is the root mean square error of all values;
``ordinary`` the same of the values outside outlier channels; ``lost`` the share of values that are
not zero and become so; ``product`` the error of ``x @ w.T`` with normal weights in the same recipe,
multiplied exactly.
"""

import argparse
from pathlib import Path

import torch
from common import machine, write
from moe_kernels import dequantize, quantize
from torch import Tensor

RECIPES = ("mx32", "mx128", "mxrow")
ROUNDINGS = ("rceil", "floor")
OUTLIERS, OUTLIER_SIZE, DEGREES = 0.01, 50.0, 3
MASSIVE, MASSIVE_SIZE, SPREAD = 2, 1e4, 6.0
KINDS = ("normal", "heavy tails", "outlier channels", "massive channels", "many sizes")


def draw(kind: str, rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return values, and which columns are ordinary."""
    ordinary_D = torch.ones(columns, dtype=torch.bool)
    x_ND = torch.randn(rows, columns, generator=generator)
    if kind == "heavy tails":
        squares = torch.randn(DEGREES, rows, columns, generator=generator).square().sum(0)
        x_ND /= (squares / DEGREES).sqrt()
    if kind == "many sizes":
        x_ND *= torch.exp2(SPREAD * torch.randn(rows, columns, generator=generator))
    if kind.endswith("channels"):
        massive = kind == "massive channels"
        order = torch.randperm(columns, generator=generator)
        ordinary_D[order[: MASSIVE if massive else max(1, int(OUTLIERS * columns))]] = False
        x_ND[:, ~ordinary_D] *= MASSIVE_SIZE if massive else OUTLIER_SIZE
    return x_ND.bfloat16().float(), ordinary_D


def relative(got: Tensor, want: Tensor) -> float:
    """Return the root mean square error over the root mean square."""
    return ((got - want).double().norm() / want.double().norm()).item()


def measure(kind: str, rows: int, columns: int, outputs: int, seed: int) -> list[dict]:
    """Return a row for every recipe and rounding, of the same values."""
    generator = torch.Generator().manual_seed(seed)
    x_ND, ordinary_D = draw(kind, rows, columns, generator)
    w_FD = torch.randn(outputs, columns, generator=generator).bfloat16().float()
    exact_NF = x_ND.double() @ w_FD.double().T
    found = []
    for recipe in RECIPES:
        for rounding in ROUNDINGS:
            got_ND = dequantize(quantize(x_ND, recipe=recipe, rounding=rounding))
            got_FD = dequantize(quantize(w_FD, recipe=recipe, rounding=rounding))
            found.append(
                {
                    "data": kind,
                    "recipe": recipe,
                    "rounding": rounding,
                    "seed": seed,
                    "values": relative(got_ND, x_ND),
                    "ordinary": relative(got_ND[:, ordinary_D], x_ND[:, ordinary_D]),
                    "lost": ((got_ND == 0) & (x_ND != 0)).double().mean().item(),
                    "product": relative(got_ND.double() @ got_FD.double().T, exact_NF),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small shapes, one seed")
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    where = machine()
    print(*(f"{key}: {value}" for key, value in where.items()), sep="\n")
    shape, seeds = ((64, 256, 16), 1) if options.smoke else ((1024, 4096, 256), 3)
    print(f"{shape[0]} rows of {shape[1]} columns, {shape[2]} outputs, {seeds} seeds\n")
    names = ("values", "ordinary", "lost", "product")
    print(f"{'data':18}{'recipe':8}{'rounding':10}" + "".join(f"{name:>11}" for name in names))
    rows = []
    for kind in KINDS:
        runs = [measure(kind, *shape, seed) for seed in range(seeds)]
        for same in zip(*runs, strict=True):
            means = [sum(row[name] for row in same) / seeds for name in names]
            print(
                f"{kind:18}{same[0]['recipe']:8}{same[0]['rounding']:10}"
                + "".join(f"{mean:>11.4f}" for mean in means)
            )
            rows += same
    write(rows, where, options.out)


if __name__ == "__main__":
    main()
