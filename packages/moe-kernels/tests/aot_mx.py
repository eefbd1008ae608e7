"""Compile the kernels of MXFP8 ahead of time, with no GPU, and print what came out as JSON.

A program of its own, as ``aot_compile.py`` is, and for the same reason. Arguments are names of
architectures.
"""

import json
import sys

from aot_compile import compile_one, count, resources
from moe_kernels.config import ARCHITECTURES
from moe_kernels.mxfp8 import columns_kernel, dequantize_kernel, dswiglu_kernel, rows_kernel
from moe_kernels.mxfp8.encode import SHARES

BYTES = ("data_ptr", "scale_ptr", "row_data_ptr", "row_scale_ptr")
WORDS = ("word_ptr", "column_amax_ptr", "row_amax_ptr")
TYPES = dict.fromkeys(BYTES, "*u8") | dict.fromkeys(WORDS, "*i32")
HARDWARE = {"sm_80": False}  # rounding to e4m3 is an instruction from 8.9 on
WIDE = 24576  # columns of a row that no program holds


def rows(recipe: str, source: str, D: int):
    constants = {"SOURCE": source, "K": 8, "SHARE": SHARES[recipe]}
    if source != "routed":
        constants |= {"slot_of_row_ptr": None, "weight_ptr": None}
    if source != "swiglu":
        constants["offsets_ptr"] = None
    return rows_kernel._quantize_rows_kernel, constants | rows_kernel.launch(D, recipe)


def columns(recipe: str, both: bool, grouped: bool, hardware: bool = True):
    constants = {"SHARE": SHARES[recipe], **columns_kernel.launch(recipe, both, hardware)}
    if not both:
        constants |= {"row_data_ptr": None, "row_scale_ptr": None}
    if not grouped:
        constants |= {"tile_map_ptr": None, "offsets_ptr": None}
    if recipe != "mxrow":
        constants |= {"column_amax_ptr": None}
    if recipe != "mxrow" or not both:
        constants |= {"row_amax_ptr": None}
    return columns_kernel._quantize_columns_kernel, constants


def amax(both: bool, grouped: bool):
    constants = columns("mxrow", both, grouped)[1]
    names = columns_kernel._amax_kernel.arg_names
    return columns_kernel._amax_kernel, {
        key: value for key, value in constants.items() if key in names or key == "num_warps"
    }


def sources(hardware: bool):
    """Yield the name of each kernel, the kernel and its constants."""
    for recipe in SHARES:
        for source in ("plain", "swiglu", "routed"):
            yield f"rows {source} {recipe}", *rows(recipe, source, 2560)
        for both in (False, True):
            name = "both" if both else "columns"
            yield f"{name} grouped {recipe}", *columns(recipe, both, True, hardware)
        constants = {"SHARE": SHARES[recipe], **dswiglu_kernel.launch(1536, recipe)}
        yield f"dswiglu {recipe}", dswiglu_kernel._quantize_dswiglu_kernel, constants
    yield "both whole mx32", *columns("mx32", True, False, hardware)
    yield "rows plain wide", *rows("mxrow", "plain", WIDE)
    yield "dequantize", dequantize_kernel._dequantize_kernel, dequantize_kernel.launch()
    for both in (False, True):
        yield f"amax {'both' if both else 'columns'}", *amax(both, True)


def dtypes(name: str, architecture: str) -> tuple[str, ...]:
    """Return the dtypes to compile for: float32 and the oldest GPU are spot checks."""
    if architecture == "sm_80":
        return ("bf16",) if "mx32" in name else ()
    return ("bf16", "fp32") if "plain mx32" in name or "both grouped" in name else ("bf16",)


def compiled(name: str, function, constants: dict, dtype: str, architecture: str):
    major, minor = ARCHITECTURES[architecture]
    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps")}
    if "RCEIL" in function.arg_names:
        constants |= {"RCEIL": True, "HARDWARE": HARDWARE.get(architecture, True)}
    return compile_one(dtype, function, TYPES, constants, options, major * 10 + minor)


def main() -> None:
    found = []
    for architecture in sys.argv[1:]:
        for name, function, constants in sources(HARDWARE.get(architecture, True)):
            for dtype in dtypes(name, architecture):
                built = compiled(name, function, constants, dtype, architecture)
                ptx = built.asm["ptx"]
                found.append(
                    {
                        "kernel": name,
                        "architecture": architecture,
                        "dtype": dtype,
                        "conversions": count(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx),
                        "flushes": count(r"(?:add|mul|fma)[.\w]*\.ftz", ptx),
                        "unsigned": count(r"max\.u32|redux\.sync\.max\.u32", ptx),
                        "loads": count(r"ld\.global", ptx),
                        "narrow_loads": count(r"ld\.global[.\w:]*\.[bu](?:8|16) ", ptx),
                        "wide_loads": count(r"ld\.global[.\w:]*v[248]\.b(?:32|64)", ptx),
                        "byte_stores": count(r"st\.global[.\w:]*\.b8 ", ptx),
                        "wide_stores": count(r"st\.global[.\w:]*v[248]\.b(?:32|64)", ptx),
                        "single_stores": count(r"st\.global[.\w:]*\.b32 ", ptx)
                        - count(r"st\.global[.\w:]*v[248]\.b32 ", ptx),
                        "stores": count(r"st\.global", ptx),
                        "shared": built.metadata.shared,
                        **resources(built.asm["cubin"]),
                    }
                )
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
