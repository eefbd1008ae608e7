"""Compile the kernels for a GPU that need not be there, and print what they do to memory.

Run as a program, outside of the tests: they run kernels in the interpreter, and a kernel is one
or the other from the moment that it is imported.
"""

import argparse
import json
import re
import sys
from collections import Counter
from typing import Any

import triton
import triton.language as tl
from moe_dispatch.rowwise.agree import kernel as agree
from moe_dispatch.rowwise.carry import kernel as carry
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    "bases_ptr": "*i64", "state_ptr": "*i64", "signals_ptr": "*i64", "told_ptr": "*i32",
    "counts_ptr": "*i32", "first_E_ptr": "*i32", "kept_E_ptr": "*i32", "offsets_e1_ptr": "*i32",
    "place_W1_ptr": "*i32", "expert_ptr": "*i32", "row_of_slot_ptr": "*i32",
    "offsets_E1_ptr": "*i32", "rank_ptr": "*i32", "row_ptr": "*i32", "to_ptr": "*i32",
    "place_ptr": "*i32", "x_ptr": "*bf16", "weight_ptr": "*fp32", "direct_ptr": "*bf16",
    "direct_weight_ptr": "*fp32", "rows_ptr": "*bf16", "count_ptr": "*i32", "y_ptr": "*bf16",
    "out_ptr": "*bf16", "out_weight_ptr": "*fp32", "dweight_ptr": "*fp32", "scalar_ptr": "*fp32",
    "results_ptr": "*bf16", "scalars_ptr": "*fp32", "origin_ptr": "*i32", "row_of_ptr": "*i32",
    "host_ptr": "*i64", "clean_ptr": "*i32", "bad_ptr": "*i32", "dy_ptr": "*bf16",
    "places_ptr": "*i32", "out_scalar_ptr": "*fp32", "direct_scalar_ptr": "*fp32",
}  # fmt: skip
WIDE = {
    "staged_at",
    "staged_scalars_at",
    "rows_at",
    "rows_size",
    "results_at",
    "results_size",
    "limit_ns",
    "weight_at",
    "row_at",
}
ROWS = {"N": 7168, "ROW_BYTES": 14336, "ROW_STRIDE": 7168, "OUT_STRIDE": 7168, "K": 8}
MORE = {
    "BLOCK": 2048, "BLOCK_K": 8, "W": 8, "TIMED": True, "KINDS": 8, "M": 74, "BLOCK_M": 128,
    "E_OF_RANK": 8, "BLOCK_W": 8, "BLOCK_E": 8, "BOUNDED": True, "DROPS": True, "E": 64,
    "META": True, "DEDUP": False, "STAGED": True, "PUSHED": True, "DIRECT": False, "CACHE": "",
    "SIZE": 16, "SCALED": True, "ACC": tl.float32, "WIDE": tl.float32, "WEIGHTED": True,
    "SCALARS": True,
}  # fmt: skip
KERNELS = {
    "advance": (agree.advance_kernel, {}),
    "signal": (agree.signal_kernel, {}),
    "wait": (agree.wait_kernel, {}),
    "abort": (agree.abort_kernel, {}),
    "note": (agree.note_kernel, {}),
    "clean_ids": (agree.clean_ids_kernel, {"BLOCK": 1024}),
    "tell_counts": (agree.tell_counts_kernel, {}),
    "plan": (agree.plan_kernel, {}),
    "slots": (agree.slots_kernel, {"BLOCK": 1024}),
    "put": (carry.put_rows_kernel, {}),
    "put_dedup": (carry.put_rows_kernel, {"DEDUP": True}),
    "take": (carry.take_rows_kernel, {"META": False}),
    "scatter": (carry.scatter_gradients_kernel, {}),
    "clear_tail": (carry.clear_tail_kernel, {}),
    "give": (carry.give_rows_kernel, {}),
    "push": (carry.push_rows_kernel, {}),
    "pull": (carry.pull_rows_kernel, {"PUSHED": False}),
    "expand": (carry.expand_rows_kernel, {}),
    "reduce": (carry.reduce_rows_kernel, {}),
}


def compiled(kernel: Any, constants: dict[str, Any], capability: int) -> Any:
    """Compile one kernel, with pointers and offsets that are multiples of 16."""
    signature, given, hints = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            given[name] = constants[name]
            continue
        signature[name] = TYPES.get(name, "i64" if name in WIDE else "i32")
        if name.endswith(("_ptr", "_at", "_size")):
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=hints)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(
        source, target=target, options={"num_warps": 4, "enable_fp_fusion": False}
    )


def instructions(ptx: str) -> dict[str, int]:
    """Count memory instructions, barriers and fences."""
    return dict(Counter(re.findall(r"\b(?:st|ld|atom|red|fence|bar|barrier)\.[.\w:]*", ptx)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("names", nargs="*", default=list(KERNELS))
    args = parser.parse_args()
    for name in args.names:
        kernel, constants = KERNELS[name]
        options = {**ROWS, **MORE, **constants}
        ptx = compiled(kernel, options, args.capability).asm["ptx"]
        release = ptx.find("release")
        found = {
            "name": name,
            "instructions": instructions(ptx),
            "barrier_before_release": "bar.sync" in ptx[: max(release, 0)],
            "fused": bool(re.search(r"\bfma\.rn\.f32", ptx)),
        }
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
