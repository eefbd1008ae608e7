"""Compile the kernels with NVSHMEM calls for a GPU that need not be there.

Usage: ``aot_remote.py CAPABILITY [NAME ...]``. Prints a line of JSON for each; reading the
bitcode library takes half a minute a kernel.
"""

import json
import sys
from typing import Any

import triton
from moe_dispatch.doctor import device_part
from moe_dispatch.rowwise.remote import kernel as remote
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    "bases_ptr": "*i64", "pes_ptr": "*i32", "state_ptr": "*i64", "to_ptr": "*i32",
    "place_ptr": "*i32",
}  # fmt: skip
CONSTANTS = {
    "W": 16, "M": 82, "ROW_BYTES": 4096, "SENT_BYTES": 4096, "WEIGHT_BYTES": 4, "K": 2,
    "META": True, "SCALARS": True,
}  # fmt: skip
KERNELS = {
    "signal": remote.signal_remote_kernel,
    "tell_counts": remote.tell_counts_remote_kernel,
    "put_rows": remote.put_rows_remote_kernel,
    "get_rows": remote.get_rows_remote_kernel,
}


def compiled(kernel: Any, capability: int, bitcode: str) -> Any:
    names = kernel.arg_names
    given = {name: CONSTANTS[name] for name in names if name in CONSTANTS}
    kinds = {
        name: "constexpr" if name in given
        else TYPES.get(name, "i64" if name.endswith(("_at", "_size")) else "i32")
        for name in names
    }  # fmt: skip
    source = ASTSource(fn=kernel, signature=kinds, constexprs=given)
    options = {"num_warps": 4, "extern_libs": {"libnvshmem_device": bitcode}}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    capability = int(sys.argv[1])
    part = device_part((capability // 10, capability % 10))
    if part is None:
        raise SystemExit("there is no NVSHMEM bitcode")
    for name in sys.argv[2:] or KERNELS:
        kernel = compiled(KERNELS[name], capability, str(part.path))
        ptx = kernel.asm["ptx"]
        found = {
            "name": name, "cubin": len(kernel.asm["cubin"]),
            "knows_nvshmem": "nvshmemi_device_state_d" in ptx, "bitcode": part.describe(),
        }  # fmt: skip
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
