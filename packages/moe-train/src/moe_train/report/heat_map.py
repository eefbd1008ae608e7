"""The load of experts as colours: grey for an even share, blue for less, orange for more.

Loads compare as ratios to the even share 1/E: a quarter of it is as far from grey as four
times it. Small differences are the usual ones, so colour grows with the root of the distance.
The colours are the classes ``q0`` to ``q20``, which `palette` defines.
"""

import itertools
import math
from html import escape

import numpy as np

from moe_train.report.run_data import Array
from moe_train.report.scale import nice_ticks, write_number

LEVELS = 21
_LIGHT = ("#1d5fa8", "#eeeeec", "#c4480a")
_DARK = ("#62aef7", "#2e3034", "#ff9a4d")


def level(load: float, experts: int) -> int | None:
    """Return the colour of a load, 0 to 20 with 10 for 1/E, or None for what is no number.

    Examples:
        >>> [level(load, 8) for load in (0.0, 1 / 16, 1 / 8, 1 / 4, 1.0, math.nan)]
        [0, 3, 10, 17, 20, None]
    """
    if not math.isfinite(load) or load < 0:
        return None
    octaves = math.log2(min(max(load * experts, 0.25), 4.0))
    distance = math.copysign(math.sqrt(abs(octaves) / 2), octaves)
    return round((distance + 1) / 2 * (LEVELS - 1))


def palette(dark: bool) -> str:
    """Return the colours as CSS variables ``--q0`` to ``--q20``."""
    ends = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (_DARK if dark else _LIGHT)]
    half = LEVELS // 2
    words = []
    for q in range(LEVELS):
        near, far = ends[1], ends[0] if q < half else ends[2]
        part = abs(q - half) / half
        rgb = [round(a + (b - a) * part) for a, b in zip(near, far, strict=True)]
        words.append(f"--q{q}:#{rgb[0]:02x}{rgb[1]:02x}{rgb[2]:02x}")
    return ";".join(words)


