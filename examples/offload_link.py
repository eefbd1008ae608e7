"""Say whether a layer's activations fit through the link to host memory while it computes.

Offload is free if the bytes that a layer keeps for backward cross the link in the time of the
layer's forward pass. Both grow with the tokens T, so T does not matter. Width does: compute grows
with its square, bytes do not.

    bytes a token   2 (2 D + K 2 F)       inputs of attention and experts, pre-activations, bfloat16
    FLOPs a token   2 (4 D D + K 3 D F)   projections and experts, forward
    free if         bytes / link <= FLOPs / rate

    python examples/offload_link.py [--dim 2048 --expert-dim 1024 --top-k 8 --rate 500 --link 50]
"""

import argparse
import time

import torch


def measured_link(megabytes: int) -> tuple[float, str]:
    """Return bytes a second from the device to the host, or of a copy in memory without a GPU."""
    cuda = torch.cuda.is_available()
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    target = torch.empty(megabytes << 20, dtype=torch.uint8, pin_memory=cuda)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return (megabytes << 20) / best, "GPU to pinned memory" if cuda else "a copy in memory, no GPU"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=2048, help="D")
    parser.add_argument("--expert-dim", type=int, default=1024, help="F")
    parser.add_argument("--top-k", type=int, default=8, help="K")
    parser.add_argument("--rate", type=float, default=500, help="TFLOP/s that the layer reaches")
    parser.add_argument("--link", type=float, help="GB/s of the link; measured without it")
    parser.add_argument("--smoke", action="store_true", help="a small copy")
    given = parser.parse_args()
    D, F, K = given.dim, given.expert_dim, given.top_k
    link, how = measured_link(8 if given.smoke else 256)
    if given.link:
        link, how = given.link * 1e9, "given"
    kept, flops = 2 * (2 * D + K * 2 * F), 2 * (4 * D * D + K * 3 * D * F)
    moving, computing = kept / link, flops / (given.rate * 1e12)
    print(f"D {D}, F {F}, K {K}: {kept:,} bytes and {flops:,} FLOPs a token and layer")
    print(f"link {link / 1e9:.1f} GB/s ({how}): {moving * 1e9:.1f} ns a token")
    print(f"compute {given.rate:g} TFLOP/s (as given): {computing * 1e9:.1f} ns a token")
    part = min(1.0, computing / moving)
    print(f"{part:.0%} of the bytes can hide behind the forward pass; all of them from "
          f"{kept / computing / 1e9:.0f} GB/s on")  # fmt: skip


if __name__ == "__main__":
    main()
