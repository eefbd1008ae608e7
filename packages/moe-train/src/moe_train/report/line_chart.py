"""Lines over training steps, as SVG. Pure functions: the same data give the same text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from moe_train.report.run_data import Array
from moe_train.report.scale import Scale, value_range, write_number

_STRIPS = 240  # places that show their values under the pointer
_FEW = 20  # values that have dots in any line: a short line is hard to see
_MANY = 150  # values that have dots if the line asks for them
_COLUMNS = 500  # places along x beyond which a line is thinned
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 104, 22, 40


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart.

    Attributes:
        label: What it shows; stands at its right end if ``named``.
        x: Steps, rising.
        y: Values; where they are not finite the line has a gap.
        style: CSS class that gives the colour.
        named: Whether the label is drawn.
        dots: Whether each value has a dot, unless there are so many that they would touch.
    """

    label: str
    x: Array
    y: Array
    style: str
    named: bool = True
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart shows besides its lines.

    Attributes:
        title: Says what is drawn; also for screen readers.
        unit: Of the values.
        width: Of the drawing, in its own units; it scales with the page.
        height: As ``width``.
        log: Whether the values have a logarithmic scale.
        references: Horizontal lines: label and value.
        marks: Vertical lines: label and step.
        skipped: Steps whose update was skipped.
        zero: Whether the scale must reach 0.
    """

    title: str
    unit: str
    width: int = 550
    height: int = 250
    log: bool = False
    references: Sequence[tuple[str, float]] = ()
    marks: Sequence[tuple[str, float]] = ()
    skipped: Sequence[float] = ()
    zero: bool = False


def draw_lines(lines: Sequence[Line], chart: Chart) -> str:
    """Return the chart as an SVG element.

    Args:
        lines: The lines; later ones are drawn over earlier ones.
        chart: Everything else.
    """
    x, y = _scales(lines, chart)
    body = [*_axes(x, y, chart), *_marks(x, y, chart)]
    labels = []
    for name, value in chart.references:
        if math.isfinite(value):
            at = float(y.place(np.array([value]))[0])
            body.append(f'<path class="reference" d="M{x.start} {at:.1f}H{x.stop}"/>')
            labels.append((at, f"{name} {write_number(value)}", "reference"))
    for line in lines:
        body.append(_path(line, x, y))
        seen = np.flatnonzero(np.isfinite(line.y))
        if line.named and len(seen):
            at = float(y.place(line.y[seen[-1:]])[0])
            labels.append((at, line.label, line.style))
    body += _end_labels(labels, x.stop + 6, y)
    body += [*_mark_labels(x, y, chart), *_notes(lines, x, y)]
    if not any(np.isfinite(line.y).any() for line in lines):
        middle = (x.start + x.stop) / 2
        body.append(f'<text class="empty" x="{middle}" y="{chart.height / 2}">no data</text>')
    body += _strips(lines, x, y)
    return (
        f'<svg class="chart" viewBox="0 0 {chart.width} {chart.height}" role="img" '
        f'aria-label="{escape(_describe(lines, chart))}">{"".join(body)}</svg>'
    )


def thin(x: Array, y: Array, columns: int) -> tuple[Array, Array]:
    """Keep the least and the greatest value of each column of points, in their order.

    Spikes survive, unlike in an average. A gap survives as NaN.

    Args:
        x: Steps, rising.
        y: Values.
        columns: Number of columns; points are returned as they are if they are not more.
    """
    if len(x) <= 2 * columns:
        return x, y
    kept: set[int] = set()
    for piece in np.array_split(np.arange(len(x)), columns):
        finite = piece[np.isfinite(y[piece])]
        kept.update(piece[~np.isfinite(y[piece])][:1].tolist())
        if len(finite):
            kept.update((int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])))
    index = np.array(sorted(kept))
    return x[index], y[index]


def _scales(lines: Sequence[Line], chart: Chart) -> tuple[Scale, Scale]:
    xs = np.concatenate([np.zeros(0), *(line.x for line in lines)])
    first, last = (float(xs.min()), float(xs.max())) if len(xs) else (0.0, 1.0)
    if first == last:
        first, last = first - 1, last + 1
    elif 0 < first <= 0.2 * last:
        first = 0.0
    fixed = [value for _, value in chart.references] + ([0.0] if chart.zero else [])
    # Fixed values must be in sight, so they count more often than a spike could.
    low, high = value_range(np.concatenate([np.zeros(0), *(line.y for line in lines)]), chart.log)
    fixed = [value for value in fixed if math.isfinite(value) and (value > 0 or not chart.log)]
    if fixed:
        pad = 0.0 if chart.log else 0.04 * (max(high, *fixed) - min(low, *fixed))
        low = min(low, min(fixed) - pad * (min(fixed) != 0))
        high = max(high, max(fixed) + pad)
    x = Scale(first, last, _LEFT, chart.width - _RIGHT)
    return x, Scale(low, high, chart.height - _BOTTOM, _TOP, chart.log)


def _axes(x: Scale, y: Scale, chart: Chart) -> list[str]:
    parts = []
    for tick in y.ticks(max(3, chart.height // 60)):
        at = float(y.place(np.array([tick]))[0])
        parts.append(f'<path class="grid" d="M{x.start} {at:.1f}H{x.stop}"/>')
        parts.append(
            f'<text class="y-tick" x="{x.start - 7}" y="{at + 4:.1f}" data-y="{at:.1f}">'
            f"{write_number(tick, 6)}</text>"
        )
    for tick in x.ticks(max(3, chart.width // 130)):
        if tick != round(tick):  # there is no half of a step
            continue
        at = float(x.place(np.array([tick]))[0])
        parts.append(f'<path class="grid" d="M{at:.1f} {y.start}v5"/>')
        parts.append(
            f'<text class="x-tick" x="{at:.1f}" y="{y.start + 18}">{write_number(tick, 6)}</text>'
        )
    parts.append(f'<path class="axis" d="M{x.start} {y.start}H{x.stop}"/>')
    parts.append(f'<text class="unit" x="{x.stop}" y="{y.start + 33}">step</text>')
    unit = chart.unit + (", log scale" if chart.log else "")
    parts.append(f'<text class="unit y-unit" x="4" y="12">{escape(unit)}</text>')
    return parts


def _marks(x: Scale, y: Scale, chart: Chart) -> list[str]:
    parts = []
    for label, step in chart.marks:
        at = float(x.place(np.array([step]))[0])
        title = f"<title>{escape(label)} at step {step:.0f}</title>"
        parts.append(f'<path class="mark" d="M{at:.1f} {y.start}V{y.stop}">{title}</path>')
    if len(chart.skipped):
        places = np.unique(np.round(x.place(np.asarray(chart.skipped, dtype=float)), 1))
        d = "".join(f"M{at} {y.start - 6}v6" for at in places)
        title = f"<title>{len(chart.skipped)} skipped updates</title>"
        parts.append(f'<path class="skipped" d="{d}">{title}</path>')
    return parts


def _mark_labels(x: Scale, y: Scale, chart: Chart) -> list[str]:
    """Label marks, but none where it would cover another's label."""
    parts, free = [], -math.inf
    for label, step in chart.marks:
        at = float(x.place(np.array([step]))[0])
        if at > free:
            place = f'x="{at + 4:.1f}" y="{y.stop + 9}"'
            parts.append(f'<text class="mark-label" {place}>{escape(label)}</text>')
            free = at + 6.2 * len(label) + 8
    return parts


