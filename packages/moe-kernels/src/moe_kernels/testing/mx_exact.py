"""MXFP8 in exact arithmetic: slow, and with no bit in common with the code that it judges.

Values are fractions, float8 is a table of all its values, and a scale is found by comparing.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction

BLOCK = 32
SHARES = {"mx32": 1, "mx128": 4, "mxrow": None}
NAN = 0x7F


def e4m3(byte: int) -> Fraction:
    """Return the value of a byte from 0 to 126: 4 bits of exponent, 3 of fraction."""
    exponent, fraction = byte >> 3, byte & 7
    if exponent == 0:
        return Fraction(fraction, 2**9)
    return Fraction(8 + fraction, 8) * Fraction(2) ** (exponent - 7)


TABLE = [e4m3(byte) for byte in range(NAN)]
LARGEST = TABLE[-1]  # 448


def scale_exponent(amax: Fraction, rounding: str) -> int:
    """Return e of the scale ``2**e`` for values up to ``amax``, from -127 to 127."""
    if amax == 0:
        return 0
    for exponent in range(-127, 128):
        scale = Fraction(2) ** exponent
        # FLOOR: 2**(floor(log2(amax)) - 8), so amax is below 2**9 times the scale.
        if amax <= LARGEST * scale if rounding == "rceil" else amax < 512 * scale:
            return exponent
    raise ValueError(f"no scale holds {float(amax)}")


def round_to_e4m3(value: Fraction) -> int:
    """Return the byte of the nearest float8 to a value that is not negative; ties to even bytes."""
    if value >= LARGEST:
        return NAN - 1
    above = bisect_left(TABLE, value)
    if TABLE[above] == value:
        return above
    low, high = value - TABLE[above - 1], TABLE[above] - value
    if low == high:
        return above - above % 2
    return above - 1 if low < high else above


def quantize_exactly(row: Sequence[float], recipe: str, rounding: str) -> tuple[bytes, bytes]:
    """Return data and scales of one row of float32 values."""
    blocks = [row[start : start + BLOCK] for start in range(0, len(row), BLOCK)]
    share = SHARES[recipe] or len(blocks)
    data, scales = bytearray(), bytearray()
    for first in range(0, len(blocks), share):
        run = [value for block in blocks[first : first + share] for value in block]
        finite = [abs(Fraction(value)) for value in run if math.isfinite(value)]
        exponent = scale_exponent(max(finite, default=Fraction(0)), rounding)
        scales += bytes([exponent + 127]) * (len(run) // BLOCK)
        for value in run:
            if not math.isfinite(value):
                data.append(NAN)
                continue
            byte = round_to_e4m3(abs(Fraction(value)) / Fraction(2) ** exponent)
            data.append(byte | (0x80 if math.copysign(1.0, value) < 0 else 0))
    return bytes(data), bytes(scales)


def dequantize_exactly(byte: int, code: int) -> float:
    """Return the float64 that a byte of a block of this scale stands for; NaN for what is none."""
    if code == 255 or byte & 0x7F == NAN:
        return math.nan
    size = TABLE[byte & 0x7F] * Fraction(2) ** (code - 127)
    return math.copysign(float(size), -1.0 if byte & 0x80 else 1.0)
