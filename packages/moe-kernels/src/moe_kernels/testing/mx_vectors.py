"""Golden vectors of MXFP8, and a runner that tries an implementation against them.

    python -m moe_kernels.testing.mx_vectors                      # every one that this machine has
    python -m moe_kernels.testing.mx_vectors --run module:function
    python -m moe_kernels.testing.mx_vectors --write vectors.json

The function has the signature of ``moe_kernels.quantize``: a float32 tensor of one axis, and the
keywords ``recipe`` and ``rounding``; it returns float8 (or its bytes) and scales.

``mx_vectors.json`` was written from ``mx_exact``, by fractions. All values are hexadecimal, so that
no reader rounds them:

- ``quantize``: for each case its ``name``, the row ``x`` as the bits of float32 values, 8 digits
  each, highest first; and for ``recipe rounding`` the bytes of ``data`` and ``scale``, 2 digits
  each.
- ``dequantize``: for each ``scale`` code the bytes ``data`` and the bits of their float32 values
  ``x``. A NaN may have any bits that are one.
"""

import argparse
import json
import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.backend import backend, interpreted
from moe_kernels.mxfp8 import MXTensor, dequantize, quantize
from moe_kernels.testing.mx_exact import dequantize_exactly, quantize_exactly
from moe_kernels.testing.strategies import randn

RECIPES = ("mx32", "mx128", "mxrow")
ROUNDINGS = ("rceil", "floor")
CODES = (0, 1, 2, 126, 127, 128, 253, 254, 255)
QuantizeFunction = Callable[..., tuple[Tensor, Tensor]]


class Vector(NamedTuple):
    """A row and what it becomes.

    Attributes:
        name: What is special about it.
        x: float32 values, a multiple of 32 of them.
        want: Data and scales by recipe and rounding.
    """

    name: str
    x: list[float]
    want: dict[tuple[str, str], tuple[bytes, bytes]]


def float_of(bits: str) -> float:
    """Return the float32 of 8 hexadecimal digits."""
    return struct.unpack(">f", bytes.fromhex(bits))[0]


def bits_of(value: float) -> str:
    """Return the 8 hexadecimal digits of a float32."""
    return struct.pack(">f", value).hex()