def _path(line: Line, x: Scale, y: Scale) -> str:
    xs, ys = thin(line.x, line.y, _COLUMNS)
    places = zip(x.place(xs).tolist(), y.place(ys).tolist(), np.isfinite(ys), strict=True)
    d, pen, alone, dots = [], "M", None, []
    for px, py, finite in places:
        if not finite:
            # A stroke of no length has round ends: it shows a value between two gaps.
            d.append("h0" if alone else "")
            pen, alone = "M", None
            continue
        d.append(f"{pen}{px:.1f} {py:.1f}")
        alone = pen == "M"
        pen = "L"
        dots.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2"/>')
    d.append("h0" if alone else "")
    circles = "".join(dots) if len(dots) <= (_MANY if line.dots else _FEW) else ""
    return (
        f'<g class="line {line.style}" data-label="{escape(line.label)}">'
        f'<path d="{"".join(d)}"/>{circles}</g>'
    )


def _end_labels(labels: list[tuple[float, str, str]], left: float, y: Scale) -> list[str]:
    """Place labels beside the ends of their lines, moved apart where they would overlap."""
    labels, gap = sorted(labels), 13.0
    places: list[float] = []
    for at, _, _ in labels:
        places.append(max(at, places[-1] + gap) if places else at)
    limit = y.start + 4
    for i in reversed(range(len(places))):  # what was pushed below the axis comes back up
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    return [
        f'<text class="end {style}" x="{left}" y="{place + 4:.1f}">{escape(text)}</text>'
        for place, (_, text, style) in zip(places, labels, strict=True)
    ]


