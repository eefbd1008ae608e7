"""Time one product of matrices on zeros, on a constant and on random values.

The operations are the same. On a GPU the times need not be: switching transistors costs power,
values that repeat switch fewer, and a chip at its power limit lowers its clock. On a CPU, which is
seldom at that limit, the three agree but for noise. Clocks take seconds to move: one call shows
nothing.

    python examples/gemm_values.py [--smoke]
"""

import argparse
import statistics
import time

import torch

KINDS = ("zeros", "constant", "random")


def operands(kind: str, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if kind == "random":
        return tuple(torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    value = 0.0 if kind == "zeros" else 1.0
    return tuple(torch.full((size, size), value, device=device, dtype=dtype) for _ in range(2))


def seconds(a: torch.Tensor, b: torch.Tensor, calls: int) -> float:
    """Return the time of one call, over calls that are queued without waiting."""
    wait = torch.cuda.synchronize if a.is_cuda else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        a @ b
    wait()
    return (time.perf_counter() - begin) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small, to see that it works")
    smoke = parser.parse_args().smoke
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, calls = (64, 2) if smoke else (8192, 200) if device == "cuda" else (1024, 10)
    rounds = 2 if smoke else 7
    pairs = {kind: operands(kind, size, device) for kind in KINDS}
    times = {kind: [] for kind in KINDS}
    for _ in range(rounds):  # in turns, so that a slow minute is everybody's
        for kind in KINDS:
            times[kind].append(seconds(*pairs[kind], calls))
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    print(f"{size} x {size} on {name}, torch {torch.__version__}")
    for kind in KINDS:
        middle = statistics.median(times[kind][1:])
        print(f"{kind:9} {middle * 1e3:9.3f} ms  {2 * size**3 / middle / 1e12:8.2f} TFLOP/s")
    if device == "cpu":
        print("no GPU here: differences above are noise, the effect is one of a GPU's power limit")


if __name__ == "__main__":
    main()