def draw_load(load_LE: Array, title: str) -> str:
    """Draw the load of every expert of every layer, with its value in or behind each cell.

    Args:
        load_LE: Fraction of the routed tokens, [layers, experts].
        title: Says what is drawn.
    """
    layers, experts = load_LE.shape
    left, top, width = 58, 20, 1120
    cell = (width - left) / experts
    row = max(9.0, min(26.0, 420 / layers))
    height = top + layers * row + 18
    parts = []
    for i in range(layers):
        y = top + i * row
        if row >= 11 or i % 5 == 0:
            parts.append(
                f'<text class="y-tick" x="{left - 7}" y="{y + row / 2 + 4:.1f}">{i}</text>'
            )
        for e in range(experts):
            value = float(load_LE[i, e])
            q, x = level(value, experts), left + e * cell
            words = "no number" if q is None else f"{100 * value:.3g} %"
            parts.append(
                f'<rect class="q{"x" if q is None else q}" x="{x:.1f}" y="{y:.1f}" '
                f'width="{cell - 1:.1f}" height="{row - 1:.1f}">'
                f"<title>layer {i}, expert {e}: {words}</title></rect>"
            )
            if cell >= 40 and row >= 14 and q is not None:
                loud = " loud" if abs(q - LEVELS // 2) > 6 else ""
                at = f'x="{x + cell / 2:.1f}" y="{y + row / 2 + 4:.1f}"'
                parts.append(f'<text class="cell{loud}" {at}>{100 * value:.1f}</text>')
    every = max(1, round(30 / cell))
    for e in range(0, experts, every):
        at = left + (e + 0.5) * cell
        parts.append(f'<text class="x-tick" x="{at:.1f}" y="{top - 7}">{e}</text>')
    parts.append(f'<text class="unit y-unit" x="4" y="{top - 7}">layer</text>')
    parts.append(f'<text class="unit" x="{width}" y="{height - 4:.1f}">expert</text>')
    return _svg(width, height, f"{title}: {_describe(load_LE)}", parts)


def draw_load_over_time(steps_B: Array, load_BE: Array, title: str, last: float) -> str:
    """Draw the load of the experts of one layer, an expert a row, time to the right.

    Args:
        steps_B: First step of each bucket, rising.
        load_BE: Mean load in each bucket, [buckets, experts].
        title: Says what is drawn.
        last: Last step of the last bucket.
    """
    buckets, experts = load_BE.shape
    left, top, width = 30, 8, 360
    row = max(1.25, min(15.0, 160 / experts))
    height, cell = top + experts * row + 30, (width - left) / buckets
    runs: dict[str, list[str]] = {}
    for e in range(experts):
        levels = [level(float(load), experts) for load in load_BE[:, e]]
        start = 0
        for q, run in itertools.groupby(levels):
            length = len(list(run))
            runs.setdefault("qx" if q is None else f"q{q}", []).append(
                f"M{start} {e}h{length}v1h-{length}z"
            )
            start += length
    place = f"translate({left} {top}) scale({cell:.5g} {row:.5g})"
    parts = [f'<g transform="{place}" shape-rendering="crispEdges">']
    parts += [f'<path class="{name}" d="{"".join(d)}"/>' for name, d in sorted(runs.items())]
    parts.append("</g>")
    for e in nice_ticks(0, experts - 1, 4) if experts > 1 else [0.0]:
        if e == round(e):
            y = top + (e + 0.5) * row + 4
            parts.append(f'<text class="y-tick" x="{left - 5}" y="{y:.1f}">{e:.0f}</text>')
    bottom = top + experts * row
    ends = [*steps_B[1:].tolist(), last]
    for b, (start, end) in enumerate(zip(steps_B.tolist(), ends, strict=True)):
        words = f"from step {start:.0f} to {end:.0f}\n{_describe(load_BE[b : b + 1])}"
        parts.append(
            f'<rect class="strip" x="{left + b * cell:.1f}" y="{top}" width="{cell:.1f}" '
            f'height="{bottom - top:.1f}"><title>{escape(words)}</title></rect>'
        )
    for at, style, step in ((left, "first", float(steps_B[0])), (width, "last", last)):
        words = f"step {write_number(step, 6)}"
        parts.append(f'<text class="x-tick {style}" x="{at}" y="{bottom + 15:.1f}">{words}</text>')
    return _svg(width, height, f"{title}: {_describe(load_BE[-1:])} at the end", parts)


def draw_legend(experts: int) -> str:
    """Draw the colours and what they stand for."""
    left, size, parts = 6, 15, []
    for q in range(LEVELS):
        parts.append(f'<rect class="q{q}" x="{left + q * size}" y="4" width="{size}" height="12"/>')
    right = left + LEVELS * size
    for at, ratio, anchor in (
        (left, 0.25, " first"),
        ((left + right) / 2, 1, ""),
        (right, 4, " last"),
    ):
        words = f"{100 * min(1.0, ratio / experts):.3g} %" + " (even)" * (ratio == 1)
        parts.append(f'<text class="x-tick{anchor}" x="{at}" y="30">{words}</text>')
    return _svg(left * 2 + LEVELS * size, 36, "colours: share of the tokens", parts, "legend")


def _describe(load_LE: Array) -> str:
    if not np.isfinite(load_LE).any():
        return "no numbers"
    # The last axis is experts, so the place of an extreme tells which one it is.
    words = []
    for name, index in (("most", np.nanargmax(load_LE)), ("least", np.nanargmin(load_LE))):
        i, e = divmod(int(index), load_LE.shape[1])
        where = f"layer {i} expert {e}" if len(load_LE) > 1 else f"expert {e}"
        words.append(f"{name} {100 * float(load_LE.flat[index]):.3g} % ({where})")
    return ", ".join(words)


def _svg(width: float, height: float, label: str, parts: list[str], style: str = "heat") -> str:
    return (
        f'<svg class="{style}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
