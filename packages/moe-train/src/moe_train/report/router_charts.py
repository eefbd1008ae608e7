"""Charts of router health, and of what a step costs; those whose numbers a run has."""

from collections.abc import Callable, Sequence

import numpy as np

from moe_train.report.line_chart import Chart, Line
from moe_train.report.run_data import Array, RunData

_BUCKETS = 240
_VECTORS = (
    ("expert_requested", "experts, requested"),
    ("expert_kept", "experts, kept"),
    ("rank_requested", "ranks, requested"),
    ("rank_kept", "ranks, kept"),
)

Charts = dict[str, tuple[Chart, list[Line]]]


def router_charts(run: RunData, layer_lines: Callable[[str], list[Line]]) -> Charts:
    """Return charts of router health by name.

    Args:
        run: The run.
        layer_lines: Draws a number for each layer, a line a layer.
    """
    charts = {
        "vectors": (
            Chart(
                title="Largest to mean load, worst layer",
                unit="largest / mean",
                references=[("even", 1.0)],
            ),
            _over_layers(run, _VECTORS, _largest),
        ),
        "distance": (
            Chart(
                title="Balance score and distance from even",
                unit="mean over layers",
                references=[("even", 0.0)],
            ),
            _over_layers(
                run,
                (("score", "what the usual loss says"), ("distance", "what the load is")),
                _mean,
            ),
        ),
        "gerrymander": (
            Chart(title="Gerrymander index by layer", unit="fall of the score, rise of the load",
                  zero=True),
            layer_lines("gerrymander"),
        ),
        "deficit": (
            Chart(title="Entropy deficit of the load by layer", unit="nats", zero=True),
            layer_lines("entropy_deficit"),
        ),
        "lost": (
            Chart(title="Experts never selected, routes dropped", unit="of all layers", zero=True),
            _over_layers(run, (("never_selected", "never selected, experts"),), _total)
            + _over_layers(run, (("dropped", "dropped, fraction"),), _mean),
        ),
        "parts": (Chart(title="Time of a step by part", unit="seconds", zero=True), _parts(run)),
        "tflops": (
            Chart(title="Model FLOPs a second and device", unit="TFLOP/s", zero=True),
            _column(run, "tflops", "TFLOP/s"),
        ),
        "mfu": (
            Chart(title="Model FLOP utilisation", unit="fraction of the peak", zero=True),
            _column(run, "mfu", "MFU"),
        ),
        "memory": (
            Chart(title="Device memory, peak", unit="bytes", zero=True),
            _column(run, "memory_bytes", "allocated")
            + _column(run, "memory_reserved_bytes", "reserved", 1),
        ),
    }  # fmt: skip
    return {name: (chart, lines) for name, (chart, lines) in charts.items() if lines}


def _largest(values_BL: Array) -> Array:
    return values_BL.max(axis=1)


def _mean(values_BL: Array) -> Array:
    return values_BL.mean(axis=1)


def _total(values_BL: Array) -> Array:
    return values_BL.sum(axis=1)


def _over_layers(
    run: RunData, keys: Sequence[tuple[str, str]], reduce: Callable[[Array], Array]
) -> list[Line]:
    lines = []
    for i, (key, label) in enumerate(keys):
        steps, values_BL = run.per_layer(key, _BUCKETS)
        if values_BL.ndim == 2 and values_BL.size:
            lines.append(Line(label=label, x=steps, y=reduce(values_BL), style=f"s{i}"))
    return lines


def _column(run: RunData, key: str, label: str, style: int = 0) -> list[Line]:
    values = run.column(key)
    if not np.isfinite(values).any():
        return []
    return [Line(label=label, x=run.steps(), y=values, style=f"s{style}")]


def _parts(run: RunData) -> list[Line]:
    records = [r for r in run.train if isinstance(r.get("parts"), dict)]
    names = list(dict.fromkeys(name for record in records for name in record["parts"]))
    steps = np.array([record["step"] for record in records], dtype=float)
    return [
        Line(
            label=name,
            x=steps,
            y=np.array([float(record["parts"].get(name, np.nan)) for record in records]),
            style=f"s{i % 8}",
        )
        for i, name in enumerate(names)
    ]