def _notes(lines: Sequence[Line], x: Scale, y: Scale) -> list[str]:
    """Mark values that the scale cannot show, and count them."""
    places: list[float] = []
    above = below = broken = 0
    for line in lines:
        finite = np.isfinite(line.y)
        over, under = finite & (line.y > y.high), finite & (line.y < y.low)
        # A mean has gaps of its own at the start; what is not finite shows in the values.
        lost = ~finite if line.style != "mean" else np.zeros(0, dtype=bool)
        above, below, broken = above + over.sum(), below + under.sum(), broken + lost.sum()
        places += x.place(line.x[lost]).tolist() if lost.any() else []
    d = "".join(
        f"M{at} {y.stop - 3}l6 6m-6 0l6 -6" for at in sorted({round(p) - 3 for p in places})
    )
    words = [(above, "above the scale"), (below, "below the scale"), (broken, "not finite")]
    text = ", ".join(f"{count} {word}" for count, word in words if count)
    parts = [f'<path class="broken" d="{d}"/>'] if d else []
    if text:
        parts.append(f'<text class="note" x="{x.stop}" y="12">{text}</text>')
    return parts


def _strips(lines: Sequence[Line], x: Scale, y: Scale) -> list[str]:
    """Cover the chart with strips whose titles tell the values under the pointer."""
    steps = np.unique(np.concatenate([np.zeros(0), *(line.x for line in lines)]))
    if len(steps) == 0:
        return []
    groups = np.array_split(steps, min(_STRIPS, len(steps)))
    starts = np.array([group[0] for group in groups])
    middles = x.place((starts[1:] + np.array([group[-1] for group in groups[:-1]])) / 2)
    edges = [x.start, *middles.tolist(), x.stop]
    texts: list[list[str]] = [[_steps(group)] for group in groups]
    for line in lines:
        owner = np.searchsorted(starts, line.x, side="right") - 1
        for g in np.unique(owner):
            texts[g].append(f"{line.label} {_values(line.y[owner == g])}")
    return [
        f'<rect class="strip" x="{left:.1f}" y="{y.stop}" width="{right - left:.1f}" '
        f'height="{y.start - y.stop}"><title>{escape(chr(10).join(text))}</title></rect>'
        for left, right, text in zip(edges[:-1], edges[1:], texts, strict=True)
    ]


def _steps(group: Array) -> str:
    first, last = f"{group[0]:.0f}", f"{group[-1]:.0f}"
    return f"step {first}" if len(group) == 1 else f"steps {first} to {last}"


def _values(values: Array) -> str:
    words = [
        write_number(float(v)) for v in (values[-1], np.fmin.reduce(values), np.fmax.reduce(values))
    ]
    return words[0] if len(values) == 1 or words[1] == words[2] else f"{words[1]} to {words[2]}"


def _describe(lines: Sequence[Line], chart: Chart) -> str:
    """Say in words what the chart shows, for those who cannot see it."""
    parts = []
    for line in lines:
        seen = line.y[np.isfinite(line.y)]
        if line.named and len(seen):
            first, last = write_number(float(seen[0])), write_number(float(seen[-1]))
            parts.append(f"{line.label} from {first} to {last}")
    return f"{chart.title}: {'; '.join(parts) or 'no data'}"
