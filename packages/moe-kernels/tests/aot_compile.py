"""Compile the kernels ahead of time, with no GPU, and print what came out as JSON.

A program of its own: a test process runs kernels in Triton's interpreter, which is decided when
they are imported and leaves nothing to compile. Arguments are names of architectures; every entry
of their tables is compiled, each size once.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from moe_kernels.config import ARCHITECTURES, Config, configs_of
from moe_kernels.gemm import kernel as gemm
from moe_kernels.mlp import kernel as mlp
from moe_kernels.mlp import rows_kernel, swiglu_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {"half": "bf16", "single": "fp32"}
NOT_DIVISIBLE = ("E", "N", "row", "f", "tiles", "tiles_n")


def window(dtype: str, n: int, c: int) -> str:
    return f"tensordesc<{dtype}[1,1,{n},{c}]>"


def block(dtype: str, *sizes: int) -> str:
    return f"tensordesc<{dtype}[{','.join(map(str, sizes))}]>"


def product(dtype: str, config: Config, d_major: bool):
    n, f, d = config.block_n, config.block_f, config.block_d
    types = {
        "x_desc": window(dtype, n, d),
        "w_desc": block(dtype, 1, f, d) if d_major else block(dtype, 1, d, f),
        "y_desc": window(dtype, n, f // 2 if config.halves else f),
    }
    constants = {"D_MAJOR": d_major, "ZERO_TAIL": True, "HALVES": config.halves}
    return gemm._grouped_mm_kernel, types, constants


def weight_gradient(dtype: str, config: Config, accumulate: bool):
    n, f, d = config.block_n, config.block_f, config.block_d
    types = {"x_desc": window(dtype, n, d), "dy_desc": window(dtype, n, f)}
    types |= {"dw_desc": block(dtype, 1, f, d)}
    constants = {"ACCUMULATE": accumulate}
    if accumulate:
        types["dw_ptr"], constants["dw_desc"] = "*fp32", None
    return gemm._grouped_mm_dw_kernel, types, constants


def gate_up(dtype: str, config: Config, top_k: int, keep: bool = True):
    n, f, d = config.block_n, config.block_f, config.block_d
    types = {"x_desc": window(dtype, n, d), "w_desc": block(dtype, 1, 2, f, d)}
    constants = {"K": top_k, "EVEN_D": True} | ({"x_desc": None} if top_k else {})
    if not top_k:
        constants["slot_of_row_ptr"] = None
    if not keep:
        constants["h_ptr"] = None
    return mlp._gate_up_kernel, types, constants


def sources(architecture: str):
    """Yield the name of each entry, a kernel, its types, constants and launch options."""
    seen = set()
    for entry, config in configs_of(architecture).items():
        operation, kind, _ = entry.split(".")
        if (operation, kind, config) in seen:
            continue
        seen.add((operation, kind, config))
        dtype = TYPES[kind]
        variants = {
            "forward": lambda c, t=dtype: {"": product(t, c, True)},
            "dgrad": lambda c, t=dtype: {"": product(t, c, False)},
            "wgrad": lambda c, t=dtype: {
                "": weight_gradient(t, c, False), "+=": weight_gradient(t, c, True),
            },
            "gate_up": lambda c, t=dtype: {
                "gather": gate_up(t, c, 8), "rows": gate_up(t, c, 0),
                "no gradient": gate_up(t, c, 8, keep=False),
            },
        }  # fmt: skip
        for variant, (function, types, constants) in variants[operation](config).items():
            blocks = {"BLOCK_N": config.block_n, "BLOCK_F": config.block_f}
            blocks |= {"BLOCK_D": config.block_d, "SUPER": config.super_n, "PROGRAMS": 132}
            yield (
                f"{entry} {variant}",
                dtype,
                function,
                types,
                {**blocks, **constants},
                config.launch,
            )
    for dtype in TYPES.values():
        for name, function, constants in (
            ("expand", rows_kernel._expand_kernel, {"K": 8, **rows_kernel.launch(2048)}),
            ("combine", rows_kernel._combine_kernel,
             {"K": 8, "UNROLL": rows_kernel.UNROLL, **rows_kernel.launch(2048)}),
            ("dswiglu", swiglu_kernel._dswiglu_kernel, swiglu_kernel.launch(1024)),
        ):  # fmt: skip
            options = {"num_warps": constants.pop("num_warps")}
            yield name, dtype, function, {}, constants, options


def type_of(name: str, dtype: str) -> str:
    if name.startswith(("weight", "dweight")):
        return "*fp32"
    if name in ("offsets_ptr", "tile_map_ptr", "num_tiles_ptr", "slot_of_row_ptr", "row_ptr"):
        return "*i32"
    return f"*{dtype}" if name.endswith("_ptr") else "i32"


def compile_one(dtype, function, types, constants, options, capability: int):
    signature = {
        name: "constexpr" if name in constants else types.get(name) or type_of(name, dtype)
        for name in function.arg_names
    }
    aligned = [
        index
        for index, (name, kind) in enumerate(signature.items())
        if kind != "constexpr" and "tensordesc" not in kind and name not in NOT_DIVISIBLE
    ]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
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


def count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx))


def main() -> None:
    rows = []
    for architecture in sys.argv[1:]:
        major, minor = ARCHITECTURES[architecture]
        for name, dtype, *source in sources(architecture):
            built = compile_one(dtype, *source, major * 10 + minor)
            ptx = built.asm["ptx"]
            row = {
                "kernel": name,
                "architecture": architecture,
                "dtype": dtype,
                "wgmma": count(r"wgmma\.mma_async", ptx),
                "tcgen05": count(r"tcgen05\.mma", ptx),
                "mma": count(r"\bmma\.sync", ptx),
                "fma": count(r"\bfma\.rn\.f32", ptx),
                "copy_engine": count(r"cp\.async\.bulk\.tensor", ptx),
                "wide_loads": count(r"cp\.async\.cg\.shared\.global|ld\.global[.\w:]*v[248]", ptx),
                "narrow_loads": count(r"ld\.global[.\w:]*\.b16|cp\.async\.ca\.shared", ptx),
                "wide_stores": count(r"st\.global[.\w:]*v4", ptx),
                "shared": built.metadata.shared,
                **resources(built.asm["cubin"]),
            }
            rows.append(row)
    sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    main()
