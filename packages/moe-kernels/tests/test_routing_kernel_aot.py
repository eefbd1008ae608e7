"""What the compiler makes of the routing kernels for GPUs that are not here.

Run as a program, this file compiles them and prints what came out as JSON: a test process runs
kernels in Triton's interpreter, which is decided when they are imported and leaves nothing to
compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SHARED_BYTES = 227 * 1024  # the most that one block may have, sm_90 and sm_100
PLAIN = {"SIGMOID": False, "RENORMALIZE": True, "BIAS": False, "GROUPS": False, "MASK": False}
EVERY = {"SIGMOID": True, "RENORMALIZE": True, "BIAS": True, "GROUPS": True, "MASK": True}
ROUTES = [  # E, K, dtype, options
    (128, 8, "fp32", PLAIN),
    (128, 8, "bf16", PLAIN),
    (256, 8, "fp32", EVERY),
    (1024, 32, "fp32", EVERY),
    (1024, 1024, "fp32", EVERY),
]
TYPES = {"expert_ptr": "*i32", "num_bad_ptr": "*i32", "mask_ptr": "*i1", "scale": "fp32"}


def route_sources():
    """Yield a name, a kernel, its constants, the type of logits and its warps."""
    from moe_kernels.routing.choice import kernel

    for E, K, dtype, options in ROUTES:
        rows = kernel.choose_rows(E, K)
        shape = {"K": K, "BLOCK_T": rows.t, "BLOCK_E": E, "stride_e": 1}
        forward = {**options, **shape, "SORT": K > kernel.MOST_ROUNDS}
        name = f"E={E} K={K} {dtype}"
        yield f"route {name}", kernel._route_kernel, forward, dtype, rows.num_warps
        rows = kernel.choose_rows(E, 1)
        backward = {key: options[key] for key in ("SIGMOID", "RENORMALIZE")}
        backward |= {**shape, "BLOCK_T": rows.t, "DSCORE": True}
        yield f"backward {name}", kernel._route_backward_kernel, backward, dtype, rows.num_warps


def group_sources():
    from moe_kernels.routing.groups import kernel

    cut = kernel.Blocks()
    for E in (128, 1024):
        block, place = {"BLOCK_N": cut.n, "BLOCK_E": E}, {"TILE_N": 128, "STEP": 256}
        for steps in ({"steps": 1}, {}):  # Triton compiles a 1 in
            name = f"E={E} {'one step' if steps else 'many steps'}"
            count = {**block, **steps}
            yield f"count {name}", kernel._count_kernel, count, "i32", cut.num_warps
            yield f"place {name}", kernel._place_kernel, count | place, "i32", cut.num_warps
        tiles = {"BLOCK_E": E, **place}
        yield f"tiles E={E}", kernel._tiles_kernel, tiles, "i32", 4
    scan = {"BLOCK_B": cut.scan, "BLOCK_E": 8}
    yield "scan", kernel._scan_kernel, scan, "i32", cut.scan_warps


def smallest_sources():
    """Yield every kernel with all numbers 1: Triton compiles those in, as another type."""
    from moe_kernels.routing.choice import kernel as choice
    from moe_kernels.routing.groups import kernel as groups

    ones = dict.fromkeys(("T", "E", "N", "B", "K", "steps", "length", "stride_t", "stride_e"), 1)
    ones |= {"num_groups": 1, "top_groups": 1, "BLOCK_T": 1, "BLOCK_E": 16, "BLOCK_N": 16}
    ones |= {"BLOCK_B": 16, "TILE_N": 1, "STEP": 16, "SORT": False, "DSCORE": True, **EVERY}
    for function in (
        groups._count_kernel,
        groups._scan_kernel,
        groups._place_kernel,
        groups._tiles_kernel,
        choice._route_kernel,
        choice._route_backward_kernel,
    ):
        own = {name: ones[name] for name in function.arg_names if name in ones}
        dtype = "fp32" if "logits_ptr" in function.arg_names else "i32"
        yield f"smallest {function.__name__}", function, own, dtype, 1


def compile_one(function, constants, dtype: str, num_warps: int, capability: int):
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    floats = "fp32" if dtype != "i32" else "i32"
    signature = {
        name: "constexpr" if name in constants
        else TYPES[name] if name in TYPES
        else f"*{dtype}" if name in ("logits_ptr", "dlogits_ptr")
        else f"*{floats}" if name.endswith("_ptr")
        else "i32"
        for name in function.arg_names
    }  # fmt: skip
    aligned = [
        index
        for index, name in enumerate(function.arg_names)
        if name not in constants and (name.endswith("_ptr") or name in ("E", "stride_t"))
    ]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return build(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> dict[str, int]:
    """Ask Triton's own cuobjdump for registers and stack; spilled registers live on the stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    return {
        key.lower(): int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)
    }


def main() -> None:
    rows = []
    for capability in (90, 100):
        sources = [*route_sources(), *group_sources(), *smallest_sources()]
        for name, function, constants, dtype, num_warps in sources:
            built = compile_one(function, constants, dtype, num_warps, capability)
            ptx = built.asm["ptx"]
            counted = {
                "redux": r"redux\.sync",
                "barriers": r"bar\.sync",
                "loads": r"ld\.global",
                "wide_loads": r"ld\.global[.\w:]*v4",
                "stores": r"st\.global",
                "wide_stores": r"st\.global[.\w:]*v4",
            }
            rows.append(
                {
                    "kernel": name,
                    "capability": capability,
                    "num_warps": num_warps,
                    **{key: len(re.findall(text, ptx)) for key, text in counted.items()},
                    "shared": built.metadata.shared,
                    **resources(built.asm["cubin"]),
                }
            )
    sys.stdout.write(json.dumps(rows))


@pytest.fixture(scope="module")
def built() -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_routing_kernel_spills_registers_or_asks_for_too_much_shared_memory(built) -> None:
    assert {row["capability"] for row in built} == {90, 100}
    for row in built:
        assert row["stack"] == row["local"] == 0, row
        assert row["shared"] <= SHARED_BYTES, row


def test_logits_and_scores_move_16_bytes_at_a_time(built) -> None:
    for row in built:
        if row["kernel"].startswith(("route", "backward")):
            assert row["wide_loads"] > 0, row
            assert row["wide_stores"] == row["stores"] > 0, row


def test_a_row_is_chosen_from_within_one_warp(built) -> None:
    rounds = [row for row in built if row["kernel"].startswith("route") and row["num_warps"] == 1]
    assert len(rounds) == 2 * 4
    for row in rounds:
        assert row["barriers"] == 0, row
        if "fp32" in row["kernel"]:  # bfloat16 may give a row to 16 threads
            assert row["redux"] > 0, row  # one instruction reduces 32 integers


if __name__ == "__main__":
    main()
