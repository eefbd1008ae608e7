"""What the kernels of MXFP8 share: from float32 values to scales and bytes.

All of it is exact: a value is multiplied by a power of two, which changes its exponent alone, and
rounded once, to e4m3. So the bytes are those of the reference, on every device.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.mxfp8.format import BLOCK, CHUNK
from moe_kernels.scratch import scratch

SHARES = {"mx32": BLOCK, "mx128": CHUNK, "mxrow": 0}
"""Values that share a scale; 0 for a row."""


def has_e4m3(x: Tensor) -> bool:
    """Tell whether the device rounds to e4m3 by an instruction: GPUs from 8.9 on."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def bytes_like(x: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    """Return memory for an MXFP8 tensor of this shape, both parts as bytes."""
    return scratch(x, *shape, dtype=torch.uint8), scratch(x, *blocks_of(shape), dtype=torch.uint8)


def blocks_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of this shape."""
    return *shape[:-1], shape[-1] // BLOCK


def as_rows(x: Tensor) -> Tensor:
    """Return ``x`` with its leading axes as one, its last of stride 1; copied if need be."""
    if x.ndim != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@triton.jit
def magnitude(x):
    """Return numbers in the order of absolute values, with those not finite below all others.

    Twice the bits of a float32 drop its sign; adding 0x01000000 then wraps around just where the
    exponent is 255. Two instructions a value, the maximum included, where comparing takes three.
    """
    return (x.to(tl.uint32, bitcast=True) << 1) + 0x01000000


@triton.jit
def amax_bits(most):
    """Return the bits of the largest finite absolute value from the largest magnitude; int32."""
    return ((tl.maximum(most, 0x01000000) - 0x01000000) >> 1).to(tl.int32, bitcast=True)


@triton.jit
def scale_code(bits, RCEIL: tl.constexpr):
    """Return the biased exponent of the scale for values up to the float32 of these bits.

    The exponent less 8, that of 448; one more under RCEIL if the significand passes 1.75, that of
    448. Adding 0x1FFFFF to the bits carries into the exponent just then.

    Example: 448 = 1.75 * 2**8 has code 127, 449 has 128 under RCEIL and 127 under FLOOR.
    """
    rounded = bits
    if RCEIL:
        rounded += 0x1FFFFF
    return tl.where(bits > 0, tl.maximum((rounded >> 23) - 8, 0), 127)


@triton.jit
def inverse_scale(code):
    """Return ``2**(127 - code)``; codes of finite values end at 247, so that it is normal."""
    return ((254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, inverse):
    """Return ``x * inverse``, and NaN for an infinity; a zero keeps its sign."""
    return x * inverse + x * 0.0


@triton.jit
def _rounded(x, inverse):
    """Return the bytes of ``x * inverse``, int32, by integer arithmetic.

    Bit 20 of a float32 is the last that e4m3 keeps. Below 2**-6, where e4m3 has steps of 2**-9, so
    has float32 from 2**14 on: adding that rounds.
    """
    scaled = x * inverse
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(scaled), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(size < 0.015625, small, normal) | sign
    return tl.where(tl.abs(x) < float("inf"), byte, 0x7F)


@triton.jit
def e4m3_bytes(x, inverse, HARDWARE: tl.constexpr):
    """Round ``x * inverse`` to the nearest e4m3, ties to even, and return its byte.

    Beyond 448 it saturates; NaN and infinities of ``x`` are NaN, 0x7F.
    """
    if HARDWARE:
        return _scaled(x, inverse).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return _rounded(x, inverse).to(tl.uint8)


@triton.jit
def e4m3_words(x0, x1, x2, x3, inverse, HARDWARE: tl.constexpr):
    """Return the bytes of four tiles side by side, that of ``x0`` lowest; int32.

    Triton's own conversion takes neighbours of one tile, which would have to be taken apart again.
    """
    if HARDWARE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f",
            [
                _scaled(x0, inverse),
                _scaled(x1, inverse),
                _scaled(x2, inverse),
                _scaled(x3, inverse),
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    low = _rounded(x0, inverse) | (_rounded(x1, inverse) << 8)
    return low | (_rounded(x2, inverse) << 16) | (_rounded(x3, inverse) << 24)


@triton.jit
def sigmoid(x, HARDWARE: tl.constexpr):
    """Return ``1 / (1 + exp(-x))``, to three units in the last place.

    HARDWARE: by two instructions, of which neither needs care here: what the first flushes to zero
    is less than half a unit of the 1, and the second never meets what it would flush.
    """
    if HARDWARE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }
            """,
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.sigmoid(x)


@triton.jit
def encode_tile(x, SHARE: tl.constexpr, RCEIL: tl.constexpr, HARDWARE: tl.constexpr):
    """Quantise a tile ``[N, D]`` along its columns, of which SHARE neighbours have one scale.

    Returns the bytes ``[N, D]`` and the codes of blocks ``[N, D // 32]``, int32.
    """
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    runs = tl.reshape(x, (N, D // SHARE, SHARE))
    code = scale_code(amax_bits(tl.max(magnitude(runs), axis=2)), RCEIL)
    data = e4m3_bytes(runs, inverse_scale(code)[:, :, None], HARDWARE)
    codes = tl.broadcast_to(code[:, :, None], (N, D // SHARE, SHARE // 32))
    return tl.reshape(data, (N, D)), tl.reshape(codes, (N, D // 32))


@triton.jit
def encode_rows(x, code, HARDWARE: tl.constexpr):
    """Quantise a tile ``[N, D]`` whose rows have the scales ``code`` ``[N]``."""
    data = e4m3_bytes(x, inverse_scale(code)[:, None], HARDWARE)
    return data, tl.broadcast_to(code[:, None], (x.shape[0], x.shape[1] // 32))


@triton.jit
def store_rows(data_ptr, scale_ptr, data, codes, n, live, d_start, d_end, D):
    """Store a tile at rows ``n`` where ``live``, and at columns ``d_start:d_end`` of D."""
    d = d_start + tl.arange(0, data.shape[1])
    b = d_start // 32 + tl.arange(0, codes.shape[1])
    wide = n.to(tl.int64)[:, None]
    at = live[:, None] & (d[None, :] < d_end)
    tl.store(data_ptr + wide * D + d[None, :], data, mask=at)
    at = live[:, None] & (b[None, :] < d_end // 32)
    tl.store(scale_ptr + wide * (D // 32) + b[None, :], codes.to(tl.uint8), mask=at)
