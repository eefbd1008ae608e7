"""Time the expert MLP in MXFP8 beside the same layer in bfloat16, in the same run.

A step quantises tokens, activations and gradients; that is in every time. Weights are quantised
once an optimizer step: ``cast_ms`` stands apart, and ``step_ms`` adds its share for a number of
microbatches to forward and backward. ``peak_mib`` is what a step has at its peak beside its
arguments; the weights' MXFP8 bytes stand apart too. Errors are relative, in norm, against the layer
in float64 on fewer tokens: normal ones, heavy-tailed ones (Student's t of 3 degrees), and ones with
a hundredth of the channels 30 times as large.

    python benchmarks/bench_expert_mlp_mx.py --shapes A,B,C,D,F --out expert_mlp_mx.json
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from bench_expert_mlp import MIB, Case, Layer, kernels
from common import CUDA, SHAPES, Shape, experts, machine, milliseconds, write
from moe_kernels import MXWeight, expert_mlp, quantize_weight
from torch import Tensor

RECIPES = ("mx32", "mx128", "mxrow")
DATA = ("normal", "heavy", "outliers")


def tokens(kind: str, like_TD: Tensor) -> Tensor:
    """Return tokens of a distribution, of unit scale but for its tails."""
    x_TD = torch.randn(like_TD.shape, device=like_TD.device)
    if kind == "heavy":
        x_TD /= (torch.randn(3, *x_TD.shape, device=x_TD.device).square().mean(0)).sqrt()
    elif kind == "outliers":
        x_TD[:, :: max(1, min(100, x_TD.shape[1] // 2))] *= 30
    return x_TD.to(like_TD.dtype)


def quantised(case: Case, recipe: str) -> tuple[MXWeight, MXWeight]:
    return (
        quantize_weight(case.w_gate_up, recipe=recipe),
        quantize_weight(case.w_down, recipe=recipe),
    )


def size_of(weights: tuple[MXWeight, MXWeight]) -> float:
    """MiB of the weights in both layouts."""
    parts = [t for weight in weights for t in (*weight.rows, *(weight.columns or ()))]
    return sum(t.numel() for t in parts) / MIB


def errors(layers: dict[str, Layer], shape: Shape, num_tokens: int) -> dict[str, dict]:
    """Relative errors of output and gradients of each layer, on each kind of tokens."""
    case = Case(num_tokens, shape, "random")
    case.expert_TK = experts("random", num_tokens, shape.E, shape.K, seed=1)
    found: dict[str, dict] = {name: {} for name in layers}
    for kind in DATA:
        x_TD = tokens(kind, case.x)

        def run(layer: Layer, wide: bool, x_TD: Tensor = x_TD) -> list[Tensor]:
            leaves = [x_TD, case.w_gate_up, case.w_down, case.weight]
            leaves = [t.detach().to(torch.float64 if wide else t.dtype) for t in leaves]
            leaves = [t.requires_grad_() for t in leaves]
            y_TD = layer(*leaves, case.expert_TK)
            return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves[:3], case.dy.to(y_TD.dtype))]

        truth = run(expert_mlp, True)
        for name, layer in layers.items():
            pairs = zip(("y", "dx", "dw_gate_up", "dw_down"), run(layer, False), truth, strict=True)
            found[name][kind] = {
                part: float(f"{((g.double() - t).norm() / t.norm()).item():.3g}")
                for part, g, t in pairs
            }
    return found


def measure(case: Case, layer: Layer, repeat: int) -> dict:
    """Time forward without gradients and forward with backward, and the memory of a step."""
    saved, peak = case.memory(layer)
    row = {
        "forward_ms": round(milliseconds(lambda: case.forward(layer), repeat), 4),
        "both_ms": round(milliseconds(lambda: case.both(layer), repeat), 4),
        "saved_mib": round(saved, 1), "peak_mib": round(peak, 1),
    }  # fmt: skip
    if CUDA:
        row["kernels"] = {
            name[:60]: round(ms, 4) for name, ms, _ in kernels(lambda: case.both(layer))
        }
    return row


def compare(
    T: int, shape: Shape, routing: str, recipes: list[str], microbatches: int, repeat: int
) -> list[dict]:
    """Measure one shape in bfloat16 and in each recipe."""
    case = Case(T, shape, routing)
    base = measure(case, expert_mlp, repeat)
    where = {"T": T, **shape._asdict(), "routing": routing}
    rows = [{"what": "half precision" if CUDA else "float32", **where, **base}]
    for recipe in recipes:
        cast = milliseconds(partial(quantised, case, recipe), repeat)
        weights = quantised(case, recipe)
        layer = partial(expert_mlp, recipe=recipe, quantized=weights)
        row = measure(case, layer, repeat)
        step = row["both_ms"] + cast / microbatches
        row |= {
            "cast_ms": round(cast, 4),
            "step_ms": round(step, 4),
            "weights_mib": round(size_of(weights), 1),
            "forward_ratio": round(base["forward_ms"] / row["forward_ms"], 3),
            "step_ratio": round(base["both_ms"] / step, 3),
            "peak_ratio": round(row["peak_mib"] / base["peak_mib"], 3) if CUDA else None,
        }
        rows.append({"what": recipe, **where, **row})
        del weights, layer
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="A,B,C,D,F" if CUDA else "")
    parser.add_argument("--layer", action="append", default=[], help="another: D,F,E,K")
    parser.add_argument("--tokens", type=int, default=32768 if CUDA else 256)
    parser.add_argument("--error-tokens", type=int, default=1024 if CUDA else 64)
    parser.add_argument("--routing", default="random", help="random, uniform, zipf or one")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--microbatches", type=int, default=4, help="of an optimizer step")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="one small layer, twice")
    parser.add_argument("--out", type=Path, help="also write everything here, as JSON")
    args = parser.parse_args()
    shapes = [SHAPES[name] for name in args.shapes.split(",") if name]
    shapes += [Shape(*map(int, text.split(","))) for text in args.layer]
    if args.smoke:
        shapes, args.tokens, args.error_tokens, args.repeat = [Shape(256, 160, 8, 2)], 64, 32, 2
    where = machine()
    print(json.dumps(where), flush=True)
    recipes, rows = args.recipes.split(","), []
    layers: dict[str, Layer] = {"half precision" if CUDA else "float32": expert_mlp}
    layers |= {recipe: partial(expert_mlp, recipe=recipe) for recipe in recipes}
    for shape in shapes:
        measured = compare(
            args.tokens, shape, args.routing, recipes, args.microbatches, args.repeat
        )
        wrong = errors(layers, shape, args.error_tokens)
        for row in measured:
            rows.append({**row, "errors": wrong[row["what"]]})
            print(json.dumps(rows[-1]), flush=True)
        if CUDA:
            torch.cuda.empty_cache()
    write(rows, where, args.out)


if __name__ == "__main__":
    main()
