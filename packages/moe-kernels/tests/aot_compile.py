"""Compile the kernels ahead of time, with no GPU, and print what came out as JSON.

A program of its own: a test process runs kernels in Triton's interpreter, which is decided when
they are imported and leaves nothing to compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from moe_kernels.gemm import kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {"x_ptr", "w_ptr", "y_ptr", "dy_ptr", "dw_ptr"}
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MANY_ROWS = 1 << 20


def sources(dtype: str):
    """Yield a name, a kernel, the strides that are 1, its constants and its tile."""
    tile = kernel.choose_tile(TORCH_DTYPES[dtype], MANY_ROWS, 8)
    low = kernel.choose_tile(TORCH_DTYPES[dtype], 8, 8)
    dw = kernel.choose_dw_tile(TORCH_DTYPES[dtype])
    mm = {"BLOCK_E": 16, "EVEN_D": True, "SUPER": 8}
    forward, backward = ("stride_xd", "stride_wd"), ("stride_xd", "stride_wf")
    yield "forward", kernel._grouped_mm_kernel, forward, mm, tile
    yield "dgrad", kernel._grouped_mm_kernel, backward, mm, tile
    if low != tile:
        yield "forward_few_rows", kernel._grouped_mm_kernel, forward, mm, low
    yield "wgrad", kernel._grouped_mm_dw_kernel, ("stride_xd", "stride_dyf"), {}, dw


def compile_one(function, ones, constants, tile, dtype: str, capability: int):
    blocks = {"BLOCK_N": tile.n, "BLOCK_F": tile.f, "BLOCK_D": tile.d}
    constants = {**constants, **blocks, **dict.fromkeys(ones, 1)}
    signature = {
        name: "constexpr" if name in constants
        else f"*{dtype}" if name in POINTERS
        else "*i32" if name == "offsets_ptr"
        else "i32"
        for name in function.arg_names
    }  # fmt: skip
    aligned = [
        index
        for index, name in enumerate(function.arg_names)
        if name not in constants and name not in ("E", "N", "num_tiles")
    ]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> dict[str, int]:
    """Ask Triton's own cuobjdump for registers and stack; spilled registers live on the stack."""
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
        for dtype in sys.argv[1:]:
            for name, function, ones, constants, tile in sources(dtype):
                built = compile_one(function, ones, constants, tile, dtype, capability)
                ptx = built.asm["ptx"]
                rows.append(
                    {
                        "kernel": name,
                        "capability": capability,
                        "dtype": dtype,
                        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
                        "tcgen05": len(re.findall(r"tcgen05\.mma", ptx)),
                        "mma": len(re.findall(r"\bmma\.sync", ptx)),
                        "fma": len(re.findall(r"\bfma\.rn\.f32", ptx)),
                        "wide_loads": len(
                            re.findall(r"cp\.async\.cg\.shared\.global|ld\.global[.\w:]*v4", ptx)
                        ),
                        "narrow_loads": len(
                            re.findall(r"ld\.global[.\w:]*\.b16|cp\.async\.ca\.shared", ptx)
                        ),
                        "wide_stores": len(re.findall(r"st\.global[.\w:]*v4", ptx)),
                        "shared": built.metadata.shared,
                        **resources(built.asm["cubin"]),
                    }
                )
    sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    main()