def rows() -> Iterator[tuple[str, list[float]]]:
    """Yield the rows, of 4 blocks but for the last two, by name."""
    nan, inf = float("nan"), float("inf")
    ordinary = randn(128, seed=0).tolist()

    def with_block(values: Sequence[float], others: float = 1.0) -> list[float]:
        block = (list(values) * 32)[:32]
        return [*block, *(x * others for x in ordinary[32:])]

    yield "normal", ordinary
    yield (
        "blocks of very different size",
        [x * 2.0 ** (-40, 30, 0, -126)[i // 32] for i, x in enumerate(ordinary)],
    )
    yield "NaN of both signs", with_block([1.0, nan, -nan, 0.5])
    yield "infinities", with_block([inf, -inf, 1.0, -0.25])
    yield "nothing finite", with_block([nan, inf])
    yield "zeros of both signs", with_block([0.0, -0.0])
    yield "nothing but zeros", [0.0, -0.0] * 64
    yield "ties to even", with_block([256.0, *(256 + 16 * k for k in range(1, 12))])
    yield "ties among subnormals", with_block([448.0, *(k * 2.0**-10 for k in range(1, 20))])
    yield "just beside ties", with_block([256.0, float_of("43880001"), float_of("4387ffff")])
    yield "448 exactly", with_block([448.0, -448.0, 3.0])
    yield "just above 448", with_block([float_of("43e00001"), -3.0])
    yield "just below 512, which FLOOR saturates", with_block([float_of("43ffffff"), 460.0, -470.0])
    yield "largest float32", with_block([float_of("7f7fffff"), -(2.0**127), 2.0**118])
    yield "scale codes 0 and 1", with_block([2.0**-118, 2.0**-127, -(2.0**-130)], 2.0**-117)
    yield "largest value below 2**-126", with_block([2.0**-127, -(2.0**-136), 2.0**-137, 2.0**-149])
    yield "subnormals among ordinary values", with_block([1.0, 2.0**-140, -(2.0**-149), 0.0])
    yield "a run of three blocks", ordinary[:96]
    yield "one block", ordinary[96:]


def write() -> str:
    """Return the vectors as text, from exact arithmetic alone."""
    cases = [
        {
            "name": name,
            "x": "".join(map(bits_of, x)),
            **{
                f"{recipe} {rounding}": dict(
                    zip(
                        ("data", "scale"),
                        (part.hex() for part in quantize_exactly(x, recipe, rounding)),
                        strict=True,
                    )
                )
                for recipe in RECIPES
                for rounding in ROUNDINGS
            },
        }
        for name, x in rows()
    ]
    data = bytes([0x38, 0xBC, 0x00, 0x80, 0x01, 0x7E, 0xFE, 0x7F] * 4)
    decoded = [
        {
            "scale": code,
            "data": data.hex(),
            "x": "".join(_decoded(byte, code) for byte in data),
        }
        for code in CODES
    ]
    return json.dumps({"quantize": cases, "dequantize": decoded}, indent=0) + "\n"


def _decoded(byte: int, code: int) -> str:
    """Return the bits of a value, of an infinity if float32 has none as large."""
    value = dequantize_exactly(byte, code)
    try:
        return bits_of(value)
    except OverflowError:
        return bits_of(float("inf") if value > 0 else float("-inf"))


def read() -> tuple[list[Vector], list[tuple[int, bytes, list[float]]]]:
    """Return the vectors that ship: those of ``quantize``, then (code, bytes, values)."""
    tree = json.loads((files("moe_kernels.testing") / "mx_vectors.json").read_text())
    vectors = [
        Vector(
            case["name"],
            _floats(case["x"]),
            {
                (recipe, rounding): (
                    bytes.fromhex(case[f"{recipe} {rounding}"]["data"]),
                    bytes.fromhex(case[f"{recipe} {rounding}"]["scale"]),
                )
                for recipe in RECIPES
                for rounding in ROUNDINGS
            },
        )
        for case in tree["quantize"]
    ]
    decoded = [
        (case["scale"], bytes.fromhex(case["data"]), _floats(case["x"]))
        for case in tree["dequantize"]
    ]
    return vectors, decoded


def _floats(text: str) -> list[float]:
    return [float_of(text[start : start + 8]) for start in range(0, len(text), 8)]


def failures(function: QuantizeFunction, device: str = "cpu") -> list[str]:
    """Try a function against every vector.

    Args:
        function: As ``moe_kernels.quantize``.
        device: Where its argument lies.

    Returns:
        A line for each row that came out otherwise; none if all is well.
    """
    found = []
    for name, x, want in read()[0]:
        x_D = torch.tensor(x, dtype=torch.float32, device=device)
        for (recipe, rounding), parts in want.items():
            got = function(x_D, recipe=recipe, rounding=rounding)
            for part, tensor, wanted in zip(("data", "scale"), got, parts, strict=True):
                raw = bytes(tensor.view(torch.uint8).flatten().tolist())
                if raw != wanted:
                    at = next(i for i, (a, b) in enumerate(zip(raw, wanted, strict=True)) if a != b)
                    found.append(
                        f"{name}, {recipe} {rounding}: {part}[{at}] is {raw[at]:#04x}, "
                        f"not {wanted[at]:#04x}"
                    )
    return found


def decoding_failures(function: Callable[[MXTensor], Tensor], device: str = "cpu") -> list[str]:
    """Try a function as ``moe_kernels.dequantize`` against every vector, as ``failures`` does."""
    found = []
    for code, data, want in read()[1]:
        data_D = torch.tensor(list(data), dtype=torch.uint8, device=device)
        scale_B = torch.full((len(data) // 32,), code, dtype=torch.uint8, device=device)
        got = function(MXTensor(data_D.view(torch.float8_e4m3fn), scale_B)).tolist()
        for index, (value, wanted) in enumerate(zip(got, want, strict=True)):
            both_nan = math.isnan(value) and math.isnan(wanted)
            if bits_of(value) != bits_of(wanted) and not both_nan:
                found.append(f"scale {code}: value {index} is {value}, not {wanted}")
    return found


def implementations() -> Iterator[tuple[str, str, bool]]:
    """Yield a name, a device, and whether the interpreter runs, of what this machine has."""
    yield "reference", "cpu", False
    if backend().name == "triton":
        yield "Triton on CUDA", "cuda", False
    elif _interprets():
        yield "Triton's interpreter", "cpu", True


def _interprets() -> bool:
    try:
        return import_module("triton").knobs.runtime.interpret
    except ImportError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if anything differs."""
    parser = argparse.ArgumentParser(description="Try an implementation of MXFP8.")
    parser.add_argument("--run", metavar="MODULE:FUNCTION", help="a function as quantize")
    parser.add_argument("--device", default="cpu", help="where the arguments of --run lie")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the vectors anew")
    options = parser.parse_args(arguments)
    if options.write:
        options.write.write_text(write())
        return 0
    results: dict[str, list[str]] = {}
    if options.run:
        module, _, function = options.run.partition(":")
        chosen = getattr(import_module(module), function)
        results[options.run] = failures(chosen, options.device)
    else:
        for name, device, interpret in implementations():
            with interpreted() if interpret else nullcontext():
                results[name] = failures(quantize, device) + decoding_failures(dequantize, device)
    for name, lines in results.items():
        sys.stdout.write(f"{name}: {'all bytes are right' if not lines else 'WRONG'}\n")
        sys.stdout.writelines(f"  {line}\n" for line in lines)
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
