"""From numbers to places on paper, and to words that people read."""

import math
from typing import NamedTuple

import numpy as np

from moe_train.report.run_data import Array

_LARGEST = 1e300  # beyond it a difference may overflow


class Scale(NamedTuple):
    """A map from values ``low..high`` to places ``start..stop``, linear or logarithmic.

    Attributes:
        low: The value at ``start``.
        high: The value at ``stop``; more than ``low``.
        start: Place of ``low``.
        stop: Place of ``high``.
        log: Whether equal ratios, rather than differences, have equal lengths.
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def place(self, values: Array) -> Array:
        """Return the places of values; those out of range go to the nearer end, NaN stays."""
        values = np.clip(values, self.low, self.high)
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log(values), math.log(low), math.log(high)
        return self.start + (values - low) / (high - low) * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about ``count`` round values in the range."""
        return (
            log_ticks(self.low, self.high) if self.log else nice_ticks(self.low, self.high, count)
        )


def value_range(values: Array, log: bool = False) -> tuple[float, float]:
    """Return limits that show the values, without letting a few spikes flatten all others.

    Values that are not finite do not count, nor do those less than or equal to 0 on a
    logarithmic scale. The limits always differ.

    Examples:
        >>> value_range(np.array([1.0, 2.0]))
        (0.96, 2.04)
    """
    values = np.clip(values[np.isfinite(values)], -_LARGEST, _LARGEST)
    if log:
        values = values[values > 0]
    if len(values) == 0:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if log:
        return (low / 2, high * 2) if low == high else (low / 1.1, high * 1.1)
    values = np.sort(values)
    high, low = _without_jumps(values), -_without_jumps(-values[::-1])
    pad = 0.04 * (high - low) if high > low else 0.05 * abs(low) or 1.0
    return low - pad, high + pad


def _without_jumps(values: Array) -> float:
    """Return the largest of sorted values that does not stand far above the one before it.

    Far is three times its distance from the low end, and only the top hundredth is tried: a
    loss that falls from a high start has no such jump, one that explodes once does.
    """
    reach = values - np.quantile(values, 0.01)
    first = int(0.99 * (len(values) - 1))
    before, after = reach[first:-1], reach[first + 1 :]
    jumps = np.flatnonzero((before > 0) & (after > 3 * before))
    return float(values[first + jumps[0]] if len(jumps) else values[-1])


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` multiples of 1, 2 or 5 times a power of ten within the limits.

    Examples:
        >>> nice_ticks(0.13, 1.02)
        [0.2, 0.4, 0.6, 0.8, 1.0]
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.8)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Through the decimal form, so that 3 * 0.1 is 0.3.
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten within the limits, and 2 and 5 times them where there are few.

    Examples:
        >>> log_ticks(0.3, 30)
        [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, (last - first) // 6)
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [float(f"{m}e{p}") for p in range(first, last + 1, stride) for m in factors]
    return [tick for tick in ticks if low <= tick <= high]


def write_number(value: float, digits: int = 4) -> str:
    """Write a number in few characters.

    Examples:
        >>> [write_number(x) for x in (0.0, 2.34567, 12350.0, 4.1e6, 3e-5, math.nan)]
        ['0', '2.346', '12.35k', '4.1M', '3e-05', 'not finite']
        >>> write_number(6590.0, 3), write_number(999_999.0), write_number(-1e30)
        ('6,590', '1M', '-1e+30')
    """
    if not math.isfinite(value):
        return "not finite"
    value = float(f"{value:.{digits}g}")
    if 1e4 <= abs(value) < 1e12:
        for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if abs(value) >= scale:
                return f"{value / scale:.{digits}g}{unit}"
    return f"{value:,.10g}"
