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
from moe_kernels.mxgemm import kernel as scaled_kernel
from moe_kernels.mxgemm import native_kernel, swizzle_kernel
from moe_kernels.mxmlp import rows_kernel as mx_rows_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {"half": "bf16", "single": "fp32"}
FLOAT8 = "fp8e4nv"
NOT_DIVISIBLE = (
    "E", "N", "row", "f", "tiles", "tiles_n", "B", "G", "stride_s", "stride_sx", "stride_st"
)  # fmt: skip


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


def scaled(recipe: str, config: Config, top_k: int):
    n, f, d = config.block_n, config.block_f, config.block_d
    types = {
        "x_ptr": f"*{FLOAT8}", "x_desc": window(FLOAT8, n, d), "w_desc": block(FLOAT8, 1, f, d),
        "y_desc": window("bf16", n, f // 2 if config.halves else f),
    }  # fmt: skip
    constants = {
        "K": top_k, "PROMOTE": recipe != "mxrow", "EVEN_D": True, "ZERO_TAIL": True,
        "HALVES": config.halves, "x_desc" if top_k else "slot_of_row_ptr": None,
    }  # fmt: skip
    return scaled_kernel._scaled_mm_kernel, types, constants


def native(config: Config):
    n, f, d = config.block_n, config.block_f, config.block_d
    types = {
        "x_desc": window(FLOAT8, n, d), "w_desc": block(FLOAT8, 1, f, d),
        "x_scale_desc": block("u8", 1, 1, d // 128, 2, 256),
        "w_scale_desc": block("u8", 1, f // 128, d // 128, 2, 256),
        "y_desc": window("bf16", n, f // 2 if config.halves else f),
    }  # fmt: skip
    return native_kernel._native_mm_kernel, types, {"ZERO_TAIL": True, "HALVES": config.halves}


def scaled_variants(architecture: str, recipe: str, config: Config) -> dict[str, tuple]:
    if architecture == "sm_100":
        return {"": native(config)}
    return {"gather": scaled(recipe, config, 8), "rows": scaled(recipe, config, 0)}


def sources(architecture: str):
    """Yield the name of each entry, a kernel, its types, constants and launch options."""
    seen = set()
    for entry, config in configs_of(architecture).items():
        operation, kind, _ = entry.split(".")
        if (operation, kind, config) in seen:
            continue
        seen.add((operation, kind, config))
        dtype = TYPES.get(kind, "bf16")
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
            "scaled": lambda c, r=kind: scaled_variants(architecture, r, c),
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
    if any(entry.startswith("scaled") for entry in configs_of(architecture)):
        launch = mx_rows_kernel.launch(2048)
        options, types = {"num_warps": launch.pop("num_warps")}, {"x_ptr": f"*{FLOAT8}"}
        yield "expand MX", "bf16", mx_rows_kernel._expand_kernel, types, {"K": 8, **launch}, options
    if architecture == "sm_100":
        constants = {"GROUPED": True}
        yield "swizzle", "u8", swizzle_kernel._swizzle_kernel, {}, constants, {"num_warps": 4}
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
    if name in ("x_scale_ptr", "w_scale_ptr", "scale_ptr"):
        return "*u8"
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
                "float8_wgmma": count(r"wgmma\.mma_async[^;]*\.e4m3\.e4m3", ptx),
                "float8_mma": count(r"\bmma\.sync[^;]*\.e4m3\.e4m3", ptx),
                "block_scale": count(r"tcgen05\.mma[^;]*block_scale", ptx),
                "scale_copies": count(r"tcgen05\.cp", ptx),
                "tensor_memory": getattr(built.metadata, "tmem_size", 0),
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
