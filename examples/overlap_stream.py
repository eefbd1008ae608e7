"""Copy on a second stream while the first computes, and see what that gains.

It needs a GPU: a CPU has no streams, and this says so and ends. Three rules make it right:

* the second stream waits for what made the data (``wait_stream``),
* the first waits for the second before it uses the result,
* memory of one stream that the other uses is named with ``record_stream``, or its block may be
  given away while it is still read.

    python examples/overlap_stream.py [--smoke]
"""

import argparse
import time

import torch


def timed(work) -> float:
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / 10 * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small, to see that it works")
    smoke = parser.parse_args().smoke
    if not torch.cuda.is_available():
        print("this needs a GPU: there is no second stream on a CPU, and nothing was measured")
        return
    size = 512 if smoke else 8192
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    host = torch.empty(size, size, dtype=torch.bfloat16, pin_memory=True)
    side = torch.cuda.Stream()

    def compute() -> None:
        for _ in range(4):
            a @ a

    def copy() -> None:
        host.copy_(a, non_blocking=True)

    def one_after_the_other() -> None:
        copy()
        compute()

    def together() -> None:
        main_stream = torch.cuda.current_stream()
        side.wait_stream(main_stream)  # what made `a` is done
        with torch.cuda.stream(side):
            copy()
            a.record_stream(side)  # its memory is not given away before the copy ends
        compute()
        main_stream.wait_stream(side)  # who reads `host` next finds it whole

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, work in (
        ("compute alone", compute), ("copy alone", copy),
        ("one after the other", one_after_the_other), ("together", together),
    ):  # fmt: skip
        print(f"{name:20} {timed(work):8.3f} ms")
    if not torch.equal(host, a.cpu()):
        raise SystemExit("the copy is not what was copied")


if __name__ == "__main__":
    main()
